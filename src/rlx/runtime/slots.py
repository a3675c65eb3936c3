# SPDX-License-Identifier: Apache-2.0
"""The operand buffers of a program as its last run left them: where each lies, and its bytes as an array."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rlx.backends.protocol import CompiledGraph, MappedGraph
from rlx.base import config
from rlx.base.dims import evaluate
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.kernel.program import SlotKind, ValueInfo
from rlx.runtime.taps import Stored

__all__ = ["SlotRecord", "refuse_views", "slot_records"]


@dataclass(frozen=True, eq=False)
class SlotRecord:
    """One value that a program stores.

    Attributes:
        name: in the model; empty if it has none there.
        node: the node that writes it last; empty for what a run only reads.
        kind: `arena`, `weight`, `state`, `view` (of one of these), `input` or `output`.
        offset: of its first byte in the arena, the weight or the state. None: it lies in memory of the caller, or
            nowhere yet.
        shape: extents of the last run; before the first one, those that memory is planned for.
        dtype: of the elements.
        intact: whether no later kernel of a run writes over it, nor the check of `RLX_CHECK`, which fills intermediate
            values as they die.
        array: over the bytes themselves, without a copy; None where there is no offset. Weights are read-only.
    """

    name: str
    node: str
    kind: str
    offset: int | None
    shape: tuple[int, ...]
    dtype: DType
    intact: bool
    array: Array | None


def slot_records(
    compiled: CompiledGraph, extents: Mapping[str, int], what: str
) -> list[SlotRecord]:
    """Return the values that a program stores, in the order in which it stores them.

    Args:
        compiled: the program; its memory is planned.
        extents: the value of every symbol.
        what: its name, for messages.

    Raises:
        UsageError: the device has no memory that the host sees.
    """
    if not isinstance(compiled, MappedGraph):
        raise UsageError(f"{what} has no slots: its device plans no memory that the host sees")
    extents = {**compiled.extents(), **extents}
    lasting = _Lasting(compiled, extents)
    return [_record(compiled, value, extents, lasting) for value in compiled.program.values]


def refuse_views(compiled: CompiledGraph, arrays: Iterable[Array]) -> None:
    """Raise a UsageError if an input or buffer of a run is a view of memory that the run works in."""
    if not isinstance(compiled, MappedGraph):
        return
    slots = enumerate(compiled.program.slots)
    worked_in = [i for i, s in slots if s.kind in (SlotKind.ARENA, SlotKind.STATE)]
    blocks = {id(found[0].base): found[0] for i in worked_in if (found := compiled.block(i))}
    for array in arrays:
        if any(np.may_share_memory(array, block) for block in blocks.values()):
            raise UsageError(
                "an input or buffer is a view of the executable's own memory, from `slots`, which the run works in; "
                "give a copy"
            )


def _record(
    compiled: MappedGraph, value: ValueInfo, extents: Mapping[str, int], lasting: _Lasting
) -> SlotRecord:
    program = compiled.program
    root = program.root(value.slot)
    shape = tuple([evaluate(d, extents) for d in value.shape])
    nbytes = evaluate(program.slots[value.slot].nbytes, extents)
    found = compiled.block(value.slot)
    offset, array = None, None
    if found is not None and 0 <= found[1] <= found[0].nbytes - nbytes:
        block, offset = found
        array = block[offset : offset + nbytes].view(value.dtype.numpy).reshape(shape)
        array.flags.writeable = program.slots[root].kind is not SlotKind.WEIGHT
    thunk = lasting.writers.get(value.slot, [None])[-1]
    info = None if thunk is None else program.thunks[thunk].node
    return SlotRecord(
        value.name,
        "" if info is None else info.location,
        program.slots[value.slot].kind.value,
        offset,
        shape,
        value.dtype,
        offset is not None and lasting.holds(root),
        array,
    )


class _Lasting:
    """Which arena slots keep what was last written to them."""

    def __init__(self, compiled: MappedGraph, extents: Mapping[str, int]) -> None:
        program = compiled.program
        self.writers = Stored(program).writers
        ends: dict[int, int] = {}
        for slot, thunks in self.writers.items():
            root = program.root(slot)
            ends[root] = max(ends.get(root, -1), thunks[-1])
        self._kind = {slot: program.slots[slot].kind for slot in ends}
        self._lost: set[int] = set()
        if config.CHECK.get():
            self._lost.update(s for s, kind in self._kind.items() if kind is SlotKind.ARENA)
            return
        covered = _Covered()
        for slot in sorted(ends, key=lambda s: -ends[s]):
            found = compiled.block(slot) if self._kind[slot] is SlotKind.ARENA else None
            if found is None:
                continue
            start, stop = found[1], found[1] + evaluate(program.slots[slot].nbytes, extents)
            if covered.meets(start, stop):
                self._lost.add(slot)
            covered.add(start, stop)

    def holds(self, slot: int) -> bool:
        """Return whether a root slot holds at the end of a run what was last written to it."""
        return slot not in self._lost


class _Covered:
    """A union of intervals, disjoint and in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Return which intervals touch [start, stop): from, to (exclusive)."""
        return bisect_left(self._stops, start), bisect_right(self._starts, stop)

    def meets(self, start: int, stop: int) -> bool:
        """Return whether [start, stop) shares an element with the union."""
        first, last = self._range(start, stop)
        touched = zip(self._starts[first:last], self._stops[first:last], strict=True)
        return any(a < stop and start < b for a, b in touched)

    def add(self, start: int, stop: int) -> None:
        """Unite with [start, stop)."""
        first, last = self._range(start, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]
