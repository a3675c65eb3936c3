# SPDX-License-Identifier: Apache-2.0
"""Lowering of reductions and softmax over axes that are not the last ones.

They are row regions over the space with those axes last, walked where the elements lie: nothing is
transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.emit import is_emittable
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.row_launch import launch_rows
from rlx.backends.cpu.kernels.space import Access, dense
from rlx.backends.cpu.lowering import lowering
from rlx.base.types import normalize_axes, normalize_axis
from rlx.ir.graph import Node
from rlx.kernel.schedule import LoweringContext
from rlx.ops.norm import LogSoftmax, Softmax
from rlx.ops.reduce import Reduce
from rlx.ops.region import Region

__all__ = ["lower_reduce", "lower_softmax"]


@lowering(Reduce)
def lower_reduce(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Emit the reduction; False where a region does not express it (integers through f64)."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, Reduce)
    assert x is not None
    axes, rank = normalize_axes(op.axes, x.type.rank), x.type.rank
    perm = (*(a for a in range(rank) if a not in axes), *axes)
    moved = x.type.with_shape(tuple(x.type.shape[a] for a in perm))
    region = Reduce(op.kind, tuple(range(rank - len(axes), rank)), True).region(moved)
    return _lower(node, ctx, isa, region, perm)


@lowering(Softmax, LogSoftmax)
def lower_softmax(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Emit it along its axis."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, (Softmax, LogSoftmax))
    assert x is not None
    rank = x.type.rank
    axis = normalize_axis(op.axis, rank)
    perm = (*(a for a in range(rank) if a != axis), axis)
    moved = x.type.with_shape(tuple(x.type.shape[a] for a in perm))
    return _lower(node, ctx, isa, type(op)(rank - 1).region(moved), perm)


def _lower(
    node: Node, ctx: LoweringContext, isa: Isa, region: Region | None, perm: Sequence[int]
) -> bool | None:
    """Emit a region over the axes in another order; the results keep the order of the operand."""
    x, result = node.operands[0], node.result
    assert x is not None
    if region is None or not region.row_axes or not is_emittable(region.body):
        return False
    strides = dense(x.type.shape)
    walk = tuple(strides[a] for a in perm)
    uniform = region.body.uniform([False])
    is_full = not uniform[region.body.results[0]]
    lead = region.shape[: len(region.shape) - region.row_axes]
    out = walk if is_full else (*dense(lead), *(0,) * region.row_axes)
    source, target = ctx.slot(x), ctx.slot(result)
    pairs = (
        [(source, target)]
        if is_full and x.type.dtype.itemsize == result.type.dtype.itemsize
        else []
    )
    reads = [Access(source, x.type.dtype, walk)]
    writes = [Access(target, result.type.dtype, out)]
    launch_rows(ctx, isa, region, reads, writes, [is_full], pairs)
    return None
