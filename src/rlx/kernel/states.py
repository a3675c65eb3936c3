# SPDX-License-Identifier: Apache-2.0
"""Where the next value of a state is written: into the state's own memory where nobody reads the old value any more.

The scheduler gives a next value a slot of its own. Here that slot, and those it took its bytes over from, become
aliases of the state's slot if the order of the thunks proves it harmless for all extents; what is left is copied at
the end of the program.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rlx.base.errors import ModelError
from rlx.kernel.program import NodeInfo, Program, SlotArg, SlotKind, StateSlots, ThunkKind

__all__ = ["place_in_states", "refuse_copy"]


def place_in_states(
    program: Program, following: Sequence[int], late: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """Make slots of next values aliases of their states' slots where that is safe.

    Args:
        program: scheduled but for the copies at its end; `program.states` name the slots of the old values.
        following: slot of the next value of every state, in the same order.
        late: slots that the copies at the end will read.

    Returns:
        Index of the state -> its aliases, the last of which holds the next value when the program ends. States that
        are not there have to be copied.
    """
    if not program.states:
        return {}
    touches = _Touches.of(program)
    after = {program.root(s) for s in late}
    kept = after | {program.root(s) for s in following}
    placed: dict[int, tuple[int, ...]] = {}
    for index, (state, slot) in enumerate(zip(program.states, following, strict=True)):
        if program.slots[slot].kind is not SlotKind.ARENA or following.count(slot) > 1:
            continue
        others = {s for i, s in enumerate(following) if i != index}
        if state.slot in after or state.slot in {program.root(s) for s in others}:
            continue
        chain = _chain(program, touches, slot, kept)
        for first in range(len(chain)):
            if _is_safe(program, touches, state.slot, chain[first:]):
                _take_over(program, state.slot, chain[first:])
                placed[index] = tuple(chain[first:])
                break
    return placed


@dataclass
class _Touches:
    """Positions of the thunks that read and write each slot or a view of it."""

    reads: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    writes: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    @classmethod
    def of(cls, program: Program) -> _Touches:
        found = cls()
        for position, thunk in enumerate(program.thunks):
            if thunk.kind is ThunkKind.BIND:
                continue
            for arg in thunk.args:
                if isinstance(arg, SlotArg):
                    table = found.writes if arg.writes else found.reads
                    table.setdefault(program.root(arg.slot), []).append(position)
        return found

    def last(self, slot: int) -> int:
        return max(self.reads.get(slot, [-1])[-1], self.writes.get(slot, [-1])[-1])

    def first_write(self, slot: int) -> int:
        return self.writes.get(slot, [-1])[0]


def refuse_copy(
    program: Program, source: int, result: int, info: NodeInfo, late: Collection[int]
) -> None:
    """Raise ModelError if rows are written into a copy of a state: its slot `source` is not the slot `result`.

    Args:
        program: with all next values placed.
        source: slot of what the rows are written into.
        result: slot of the result.
        info: the node that writes.
        late: slots that the copies at the end will read.
    """
    root = program.root(source)
    state = next((s for s in program.states if root in _group(s)), None)
    if state is None or program.root(result) in _group(state):
        return
    start = next(i for i, t in enumerate(program.thunks) if result in t.writes())
    readers = [
        thunk.node
        for thunk in program.thunks[start:]
        if thunk.node not in (None, info) and any(program.root(s) == root for s in thunk.reads())
    ]
    again = any(
        program.root(s) == root
        for t in program.thunks[start + 1 :]
        if t.node == info
        for s in t.reads()
    )
    if readers:
        why = f"{readers[0]} reads the old rows after it"
    elif again:
        why = "the rows that it writes are rows of that state"
    elif root in {program.root(s) for s in late}:
        why = "an output or another state takes the old rows"
    else:
        why = "its result is not the next value of that state, or not of that one alone"
    raise ModelError(
        f"{info} would copy all of state {state.name!r} in every run: {why}. Read the state before the rows are "
        "written or read what write_rows returns instead, make that the state's next value, or allow the copy "
        "with copy=True"
    )


def _group(state: StateSlots) -> set[int]:
    return {state.slot, *state.aliases}


def _chain(program: Program, touches: _Touches, slot: int, kept: Collection[int]) -> list[int]:
    """Return the arena slots that hand their bytes on in place until they reach a slot; that one comes last."""
    chain = [slot]
    while True:
        position = touches.first_write(chain[0])
        if position < 0 or _in_loop(program, position):
            return chain
        sources = [a for a, b in program.thunks[position].inplace if b == chain[0]]
        source = next((s for s in sources if program.slots[s].kind is SlotKind.ARENA), None)
        if source is None or source in chain or source in kept:
            return chain
        if touches.last(source) != position:
            return chain
        if _in_loop(program, touches.first_write(source)):
            return chain
        chain.insert(0, source)


def _in_loop(program: Program, position: int) -> bool:
    return any(first <= position <= last for first, last in program.loops)


def _is_safe(program: Program, touches: _Touches, state: int, chain: Sequence[int]) -> bool:
    """Return whether every read of the old value comes before the first write of the chain.

    The thunk of that write may read it too if its kernel allows it.
    """
    start = touches.first_write(chain[0])
    if start < 0:
        return False
    reads = touches.reads.get(state, [])
    if (state, chain[0]) in program.thunks[start].inplace:
        direct = {a.slot for a in program.thunks[start].args if isinstance(a, SlotArg)}
        views = [s for s in direct if s != state and program.root(s) == state]
        if any(r > start for r in reads) or views:
            return False
    elif any(r >= start for r in reads):
        return False
    writes = [p for slot in chain for p in touches.writes.get(slot, [])]
    return not any(
        any(first <= r <= last for r in reads) and any(first <= w <= last for w in writes)
        for first, last in program.loops
    )


def _take_over(program: Program, state: int, chain: Sequence[int]) -> None:
    group = {state, *chain}
    for slot in chain:
        program.slots[slot].kind = SlotKind.STATE
    for thunk in program.thunks:
        if thunk.copies and all(a in group and b in group for a, b in thunk.inplace):
            thunk.chunks = 0
