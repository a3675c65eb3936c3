# SPDX-License-Identifier: Apache-2.0
"""How far two results of the same computation are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.numeric import Array

__all__ = ["Difference", "difference", "differences"]

_TOLERANCE = {DType.F64: 1e-9, DType.F32: 1e-4, DType.F16: 2e-2, DType.BF16: 1e-1}
"""Largest difference over the largest magnitude: what roundings in another order may add up to in a deep model."""


@dataclass(frozen=True)
class Difference:
    """Two arrays that should be alike and are not.

    Attributes:
        name: of the value.
        what: in words.
        error: largest difference over the largest magnitude; infinite if they cannot be compared.
    """

    name: str
    what: str
    error: float

    def __str__(self) -> str:
        return f"{self.name!r}: {self.what}"


def differences(
    left: Mapping[str, Array], right: Mapping[str, Array], tolerance: float | None = None
) -> list[Difference]:
    """Return what differs, by name, in the order of `left`; see `difference`."""
    found = [
        difference(name, array, right[name], tolerance)
        if name in right
        else Difference(name, "only one side has it", np.inf)
        for name, array in left.items()
    ]
    return [d for d in found if d is not None]


def difference(
    name: str, left: Array, right: Array, tolerance: float | None = None
) -> Difference | None:
    """Return how two arrays differ, or None if they agree.

    Floats agree if the largest difference is within the tolerance times the largest finite magnitude, and NaN and
    infinities are at the same places; integers and booleans if they are equal.

    Args:
        name: for the result.
        left: one array.
        right: the other.
        tolerance: for floats and integers; by default by dtype.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        shown = [f"{a.dtype}{list(a.shape)}" for a in (left, right)]
        return Difference(name, f"{shown[0]} on one side, {shown[1]} on the other", np.inf)
    dtype = DType.of(left.dtype)
    bound = _TOLERANCE.get(dtype, 0.0) if tolerance is None else tolerance
    wide = np.complex128 if dtype.is_complex else np.float64 if dtype.is_float else np.longdouble
    a, b = left.astype(wide), right.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return None
    finite = np.isfinite(a) & np.isfinite(b)
    odd = int((~finite & ~same).sum())
    if odd:
        where = _first(~finite & ~same)
        text = f"{odd} of {a.size} elements are not finite on one side only, the first at {where}: "
        return Difference(name, f"{text}{left[tuple(where)]} and {right[tuple(where)]}", np.inf)
    gap = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), 0)
    scale = float(max(np.abs(a[finite]).max(initial=0), np.abs(b[finite]).max(initial=0)))
    error = float(gap.max()) / scale if scale else np.inf
    if error <= bound:
        return None
    where = [int(i) for i in np.unravel_index(int(np.argmax(gap)), gap.shape)]
    return Difference(
        name,
        f"largest difference {float(gap.max()):.6g} at {where} ({left[tuple(where)]} and {right[tuple(where)]}), "
        f"{error:.3g} of the largest magnitude where {bound:.3g} is allowed",
        error,
    )


def _first(mask: Array) -> list[int]:
    return [int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape)]
