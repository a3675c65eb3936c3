# SPDX-License-Identifier: Apache-2.0
"""Index maps: how a point of an iteration space reads an operand without a copy.

Transpose, slice with any step, flip and expand are index maps; reshape is not (it aliases the buffer instead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.base.dims import Dim, dim_max, less_equal
from rlx.base.facts import current_facts
from rlx.base.types import Shape

__all__ = ["AxisMap", "IndexMap", "broadcast_map", "range_margins"]


@dataclass(frozen=True, slots=True)
class AxisMap:
    """Index along one operand axis: ``start + step * i[axis]``, or ``start`` where axis is None."""

    axis: int | None
    start: Dim = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class IndexMap:
    """One `AxisMap` per operand axis, over a space of rank `rank`."""

    rank: int
    axes: tuple[AxisMap, ...]

    def strides(self, operand: Shape) -> tuple[tuple[Dim, ...], Dim]:
        """Return (element stride per space axis, element offset) for a dense row-major operand."""
        per_axis: list[Dim] = [0] * self.rank
        offset: Dim = 0
        stride: Dim = 1
        for mapped, extent in zip(reversed(self.axes), reversed(operand), strict=True):
            offset = offset + mapped.start * stride
            if mapped.axis is not None:
                per_axis[mapped.axis] = per_axis[mapped.axis] + stride * mapped.step
            stride = stride * extent
        return tuple(per_axis), offset

    def margins(self, operand: Shape, space: Shape) -> list[Dim]:
        """Return extents of which none may be negative, or a point of the space would read outside of the operand.

        Those that never are negative are left out.
        """
        found: list[Dim] = []
        for mapped, extent in zip(self.axes, operand, strict=True):
            size = 1 if mapped.axis is None else space[mapped.axis]
            found += range_margins(extent, mapped.start, size, mapped.step)
        return found


def range_margins(extent: Dim, start: Dim, size: Dim, step: int) -> list[Dim]:
    """Return extents of which none may be negative if start + step * i, i < size, is to lie in [0, extent).

    Those that never are negative are left out.
    """
    canon = current_facts().canon
    last = start + (size - 1) * step
    low, high = (start, last) if step > 0 else (last, start)
    found: list[Dim] = []
    for room in (canon(low), canon(extent - 1 - high)):
        # Nothing is read where the size is 0.
        margin = room if less_equal(1, size) is True else dim_max(room, size * -1)
        if less_equal(0, room) is not True and less_equal(0, margin) is not True:
            found.append(margin)
    return found


def broadcast_map(operand: Sequence[Dim], rank: int) -> IndexMap:
    """Return the map by which an operand broadcasts (NumPy rules) to a space of this rank."""
    lead = rank - len(operand)
    return IndexMap(
        rank, tuple(AxisMap(None if d == 1 else lead + i) for i, d in enumerate(operand))
    )
