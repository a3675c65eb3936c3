# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter: data moves by indices, in its storage form, whatever its dtype.

Negative indices count from the end. An index out of range is recorded with the flat position of the index and the
access goes to element 0 instead, so memory stays safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rlx.backends.cpu.abi import Emitted, Failure, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import load_value, memory_type, store_value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.lltypes import I64, int_type
from rlx.backends.cpu.lowering import lowering
from rlx.backends.cpu.vconvert import cast as cast_value
from rlx.base.dims import Dim, ceildiv, dim_max, product
from rlx.base.dtypes import DType
from rlx.base.types import normalize_axis
from rlx.ir.graph import Node
from rlx.kernel.program import DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.indexing import Gather, GatherElements, GatherND, ScatterElements, ScatterND

__all__ = ["copy_elements", "rows_per_chunk", "split"]

_BYTES_PER_CHUNK = 1 << 16


def _index(k: Kernel, dtype: DType, pointer: Value, at: Value, extent: Value) -> Value:
    """Load an index, count negative ones from the end, and record one that is out of range."""
    raw = cast_value(k, load_value(k, dtype, pointer, at, 0), dtype, DType.I64)
    index = k.select(raw < 0, raw + extent, raw)
    outside = ~index.ult(extent)
    with k.if_(outside):
        k.fail(Failure.INDEX_OUT_OF_RANGE, at)
    return k.select(outside, k.i64(0), index)


def _udiv(k: Kernel, a: Value, b: Value) -> Value:
    """Divide positions: never negative, and there is work only where the divisor is at least 1."""
    return k.emit(I64, f"udiv i64 {a.text}, {b.text}")


def split(k: Kernel, value: Value, by: Value) -> tuple[Value, Value]:
    """Return quotient and remainder of a position."""
    quotient = _udiv(k, value, by)
    return quotient, value - quotient * by


def copy_elements(k: Kernel, target: Value, source: Value, elements: Value, itemsize: int) -> None:
    """Copy elements that do not overlap: one by one when there are few, else by memcpy."""
    kind = int_type(8 * itemsize)
    few = elements < 16
    with k.if_(few), k.loop(0, elements) as loop:
        at = loop.index * itemsize
        k.store(k.load(kind, k.offset(source, at)), k.offset(target, at))
        loop.next()
    with k.if_(~few):
        k.memcpy(target, source, elements * itemsize)


@cache
def _gather_kernel(isa: Isa, index: DType, itemsize: int) -> Emitted:
    """Arguments: x [outer, extent, inner], indices [count], y [outer, count, inner]; extent, count, inner, total, rows.

    A chunk is `rows` of the `total` = outer * count rows of y.
    """
    module = Module(isa)
    with module.kernel("gather", 8) as k:
        x, indices, y = (k.slot(i) for i in range(3))
        extent, count, inner, total, rows = (k.dim(i) for i in range(3, 8))
        with k.loop(k.begin * rows, k.smin(k.end * rows, total)) as loop:
            outer, position = split(k, loop.index, count)
            at = _index(k, index, indices, position, extent)
            source = k.offset(x, (outer * extent + at) * inner * itemsize)
            target = k.offset(y, loop.index * inner * itemsize)
            # With no element to take from, a recorded failure must not read either.
            with k.if_(extent > 0):
                copy_elements(k, target, source, inner, itemsize)
            loop.next()
    return finish(module)


@lowering(Gather)
def lower_gather(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Rows of the inner extents are copied."""
    op = node.op
    assert isinstance(op, Gather)
    x, indices = node.operands
    assert x is not None
    assert indices is not None
    axis = normalize_axis(op.axis, x.type.rank)
    inner = product(x.type.shape[axis + 1 :])
    count = indices.type.elements
    total = product(x.type.shape[:axis]) * count
    itemsize = x.type.dtype.itemsize
    rows = rows_per_chunk(inner, itemsize)
    ctx.launch(
        _gather_kernel(isa, indices.type.dtype, itemsize),
        [
            *(SlotArg(ctx.slot(v)) for v in (x, indices)),
            SlotArg(ctx.slot(node.result), writes=True),
            *(DimArg(d) for d in (x.type.shape[axis], count, inner, total, rows)),
        ],
        chunks=ceildiv(total, rows),
        may_fail=True,
    )


def rows_per_chunk(inner: Dim, itemsize: int) -> Dim:
    """Return how many rows of `inner` elements make a chunk worth handing to another thread."""
    if isinstance(inner, int):
        return max(1, _BYTES_PER_CHUNK // max(inner * itemsize, 1))
    return dim_max(1, _BYTES_PER_CHUNK // dim_max(inner * itemsize, 1))


@cache
def _elements_kernel(isa: Isa, index: DType, itemsize: int, rank: int, axis: int) -> Emitted:
    """Arguments: x, indices, y; then the extents of x, the extents of the indices, and elements per chunk."""
    module = Module(isa)
    kind = int_type(8 * itemsize)
    with module.kernel("gather_elements", 3 + 2 * rank + 2) as k:
        x, indices, y = (k.slot(i) for i in range(3))
        data = [k.dim(3 + i) for i in range(rank)]
        space = [k.dim(3 + rank + i) for i in range(rank)]
        total, grain = k.dim(3 + 2 * rank), k.dim(4 + 2 * rank)
        with k.loop(k.begin * grain, k.smin(k.end * grain, total)) as loop:
            at = _element_offset(
                k, loop.index, data, space, axis, _index(k, index, indices, loop.index, data[axis])
            )
            with k.if_(data[axis] > 0):
                k.store(k.load(kind, x, at), y, loop.index)
            loop.next()
    return finish(module)


def _element_offset(
    k: Kernel, flat: Value, data: list[Value], space: list[Value], axis: int, chosen: Value
) -> Value:
    """Return the offset in x of the position that a flat index of the index space names."""
    rest, offset, stride = flat, k.i64(0), k.i64(1)
    for i in range(len(space) - 1, -1, -1):
        rest, position = split(k, rest, space[i])
        offset = offset + (chosen if i == axis else position) * stride
        stride = stride * data[i]
    return offset


@lowering(GatherElements)
def lower_gather_elements(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """One element at a time."""
    op = node.op
    assert isinstance(op, GatherElements)
    x, indices = node.operands
    assert x is not None
    assert indices is not None
    rank = x.type.rank
    kernel = _elements_kernel(
        isa, indices.type.dtype, x.type.dtype.itemsize, rank, normalize_axis(op.axis, rank)
    )
    total = indices.type.elements
    ctx.launch(
        kernel,
        [
            *(SlotArg(ctx.slot(v)) for v in (x, indices)),
            SlotArg(ctx.slot(node.result), writes=True),
            *(DimArg(d) for d in (*x.type.shape, *indices.type.shape, total, 4096)),
        ],
        chunks=ceildiv(total, 4096),
        may_fail=True,
    )


@cache
def _gather_nd_kernel(isa: Isa, index: DType, itemsize: int, named: int) -> Emitted:
    """Gather blocks of the innermost extents.

    Arguments: x [batch, *extents, inner], indices [batch, count, named], y [batch, count, inner]; extents..., then
    count, inner, total rows, rows per chunk.
    """
    module = Module(isa)
    with module.kernel("gather_nd", 3 + named + 4) as k:
        x, indices, y = (k.slot(i) for i in range(3))
        extents = [k.dim(3 + i) for i in range(named)]
        count, inner, total, rows = (k.dim(3 + named + i) for i in range(4))
        with k.loop(k.begin * rows, k.smin(k.end * rows, total)) as loop:
            batch, _ = split(k, loop.index, count)
            source = batch
            nonempty = inner >= 0
            for i, extent in enumerate(extents):
                source = source * extent + _index(k, index, indices, loop.index * named + i, extent)
                nonempty = nonempty & (extent > 0)
            with k.if_(nonempty):
                target = k.offset(y, loop.index * inner * itemsize)
                copy_elements(k, target, k.offset(x, source * inner * itemsize), inner, itemsize)
            loop.next()
    return finish(module)


@lowering(GatherND)
def lower_gather_nd(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Blocks of the extents that the indices do not name are copied."""
    op = node.op
    assert isinstance(op, GatherND)
    x, indices = node.operands
    assert x is not None
    assert indices is not None
    named, first = indices.type.shape[-1], op.batch_dims
    assert isinstance(named, int)
    inner = product(x.type.shape[first + named :])
    total = product(indices.type.shape[:-1])
    count = product(indices.type.shape[first:-1])
    itemsize = x.type.dtype.itemsize
    rows = rows_per_chunk(inner, itemsize)
    numbers = (*x.type.shape[first : first + named], count, inner, total, rows)
    ctx.launch(
        _gather_nd_kernel(isa, indices.type.dtype, itemsize, named),
        [
            *(SlotArg(ctx.slot(v)) for v in (x, indices)),
            SlotArg(ctx.slot(node.result), writes=True),
            *(DimArg(d) for d in numbers),
        ],
        chunks=ceildiv(total, rows),
        may_fail=True,
    )


@dataclass(frozen=True)
class _Place:
    """An element of a buffer."""

    buffer: Value
    at: Value


def _merge(k: Kernel, dtype: DType, reduction: str, source: _Place, target: _Place) -> None:
    """Write or merge one element into another."""
    if reduction == "none":
        kind = memory_type(dtype)
        k.store(k.load(kind, source.buffer, source.at), target.buffer, target.at)
        return
    old, update = (load_value(k, dtype, place.buffer, place.at, 0) for place in (target, source))
    if reduction == "add":
        update = (old | update) if dtype is DType.BOOL else old + update
    elif reduction == "mul":
        update = (old & update) if dtype is DType.BOOL else old * update
    elif dtype.is_float:
        update = (k.fmax_nan if reduction == "max" else k.fmin_nan)(old, update)
    elif dtype.is_signed:
        update = (k.smax if reduction == "max" else k.smin)(old, update)
    else:
        update = (k.umax if reduction == "max" else k.umin)(old, update)
    store_value(k, dtype, update, target.buffer, target.at)


@cache
def _scatter_elements_kernel(
    isa: Isa, index: DType, dtype: DType, rank: int, axis: int, reduction: str
) -> Emitted:
    """Arguments: indices, updates, y (holding x already); extents of y, extents of the updates, total.

    One chunk: duplicates are merged in order of the updates, so the result is always the same.
    """
    module = Module(isa)
    with module.kernel("scatter_elements", 3 + 2 * rank + 1) as k:
        indices, updates, y = (k.slot(i) for i in range(3))
        data = [k.dim(3 + i) for i in range(rank)]
        space = [k.dim(3 + rank + i) for i in range(rank)]
        with k.loop(0, k.dim(3 + 2 * rank)) as loop:
            at = _element_offset(
                k, loop.index, data, space, axis, _index(k, index, indices, loop.index, data[axis])
            )
            with k.if_(data[axis] > 0):
                _merge(k, dtype, reduction, _Place(updates, loop.index), _Place(y, at))
            loop.next()
    return finish(module)


@lowering(ScatterElements)
def lower_scatter_elements(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Copy x, then write the updates in order."""
    op = node.op
    assert isinstance(op, ScatterElements)
    x, indices, updates = node.operands
    assert x is not None
    assert indices is not None
    assert updates is not None
    dtype = x.type.dtype
    if dtype.is_complex and op.reduction != "none":
        return False
    from rlx.backends.cpu.kernels.copy import copy_bytes

    rank = x.type.rank
    out = ctx.slot(node.result)
    copy_bytes(ctx, isa, ctx.slot(x), out, x.type.nbytes, inplace=True)
    kernel = _scatter_elements_kernel(
        isa, indices.type.dtype, dtype, rank, normalize_axis(op.axis, rank), op.reduction
    )
    numbers = (*x.type.shape, *indices.type.shape, indices.type.elements)
    args = [SlotArg(ctx.slot(indices)), SlotArg(ctx.slot(updates)), SlotArg(out, writes=True)]
    ctx.launch(kernel, [*args, *(DimArg(d) for d in numbers)], may_fail=True)
    return None


@cache
def _scatter_nd_kernel(isa: Isa, index: DType, dtype: DType, named: int, reduction: str) -> Emitted:
    """Arguments: indices [count, named], updates [count, inner], y (holding x already); extents..., count, inner."""
    module = Module(isa)
    with module.kernel("scatter_nd", 3 + named + 2) as k:
        indices, updates, y = (k.slot(i) for i in range(3))
        extents = [k.dim(3 + i) for i in range(named)]
        count, inner = k.dim(3 + named), k.dim(4 + named)
        with k.loop(0, count) as loop:
            row, nonempty = k.i64(0), inner >= 0
            for i, extent in enumerate(extents):
                row = row * extent + _index(k, index, indices, loop.index * named + i, extent)
                nonempty = nonempty & (extent > 0)
            with k.if_(nonempty), k.loop(0, inner) as element:
                source = _Place(updates, loop.index * inner + element.index)
                target = _Place(y, row * inner + element.index)
                _merge(k, dtype, reduction, source, target)
                element.next()
            loop.next()
    return finish(module)


@lowering(ScatterND)
def lower_scatter_nd(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Copy x, then write blocks of updates in order."""
    op = node.op
    assert isinstance(op, ScatterND)
    x, indices, updates = node.operands
    assert x is not None
    assert indices is not None
    assert updates is not None
    named, dtype = indices.type.shape[-1], x.type.dtype
    assert isinstance(named, int)
    if dtype.is_complex and op.reduction != "none":
        return False
    from rlx.backends.cpu.kernels.copy import copy_bytes

    out = ctx.slot(node.result)
    copy_bytes(ctx, isa, ctx.slot(x), out, x.type.nbytes, inplace=True)
    numbers = (
        *x.type.shape[:named],
        product(indices.type.shape[:-1]),
        product(x.type.shape[named:]),
    )
    args = [SlotArg(ctx.slot(indices)), SlotArg(ctx.slot(updates)), SlotArg(out, writes=True)]
    kernel = _scatter_nd_kernel(isa, indices.type.dtype, dtype, named, op.reduction)
    ctx.launch(kernel, [*args, *(DimArg(d) for d in numbers)], may_fail=True)
    return None
