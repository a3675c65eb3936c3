# SPDX-License-Identifier: Apache-2.0
"""What callers of `rlx.Graph` pass, checked where they pass it."""

from __future__ import annotations

import operator
from typing import Any, cast

from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.foreign import as_array
from rlx.base.numeric import Array
from rlx.ir.graph import Block, Value

__all__ = ["array_of", "check_name", "check_value", "dtype_of", "shape_of"]


def check_name(name: object) -> None:
    """Raise a UsageError unless a name is a text that is not empty."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"a name is a text that is not empty, not {name!r}")


def check_value(value: object, block: Block, what: str) -> None:
    """Refuse what is no value of the graph: found late, nothing says where it came from.

    Args:
        value: what was passed as a value.
        block: that it has to be of.
        what: the subject of the message.

    Raises:
        UsageError: it is of another graph, or of another type.
    """
    if not isinstance(value, Value):
        raise UsageError(f"{what} is a {type(value).__name__}, not a value of the graph")
    owner = value.block if value.producer is None else value.producer.block
    if owner is not block:
        raise UsageError(f"{what} is {value.type}, a value of another graph")


def dtype_of(name: str, dtype: Any) -> DType:
    """Return the dtype given for a leaf; a UsageError says what is wrong with it."""
    if dtype is None:  # NumPy takes it for f64
        raise UsageError(f"{name!r} has no dtype; leave it out for f32")
    return DType.of(dtype)


def shape_of(name: str, shape: Any) -> tuple[Dim, ...]:
    """Return the shape given for a leaf, symbols for names; a UsageError says what is wrong with it."""
    if not isinstance(shape, list | tuple):
        raise UsageError(f"the shape of {name!r} is a list of extents, not {shape!r}")
    return tuple(_dim(name, extent) for extent in cast("list[Any]", shape))


def _dim(name: str, extent: Any) -> Dim:
    if isinstance(extent, str):
        return symbol(extent)
    try:
        number = -1 if isinstance(extent, bool) else operator.index(extent)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(
            f"an extent of {name!r} is {extent!r}; it is a whole number from 0 on, or a text that names what varies"
        )
    return number


def array_of(name: str, data: Any) -> Array:
    """Return the value given for a leaf in this machine's byte order; a UsageError says why it is none."""
    array = as_array(data, f"param {name!r}")
    return array.astype(DType.of(array.dtype).numpy, copy=False)
