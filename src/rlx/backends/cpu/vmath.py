# SPDX-License-Identifier: Apache-2.0
"""Elementary functions over builder values: f32 and f64, scalars and vectors of any width.

Bounds: every f32 function is within 4 ULP of the exact value over all inputs, denormal inputs and results included,
and follows C99 for NaN, infinities and signed zeros. f64 `exp`, `exp2`, `expm1`, `log` and its relatives, `tanh`,
`sigmoid` and `erf` are polynomials too; the other f64 functions call the C library lane by lane.

All code is straight-line, except that `sin`, `cos` and `tan` branch over the whole vector when a lane exceeds 2^30.
Coefficients are minimax fits (Remez exchange, or weighted least squares for rational functions) in 200-bit arithmetic
of the expressions named beside them, in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlx.backends.cpu.builder import Function, Value
from rlx.backends.cpu.lltypes import F32, F64, Type, int_type
from rlx.backends.cpu.vpieces import erf_by_pieces
from rlx.backends.cpu.vpoly import apply_f64, libm, polynomial
from rlx.backends.cpu.vtrig import acos, asin, atan, atan2, cos, sin, tan
from rlx.expr.approximations import ERF32_BORDER, ERF32_LIMIT, ERF32_SMALL, ERF32_TAIL

__all__ = [
    "UNARY",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "power",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
]


@dataclass(frozen=True)
class _Format:
    """Constants of one float format.

    Attributes:
        bits: width.
        mantissa: explicit mantissa bits.
        bias: exponent bias.
        magic: 1.5 * 2^mantissa: adding it rounds to an integer that appears in the low bits.
        tiny: least normal number.
        ln2_hi: ln 2 rounded to the format.
        ln2_lo: ln 2 - ln2_hi.
        exp_low: exp of anything below rounds to 0.
        exp_high: exp of anything above overflows.
        exp_tail: (e^r - 1 - r) / r^2 on |r| <= ln2 / 2.
    """

    bits: int
    mantissa: int
    bias: int
    magic: float
    tiny: float
    ln2_hi: float
    ln2_lo: float
    exp_low: float
    exp_high: float
    exp_tail: tuple[float, ...]

    def lanes_of_int(self, kind: Type) -> Type:
        """Return the integer vector type as wide as `kind`."""
        return int_type(self.bits, kind.lanes)

    @property
    def magic_bits(self) -> int:
        """The bit pattern of `magic`."""
        return ((self.mantissa + self.bias) << self.mantissa) | (1 << (self.mantissa - 1))


_F32 = _Format(
    bits=32,
    mantissa=23,
    bias=127,
    magic=1.5 * 2.0**23,
    tiny=2.0**-126,
    ln2_hi=0.693147182464599609375,
    ln2_lo=-1.904654299957768e-09,
    exp_low=-104.0,
    exp_high=89.0,
    exp_tail=(0.5, 0.16666518, 0.041666105, 0.008368994, 0.0013958268),
)
_F64 = _Format(
    bits=64,
    mantissa=52,
    bias=1023,
    magic=1.5 * 2.0**52,
    tiny=2.0**-1022,
    ln2_hi=0.6931471805599453,
    ln2_lo=2.3190468138462996e-17,
    exp_low=-746.0,
    exp_high=710.0,
    exp_tail=(
        0.5000000000000013,
        0.1666666666666672,
        0.04166666666651443,
        0.00833333333329123,
        0.001388888894735513,
        0.00019841269955839718,
        2.4801489527388398e-05,
        2.755717852653282e-06,
        2.7631446880869515e-07,
        2.5130891255962153e-08,
    ),
)
_LOG2E = 1.4426950408889634
_LOG10E = 0.4342944819032518
_LOG10_2 = 0.3010299956639812


def _format(x: Value) -> _Format:
    return _F32 if x.type.scalar is F32 else _F64


# Exponential


def _scale(f: Function, p: Value, n: Value, shifted: Value) -> Value:
    """Return p * 2^n with one rounding, also where the result is denormal.

    `shifted` holds n in the low bits of the integer view of n + magic. The power is applied as two factors whose
    exponents are in range; the first product is exact.
    """
    fmt = _format(p)
    bits = p.type.lanes * p.type.bits
    if f.isa.has_avx512 and bits == 512:
        lane = "ps" if fmt is _F32 else "pd"
        return f.intrinsic(f"x86.avx512.mask.scalef.{lane}.512", p, n, p, -1, 4)
    total = shifted - (fmt.magic_bits - 2 * fmt.bias)
    low = total.lshr(1)
    factors = [f.bitcast(part.shl(fmt.mantissa), p.type.scalar) for part in (low, total - low)]
    return p * factors[0] * factors[1]


def _round_scaled(f: Function, x: Value, factor: float) -> tuple[Value, Value]:
    """Return n = x * factor rounded to an integer, and the integer view of n + magic."""
    fmt = _format(x)
    sum_ = f.fma(x, factor, fmt.magic) if factor != 1.0 else x + fmt.magic
    return sum_ - fmt.magic, f.bitcast(sum_, int_type(fmt.bits))


def _reduce(f: Function, x: Value) -> tuple[Value, Value, Value]:
    """Return n, its integer view, and r with x = n ln2 + r, |r| <= ln2 / 2."""
    fmt = _format(x)
    n, shifted = _round_scaled(f, x, _LOG2E)
    r = f.fma(n, -fmt.ln2_hi, x)
    return n, shifted, f.fma(n, -fmt.ln2_lo, r)


def _exp_of(f: Function, r: Value) -> Value:
    tail = _format(r).exp_tail
    return polynomial(f, r, (1.0, 1.0, *tail))


def _expm1_of(f: Function, r: Value) -> Value:
    return f.fma(polynomial(f, r, _format(r).exp_tail) * r, r, r)


def _clamp(f: Function, x: Value, low: float | None, high: float | None) -> Value:
    """Clamp; NaN stays NaN (the compared operand order lets it through)."""
    if low is not None:
        x = f.fmax_fast(f.const(low, x.type), x)
    return x if high is None else f.fmin_fast(f.const(high, x.type), x)


def exp(f: Function, x: Value) -> Value:
    """e^x; underflows gradually, overflows to inf."""
    fmt = _format(x)
    n, shifted, r = _reduce(f, _clamp(f, x, fmt.exp_low, fmt.exp_high))
    return _scale(f, _exp_of(f, r), n, shifted)


def _exp_nonpositive(f: Function, x: Value) -> Value:
    n, shifted, r = _reduce(f, _clamp(f, x, _format(x).exp_low, None))
    return _scale(f, _exp_of(f, r), n, shifted)


_SOFTMAX_EXP = (1.0, 0.693147, 0.24022242, 0.055507336, 0.009671513, 0.0013264727)
"""2^r on |r| <= 1/2, within 1.6e-7 when evaluated in f32."""


def softmax_exp(f: Function, x: Value) -> Value:
    """e^x for an f32 x <= 0 that is weighed against e^0: off by 1.6e-7 of itself and 2e-8 of 1.

    Two thirds of the work of `exp`. One product reduces x: its error grows with |x|, but e^x falls faster.
    """
    fmt = _F32
    x = _clamp(f, x, fmt.exp_low, None)
    n, shifted = _round_scaled(f, x, _LOG2E)
    return _scale(f, polynomial(f, f.fma(x, _LOG2E, -n), _SOFTMAX_EXP), n, shifted)


def _half_exp(f: Function, x: Value) -> Value:
    """e^x / 2 without overflow where the half is finite, for 0 <= x."""
    fmt = _format(x)
    n, shifted, r = _reduce(f, _clamp(f, x, None, fmt.exp_high + 1.0))
    return _scale(f, _exp_of(f, r), n - 1.0, shifted - 1)


def exp2(f: Function, x: Value) -> Value:
    """2^x; underflows gradually, overflows to inf."""
    fmt = _format(x)
    x = _clamp(f, x, -fmt.bias - fmt.mantissa - 2.0, fmt.bias + 2.0)
    n, shifted = _round_scaled(f, x, 1.0)
    return _scale(f, _exp_of(f, (x - n) * math.log(2.0)), n, shifted)


def expm1(f: Function, x: Value) -> Value:
    """e^x - 1, accurate near 0."""
    fmt = _format(x)
    # Below, the result rounds to -1; above, to inf.
    _, shifted, r = _reduce(f, _clamp(f, x, -2.0 * fmt.mantissa + 6.0, fmt.exp_high))
    # Half of 2^n, since 2^n itself overflows for the largest arguments.
    half = f.bitcast((shifted - (fmt.magic_bits - fmt.bias + 1)).shl(fmt.mantissa), x.type.scalar)
    result = f.fma(half, _expm1_of(f, r), half - 0.5) * 2.0
    return f.select(f.abs(x) < 2.0 ** -(fmt.mantissa + 2), x, result)


def sigmoid(f: Function, x: Value) -> Value:
    """1 / (1 + e^-x), computed from e^-|x|: never overflows, exact relative size in the lower tail."""
    e = _exp_nonpositive(f, -f.abs(x))
    return f.select(x < 0, e, 1.0) / (e + 1.0)


# Hyperbolic functions

_SINH_TAIL = (0.16666667, 0.0083333505, 0.00019836056, 2.8175004e-06)
"""(sinh(x) / x - 1) / x^2 in x^2 on |x| <= 1."""


def tanh(f: Function, x: Value) -> Value:
    """Hyperbolic tangent, t / (t + 2) with t = e^2|x| - 1: one branch for all of the range."""
    limit = 10.0 if x.type.scalar is F32 else 20.0  # tanh rounds to 1 before
    doubled = _clamp(f, f.abs(x), None, limit) * 2.0
    _, shifted, r = _reduce(f, doubled)
    fmt = _format(x)
    field = shifted - (fmt.magic_bits - fmt.bias)
    power = f.bitcast(field.shl(fmt.mantissa), x.type.scalar)
    t = f.fma(power, _expm1_of(f, r), power - 1.0)
    return f.copysign(t / (t + 2.0), x)


def sinh(f: Function, x: Value) -> Value:
    """Hyperbolic sine."""
    if x.type.scalar is F64:
        return libm(f, "sinh", x)
    a = f.abs(x)
    half = _half_exp(f, a)
    big = f.copysign(half - 0.25 / half, x)
    z = x * x
    small = f.fma(x * z, polynomial(f, z, _SINH_TAIL), x)
    return f.select(a < 1.0, small, big)


def cosh(f: Function, x: Value) -> Value:
    """Hyperbolic cosine."""
    if x.type.scalar is F64:
        return libm(f, "cosh", x)
    half = _half_exp(f, f.abs(x))
    return half + 0.25 / half


def asinh(f: Function, x: Value) -> Value:
    """Inverse hyperbolic sine; f32 in f64 lanes."""
    if x.type.scalar is F64:
        return libm(f, "asinh", x)

    def wide(v: Value) -> Value:
        a = f.abs(v)
        big = log(f, a + f.sqrt(f.fma(a, a, 1.0)))
        # log(1 + small) has an absolute error of 2^-53: too much below 2^-12, where two terms are enough.
        small = f.fma(a * a * a, -1.0 / 6.0, a)
        return f.copysign(f.select(a < 2.0**-12, small, big), v)

    return apply_f64(f, wide, x)


def acosh(f: Function, x: Value) -> Value:
    """Inverse hyperbolic cosine; NaN below 1; f32 in f64 lanes."""
    if x.type.scalar is F64:
        return libm(f, "acosh", x)

    def wide(v: Value) -> Value:
        root = f.sqrt(f.fma(v, v, -1.0))
        # The square root of a number below -1 is that of a positive one.
        return f.select(v < 1.0, math.nan, log(f, v + root))

    return apply_f64(f, wide, x)


def atanh(f: Function, x: Value) -> Value:
    """Inverse hyperbolic tangent; inf at 1, NaN beyond; f32 in f64 lanes."""
    if x.type.scalar is F64:
        return libm(f, "atanh", x)

    def wide(v: Value) -> Value:
        a = f.abs(v)
        big = log(f, (1.0 + a) / (1.0 - a)) * 0.5
        small = f.fma(a * a * a, 1.0 / 3.0, a)
        return f.copysign(f.select(a < 2.0**-12, small, big), v)

    return apply_f64(f, wide, x)


# Logarithm

_LOG32_TAIL = (
    -0.5, 0.33333206, -0.24999733, 0.20010811, -0.16681692, 0.14000002, -0.12175845, 0.14010963, -0.12909077
)  # fmt: skip
"""(log(1 + r) - r) / r^2 on |r| <= 1/3."""
_LOG64_TAIL = (
    0.6666666666666734,
    0.39999999999414354,
    0.28571428742468247,
    0.22222198564101941,
    0.18183564837588245,
    0.1531403650898366,
    0.1479609934328264,
)
"""(log((1 + s) / (1 - s)) / s - 2) / s^2 in s^2 for r = 2s / (1 - s), 1 + r in [sqrt(1/2), sqrt(2)]."""
_LOG_START = {32: 0x3F2AAAAB, 64: 0x3FE6A09E667F3BCD}
"""Bits of the least mantissa after the split: 2/3 (f32), sqrt(1/2) (f64)."""


def _log1p_of(f: Function, r: Value) -> Value:
    """log(1 + r) for r in the range that `_split` leaves."""
    if r.type.scalar is F32:
        return f.fma(r * r, polynomial(f, r, _LOG32_TAIL), r)
    s = r / (r + 2.0)
    z = s * s
    return f.fma(-s, f.fma(-z, polynomial(f, z, _LOG64_TAIL), r), r)


def _split(f: Function, x: Value) -> tuple[Value, Value]:
    """Return k (as a float) and m with x = 2^k m, m in [start, 2 start), for normal positive x."""
    fmt = _format(x)
    start = _LOG_START[fmt.bits]
    view = f.bitcast(x, int_type(fmt.bits)) + ((fmt.bias << fmt.mantissa) - start)
    m = f.bitcast((view & ((1 << fmt.mantissa) - 1)) + start, x.type.scalar)
    # An exponent field pasted below 2^mantissa is that power plus the field: a conversion without a conversion
    # instruction, which AVX2 lacks for 64-bit integers.
    power = 2.0**fmt.mantissa
    pasted = view.lshr(fmt.mantissa) | ((fmt.bias + fmt.mantissa) << fmt.mantissa)
    return f.bitcast(pasted, x.type.scalar) - (power + fmt.bias), m


def _log_parts(f: Function, x: Value) -> tuple[Value, Value]:
    """Return k and log(m) with x = 2^k m for positive finite x, denormals included."""
    fmt = _format(x)
    denormal = x < fmt.tiny
    up = float(fmt.mantissa + 1)
    k, m = _split(f, f.select(denormal, x * 2.0**up, x))
    k = k - f.select(denormal, f.const(up, x.type), 0.0)
    return k, _log1p_of(f, m - 1.0)


def _log_edges(f: Function, x: Value, result: Value) -> Value:
    """Give -inf for 0, NaN below 0, inf for inf, NaN for NaN."""
    bad = f.select(x.eq(0), f.const(-math.inf, x.type), math.nan)
    return f.select(x < math.inf, f.select(x > 0, result, bad), x)


def log(f: Function, x: Value) -> Value:
    """Natural logarithm."""
    fmt = _format(x)
    k, r = _log_parts(f, x)
    return _log_edges(f, x, f.fma(k, fmt.ln2_hi, f.fma(k, fmt.ln2_lo, r)))


def log2(f: Function, x: Value) -> Value:
    """Logarithm to base 2."""
    k, r = _log_parts(f, x)
    return _log_edges(f, x, f.fma(r, _LOG2E, k))


def log10(f: Function, x: Value) -> Value:
    """Logarithm to base 10."""
    k, r = _log_parts(f, x)
    return _log_edges(f, x, f.fma(k, _LOG10_2, r * _LOG10E))


def log1p(f: Function, x: Value) -> Value:
    """log(1 + x), accurate near 0."""
    fmt = _format(x)
    u = x + 1.0
    k, m = _split(f, u)
    # What rounding took from 1 + x, at the scale of m. For large x it is 0 and the scale does not matter.
    lost = f.select(x < 1.0, x - (u - 1.0), 1.0 - (u - x))
    unit = _power_of_two(f, -k)
    r = _log1p_of(f, f.fma(lost, unit, m - 1.0))
    result = f.fma(k, fmt.ln2_hi, f.fma(k, fmt.ln2_lo, r))
    edged = _log_edges(f, u, result)
    return f.select(f.abs(x) < 2.0 ** -(fmt.mantissa + 2), x, edged)


def _power_of_two(f: Function, n: Value) -> Value:
    """2^n for an integral float n; 0 below the normal range."""
    fmt = _format(n)
    low = f.fmax_fast(n, -float(fmt.bias))
    field = f.bitcast(low + (fmt.magic + fmt.bias), int_type(fmt.bits)) - fmt.magic_bits
    return f.bitcast(field.shl(fmt.mantissa), n.type.scalar)


# Error function

_ERF64_SMALL = (
    0.12837916709551256,
    -0.3761263890318352,
    0.11283791670944182,
    -0.02686617064311117,
    0.005223977606116446,
    -0.0008548325929230882,
    0.00012055293574700985,
    -1.4924712264251563e-05,
    1.6447131150360848e-06,
    -1.6206310823622082e-07,
    1.3710968779950556e-08,
    -7.779448573883802e-10,
)
"""erf(x) / x - 1 in x^2 on |x| <= 1."""
_ERFCX_P = (
    0.9999999029436735,
    1.386147790070015,
    0.9440476076491332,
    0.37034732627172495,
    0.08331906282910893,
    0.008777051653309614,
)
_ERFCX_Q = (
    1.0,
    2.5145259239371454,
    2.78139151887206,
    1.7465214762529961,
    0.6642644777058355,
    0.14767505305703416,
    0.015557050305006414,
)
"""e^(x^2) (1 - erf(x)) = P(x) / Q(x) on [1, 6]; beyond, erf rounds to 1."""


def erf(f: Function, x: Value) -> Value:
    """Error function, in two ranges.

    A rational function for all of the range would be shorter, but its rounding errors reach 6 ULP near 1.
    """
    if x.type.scalar is F32:
        return _erf32(f, x)
    a = _clamp(f, f.abs(x), None, 6.0)
    z = a * a
    small = f.fma(polynomial(f, z, _ERF64_SMALL), x, x)
    tail = _exp_nonpositive(f, -z) * polynomial(f, a, _ERFCX_P) / polynomial(f, a, _ERFCX_Q)
    return f.select(a < 1.0, small, f.copysign(1.0 - tail, x))


def _erf32(f: Function, x: Value) -> Value:
    if f.isa.has_avx512:
        return erf_by_pieces(f, x)
    a = _clamp(f, f.abs(x), None, ERF32_LIMIT)
    _, shifted, r = _reduce(f, polynomial(f, a, ERF32_TAIL) * a)
    # The power is at least 2^-25: adding it to the exponent field multiplies. A NaN takes the other range.
    tail = f.bitcast(f.bitcast(_exp_of(f, r), int_type(32)) + shifted.shl(_F32.mantissa), F32)
    small = f.fma(polynomial(f, x * x, ERF32_SMALL), x, x)
    return f.select(a > ERF32_BORDER, f.copysign(1.0 - tail, x), small)


# Powers and roots


def sqrt(f: Function, x: Value) -> Value:
    """Correctly rounded square root."""
    return f.sqrt(x)


def rsqrt(f: Function, x: Value) -> Value:
    """1 / sqrt(x), two roundings; no estimate instruction, so it is the same on every target."""
    return 1.0 / f.sqrt(x)


def cbrt(f: Function, x: Value) -> Value:
    """Cube root, with the sign of x; f32 in f64 lanes."""
    if x.type.scalar is F64:
        return libm(f, "cbrt", x)

    def wide(v: Value) -> Value:
        root = exp(f, log(f, f.abs(v)) * (1.0 / 3.0))
        return f.copysign(root, v)

    return apply_f64(f, wide, x)


def power(f: Function, x: Value, y: Value) -> Value:
    """x^y with the special cases of C99; f32 in f64 lanes, f64 by the C library."""
    if x.type.scalar is F64:
        return libm(f, "pow", x, y)

    def wide(a: Value, b: Value) -> Value:
        return _power_wide(f, a, b)

    return apply_f64(f, wide, x, y)


def _power_wide(f: Function, x: Value, y: Value) -> Value:
    magnitude = exp(f, y * log(f, f.abs(x)))
    whole = f.trunc_float(y).eq(y)
    # An odd integer keeps a fraction after halving.
    half = y * 0.5
    odd = whole & f.trunc_float(half).ne(half)
    signed = f.select(odd, f.copysign(magnitude, x), magnitude)
    invalid = (x < 0) & ~whole & (x > -math.inf)
    result = f.select(invalid, math.nan, signed)
    # 1^y and x^0 are 1 even for NaN; (-1)^(+-inf) is 1.
    unit = x.eq(1.0) | y.eq(0.0) | (x.eq(-1.0) & f.abs(y).eq(math.inf))
    return f.select(unit, 1.0, result)


UNARY: Mapping[str, Callable[[Function, Value], Value]] = {
    fn.__name__: fn
    for fn in (
        acos, acosh, asin, asinh, atan, atanh, cbrt, cos, cosh, erf, exp, exp2, expm1, log, log10, log1p, log2, rsqrt,
        sigmoid, sin, sinh, sqrt, tan, tanh,
    )
}  # fmt: skip
"""Every function of one operand, by name."""
