# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the vector mathematics: polynomials, f32 functions computed in f64 lanes, C library calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.builder import Function, Operand, Value
from rlx.backends.cpu.lltypes import F64

__all__ = ["apply_f64", "libm", "polynomial"]


def polynomial(f: Function, x: Value, coefficients: Sequence[Operand]) -> Value:
    """Evaluate c[0] + c[1] x + c[2] x^2 + ... by Horner's rule, one fma a term."""
    total = f.lift(coefficients[-1], x.type)
    for c in reversed(coefficients[:-1]):
        total = f.fma(total, x, c)
    return total


def apply_f64(f: Function, fn: Callable[..., Value], *operands: Value) -> Value:
    """Widen f32 operands to f64, apply `fn`, round the result once to f32."""
    return f.f64_to_f32(fn(*(f.f32_to_f64(x) for x in operands)))


def libm(f: Function, name: str, *operands: Value) -> Value:
    """Call a double precision function of the C library, lane by lane."""
    kind = operands[0].type
    if not kind.lanes:
        return f.call(name, *operands, result=F64)
    out = f.poison(kind)
    for lane in range(kind.lanes):
        scalars = (f.extract(x, lane) for x in operands)
        out = f.insert(out, f.call(name, *scalars, result=F64), lane)
    return out
