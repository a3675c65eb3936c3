# SPDX-License-Identifier: Apache-2.0
"""Conversion of a caller's numbers to a declared dtype, where nothing may be lost but the rounding of floats.

`numeric.cast` is what a Cast operator does to data: it truncates, wraps and saturates. A weight that a caller hands
over must not change its meaning on the way, so here every value that the dtype cannot hold is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.base import numeric
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array

__all__ = ["convert_exactly"]

_BLOCK = 1 << 20
"""Elements converted at a time: temporary arrays stay small beside the data."""


def convert_exactly(source: Array, to: DType, what: str) -> Array:
    """Return a new C-contiguous array of a dtype with the values of another.

    Floats round to the nearest float. Everything else has to be exact: integers and bools must be representable, floats
    become integers only if they are whole and in range, finite floats must stay finite.

    Args:
        source: any shape.
        to: the dtype.
        what: the subject of messages.

    Raises:
        UsageError: a value does not fit; the message has the first one and its flat index.
    """
    kind = DType.of(source.dtype)
    if kind is to:
        return np.array(source, order="C", copy=True)
    if kind.is_complex and not to.is_complex:
        raise UsageError(f"{what} is {to}, it cannot hold {kind} values; pass their real part")
    target = np.empty(source.shape, to.numpy)
    flat, out = np.ascontiguousarray(source).reshape(-1), target.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        with np.errstate(all="ignore"):
            converted = numeric.cast(block, to)
            bad = _lost(block, converted, kind, to)
        if bad.any():
            index = int(np.argmax(bad))
            raise UsageError(
                f"{what} is {to}, which cannot hold {block[index]} ({kind}), element {start + index} in row-major "
                f"order; {_remedy(kind, to)}"
            )
        out[start : start + _BLOCK] = converted
    return target


def _remedy(kind: DType, to: DType) -> str:
    if kind.is_float and not to.is_float:
        return "round and clip the values first"
    return f"scale or clip the values first, or declare another dtype than {to}"


def _lost(before: Array, after: Array, kind: DType, to: DType) -> Any:
    """Return which elements changed by more than the rounding of a float."""
    if to.is_complex:
        return np.isfinite(before) & ~np.isfinite(after)
    if kind.is_float and to.is_float:
        return _overflowed(numeric.cast(before, DType.F64), numeric.cast(after, DType.F64), to)
    if kind.is_float:
        wide = numeric.cast(before, DType.F64)
        low, high = _range(to)
        return ~((wide >= low) & (wide < high + 1) & (wide == np.trunc(wide)))
    whole = before.astype(np.int8) if kind in (DType.I4, DType.U4, DType.BOOL) else before
    if to.is_float:
        return _rounded(whole, numeric.cast(after, DType.F64))
    low, high = _range(to)
    return (whole < low) | (whole > high)


def _overflowed(wide: Array, narrow: Array, to: DType) -> Any:
    """Return which floats became infinite, NaN or the largest value, and were not before."""
    limit = {DType.F8E4M3: 448.0, DType.F8E5M2: 57344.0}.get(to)  # these saturate
    if limit is not None:
        return np.abs(wide) > limit
    return np.isfinite(wide) & ~np.isfinite(narrow)


def _range(to: DType) -> tuple[int, int]:
    if to is DType.BOOL:
        return 0, 1
    if to in (DType.I4, DType.U4):
        return (-8, 7) if to is DType.I4 else (0, 15)
    info = np.iinfo(to.numpy)
    return int(info.min), int(info.max)


def _rounded(whole: Array, after: Array) -> Any:
    """Return which integers are not what the floats say; exact also beyond 2**53."""
    bad = ~np.isfinite(after)
    large = ~bad & (np.abs(after) >= 2.0**53)
    bad |= ~large & (after != whole)
    for index in np.flatnonzero(large):
        bad[index] = int(after[index]) != int(whole[index])
    return bad
