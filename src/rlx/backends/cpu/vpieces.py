# SPDX-License-Identifier: Apache-2.0
"""Piecewise polynomials with AVX-512: the coefficients of 32 pieces lie in registers, a permutation picks a lane's own.

A short polynomial of a piece replaces a long one of the whole range: the error function takes half of the
instructions, and the permutations run beside the multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from rlx.backends.cpu.builder import Function, Value
from rlx.backends.cpu.lltypes import F32, int_type
from rlx.backends.cpu.vpoly import polynomial

__all__ = ["erf_by_pieces"]

_PIECES, _LANES = 32, 16
_WIDTH = 0.125
"""Of a piece. They are centred at 0, 1/8, ..., 31/8: with degree 4 a polynomial is off by 7e-9, a result by 2.3 ULP."""
_LIMIT = (_PIECES - 1) * _WIDTH
"""The centre of the last piece, where erf is taken as 1: it lacks 7e-8, 1.2 ULP, where that begins."""
_MAGIC = 1.5 * 2.0**23
"""Adding it rounds to an integer that appears in the low bits."""


@cache
def _erf_pieces() -> tuple[tuple[float, ...], ...]:
    """Return the coefficients c0...c4 in |x| - centre of each piece.

    They are the Taylor series to degree 6 with the last two powers replaced by their nearest polynomial of degree 4 on
    the piece (Chebyshev economisation). Source: Lanczos, Applied Analysis, 1956.
    """
    half = _WIDTH / 2
    out: list[tuple[float, ...]] = []
    for piece in range(_PIECES - 1):
        x = piece * _WIDTH
        # The derivatives of erf are Hermite polynomials times its first: H(n+1) = 2 x H(n) - 2 n H(n-1).
        hermite = [1.0, 2 * x]
        for n in range(1, 5):
            hermite.append(2 * x * hermite[n] - 2 * n * hermite[n - 1])
        slope = 2 / math.sqrt(math.pi) * math.exp(-x * x)
        c = [math.erf(x)]
        c += [slope * (-1) ** n * h / math.factorial(n + 1) for n, h in enumerate(hermite)]
        if piece == 0:
            # Only x >= 0 occurs, and the relative error counts: u^4 of erf(u) / u, on [0, half].
            for power, share in enumerate((-1 / 128, 1 / 4, -5 / 4, 2.0)):
                c[power + 1] += c[5] * share * half ** (4 - power)
        else:
            for power, share in ((3, 5 / 4), (1, -5 / 16)):
                c[power] += c[5] * share * half ** (5 - power)
            for power, share in ((4, 3 / 2), (2, -9 / 16), (0, 1 / 32)):
                c[power] += c[6] * share * half ** (6 - power)
        out.append(tuple(c[:5]))
    return (*out, (1.0, 0.0, 0.0, 0.0, 0.0))


def erf_by_pieces(f: Function, x: Value) -> Value:
    """Error function in f32, any number of lanes."""
    lanes = x.type.lanes
    if lanes == 0:
        return f.extract(_erf(f, f.splat(x, _LANES)), 0)
    if lanes < _LANES:
        return f.slice(erf_by_pieces(f, f.concat(x, x)), 0, lanes)
    parts = [_erf(f, f.slice(x, start, _LANES)) for start in range(0, lanes, _LANES)]
    while len(parts) > 1:
        parts = [f.concat(low, high) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _erf(f: Function, x: Value) -> Value:
    # A NaN passes the minimum by the order of its operands, and every piece leaves it one.
    a = f.fmin_fast(f.const(_LIMIT, x.type), f.abs(x))
    shifted = f.fma(a, 1 / _WIDTH, _MAGIC)
    u = f.fma(shifted - _MAGIC, -_WIDTH, a)
    piece = f.bitcast(shifted, int_type(32))
    columns = [_pick(f, column, piece) for column in zip(*_erf_pieces(), strict=True)]
    return f.copysign(polynomial(f, u, columns), x)


def _pick(f: Function, numbers: Sequence[float], piece: Value) -> Value:
    """Return the piece's number; only the low five bits of `piece` count."""
    low, high = (f.vector(numbers[s : s + _LANES], F32) for s in (0, _LANES))
    return f.intrinsic("x86.avx512.vpermi2var.ps.512", low, piece, high)
