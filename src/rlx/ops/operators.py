# SPDX-License-Identifier: Apache-2.0
"""Python's operators on values: `x * 2 + y`, `x @ w`, `x[:, 1:]`, `x < 0`.

`==` stays identity, because values are keys of dictionaries everywhere; `x.equal(y)` compares
elements. A Python number becomes a constant of the value's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from rlx.base.convert import convert_exactly
from rlx.base.dims import Dim, DimExpr, ceildiv
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError, UsageError
from rlx.base.numeric import Array
from rlx.base.types import Shape
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops import movement as mv
from rlx.ops.leaf import constant, dim_tensor

__all__ = ["as_value", "install_operators"]


def as_value(operand: Any, like: Value) -> Value:
    """Return a value, number, array or extent as a value.

    Numbers and extents get the dtype of `like`.

    Raises:
        TypeRuleError: a number that the dtype cannot hold, or something that is no tensor.
    """
    if isinstance(operand, Value):
        return operand
    dtype = like.type.dtype
    if isinstance(operand, DimExpr):
        return ew.cast(dim_tensor((operand,), ()), dtype)
    if isinstance(operand, np.ndarray | np.generic):
        return constant(np.asarray(cast("Any", operand)))
    if isinstance(operand, bool | int | float):
        return constant(_number(operand, dtype))
    raise TypeRuleError(f"{operand!r} of type {type(operand).__name__} is no tensor")


def _number(number: float, dtype: DType) -> Array:
    """Return a number in a dtype; floats round, and all else has to be exact."""
    try:
        wide = np.asarray(number if not (dtype.is_float or dtype.is_complex) else float(number))
        return convert_exactly(wide, dtype, "it")
    except (UsageError, OverflowError) as error:
        raise TypeRuleError(f"the number {number} is no {dtype}; cast the tensor first") from error


def _unary(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    # A plain function binds to its instance; the declaration, an object, would not.
    return lambda self: function(self)  # noqa: PLW0108


def _binary(function: Callable[[Value, Value], Value]) -> Callable[[Value, Any], Value]:
    return lambda self, other: function(self, as_value(other, self))


def _swapped(function: Callable[[Value, Value], Value]) -> Callable[[Value, Any], Value]:
    return lambda self, other: function(as_value(other, self), self)


def _logical(on_bool: Callable[..., Value], on_bits: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *values: (on_bool if values[0].type.dtype is DType.BOOL else on_bits)(*values)


def _matmul(a: Value, b: Value) -> Value:
    from rlx.ops.matmul import matmul

    return matmul(a, b)


def _getitem(x: Value, key: Any) -> Value:
    """Return x indexed by integers, slices, None and one Ellipsis.

    Steps are numbers; negative indices count from the end.
    """
    items = list(cast("tuple[Any, ...]", key)) if isinstance(key, tuple) else [key]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > x.type.rank or items.count(Ellipsis) > 1:
        raise TypeRuleError(f"{key!r} does not index {x.type}")
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.type.rank - used)
    starts: list[Dim] = []
    sizes: list[Dim] = []
    steps: list[int] = []
    shape: list[Dim] = []
    for item in items:
        if item is None:
            shape.append(1)
            continue
        start, size, step = _line(item, x.type.shape[len(starts)], x)
        starts.append(start)
        sizes.append(size)
        steps.append(step)
        if isinstance(item, slice):
            shape.append(size)
    return mv.reshape(mv.slice(x, starts, sizes, steps), shape)


def _line(item: Any, extent: Dim, x: Value) -> tuple[Dim, Dim, int]:
    """Return (start, size, step) of one index."""
    if isinstance(item, int | np.integer):
        index = int(cast("Any", item))
        if isinstance(extent, int) and not -extent <= index < extent:
            raise TypeRuleError(f"index {index} is outside an extent of {extent} of {x.type}")
        return (index + extent if index < 0 else index), 1, 1
    line = item
    if not isinstance(item, slice) or line.step == 0:
        what = f"{line!r} does not index {x.type}"
        raise TypeRuleError(f"{what}; use gather for tensors of indices")
    if isinstance(extent, int):
        first, last, step = line.indices(extent)
        return first, len(range(first, last, step)), step
    step = 1 if line.step is None else int(line.step)
    if step < 1 and (line.start is not None or line.stop is not None):
        raise TypeRuleError(f"a backward slice of the symbolic extent {extent} must be whole")
    if step < 1:
        return extent - 1, ceildiv(extent, -step), step
    begin = _bound(line.start, extent, 0)
    return begin, ceildiv(_bound(line.stop, extent, extent) - begin, step), step


def _bound(index: Dim | None, extent: Dim, default: Dim) -> Dim:
    if index is None:
        return default
    return index + extent if isinstance(index, int) and index < 0 else index


def _cast(x: Value, to: Any) -> Value:
    return ew.cast(x, DType.of(to))


def _reshape(x: Value, *shape: Any) -> Value:
    return mv.reshape(x, _spread(shape))


def _transpose(x: Value, *perm: Any) -> Value:
    return mv.transpose(x, _spread(perm) or None)


def _dtype(x: Value) -> DType:
    return x.type.dtype


def _shape(x: Value) -> Shape:
    return x.type.shape


_METHODS: dict[str, Any] = {
    "__add__": _binary(ew.add),
    "__radd__": _swapped(ew.add),
    "__sub__": _binary(ew.sub),
    "__rsub__": _swapped(ew.sub),
    "__mul__": _binary(ew.mul),
    "__rmul__": _swapped(ew.mul),
    "__truediv__": _binary(ew.div),
    "__rtruediv__": _swapped(ew.div),
    "__mod__": _binary(ew.floor_mod),
    "__pow__": _binary(ew.pow),
    "__rpow__": _swapped(ew.pow),
    "__matmul__": _binary(_matmul),
    "__rmatmul__": _swapped(_matmul),
    "__and__": _binary(_logical(ew.logical_and, ew.bit_and)),
    "__or__": _binary(_logical(ew.logical_or, ew.bit_or)),
    "__xor__": _binary(_logical(ew.logical_xor, ew.bit_xor)),
    "__lshift__": _binary(ew.shift_left),
    "__rshift__": _binary(ew.shift_right),
    "__invert__": _logical(ew.logical_not, ew.bit_not),
    "__neg__": _unary(ew.neg),
    "__abs__": _unary(ew.abs),
    "__lt__": _binary(ew.less),
    "__le__": _binary(ew.less_equal),
    "__gt__": _binary(ew.greater),
    "__ge__": _binary(ew.greater_equal),
    "__getitem__": _getitem,
    "equal": _binary(ew.equal),
    "not_equal": _binary(ew.not_equal),
    "cast": _cast,
    "reshape": _reshape,
    "transpose": _transpose,
    "dtype": property(_dtype),
    "shape": property(_shape),
}


def _spread(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return f((2, 3)) as f(2, 3)."""
    if len(items) == 1 and isinstance(items[0], tuple | list):
        return tuple(cast("Sequence[Any]", items[0]))
    return items


def install_operators() -> None:
    """Attach the operators to `Value`, which itself knows no operator by name."""
    for name, method in _METHODS.items():
        setattr(Value, name, method)
    # Without these, Python would iterate by __getitem__ and NumPy arrays would broadcast over a
    # value.
    Value.__iter__ = None  # pyright: ignore[reportAttributeAccessIssue]
    Value.__array_ufunc__ = None  # pyright: ignore[reportAttributeAccessIssue]
