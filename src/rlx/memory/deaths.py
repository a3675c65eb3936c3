# SPDX-License-Identifier: Apache-2.0
"""Which bytes of the arena a plan calls dead after which thunk, so that check mode can destroy them."""

from __future__ import annotations

from rlx.kernel.program import Program, ThunkKind
from rlx.memory.plan import Plan

__all__ = ["deaths"]

_WATCHED = (ThunkKind.CALL, ThunkKind.HOST)


def deaths(program: Program, plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Return (offset, bytes) of the slots that die at a thunk, by its position.

    A slot whose bytes a result took over in place lives on as that result. Slots that die at a jump (at the end of a
    loop) are left out: a dispatcher stops behind kernels and operators of the host only, and one thunk later the bytes
    may belong to somebody else.
    """
    taken_over = set(plan.reused.values())
    found: dict[int, list[tuple[int, int]]] = {}
    for slot, interval in plan.intervals.items():
        if slot not in taken_over and program.thunks[interval.last].kind in _WATCHED:
            found.setdefault(interval.last, []).append((plan.offsets[slot], plan.sizes[slot]))
    return found
