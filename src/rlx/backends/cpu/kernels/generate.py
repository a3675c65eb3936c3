# SPDX-License-Identifier: Apache-2.0
"""Lowering of tensors that are computed from numbers alone: Range and DimTensor."""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.abi import Emitted, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.emit import encode, load_value, memory_type, store_storage, store_value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.lltypes import I64, vec
from rlx.backends.cpu.lowering import lowering
from rlx.backends.cpu.vconvert import cast
from rlx.base.dims import ceildiv
from rlx.base.dtypes import DType
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.leaf import DimTensor
from rlx.ops.movement import Range

__all__ = ["lower_dim_tensor", "lower_range"]

_CHUNK = 16 << 10
"""Elements of a Range per chunk."""
_GROUP = 8
"""Extents that one launch writes: keeps the number of different kernels small."""


@cache
def _range_kernel(isa: Isa, dtype: DType) -> Emitted:
    module = Module(isa)
    with module.kernel("range", 4) as k:
        lanes = isa.vector_bits // 64
        start = k.splat(load_value(k, dtype, k.slot(0), 0, 0), lanes)
        delta = k.splat(load_value(k, dtype, k.slot(1), 0, 0), lanes)
        last = k.smin(k.end * _CHUNK, k.dim(3))
        with k.loop(k.begin * _CHUNK, last, lanes) as loop:
            index = k.iota(vec(I64, lanes)) + k.splat(loop.index, lanes)
            number = cast(k, index, DType.I64, dtype.compute)
            mask = k.tail_mask(last - loop.index, vec(memory_type(dtype), lanes))
            store_value(k, dtype, start + number * delta, k.slot(2), loop.index, mask)
    return finish(module)


@lowering(Range)
def lower_range(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Compute start + i * delta, the product and the sum each rounded to the compute dtype."""
    op = node.op
    assert isinstance(op, Range)
    start, delta = node.operands
    assert start is not None
    assert delta is not None
    args: list[Arg] = [SlotArg(ctx.slot(start)), SlotArg(ctx.slot(delta))]
    args += [SlotArg(ctx.slot(node.result), writes=True), DimArg(op.size)]
    ctx.launch(_range_kernel(isa, start.type.dtype), args, ceildiv(op.size, _CHUNK))


def _from_extent(fn: Function, extent: Value, dtype: DType) -> Value:
    return encode(fn, dtype, cast(fn, extent, DType.I64, dtype))


@cache
def _extents_kernel(isa: Isa, count: int, dtype: DType) -> Emitted:
    module = Module(isa)
    with module.kernel("extents", count + 2) as k:
        for index in range(count):
            value = _from_extent(k, k.dim(2 + index), dtype)
            store_storage(k, value, k.offset(k.slot(0), k.dim(1), value.type), index)
    return finish(module)


@lowering(DimTensor)
def lower_dim_tensor(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Write the extents the dispatcher has evaluated."""
    op = node.op
    assert isinstance(op, DimTensor)
    if op.dtype.is_complex:
        return False
    slot = ctx.slot(node.result)
    for first in range(0, len(op.dims), _GROUP):
        dims = op.dims[first : first + _GROUP]
        args: list[Arg] = [SlotArg(slot, writes=True), DimArg(first), *map(DimArg, dims)]
        ctx.launch(_extents_kernel(isa, len(dims), op.dtype), args)
    return None
