# SPDX-License-Identifier: Apache-2.0
"""Index maps: how a point of an iteration space reads an operand without a copy.

Transpose, slice with any step, flip and expand are index maps; reshape is not (it aliases the buffer instead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.base.dims import Dim
from rlx.base.types import Shape

__all__ = ["AxisMap", "IndexMap", "broadcast_map"]


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


def broadcast_map(operand: Sequence[Dim], rank: int) -> IndexMap:
    """Return the map by which an operand broadcasts (NumPy rules) to a space of this rank."""
    lead = rank - len(operand)
    return IndexMap(
        rank, tuple(AxisMap(None if d == 1 else lead + i) for i, d in enumerate(operand))
    )
