# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter, one-hot.

Indices count from the end where negative; others out of range are an ExecutionError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from rlx.base.dims import Dim, less_equal
from rlx.base.dtypes import INTEGERS, NUMERIC, DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import Shape, TensorType, normalize_axis, require_equal
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops import elementwise as ew
from rlx.ops.leaf import constant, dim_tensor
from rlx.ops.movement import arange, reshape, slice_axis
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = [
    "Gather",
    "GatherElements",
    "GatherND",
    "OneHot",
    "ScatterElements",
    "ScatterND",
    "gather",
    "gather_elements",
    "gather_nd",
    "one_hot",
    "scatter_elements",
    "scatter_nd",
]

REDUCTIONS = ("none", "add", "mul", "max", "min")


def _index(limit: int, *shape: int) -> Operand:
    return Operand(shape, DType.I64, "index", limit)


def _require_indices(indices: TensorType) -> None:
    if indices.dtype not in INTEGERS:
        raise TypeRuleError(f"the indices must be integers, not {indices.dtype}")


def _in_range(indices: Array, extent: int, what: str = "") -> Array:
    """Return the indices counted from the front.

    Raises:
        ExecutionError: one is outside [-extent, extent).
    """
    whole = indices.astype(np.int64)
    wrong = (whole < -extent) | (whole >= extent)
    if wrong.any():
        first = int(np.argmax(wrong.reshape(-1)))
        raise ExecutionError(
            f"index {whole.reshape(-1)[first]} at element {first} of the indices is outside "
            f"[{-extent}, {extent}){what}"
        )
    return np.where(whole < 0, whole + extent, whole)


def _grid(shape: Sequence[int], axes: Sequence[int]) -> list[Array]:
    """Return for each axis its own index, shaped to broadcast over `shape`."""
    rank = len(shape)
    return [np.arange(shape[a]).reshape([-1 if i == a else 1 for i in range(rank)]) for a in axes]


# -- gather
# ------------------------------------------------------------------------------------------


@op("gather")
@dataclass(frozen=True)
class Gather(Op):
    """x[..., indices, ...] at an axis: the result has the shape of the indices in its place."""

    precision_class = OpClass.MOVEMENT

    operands = ("x", "indices")
    axis: int = 0
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((9, 17)), _index(9, 2, 3)), {"axis": 0}),
        Sample((Operand((4, 5, 3)), _index(5, 7)), {"axis": 1}),
        Sample((Operand((4, 5)), _index(5)), {"axis": 1}),
        Sample((Operand((4, 5)), _index(4, 0)), {"axis": 0}),
    )

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:  # noqa: D102
        _require_indices(indices)
        axis = normalize_axis(self.axis, x.rank)
        return x.with_shape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))

    def reference(self, x: Array, indices: Array) -> Array:  # noqa: D102
        where = f" of axis {self.axis}"
        return np.take(x, _in_range(indices, x.shape[self.axis], where), axis=self.axis)

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        return True


def gather(x: Value, indices: Value, axis: int = 0) -> Value:
    """Return the slices of x at `indices` along an axis."""
    return emit_one(Gather(normalize_axis(axis, x.type.rank)), x, indices)


def _check_elements(x: TensorType, indices: TensorType, axis: int) -> None:
    _require_indices(indices)
    if indices.rank != x.rank:
        raise TypeRuleError(f"the indices {indices} need as many axes as {x}")
    for i, (have, limit) in enumerate(zip(indices.shape, x.shape, strict=True)):
        if i != axis and less_equal(have, limit) is False:
            raise TypeRuleError(f"the indices {indices} are larger than {x} at axis {i}")


@op("gather_elements")
@dataclass(frozen=True)
class GatherElements(Op):
    """y[i, j, k] = x[i, indices[i, j, k], k] (for axis 1).

    The result has the shape of the indices.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x", "indices")
    axis: int = 0
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((4, 5, 3)), _index(5, 4, 7, 3)), {"axis": 1}),
        Sample((Operand((4, 5)), _index(4, 2, 3)), {"axis": 0}),
        Sample((Operand((4,)), _index(4, 0)), {"axis": 0}),
    )

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:  # noqa: D102
        _check_elements(x, indices, normalize_axis(self.axis, x.rank))
        return x.with_shape(indices.shape)

    def reference(self, x: Array, indices: Array) -> Array:  # noqa: D102
        return x[_element_index(x, indices, self.axis)]

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        return True


def _element_index(x: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    axis = axis + x.ndim if axis < 0 else axis
    index: list[Array] = _grid(indices.shape, range(x.ndim))
    index[axis] = _in_range(indices, x.shape[axis], f" of axis {axis}")
    return tuple(index)


def gather_elements(x: Value, indices: Value, axis: int = 0) -> Value:
    """Return the elements of x at `indices` along an axis."""
    return emit_one(GatherElements(normalize_axis(axis, x.type.rank)), x, indices)


def _depth(indices: TensorType) -> int:
    """Return how many axes one index names: the last extent of the indices."""
    _require_indices(indices)
    if not indices.rank or not isinstance(indices.shape[-1], int):
        raise TypeRuleError(f"the last extent of the indices {indices} must be a number")
    return indices.shape[-1]


def _tuple_index(x: Array, indices: Array, batch: int) -> tuple[Array, ...]:
    """Return the index that the last axis of the indices spells after `batch` shared axes."""
    lead = indices.shape[:-1]
    parts = _grid(lead, range(batch))
    for position in range(indices.shape[-1]):
        axis = batch + position
        parts.append(_in_range(indices[..., position], x.shape[axis], f" of axis {axis}"))
    return tuple(parts)


@op("gather_nd")
@dataclass(frozen=True)
class GatherND(Op):
    """y[b, i] = x[b, *indices[b, i]].

    The last axis of the indices names the first k axes after the batch axes.

    The result has shape indices.shape[:-1] + x.shape[batch_dims + k:].
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x", "indices")
    batch_dims: int = 0
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((4, 4, 3)), _index(4, 5, 2)), {}),
        Sample((Operand((2, 4, 3)), _index(3, 2, 6, 1)), {"batch_dims": 1}),
        Sample((Operand((3, 3)), _index(3, 2)), {}),
    )

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:  # noqa: D102
        depth = _depth(indices)
        if self.batch_dims + depth > x.rank or self.batch_dims >= indices.rank:
            raise TypeRuleError(
                f"indices {indices} with {self.batch_dims} batch axes name too many axes of {x}"
            )
        for axis in range(self.batch_dims):
            require_equal(x.shape[axis], indices.shape[axis], f"batch axis {axis}")
        return x.with_shape((*indices.shape[:-1], *x.shape[self.batch_dims + depth :]))

    def reference(self, x: Array, indices: Array) -> Array:  # noqa: D102
        shape = (*indices.shape[:-1], *x.shape[self.batch_dims + indices.shape[-1] :])
        index = _tuple_index(x, indices, self.batch_dims)
        # Without an index at all, every position reads the whole tensor.
        return np.asarray(np.broadcast_to(x[index] if index else x, shape), order="C")

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        return True


def gather_nd(x: Value, indices: Value, batch_dims: int = 0) -> Value:
    """Return the elements or slices of x at the positions in the last axis of `indices`."""
    return emit_one(GatherND(batch_dims), x, indices)


# -- scatter
# -----------------------------------------------------------------------------------------

_MERGE: dict[str, Callable[..., None]] = {
    "add": np.add.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _scatter(x: Array, index: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    """Write the updates in row-major order, so duplicates give the same result every time."""
    out = x.copy()
    key: Any = index or (...,)
    with np.errstate(all="ignore"):
        if reduction == "none":
            out[key] = updates
        else:
            _MERGE[reduction](out, key, updates)
    return out


def _check_updates(x: TensorType, updates: TensorType, shape: Shape, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise TypeRuleError(f"reduction {reduction!r} is none of {', '.join(REDUCTIONS)}")
    if updates.dtype is not x.dtype:
        raise TypeRuleError(f"the updates are {updates.dtype}, x is {x.dtype}; cast first")
    if reduction != "none" and x.dtype is DType.BOOL:
        raise TypeRuleError(f"reduction {reduction!r} does not accept bool")
    if updates.rank != len(shape):
        raise TypeRuleError(f"the updates {updates} must have shape {shape}")
    for axis, (have, want) in enumerate(zip(updates.shape, shape, strict=True)):
        require_equal(have, want, f"axis {axis} of the updates")


@op("scatter_elements")
@dataclass(frozen=True)
class ScatterElements(Op):
    """x with x[i, indices[i, j, k], k] (for axis 1) replaced by, or merged with, updates[i, j, k].

    Attributes:
        axis: along which axis.
        reduction: `none` (the last of duplicates wins), `add`, `mul`, `max`, `min`.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x", "indices", "updates")
    axis: int = 0
    reduction: str = "none"
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample(
            (Operand((4, 5)), _index(5, 4, 3), Operand((4, 3))), {"axis": 1, "reduction": "add"}
        ),
        Sample(
            (Operand((4, 5)), _index(4, 2, 5), Operand((2, 5))), {"axis": 0, "reduction": "max"}
        ),
        Sample((Operand((4, 5)), _index(4, 1, 5), Operand((1, 5))), {"axis": 0}),
        Sample((Operand((4,)), _index(4, 0), Operand((0,))), {"axis": 0}),
    )

    def infer(self, x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:  # noqa: D102
        _check_elements(x, indices, normalize_axis(self.axis, x.rank))
        _check_updates(x, updates, indices.shape, self.reduction)
        return x

    def reference(self, x: Array, indices: Array, updates: Array) -> Array:  # noqa: D102
        return _scatter(x, _element_index(x, indices, self.axis), updates, self.reduction)

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        return True


def scatter_elements(
    x: Value, indices: Value, updates: Value, axis: int = 0, reduction: str = "none"
) -> Value:
    """Return x with the elements at `indices` along an axis replaced or merged."""
    return emit_one(
        ScatterElements(normalize_axis(axis, x.type.rank), reduction), x, indices, updates
    )


@op("scatter_nd")
@dataclass(frozen=True)
class ScatterND(Op):
    """x with x[*indices[i]] replaced by, or merged with, updates[i].

    The last axis of the indices (extent k) names the first k axes of x; updates have the shape
    indices.shape[:-1] + x.shape[k:].

    Attributes:
        reduction: `none` (the last of duplicates wins), `add`, `mul`, `max`, `min`.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x", "indices", "updates")
    reduction: str = "none"
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((4, 5)), _index(4, 3, 1), Operand((3, 5))), {"reduction": "add"}),
        Sample((Operand((4, 4)), _index(4, 6, 2), Operand((6,))), {"reduction": "min"}),
        Sample((Operand((4, 5)), _index(4, 1, 1), Operand((1, 5))), {}),
    )

    def infer(self, x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:  # noqa: D102
        depth = _depth(indices)
        if depth > x.rank:
            raise TypeRuleError(f"indices {indices} name {depth} axes of {x}")
        _check_updates(x, updates, (*indices.shape[:-1], *x.shape[depth:]), self.reduction)
        return x

    def reference(self, x: Array, indices: Array, updates: Array) -> Array:  # noqa: D102
        if not indices.shape[-1] and indices.ndim > 1:  # the whole tensor, several times
            count = math.prod(indices.shape[:-1])
            stacked = cast("list[Array]", list(updates.reshape(count, *x.shape)))
            for update in stacked:
                x = _scatter(x, (), update, self.reduction)
            return x
        return _scatter(x, _tuple_index(x, indices, 0), updates, self.reduction)

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        return True


def scatter_nd(x: Value, indices: Value, updates: Value, reduction: str = "none") -> Value:
    """Return x with the elements or slices at the positions in `indices` replaced or merged."""
    return emit_one(ScatterND(reduction), x, indices, updates)


# -- one-hot
# -----------------------------------------------------------------------------------------


@op("one_hot")
@dataclass(frozen=True)
class OneHot(Op):
    """values[1] where the class along the new axis is the index, else values[0].

    The operand `values` is [off, on].

    An index outside [-depth, depth) is no class: all off.

    Attributes:
        depth: number of classes.
        axis: where the new axis stands in the result.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("indices", "values")
    depth: Dim
    axis: int = -1
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((_index(5, 3, 4), Operand((2,))), {"depth": 5}),
        Sample((_index(7, 4), Operand((2,))), {"depth": 5, "axis": 0}),
    )

    def infer(self, indices: TensorType, values: TensorType) -> TensorType:  # noqa: D102
        _require_indices(indices)
        if values.rank != 1:
            raise TypeRuleError(f"the values must be [off, on], not {values}")
        if values.dtype not in NUMERIC and values.dtype is not DType.BOOL:
            raise TypeRuleError(f"does not accept {values.dtype}; cast first")
        require_equal(values.shape[0], 2, "number of values (off, on)")
        axis = normalize_axis(self.axis, indices.rank + 1)
        return values.with_shape((*indices.shape[:axis], self.depth, *indices.shape[axis:]))

    def reference(self, indices: Array, values: Array) -> Array:  # noqa: D102
        depth, whole = int(self.depth), indices.astype(np.int64)
        axis = normalize_axis(self.axis, indices.ndim + 1)
        classes = np.arange(depth).reshape(
            [-1 if i == axis else 1 for i in range(indices.ndim + 1)]
        )
        positive = np.expand_dims(np.where(whole < 0, whole + depth, whole), axis)
        off, on = cast("tuple[Array, Array]", (values[0], values[1]))
        return np.where(np.equal(classes, positive), on, off)

    def decompose(self, indices: Value, values: Value) -> Value:
        """Return a selection by the comparison of indices with class numbers."""
        rank = indices.type.rank + 1
        axis = normalize_axis(self.axis, rank)
        whole, shape = ew.cast(indices, DType.I64), indices.type.shape
        spread = reshape(whole, (*shape[:axis], 1, *shape[axis:]))
        classes = reshape(arange(self.depth), (self.depth, *([1] * (rank - 1 - axis))))
        from_end = ew.add(spread, dim_tensor((self.depth,), ()))
        positive = ew.where(ew.less(spread, constant(0, DType.I64)), from_end, spread)
        off, on = (reshape(slice_axis(values, 0, i, 1), ()) for i in (0, 1))
        return ew.where(ew.equal(classes, positive), on, off)


def one_hot(indices: Value, values: Value, depth: Dim, axis: int = -1) -> Value:
    """Return values[1] at the classes that `indices` name along a new axis, values[0] elsewhere."""
    return emit_one(OneHot(depth, normalize_axis(axis, indices.type.rank + 1)), indices, values)
