# SPDX-License-Identifier: Apache-2.0
"""Lowering of what places whole tensors inside others: Concat, Pad, Tile."""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.check import launch_check
from rlx.backends.cpu.kernels.elementwise import launch_elementwise, moves
from rlx.backends.cpu.kernels.move import launch_move
from rlx.backends.cpu.kernels.space import Access, dense, dense_access
from rlx.backends.cpu.lowering import lowering
from rlx.base.dims import Dim, dim_max, less_equal
from rlx.base.dtypes import DType
from rlx.base.types import Shape, normalize_axis
from rlx.expr.body import Body, BodyBuilder
from rlx.ir.graph import Node
from rlx.kernel.schedule import LoweringContext
from rlx.ops.movement import Concat, Pad, Tile

_UNSIGNED = {1: DType.U8, 2: DType.U16, 4: DType.U32, 8: DType.U64}
"""Zero of every dtype has all bits zero, so it is written as the integer of that size."""

__all__ = ["lower_concat", "lower_pad", "lower_tile"]


@lowering(Concat)
def lower_concat(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Move every operand into its part of the result."""
    op = node.op
    assert isinstance(op, Concat)
    kind, slot = node.result.type, ctx.slot(node.result)
    axis = normalize_axis(op.axis, kind.rank)
    strides = dense(kind.shape)
    at: Dim = 0
    for operand in node.operands:
        assert operand is not None
        shape = operand.type.shape
        if shape[axis] != 0 or kind.shape[axis] == 0:  # a result is written even where it is empty
            source = dense_access(ctx.slot(operand), kind.dtype, shape)
            launch_move(
                ctx, isa, shape, source, Access(slot, kind.dtype, strides, at * strides[axis])
            )
        at = at + shape[axis]


@lowering(Tile)
def lower_tile(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Read every axis as (repeat, index), the repeat with stride 0."""
    op, operand = node.op, node.operands[0]
    assert isinstance(op, Tile)
    assert operand is not None
    space: list[Dim] = []
    strides: list[Dim] = []
    inner = dense(operand.type.shape)
    for repeat, extent, stride in zip(op.repeats, operand.type.shape, inner, strict=True):
        space += [repeat, extent]
        strides += [0, stride]
    dtype = operand.type.dtype
    target = dense_access(ctx.slot(node.result), dtype, tuple(space))
    launch_move(ctx, isa, tuple(space), Access(ctx.slot(operand), dtype, tuple(strides)), target)


@lowering(Pad)
def lower_pad(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Move the operand into the middle, then fill axis by axis, the innermost first.

    When an axis is filled, the parts of all later axes exist already and are filled along with it,
    so corners need no case of their own. The parts are disjoint, and `edge`, `reflect` and `wrap`
    read only what was moved or filled; whether they reach further is checked first where it is not
    known.
    """
    op, x = node.op, node.operands[0]
    assert isinstance(op, Pad)
    assert x is not None
    value = node.operands[1] if len(node.operands) > 1 else None
    shape = x.type.shape
    margins = _unproven(op, shape) if op.mode != "constant" else []
    if margins:
        launch_check(ctx, isa, margins)
    slot, dtype = ctx.slot(node.result), x.type.dtype
    strides = dense(node.result.type.shape)
    middle: Dim = 0
    for before, stride in zip(op.before, strides, strict=True):
        middle = middle + before * stride
    launch_move(
        ctx,
        isa,
        shape,
        dense_access(ctx.slot(x), dtype, shape),
        Access(slot, dtype, strides, middle),
    )
    space = list(shape)
    start = middle
    for axis in reversed(range(len(shape))):
        before, extent, after = op.before[axis], shape[axis], op.after[axis]
        first = start - before * strides[axis]  # where the padding in front begins
        for at, count, front in ((0, before, True), (before + extent, after, False)):
            if count == 0:
                continue
            part = tuple(count if i == axis else d for i, d in enumerate(space))
            target = Access(slot, dtype, strides, first + at * strides[axis])
            if op.mode == "constant":
                _fill(ctx, isa, part, None if value is None else ctx.slot(value), target)
            else:
                begin, step = _source(op.mode, before, extent, after, front=front)
                moved = tuple(s * step if i == axis else s for i, s in enumerate(strides))
                source = Access(slot, dtype, moved, first + begin * strides[axis])
                launch_move(ctx, isa, part, source, target)
        space[axis] = before + extent + after
        start = first


def _source(mode: str, before: Dim, extent: Dim, after: Dim, *, front: bool) -> tuple[Dim, int]:
    """Return (index in the padded axis that the first padded element repeats, step to the next)."""
    if mode == "edge":
        return (before if front else before + extent - 1), 0
    if mode == "reflect":
        return (before * 2, -1) if front else (before + extent - 2, -1)
    return (extent, 1) if front else (before, 1)


def _unproven(op: Pad, shape: Shape) -> list[Dim]:
    """Return by how much the operand is longer than the padding needs, where that is not known."""
    margins: list[Dim] = []
    for before, extent, after in zip(op.before, shape, op.after, strict=True):
        for count in (before, after):
            if count == 0:
                continue
            least = {"edge": 1, "reflect": count + 1}.get(op.mode, count)
            if less_equal(least, extent) is not True:
                # Padding by 0 elements needs nothing.
                margins.append(dim_max(extent - least, 0 - count))
    return margins


def _fill(ctx: LoweringContext, isa: Isa, shape: Shape, value: int | None, target: Access) -> None:
    still = (0,) * len(shape)
    if value is None:
        if target.dtype.itemsize == 16:  # as pairs of words
            shape, strides = (*shape, 2), (*(s * 2 for s in target.strides), 1)
            target = Access(target.slot, DType.U64, strides, target.offset * 2)
        unsigned = _UNSIGNED[target.dtype.itemsize]
        target = replace(target, dtype=unsigned)
        launch_elementwise(ctx, isa, _zero(unsigned), shape, [], [target])
    else:
        launch_elementwise(
            ctx, isa, moves(target.dtype), shape, [Access(value, target.dtype, still)], [target]
        )


def _zero(dtype: DType) -> Body:
    """Return the body that writes 0."""
    builder = BodyBuilder(())
    return builder.finish(builder.const(0, dtype))
