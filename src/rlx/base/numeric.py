# SPDX-License-Identifier: Apache-2.0
"""Every conversion and integer rule of the numeric contract, once, in NumPy.

Operators use these and never `astype`, `//`, `%`, `sort` or `maximum` directly. Float to integer truncates toward
zero and saturates, NaN gives 0; integers wrap; integer division truncates toward zero and refuses a zero divisor;
shifts of the width or more give 0; NaN is the greatest value and ties go to the lower index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError

__all__ = [
    "Array",
    "argsort",
    "cast",
    "float_mod",
    "int_div",
    "int_mod",
    "maximum",
    "minimum",
    "round_half_even",
    "shift_left",
    "shift_right",
    "widen",
]

Array = np.ndarray[Any, np.dtype[Any]]


def cast(x: Array, to: DType, *, saturate: bool = True) -> Array:
    """Convert the elements of `x` to a dtype by the rules above.

    Args:
        x: any shape, any dtype.
        to: the target dtype.
        saturate: for fp8 targets, clamp finite overflow and infinities to the largest finite value; otherwise they
            become NaN (e4m3fn) or infinity (e5m2).
    """
    source = DType.of(x.dtype)
    if source is to:
        return x
    if to is DType.BOOL:
        return np.asarray(x != 0)
    if source.is_complex and not to.is_complex:
        return cast(np.real(x), to, saturate=saturate)
    if to.is_integer and source.is_float:
        return _float_to_int(x, to)
    if to in (DType.F8E4M3, DType.F8E5M2):
        return _to_fp8(x, to, saturate)
    if to in (DType.I4, DType.U4):
        low, high = (-8, 7) if to is DType.I4 else (0, 15)
        mask = np.bitwise_and(x.astype(np.int64), 15)
        return (
            np.where(mask > high, mask - 16, mask).astype(to.numpy)
            if low < 0
            else mask.astype(to.numpy)
        )
    with np.errstate(all="ignore"):
        if source.is_narrow_float or source in (DType.I4, DType.U4):
            wide = x.astype(np.float32 if source.is_float else np.int8)
            return wide.astype(to.numpy)
        if to in (DType.BF16, DType.F16) and source in (
            DType.I32,
            DType.I64,
            DType.U32,
            DType.U64,
            DType.F64,
        ):
            return _round_once(x, to)
        return x.astype(to.numpy)


def _round_once(x: Array, to: DType) -> Array:
    """Round wide values to f16 or bf16 without an f32 step in between (round to odd first)."""
    wide = x.astype(np.float64)
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        exact = wide.astype(object) if x.size == 0 else np.vectorize(int, otypes=[object])(wide)
        error = np.asarray(x.astype(object) - exact)  # of rank 0 it would be a plain int
        wide = _to_odd(wide, np.sign(error.astype(np.float64)))
    narrow = wide.astype(np.float32)
    back = narrow.astype(np.float64)
    direction = np.where(np.isfinite(back) & np.isfinite(wide), np.sign(wide - back), 0.0)
    return _to_odd(narrow, direction).astype(to.numpy)


def _to_odd(x: Array, error_sign: Array) -> Array:
    """Make the last bit odd where the value was inexact, stepping toward the exact value."""
    bits = x.view(np.uint32 if x.dtype == np.float32 else np.uint64)
    toward = np.nextafter(x, np.where(error_sign > 0, np.inf, -np.inf).astype(x.dtype))
    even = (bits & 1) == 0
    return np.where((error_sign != 0) & even, toward, x)


def _float_to_int(x: Array, to: DType) -> Array:
    if to in (DType.I4, DType.U4):
        low, high = (-8, 7) if to is DType.I4 else (0, 15)
        return np.clip(_float_to_int(x, DType.I32), low, high).astype(to.numpy)
    info = np.iinfo(to.numpy)
    wide = x.astype(np.float64)
    top = float(info.max) + (0.0 if info.bits < 64 else 1.0)
    with np.errstate(invalid="ignore"):
        whole = np.trunc(np.where(np.isnan(wide), 0.0, wide))
        too_high = whole >= top if info.bits == 64 else whole > info.max
        too_low = whole < info.min
        inside = np.where(too_high | too_low, 0.0, whole).astype(to.numpy)
    return np.where(too_high, info.max, np.where(too_low, info.min, inside)).astype(to.numpy)


def _to_fp8(x: Array, to: DType, saturate: bool) -> Array:
    wide = np.asarray(x, dtype=np.float32) if DType.of(x.dtype) is not DType.F64 else x
    limit = 448.0 if to is DType.F8E4M3 else 57344.0
    if saturate:
        return np.where(np.isnan(wide), wide, np.clip(wide, -limit, limit)).astype(to.numpy)
    with np.errstate(all="ignore"):
        return wide.astype(to.numpy)


def widen(x: Array) -> Array:
    """Return narrow floats as f32, everything else unchanged."""
    return x.astype(np.float32) if DType.of(x.dtype).is_narrow_float else x


def _refuse_zero(b: Array) -> None:
    zero = np.asarray(b == 0)
    if zero.any():
        raise ExecutionError(
            f"integer division by zero at element {int(np.argmax(zero.reshape(-1)))} of the divisor"
        )


def int_div(a: Array, b: Array) -> Array:
    """Return a / b truncated toward zero; the type minimum by -1 wraps to itself.

    Raises:
        ExecutionError: a divisor is zero.
    """
    _refuse_zero(b)
    return _wrap_div(a, b)


def _wrap_div(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(a, b)
    with np.errstate(all="ignore"):
        if a.dtype.kind == "u":
            return np.floor_divide(a, b)
        safe = np.where(b == -1, 1, b).astype(b.dtype)
        quotient = np.floor_divide(a, safe)
        remainder = a - quotient * safe
        quotient = quotient + ((remainder != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
        return np.where(b == -1, np.negative(a), quotient).astype(a.dtype)


def int_mod(a: Array, b: Array, *, truncate: bool) -> Array:
    """Return the remainder with the sign of the divisor (floor), or of the dividend (`truncate`, C's).

    Raises:
        ExecutionError: a divisor is zero.
    """
    _refuse_zero(b)
    with np.errstate(all="ignore"):
        remainder = np.asarray(a - _wrap_div(a, b) * b).astype(a.dtype)
        if truncate or a.dtype.kind == "u":
            return remainder
        return np.where(
            (remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder
        ).astype(a.dtype)


def float_mod(a: Array, b: Array, *, truncate: bool) -> Array:
    """Return the float remainder with the sign of the divisor (floor), or of the dividend (`truncate`, fmod)."""
    with np.errstate(all="ignore"):
        return np.asarray(np.fmod(a, b) if truncate else np.mod(a, b))


def shift_left(a: Array, b: Array) -> Array:
    """Return a << b; a shift of the width or more gives 0."""
    width = a.dtype.itemsize * 8
    big = (b >= width) | (b < 0)
    return np.where(big, 0, np.left_shift(a, np.where(big, 0, b).astype(a.dtype))).astype(a.dtype)


def shift_right(a: Array, b: Array) -> Array:
    """Return a >> b (logical for unsigned); a shift of the width or more gives 0."""
    width = a.dtype.itemsize * 8
    big = (b >= width) | (b < 0)
    return np.where(big, 0, np.right_shift(a, np.where(big, 0, b).astype(a.dtype))).astype(a.dtype)


def round_half_even(x: Array) -> Array:
    """Return x rounded to whole numbers, halves to even."""
    return np.asarray(np.rint(x))


def maximum(a: Array, b: Array) -> Array:
    """Return the elementwise maximum; NaN if either is NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.maximum(a, b))


def minimum(a: Array, b: Array) -> Array:
    """Return the elementwise minimum; NaN if either is NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.minimum(a, b))


def argsort(x: Array, axis: int, *, descending: bool = False) -> Array:
    """Return the stable order along an axis: NaN is the greatest value, equal values keep the lower index first."""
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    # Reversing both the data and the result keeps ties in index order.
    flipped = np.argsort(np.flip(x, axis=axis), axis=axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(flipped, axis=axis)
