# SPDX-License-Identifier: Apache-2.0
"""Constants, and extents as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from rlx.base.dims import Dim, ceildiv, dim_max, product
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.frontends.onnx.tensor import SparseTensor, Tensor
from rlx.ops import elementwise as ew
from rlx.ops.leaf import constant, dim_tensor
from rlx.ops.movement import Range, arange, expand, unsqueeze
from rlx.ops.spec import emit_one

__all__ = ["array_of"]

T = TypeVar("T")


@onnx_op("Constant", "value value_float value_floats value_int value_ints sparse_value")
def _constant(call: Call) -> Mapped:
    (name,) = call.attributes or ("",)
    value: Any = call.attributes.get(name)
    if isinstance(value, Tensor | SparseTensor):
        return call.control.tensor(value, call.node.outputs[0])
    if name.startswith("value_float"):
        return constant(np.asarray(value, np.float32))
    if name.startswith("value_int"):
        return constant(np.asarray(value, np.int64))
    raise call.wrong(f"the constant has no value rlx can read in {name!r}")


def array_of(call: Call, name: str, default: Array) -> Array:
    """Return the elements of a TENSOR attribute."""
    value = call.attributes.get(name)
    if value is None:
        return default
    if not isinstance(value, Tensor):
        raise call.wrong(f"attribute {name!r} is not a tensor")
    return value.array()


@onnx_op("ConstantOfShape", "value")
def _constant_of_shape(call: Call) -> Mapped:
    data = array_of(call, "value", np.zeros(1, np.float32))
    if data.size != 1:
        raise call.wrong(f"value must have one element, not {data.size}")
    return expand(constant(data.reshape(())), call.dims(0, "the shape"))


@onnx_op("Shape", "start end")
def _shape(call: Call) -> Mapped:
    shape = call.type_of(0).shape
    start = call.get_int("start", 0)
    end = call.get_int("end", len(shape))
    dims = shape[_clip(start, len(shape)) : _clip(end, len(shape))]
    return dim_tensor(dims, (len(dims),))


def _clip(index: int, rank: int) -> int:
    return min(max(index + rank if index < 0 else index, 0), rank)


@onnx_op("Size")
def _size(call: Call) -> Mapped:
    return dim_tensor((product(call.type_of(0).shape),), ())


@onnx_op("Range", only={"stash_type": (1,)})
def _range(call: Call) -> Mapped:
    """[start, start + delta, ...] up to limit; its length has to follow from shapes."""
    start, delta = call.value(0), call.value(2)
    return emit_one(Range(_range_size(call)), start, delta)


def _single(call: Call, elements: Sequence[T], what: str) -> T:
    """Return the only element of an operand."""
    if len(elements) != 1:
        raise call.wrong(f"{what} has {len(elements)} elements, not one")
    return elements[0]


def _range_size(call: Call) -> Dim:
    if call.type_of(0).dtype.is_float:
        first, last, step = (
            _single(call, call.floats(i, name), name)
            for i, name in enumerate(("start", "limit", "delta"))
        )
        return max(0, int(np.ceil((last - first) / step)))
    first = _single(call, call.dims(0, "start"), "start")
    last = _single(call, call.dims(1, "limit"), "limit")
    step = call.integer(2, "delta")
    if step == 0:
        raise call.wrong("delta is 0")
    return dim_max(0, ceildiv(last - first, step) if step > 0 else ceildiv(first - last, -step))


@onnx_op("EyeLike", "dtype k")
def _eye_like(call: Call) -> Mapped:
    """Ones where column - row = k."""
    x = call.type_of(0)
    if x.rank != 2:
        raise call.wrong(f"the input must be a matrix, not {x}")
    rows, columns = x.shape
    row, column = arange(rows), arange(columns)
    shifted = ew.add(unsqueeze(row, (1,)), constant(call.get_int("k", 0), DType.I64))
    return ew.cast(ew.equal(shifted, unsqueeze(column, (0,))), call.get_dtype("dtype", x.dtype))
