# SPDX-License-Identifier: Apache-2.0
"""Conversions between dtypes over builder values, by the numeric contract.

In registers a narrow float is an f32 that holds a value of its format, a bool is an i1, a 4-bit integer is an i8;
in memory f16 and bf16 are i16; fp8, bool and 4-bit integers (low nibble) are i8.
`widen` and `narrow` cross that border, `cast`
converts between register forms. Every conversion rounds once, to nearest even; NaN stays a quiet NaN.

The hardware's bf16 instruction is not used: it flushes denormals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlx.backends.cpu.builder import Function, Value
from rlx.backends.cpu.lltypes import F16, F32, F64, I8, I16, I32, scalar_type
from rlx.base.dtypes import DType
from rlx.base.errors import BuildError

__all__ = ["cast", "narrow", "round_to", "widen"]


@dataclass(frozen=True)
class _Fp8:
    """An 8-bit float format.

    Attributes:
        mantissa: explicit mantissa bits.
        bias: exponent bias.
        largest: bits of the largest finite value.
        overflow: bits that stand for a value too large, when not saturating.
        nan: bits of the quiet NaN.
    """

    mantissa: int
    bias: int
    largest: int
    overflow: int
    nan: int


_FP8 = {
    DType.F8E4M3: _Fp8(mantissa=3, bias=7, largest=0x7E, overflow=0x7F, nan=0x7F),
    DType.F8E5M2: _Fp8(mantissa=2, bias=15, largest=0x7B, overflow=0x7C, nan=0x7E),
}
_NIBBLES = (DType.I4, DType.U4)
_WIDE_INTEGERS = (DType.I32, DType.U32, DType.I64, DType.U64)


def widen(f: Function, raw: Value, dtype: DType) -> Value:
    """Return the register form of a stored element.

    Args:
        f: where to emit.
        raw: of the storage type of `dtype`, any lane count.
        dtype: what is stored.
    """
    if dtype is DType.F16:
        return f.cast("fpext", f.bitcast(raw, F16), F32)
    if dtype is DType.BF16:
        return f.bitcast(f.zext(raw, I32).shl(16), F32)
    if dtype in _FP8:
        return _from_fp8(f, raw, _FP8[dtype])
    if dtype in _NIBBLES:
        return _nibble(raw, dtype)
    return raw.ne(0) if dtype is DType.BOOL else raw


def narrow(f: Function, value: Value, dtype: DType, *, saturate: bool = True) -> Value:
    """Return the stored form of a register value, rounding an f32 to the format of `dtype`.

    Args:
        f: where to emit.
        value: of the register type of `dtype`, any lane count.
        dtype: what is stored.
        saturate: for fp8, what is too large becomes the largest finite value; else NaN (e4m3) or infinity (e5m2).
    """
    if dtype is DType.F16:
        return f.bitcast(f.cast("fptrunc", value, F16), I16)
    if dtype is DType.BF16:
        return _to_bf16(f, value)
    if dtype in _FP8:
        return _to_fp8(f, value, _FP8[dtype], saturate=saturate)
    if dtype in _NIBBLES:
        return value & 15
    return f.zext(value, I8) if dtype is DType.BOOL else value


def round_to(f: Function, value: Value, dtype: DType, *, saturate: bool = True) -> Value:
    """Round an f32 to the values of a narrow float dtype; other dtypes return the value itself."""
    if not dtype.is_narrow_float:
        return value
    return widen(f, narrow(f, value, dtype, saturate=saturate), dtype)


def cast(
    f: Function, value: Value, source: DType, target: DType, *, saturate: bool = True
) -> Value:
    """Convert between the register forms of two dtypes.

    Integers wrap, floats truncate toward zero and saturate into integers (NaN gives 0), anything but 0 is true.

    Raises:
        BuildError: complex dtypes have no register form.
    """
    if source.is_complex or target.is_complex:
        raise BuildError(f"cast from {source} to {target}: convert the real and imaginary parts")
    if source is target:
        return value
    if target is DType.BOOL:
        return value.ne(0)
    if source is DType.BOOL:
        value, source = f.zext(value, I8), DType.U8
    if target.is_float:
        return _to_float(f, value, source, target, saturate=saturate)
    if source.is_float:
        return _float_to_integer(f, value, target)
    return _wrap(f, value, source, target)


def _wrap(f: Function, value: Value, source: DType, target: DType) -> Value:
    kind = scalar_type(target)
    if kind.bits != value.type.bits:
        value = f.resize(value, kind, signed=source.is_signed)
    return _nibble(value, target) if target in _NIBBLES else value


def _nibble(value: Value, dtype: DType) -> Value:
    """Return the low 4 bits of an i8 as a number of that dtype."""
    return value & 15 if dtype is DType.U4 else value.shl(4).ashr(4)


def _float_to_integer(f: Function, value: Value, target: DType) -> Value:
    if target in (DType.I4, DType.U4):
        low, high = (-8, 7) if target is DType.I4 else (0, 15)
        whole = f.float_to_int(value, I32, signed=True)
        return f.trunc(f.smax(f.smin(whole, high), low), I8)
    return f.float_to_int(value, scalar_type(target), signed=target.is_signed)


def _to_float(f: Function, value: Value, source: DType, target: DType, *, saturate: bool) -> Value:
    if target is DType.F64:
        return f.f32_to_f64(value) if source.is_float else _int_to(f, value, source, DType.F64)
    if target is DType.F32:
        if source is DType.F64:
            return f.f64_to_f32(value)
        return value if source.is_float else _int_to(f, value, source, DType.F32)
    if source is DType.F64:
        value = _to_f32_odd(f, value)
    elif source in _WIDE_INTEGERS:
        # f32 would round first; f64 holds every bit that decides the rounding.
        value = _to_f32_odd(f, _int_to_f64_sticky(f, value, source))
    elif source.is_integer:
        value = _int_to(f, value, source, DType.F32)
    return round_to(f, value, target, saturate=saturate)


def _int_to(f: Function, value: Value, source: DType, target: DType) -> Value:
    return f.int_to_float(value, scalar_type(target), signed=source.is_signed)


def _int_to_f64_sticky(f: Function, value: Value, source: DType) -> Value:
    """Convert exactly, or for 64-bit integers with the low bits of large ones folded into one sticky bit."""
    if source in (DType.I32, DType.U32):
        return _int_to(f, value, source, DType.F64)
    magnitude = f.abs(value) if source.is_signed else value
    dropped = magnitude & 0xFFFF
    folded = (magnitude - dropped) | f.umin(dropped, 1).shl(16)
    exact = f.select(magnitude.ult(1 << 40), magnitude, folded)
    wide = f.int_to_float(exact, F64, signed=False)
    return f.select(value < 0, -wide, wide) if source.is_signed else wide


def _to_f32_odd(f: Function, value: Value) -> Value:
    """Round f64 to f32 toward zero with the last bit set when inexact, so that a second rounding sees the tie."""
    nearest = f.f64_to_f32(value)
    back = f.f32_to_f64(nearest)
    bits = f.bitcast(nearest, I32)
    too_far = f.abs(back) > f.abs(value)
    toward_zero = bits - f.zext(too_far, I32)
    return f.bitcast(toward_zero | f.zext(back.ne(value), I32), F32)


def _to_bf16(f: Function, value: Value) -> Value:
    bits = f.bitcast(value, I32)
    top = bits.lshr(16)
    rounded = (bits + (top & 1) + 0x7FFF).lshr(16)
    return f.trunc(f.select(value.is_nan(), top | 0x40, rounded), I16)


def _from_fp8(f: Function, raw: Value, fmt: _Fp8) -> Value:
    wide = f.zext(raw, I32)
    sign, rest = (wide & 0x80).shl(24), wide & 0x7F
    # Exponent and mantissa land in their f32 fields; the product corrects the bias and normalises denormals.
    number = f.bitcast(rest.shl(23 - fmt.mantissa), F32) * 2.0 ** (127 - fmt.bias)
    special = fmt.overflow
    if fmt.overflow == fmt.nan:
        number = f.select(rest.eq(special), math.nan, number)
    else:
        number = f.select(rest.ugt(special), math.nan, f.select(rest.eq(special), math.inf, number))
    return f.bitcast(f.bitcast(number, I32) | sign, F32)


def _to_fp8(f: Function, value: Value, fmt: _Fp8, *, saturate: bool) -> Value:
    bits = f.bitcast(value, I32)
    magnitude = bits & 0x7FFFFFFF
    drop = 23 - fmt.mantissa
    odd = magnitude.lshr(drop) & 1
    normal = (magnitude + odd + ((1 << (drop - 1)) - 1)).lshr(drop) - (
        (127 - fmt.bias) << fmt.mantissa
    )
    # Adding a power whose last bit has the weight of the format's denormals rounds at that bit.
    anchor = 2.0 ** (1 - fmt.bias - fmt.mantissa + 23)
    anchor_bits = (127 + 1 - fmt.bias - fmt.mantissa + 23) << 23
    denormal = f.bitcast(f.bitcast(magnitude, F32) + anchor, I32) - anchor_bits
    small = magnitude < ((127 + 1 - fmt.bias) << 23)
    code = f.select(small, denormal, normal)
    code = f.smin(code, fmt.largest if saturate else fmt.overflow)
    code = f.select(value.is_nan(), f.const(fmt.nan, code.type), code)
    return f.trunc(code | (bits.lshr(24) & 0x80), I8)
