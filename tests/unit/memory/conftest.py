# SPDX-License-Identifier: Apache-2.0
"""Programs written by hand or at random, and a machine that runs a memory plan byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.facts import Facts
from rlx.kernel.program import DimArg, Program, Slot, SlotArg, SlotKind, Thunk, ThunkKind
from rlx.memory.plan import Plan


class ProgramBuilder:
    """Appends slots and thunks; `chance` decides sizes, operands and structure of random parts."""

    def __init__(self, seed: int = 0) -> None:
        self.program = Program("p", Facts())
        self.chance = np.random.default_rng(seed)
        self.loops = 0

    def slot(self, nbytes: int) -> int:
        self.program.slots.append(Slot(SlotKind.ARENA, nbytes))
        return len(self.program.slots) - 1

    def view(self, root: int, nbytes: int = 1) -> int:
        self.program.slots.append(Slot(SlotKind.VIEW, nbytes, root))
        index = len(self.program.slots) - 1
        bind = (SlotArg(index), SlotArg(root), DimArg(0), DimArg(1))
        self.program.thunks.append(Thunk(ThunkKind.BIND, bind))
        return index

    def call(
        self, reads: Sequence[int], writes: Sequence[int], inplace: Sequence[tuple[int, int]] = ()
    ) -> None:
        args = [*map(SlotArg, reads), *(SlotArg(w, writes=True) for w in writes)]
        self.program.thunks.append(
            Thunk(ThunkKind.CALL, tuple(args), "kernel", inplace=tuple(inplace))
        )

    def jump(self, kind: ThunkKind, *args: Any, target: int = -1) -> Thunk:
        thunk = Thunk(kind, args, target=target)
        self.program.thunks.append(thunk)
        return thunk

    @property
    def position(self) -> int:
        return len(self.program.thunks)

    def begin_loop(self, trip: int) -> tuple[int, DimArg, Thunk]:
        counter = DimArg(symbol(f"i{self.loops}", lower=0))
        self.loops += 1
        self.jump(ThunkKind.SET_DIM, counter).immediate = 0
        head = self.position
        return head, counter, self.jump(ThunkKind.JUMP_GE, counter, DimArg(trip))

    def end_loop(self, begun: tuple[int, DimArg, Thunk]) -> None:
        head, counter, leave = begun
        self.jump(ThunkKind.ADD_DIM, counter).immediate = 1
        self.jump(ThunkKind.JUMP, target=head)
        self.program.loops.append((head, self.position - 1))
        leave.target = self.position

    def block(self, readable: Sequence[int], steps: int, depth: int = 0) -> list[int]:
        """Append random steps that read what is readable and what they make; return the latter."""
        made: list[int] = []
        for _ in range(steps):
            known = [*readable, *made]
            kind = self.chance.random()
            if kind < 0.1 and known:
                made.append(self.view(int(self.chance.choice(known))))
            elif kind < 0.2 and depth < 2 and known:
                made.append(self._branch(known, depth))
            elif kind < 0.3 and depth < 2 and known:
                made.append(self._loop(known, depth))
            else:
                made.append(self._step(known))
        return made

    def _size(self) -> int:
        return int(self.chance.choice([1, 64, 100, 640, 1000]))

    def _step(self, known: Sequence[int]) -> int:
        # Recent values are read more often, so that older ones die.
        recent = list(known[-6:])
        count = min(len(recent), int(self.chance.integers(0, 3)))
        reads = [int(r) for r in self.chance.choice(recent, count, replace=False)] if count else []
        size, inplace = self._size(), list[tuple[int, int]]()
        if reads and self.program.slots[reads[0]].kind is SlotKind.ARENA:
            if self.chance.random() < 0.5:
                size = int(str(self.program.slots[reads[0]].nbytes))
            inplace = [(reads[0], len(self.program.slots))]
        result = self.slot(size)
        extra = [self.slot(self._size())] if self.chance.random() < 0.2 else []
        self.call(reads, [result, *extra], inplace)
        return result

    def _branch(self, known: Sequence[int], depth: int) -> int:
        result = self.slot(self._size())
        skip = self.jump(ThunkKind.JUMP_UNLESS, SlotArg(known[-1]))
        for arm in range(2):
            inner = self.block(known, int(self.chance.integers(1, 4)), depth + 1)
            self.call(inner[-1:], [result])
            if arm == 0:
                leave = self.jump(ThunkKind.JUMP)
                skip.target = self.position
            else:
                leave.target = self.position  # pyright: ignore[reportPossiblyUnboundVariable]
        return result

    def _loop(self, known: Sequence[int], depth: int) -> int:
        size = self._size()
        state, fresh = self.slot(size), self.slot(size)
        self.call(known[-1:], [state])
        begun = self.begin_loop(int(self.chance.integers(0, 4)))
        inner = self.block([*known, state], int(self.chance.integers(1, 4)), depth + 1)
        self.call([state, inner[-1]], [fresh])
        self.call([fresh], [state])
        self.end_loop(begun)
        return state


class _Machine:
    """An arena whose bytes know which slot wrote them last."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self.plan = plan
        self.owner = np.full(plan.arena, -1)
        self.dims: dict[str, int] = {}

    def _root(self, slot: int) -> int:
        while (above := self.program.slots[slot].root) is not None:
            slot = above
        return slot

    def _bytes(self, slot: int) -> Any:
        start = self.plan.offsets[slot]
        return self.owner[start : start + self.plan.sizes[slot]]

    def touch(self, position: int) -> None:
        thunk, offsets = self.program.thunks[position], self.plan.offsets
        reads, writes = map(self._root, thunk.reads()), list(map(self._root, thunk.writes()))
        operands = set(reads)
        for slot in operands:
            assert (self._bytes(slot) == slot).all(), f"thunk {position} reads slot {slot}"
        for result in writes:
            for operand in operands - {result}:
                if (self._bytes(result) == operand).any():
                    assert (operand, result) in thunk.inplace
                    assert offsets[operand] == offsets[result]
            self._bytes(result)[:] = result
        for result in writes:
            assert (self._bytes(result) == result).all(), f"results of thunk {position} overlap"

    def jumps(self, thunk: Thunk, conditions: Iterator[bool]) -> bool:
        """Change extents; return whether to continue at the target."""
        extents = [str(a.dim) for a in thunk.args if isinstance(a, DimArg)]
        match thunk.kind:
            case ThunkKind.SET_DIM:
                self.dims[extents[0]] = thunk.immediate
            case ThunkKind.ADD_DIM:
                self.dims[extents[0]] += thunk.immediate
            case ThunkKind.JUMP:
                return True
            case ThunkKind.JUMP_GE:
                return self.dims[extents[0]] >= int(extents[1])
            case ThunkKind.JUMP_UNLESS:
                return not next(conditions, True)
            case _:
                pass
        return False


def run_plan(program: Program, plan: Plan, conditions: Sequence[bool]) -> int:
    """Run a program on bytes that know which slot wrote them; return how many thunks ran.

    Raises AssertionError where a read finds bytes of another slot, or a kernel writes over an
    operand without having said that it may.
    """
    machine, taken = _Machine(program, plan), iter(conditions)
    position = steps = 0
    while position < len(program.thunks):
        thunk = program.thunks[position]
        if thunk.kind is not ThunkKind.BIND:
            machine.touch(position)
        position = thunk.target if machine.jumps(thunk, taken) else position + 1
        steps += 1
    return steps


@pytest.fixture
def programs() -> SimpleNamespace:
    """`build(seed)` makes a builder, `run(program, plan, conditions)` runs a plan."""
    return SimpleNamespace(build=ProgramBuilder, run=run_plan)
