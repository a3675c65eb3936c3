# SPDX-License-Identifier: Apache-2.0
"""Operators on small tensors of extents: shape arithmetic done symbolically.

An array holds `int`, `bool`, `float`, `Dim` or, between a division of extents in floats and the
rounding that follows it, `Ratio`. Movement operators run their own reference on such arrays;
arithmetic is defined here. A comparison whose answer depends on the symbols is decided by the hints
and recorded as a guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from typing import Any, TypeAlias, cast

import numpy as np

from rlx.base.dims import (
    Dim,
    DimExpr,
    ceildiv,
    dim_max,
    dim_min,
    equal,
    floordiv,
    less_equal,
)
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, UndecidedError
from rlx.base.facts import current_facts
from rlx.base.numeric import Array
from rlx.base.types import TensorType, normalize_axes
from rlx.ir.op import Op
from rlx.ops.elementwise import Cast
from rlx.ops.indexing import Gather, GatherElements, GatherND, ScatterElements, ScatterND
from rlx.ops.movement import Concat, Expand, Pad, Range, Reshape, Slice, Tile, Transpose
from rlx.ops.reduce import Reduce

__all__ = ["Ratio", "fold"]

_MAX_DENOMINATOR = 4096
"""Floats with larger denominators (0.1 has 2^27 in f32) round in a product and are not followed."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The exact quotient of two extents, as a float-valued element; `bottom` is positive."""

    top: Dim
    bottom: Dim

    def __int__(self) -> int:
        raise UndecidedError(f"{self} is symbolic; it has no single value")

    __index__ = __int__

    def __float__(self) -> float:
        raise UndecidedError(f"{self} is symbolic; it has no single value")

    def __str__(self) -> str:
        return f"({self.top})/({self.bottom})"


Element: TypeAlias = "bool | int | float | DimExpr | Ratio"


class _NotFoldableError(Exception):
    """The result is no extent."""


def fold(
    op: Op, types: Sequence[TensorType | None], arrays: Sequence[Array | None]
) -> tuple[Array, ...] | None:
    """Return the results of an operator on tensors of extents, or None if they are no extents.

    Args:
        op: the operator.
        types: operand types, None where absent.
        arrays: operand elements as object arrays of `int`, `bool`, `float`, `Dim`, `Ratio`.

    Raises:
        UndecidedError: a comparison has no answer that holds for all values of the symbols, and
            there are no hints.
    """
    try:
        return _fold(op, types, arrays)
    except (_NotFoldableError, ExecutionError, ZeroDivisionError, OverflowError):
        return None


def _fold(
    op: Op, types: Sequence[TensorType | None], arrays: Sequence[Array | None]
) -> tuple[Array, ...]:
    own: Any = getattr(op, "fold_dims", None)
    if own is not None:
        found = own(*arrays)
        return cast("tuple[Array, ...]", found if isinstance(found, tuple) else (found,))
    if isinstance(op, Reduce):
        return (_reduce(op, types, arrays),)
    if isinstance(op, _MOVES):
        return (_move(op, arrays),)
    last = types[-1] if types else None
    rule = _RULES.get(op.name)
    if isinstance(op, Cast):
        return (_map(partial(_cast, op.to), arrays),)
    if rule is None or last is None:
        raise _NotFoldableError
    return (_map(partial(rule, last.dtype), arrays),)


def _map(function: Callable[..., Any], arrays: Sequence[Array | None]) -> Array:
    """Apply a function of elements to broadcast arrays."""
    present = [np.asarray(a, object) for a in arrays if a is not None]
    views = np.broadcast_arrays(*present) if len(present) > 1 else present
    shape = views[0].shape
    out = np.empty(math.prod(shape), object)
    for index, elements in enumerate(zip(*(v.reshape(-1) for v in views), strict=True)):
        out[index] = function(*elements)
    return out.reshape(shape)


# -- movement
# ----------------------------------------------------------------------------------------

_MOVES = (
    Concat,
    Expand,
    Gather,
    GatherElements,
    GatherND,
    Pad,
    Range,
    Reshape,
    ScatterElements,
    ScatterND,
    Slice,
    Tile,
    Transpose,
)
_INDEXED = (Gather, GatherElements, GatherND, ScatterElements, ScatterND)


def _move(op: Op, arrays: Sequence[Array | None]) -> Array:
    """Run the reference of an operator that only moves elements (a range adds and multiplies)."""
    if isinstance(op, ScatterElements | ScatterND) and op.reduction != "none":
        raise _NotFoldableError
    if isinstance(op, Pad) and op.mode == "constant" and arrays[1] is None:
        arrays = [arrays[0], np.array(0, object)]
    if isinstance(op, Range):
        start, delta = (cast("Array", a).reshape(-1)[0] for a in arrays)
        dtype = DType.I64
        return _objects([_add(dtype, start, _mul(dtype, i, delta)) for i in range(_whole(op.size))])
    given = [np.asarray(a, object) for a in arrays if a is not None]
    if isinstance(op, _INDEXED):
        whole = [_whole(x) for x in given[1].reshape(-1)]
        given[1] = np.array(whole, np.int64).reshape(given[1].shape)
    reference: Callable[..., Any] = op.reference
    return np.asarray(reference(*given), object)


def _objects(elements: Sequence[Any]) -> Array:
    out = np.empty(len(elements), object)
    out[:] = elements
    return out


def _whole(x: Any) -> int:
    """Return an element that is a number in every run."""
    if isinstance(x, DimExpr | Ratio):
        raise _NotFoldableError
    return int(x)


def _reduce(
    op: Reduce, types: Sequence[TensorType | None], arrays: Sequence[Array | None]
) -> Array:
    x, type_ = cast("Array", arrays[0]), cast("TensorType", types[0])
    if op.kind not in _STEPS:
        raise _NotFoldableError
    step = partial(_STEPS[op.kind], type_.dtype)
    axes = normalize_axes(op.axes, x.ndim)
    moved = x.transpose([*(i for i in range(x.ndim) if i not in axes), *axes])
    lead = moved.shape[: x.ndim - len(axes)]
    count = math.prod([x.shape[a] for a in axes])
    if not count and op.kind in ("max", "min"):
        raise _NotFoldableError  # the limit of the dtype is no extent
    first = {"sum": [0], "prod": [1]}.get(op.kind, cast("list[int]", []))
    rows = moved.reshape(math.prod(lead), count)
    out = _objects([reduce(step, [*first, *row]) for row in rows])
    shape = [1 if i in axes else d for i, d in enumerate(x.shape)] if op.keepdims else lead
    return out.reshape(shape)


# -- arithmetic
# --------------------------------------------------------------------------------------


def _symbolic(*elements: Any) -> bool:
    return any(isinstance(x, DimExpr | Ratio) for x in elements)


def _parts(x: Any) -> tuple[Dim, Dim]:
    """Return (top, bottom) of an element."""
    if isinstance(x, Ratio):
        return x.top, x.bottom
    if isinstance(x, DimExpr | int):  # a bool is an int
        return (x, 1) if isinstance(x, DimExpr) else (int(x), 1)
    if not isinstance(x, float) or not math.isfinite(x):
        raise _NotFoldableError
    exact = Fraction(x)
    if exact.denominator > _MAX_DENOMINATOR:
        raise _NotFoldableError
    return exact.numerator, exact.denominator


def _ratio(top: Dim, bottom: Dim) -> Any:
    """Return the quotient, as an extent where it is one for all values of the symbols."""
    if bottom == 0:
        raise _NotFoldableError
    if less_equal(1, bottom) is not True:
        top, bottom = -top, -bottom
        if less_equal(1, bottom) is not True:
            raise _NotFoldableError
    whole = floordiv(top, bottom)
    if equal(whole * bottom, top) is True:
        return whole
    if isinstance(top, int) and isinstance(bottom, int):
        return top / bottom
    return Ratio(top, bottom)


def _add(_: DType, a: Any, b: Any) -> Any:
    if not _symbolic(a, b):
        return a + b
    (p, q), (r, s) = _parts(a), _parts(b)
    return _ratio(p * s + r * q, q * s)


def _neg(_: DType, a: Any) -> Any:
    return Ratio(-a.top, a.bottom) if isinstance(a, Ratio) else -a


def _sub(dtype: DType, a: Any, b: Any) -> Any:
    return _add(dtype, a, _neg(dtype, b))


def _mul(_: DType, a: Any, b: Any) -> Any:
    if not _symbolic(a, b):
        return a * b
    (p, q), (r, s) = _parts(a), _parts(b)
    return _ratio(p * r, q * s)


def _div(dtype: DType, a: Any, b: Any) -> Any:
    (p, q), (r, s) = _parts(a), _parts(b)
    top, bottom = p * s, q * r
    if dtype.is_float:
        return _ratio(top, bottom)
    return _truncated(_ratio(top, bottom))


def _truncated(x: Any) -> Any:
    """Return an element rounded toward zero."""
    if not isinstance(x, Ratio):
        return x if isinstance(x, DimExpr) else int(x)
    if less_equal(0, x.top) is True:
        return floordiv(x.top, x.bottom)
    if less_equal(x.top, 0) is True:
        return ceildiv(x.top, x.bottom)
    raise _NotFoldableError


def _integer_div(a: Any, b: Any) -> Any:
    """Divide numbers, truncating: not through a float, which has only 53 bits."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _divide(dtype: DType, a: Any, b: Any) -> Any:
    if not _symbolic(a, b) and not dtype.is_float:
        return _integer_div(int(a), int(b))
    return _div(dtype, a, b)


def _floor_mod(dtype: DType, a: Any, b: Any) -> Any:
    if not _symbolic(a, b):
        return a % b
    if (
        dtype.is_float
        or isinstance(a, Ratio)
        or isinstance(b, Ratio)
        or less_equal(1, b) is not True
    ):
        raise _NotFoldableError
    return a % b


def _fmod(dtype: DType, a: Any, b: Any) -> Any:
    if not _symbolic(a, b):
        return math.fmod(a, b) if dtype.is_float else a - b * _integer_div(a, b)
    if isinstance(a, Ratio) or less_equal(0, a) is not True:
        raise _NotFoldableError
    return _floor_mod(dtype, a, b)


def _extreme(pick: Callable[..., Dim], plain: Callable[..., Any]) -> Callable[..., Any]:
    def choose(_: DType, a: Any, b: Any) -> Any:
        if not _symbolic(a, b):
            return plain(a, b)
        (p, q), (r, s) = _parts(a), _parts(b)
        return pick(p, r) if q == s == 1 else _ratio(pick(p * s, r * q), q * s)

    return choose


_max = _extreme(dim_max, max)
_min = _extreme(dim_min, min)


_STEPS = {"sum": _add, "prod": _mul, "max": _max, "min": _min}


def _floor(_: DType, a: Any) -> Any:
    if isinstance(a, Ratio):
        return floordiv(a.top, a.bottom)
    return a if isinstance(a, DimExpr) else math.floor(a)


def _ceil(_: DType, a: Any) -> Any:
    if isinstance(a, Ratio):
        return ceildiv(a.top, a.bottom)
    return a if isinstance(a, DimExpr) else math.ceil(a)


def _round(_: DType, a: Any) -> Any:
    if isinstance(a, Ratio):
        raise _NotFoldableError
    return a if isinstance(a, DimExpr) else round(a)


def _trunc(_: DType, a: Any) -> Any:
    return _truncated(a)


def _abs(dtype: DType, a: Any) -> Any:
    return _max(dtype, a, _neg(dtype, a))


def _relu(dtype: DType, a: Any) -> Any:
    return _max(dtype, a, 0)


def _clamp(dtype: DType, a: Any, low: Any, high: Any) -> Any:
    return _min(dtype, _max(dtype, a, low), high)


def _reciprocal(dtype: DType, a: Any) -> Any:
    return _div(dtype, 1, a)


def _sign(_: DType, a: Any) -> Any:
    top = a.top if isinstance(a, Ratio) else a
    if not isinstance(top, DimExpr):
        return (top > 0) - (top < 0)
    if less_equal(1, top) is True:
        return 1
    if less_equal(top, -1) is True:
        return -1
    raise _NotFoldableError


def _pow(_: DType, a: Any, b: Any) -> Any:
    if not _symbolic(a, b):
        return a**b
    if isinstance(b, DimExpr | Ratio) or b != int(b) or not 0 <= b <= 8:
        raise _NotFoldableError
    return reduce(partial(_mul, DType.I64), [a] * int(b), 1)


def _cast(to: DType, x: Any) -> Any:
    if to is DType.BOOL:
        return not _equals(to, x, 0)
    if to.is_float:
        return x if _symbolic(x) else _whole_float(float(x))
    if isinstance(x, float) and not math.isfinite(x):
        raise _NotFoldableError
    return _truncated(x)


def _whole_float(x: float) -> int | float:
    return int(x) if x.is_integer() and abs(x) < 2**53 else x


# -- comparison and selection
# ------------------------------------------------------------------------


def _crossed(a: Any, b: Any) -> tuple[Dim, Dim]:
    (p, q), (r, s) = _parts(a), _parts(b)
    return p * s, r * q


def _equals(_: DType, a: Any, b: Any) -> bool:
    if not _symbolic(a, b):
        return bool(a == b)
    left, right = _crossed(a, b)
    return current_facts().assume_equal(left, right, "comparison of extents")


def _at_most(_: DType, a: Any, b: Any) -> bool:
    if not _symbolic(a, b):
        return bool(a <= b)
    left, right = _crossed(a, b)
    return current_facts().assume_less_equal(left, right, "comparison of extents")


def _greater(dtype: DType, a: Any, b: Any) -> bool:
    return not _at_most(dtype, a, b)


def _at_least(dtype: DType, a: Any, b: Any) -> bool:
    return _at_most(dtype, b, a)


def _less(dtype: DType, a: Any, b: Any) -> bool:
    return not _at_most(dtype, b, a)


def _differs(dtype: DType, a: Any, b: Any) -> bool:
    return not _equals(dtype, a, b)


def _not(_: DType, a: Any) -> bool:
    return not a


def _and(_: DType, a: Any, b: Any) -> bool:
    return bool(a) and bool(b)


def _or(_: DType, a: Any, b: Any) -> bool:
    return bool(a) or bool(b)


def _where(_: DType, condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


_RULES: dict[str, Callable[..., Any]] = {
    "abs": _abs,
    "add": _add,
    "ceil": _ceil,
    "clamp": _clamp,
    "div": _divide,
    "equal": _equals,
    "floor": _floor,
    "floor_mod": _floor_mod,
    "fmod": _fmod,
    "greater": _greater,
    "greater_equal": _at_least,
    "less": _less,
    "less_equal": _at_most,
    "logical_and": _and,
    "logical_not": _not,
    "logical_or": _or,
    "maximum": _max,
    "minimum": _min,
    "mul": _mul,
    "neg": _neg,
    "not_equal": _differs,
    "pow": _pow,
    "reciprocal": _reciprocal,
    "relu": _relu,
    "round": _round,
    "sign": _sign,
    "sub": _sub,
    "trunc": _trunc,
    "where": _where,
}
"""Operator name -> rule over (dtype of the last operand, *elements)."""
