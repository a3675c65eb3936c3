# SPDX-License-Identifier: Apache-2.0
"""The scalar operators: arity, result dtype and NumPy meaning. Emitters and derivatives have one entry for each.

Primitives with a transcendental meaning are accurate to 4 ULP on every backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rlx.base import numeric
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array

__all__ = ["TABLE", "Attribute", "ScalarOp", "constant_value"]

Attribute: TypeAlias = str | None
_Rule: TypeAlias = Callable[[tuple[DType, ...]], DType]


@dataclass(frozen=True)
class ScalarOp:
    """One scalar operator.

    Attributes:
        name: its name in bodies.
        arity: number of operands.
        result: operand dtypes -> result dtype; raises TypeRuleError.
        meaning: operand arrays -> result array. Row operators take (array, axes) and keep the axes as 1.
        is_row: reduces over the trailing axes of the iteration space.
    """

    name: str
    arity: int
    result: _Rule
    meaning: Callable[..., Any]
    is_row: bool = False


def _same(dtypes: tuple[DType, ...]) -> DType:
    if any(d is not dtypes[0] for d in dtypes):
        raise TypeRuleError(f"scalar operands have different dtypes {dtypes}")
    return dtypes[0]


def _float(dtypes: tuple[DType, ...]) -> DType:
    if not dtypes[0].is_float:
        raise TypeRuleError(f"needs a float, not {dtypes[0]}")
    return _same(dtypes)


def _bool(dtypes: tuple[DType, ...]) -> DType:
    _same(dtypes)
    return DType.BOOL


def _select(dtypes: tuple[DType, ...]) -> DType:
    if dtypes[0] is not DType.BOOL:
        raise TypeRuleError(f"select needs a bool condition, not {dtypes[0]}")
    return _same(dtypes[1:])


def _explicit(_: tuple[DType, ...]) -> DType:
    raise TypeRuleError("the result dtype of cast and const has to be given")


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    def meaning(*args: Array) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return meaning


def _erf(x: Array) -> Array:
    # math.erf is accurate to the last digit in f64, so this rounds once to the operand's dtype.
    flat = [math.erf(v) for v in np.asarray(x, dtype=np.float64).reshape(-1).tolist()]
    return np.array(flat, dtype=np.float64).reshape(np.shape(x)).astype(x.dtype)


def _sigmoid(x: Array) -> Array:
    wide = x.astype(np.float64)
    e = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def _in_f64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluate in f64 and round once: NumPy's own f32 versions are off by up to several ULP."""

    def meaning(*args: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(*(a.astype(np.float64) for a in args))).astype(args[0].dtype)

    return meaning


def _div(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        return numeric.int_div(a, b)
    with np.errstate(all="ignore"):
        return np.asarray(a / b)


def _mod(truncate: bool) -> Callable[[Array, Array], Array]:
    def meaning(a: Array, b: Array) -> Array:
        if a.dtype.kind in "iu":
            return numeric.int_mod(a, b, truncate=truncate)
        return numeric.float_mod(a, b, truncate=truncate)

    return meaning


def _pow(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.power(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype)
    base, exponent = np.broadcast_arrays(a, b)
    negative = exponent < 0
    whole = np.power(base, np.where(negative, np.zeros((), b.dtype), exponent))
    if not negative.any():
        return whole
    # Integer base to a negative power: 1/x**n truncated toward zero; of 0 it is as large as there is.
    sign = np.where(exponent % 2 == 0, np.ones((), a.dtype), base)
    part = np.where(np.abs(base) == 1, sign, np.zeros((), a.dtype))
    part = np.where(base == 0, np.array(np.iinfo(a.dtype).max, a.dtype), part)
    return np.where(negative, part, whole)


def _cast(_: Array) -> Array:
    raise AssertionError("cast is evaluated with its target dtype by the body evaluator")


def _reduce(function: Callable[..., Any]) -> Callable[[Array, tuple[int, ...]], Array]:
    def meaning(x: Array, axes: tuple[int, ...]) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(x, axes))

    return meaning


def _sum(x: Array, axes: tuple[int, ...]) -> Array:
    return np.sum(
        x, axis=axes, keepdims=True, dtype=np.float64 if x.dtype.kind == "f" else x.dtype
    ).astype(x.dtype)


def _prod(x: Array, axes: tuple[int, ...]) -> Array:
    return np.prod(
        x, axis=axes, keepdims=True, dtype=np.float64 if x.dtype.kind == "f" else x.dtype
    ).astype(x.dtype)


def limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the (lowest, highest) value of a dtype; infinities for floats."""
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    info = np.iinfo(dtype)
    return info.min, info.max


def _max(x: Array, axes: tuple[int, ...]) -> Array:
    return np.max(x, axis=axes, keepdims=True, initial=limits(x.dtype)[0])


def _min(x: Array, axes: tuple[int, ...]) -> Array:
    return np.min(x, axis=axes, keepdims=True, initial=limits(x.dtype)[1])


def _rsqrt(x: Array) -> Array:
    return np.asarray(1 / np.sqrt(x))


def _entries() -> list[ScalarOp]:
    def unary(name: str, rule: _Rule, function: Callable[..., Any]) -> ScalarOp:
        return ScalarOp(name, 1, rule, _quiet(function))

    def binary(name: str, rule: _Rule, function: Callable[..., Any]) -> ScalarOp:
        return ScalarOp(name, 2, rule, _quiet(function))

    def exact(name: str, function: Callable[..., Any]) -> ScalarOp:
        return ScalarOp(name, 1, _float, _in_f64(function))

    transcendental = {
        "exp": np.exp,
        "expm1": np.expm1,
        "log": np.log,
        "log1p": np.log1p,
        "tanh": np.tanh,
        "sin": np.sin,
        "cos": np.cos,
        "tan": np.tan,
        "asin": np.arcsin,
        "acos": np.arccos,
        "atan": np.arctan,
        "sinh": np.sinh,
        "cosh": np.cosh,
        "asinh": np.arcsinh,
        "acosh": np.arccosh,
        "atanh": np.arctanh,
    }
    return [
        ScalarOp("const", 0, _explicit, _cast),
        ScalarOp("cast", 1, _explicit, _cast),
        unary("neg", _same, np.negative),
        unary("abs", _same, np.abs),
        unary("sign", _same, np.sign),
        unary("sqrt", _float, np.sqrt),
        ScalarOp("rsqrt", 1, _float, _in_f64(_rsqrt)),
        unary("floor", _float, np.floor),
        unary("ceil", _float, np.ceil),
        unary("trunc", _float, np.trunc),
        unary("round", _float, numeric.round_half_even),
        unary("isnan", _bool, np.isnan),
        unary("isinf", _bool, np.isinf),
        unary("not", _same, np.invert),
        ScalarOp("erf", 1, _float, _erf),
        ScalarOp("sigmoid", 1, _float, _quiet(_sigmoid)),
        *(exact(name, function) for name, function in transcendental.items()),
        binary("add", _same, np.add),
        binary("sub", _same, np.subtract),
        binary("mul", _same, np.multiply),
        binary("div", _same, _div),
        binary("fmod", _same, _mod(truncate=True)),
        binary("mod", _same, _mod(truncate=False)),
        binary("pow", _same, _pow),
        binary("max", _same, numeric.maximum),
        binary("min", _same, numeric.minimum),
        ScalarOp("atan2", 2, _float, _in_f64(np.arctan2)),
        binary("and", _same, np.bitwise_and),
        binary("or", _same, np.bitwise_or),
        binary("xor", _same, np.bitwise_xor),
        binary("shl", _same, numeric.shift_left),
        binary("shr", _same, numeric.shift_right),
        binary("eq", _bool, np.equal),
        binary("ne", _bool, np.not_equal),
        binary("lt", _bool, np.less),
        binary("le", _bool, np.less_equal),
        binary("gt", _bool, np.greater),
        binary("ge", _bool, np.greater_equal),
        ScalarOp("select", 3, _select, _quiet(np.where)),
        ScalarOp("fma", 3, _same, _quiet(_fma)),
        ScalarOp("rsum", 1, _same, _reduce(_sum), is_row=True),
        ScalarOp("rprod", 1, _same, _reduce(_prod), is_row=True),
        ScalarOp("rmax", 1, _same, _reduce(_max), is_row=True),
        ScalarOp("rmin", 1, _same, _reduce(_min), is_row=True),
    ]


def _fma(a: Array, b: Array, c: Array) -> Array:
    """One rounding for f32 (exact in f64 but for double rounding); for f64 two roundings are within the contract."""
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(
            np.float32
        )
    return np.asarray(a * b + c)


TABLE: dict[str, ScalarOp] = {entry.name: entry for entry in _entries()}


def constant_value(text: str, dtype: DType) -> Array:
    """Return the rank-0 array that a `const` instruction stands for."""
    if dtype is DType.BOOL:
        return np.array(text == "True")
    return np.array(float(text) if dtype.is_float else int(text)).astype(dtype.numpy)
