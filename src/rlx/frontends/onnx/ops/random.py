# SPDX-License-Identifier: Apache-2.0
"""Random numbers.

ONNX leaves the generator open: the numbers are Philox's, not those of another engine. A node's stream follows from the
name of its output, so other nodes may come and go. A node with an attribute `seed` follows from that and the number of
the run alone: nodes with equal seeds draw equal numbers.
"""

from __future__ import annotations

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.leaf import constant
from rlx.ops.movement import expand, reshape
from rlx.ops.random import bernoulli, dropout, multinomial, random_normal, random_uniform

_FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


def _key(call: Call) -> Value:
    seed = None
    if call.has("seed"):
        seed = int(np.float32(call.get_float("seed")).view(np.uint32))
    return call.control.rng(call.node, seed)


def _dtype(call: Call, default: DType) -> DType:
    dtype = call.get_dtype("dtype", default)
    if dtype not in _FLOATS:
        raise call.wrong(f"draws f16, bf16, f32 or f64, not {dtype}")
    return dtype


def _like(call: Call) -> tuple[tuple[Dim, ...], DType]:
    kind = call.type_of(0)
    if not call.has("dtype") and kind.dtype not in _FLOATS:
        raise call.wrong(f"the input is {kind}; without an attribute dtype it must be a float")
    return kind.shape, _dtype(call, kind.dtype)


@onnx_op("RandomUniform", "dtype high low seed shape")
def _random_uniform(call: Call) -> Mapped:
    return _uniform(call, call.get_ints("shape"), _dtype(call, DType.F32))


@onnx_op("RandomUniformLike", "dtype high low seed")
def _random_uniform_like(call: Call) -> Mapped:
    return _uniform(call, *_like(call))


def _uniform(call: Call, shape: tuple[Dim, ...], dtype: DType) -> Value:
    low, high = call.get_float("low", 0.0), call.get_float("high", 1.0)
    return random_uniform(_key(call), shape, low, high, dtype)


@onnx_op("RandomNormal", "dtype mean scale seed shape")
def _random_normal(call: Call) -> Mapped:
    return _normal(call, call.get_ints("shape"), _dtype(call, DType.F32))


@onnx_op("RandomNormalLike", "dtype mean scale seed")
def _random_normal_like(call: Call) -> Mapped:
    return _normal(call, *_like(call))


def _normal(call: Call, shape: tuple[Dim, ...], dtype: DType) -> Value:
    mean, scale = call.get_float("mean", 0.0), call.get_float("scale", 1.0)
    return random_normal(_key(call), shape, mean, scale, dtype)


@onnx_op("Bernoulli", "dtype seed")
def _bernoulli(call: Call) -> Mapped:
    p = call.value(0)
    return bernoulli(_key(call), p, call.get_dtype("dtype", p.type.dtype))


@onnx_op("Multinomial", "dtype sample_size seed")
def _multinomial(call: Call) -> Mapped:
    dtype = call.get_dtype("dtype", DType.I32)
    if dtype not in (DType.I32, DType.I64):
        raise call.wrong(f"gives i32 or i64, not {dtype}")
    return multinomial(_key(call), call.value(0), call.get_int("sample_size", 1), dtype)


@onnx_op("Dropout", "ratio seed", outputs=2)
def _dropout(call: Call) -> Mapped:
    """Before opset 12, and unless training_mode says otherwise: the input itself, and a mask of ones."""
    x, training = call.value(0), call.maybe(2)
    mask = DType.BOOL if call.opset >= 10 else x.type.dtype
    if training is not None:
        known = call.known_array(2)
        if known is None:
            return _dropout_if(call, reshape(training, ()))
        if known.reshape(-1)[0] and not _keeps_all(call):
            return dropout(_key(call), x, _ratio(call))
    return x, (expand(constant(1, mask), x.type.shape) if call.wants(1) else None)


def _dropout_if(call: Call, training: Value) -> Mapped:
    x = call.value(0)
    dropped, kept = dropout(_key(call), x, _ratio(call))
    everything = ew.logical_not(training)
    return ew.where(training, dropped, x), ew.logical_or(kept, everything)


def _ratio(call: Call) -> float | Value:
    ratio = call.maybe(1)
    return 0.5 if ratio is None else reshape(ratio, ())


def _keeps_all(call: Call) -> bool:
    ratio = call.known_array(1)
    return ratio is not None and ratio.reshape(-1)[0] == 0
