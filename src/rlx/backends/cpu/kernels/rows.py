# SPDX-License-Identifier: Apache-2.0
"""Row kernels: elementwise chains with reductions over trailing axes (softmax, norms, sums).

    for every row: for every pass of `rowplan`: one vector loop over the row, then the reductions'
    fixed trees

A pass keeps several accumulators per reduction, so that one addition need not wait for the one
before; masked tails contribute the identity. The tree depends on the row's length alone. What is
the same along a row is computed once per row. Rows are walked in chunks of about the same number of
elements, one participant each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import (
    BodyEmitter,
    decode,
    load_storage,
    maximum,
    may_fail,
    memory_type,
    minimum,
    register_type,
    store_storage,
)
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.elementwise import body_lanes, cost, unroll
from rlx.backends.cpu.kernels.nest import Arguments, Rows, Stream, Walk, argument_count
from rlx.backends.cpu.kernels.rowplan import Pass, RowPlan, identity, plan_rows
from rlx.backends.cpu.lltypes import vec
from rlx.base.dtypes import DType
from rlx.expr.body import Body

__all__ = ["RowForm", "combine", "row_kernel", "start_value"]

_CHUNK_BYTES = 128 << 10


@dataclass(frozen=True)
class RowForm:
    """What of a row region is part of the kernel's text.

    Attributes:
        body: the instructions.
        outer: number of axes over which rows are spread, at least 1.
        inner: number of axes of a row, at least 1.
        walks: of the operands, then of the results.
        fixed: per operand, whether it is the same along the row.
        full: per result, whether it has an element for every point (else one per row).
    """

    body: Body
    outer: int
    inner: int
    walks: tuple[Walk, ...]
    fixed: tuple[bool, ...]
    full: tuple[bool, ...]

    @property
    def plan(self) -> RowPlan:
        """The passes."""
        return plan_rows(self.body, self.fixed, self.full)

    @property
    def chunk_elements(self) -> int:
        """Points per chunk, a power of two."""
        moved = [
            w.dtype.itemsize for w, fixed in zip(self.walks, self.fixed, strict=False) if not fixed
        ]
        weight = sum(moved) + 2 * cost(self.body)
        return 1 << max(_CHUNK_BYTES // max(weight, 1), 1024).bit_length() - 1


def start_value(k: Kernel, body: Body, instr: int, lanes: int) -> Value:
    """Return the identity of a row instruction, by its index in the body."""
    found = body.instrs[instr - len(body.inputs)]
    return k.const(identity(found.op, found.dtype), register_type(found.dtype, lanes))


def combine(k: Kernel, body: Body, instr: int, a: Value, b: Value) -> Value:
    """Combine two partial results of a row instruction."""
    found = body.instrs[instr - len(body.inputs)]
    op, dtype = found.op, found.dtype
    if op == "rmax":
        return maximum(k, dtype, a, b)
    if op == "rmin":
        return minimum(k, dtype, a, b)
    if dtype is DType.BOOL:
        return a | b if op == "rsum" else a & b
    return a + b if op == "rsum" else a * b


@cache
def row_kernel(isa: Isa, form: RowForm) -> Emitted:
    """Return the kernel of a row region."""
    module = Module(isa)
    rank = form.outer + form.inner - 1
    spare = max(len(form.plan.scratch) - 1, 0)
    count = form.inner + 1 + form.outer + argument_count(rank, form.walks) + spare
    with module.kernel(f"rows{form.outer}{form.inner}", count) as k:
        _RowKernel(k, form).emit()
    return finish(module)


@dataclass
class _Row:
    """One row, or one innermost line of it, while it is emitted.

    Attributes:
        base: what is known for the whole row.
        pointers: of every stream, at the start of the line.
        start: elements of the row before this line.
        flat: the same, counted over all rows; only where failures need it.
    """

    base: BodyEmitter
    pointers: list[Value]
    start: Value
    flat: Value


class _RowKernel:
    def __init__(self, k: Kernel, form: RowForm) -> None:
        self.k = k
        self.form = form
        self.body = form.body
        self.reads = len(self.body.inputs)
        self.plan = form.plan
        self.lanes = body_lanes(k.isa, self.body)
        args = Arguments(k)
        slots = [args.slot() for _ in form.walks]
        self.n = args.dim()
        self.lines = [args.dim() for _ in range(form.inner - 1)]
        self.rows_per_chunk = args.dim()
        self.rows = Rows(k, args, form.outer)
        rank = form.outer + form.inner - 1
        self.streams = [
            Stream.take(k, args, w, s, rank) for w, s in zip(form.walks, slots, strict=True)
        ]
        self.scratch = self._scratch(args)
        self.can_fail = may_fail(self.body)

    def _scratch(self, args: Arguments) -> dict[int, Value]:
        """Return the pointer to the scratch row of every value that needs one."""
        out: dict[int, Value] = {}
        for value in self.plan.scratch:
            out[value] = self.k.offset(self.k.scratch(), args.dim()) if out else self.k.scratch()
        return out

    def emit(self) -> None:
        k = self.k
        size = self.n
        for extent in self.lines:
            size = size * extent
        with k.loop(k.begin, k.end) as chunks:
            first = chunks.index * self.rows_per_chunk
            last = k.smin(first + self.rows_per_chunk, self.rows.count)
            with self.rows.range(first, last) as (row, position):
                pointers = [s.at(k, position) for s in self.streams]
                self._row(pointers, row * size if self.can_fail else k.i64(0))

    def _row(self, pointers: list[Value], flat: Value) -> None:
        k = self.k

        def read(index: int) -> Value:
            scalar = k.load(memory_type(self.body.inputs[index]), pointers[index])
            return k.splat(scalar, self.lanes)

        base = BodyEmitter(k, self.body, self.lanes, read=read, flat_index=flat)
        row = _Row(base, pointers, k.i64(0), flat)
        self._uniform(base, 0)
        for level, step in enumerate(self.plan.passes):
            for instr, value in zip(step.reduce, self._pass(step, row), strict=True):
                base.set(instr, k.splat(value, self.lanes))
            self._uniform(base, level + 1)
        for position, is_full in enumerate(self.form.full):
            if not is_full:
                value = base.raw(self.body.results[position])
                k.store(k.extract(value, 0), pointers[self.reads + position])

    def _uniform(self, base: BodyEmitter, level: int) -> None:
        """Emit what is the same along the row and can be computed after `level` passes."""
        for index, uniform in enumerate(self.plan.uniform):
            if not uniform or self.plan.levels[index] != level:
                continue
            if index < self.reads:
                base.raw(index)
            elif self.body.instrs[index - self.reads].op != "const":
                base.value(index)

    def _pass(self, step: Pass, row: _Row) -> list[Value]:
        """Emit one loop over the row; return its reductions as scalars."""
        vectors = unroll(step.cost)
        start = [start_value(self.k, self.body, i, self.lanes) for i in step.reduce]
        found = self._line(step, row, start * vectors, 0)
        out: list[Value] = []
        for at, instr in enumerate(step.reduce):
            parts = found[at :: len(step.reduce)]
            one = self.k.combine_all(
                parts, lambda a, b, i=instr: combine(self.k, self.body, i, a, b)
            )
            out.append(
                self.k.reduce(one, lambda a, b, i=instr: combine(self.k, self.body, i, a, b))
            )
        return out

    def _line(self, step: Pass, row: _Row, carry: list[Value], axis: int) -> list[Value]:
        """Emit the loops over the row's axes from `axis` on; return the accumulators."""
        k = self.k
        if axis == self.form.inner - 1:
            return self._vectors(step, row, carry)
        with k.loop(0, self.lines[axis], carry=carry) as loop:
            stride = self.form.outer + axis
            pointers = [
                s.moved(k, p, [loop.index], s.outer[stride : stride + 1])
                for s, p in zip(self.streams, row.pointers, strict=True)
            ]
            size = self.n
            for extent in self.lines[axis + 1 :]:
                size = size * extent
            ahead = loop.index * size
            line = replace(row, pointers=pointers, start=row.start + ahead, flat=row.flat + ahead)
            loop.next(*self._line(step, line, loop.carry, axis + 1))
        return loop.out

    def _vectors(self, step: Pass, row: _Row, carry: list[Value]) -> list[Value]:
        """Emit the innermost loops: several vectors at a time, then single ones under a mask."""
        k, lanes, count = self.k, self.lanes, len(step.reduce)
        vectors = unroll(step.cost)
        wide = vectors * lanes
        middle = self.n - (self.n & (wide - 1))
        with k.loop(0, middle, wide, carry=carry) as main:
            out: list[Value] = []
            for u in range(vectors):
                out += self._vector(
                    step, row, main.index + u * lanes, None, main.carry[u * count : (u + 1) * count]
                )
            main.next(*out)
        with k.loop(middle, self.n, lanes, carry=main.out[:count]) as rest:
            mask = self._mask(self.n - rest.index)
            rest.next(*self._vector(step, row, rest.index, mask, rest.carry))
        return [*rest.out, *main.out[count:]]

    def _mask(self, left: Value) -> Value:
        widest = max((memory_type(w.dtype).bits for w in self.form.walks), default=32)
        return self.k.tail_mask(left, vec(f"i{min(widest, 64)}", self.lanes))

    def _vector(
        self, step: Pass, row: _Row, index: Value, mask: Value | None, accumulators: Sequence[Value]
    ) -> list[Value]:
        k = self.k

        def read(operand: int) -> Value:
            return self.streams[operand].load(k, row.pointers[operand], index, self.lanes, mask)

        point = row.base.child(read, mask, row.flat + index if self.can_fail else 0)
        for value in step.reload:
            raw = load_storage(
                k, self._kept_type(value), self._kept_pointer(value, row), index, mask
            )
            point.set(value, decode(k, self.body.dtype(value), raw))
        # Everything is read before anything is written: a result may lie in an operand's bytes.
        writes = [
            (point.raw(self.body.results[p]), row.pointers[self.reads + p]) for p in step.write
        ]
        writes += [(point.raw(v), self._kept_pointer(v, row)) for v in step.keep]
        terms = [point.value(self.body.instrs[i - self.reads].args[0]) for i in step.reduce]
        for value, pointer in writes:
            store_storage(k, value, pointer, index, mask)
        out: list[Value] = []
        for instr, term, so_far in zip(step.reduce, terms, accumulators, strict=True):
            real = term
            if mask is not None:
                real = k.select(mask, term, start_value(k, self.body, instr, self.lanes))
            out.append(combine(k, self.body, instr, real, so_far))
        return out

    def _kept_type(self, value: int):
        return vec(memory_type(self.body.dtype(value)), self.lanes)

    def _kept_pointer(self, value: int, row: _Row) -> Value:
        result = self.plan.kept[value].result
        if result is not None:
            return row.pointers[self.reads + result]
        return self.k.offset(self.scratch[value], row.start, memory_type(self.body.dtype(value)))
