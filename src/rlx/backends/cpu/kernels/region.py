# SPDX-License-Identifier: Apache-2.0
"""Lowering of `Region`: operands become walks over the space, kernel forms do the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.backends.cpu.emit import is_emittable
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.check import launch_check
from rlx.backends.cpu.kernels.elementwise import launch_elementwise
from rlx.backends.cpu.kernels.move import launch_move
from rlx.backends.cpu.kernels.row_launch import launch_rows
from rlx.backends.cpu.kernels.space import (
    Access,
    broadcast_access,
    dense,
    dense_access,
    mapped_access,
)
from rlx.backends.cpu.lowering import lowering
from rlx.base.dims import Dim
from rlx.base.facts import Facts
from rlx.base.types import Shape, TensorType
from rlx.expr.body import Body
from rlx.ir.graph import Node, Value
from rlx.kernel.schedule import LoweringContext
from rlx.ops.region import Region

__all__ = ["lower_region"]


@lowering(Region)
def lower_region(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Emit a region as one kernel; False for arithmetic on complex numbers."""
    op = node.op
    assert isinstance(op, Region)
    if not (is_emittable(op.body) or _only_moves(op.body)):
        return False
    facts = ctx.program.facts
    shape = tuple(facts.canon(d) for d in op.shape)
    operands = [v for v in node.operands if v is not None]
    margins = _margins(op, operands, shape, facts)
    if margins:
        launch_check(ctx, isa, margins)
    reads = [_read(ctx, op, index, value) for index, value in enumerate(operands)]
    if op.row_axes:
        return _lower_rows(node, op, ctx, isa, shape, reads)
    writes = [dense_access(ctx.slot(r), r.type.dtype, shape) for r in node.results]
    if _only_moves(op.body) and len(reads) == len(writes) == 1:
        launch_move(ctx, isa, shape, reads[0], writes[0])
        return None
    launch_elementwise(
        ctx, isa, op.body, shape, reads, writes, inplace_pairs(ctx, shape, reads, writes)
    )
    return None


def _margins(op: Region, operands: Sequence[Value], shape: Shape, facts: Facts) -> list[Dim]:
    """Return what may not be negative, or an index map would read outside of its operand."""
    found: dict[Dim, None] = {}
    for index, value in enumerate(operands):
        mapped = op.map_of(index)
        if mapped is not None:
            kind = _canonical(facts, value.type)
            found.update(dict.fromkeys(mapped.margins(kind.shape, shape)))
    return list(found)


def _lower_rows(
    node: Node, op: Region, ctx: LoweringContext, isa: Isa, shape: Shape, reads: list[Access]
) -> None:
    types = tuple(v.type for v in node.operands if v is not None)
    uniform = op.body.uniform(op.uniform_inputs(types))
    full = [not uniform[r] for r in op.body.results]
    lead = shape[: len(shape) - op.row_axes]
    fixed = (0,) * op.row_axes
    writes = [
        dense_access(ctx.slot(r), r.type.dtype, shape)
        if is_full
        else Access(ctx.slot(r), r.type.dtype, (*dense(lead), *fixed))
        for r, is_full in zip(node.results, full, strict=True)
    ]
    pairs = inplace_pairs(
        ctx, shape, reads, [w for w, is_full in zip(writes, full, strict=True) if is_full]
    )
    launch_rows(ctx, isa, replace(op, shape=shape), reads, writes, full, pairs)


def _only_moves(body: Body) -> bool:
    one = len(body.inputs) == len(body.results) == 1
    return not body.instrs and (one or all(d.itemsize <= 8 for d in body.inputs))


def _canonical(facts: Facts, kind: TensorType) -> TensorType:
    return kind.with_shape([facts.canon(d) for d in kind.shape])


def _read(ctx: LoweringContext, op: Region, index: int, value: Value) -> Access:
    facts = ctx.program.facts
    slot, kind, index_map = ctx.slot(value), _canonical(facts, value.type), op.map_of(index)
    if index_map is not None:
        return mapped_access(slot, kind, index_map)
    return broadcast_access(slot, kind, len(op.shape), facts)


def root_slot(ctx: LoweringContext, slot: int) -> int:
    """Return the slot whose bytes a slot names (a view's root, through views of views)."""
    root = ctx.program.slots[slot].root
    return slot if root is None else root_slot(ctx, root)


def _same_walk(shape: Shape, a: Access, b: Access) -> bool:
    moving = [i for i, extent in enumerate(shape) if extent != 1]
    return a.offset == b.offset and all(a.strides[i] == b.strides[i] for i in moving)


def inplace_pairs(
    ctx: LoweringContext, shape: Shape, reads: Sequence[Access], writes: Sequence[Access]
) -> list[tuple[int, int]]:
    """Return the (operand, result) slots where each point reads only what it overwrites."""
    pairs: dict[tuple[int, int], None] = {}
    for write in writes:
        for read in reads:
            if read.dtype.itemsize != write.dtype.itemsize or not _same_walk(shape, read, write):
                continue
            root = root_slot(ctx, read.slot)
            others = [r for r in reads if root_slot(ctx, r.slot) == root]
            if all(r.slot == read.slot and _same_walk(shape, r, read) for r in others):
                pairs[read.slot, write.slot] = None
    return list(pairs)
