# SPDX-License-Identifier: Apache-2.0
"""When each arena slot holds a value that somebody still needs."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.kernel.program import Program, SlotArg, SlotKind

__all__ = ["Interval", "live_intervals"]


@dataclass(slots=True)
class Interval:
    """First and last thunk (inclusive) that touch a slot or a view of it."""

    first: int
    last: int


def live_intervals(program: Program) -> dict[int, Interval]:
    """Return the interval of every arena slot.

    The order of the table is the order of time. What is touched inside a loop and also outside lives through the
    whole loop; arms of a branch come one after the other, so they may share bytes.
    """
    touches: dict[int, list[int]] = {}
    for position, thunk in enumerate(program.thunks):
        for arg in thunk.args:
            if isinstance(arg, SlotArg):
                root = program.root(arg.slot)
                if program.slots[root].kind is SlotKind.ARENA:
                    times = touches.setdefault(root, [])
                    if not times or times[-1] != position:
                        times.append(position)
    intervals = {slot: Interval(times[0], times[-1]) for slot, times in touches.items()}
    for first, last in program.loops:
        for slot, times in touches.items():
            inside = any(first <= t <= last for t in times)
            if inside and not (first <= times[0] and times[-1] <= last):
                interval = intervals[slot]
                interval.first, interval.last = min(interval.first, first), max(interval.last, last)
    return intervals
