# SPDX-License-Identifier: Apache-2.0
"""Reshaping, slicing, padding, joining."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.base.dims import (
    Dim,
    ceildiv,
    dim_max,
    dim_min,
    floordiv,
    less_equal,
    product,
)
from rlx.base.dtypes import DType
from rlx.base.errors import UndecidedError
from rlx.base.facts import current_facts
from rlx.base.types import normalize_axes, normalize_axis
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops import movement as mv
from rlx.ops.indexing import gather_elements
from rlx.ops.leaf import constant

__all__ = ["axes_of", "pad"]

_AS_GOOD_AS_ALL = 1 << 24
"""Exporters write numbers such as 10^9 for "to the end". From here on one guard makes it so; below,
the minimum of the number and the extent is carried."""
_PAD_MODES: tuple[mv.PadMode, ...] = ("constant", "reflect", "edge", "wrap")


@onnx_op("Reshape", "allowzero")
def _reshape(call: Call) -> Mapped:
    x = call.value(0)
    wanted = call.dims(1, "the shape")
    keep_zero = call.get_flag("allowzero")
    shape: list[Dim] = []
    for axis, dim in enumerate(wanted):
        if dim == 0 and not keep_zero:
            if axis >= x.type.rank:
                raise call.wrong(
                    f"the shape copies axis {axis} of an operand of rank {x.type.rank}"
                )
            shape.append(x.type.shape[axis])
        else:
            shape.append(dim)
    if -1 in wanted:
        at = wanted.index(-1)
        if wanted.count(-1) > 1:
            raise call.wrong(f"the shape {list(wanted)} leaves more than one extent open")
        shape[at] = _rest(call, x, [d for i, d in enumerate(shape) if i != at])
    return mv.reshape(x, tuple(shape))


def _rest(call: Call, x: Value, others: list[Dim]) -> Dim:
    """Return the extent that -1 stands for: the elements divided by the other extents."""
    mine = list(x.type.shape)
    for dim in list(others):  # equal factors cancel, so that symbols need no division
        if dim in mine and dim != 0:
            mine.remove(dim)
            others.remove(dim)
    total, divisor = product(mine), product(others)
    if divisor == 0:
        raise call.wrong("an extent of -1 beside an extent of 0 has no value")
    rest = floordiv(total, divisor)
    if isinstance(total, int) and isinstance(divisor, int) and total % divisor:
        raise call.wrong(f"{x.type} cannot be reshaped to {others} and one more extent")
    return rest


@onnx_op("Flatten", "axis")
def _flatten(call: Call) -> Mapped:
    return mv.flatten(call.value(0), call.get_int("axis", 1))


def axes_of(call: Call, index: int, since: int) -> tuple[int, ...] | None:
    """Return axes: an attribute before a version, an operand since; None where left out."""
    if call.opset < since:
        return call.get_ints("axes") if call.has("axes") else None
    return call.integers(index, "axes") if call.maybe(index) is not None else None


@onnx_op("Squeeze", "axes")
@onnx_op("Squeeze", since=13)
def _squeeze(call: Call) -> Mapped:
    x = call.value(0)
    axes = axes_of(call, 1, 13)
    if axes is None:
        axes = tuple(i for i, d in enumerate(x.type.shape) if _is_one(d))
    return mv.squeeze(x, normalize_axes(axes, x.type.rank))


def _is_one(dim: Dim) -> bool:
    """Return whether an extent is 1; for a symbol, as the hints say."""
    return current_facts().assume_equal(dim, 1, "Squeeze without axes")


@onnx_op("Unsqueeze", "axes")
@onnx_op("Unsqueeze", since=13)
def _unsqueeze(call: Call) -> Mapped:
    x = call.value(0)
    axes = axes_of(call, 1, 13)
    if axes is None:
        raise call.wrong("there are no axes")
    return mv.unsqueeze(x, normalize_axes(axes, x.type.rank + len(axes)))


@onnx_op("Transpose", "perm")
def _transpose(call: Call) -> Mapped:
    x = call.value(0)
    return mv.transpose(x, call.get_ints("perm", tuple(reversed(range(x.type.rank)))))


@onnx_op("Expand")
def _expand(call: Call) -> Mapped:
    """Broadcasting in both directions: an extent of 1 in the shape keeps the operand's."""
    x = call.value(0)
    wanted = call.dims(1, "the shape")
    lead = max(len(wanted), x.type.rank)
    mine = (1,) * (lead - x.type.rank) + x.type.shape
    asked = (1,) * (lead - len(wanted)) + wanted
    return mv.expand(
        x, tuple(own if want == 1 else want for own, want in zip(mine, asked, strict=True))
    )


@onnx_op("Concat", "axis")
def _concat(call: Call) -> Mapped:
    values = call.values()
    axis = normalize_axis(call.get_int("axis"), values[0].type.rank)
    return values[0] if len(values) == 1 else mv.concat(values, axis)


@onnx_op("Slice", "starts ends axes")
def _slice_attributes(call: Call) -> Mapped:
    starts, ends = call.get_ints("starts"), call.get_ints("ends")
    axes = call.get_ints("axes", tuple(range(len(starts))))
    return _slice_all(call, call.value(0), starts, ends, axes, (1,) * len(starts))


@onnx_op("Slice", since=10)
def _slice(call: Call) -> Mapped:
    starts = call.dims(1, "starts")
    ends = call.dims(2, "ends")
    axes = call.integers(3, "axes") if call.maybe(3) is not None else tuple(range(len(starts)))
    steps = call.integers(4, "steps") if call.maybe(4) is not None else (1,) * len(starts)
    return _slice_all(call, call.value(0), starts, ends, axes, steps)


def _slice_all(
    call: Call,
    x: Value,
    starts: Sequence[Dim],
    ends: Sequence[Dim],
    axes: Sequence[int],
    steps: Sequence[int],
) -> Value:
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise call.wrong("starts, ends, axes and steps have different lengths")
    begin: list[Dim] = [0] * x.type.rank
    sizes, strides = list(x.type.shape), [1] * x.type.rank
    for start, end, given, step in zip(starts, ends, axes, steps, strict=True):
        axis = normalize_axis(given, x.type.rank)
        if step == 0:
            raise call.wrong("a step is 0")
        begin[axis], sizes[axis] = _bounds(start, end, step, x.type.shape[axis])
        strides[axis] = step
    return mv.slice(x, tuple(begin), tuple(sizes), tuple(strides))


def _bounds(start: Dim, end: Dim, step: int, extent: Dim) -> tuple[Dim, Dim]:
    """Return (first index, number of elements) of a NumPy slice."""
    if step > 0:
        first = _clamped(start, extent, 0, extent)
        last = _clamped(end, extent, 0, extent)
        return first, dim_max(0, ceildiv(last - first, step))
    first = _clamped(start, extent, 0, extent - 1)
    last = _clamped(end, extent, -1, extent - 1)
    return first, dim_max(0, ceildiv(first - last, -step))


def _clamped(index: Dim, extent: Dim, low: Dim, high: Dim) -> Dim:
    if _is_negative(index):
        return dim_min(dim_max(index + extent, low), high)
    if isinstance(index, int) and index >= _AS_GOOD_AS_ALL and _is_within(extent, index):
        return high
    return dim_min(dim_max(index, low), high)


def _is_within(extent: Dim, limit: int) -> bool:
    """Return whether an extent is at most a limit; where neither symbols nor hints tell, False."""
    try:
        return current_facts().assume_less_equal(extent, limit, "end of a slice")
    except UndecidedError:
        return False


def _is_negative(index: Dim) -> bool:
    known = less_equal(0, index)
    if known is not None:
        return not known
    return not current_facts().assume_less_equal(0, index, "sign of a slice bound")


@onnx_op("Split", "axis split", outputs=1 << 20)
@onnx_op("Split", "axis", since=13, outputs=1 << 20)
@onnx_op("Split", "axis num_outputs", since=18, outputs=1 << 20)
def _split(call: Call) -> Mapped:
    x = call.value(0)
    axis = normalize_axis(call.get_int("axis", 0), x.type.rank)
    return mv.split(x, _split_sizes(call, x.type.shape[axis]), axis)


def _split_sizes(call: Call, extent: Dim) -> tuple[Dim, ...]:
    if call.has("split"):
        return call.get_ints("split")
    if call.maybe(1) is not None:
        return call.dims(1, "split")
    count = call.get_int("num_outputs", len(call.node.outputs))
    if call.opset < 18:
        if isinstance(extent, int) and extent % count:
            raise call.wrong(f"an extent of {extent} does not split into {count} equal parts")
        return (floordiv(extent, count),) * count
    size = ceildiv(extent, count)  # the last part is what is left
    return (*((size,) * (count - 1)), extent - size * (count - 1))


@onnx_op("Pad", "mode pads value")
def _pad_attributes(call: Call) -> Mapped:
    x = call.value(0)
    pads = call.get_ints("pads")
    mode = call.get_choice("mode", _PAD_MODES[:3], "constant")
    return pad(
        x,
        pads[: x.type.rank],
        pads[x.type.rank :],
        mode,
        constant(call.get_float("value", 0.0), x.type.dtype),
    )


@onnx_op("Pad", "mode", since=11)
def _pad(call: Call) -> Mapped:
    x = call.value(0)
    pads = call.dims(1, "pads")
    axes = call.integers(3, "axes") if call.maybe(3) is not None else tuple(range(x.type.rank))
    if len(pads) != 2 * len(axes):
        raise call.wrong(f"pads has {len(pads)} elements for {len(axes)} axes")
    before: list[Dim] = [0] * x.type.rank
    after: list[Dim] = [0] * x.type.rank
    for index, axis in enumerate(normalize_axis(a, x.type.rank) for a in axes):
        before[axis], after[axis] = pads[index], pads[index + len(axes)]
    value = call.maybe(2)
    if value is not None and value.type.rank:
        value = mv.reshape(value, ())
    return pad(x, before, after, call.get_choice("mode", _PAD_MODES, "constant"), value)


def pad(
    x: Value, before: Sequence[Dim], after: Sequence[Dim], mode: str, value: Value | None = None
) -> Value:
    """Return x with elements added at both ends of every axis; negative numbers remove some."""
    begin, end = tuple(dim_max(a, 0) for a in before), tuple(dim_max(b, 0) for b in after)
    # What is cut is a - max(a, 0), so that the extents of both steps add up to d + a + b.
    cut_begin = [a - grown for a, grown in zip(before, begin, strict=True)]
    cut_end = [b - grown for b, grown in zip(after, end, strict=True)]
    sizes = [d + a + b for d, a, b in zip(x.type.shape, cut_begin, cut_end, strict=True)]
    x = mv.slice(x, [-a for a in cut_begin], sizes)
    return mv.pad(x, begin, end, mode, value if mode == "constant" else None)


@onnx_op("Tile")
def _tile(call: Call) -> Mapped:
    return mv.tile(call.value(0), call.dims(1, "repeats"))


@onnx_op("DepthToSpace", "blocksize mode")
def _depth_to_space(call: Call) -> Mapped:
    mode = call.get_choice("mode", ("DCR", "CRD"), "DCR")
    return mv.depth_to_space(call.value(0), call.get_int("blocksize"), mode)


@onnx_op("SpaceToDepth", "blocksize mode")
def _space_to_depth(call: Call) -> Mapped:
    x, block = call.value(0), call.get_int("blocksize")
    if call.get_choice("mode", ("DCR", "CRD"), "DCR") == "DCR":
        return mv.space_to_depth(x, block)
    n, c, h, w = x.type.shape
    rows, columns = floordiv(h, block), floordiv(w, block)
    parts = mv.reshape(x, (n, c, rows, block, columns, block))
    return mv.reshape(
        mv.transpose(parts, (0, 1, 3, 5, 2, 4)), (n, c * block * block, rows, columns)
    )


@onnx_op("Trilu", "upper")
def _trilu(call: Call) -> Mapped:
    k = call.integer(1, "k") if call.maybe(1) is not None else 0
    return mv.trilu(call.value(0), call.get_flag("upper", default=True), k)


@onnx_op("CenterCropPad", "axes")
def _center_crop_pad(call: Call) -> Mapped:
    """Crop or pad axes to the given extents, evenly at both ends (the odd element at the end)."""
    x = call.value(0)
    wanted = call.dims(1, "the shape")
    axes = call.get_ints("axes", tuple(range(x.type.rank)))
    before: list[Dim] = [0] * x.type.rank
    after: list[Dim] = [0] * x.type.rank
    for want, given in zip(wanted, axes, strict=True):
        axis = normalize_axis(given, x.type.rank)
        have = x.type.shape[axis]
        grow, shrink = dim_max(want - have, 0), dim_max(have - want, 0)
        before[axis] = floordiv(grow, 2) - floordiv(shrink, 2)
        after[axis] = ceildiv(grow, 2) - ceildiv(shrink, 2)
    return pad(x, before, after, "constant")


@onnx_op("ReverseSequence", "batch_axis time_axis")
def _reverse_sequence(call: Call) -> Mapped:
    """Reverse the first `lens[b]` elements of every sequence b: a gather at computed positions."""
    x, lens = call.value(0), call.value(1)
    batch, time = call.get_int("batch_axis", 1), call.get_int("time_axis", 0)
    rank, steps = x.type.rank, x.type.shape[time]
    line = mv.arange(steps)
    position = mv.reshape(line, tuple(steps if a == time else 1 for a in range(rank)))
    length = mv.reshape(lens, tuple(x.type.shape[batch] if a == batch else 1 for a in range(rank)))
    mirrored = ew.sub(ew.sub(length, constant(1, DType.I64)), position)
    index = ew.where(ew.less(position, length), mirrored, position)
    return gather_elements(x, mv.expand(index, x.type.shape), time)
