# SPDX-License-Identifier: Apache-2.0
"""Tensor types and the shape rules that many operators share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.base.dims import Dim, product
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.facts import current_facts

__all__ = [
    "Shape",
    "TensorType",
    "broadcast_shapes",
    "normalize_axes",
    "normalize_axis",
    "require_equal",
]

Shape = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dtype and a shape of static (`int`) or symbolic extents. Values are dense and row-major."""

    dtype: DType
    shape: Shape

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def elements(self) -> Dim:
        """Number of elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Dim:
        """Size in bytes."""
        return product(self.shape) * self.dtype.itemsize

    @property
    def is_static(self) -> bool:
        """True if no extent is symbolic."""
        return all(isinstance(d, int) for d in self.shape)

    def with_shape(self, shape: Sequence[Dim]) -> TensorType:
        """Return this type with another shape."""
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> TensorType:
        """Return this type with another dtype."""
        return TensorType(dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def normalize_axis(axis: int, rank: int, what: str = "axis") -> int:
    """Return the axis counted from the front.

    Raises:
        TypeRuleError: it is outside [-rank, rank).
    """
    if not -rank <= axis < rank:
        raise TypeRuleError(f"{what} {axis} is out of range for a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def normalize_axes(axes: Sequence[int], rank: int, what: str = "axes") -> tuple[int, ...]:
    """Return the axes counted from the front, sorted.

    Raises:
        TypeRuleError: one is out of range or named twice.
    """
    out = tuple(sorted(normalize_axis(a, rank, what) for a in axes))
    if len(set(out)) != len(out):
        raise TypeRuleError(f"{what} {tuple(axes)} name an axis twice (rank {rank})")
    return out


def require_equal(a: Dim, b: Dim, what: str) -> Dim:
    """Return the common extent, assuming equality under a guard where the symbols do not tell.

    Raises:
        TypeRuleError: the extents differ.
    """
    if a == b:
        return a
    if not current_facts().assume_equal(a, b, what):
        raise TypeRuleError(f"{what}: extents {a} and {b} differ")
    return a if isinstance(a, int) or not isinstance(b, int) else b


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the NumPy broadcast of the shapes.

    A symbol broadcasts as 1 only where a hint says so; that is recorded as a guard.

    Raises:
        TypeRuleError: the shapes do not broadcast.
    """
    rank = max((len(s) for s in shapes), default=0)
    out: list[Dim] = []
    for axis in range(rank):
        dim: Dim = 1
        for shape in shapes:
            index = axis - (rank - len(shape))
            if index >= 0:
                dim = _broadcast_dim(dim, shape[index], shapes)
        out.append(dim)
    return tuple(out)


def _broadcast_dim(a: Dim, b: Dim, shapes: tuple[Shape, ...]) -> Dim:
    if b in (a, 1):
        return a
    if a == 1:
        return b
    facts = current_facts()
    what = f"broadcast of {' and '.join(_text(s) for s in shapes)}"
    if facts.assume_equal(a, b, what):
        return a if isinstance(a, int) or not isinstance(b, int) else b
    for one, other in ((a, b), (b, a)):
        if not isinstance(one, int) and facts.assume_equal(one, 1, what):
            return other
    raise TypeRuleError(f"{what}: extents {a} and {b} differ and neither is 1")


def _text(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"
