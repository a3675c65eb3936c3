# SPDX-License-Identifier: Apache-2.0
"""Row regions with a row per lane: for rows that lie across memory, and for short rows.

    for every block of neighbouring rows: for every pass: for every point along the row: one vector,
    a row per lane

Reductions need no horizontal step, and what is the same along a row is an ordinary vector. Several
vectors of rows go side by side where rows lie across memory, so that each step reads a stretch of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import BodyEmitter, decode, encode, memory_type, store_storage
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.elementwise import body_lanes
from rlx.backends.cpu.kernels.nest import Arguments, Rows, Stream, argument_count
from rlx.backends.cpu.kernels.rows import RowForm, combine, start_value
from rlx.backends.cpu.lltypes import vec

__all__ = ["column_kernel"]

_RUN = 128
"""Points along a row that are summed before the sum is added to the row's."""


@cache
def column_kernel(isa: Isa, form: RowForm, vectors: int) -> Emitted:
    """Return the kernel with a row per lane.

    Args:
        isa: the target.
        form: with walks whose innermost axis is the last axis over which rows are spread.
        vectors: vectors of rows side by side.
    """
    module = Module(isa)
    rank = form.outer - 1 + form.inner
    spare = max(len(form.plan.kept) - 1, 0)
    # Extents along the row, rows along the lanes, blocks per chunk; then the blocks, then the
    # walks.
    count = form.inner + 2 + form.outer + argument_count(rank, form.walks) + spare
    with module.kernel(f"columns{form.outer}{form.inner}", count) as k:
        _ColumnKernel(k, form, vectors).emit()
    return finish(module)


@dataclass
class _Block:
    """Rows of a block: one vector of them.

    Attributes:
        base: what is known for each row.
        first: lane 0 along the last outer axis.
        mask: lanes that are rows.
    """

    base: BodyEmitter
    first: Value
    mask: Value


class _ColumnKernel:
    def __init__(self, k: Kernel, form: RowForm, vectors: int) -> None:
        self.k = k
        self.form = form
        self.body = form.body
        self.vectors = vectors
        self.reads = len(self.body.inputs)
        self.plan = form.plan
        self.lanes = body_lanes(k.isa, self.body)
        args = Arguments(k)
        slots = [args.slot() for _ in form.walks]
        self.row = [args.dim() for _ in range(form.inner)]
        self.across = args.dim()
        self.per_chunk = args.dim()
        self.blocks = Rows(k, args, form.outer)
        rank = form.outer - 1 + form.inner
        self.streams = [
            Stream.take(k, args, w, s, rank) for w, s in zip(form.walks, slots, strict=True)
        ]
        self.scratch: dict[int, Value] = {}
        for value in self.plan.kept:
            self.scratch[value] = k.offset(k.scratch(), args.dim()) if self.scratch else k.scratch()

    def emit(self) -> None:
        k = self.k
        with k.loop(k.begin, k.end) as chunks:
            first = chunks.index * self.per_chunk
            last = k.smin(first + self.per_chunk, self.blocks.count)
            with self.blocks.range(first, last) as (_, position):
                pointers = [s.at(k, position[:-1]) for s in self.streams]
                self._block(pointers, position)

    def _block(self, pointers: list[Value], position: Sequence[Value]) -> None:
        k = self.k
        start = position[-1] * (self.vectors * self.lanes)
        blocks = [self._rows(pointers, start + u * self.lanes) for u in range(self.vectors)]
        for level, step in enumerate(self.plan.passes):
            count = len(step.reduce)
            identities = [start_value(k, self.body, i, self.lanes) for i in step.reduce]
            found = self._along(level, blocks, pointers, identities * self.vectors, 0, k.i64(0))
            for u, block in enumerate(blocks):
                for instr, value in zip(
                    step.reduce, found[u * count : (u + 1) * count], strict=True
                ):
                    block.base.set(instr, value)
                self._uniform(block.base, level + 1)
        for at, is_full in enumerate(self.form.full):
            if not is_full:
                for block in blocks:
                    value = block.base.raw(self.body.results[at])
                    self._store(self.reads + at, value, pointers[self.reads + at], block)

    def _rows(self, pointers: list[Value], first: Value) -> _Block:
        k = self.k
        widest = max(memory_type(w.dtype).bits for w in self.form.walks)
        mask = k.tail_mask(self.across - first, vec(f"i{min(widest, 64)}", self.lanes))

        def read(operand: int) -> Value:
            return self.streams[operand].load(k, pointers[operand], first, self.lanes, mask)

        base = BodyEmitter(k, self.body, self.lanes, read=read, mask=mask)
        self._uniform(base, 0)
        return _Block(base, first, mask)

    def _uniform(self, base: BodyEmitter, level: int) -> None:
        """Emit what is the same along the row and can be computed after `level` passes."""
        for index, uniform in enumerate(self.plan.uniform):
            if not uniform or self.plan.levels[index] != level:
                continue
            if index < self.reads:
                base.raw(index)
            elif self.body.instrs[index - self.reads].op != "const":
                base.value(index)

    def _along(
        self,
        level: int,
        blocks: list[_Block],
        pointers: list[Value],
        carry: list[Value],
        axis: int,
        flat: Value,
    ) -> list[Value]:
        """Emit the loops over the row's axes from `axis` on; return the accumulators."""
        k = self.k
        if axis == self.form.inner - 1:
            return self._last_axis(level, blocks, pointers, carry, flat)
        with k.loop(0, self.row[axis], carry=carry) as loop:
            moved = self._moved(pointers, loop.index, axis)
            here = flat * self.row[axis] + loop.index if axis else loop.index
            loop.next(*self._along(level, blocks, moved, loop.carry, axis + 1, here))
        return loop.out

    def _moved(self, pointers: list[Value], index: Value, axis: int) -> list[Value]:
        at = self.form.outer - 1 + axis
        return [
            s.moved(self.k, p, [index], s.outer[at : at + 1])
            for s, p in zip(self.streams, pointers, strict=True)
        ]

    def _last_axis(
        self,
        level: int,
        blocks: list[_Block],
        pointers: list[Value],
        carry: list[Value],
        flat: Value,
    ) -> list[Value]:
        """Emit the innermost loop in runs with sums of their own, so that no sum has many terms."""
        k, axis = self.k, self.form.inner - 1
        extent, reduce = self.row[axis], self.plan.passes[level].reduce
        identities = [start_value(k, self.body, i, self.lanes) for i in reduce] * self.vectors
        with k.loop(0, extent, _RUN, carry=carry) as runs:
            with k.loop(runs.index, k.smin(runs.index + _RUN, extent), carry=identities) as loop:
                moved = self._moved(pointers, loop.index, axis)
                here = flat * extent + loop.index if axis else loop.index
                loop.next(*self._point(level, blocks, moved, loop.carry, here))
            pairs = zip(reduce * self.vectors, runs.carry, loop.out, strict=True)
            runs.next(*(combine(k, self.body, i, total, part) for i, total, part in pairs))
        return runs.out

    def _point(
        self,
        level: int,
        blocks: list[_Block],
        pointers: list[Value],
        carry: list[Value],
        flat: Value,
    ) -> list[Value]:
        """Emit one point of every row of the blocks."""
        count = len(self.plan.passes[level].reduce)
        out: list[Value] = []
        for u, block in enumerate(blocks):
            so_far = carry[u * count : (u + 1) * count]
            out += self._vector(level, block, pointers, so_far, flat * self.vectors + u)
        return out

    def _vector(
        self, level: int, block: _Block, pointers: list[Value], so_far: list[Value], place: Value
    ) -> list[Value]:
        k, step = self.k, self.plan.passes[level]

        def read(operand: int) -> Value:
            stream = self.streams[operand]
            return stream.load(k, pointers[operand], block.first, self.lanes, block.mask)

        point = block.base.child(read, block.mask)
        for value in step.reload:
            dtype = self.body.dtype(value)
            kind = vec(memory_type(dtype), self.lanes)
            point.set(value, decode(k, dtype, k.load(kind, self._kept(value, place))))
        writes = [(p, point.raw(self.body.results[p])) for p in step.write]
        for value in (kept.value for kept in self.plan.kept.values() if kept.written == level):
            k.store(encode(k, self.body.dtype(value), point.value(value)), self._kept(value, place))
        terms = [point.value(self.body.instrs[i - self.reads].args[0]) for i in step.reduce]
        for at, value in writes:
            self._store(self.reads + at, value, pointers[self.reads + at], block)
        return [
            combine(k, self.body, i, term, old)
            for i, term, old in zip(step.reduce, terms, so_far, strict=True)
        ]

    def _kept(self, value: int, place: Value) -> Value:
        kind = memory_type(self.body.dtype(value))
        return self.k.offset(self.scratch[value], place * self.lanes, kind)

    def _store(self, index: int, value: Value, pointer: Value, block: _Block) -> None:
        stream = self.streams[index]
        if stream.step is None:
            store_storage(self.k, value, pointer, block.first, block.mask)
        else:
            lanes = stream.lanes(self.k, block.first, self.lanes)
            self.k.scatter(value, pointer, lanes, block.mask)
