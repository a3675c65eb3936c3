# SPDX-License-Identifier: Apache-2.0
"""Iteration spaces: how operands are walked; axes that everybody walks alike collapse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rlx.base.dims import Dim, product
from rlx.base.dtypes import DType
from rlx.base.facts import Facts
from rlx.base.types import Shape, TensorType
from rlx.expr.index import IndexMap

__all__ = [
    "Access",
    "Step",
    "broadcast_access",
    "collapse",
    "dense",
    "dense_access",
    "mapped_access",
]


class Step(Enum):
    """How an operand moves along the innermost axis; part of a kernel's text."""

    FIXED = "0"  # one element for all points
    UNIT = "1"  # neighbours in memory
    ANY = "n"  # a stride known at run time


@dataclass(frozen=True)
class Access:
    """How an iteration space walks one buffer.

    Attributes:
        slot: the buffer.
        dtype: of its elements.
        strides: elements from one point to the next, per axis of the space.
        offset: element of the first point.
    """

    slot: int
    dtype: DType
    strides: tuple[Dim, ...]
    offset: Dim = 0

    @property
    def step(self) -> Step:
        """How it moves along the innermost axis."""
        inner = self.strides[-1]
        if inner == 0:
            return Step.FIXED
        return Step.UNIT if inner == 1 else Step.ANY

    def moved(self, offset: Dim) -> Access:
        """Return the same walk starting `offset` elements further."""
        return replace(self, offset=self.offset + offset)


def dense(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the row-major strides of a shape."""
    return tuple(product(shape[i + 1 :]) for i in range(len(shape)))


def dense_access(slot: int, dtype: DType, shape: Shape) -> Access:
    """Return the walk of a whole row-major buffer of that shape."""
    return Access(slot, dtype, dense(shape))


def broadcast_access(slot: int, operand: TensorType, rank: int, facts: Facts) -> Access:
    """Return the walk by which an operand broadcasts (NumPy rules) to a space of `rank` axes."""
    strides = [
        0 if facts.equal(extent, 1) is True else stride
        for extent, stride in zip(operand.shape, dense(operand.shape), strict=True)
    ]
    return Access(slot, operand.dtype, (*([0] * (rank - operand.rank)), *strides))


def mapped_access(slot: int, operand: TensorType, index_map: IndexMap) -> Access:
    """Return the walk of an operand through an index map."""
    strides, offset = index_map.strides(operand.shape)
    return Access(slot, operand.dtype, strides, offset)


def collapse(
    shape: Shape, accesses: Sequence[Access], border: int | None = None
) -> tuple[Shape, list[Access], int]:
    """Drop axes of extent 1 and merge neighbours that every access walks as one.

    Args:
        shape: the iteration space.
        accesses: all walks over it.
        border: axes before it and from it on are not merged with each other (default: the rank, so
            all may merge).

    Returns:
        The new shape, the accesses over it, and the new border.
    """
    border = len(shape) if border is None else border
    extents: list[Dim] = []
    columns: list[list[Dim]] = []  # per kept axis: the stride of every access
    kept_border = 0
    for axis, extent in enumerate(shape):
        if axis == border:
            kept_border = len(extents)
        if extent == 1:
            continue
        column = [a.strides[axis] for a in accesses]
        first = kept_border if axis >= border else 0
        if len(extents) > first and columns[-1] == [stride * extent for stride in column]:
            extents[-1] = extents[-1] * extent
            columns[-1] = column
        else:
            extents.append(extent)
            columns.append(column)
    if border >= len(shape):
        kept_border = len(extents)
    walks = [replace(a, strides=tuple(c[i] for c in columns)) for i, a in enumerate(accesses)]
    return tuple(extents), walks, kept_border
