# SPDX-License-Identifier: Apache-2.0
"""Offsets for all arena slots: in-place reuse first, then first fit over an interval index.

Every buffer goes to the lowest offset that is free while it lives. The order decides how good that is: several are
tried, then local search moves buffers earlier until the arena is within 2 % of the lower bound (the maximum of
simultaneously live bytes) or the budget is spent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlx.base.dims import bounds
from rlx.base.facts import current_facts
from rlx.kernel.program import Program, SlotKind
from rlx.memory.liveness import Interval, live_intervals

__all__ = ["ALIGNMENT", "Plan", "plan_memory"]

ALIGNMENT = 64
_GOOD_ENOUGH = 1.02
_FEW = 4000
_SEARCH_PLACEMENTS = 30_000
"""Buffers placed during local search; about two seconds at the most."""
_LEAST_MOVES = 25
"""Fewer moves, of one buffer among many, change nothing: then there is no local search."""


@dataclass
class Plan:
    """Where every arena slot lies.

    Attributes:
        offsets: arena slot -> byte offset.
        sizes: arena slot -> bytes it is planned for (its extents at their upper bounds).
        arena: bytes of the arena.
        lower_bound: the maximum of simultaneously live bytes; no plan can be smaller.
        scratch: bytes each participant of a run needs.
        states: slot of a state's value -> bytes it takes at the bounds; they are not in the arena.
        intervals: arena slot -> when it is live.
        reused: result slot -> operand slot whose bytes it took over in place.
    """

    offsets: dict[int, int] = field(default_factory=dict[int, int])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    arena: int = 0
    lower_bound: int = 0
    scratch: int = 0
    states: dict[int, int] = field(default_factory=dict[int, int])
    intervals: dict[int, Interval] = field(default_factory=dict[int, Interval])
    reused: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def state(self) -> int:
        """Bytes of all states."""
        return sum(self.states.values())


@dataclass(slots=True)
class _Buffer:
    """Slots that share bytes because each takes over from the one before in place."""

    slots: list[int]
    size: int
    first: int
    last: int
    offset: int = -1


def plan_memory(program: Program, uppers: Mapping[str, int], *, reuse: bool = True) -> Plan:
    """Return the plan for extents up to `uppers`.

    Args:
        program: the scheduled program.
        uppers: upper bound of every symbol.
        reuse: False gives every slot its own bytes (for bisecting memory faults).
    """
    plan = Plan(intervals=live_intervals(program))
    for slot in plan.intervals:
        plan.sizes[slot] = max(_at_bound(program.slots[slot].nbytes, uppers), 1)
    plan.scratch = max((_at_bound(t.scratch, uppers) for t in program.thunks), default=0)
    plan.states = {s.slot: _at_bound(program.slots[s.slot].nbytes, uppers) for s in program.states}
    if reuse:
        plan.reused = _in_place(program, plan)
    buffers = _buffers(plan)
    plan.lower_bound = _lower_bound(buffers)
    if reuse:
        plan.arena = _place_best(buffers, plan.lower_bound)
    else:
        for buffer in buffers:
            buffer.offset, plan.arena = plan.arena, plan.arena + _aligned(buffer.size)
    for buffer in buffers:
        for slot in buffer.slots:
            plan.offsets[slot] = buffer.offset
    return plan


def _at_bound(nbytes: object, uppers: Mapping[str, int]) -> int:
    return nbytes if isinstance(nbytes, int) else bounds(nbytes, uppers)[1]  # pyright: ignore[reportArgumentType]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _in_place(program: Program, plan: Plan) -> dict[int, int]:
    """Return result slot -> operand slot for every legal take-over."""
    facts = current_facts() if not program.facts.equalities else program.facts
    taken: dict[int, int] = {}
    given: set[int] = set()
    for position, thunk in enumerate(program.thunks):
        for operand, result in thunk.inplace:
            if result in taken or operand in given or operand == result:
                continue
            a, b = plan.intervals.get(operand), plan.intervals.get(result)
            if a is None or b is None or a.last != position or b.first != position:
                continue
            if any(program.slots[s].kind is not SlotKind.ARENA for s in (operand, result)):
                continue
            if facts.equal(program.slots[operand].nbytes, program.slots[result].nbytes) is not True:
                continue
            taken[result] = operand
            given.add(operand)
    return taken


def _buffers(plan: Plan) -> list[_Buffer]:
    buffers: dict[int, _Buffer] = {}
    for slot, interval in sorted(plan.intervals.items(), key=lambda item: item[1].first):
        operand = plan.reused.get(slot)
        if operand is None:
            buffers[slot] = _Buffer([slot], plan.sizes[slot], interval.first, interval.last)
            continue
        buffer = buffers[operand]
        buffer.slots.append(slot)
        buffer.last = max(buffer.last, interval.last)
        buffer.size = max(buffer.size, plan.sizes[slot])
        buffers[slot] = buffer
    return list({id(b): b for b in buffers.values()}.values())


def _lower_bound(buffers: Sequence[_Buffer]) -> int:
    events: dict[int, int] = {}
    for b in buffers:
        events[b.first] = events.get(b.first, 0) + _aligned(b.size)
        events[b.last + 1] = events.get(b.last + 1, 0) - _aligned(b.size)
    live = best = 0
    for time in sorted(events):
        live += events[time]
        best = max(best, live)
    return best


def _place_best(buffers: list[_Buffer], lower_bound: int) -> int:
    """Try several placement orders, then local search; keep the smallest arena and leave its offsets in the buffers."""
    orders: list[Callable[[_Buffer], tuple[int, ...]]] = [
        lambda b: (-b.size, b.first),
        lambda b: (-b.size * (b.last - b.first + 1), b.first),
        lambda b: (b.first, -b.size),
        lambda b: (b.first - b.last, -b.size),
    ]
    best, kept, order = -1, [0] * len(buffers), buffers
    moves = _SEARCH_PLACEMENTS // max(len(buffers), 1)
    for key in orders if len(buffers) <= _FEW else orders[:2]:
        candidate = sorted(buffers, key=key)
        size = _place(candidate)
        if best < 0 or size < best:
            best, kept, order = size, [b.offset for b in buffers], candidate
        if best <= lower_bound * _GOOD_ENOUGH:
            break
    if best > lower_bound * _GOOD_ENOUGH:
        size = _place(sorted(buffers, key=lambda b: b.first), lower_bound)
        if size < best:
            best, kept = size, [b.offset for b in buffers]
        elif moves >= _LEAST_MOVES and order is not buffers:
            _place(order)  # the search starts from its offsets
    if moves >= _LEAST_MOVES and best > lower_bound * _GOOD_ENOUGH:
        best, kept = _search(buffers, order, moves, (best, kept), lower_bound)
    for buffer, offset in zip(buffers, kept, strict=True):
        buffer.offset = offset
    return max(best, 0)


def _search(
    buffers: list[_Buffer],
    order: list[_Buffer],
    moves: int,
    start: tuple[int, list[int]],
    lower_bound: int,
) -> tuple[int, list[int]]:
    """Move single buffers (half of the time one at the top of the arena) earlier in the order while that helps."""
    best, kept = start
    generator = random.Random(0)  # noqa: S311  (a fixed seed: the same program always gets the same plan)
    for _ in range(moves):
        candidate = list(order)
        top = [i for i, b in enumerate(candidate) if b.offset + _aligned(b.size) >= best]
        picked = (
            generator.choice(top)
            if top and generator.random() < 0.5
            else generator.randrange(len(candidate))
        )
        candidate.insert(generator.randrange(picked + 1), candidate.pop(picked))
        size = _place(candidate)
        if size <= best:
            best, kept, order = size, [b.offset for b in buffers], candidate
            if best <= lower_bound * _GOOD_ENOUGH:
                break
        else:
            for buffer, offset in zip(buffers, kept, strict=True):
                buffer.offset = offset
    return best, kept


class _TimeIndex:
    """Placed buffers by time, in a hierarchy of spans, so that long and short intervals are both found quickly."""

    def __init__(self, end: int) -> None:
        self.levels = max(end, 1).bit_length()
        self.spans: dict[tuple[int, int], list[_Buffer]] = {}

    def add(self, buffer: _Buffer) -> None:
        """Enter a buffer at the smallest aligned span that holds its interval."""
        level = (buffer.first ^ buffer.last).bit_length()
        self.spans.setdefault((level, buffer.first >> level), []).append(buffer)

    def overlapping(self, buffer: _Buffer) -> list[_Buffer]:
        """Return the buffers that are live at some time when the given one is."""
        first, last = buffer.first, buffer.last
        found: list[_Buffer] = []
        for level in range(self.levels + 1):
            low, high = first >> level, last >> level
            if high - low > len(self.spans):
                spans = [k for k in self.spans if k[0] == level and low <= k[1] <= high]
            else:
                spans = [(level, s) for s in range(low, high + 1)]
            for key in spans:
                found += [b for b in self.spans.get(key, ()) if b.first <= last and first <= b.last]
        return found


def _place(ordered: Sequence[_Buffer], ceiling: int = 0) -> int:
    """Give every buffer, in this order, the lowest offset where it fits; return the size of the arena.

    With a ceiling, every second buffer hangs as high below it as it can: in a chain, where each buffer meets only the
    one before and the one after, that needs no more than the lower bound.
    """
    index = _TimeIndex(max((b.last for b in ordered), default=0))
    arena = 0
    for position, buffer in enumerate(ordered):
        size = _aligned(buffer.size)
        taken = sorted((o.offset, o.offset + _aligned(o.size)) for o in index.overlapping(buffer))
        buffer.offset = _highest(taken, size, ceiling) if position % 2 and ceiling else -1
        if buffer.offset < 0:
            buffer.offset = _lowest(taken, size)
        index.add(buffer)
        arena = max(arena, buffer.offset + size)
    return arena


def _lowest(taken: Sequence[tuple[int, int]], size: int) -> int:
    offset = 0
    for start, stop in taken:
        if start - offset >= size:
            break
        offset = max(offset, stop)
    return offset


def _highest(taken: Sequence[tuple[int, int]], size: int, ceiling: int) -> int:
    """Return the highest free offset below a ceiling; negative if there is none."""
    top = ceiling
    for start, stop in sorted(taken, key=lambda span: -span[1]):
        if top - stop >= size:
            break
        top = min(top, start)
    return top - size
