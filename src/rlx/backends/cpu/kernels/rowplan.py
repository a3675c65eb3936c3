# SPDX-License-Identifier: Apache-2.0
"""How a row body is split into passes over the row, and which values are kept between passes.

A row instruction needs its operand over the whole row, so what depends on its result belongs to a
later pass. Within a pass all reductions that are ready run together. A value that a later pass
needs again is computed again when that is cheap, else it is kept: in the result it becomes anyway,
in a result whose bytes are not written before, or in scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlx.base.dtypes import DType
from rlx.expr.body import Body
from rlx.expr.table import TABLE

__all__ = ["HEAVY", "MEDIUM", "Kept", "Pass", "RowPlan", "instr_cost", "plan_rows"]

HEAVY = frozenset(
    {
        "exp",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "erf",
        "sigmoid",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
    }
    | {"atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "pow", "fmod", "mod"}
)
"""Scalar operators that take tens of instructions."""
MEDIUM = frozenset({"div", "sqrt", "rsqrt"})
"""Scalar operators of which a machine starts one every few cycles."""
_KEEP = 10
"""Cost from which a value is kept, not computed twice: a store, a load and their traffic."""


def instr_cost(op: str) -> int:
    """Return roughly how many machine instructions a scalar operator takes per vector."""
    if op == "const":
        return 0
    return 20 if op in HEAVY else 4 if op in MEDIUM else 1


@dataclass(frozen=True)
class Kept:
    """A value that lies in memory between passes.

    Attributes:
        value: its index in the body.
        written: the pass that computes it.
        result: position of the result whose buffer holds it, None: scratch.
    """

    value: int
    written: int
    result: int | None


@dataclass
class Pass:
    """One loop over the row.

    Attributes:
        reduce: row instructions that are reduced.
        write: positions of results that are written.
        keep: values that are written to where `RowPlan.kept` says (if that is not their own
            result).
        reload: kept values that are read instead of computed.
        reads: inputs that are read.
        cost: rough number of instructions per vector.
    """

    reduce: list[int] = field(default_factory=list[int])
    write: list[int] = field(default_factory=list[int])
    keep: list[int] = field(default_factory=list[int])
    reload: list[int] = field(default_factory=list[int])
    reads: set[int] = field(default_factory=set[int])
    cost: int = 0


@dataclass
class RowPlan:
    """The passes of a row body.

    Attributes:
        passes: in order.
        uniform: per input and instruction, whether it is the same along the row.
        levels: per input and instruction, the number of passes it has to wait for.
        kept: value -> where it lies between passes.
    """

    passes: list[Pass]
    uniform: list[bool]
    levels: list[int]
    kept: dict[int, Kept]

    @property
    def scratch(self) -> list[int]:
        """Values kept in scratch rows, in order."""
        return [k.value for k in self.kept.values() if k.result is None]

    def first_write(self, result: int) -> int:
        """Return the first pass that writes into a result's buffer."""
        own = [i for i, p in enumerate(self.passes) if result in p.write]
        return min(
            [*own, *(k.written for k in self.kept.values() if k.result == result)], default=0
        )

    def last_read(self, operand: int) -> int:
        """Return the last pass that reads an operand (-1: none)."""
        return max((i for i, p in enumerate(self.passes) if operand in p.reads), default=-1)


class _Planner:
    def __init__(self, body: Body, fixed: Sequence[bool], full: Sequence[bool]) -> None:
        self.body = body
        self.n = len(body.inputs)
        self.full = [r for r, is_full in enumerate(full) if is_full]
        self.uniform = body.uniform(fixed)
        self.levels = self._levels()
        self.kept: dict[int, Kept] = {}
        self.computed: list[set[int]] = []  # per pass

    def _levels(self) -> list[int]:
        levels = [0] * self.n
        for instr in self.body.instrs:
            level = max((levels[a] for a in instr.args), default=0)
            levels.append(level + 1 if TABLE[instr.op].is_row else level)
        return levels

    def run(self) -> RowPlan:
        passes = self._passes()
        for index in range(len(passes)):
            self._keep_for(index, passes)
            self.computed.append(self._closure(self._targets(passes[index])))
        for index, step in enumerate(passes):
            self._finish(index, step)
        return RowPlan(passes, self.uniform, self.levels, self.kept)

    def _passes(self) -> list[Pass]:
        reductions = [
            (self.levels[i] - 1, i)
            for i in range(self.n, len(self.levels))
            if TABLE[self.body.instrs[i - self.n].op].is_row
        ]
        count = max((level + 1 for level, _ in reductions), default=0)
        passes = [Pass(reduce=[i for level, i in reductions if level == p]) for p in range(count)]
        late: list[int] = []
        for position in self.full:
            value = self.body.results[position]
            level = self.levels[value]
            # A result that a reduction computes anyway is written there.
            home = next(
                (
                    p
                    for p in range(level, count)
                    if value in self._closure(self._targets(passes[p]))
                ),
                None,
            )
            if home is None:
                late.append(position)
            else:
                passes[home].write.append(position)
        if late:
            last = max(count - 1, *(self.levels[self.body.results[p]] for p in late), 0)
            while len(passes) <= last:
                passes.append(Pass())
            passes[last].write += late
        return passes

    def _targets(self, step: Pass) -> list[int]:
        arguments = [self.body.instrs[i - self.n].args[0] for i in step.reduce]
        return [*arguments, *(self.body.results[p] for p in step.write)]

    def _closure(self, targets: Iterable[int], stop: Iterable[int] = ()) -> set[int]:
        """Return the values along the row that the targets need, inputs included, up to `stop`."""
        stopped = set(stop)
        found: set[int] = set()
        todo = [t for t in targets if t not in stopped]
        while todo:
            value = todo.pop()
            if value in found or self.uniform[value]:
                continue
            found.add(value)
            if value >= self.n:
                todo += [a for a in self.body.instrs[value - self.n].args if a not in stopped]
        return found

    def _cost(self, values: Iterable[int]) -> int:
        """Return the cost of values: their instructions, and one per input beyond the first."""
        instrs = [v for v in values if v >= self.n]
        reads = sum(v < self.n for v in values)
        return sum(instr_cost(self.body.instrs[v - self.n].op) for v in instrs) + max(reads - 1, 0)

    def _keep_for(self, index: int, passes: list[Pass]) -> None:
        """Decide which values of earlier passes this pass reads back."""
        earlier = set[int]().union(*self.computed)
        targets = self._targets(passes[index])
        needed = self._closure(targets, self.kept)
        frontier = [v for v in targets if v in needed & earlier]
        for value in needed - earlier:
            if value >= self.n:
                frontier += [
                    a for a in self.body.instrs[value - self.n].args if a in needed & earlier
                ]
        for value in dict.fromkeys(sorted(frontier)):
            written = next(p for p, values in enumerate(self.computed) if value in values)
            own = self._own_result(value, written, passes)
            if value >= self.n and (
                own is not None or self._cost(self._closure([value], self.kept)) >= _KEEP
            ):
                self.kept[value] = Kept(
                    value, written, own if own is not None else self._spare(value, index, passes)
                )

    def _own_result(self, value: int, written: int, passes: list[Pass]) -> int | None:
        """Return the result this value is, if it was written when it was computed."""
        return next((p for p in passes[written].write if self.body.results[p] == value), None)

    def _spare(self, value: int, index: int, passes: list[Pass]) -> int | None:
        """Return a result whose buffer is free until this pass or later and fits the value."""
        size = self.body.dtype(value).itemsize
        taken = {k.result for k in self.kept.values()}
        for later in passes[index:]:
            for position in later.write:
                fits = self.body.result_types[position].itemsize == size
                last_use = max(
                    p
                    for p in range(index, len(passes))
                    if p == index or self._uses(passes[p], value)
                )
                if fits and position not in taken and last_use <= passes.index(later):
                    return position
        return None

    def _uses(self, step: Pass, value: int) -> bool:
        return value in self._closure(self._targets(step), [k for k in self.kept if k != value])

    def _finish(self, index: int, step: Pass) -> None:
        available = [k.value for k in self.kept.values() if k.written < index]
        targets = self._targets(step)
        needed = self._closure(targets, available)
        direct = [t for t in targets if t in available]
        users = [
            a
            for v in needed
            if v >= self.n
            for a in self.body.instrs[v - self.n].args
            if a in available
        ]
        step.reload = sorted({*direct, *users})
        step.keep = [
            k.value
            for k in self.kept.values()
            if k.written == index and (k.result is None or self.body.results[k.result] != k.value)
        ]
        step.reads = {v for v in needed if v < self.n}
        step.cost = self._cost(needed)


def plan_rows(body: Body, fixed: Sequence[bool], full: Sequence[bool]) -> RowPlan:
    """Split a body into passes over the row.

    Args:
        body: with or without row instructions.
        fixed: per input, whether it is the same along the row.
        full: per result, whether it has an element for every point (else one per row).
    """
    return _Planner(body, fixed, full).run()


def identity(op: str, dtype: DType) -> float:
    """Return the identity of a row instruction, which is also its value over an empty row."""
    if op in ("rsum", "rprod"):
        return 0 if op == "rsum" else 1
    largest = op == "rmin"
    if dtype is DType.BOOL:
        return int(largest)
    if dtype.is_float:
        return float("inf") if largest else float("-inf")
    bits = 8 * dtype.itemsize
    if not dtype.is_signed:
        return (1 << bits) - 1 if largest else 0
    return (1 << (bits - 1)) - 1 if largest else -(1 << (bits - 1))
