# SPDX-License-Identifier: Apache-2.0
"""An independent check of a memory plan: replay the schedule and watch who overwrites whom.

It shares no code with the planner: it walks the thunks in order (loop bodies twice), records which slot last wrote
which bytes, and refuses a read of bytes that another slot has written since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from rlx.base.errors import PassError
from rlx.kernel.program import Program, SlotKind, Thunk, ThunkKind
from rlx.memory.plan import Plan

__all__ = ["check_plan"]


def check_plan(program: Program, plan: Plan) -> None:
    """Raise PassError if a thunk may read bytes that another slot has overwritten."""
    _Replay(program, plan).run()


class _Replay:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self.plan = plan
        self.neighbours = self._find_overlaps() | self._share_states()
        self.overwritten: dict[int, int] = {}  # slot -> thunk that destroyed it
        self.written = {state.slot for state in program.states}

    def _share_states(self) -> dict[int, list[int]]:
        """Return for every slot of a state the others: all of them are the same bytes."""
        out: dict[int, list[int]] = {}
        for state in self.program.states:
            group = [state.slot, *state.aliases]
            if any(self.program.slots[s].kind is not SlotKind.STATE or s in out for s in group):
                raise PassError(
                    f"memory plan: the slots {group} are not those of state {state.name!r}"
                )
            out.update({slot: [s for s in group if s != slot] for slot in group})
        return out

    def _find_overlaps(self) -> dict[int, list[int]]:
        placed = sorted((offset, slot) for slot, offset in self.plan.offsets.items())
        starts = [offset for offset, _ in placed]
        out: dict[int, list[int]] = {slot: [] for _, slot in placed}
        for position, (offset, slot) in enumerate(placed):
            end = bisect_left(starts, offset + self.plan.sizes[slot])
            for _, other in placed[position + 1 : end]:
                out[slot].append(other)
                out[other].append(slot)
        return out

    def _order(self) -> Iterator[int]:
        """Iterate thunk positions in order, every loop body twice."""
        thunks = self.program.thunks
        repeats = {last: first for first, last in self.program.loops}
        done: set[int] = set()
        position = 0
        while position < len(thunks):
            yield position
            if position in repeats and position not in done:
                done.add(position)
                position = repeats[position]
            else:
                position += 1

    def run(self) -> None:
        for position in self._order():
            thunk = self.program.thunks[position]
            if thunk.kind is ThunkKind.BIND:
                continue
            reads = [s for s in map(self._root, thunk.reads()) if s in self.neighbours]
            writes = [s for s in map(self._root, thunk.writes()) if s in self.neighbours]
            for slot in reads:
                self._check_read(slot, position, thunk)
            self._check_pairs(position, thunk, reads, writes)
            for slot in writes:
                self.overwritten.pop(slot, None)
                self.written.add(slot)
                for other in self.neighbours[slot]:
                    self.overwritten[other] = position
        for state in self.program.states:
            lost = self.overwritten.get(state.following)
            if state.following not in self.written or lost is not None:
                by = f", thunk {lost} has overwritten it" if lost is not None else ""
                raise PassError(
                    f"memory plan: state {state.name!r} does not hold its next value at the end{by}"
                )

    def _root(self, slot: int) -> int:
        while self.program.slots[slot].kind is SlotKind.VIEW:
            root = self.program.slots[slot].root
            assert root is not None
            slot = root
        return slot

    def _check_read(self, slot: int, position: int, thunk: Thunk) -> None:
        if slot in self.overwritten:
            raise PassError(
                f"memory plan: thunk {position} of {thunk.node} reads slot {slot}, "
                f"which thunk {self.overwritten[slot]} has overwritten"
            )
        if slot not in self.written:
            raise PassError(
                f"memory plan: thunk {position} of {thunk.node} reads slot {slot} before it is written"
            )

    def _check_pairs(
        self, position: int, thunk: Thunk, reads: list[int], writes: list[int]
    ) -> None:
        allowed = {(self._root(a), self._root(b)) for a, b in thunk.inplace}
        for index, result in enumerate(writes):
            for other in writes[index + 1 :]:
                if other in self.neighbours[result]:
                    raise PassError(
                        f"memory plan: thunk {position} of {thunk.node} writes slots {result} and {other}, "
                        f"which overlap"
                    )
            for operand in reads:
                if operand in self.neighbours[result]:
                    offsets = self.plan.offsets  # slots of a state have none, and are all the same
                    same = offsets.get(operand) == offsets.get(result)
                    if (operand, result) not in allowed or not same:
                        raise PassError(
                            f"memory plan: thunk {position} of {thunk.node} writes slot {result} over its "
                            f"operand in slot {operand}"
                        )
