# SPDX-License-Identifier: Apache-2.0
"""Lowering of `WriteRows`: runs of rows are copied to where a position says, over a copy of x or over x itself.

Data moves in its storage form, so one kernel serves all dtypes of one size. A position that is out of range is recorded
with its index and its rows are not written.
"""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.abi import Emitted, Failure, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import load_value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.copy import copy_bytes
from rlx.backends.cpu.kernels.indexing import copy_elements, rows_per_chunk, split
from rlx.backends.cpu.lowering import lowering
from rlx.backends.cpu.vconvert import cast
from rlx.base.dims import ceildiv, dim_max, product
from rlx.base.dtypes import DType
from rlx.base.types import normalize_axis
from rlx.ir.graph import Node
from rlx.kernel.program import DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.state import WriteRows

__all__ = ["lower_write_rows"]


@cache
def _kernel(isa: Isa, index: DType, itemsize: int, ring: bool) -> Emitted:
    """Arguments: rows [outer, count, inner], positions, y [outer, capacity, inner] (holding x already).

    Then the number of positions, entries of outer per position, capacity, count, inner, total = outer * count, and rows
    per chunk. The first chunk checks all positions, also those that no element is written at.
    """
    module = Module(isa)
    check = _in_ring if ring else _in_range
    with module.kernel("write_rows", 10) as k:
        rows, positions, y = (k.slot(i) for i in range(3))
        starts, per, capacity, count, inner, total, grain = (k.dim(i) for i in range(3, 10))
        with k.if_(k.begin.eq(0) & (count > 0)), k.loop(0, starts) as each:
            position = cast(k, load_value(k, index, positions, each.index, 0), index, DType.I64)
            _, bad = check(k, position, capacity, count)
            with k.if_(bad):
                k.fail(Failure.INDEX_OUT_OF_RANGE, each.index)
            each.next()
        stop = k.smin(k.end * grain, total)
        with k.while_([k.begin * grain]) as loop:
            (at,) = loop.carry
            loop.test(at < stop)
            outer, row = split(k, at, count)
            entry, _ = split(k, outer, per)
            position = cast(k, load_value(k, index, positions, entry, 0), index, DType.I64)
            start, bad = check(k, position, capacity, count)
            length = k.smin(stop - at, count - row)
            place, wanted = start + row, ~bad
            if ring:
                _, place = split(k, place, k.smax(capacity, 1))
                length = k.smin(length, k.smax(capacity - place, 1))
                early = count - capacity - row  # of more rows than fit the last ones stay
                wanted = wanted & (early <= 0)
                length = k.select(early > 0, k.smin(length, early), length)
            with k.if_(wanted):
                target = k.offset(y, (outer * capacity + place) * inner * itemsize)
                source = k.offset(rows, at * inner * itemsize)
                copy_elements(k, target, source, length * inner, itemsize)
            loop.next(at + length)
    return finish(module)


def _in_range(k: Kernel, position: Value, capacity: Value, count: Value) -> tuple[Value, Value]:
    """Return the first row counted from the front, and whether the rows do not fit."""
    start = k.select(position < 0, position + capacity, position)
    return start, (start < 0) | (start > capacity - count)


def _in_ring(k: Kernel, position: Value, capacity: Value, count: Value) -> tuple[Value, Value]:
    """Return the first row modulo the capacity, and whether there is none."""
    del count
    rest, empty = k.divide_nonzero("srem", position, capacity)
    return k.select(rest < 0, rest + capacity, rest), empty


@lowering(WriteRows)
def lower_write_rows(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Copy x unless it becomes y where it lies, then write the rows."""
    op = node.op
    assert isinstance(op, WriteRows)
    x, rows, position = node.operands
    assert x is not None
    assert rows is not None
    assert position is not None
    shape, axis = x.type.shape, normalize_axis(op.axis, x.type.rank)
    y = ctx.slot(node.result)
    copy_bytes(ctx, isa, ctx.slot(x), y, x.type.nbytes, inplace=True)
    count, inner = rows.type.shape[axis], product(shape[axis + 1 :])
    total = product(shape[:axis]) * count
    itemsize = x.type.dtype.itemsize
    grain = rows_per_chunk(inner, itemsize)
    starts = position.type.elements
    per = product(shape[1:axis]) if position.type.rank else product(shape[:axis])
    args = [SlotArg(ctx.slot(rows)), SlotArg(ctx.slot(position)), SlotArg(y, writes=True)]
    ctx.launch(
        _kernel(isa, position.type.dtype, itemsize, op.ring),
        [*args, *map(DimArg, (starts, per, shape[axis], count, inner, total, grain))],
        chunks=dim_max(1, ceildiv(total, grain)),
        may_fail=True,
    )
