# SPDX-License-Identifier: Apache-2.0
"""Elementwise kernels: any body, any number of operands and results, any strides.

    for every point p of the space:  results[p * strides] = body(operands[p * strides])

Axes that everybody walks alike are collapsed first, so nearly all cases have one or two axes. The
innermost axis is
vectorised: operands that stand still along it are loaded once per row, neighbours are vector loads,
    other strides are
gathered. Tails are masked. Extents, strides and offsets are arguments; the text depends on the
body, the number of outer axes and the kind of step of each operand.

A chunk is a run of rows times a block of the innermost axis, both functions of the extents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import BodyEmitter, may_fail, memory_type, store_storage
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.nest import (
    Arguments,
    Rows,
    Stream,
    Walk,
    argument_count,
    rows_args,
    stream_args,
)
from rlx.backends.cpu.kernels.rowplan import instr_cost
from rlx.backends.cpu.kernels.space import Access, Step, collapse
from rlx.backends.cpu.lltypes import scalar_type, vec
from rlx.base.dims import Dim, ceildiv, dim_max, floordiv, product
from rlx.base.dtypes import DType
from rlx.base.types import Shape
from rlx.expr.body import Body
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext

__all__ = [
    "body_lanes",
    "chunk_elements",
    "cost",
    "elementwise",
    "launch_elementwise",
    "moves",
    "unroll",
]

_CHUNK_BYTES = 256 << 10
_UNROLL_COST = ((10, 4), (40, 2))
"""(cost of a body up to, vectors per iteration); costlier bodies are not unrolled."""


def moves(dtype: DType) -> Body:
    """Return the body that copies one element."""
    return Body((dtype,), (), (0,))


def cost(body: Body) -> int:
    """Return roughly how many instructions a body takes per vector."""
    return sum(instr_cost(i.op) for i in body.instrs)


def body_lanes(isa: Isa, body: Body) -> int:
    """Return the vector length of a body: one register of its widest values.

    Values of 8 bytes among narrower ones take two.
    """
    dtypes = [*body.inputs, *(i.dtype for i in body.instrs)]
    sizes = {
        1 if d is DType.BOOL else memory_type(d).itemsize if d.is_complex else _register_bytes(d)
        for d in dtypes
    }
    others = sizes - {1}
    if not others:
        return isa.vector_bits // 8
    widest = max(others)
    if widest >= 8 and len(others) > 1:
        widest = 4
    return max(isa.vector_bits // (8 * min(widest, 8)), 1)


def _register_bytes(dtype: DType) -> int:
    return max(scalar_type(dtype).bits // 8, 1)


def unroll(cost: int) -> int:
    """Return how many vectors one iteration of a loop should do whose body has this cost."""
    return next((n for limit, n in _UNROLL_COST if cost <= limit), 1)


def chunk_elements(body: Body, walks: Sequence[Walk]) -> int:
    """Return the elements of the innermost axis in one chunk, a power of two."""
    weight = sum(w.dtype.itemsize for w in walks if w.step is not Step.FIXED) + 2 * cost(body)
    elements = max(_CHUNK_BYTES // max(weight, 1), 1024)
    return 1 << min(elements.bit_length() - 1, 16)


def _launch_args(
    outer: Shape, n: Dim, block: int, accesses: Sequence[Access], reads: int
) -> tuple[list[Arg], Dim]:
    """Return the kernel arguments and the number of chunks."""
    args: list[Arg] = [SlotArg(a.slot, writes=i >= reads) for i, a in enumerate(accesses)]
    args.append(DimArg(n))
    blocks = ceildiv(n, block)
    chunks = blocks
    if outer:
        rows = product(outer)
        rows_per_chunk = dim_max(1, floordiv(block, dim_max(1, n)))
        args += [DimArg(dim_max(1, blocks)), DimArg(rows_per_chunk), *rows_args(outer)]
        chunks = blocks * ceildiv(rows, rows_per_chunk)
    for access in accesses:
        args += stream_args(access)
    return args, chunks


@cache
def elementwise(isa: Isa, body: Body, rank: int, walks: tuple[Walk, ...]) -> Emitted:
    """Return the kernel of a body over `rank` outer axes and one inner axis.

    Args:
        isa: the target.
        body: elementwise instructions.
        rank: number of outer axes.
        walks: of the operands, then of the results.
    """
    module = Module(isa)
    count = 1 + (2 + rank if rank else 0) + argument_count(rank, walks)
    with module.kernel(f"map{rank}", count) as k:
        _Map(k, body, rank, walks).emit()
    return finish(module)


class _Map:
    def __init__(self, k: Kernel, body: Body, rank: int, walks: tuple[Walk, ...]) -> None:
        self.k = k
        self.body = body
        self.rank = rank
        self.walks = walks
        self.lanes = body_lanes(k.isa, body)
        self.block = chunk_elements(body, walks)
        args = Arguments(k)
        slots = [args.slot() for _ in walks]
        self.n = args.dim()
        if rank:
            self.blocks, self.rows_per_chunk = args.dim(), args.dim()
            self.rows = Rows(k, args, rank)
        self.streams = [
            Stream.take(k, args, w, slot, rank) for w, slot in zip(walks, slots, strict=True)
        ]

    def emit(self) -> None:
        k = self.k
        with k.loop(k.begin, k.end) as chunks:
            if not self.rank:
                lo = chunks.index * self.block
                self._row(
                    lo, k.smin(lo + self.block, self.n), [s.base for s in self.streams], k.i64(0)
                )
            else:
                self._rows(chunks.index)

    def _rows(self, chunk: Value) -> None:
        k = self.k
        group, _ = k.divide_nonzero("udiv", chunk, self.blocks)
        first = group * self.rows_per_chunk
        last = k.smin(first + self.rows_per_chunk, self.rows.count)
        lo = (chunk - group * self.blocks) * self.block
        hi = k.smin(lo + self.block, self.n)
        with self.rows.range(first, last) as (row, position):
            pointers = [s.at(k, position) for s in self.streams]
            self._row(lo, hi, pointers, row * self.n)

    def _row(self, lo: Value, hi: Value, pointers: list[Value], flat: Value) -> None:
        """Do the points lo..hi of the innermost axis."""
        k, lanes = self.k, self.lanes
        start = self._row_constants(pointers, flat)
        vectors = unroll(cost(self.body))
        step = vectors * lanes
        with k.if_(lo < hi):
            middle = hi - ((hi - lo) & (step - 1))
            with k.loop(lo, middle, step) as main:
                for u in range(vectors):
                    self._vector(start, pointers, main.index + u * lanes, None, flat)
            with k.loop(middle, hi, lanes) as rest:
                mask = self._mask(hi - rest.index)
                self._vector(start, pointers, rest.index, mask, flat)

    def _mask(self, left: Value) -> Value:
        widest = max((memory_type(w.dtype).bits for w in self.walks), default=32)
        return self.k.tail_mask(left, vec(f"i{min(widest, 64)}", self.lanes))

    def _row_constants(self, pointers: list[Value], flat: Value) -> BodyEmitter:
        """Emit what is the same for all points of a row."""
        reads = self.body.inputs
        fixed = [w.step is Step.FIXED for w in self.walks[: len(reads)]]

        def read(index: int) -> Value:
            scalar = self.k.load(memory_type(reads[index]), pointers[index])
            return self.k.splat(scalar, self.lanes)

        row = BodyEmitter(self.k, self.body, self.lanes, read=read, flat_index=flat)
        for index in _uniform(self.body, fixed):
            if index < len(reads):
                row.raw(index)
            else:
                row.value(index)
        return row

    def _vector(
        self, row: BodyEmitter, pointers: list[Value], index: Value, mask: Value | None, flat: Value
    ) -> None:
        reads = len(self.body.inputs)

        def read(operand: int) -> Value:
            return self.streams[operand].load(self.k, pointers[operand], index, self.lanes, mask)

        point = row.child(read, mask, flat + index if may_fail(self.body) else 0)
        # Everything is read before anything is written: a result may lie in an operand's bytes.
        values = [point.raw(r) for r in self.body.results]
        for value, stream, pointer in zip(
            values, self.streams[reads:], pointers[reads:], strict=True
        ):
            if stream.step is None:
                store_storage(self.k, value, pointer, index, mask)
            else:
                self.k.scatter(value, pointer, stream.lanes(self.k, index, self.lanes), mask)


def _uniform(body: Body, fixed: Sequence[bool]) -> Iterator[int]:
    """Iterate what does not vary along the innermost axis, constants left out."""
    n = len(body.inputs)
    same = body.uniform(fixed)
    for index, uniform in enumerate(same):
        if uniform and not (index >= n and body.instrs[index - n].op == "const"):
            yield index


def launch_elementwise(
    ctx: LoweringContext,
    isa: Isa,
    body: Body,
    shape: Shape,
    operands: Sequence[Access],
    results: Sequence[Access],
    inplace: Sequence[tuple[int, int]] = (),
) -> None:
    """Emit the launch of a body over a space.

    Args:
        ctx: where the launch goes.
        isa: the target.
        body: elementwise instructions.
        shape: the iteration space.
        operands: how it walks each operand.
        results: how it walks each result; no two points may write one element.
        inplace: (operand slot, result slot) pairs that may be the same bytes.
    """
    reads = len(operands)
    extents, accesses, _ = collapse(shape, [*operands, *results])
    outer, n = extents[:-1], extents[-1] if extents else 1
    if not extents:
        accesses = [
            Access(a.slot, a.dtype, (1 if i >= reads else 0,), a.offset)
            for i, a in enumerate(accesses)
        ]
    walks = tuple(Walk.of(a) for a in accesses)
    kernel = elementwise(isa, body, len(outer), walks)
    args, chunks = _launch_args(outer, n, chunk_elements(body, walks), accesses, reads)
    ctx.launch(kernel, args, chunks, inplace=inplace, may_fail=may_fail(body))
