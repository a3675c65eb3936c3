# SPDX-License-Identifier: Apache-2.0
"""Softmax and the normalisations."""

from __future__ import annotations

from collections.abc import Callable

from rlx.base.dims import Dim, floordiv, product
from rlx.base.dtypes import DType
from rlx.base.types import normalize_axis
from rlx.frontends.onnx.ops.elementwise import scalar
from rlx.frontends.onnx.ops.movement import pad
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops import norm
from rlx.ops.movement import arange, expand, reshape, slice_axis
from rlx.ops.reduce import ArgReduce, reduce_mean, reduce_sum
from rlx.ops.spec import emit_one


def _hardmax(x: Value, axis: int) -> Value:
    """1 at the first maximum along the axis, else 0."""
    best = emit_one(ArgReduce("max", axis, True, False), x)
    line = arange(x.type.shape[axis])
    index = reshape(line, tuple(d if i == axis else 1 for i, d in enumerate(x.type.shape)))
    return ew.cast(ew.equal(index, best), x.type.dtype)


def _softmax(x: Value, axis: int) -> Value:
    return emit_one(norm.Softmax(axis), x)


def _log_softmax(x: Value, axis: int) -> Value:
    return emit_one(norm.LogSoftmax(axis), x)


def _declare(name: str, function: Callable[[Value, int], Value]) -> None:
    @onnx_op(name, "axis")
    def flattened(call: Call) -> Mapped:
        """Until version 12: over all axes from `axis` on together."""
        x = call.value(0)
        axis = normalize_axis(call.get_int("axis", 1), x.type.rank)
        shape = x.type.shape
        if all(d == 1 for d in shape[axis + 1 :]):
            return function(x, axis)
        return reshape(function(reshape(x, (*shape[:axis], product(shape[axis:]))), axis), shape)

    @onnx_op(name, "axis", since=13)
    def along(call: Call) -> Mapped:
        x = call.value(0)
        return function(x, normalize_axis(call.get_int("axis", -1), x.type.rank))


_declare("Softmax", _softmax)
_declare("LogSoftmax", _log_softmax)
_declare("Hardmax", _hardmax)


@onnx_op("LayerNormalization", "axis epsilon", only={"stash_type": (1,)}, outputs=3)
def _layer_norm(call: Call) -> Mapped:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the axes from `axis` on."""
    x = call.value(0)
    axis, epsilon = (
        normalize_axis(call.get_int("axis", -1), x.type.rank),
        call.get_float("epsilon", 1e-5),
    )
    y = emit_one(norm.LayerNorm(axis, epsilon), x, call.maybe(1), call.maybe(2))
    if not (call.wants(1) or call.wants(2)):
        return y
    axes = tuple(range(axis, x.type.rank))
    wide = ew.cast(x, DType.F32)
    mean = reduce_mean(wide, axes, True)
    centred = ew.sub(wide, mean)
    variance = reduce_mean(ew.mul(centred, centred), axes, True)
    return y, mean, ew.reciprocal(ew.sqrt(ew.add(variance, scalar(epsilon, wide))))


@onnx_op("RMSNormalization", "axis epsilon", only={"stash_type": (1,)})
def _rms_norm(call: Call) -> Mapped:
    x = call.value(0)
    axis = normalize_axis(call.get_int("axis", -1), x.type.rank)
    return emit_one(norm.RmsNorm(axis, call.get_float("epsilon", 1e-5)), x, call.maybe(1))


@onnx_op("InstanceNormalization", "epsilon")
def _instance_norm(call: Call) -> Mapped:
    op = norm.InstanceNorm(call.get_float("epsilon", 1e-5))
    return emit_one(op, call.value(0), call.value(1), call.value(2))


@onnx_op("GroupNormalization", "epsilon num_groups", since=18)
@onnx_op("GroupNormalization", "epsilon num_groups", only={"stash_type": (1,)}, since=21)
def _group_norm(call: Call) -> Mapped:
    """Until version 20, scale and bias were given per group instead of per channel."""
    x, groups = call.value(0), call.get_int("num_groups")
    scale, bias = call.value(1), call.value(2)
    if call.opset < 21:
        scale, bias = (_per_channel(v, floordiv(x.type.shape[1], groups)) for v in (scale, bias))
    return emit_one(norm.GroupNorm(groups, call.get_float("epsilon", 1e-5)), x, scale, bias)


def _per_channel(value: Value, repeats: Dim) -> Value:
    groups = value.type.shape[0]
    return reshape(expand(reshape(value, (groups, 1)), (groups, repeats)), (groups * repeats,))


@onnx_op("BatchNormalization", "epsilon momentum", only={"spatial": (1,)})
@onnx_op("BatchNormalization", "epsilon momentum", since=9)
@onnx_op("BatchNormalization", "epsilon momentum", only={"training_mode": (0,)}, since=14)
def _batch_norm(call: Call) -> Mapped:
    """Inference: with the given statistics (momentum only matters in training)."""
    x, *factors = (call.value(i) for i in range(5))
    # A half-precision input may come with f32 statistics; the result has the input's dtype.
    wide = factors[-1].type.dtype
    mixed = any(f.type.dtype is not x.type.dtype for f in factors)
    if mixed:
        wide = max((v.type.dtype for v in (x, *factors)), key=lambda d: d.itemsize)
        x, factors = ew.cast(x, wide), [ew.cast(f, wide) for f in factors]
    y = emit_one(norm.BatchNorm(call.get_float("epsilon", 1e-5)), x, *factors)
    return ew.cast(y, call.type_of(0).dtype) if mixed else y


@onnx_op("LpNormalization", "axis p")
def _lp_normalization(call: Call) -> Mapped:
    """x divided by its norm along the axis; zeros where the norm is 0."""
    x, p = call.value(0), call.get_int("p", 2)
    axis = normalize_axis(call.get_int("axis", -1), x.type.rank)
    if p not in (1, 2):
        raise call.refuse(f"p is {p}; only 1 and 2 are defined")
    total = reduce_sum(ew.abs(x) if p == 1 else ew.mul(x, x), (axis,), True)
    length = total if p == 1 else ew.sqrt(total)
    zero = scalar(0, x)
    return ew.where(ew.equal(length, zero), zero, ew.div(x, length))


@onnx_op("MeanVarianceNormalization", "axes")
def _mean_variance(call: Call) -> Mapped:
    """(x - mean) / (standard deviation + 1e-9)."""
    x = call.value(0)
    axes = tuple(sorted(normalize_axis(a, x.type.rank) for a in call.get_ints("axes", (0, 2, 3))))
    centred = ew.sub(x, reduce_mean(x, axes, True))
    deviation = ew.sqrt(reduce_mean(ew.mul(centred, centred), axes, True))
    return ew.div(centred, ew.add(deviation, scalar(1e-9, x)))


@onnx_op("LRN", "alpha beta bias size")
def _lrn(call: Call) -> Mapped:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ^ beta."""
    x, size = call.value(0), call.get_int("size")
    before = (size - 1) // 2
    edges = [0] * x.type.rank
    first, last = list(edges), list(edges)
    first[1], last[1] = before, size - 1 - before
    padded = pad(ew.mul(x, x), first, last, "constant")
    total = slice_axis(padded, 1, 0, x.type.shape[1])
    for offset in range(1, size):
        total = ew.add(total, slice_axis(padded, 1, offset, x.type.shape[1]))
    factor = scalar(call.get_float("alpha", 1e-4) / size, x)
    base = ew.add(scalar(call.get_float("bias", 1.0), x), ew.mul(factor, total))
    return ew.div(x, ew.pow(base, scalar(call.get_float("beta", 0.75), x)))
