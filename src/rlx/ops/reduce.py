# SPDX-License-Identifier: Apache-2.0
"""Reductions, arg-reductions, cumulative sums and the k largest.

A reduction is a body with row instructions over its trailing axes; other axes are transposed to the
end first. Sums of narrow floats accumulate in f32. NaN is kept by every kind and is the greatest
value in an order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from rlx.base import numeric
from rlx.base.dims import Dim, less_equal, product
from rlx.base.dtypes import NUMERIC, DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import Shape, TensorType, normalize_axes, normalize_axis
from rlx.expr.body import Body, Scalar, trace
from rlx.expr.evaluate import evaluate_body
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops import elementwise as ew
from rlx.ops.leaf import constant, dim_tensor
from rlx.ops.movement import arange, reshape, transpose
from rlx.ops.region import Region
from rlx.ops.spec import Operand, Sample, emit, emit_one, op

__all__ = [
    "ArgReduce",
    "CumSum",
    "Reduce",
    "TopK",
    "arg_max",
    "arg_min",
    "cum_sum",
    "reduce_l1",
    "reduce_l2",
    "reduce_logsum",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "reduce_sumsq",
    "top_k",
]

_Row: TypeAlias = Callable[[Scalar], Scalar]


def _emit(name: str, *args: Scalar) -> Scalar:
    return args[0].builder.emit(name, *args)


def _rsum(x: Scalar) -> Scalar:
    return _emit("rsum", x)


def _logsumexp(x: Scalar) -> Scalar:
    top = _emit("rmax", x)
    # An infinite maximum must not be subtracted from itself: +inf gives +inf, a row of -inf gives
    # -inf.
    shift = _emit("select", _emit("isinf", top), top.builder.const(0, top.dtype), top)
    return _emit("log", _rsum(_emit("exp", x - shift))) + shift


# Over a row. `mean` is a sum that is divided by the number of elements, see `_body`.
_ROWS: dict[str, _Row] = {
    "sum": _rsum,
    "mean": _rsum,
    "max": lambda x: _emit("rmax", x),
    "min": lambda x: _emit("rmin", x),
    "prod": lambda x: _emit("rprod", x),
    "sumsq": lambda x: _rsum(x * x),
    "l1": lambda x: _rsum(_emit("abs", x)),
    "l2": lambda x: _emit("sqrt", _rsum(x * x)),
    "logsum": lambda x: _emit("log", _rsum(x)),
    "logsumexp": _logsumexp,
}

# Over a single element, for a reduction without axes.
_SINGLE: dict[str, _Row] = {
    "sumsq": lambda x: x * x,
    "l1": lambda x: _emit("abs", x),
    "l2": lambda x: _emit("abs", x),
    "logsum": lambda x: _emit("log", x),
}

_IN_FLOAT = frozenset({"l2", "logsum", "logsumexp"})
"""Kinds that integers go through f64 for."""


def _body(kind: str, dtype: DType, count: int | None) -> Body:
    """Return the reduction of a row of `count` elements, of a single element where it is None."""
    if count is None:
        return (
            trace(_SINGLE.get(kind, lambda x: x), (dtype,))
            if kind in _SINGLE
            else Body((dtype,), (), (0,))
        )
    if kind != "mean":
        return trace(_ROWS[kind], (dtype,))
    wide = _mean_dtype(dtype)

    def mean(x: Scalar) -> Scalar:
        total = _rsum(x.cast(wide)) / count
        return total.cast(dtype) if dtype.is_integer else total

    return trace(mean, (dtype,))


def _mean_dtype(dtype: DType) -> DType:
    """Return what a mean is summed in: small integers need the room."""
    if dtype.is_integer:
        return DType.I64 if dtype.is_signed else DType.U64
    return dtype.compute


def _kept(shape: Shape, axes: Sequence[int], keepdims: bool) -> Shape:
    if keepdims:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def _to_the_end(rank: int, axes: Sequence[int]) -> tuple[int, ...]:
    return (*(i for i in range(rank) if i not in axes), *axes)


@op("reduce")
@dataclass(frozen=True)
class Reduce(Op):
    """One number for all elements along axes.

    Kinds: sum, mean, max, min, prod, sumsq (sum of x^2), l1 (sum of |x|), l2 (square root of
        sumsq), logsum (log of the
    sum), logsumexp (log of the sum of e^x, without overflow). An empty row gives the identity: 0, 1
    for prod, -inf or the type's minimum for max, +inf or its maximum for min, NaN for mean.
    Integers wrap; their mean truncates; their l2, logsum and logsumexp are computed in f64 and
    truncated. Without axes each element is a row of its own.

    Attributes:
        kind: one of the kinds.
        axes: which axes, counted from the front.
        keepdims: keep them with extent 1.
    """

    precision_class = OpClass.REDUCTION

    operands = ("x",)
    kind: str
    axes: tuple[int, ...]
    keepdims: bool = True
    samples: ClassVar[tuple[Sample, ...]] = (
        *(
            Sample((Operand((3, 33)),), {"kind": k, "axes": (1,)})
            for k in ("sum", "mean", "max", "min", "sumsq", "l1")
        ),
        *(
            Sample((Operand((3, 17), fill="positive"),), {"kind": k, "axes": (1,)})
            for k in ("l2", "logsum")
        ),
        Sample((Operand((3, 33)),), {"kind": "logsumexp", "axes": (1,)}),
        Sample((Operand((3, 5), fill="unit"),), {"kind": "prod", "axes": (1,)}),
        Sample((Operand((2, 5, 3, 4)),), {"kind": "mean", "axes": (1, 2), "keepdims": False}),
        Sample((Operand((2, 5, 3)),), {"kind": "sum", "axes": (0, 2), "keepdims": False}),
        Sample((Operand((4, 9), fill="special"),), {"kind": "max", "axes": (1,)}),
        Sample((Operand((3, 0)),), {"kind": "max", "axes": (1,)}),
        Sample((Operand((3, 4)),), {"kind": "sumsq", "axes": ()}),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if self.kind not in _ROWS:
            raise TypeRuleError(f"kind {self.kind!r} is none of {', '.join(_ROWS)}")
        if x.dtype not in NUMERIC:
            raise TypeRuleError(f"does not accept {x.dtype}; cast first")
        return x.with_shape(_kept(x.shape, normalize_axes(self.axes, x.rank), self.keepdims))

    def reference(self, x: Array) -> Array:  # noqa: D102
        dtype = DType.of(x.dtype)
        if dtype.is_integer and self.kind in _IN_FLOAT:
            return numeric.cast(self.reference(numeric.cast(x, DType.F64)), dtype)
        axes = normalize_axes(self.axes, x.ndim)
        shape = _kept(x.shape, axes, self.keepdims)
        if not axes:
            return evaluate_body(_body(self.kind, dtype, None), [x])[0]
        moved = x.transpose(_to_the_end(x.ndim, axes))
        count = math.prod([x.shape[a] for a in axes])
        (result,) = evaluate_body(_body(self.kind, dtype, count), [moved], len(axes))
        return result.reshape([d for d in shape if isinstance(d, int)])

    def region(self, x: TensorType) -> Region | None:
        """Return a row region where the axes are the last ones and stay.

        The mean needs a static count.
        """
        axes = normalize_axes(self.axes, x.rank)
        if x.dtype.is_integer and self.kind in _IN_FLOAT:
            return None
        if not axes:
            return Region(_body(self.kind, x.dtype, None), x.shape)
        if not self.keepdims or axes != tuple(range(x.rank - len(axes), x.rank)):
            return None
        count = product(x.shape[a] for a in axes)
        if self.kind != "mean":
            count = 0  # does not matter
        if not isinstance(count, int):
            return None
        if count == 0 and self.kind == "mean" and x.dtype.is_integer:
            return None  # fails when it runs
        return Region(_body(self.kind, x.dtype, count), x.shape, (), len(axes))

    def decompose(self, x: Value) -> Value | None:
        """Return a reduction of trailing axes with what moves them there.

        None if it is one already.
        """
        axes = normalize_axes(self.axes, x.type.rank)
        if x.type.dtype.is_integer and self.kind in _IN_FLOAT:
            return ew.cast(
                _reduce(self.kind, ew.cast(x, DType.F64), axes, self.keepdims), x.type.dtype
            )
        shape = self.infer(x.type).shape
        rank, n = x.type.rank, len(axes)
        trailing = tuple(range(rank - n, rank))
        if axes and (axes != trailing or not self.keepdims):
            moved = transpose(x, _to_the_end(rank, axes))
            return reshape(_reduce(self.kind, moved, trailing, True), shape)
        count = product(x.type.shape[a] for a in axes)
        fails = count == 0 and x.type.dtype.is_integer
        if self.kind == "mean" and axes and (fails or not isinstance(count, int)):
            return _mean(x, axes, count)
        return None


def _mean(x: Value, axes: tuple[int, ...], count: Dim) -> Value:
    """Return the mean over a number of elements that the run knows; integers fail for none."""
    dtype = x.type.dtype
    wide = _mean_dtype(dtype)
    total = reduce_sum(ew.cast(x, wide), axes, True)
    return ew.cast(ew.div(total, ew.cast(dim_tensor((count,), ()), wide)), dtype)


def _reduce(kind: str, x: Value, axes: Sequence[int] | None, keepdims: bool) -> Value:
    rank = x.type.rank
    chosen = tuple(range(rank)) if axes is None else normalize_axes(axes, rank)
    return emit_one(Reduce(kind, chosen, keepdims), x)


def reduce_sum(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the sum over axes (all by default)."""
    return _reduce("sum", x, axes, keepdims)


def reduce_mean(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the mean over axes (all by default)."""
    return _reduce("mean", x, axes, keepdims)


def reduce_max(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the maximum over axes (all by default)."""
    return _reduce("max", x, axes, keepdims)


def reduce_min(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the minimum over axes (all by default)."""
    return _reduce("min", x, axes, keepdims)


def reduce_prod(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the product over axes (all by default)."""
    return _reduce("prod", x, axes, keepdims)


def reduce_sumsq(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the sum of squares over axes (all by default)."""
    return _reduce("sumsq", x, axes, keepdims)


def reduce_l1(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the sum of absolute values over axes (all by default)."""
    return _reduce("l1", x, axes, keepdims)


def reduce_l2(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the Euclidean norm over axes (all by default)."""
    return _reduce("l2", x, axes, keepdims)


def reduce_logsum(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the logarithm of the sum over axes (all by default)."""
    return _reduce("logsum", x, axes, keepdims)


def reduce_logsumexp(x: Value, axes: Sequence[int] | None = None, keepdims: bool = True) -> Value:
    """Return the logarithm of the sum of exponentials over axes (all by default)."""
    return _reduce("logsumexp", x, axes, keepdims)


# -- positions
# ---------------------------------------------------------------------------------------


@op("arg_reduce")
@dataclass(frozen=True)
class ArgReduce(Op):
    """The i64 index of the largest or smallest element along an axis, the first of equal ones.

    It is where the value lies that `max` or `min` returns. NaN comes through both, so if there is a
    NaN it is the index of the first NaN (the last with `select_last`), for both kinds.

    Attributes:
        kind: `max` or `min`.
        axis: along which axis.
        keepdims: keep it with extent 1.
        select_last: the last of equal ones instead of the first.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    kind: str
    axis: int
    keepdims: bool = True
    select_last: bool = False
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((3, 33)),), {"kind": "max", "axis": 1}),
        Sample(
            (Operand((3, 5, 2), fill="special"),), {"kind": "max", "axis": 1, "keepdims": False}
        ),
        Sample(
            (Operand((3, 33), fill="special"),), {"kind": "min", "axis": 1, "select_last": True}
        ),
        Sample((Operand((3, 0)),), {"kind": "max", "axis": 1}, error="empty"),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if self.kind not in ("max", "min"):
            raise TypeRuleError(f"kind {self.kind!r} is neither max nor min")
        if x.dtype not in NUMERIC:
            raise TypeRuleError(f"does not accept {x.dtype}; cast first")
        axis = normalize_axis(self.axis, x.rank)
        if x.shape[axis] == 0:
            raise TypeRuleError(f"axis {axis} of {x} is empty, so it has no {self.kind}imum")
        return TensorType(DType.I64, _kept(x.shape, (axis,), self.keepdims))

    def reference(self, x: Array) -> Array:  # noqa: D102
        find = np.argmax if self.kind == "max" else np.argmin
        extent = x.shape[self.axis]
        if extent == 0:
            raise ExecutionError(f"axis {self.axis} is empty, so it has no {self.kind}imum")
        if not self.select_last:
            return np.asarray(find(x, axis=self.axis, keepdims=self.keepdims)).astype(np.int64)
        back = find(np.flip(x, self.axis), axis=self.axis, keepdims=self.keepdims)
        return np.asarray(extent - 1 - back).astype(np.int64)

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        (x,) = types
        extent = x.shape[normalize_axis(self.axis, x.rank)]
        return less_equal(1, extent) is not True

    def decompose(self, x: Value) -> Value:
        """Return the smallest (or largest) index at which the element is the extremum."""
        rank, axis = x.type.rank, normalize_axis(self.axis, x.type.rank)
        extent = x.type.shape[axis]
        best = _reduce(self.kind, x, (axis,), True)
        hit = ew.equal(x, best)
        if x.type.dtype.is_float:
            hit = ew.logical_or(
                hit, ew.is_nan(x)
            )  # if there is a NaN, `best` is one and equals nothing
        index = reshape(arange(extent), tuple(extent if i == axis else 1 for i in range(rank)))
        if self.select_last:
            return reduce_max(ew.where(hit, index, constant(-1, DType.I64)), (axis,), self.keepdims)
        return reduce_min(ew.where(hit, index, dim_tensor((extent,), ())), (axis,), self.keepdims)


def arg_max(x: Value, axis: int, keepdims: bool = True, select_last: bool = False) -> Value:
    """Return the index of the largest element along an axis."""
    return emit_one(ArgReduce("max", normalize_axis(axis, x.type.rank), keepdims, select_last), x)


def arg_min(x: Value, axis: int, keepdims: bool = True, select_last: bool = False) -> Value:
    """Return the index of the smallest element along an axis."""
    return emit_one(ArgReduce("min", normalize_axis(axis, x.type.rank), keepdims, select_last), x)


# -- scans and orders
# --------------------------------------------------------------------------------


@op("cumsum")
@dataclass(frozen=True)
class CumSum(Op):
    """The sums of all elements up to each one along an axis; integers wrap.

    Attributes:
        axis: along which axis.
        exclusive: without the element itself, so the first sum is 0.
        reverse: from the end.
    """

    precision_class = OpClass.REDUCTION

    operands = ("x",)
    axis: int
    exclusive: bool = False
    reverse: bool = False
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((3, 17)),), {"axis": 1}),
        Sample((Operand((3, 4, 2)),), {"axis": 1, "exclusive": True}),
        Sample((Operand((3, 4)),), {"axis": 0, "reverse": True}),
        Sample((Operand((1, 2)),), {"axis": 0, "exclusive": True, "reverse": True}),
        Sample((Operand((0, 2)),), {"axis": 0, "exclusive": True}),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        normalize_axis(self.axis, x.rank)
        if x.dtype not in NUMERIC:
            raise TypeRuleError(f"does not accept {x.dtype}; cast first")
        return x

    def reference(self, x: Array) -> Array:  # noqa: D102
        line = np.moveaxis(x, self.axis, 0)
        line = line[::-1] if self.reverse else line
        wide = np.float64 if x.dtype.kind == "f" else x.dtype
        with np.errstate(all="ignore"):
            total = np.cumsum(line, axis=0, dtype=wide).astype(x.dtype)
        if self.exclusive and len(total):  # shifted, not subtracted: inf - inf would be NaN
            total = np.concatenate([np.zeros_like(total[:1]), total[:-1]])
        total = total[::-1] if self.reverse else total
        return np.ascontiguousarray(np.moveaxis(total, 0, self.axis))


def cum_sum(x: Value, axis: int, exclusive: bool = False, reverse: bool = False) -> Value:
    """Return the running sums along an axis."""
    return emit_one(CumSum(normalize_axis(axis, x.type.rank), exclusive, reverse), x)


@op("top_k")
@dataclass(frozen=True)
class TopK(Op):
    """The k largest or smallest elements along an axis, and their i64 indices.

    NaN is the greatest value; of equal elements the lower index comes first.

    Attributes:
        k: how many, at most the extent.
        axis: along which axis.
        largest: the largest or the smallest.
        sorted: in order; rlx sorts in any case.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    k: Dim
    axis: int
    largest: bool = True
    sorted: bool = True
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((3, 17)),), {"k": 5, "axis": 1}),
        Sample((Operand((9, 2), fill="special"),), {"k": 9, "axis": 0}),
        Sample((Operand((9, 2), fill="special"),), {"k": 4, "axis": 0, "largest": False}),
        Sample((Operand((3,)),), {"k": 0, "axis": 0}),
        Sample((Operand((3,)),), {"k": 4, "axis": 0}, error="extent"),
    )

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:  # noqa: D102
        axis = normalize_axis(self.axis, x.rank)
        if x.dtype not in NUMERIC:
            raise TypeRuleError(f"does not accept {x.dtype}; cast first")
        if less_equal(self.k, x.shape[axis]) is False or less_equal(0, self.k) is False:
            raise TypeRuleError(
                f"k = {self.k} does not lie between 0 and the extent {x.shape[axis]} of axis {axis}"
            )
        values = x.with_shape(tuple(self.k if i == axis else d for i, d in enumerate(x.shape)))
        return values, values.with_dtype(DType.I64)

    def reference(self, x: Array) -> tuple[Array, Array]:  # noqa: D102
        k, extent = int(self.k), x.shape[self.axis]
        if k > extent:
            raise ExecutionError(f"k = {k} exceeds the extent {extent} of axis {self.axis}")
        order = numeric.argsort(x, self.axis, descending=self.largest)
        index = np.take(order, np.arange(k), axis=self.axis)
        return np.take_along_axis(x, index, self.axis), index.astype(np.int64)

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        (x,) = types
        return less_equal(self.k, x.shape[normalize_axis(self.axis, x.rank)]) is not True


def top_k(
    x: Value, k: Dim, axis: int = -1, largest: bool = True, ordered: bool = True
) -> tuple[Value, Value]:
    """Return the k largest (or smallest) elements along an axis and their indices."""
    values, indices = emit(TopK(k, normalize_axis(axis, x.type.rank), largest, ordered), x)
    return values, indices
