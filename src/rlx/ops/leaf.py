# SPDX-License-Identifier: Apache-2.0
"""Constants, and extents used as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import Shape, TensorType
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ir.text import attribute_form
from rlx.ops.spec import emit_one, op

__all__ = ["Constant", "DimTensor", "Literal", "constant", "dim_tensor"]


class Literal:
    """An immutable array with value equality (by dtype, shape and bits) for use as an attribute."""

    __slots__ = ("_key", "array")

    def __init__(self, array: Array) -> None:
        self.array = np.array(array, order="C", copy=True)
        self.array.setflags(write=False)
        self._key = (self.array.dtype.name, self.array.shape, self.array.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Literal({self.array.dtype.name}{list(self.array.shape)})"


attribute_form(Literal, "literal", lambda literal: literal.array, Literal)


@op("constant")
@dataclass(frozen=True)
class Constant(Op):
    """A small tensor whose value passes may look at."""

    data: Literal

    def infer(self) -> TensorType:  # noqa: D102
        return TensorType(DType.of(self.data.array.dtype), self.data.array.shape)

    def reference(self) -> Array:  # noqa: D102
        return self.data.array


@op("dim_tensor")
@dataclass(frozen=True)
class DimTensor(Op):
    """Symbolic extents as data: element i of the row-major tensor of shape `shape` is `dims[i]`."""

    dims: tuple[Dim, ...]
    shape: Shape = ()
    dtype: DType = DType.I64

    def infer(self) -> TensorType:  # noqa: D102
        return TensorType(self.dtype, self.shape)

    def reference(self) -> Array:  # noqa: D102
        values = np.array([int(d) for d in self.dims], dtype=self.dtype.numpy)
        return values.reshape(tuple(int(d) for d in self.shape))


def constant(value: Any, dtype: DType | None = None) -> Value:
    """Return a constant tensor; Python floats default to f32, integers to i64."""
    array = np.asarray(value)
    if (
        dtype is None
        and not isinstance(value, np.ndarray | np.generic)
        and array.dtype == np.float64
    ):
        dtype = DType.F32
    return emit_one(Constant(Literal(array.astype(dtype.numpy) if dtype else array)))


def dim_tensor(dims: tuple[Dim, ...], shape: Shape, dtype: DType = DType.I64) -> Value:
    """Return extents as a tensor."""
    return emit_one(DimTensor(dims, shape, dtype))
