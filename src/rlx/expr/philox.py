# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 as scalar expressions, and what is made of its words.

A generator without state: ten rounds of multiplications turn a key of 64 bits and a counter of 128 bits into 128
random bits, so every element of a tensor is computed alone, on every backend alike.

Words are u64 scalars below 2^32: their product then has 64 bits, and a vector unit multiplies them in one instruction.

Source: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.expr.body import Scalar

__all__ = ["Words", "normal", "philox", "raw_bits", "uniform", "words_at"]

Words: TypeAlias = tuple[Scalar, Scalar, Scalar, Scalar]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_UNIFORM_BITS = {DType.F16: 11, DType.BF16: 8, DType.F32: 24, DType.F64: 53}
"""As many as the dtype's significand holds: every value of a uniform draw is exact."""


def _and(a: Scalar, b: int) -> Scalar:
    return a.builder.emit("and", a, a.builder.const(b, a.dtype))


def _or(a: Scalar, b: Scalar | int) -> Scalar:
    return a.builder.emit("or", a, b if isinstance(b, Scalar) else a.builder.const(b, a.dtype))


def _xor(a: Scalar, b: Scalar) -> Scalar:
    return a.builder.emit("xor", a, b)


def _shr(a: Scalar, count: int) -> Scalar:
    return a.builder.emit("shr", a, a.builder.const(count, a.dtype))


def _shl(a: Scalar, count: int) -> Scalar:
    return a.builder.emit("shl", a, a.builder.const(count, a.dtype))


def philox(key: tuple[Scalar, Scalar], counter: Words) -> Words:
    """Return the four words of a key and a counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for number in range(_ROUNDS):
        if number:
            k0, k1 = _and(k0 + _STEPS[0], _MASK), _and(k1 + _STEPS[1], _MASK)
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _xor(_xor(_shr(second, 32), c1), k0),
            _and(second, _MASK),
            _xor(_xor(_shr(first, 32), c3), k1),
            _and(first, _MASK),
        )
    return c0, c1, c2, c3


def words_at(key: Words, number: Scalar) -> Words:
    """Return the words of element `number` of the sequence that four words of a key stand for.

    Two of them are Philox's key, two the upper half of its counter.
    """
    return philox(key[:2], (_and(number, _MASK), _shr(number, 32), key[2], key[3]))


def raw_bits(words: Words, dtype: DType) -> Scalar:
    """Return 32 or 64 random bits as u32 or u64."""
    if dtype is DType.U64:
        return _or(_shl(words[0], 32), words[1])
    if dtype is not DType.U32:
        raise TypeRuleError(f"random bits are u32 or u64, not {dtype}")
    return words[0].cast(DType.U32)


def uniform(words: Words, dtype: DType) -> Scalar:
    """Return k / 2^n in [0, 1) for n random bits k, as many as the significand of the dtype holds.

    Narrow floats come as the f32 that they are exact in.
    """
    bits = _UNIFORM_BITS.get(dtype)
    if bits is None:
        raise TypeRuleError(f"a uniform draw is f16, bf16, f32 or f64, not {dtype}")
    if dtype is DType.F64:
        return _shr(raw_bits(words, DType.U64), 64 - bits).cast(DType.F64) * 2.0**-bits
    return _narrow(_shr(words[0], 32 - bits)).cast(DType.F32) * 2.0**-bits


def normal(words: Words, dtype: DType, compute: DType) -> Scalar:
    """Return a standard normal draw, in `compute`.

    Box and Muller's sqrt(-2 log u) cos(2 pi v), folded into a quarter of the circle: the cosine is the sine of an
    angle in (0, pi/2) with a random sign, which is well conditioned everywhere. u and the angle's fraction of the
    quarter are exact numbers of the dtype (of f32 for narrower ones); what follows is computed in `compute`.
    """
    if dtype is DType.F64:
        high, low = raw_bits(words, DType.U64), _or(_shl(words[2], 32), words[3])
        u = _or(_shr(high, 11), 1).cast(DType.F64) * 2.0**-53  # odd: never 0
        quarter = _or(_shr(low, 11), 1).cast(DType.F64) * 2.0**-53
        sign = _and(low, 2)
    else:
        # Odd numbers of 31 bits: never 0; conversion rounds those above 2^24, the same way everywhere.
        u = _or(_narrow(_shr(words[0], 1)), 1).cast(DType.F32) * 2.0**-31
        quarter = _or(_narrow(_shr(words[1], 8)), 1).cast(DType.F32) * 2.0**-24
        sign = _and(words[1], 2)
    u, quarter = u.cast(compute), quarter.cast(compute)
    builder = u.builder
    radius = builder.emit("sqrt", builder.emit("log", u) * -2.0)
    size = radius * builder.emit("sin", quarter * (math.pi / 2))
    return builder.emit("select", sign.equals(0), size, -size)


def _narrow(word: Scalar) -> Scalar:
    """Return a word below 2^31 as i32, which every vector unit converts to f32."""
    return word.cast(DType.I32)
