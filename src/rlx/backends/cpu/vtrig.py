# SPDX-License-Identifier: Apache-2.0
"""Trigonometric functions and their inverses over builder values.

f32 arguments are reduced in f64: Cody-Waite with 106 bits of pi/2 up to 2^30, Payne-Hanek with a table of 2/pi
beyond; the polynomials run in f32. f64 functions call the C library lane by lane.
"""

from __future__ import annotations

import math

from rlx.backends.cpu.builder import Function, Value
from rlx.backends.cpu.lltypes import F32, F64, I32, I64
from rlx.backends.cpu.vpoly import libm, polynomial

__all__ = ["acos", "asin", "atan", "atan2", "cos", "sin", "tan"]

_SIN_TAIL = (-0.16666655, 0.008332177, -0.0001951714)
"""(sin(r) / r - 1) / r^2 in r^2 on |r| <= pi/4."""
_COS_TAIL = (0.041666646, -0.0013887367, 2.4438283e-05)
"""(cos(r) - 1 + r^2 / 2) / r^4 in r^2 on |r| <= pi/4."""
_ATAN_TAIL = (
    -0.333333, 0.19998549, -0.14264244, 0.10952195, -0.08403476, 0.057958014, -0.031178253, 0.010914819, -0.0017936687
)  # fmt: skip
"""(atan(t) / t - 1) / t^2 in t^2 on [0, 1]."""
_ASIN_TAIL = (0.16666754, 0.07495233, 0.04547829, 0.024141261, 0.042230077)
"""(asin(t) / t - 1) / t^2 in t^2 on [0, 1/2]."""

_PIO2_HI = 1.5707963267948966
_PIO2_LO = 6.123233995736766e-17
"""pi/2 = hi + lo to 106 bits."""
_PIO2_F32 = (1.57079637050628662109375, -4.371139000186241e-08)
_PI_F32 = (3.1415927410125732421875, -8.742278000372482e-08)
_MAGIC = 1.5 * 2.0**52
_LARGE = 2.0**30

_TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561
"""floor(2/pi * 2^256)."""
_LOW_EXPONENT = 30 - 23
_TABLE = range(_LOW_EXPONENT, 128 - 23)
"""E for |x| = M 2^E with a 24-bit M, from 2^30 to the largest f32."""


def _reduce(f: Function, x: Value) -> tuple[Value, Value]:
    """Return r (f32) and the quadrant (i32, low 2 bits count) with x = quadrant * pi/2 + r, |r| <= pi/4."""
    wide = f.f32_to_f64(x)
    shifted = f.fma(wide, 2.0 / math.pi, _MAGIC)
    n = shifted - _MAGIC
    r = f.fma(n, -_PIO2_LO, f.fma(n, -_PIO2_HI, wide))
    quadrant = f.bitcast(shifted, I64)
    with f.if_else(f.any(f.abs(x) >= _LARGE)) as branch:
        with branch.then():
            branch.yields(*_reduce_large(f, x, r, quadrant))
        with branch.otherwise():
            branch.yields(r, quadrant)
    r, quadrant = branch.results
    return f.f64_to_f32(r), f.trunc(quadrant, I32)


def _reduce_large(f: Function, x: Value, r: Value, quadrant: Value) -> tuple[Value, Value]:
    """Replace r and quadrant of finite lanes beyond 2^30 by products of the mantissa with 94 bits of 2/pi.

    With x = M 2^E, the product of M and the bits of 2/pi from position 2 - E on, modulo 2^64, is x * 2/pi modulo 4
    in units of 2^-62; higher bits of 2/pi only add multiples of 4.
    """
    words = f.module.table("two_over_pi", [_window(e, 62, 64) for e in _TABLE], I64)
    more = f.module.table("two_over_pi_more", [_window(e, 94, 32) for e in _TABLE], I64)
    bits = f.bitcast(f.abs(x), I32)
    large = (bits >= 0x4E800000) & (bits < 0x7F800000)
    row = f.select(large, bits.lshr(23) - (127 + 30), 0)
    mantissa = f.zext((bits & 0x7FFFFF) | 0x800000, I64)
    high, low = (_lookup(f, f.address_of(table), row, mantissa) for table in (words, more))
    product = mantissa * high + (mantissa * low).lshr(32)
    nearest = (product + (1 << 61)).lshr(62)
    fraction = product - nearest.shl(62)
    reduced = f.int_to_float(fraction, F64, signed=True) * (math.pi / 2 * 2.0**-62)
    negative = f.bitcast(x, I32) < 0
    reduced = f.select(negative, -reduced, reduced)
    nearest = f.select(negative, 0 - nearest, nearest)
    return f.select(large, reduced, r), f.select(large, nearest, quadrant)


def _window(exponent: int, low: int, width: int) -> int:
    """Bits of 2/pi * 2^exponent with weight 2^-low and up, `width` of them, as a signed 64-bit number."""
    word = (_TWO_OVER_PI >> (256 - exponent - low)) & ((1 << width) - 1)
    return word - (1 << 64) if word >> 63 else word


def _lookup(f: Function, table: Value, row: Value, like: Value) -> Value:
    if like.type.lanes:
        return f.gather(like.type, table, f.sext(row, I64))
    return f.load(I64, table, f.sext(row, I64))


def _sin_of(f: Function, r: Value) -> Value:
    z = r * r
    # As a factor, so that -0 stays -0.
    return r * f.fma(z, polynomial(f, z, _SIN_TAIL), 1.0)


def _cos_of(f: Function, r: Value) -> Value:
    z = r * r
    return f.fma(z * z, polynomial(f, z, _COS_TAIL), f.fma(z, -0.5, 1.0))


def _circular(f: Function, x: Value, turn: int) -> Value:
    r, quadrant = _reduce(f, x)
    quadrant = quadrant + turn
    value = f.select((quadrant & 1).eq(0), _sin_of(f, r), _cos_of(f, r))
    return f.bitcast(f.bitcast(value, I32) ^ (quadrant & 2).shl(30), F32)


def sin(f: Function, x: Value) -> Value:
    """Sine; NaN for infinities."""
    return libm(f, "sin", x) if x.type.scalar is F64 else _circular(f, x, 0)


def cos(f: Function, x: Value) -> Value:
    """Cosine; NaN for infinities."""
    return libm(f, "cos", x) if x.type.scalar is F64 else _circular(f, x, 1)


def tan(f: Function, x: Value) -> Value:
    """Tangent; NaN for infinities."""
    if x.type.scalar is F64:
        return libm(f, "tan", x)
    r, quadrant = _reduce(f, x)
    s, c = _sin_of(f, r), _cos_of(f, r)
    even = (quadrant & 1).eq(0)
    return f.select(even, s, -c) / f.select(even, c, s)


def _atan_of(f: Function, t: Value) -> Value:
    z = t * t
    return f.fma(t * z, polynomial(f, z, _ATAN_TAIL), t)


def _minus(f: Function, pair: tuple[float, float], x: Value) -> Value:
    """Return hi + lo - x."""
    return f.const(pair[0], x.type) - (x - pair[1])


def atan(f: Function, x: Value) -> Value:
    """Arc tangent."""
    if x.type.scalar is F64:
        return libm(f, "atan", x)
    a = f.abs(x)
    steep = a > 1.0
    p = _atan_of(f, f.select(steep, 1.0, a) / f.select(steep, a, 1.0))
    return f.copysign(f.select(steep, _minus(f, _PIO2_F32, p), p), x)


def atan2(f: Function, y: Value, x: Value) -> Value:
    """Angle of the point (x, y) in (-pi, pi], with the special cases of C99."""
    if x.type.scalar is F64:
        return libm(f, "atan2", y, x)
    ax, ay = f.abs(x), f.abs(y)
    steep = ay > ax
    low, high = f.select(steep, ax, ay), f.select(steep, ay, ax)
    # 0 / 0 stands for the angle 0, inf / inf for pi/4.
    t = f.select(high.eq(0), 0.0, f.select(low.eq(math.inf), 1.0, low / high))
    p = _atan_of(f, t)
    p = f.select(steep, _minus(f, _PIO2_F32, p), p)
    p = f.select(f.bitcast(x, I32) < 0, _minus(f, _PI_F32, p), p)
    return f.select(x.is_nan() | y.is_nan(), x + y, f.copysign(p, y))


def _asin_parts(f: Function, x: Value) -> tuple[Value, Value]:
    """Return the mask |x| > 1/2 and asin(|x|), or (pi/2 - asin(|x|)) / 2 under the mask."""
    a = f.abs(x)
    steep = a > 0.5
    z = f.select(steep, (1.0 - a) * 0.5, a * a)
    s = f.select(steep, f.sqrt(z), a)
    return steep, f.fma(s * z, polynomial(f, z, _ASIN_TAIL), s)


def asin(f: Function, x: Value) -> Value:
    """Arc sine; NaN outside [-1, 1]."""
    if x.type.scalar is F64:
        return libm(f, "asin", x)
    steep, p = _asin_parts(f, x)
    return f.copysign(f.select(steep, _minus(f, _PIO2_F32, p + p), p), x)


def acos(f: Function, x: Value) -> Value:
    """Arc cosine; NaN outside [-1, 1]."""
    if x.type.scalar is F64:
        return libm(f, "acos", x)
    steep, p = _asin_parts(f, x)
    double = p + p
    negative = x < 0
    outer = f.select(negative, _minus(f, _PI_F32, double), double)
    return f.select(steep, outer, _minus(f, _PIO2_F32, f.select(negative, -p, p)))
