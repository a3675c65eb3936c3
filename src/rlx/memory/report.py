# SPDX-License-Identifier: Apache-2.0
"""Which tensor takes which bytes, and when: what memory reports and the picture of the arena are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlx.kernel.program import NodeInfo, Program, SlotKind
from rlx.memory.plan import Plan

__all__ = ["Placement", "Share", "placements", "shares"]


@dataclass(frozen=True)
class Placement:
    """One buffer.

    Attributes:
        kind: `arena`, `weight` or `state`.
        name: of the value or weight; empty if the model has no name for it.
        op: the operator that makes it; empty for weights and states.
        node: names of the model's nodes whose work that is.
        type: dtype and shape, or `buffer` for memory that only one operator uses.
        nbytes: planned for: its extents at their upper bounds.
        offset: in the arena; -1 elsewhere.
        first: thunk that touches it first; -1 outside of the arena.
        last: and last.
    """

    kind: str
    name: str
    op: str
    node: tuple[str, ...]
    type: str
    nbytes: int
    offset: int = -1
    first: int = -1
    last: int = -1


@dataclass(frozen=True)
class Share:
    """The bytes of all buffers of one operator and type."""

    kind: str
    op: str
    type: str
    count: int
    nbytes: int


def placements(program: Program, plan: Plan, weights: Mapping[int, int]) -> list[Placement]:
    """Return the buffers of a program, in order of their offset.

    Args:
        program: what is planned.
        plan: where its arena slots lie.
        weights: slot -> bytes of every weight as the kernels read it.
    """
    values = {v.slot: v for v in reversed(program.values)}
    makers: dict[int, NodeInfo] = {}
    for thunk in program.thunks:
        for slot in thunk.writes():
            if thunk.node is not None:
                makers.setdefault(program.root(slot), thunk.node)
    found: list[Placement] = []
    for slot, offset in plan.offsets.items():
        value, node, live = values.get(slot), makers.get(slot), plan.intervals[slot]
        assert program.slots[slot].kind is SlotKind.ARENA
        found.append(
            Placement(
                "arena",
                "" if value is None else value.name,
                "" if node is None else node.op,
                () if node is None else node.names,
                "buffer" if value is None else str(value),
                plan.sizes[slot],
                offset,
                live.first,
                live.last,
            )
        )
    found.sort(key=lambda p: (p.offset, p.first))
    for slot, nbytes in weights.items():
        value = values.get(slot)
        name = program.weights[slot].name
        found.append(
            Placement("weight", name, "", (), "constant" if value is None else str(value), nbytes)
        )
    for state in program.states:
        text, nbytes = str(values[state.slot]), plan.states.get(state.slot, 0)
        found.append(Placement("state", state.name, "", (), text, nbytes))
    return found


def shares(tensors: Sequence[Placement], kind: str) -> list[Share]:
    """Return the bytes by operator and type, the most first."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.kind == kind:
            count, nbytes = totals.get((tensor.op, tensor.type), (0, 0))
            totals[tensor.op, tensor.type] = (count + 1, nbytes + tensor.nbytes)
    rows = [Share(kind, op, text, count, n) for (op, text), (count, n) in totals.items()]
    return sorted(rows, key=lambda r: (-r.nbytes, r.op, r.type))
