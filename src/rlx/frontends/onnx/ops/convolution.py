# SPDX-License-Identifier: Apache-2.0
"""Convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rlx.base.dims import Dim, ceildiv, dim_max, dim_min, floordiv
from rlx.frontends.onnx.ops.elementwise import scalar
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.pool import Pool
from rlx.ops.reduce import Reduce, reduce_mean
from rlx.ops.spec import emit_one

__all__ = ["Pads", "convolution"]

Pads = tuple[tuple[Dim, Dim], ...]
_AUTO = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


def _spatial(call: Call, name: str, rank: int, default: int) -> tuple[int, ...]:
    found = call.get_ints(name, (default,) * rank)
    if len(found) != rank:
        raise call.wrong(f"attribute {name!r} has {len(found)} elements for {rank} spatial axes")
    return found


def _static(call: Call, extents: Sequence[Dim], what: str) -> tuple[int, ...]:
    for extent in extents:
        if not isinstance(extent, int):
            raise call.refuse(f"{what} has the symbolic extent {extent}")
    return tuple(int(e) for e in extents)


def _pads(
    call: Call,
    extents: Sequence[Dim],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Pads:
    """Return the padding before and after each spatial axis, from `pads` or `auto_pad`."""
    rank = len(kernel)
    auto = call.get_choice("auto_pad", _AUTO, "NOTSET")
    if auto == "NOTSET":
        given = call.get_ints("pads", (0,) * (2 * rank))
        if len(given) != 2 * rank:
            raise call.wrong(f"attribute 'pads' has {len(given)} elements for {rank} spatial axes")
        return tuple(zip(given[:rank], given[rank:], strict=True))
    if auto == "VALID":
        return ((0, 0),) * rank
    pairs: list[tuple[Dim, Dim]] = []
    for extent, k, stride, dilation in zip(extents, kernel, strides, dilations, strict=True):
        covered = (ceildiv(extent, stride) - 1) * stride + (k - 1) * dilation + 1
        total = dim_max(covered - extent, 0)
        small, large = floordiv(total, 2), ceildiv(total, 2)
        pairs.append((small, large) if auto == "SAME_UPPER" else (large, small))
    return tuple(pairs)


_CONV = "auto_pad dilations group kernel_shape pads strides"


@onnx_op("Conv", _CONV)
def _conv(call: Call) -> Mapped:
    x, w = call.value(0), call.value(1)
    return emit_one(convolution(call, x, w), x, w, call.maybe(2))


def convolution(call: Call, x: Value, w: Value) -> Conv:
    """Return the convolution of x [N, C, *spatial] with w that the attributes of the node describe."""
    rank = x.type.rank - 2
    if rank < 1 or w.type.rank != x.type.rank:
        raise call.wrong(
            f"the operands are {x.type} and {w.type}; both need one batch or filter axis, channels "
            "and space"
        )
    kernel = _static(call, w.type.shape[2:], "the kernel")
    if call.has("kernel_shape") and call.get_ints("kernel_shape") != kernel:
        raise call.wrong(
            f"kernel_shape is {call.get_ints('kernel_shape')}, but the weights are {w.type}"
        )
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    pads = _pads(call, x.type.shape[2:], kernel, strides, dilations)
    return Conv(strides, dilations, pads, call.get_int("group", 1))


@onnx_op("ConvTranspose", _CONV + " output_padding output_shape")
def _conv_transpose(call: Call) -> Mapped:
    x, w = call.value(0), call.value(1)
    rank = x.type.rank - 2
    kernel = _static(call, w.type.shape[2:], "the kernel")
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    extra = _spatial(call, "output_padding", rank, 0)
    pads = _transposed_pads(call, x.type.shape[2:], kernel, strides, dilations, extra)
    op = ConvTranspose(strides, dilations, pads, extra, call.get_int("group", 1))
    return emit_one(op, x, w, call.maybe(2))


def _transposed_pads(
    call: Call,
    extents: Sequence[Dim],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    extra: Sequence[int],
) -> Pads:
    """Return what is cut off the full result at both ends of each axis."""
    auto = call.get_choice("auto_pad", _AUTO, "NOTSET")
    rank = len(kernel)
    if auto in ("NOTSET", "VALID") and not call.has("output_shape"):
        return _pads(call, extents, kernel, strides, dilations)
    given = call.get_ints("output_shape") if call.has("output_shape") else ()
    wanted: list[Dim] = (
        list(given[-rank:]) if given else [e * s for e, s in zip(extents, strides, strict=True)]
    )
    pairs: list[tuple[Dim, Dim]] = []
    for axis in range(rank):
        full = (
            strides[axis] * (extents[axis] - 1)
            + extra[axis]
            + (kernel[axis] - 1) * dilations[axis]
            + 1
        )
        total = full - wanted[axis]
        small = floordiv(total, 2)
        pairs.append((small, total - small) if auto == "SAME_UPPER" else (total - small, small))
    return tuple(pairs)


def _window(
    call: Call, x: Value
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Pads, tuple[Dim, ...]]:
    """Return (kernel, strides, dilations, pads, output extents) of a pooling node."""
    rank = x.type.rank - 2
    kernel = _spatial(call, "kernel_shape", rank, 0)
    strides, dilations = _spatial(call, "strides", rank, 1), _spatial(call, "dilations", rank, 1)
    pads = _pads(call, x.type.shape[2:], kernel, strides, dilations)
    up = call.get_flag("ceil_mode")
    out: list[Dim] = []
    for axis, extent in enumerate(x.type.shape[2:]):
        before, after = pads[axis]
        room = extent + before + after - ((kernel[axis] - 1) * dilations[axis] + 1)
        if up:  # but no window may start in the padding at the end
            last = dim_min(
                ceildiv(room, strides[axis]), floordiv(extent + before - 1, strides[axis])
            )
            out.append(last + 1)
        else:
            out.append(floordiv(room, strides[axis]) + 1)
    return kernel, strides, dilations, pads, tuple(out)


_POOL = "auto_pad ceil_mode dilations kernel_shape pads strides"


@onnx_op("MaxPool", _POOL, only={"storage_order": (0,)})
def _max_pool(call: Call) -> Mapped:
    x = call.value(0)
    kernel, strides, dilations, pads, out = _window(call, x)
    return emit_one(Pool("max", kernel, strides, dilations, pads, out, False), x)


@onnx_op("AveragePool", _POOL + " count_include_pad")
def _average_pool(call: Call) -> Mapped:
    x = call.value(0)
    kernel, strides, dilations, pads, out = _window(call, x)
    return emit_one(
        Pool("avg", kernel, strides, dilations, pads, out, call.get_flag("count_include_pad")), x
    )


@onnx_op("LpPool", _POOL + " p")
def _lp_pool(call: Call) -> Mapped:
    """(sum over the window of |x|^p)^(1/p), as the mean times the size of the window."""
    x, p = call.value(0), call.get_int("p", 2)
    kernel, strides, dilations, pads, out = _window(call, x)
    if call.get_flag("ceil_mode"):
        raise call.refuse("ceil_mode is 1")
    powers = ew.pow(ew.abs(x), scalar(p, x))
    mean = emit_one(Pool("avg", kernel, strides, dilations, pads, out, True), powers)
    return ew.pow(ew.mul(mean, scalar(prod(kernel), x)), scalar(1.0 / p, x))


def _space(x: Value) -> tuple[int, ...]:
    return tuple(range(2, x.type.rank))


@onnx_op("GlobalAveragePool")
def _global_average_pool(call: Call) -> Mapped:
    return reduce_mean(call.value(0), _space(call.value(0)), True)


@onnx_op("GlobalMaxPool")
def _global_max_pool(call: Call) -> Mapped:
    x = call.value(0)
    return emit_one(Reduce("max", _space(x), True), x)


@onnx_op("GlobalLpPool", "p")
def _global_lp_pool(call: Call) -> Mapped:
    x, p = call.value(0), call.get_int("p", 2)
    if p in (1, 2):
        return emit_one(Reduce(f"l{p}", _space(x), True), x)
    total = emit_one(Reduce("sum", _space(x), True), ew.pow(ew.abs(x), scalar(p, x)))
    return ew.pow(total, scalar(1.0 / p, x))
