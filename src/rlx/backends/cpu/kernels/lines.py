# SPDX-License-Identifier: Apache-2.0
"""Operators that walk along one axis with a running state: CumSum and ArgReduce.

A tensor is [outer, n, inner] around the axis. Lines are independent; where inner > 1 neighbouring
lines fill the lanes of a vector. ArgReduce along the last axis fills the lanes with elements of one
line and merges them at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import load_value, memory_type, register_type, store_value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.check import launch_check
from rlx.backends.cpu.lltypes import I64, vec
from rlx.backends.cpu.lowering import lowering
from rlx.backends.cpu.vconvert import cast
from rlx.base.dims import Dim, ceildiv, dim_max, floordiv, less_equal, product
from rlx.base.dtypes import DType
from rlx.base.types import normalize_axis
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.reduce import ArgReduce, CumSum

__all__ = ["lower_arg_reduce", "lower_cumsum"]

_CHUNK = 16 << 10
"""Elements per chunk."""


@dataclass
class _Lines:
    """The part of a kernel that finds its lines.

    Its arguments: source, target, n, inner, groups, total, groups per chunk.

    Attributes:
        lanes: lines done at a time (0: one, with scalars).
    """

    k: Kernel
    lanes: int

    @property
    def n(self) -> Value:
        """Elements of a line."""
        return self.k.dim(2)

    @property
    def inner(self) -> Value:
        """Distance between elements of a line."""
        return self.k.dim(3)

    def range(self):
        """Loop over this participant's groups of lines."""
        k = self.k
        return k.loop(k.begin * k.dim(6), k.smin(k.end * k.dim(6), k.dim(5)))

    def place(self, group: Value) -> tuple[Value, Value, Value]:
        """Return (outer index, first line along inner, how many lines are left there)."""
        k = self.k
        outer, _ = k.divide_nonzero("udiv", group, k.dim(4))
        first = (group - outer * k.dim(4)) * max(self.lanes, 1)
        return outer, first, self.inner - first


def _launch(
    ctx: LoweringContext,
    kernel: Emitted,
    slots: tuple[int, int],
    extents: tuple[Dim, Dim, Dim],
    lanes: int,
) -> None:
    outer, n, inner = extents
    groups = ceildiv(inner, max(lanes, 1))
    total = outer * groups
    per_chunk = dim_max(1, floordiv(_CHUNK // max(lanes, 1), dim_max(1, n)))
    args: list[Arg] = [SlotArg(slots[0]), SlotArg(slots[1], writes=True)]
    args += map(DimArg, (n, inner, dim_max(1, groups), total, per_chunk))
    ctx.launch(kernel, args, ceildiv(total, per_chunk))


def _around(shape: tuple[Dim, ...], axis: int) -> tuple[Dim, Dim, Dim]:
    return product(shape[:axis]), shape[axis], product(shape[axis + 1 :])


# CumSum


@cache
def _cumsum_kernel(isa: Isa, dtype: DType, lanes: int, exclusive: bool, reverse: bool) -> Emitted:
    module = Module(isa)
    with module.kernel("cumsum", 7) as k:
        lines = _Lines(k, lanes)
        # Sums of floats are kept in f64 and rounded where they are written.
        wide = DType.F64 if dtype.is_float else dtype
        zero = k.const(0, register_type(wide, lanes))
        # -0 + x is x for every x, so a first element of -0 stays what it is.
        nothing = k.const(-0.0, zero.type) if dtype.is_float else zero
        kind = memory_type(dtype)
        with lines.range() as groups:
            outer, first, left = lines.place(groups.index)
            mask = k.tail_mask(left, vec(kind, lanes)) if lanes else None
            start = outer * lines.n * lines.inner + first
            with k.loop(0, lines.n, carry=[nothing]) as loop:
                step = lines.n - 1 - loop.index if reverse else loop.index
                at = start + step * lines.inner
                value = cast(
                    k, load_value(k, dtype, k.slot(0), at, lanes, mask), dtype.compute, wide
                )
                total = loop.carry[0] + value
                so_far = k.select(loop.index.eq(0), zero, loop.carry[0]) if exclusive else total
                out = cast(k, so_far, wide, dtype.compute)
                store_value(k, dtype, out, k.slot(1), at, mask)
                loop.next(total)
    return finish(module)


@lowering(CumSum)
def lower_cumsum(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Emit the running sums."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, CumSum)
    assert x is not None
    extents = _around(x.type.shape, normalize_axis(op.axis, x.type.rank))
    lanes = 0 if extents[2] == 1 else isa.vector_bits // 32
    kernel = _cumsum_kernel(isa, x.type.dtype, lanes, op.exclusive, op.reverse)
    _launch(ctx, kernel, (ctx.slot(x), ctx.slot(node.result)), extents, lanes)


# ArgReduce


@dataclass(frozen=True)
class _Best:
    """The order of an ArgReduce.

    Attributes:
        dtype: of the elements.
        largest: the greatest element wins, else the least; NaN wins over everything in both.
        last: of equal elements the later wins.
    """

    dtype: DType
    largest: bool
    last: bool

    def wins(self, x: Value, best: Value) -> Value:
        """Return the mask where an element that comes later replaces the best so far."""
        left, right = (best, x) if self.largest else (x, best)  # the later wins where left < right
        if not self.dtype.is_float:
            signed = self.dtype.is_signed
            if self.last:
                return left <= right if signed else left.ule(right)
            return left < right if signed else left.ult(right)
        if self.last:
            return (left <= right) | x.is_nan()
        return (left < right) | (x.is_nan() & ~best.is_nan())

    def ties(self, a: Value, b: Value) -> Value:
        """Return the mask where both are equally good."""
        equal = a.eq(b)
        return equal | (a.is_nan() & b.is_nan()) if self.dtype.is_float else equal


@cache
def _arg_lines_kernel(isa: Isa, best: _Best, lanes: int) -> Emitted:
    """Lanes are neighbouring lines."""
    module = Module(isa)
    with module.kernel("arg_lines", 7) as k:
        lines = _Lines(k, lanes)
        kind = vec(memory_type(best.dtype), lanes)
        with lines.range() as groups:
            outer, first, left = lines.place(groups.index)
            mask = k.tail_mask(left, kind)
            start = outer * lines.n * lines.inner + first
            begin = load_value(k, best.dtype, k.slot(0), start, lanes, mask)
            with k.loop(1, lines.n, carry=[begin, k.const(0, vec(I64, lanes))]) as loop:
                at = start + loop.index * lines.inner
                x = load_value(k, best.dtype, k.slot(0), at, lanes, mask)
                wins = best.wins(x, loop.carry[0])
                loop.next(
                    k.select(wins, x, loop.carry[0]), k.select(wins, loop.index, loop.carry[1])
                )
            store_value(k, DType.I64, loop.out[1], k.slot(1), outer * lines.inner + first, mask)
    return finish(module)


@cache
def _arg_row_kernel(isa: Isa, best: _Best, lanes: int) -> Emitted:
    """Lanes are neighbouring elements of one line, which is contiguous."""
    module = Module(isa)
    with module.kernel("arg_row", 7) as k:
        lines = _Lines(k, 0)
        with lines.range() as rows:
            row = k.offset(k.slot(0), rows.index * lines.n, memory_type(best.dtype))
            begin = k.splat(load_value(k, best.dtype, row, 0, 0), lanes)
            with k.loop(0, lines.n, lanes, carry=[begin, k.const(0, vec(I64, lanes))]) as loop:
                mask = k.tail_mask(lines.n - loop.index, vec(memory_type(best.dtype), lanes))
                x = load_value(k, best.dtype, row, loop.index, lanes, mask)
                wins = best.wins(x, loop.carry[0]) & mask
                index = k.iota(vec(I64, lanes)) + k.splat(loop.index, lanes)
                loop.next(k.select(wins, x, loop.carry[0]), k.select(wins, index, loop.carry[1]))
            k.store(_merged(k, best, *loop.out), k.slot(1), rows.index)
    return finish(module)


def _merged(k: Kernel, best: _Best, value: Value, index: Value) -> Value:
    """Return the index of the best lane."""
    lanes = value.type.lanes
    while lanes > 1:
        lanes //= 2
        (a, b), (i, j) = ([k.slice(v, 0, lanes), k.slice(v, lanes, lanes)] for v in (value, index))
        later = i < j if best.last else j < i
        better = k.select(best.ties(a, b), later, best.wins(b, a))
        value, index = k.select(better, b, a), k.select(better, j, i)
    return k.extract(index, 0)


@lowering(ArgReduce)
def lower_arg_reduce(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Emit the search, and before it a check where the axis may be empty."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, ArgReduce)
    assert x is not None
    extents = _around(x.type.shape, normalize_axis(op.axis, x.type.rank))
    if less_equal(1, extents[1]) is not True:
        launch_check(ctx, isa, [extents[1] - 1])
    best, lanes = _Best(x.type.dtype, op.kind == "max", op.select_last), isa.vector_bits // 32
    slots = ctx.slot(x), ctx.slot(node.result)
    if extents[2] == 1:
        _launch(ctx, _arg_row_kernel(isa, best, lanes), slots, extents, 0)
    else:
        _launch(ctx, _arg_lines_kernel(isa, best, lanes), slots, extents, lanes)
