# SPDX-License-Identifier: Apache-2.0
"""Softmax and the normalisations, as bodies over rows.

Variances are two-pass: the mean first, then the deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlx.base.dims import Dim, floordiv, product
from rlx.base.dtypes import FLOATS, DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType, broadcast_shapes, normalize_axis, require_equal
from rlx.expr.body import Body, Scalar, trace
from rlx.expr.evaluate import evaluate_body
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops import elementwise as ew
from rlx.ops.leaf import constant, dim_tensor
from rlx.ops.movement import reshape, transpose
from rlx.ops.region import Region
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = [
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "LogSoftmax",
    "RmsNorm",
    "Softmax",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "softmax",
]


def _emit(name: str, *args: Scalar) -> Scalar:
    return args[0].builder.emit(name, *args)


def _require_float(*types: TensorType | None) -> None:
    for type_ in types:
        if type_ is not None and type_.dtype not in FLOATS:
            raise TypeRuleError(f"does not accept {type_.dtype}; cast to a float first")


# -- softmax
# -----------------------------------------------------------------------------------------


def _softmax(x: Scalar) -> Scalar:
    e = _emit("exp", x - _emit("rmax", x))
    return e * (1.0 / _emit("rsum", e))


def _log_softmax(x: Scalar) -> Scalar:
    shifted = x - _emit("rmax", x)
    return shifted - _emit("log", _emit("rsum", _emit("exp", shifted)))


_SOFTMAX_SAMPLES = (
    Sample((Operand((4, 33)),), {"axis": 1}),
    Sample((Operand((2, 5, 3)),), {"axis": 1}),
    Sample((Operand((3, 0)),), {"axis": 1}),
    Sample((Operand((3, 9), fill="special"),), {"axis": 1}),
    Sample((Operand((3, 1)),), {"axis": -1}),
)


@dataclass(frozen=True)
class _AlongAxis(Op):
    """Base of operators that map each line along one axis to a line of the same length."""

    precision_class = OpClass.REDUCTION

    operands = ("x",)
    function: ClassVar[Callable[[Scalar], Scalar]]
    axis: int = -1

    def infer(self, x: TensorType) -> TensorType:
        _require_float(x)
        normalize_axis(self.axis, x.rank)
        return x

    def reference(self, x: Array) -> Array:
        line = np.moveaxis(x, self.axis, -1)
        (result,) = evaluate_body(self._body(DType.of(x.dtype)), [line], 1)
        return np.ascontiguousarray(np.moveaxis(result, -1, self.axis))

    def _body(self, dtype: DType) -> Body:
        return trace(type(self).function, (dtype,))

    def region(self, x: TensorType) -> Region | None:
        """Return a row region where the axis is the last one."""
        if normalize_axis(self.axis, x.rank) != x.rank - 1:
            return None
        return Region(self._body(x.dtype), x.shape, (), 1)

    def decompose(self, x: Value) -> Value | None:
        """Return it along the last axis between two transposes; None if it is there already."""
        last, axis = x.type.rank - 1, normalize_axis(self.axis, x.type.rank)
        if axis == last:
            return None
        swap = tuple(last if i == axis else axis if i == last else i for i in range(x.type.rank))
        return transpose(emit_one(type(self)(last), transpose(x, swap)), swap)


@op("softmax")
@dataclass(frozen=True)
class Softmax(_AlongAxis):
    """y_i = e^(x_i - max x) / sum_j e^(x_j - max x) along an axis.

    A row of -inf, or one with NaN or +inf, is NaN.
    """

    function = staticmethod(_softmax)
    samples: ClassVar[tuple[Sample, ...]] = _SOFTMAX_SAMPLES


@op("log_softmax")
@dataclass(frozen=True)
class LogSoftmax(_AlongAxis):
    """y_i = x_i - max x - log sum_j e^(x_j - max x) along an axis."""

    function = staticmethod(_log_softmax)
    samples: ClassVar[tuple[Sample, ...]] = _SOFTMAX_SAMPLES


def softmax(x: Value, axis: int = -1) -> Value:
    """Return the softmax along an axis."""
    return emit_one(Softmax(normalize_axis(axis, x.type.rank)), x)


def log_softmax(x: Value, axis: int = -1) -> Value:
    """Return the logarithm of the softmax along an axis."""
    return emit_one(LogSoftmax(normalize_axis(axis, x.type.rank)), x)


# -- layer and root mean square norms
# ----------------------------------------------------------------


def _layer(x: Scalar, count: Scalar | float, eps: float) -> Scalar:
    centred = x - _emit("rsum", x) / count
    variance = _emit("rsum", centred * centred) / count
    return centred * _emit("rsqrt", variance + eps)


def _rms(x: Scalar, count: Scalar | float, eps: float) -> Scalar:
    return x * _emit("rsqrt", _emit("rsum", x * x) / count + eps)


@dataclass(frozen=True)
class _RowNorm(Op):
    """Base of norms over all axes from `axis` on, with factors that broadcast to x."""

    precision_class = OpClass.REDUCTION

    function: ClassVar[Callable[[Scalar, Scalar | float, float], Scalar]]
    axis: int = -1
    eps: float = 1e-5

    def infer(self, x: TensorType, *factors: TensorType | None) -> TensorType:
        if len(factors) >= len(self.operands):
            raise TypeRuleError(f"takes {len(self.operands)} operands, not {len(factors) + 1}")
        _require_float(x, *factors)
        normalize_axis(self.axis, x.rank)
        for factor in factors:
            if factor is not None and broadcast_shapes(x.shape, factor.shape) != x.shape:
                raise TypeRuleError(f"a factor {factor} does not broadcast to {x}")
        return x

    def _body(self, dtypes: Sequence[DType], present: Sequence[bool], count: int | None) -> Body:
        """Return the body over x, the present factors and, where `count` is None, the count."""

        def function(x: Scalar, *rest: Scalar) -> Scalar:
            size: Scalar | float = rest[-1] if count is None else float(count)
            # Factors may be wider or narrower than x: all is computed in the widest of them.
            wide = DType.F64 if any(s.dtype is DType.F64 for s in (x, *rest)) else x.dtype
            size = size.cast(wide) if isinstance(size, Scalar) else size
            y = type(self).function(x.cast(wide), size, self.eps)
            factors = iter(s.cast(wide) for s in (rest[:-1] if count is None else rest))
            if present and present[0]:
                y = y * next(factors)
            if len(present) > 1 and present[1]:
                y = y + next(factors)
            return y

        return trace(function, dtypes, dtypes[0])

    def _rows(self, rank: int) -> int:
        return rank - normalize_axis(self.axis, rank)

    def reference(self, x: Array, *factors: Array | None) -> Array:
        rows = self._rows(x.ndim)
        count = math.prod(x.shape[x.ndim - rows :])
        given = [f.reshape((1,) * (x.ndim - f.ndim) + f.shape) for f in factors if f is not None]
        arrays = [x, *given]
        body = self._body(
            [DType.of(a.dtype) for a in arrays], [f is not None for f in factors], count
        )
        return evaluate_body(body, arrays, rows)[0]

    def region(self, x: TensorType, *factors: TensorType | None) -> Region | None:
        """Return a row region; None where the number of elements of a row is symbolic."""
        rows = self._rows(x.rank)
        count = product(x.shape[x.rank - rows :])
        if not isinstance(count, int):
            return None
        given = [f.dtype for f in factors if f is not None]
        body = self._body([x.dtype, *given], [f is not None for f in factors], count)
        return Region(body, x.shape, (), rows)

    def decompose(self, x: Value, *factors: Value | None) -> Value | None:
        """Return a row region that reads the symbolic number of elements of a row as an operand."""
        rows = self._rows(x.type.rank)
        count = product(x.type.shape[x.type.rank - rows :])
        if isinstance(count, int):
            return None
        given = [f for f in factors if f is not None]
        size = ew.cast(dim_tensor((count,), ()), x.type.dtype.compute)
        dtypes = [v.type.dtype for v in (x, *given, size)]
        body = self._body(dtypes, [f is not None for f in factors], None)
        return emit_one(Region(body, x.type.shape, (), rows), x, *given, size)


@op("layer_norm")
@dataclass(frozen=True)
class LayerNorm(_RowNorm):
    """y = (x - mean) / sqrt(variance + eps) * scale + bias over the axes from `axis` on.

    The variance is the mean of the squared deviations (in f32 for f16, bf16 and f32: deviations
    above 1e19 overflow). Scale and bias broadcast to x. Source: Ba, Kiros, Hinton 2016.

    Attributes:
        axis: the first normalised axis.
        eps: added to the variance.
    """

    operands = ("x", "scale?", "bias?")
    function = staticmethod(_layer)
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((4, 33)), Operand((33,)), Operand((33,))), {}),
        Sample((Operand((2, 3, 5)), Operand((3, 5)), None), {"axis": 1}),
        Sample((Operand((4, 16)), None, Operand((16,))), {}),
        Sample((Operand((4, 16)), None, None), {"eps": 1e-12}),
        Sample((Operand((0, 16)), Operand((16,)), Operand((16,))), {}),
    )


@op("rms_norm")
@dataclass(frozen=True)
class RmsNorm(_RowNorm):
    """y = x / sqrt(mean(x^2) + eps) * scale over the axes from `axis` on.

    Source: Zhang, Sennrich 2019.

    Attributes:
        axis: the first normalised axis.
        eps: added to the mean square.
    """

    operands = ("x", "scale?")
    function = staticmethod(_rms)
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((4, 33)), Operand((33,))), {}),
        Sample((Operand((2, 3, 5)), Operand((3, 5))), {"axis": 1}),
        Sample((Operand((4, 16)), None), {"eps": 1e-6}),
    )


def layer_norm(
    x: Value,
    scale: Value | None = None,
    bias: Value | None = None,
    axis: int = -1,
    eps: float = 1e-5,
) -> Value:
    """Return x normalised over the axes from `axis` on."""
    return emit_one(LayerNorm(normalize_axis(axis, x.type.rank), eps), x, scale, bias)


def rms_norm(x: Value, scale: Value | None = None, axis: int = -1, eps: float = 1e-5) -> Value:
    """Return x divided by its root mean square over the axes from `axis` on."""
    return emit_one(RmsNorm(normalize_axis(axis, x.type.rank), eps), x, scale)


# -- norms of channels
# -------------------------------------------------------------------------------


def _check_channels(x: TensorType, factors: Sequence[TensorType | None], rank: int) -> None:
    _require_float(x, *factors)
    if x.rank < rank:
        raise TypeRuleError(f"needs at least {rank} axes [N, C, ...], not {x}")
    for factor in factors:
        if factor is None:
            continue
        if factor.rank != 1:
            raise TypeRuleError(f"a factor must be [C] for the channels of {x}, not {factor}")
        require_equal(factor.shape[0], x.shape[1], f"channels of {x} and a factor")


def _spread(factor: Array, rank: int) -> Array:
    """Return a factor per channel shaped to broadcast over [N, C, ...]."""
    return factor.reshape((-1, *([1] * (rank - 2))))


def _column(factor: Value, rank: int) -> Value:
    return reshape(factor, (factor.type.shape[0], *([1] * (rank - 2))))


@op("instance_norm")
@dataclass(frozen=True)
class InstanceNorm(Op):
    """LayerNorm of each channel of x [N, C, ...] over its spatial axes.

    Then comes a scale [C] and a bias [C] per channel.

    Source: Ulyanov, Vedaldi, Lempitsky 2016.
    """

    precision_class = OpClass.REDUCTION

    operands = ("x", "scale", "bias")
    eps: float = 1e-5
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 3, 4, 5)), Operand((3,)), Operand((3,))), {}),
        Sample((Operand((1, 4, 33)), Operand((4,)), Operand((4,))), {"eps": 1e-3}),
    )

    def infer(self, x: TensorType, scale: TensorType, bias: TensorType) -> TensorType:  # noqa: D102
        _check_channels(x, (scale, bias), 3)
        return x

    def reference(self, x: Array, scale: Array, bias: Array) -> Array:  # noqa: D102
        return LayerNorm(2, self.eps).reference(x, _spread(scale, x.ndim), _spread(bias, x.ndim))

    def decompose(self, x: Value, scale: Value, bias: Value) -> Value:
        """Return a layer norm over the spatial axes."""
        rank = x.type.rank
        return layer_norm(x, _column(scale, rank), _column(bias, rank), 2, self.eps)


@op("group_norm")
@dataclass(frozen=True)
class GroupNorm(Op):
    """LayerNorm of each of `groups` groups of channels of x [N, C, ...].

    Then comes a scale [C] and a bias [C] per channel.

    Source: Wu, He 2018.
    """

    precision_class = OpClass.REDUCTION

    operands = ("x", "scale?", "bias?")
    groups: int
    eps: float = 1e-5
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 6, 4, 5)), Operand((6,)), Operand((6,))), {"groups": 3}),
        Sample((Operand((2, 4, 3)), None, None), {"groups": 1}),
        Sample((Operand((2, 4, 3)), None, None), {"groups": 3}, error="groups"),
    )

    def infer(  # noqa: D102
        self, x: TensorType, scale: TensorType | None = None, bias: TensorType | None = None
    ) -> TensorType:
        _check_channels(x, (scale, bias), 2)
        channels = x.shape[1]
        if self.groups < 1 or (isinstance(channels, int) and channels % self.groups):
            raise TypeRuleError(f"{channels} channels do not divide into {self.groups} groups")
        return x

    def _grouped(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        return (shape[0], self.groups, floordiv(shape[1], self.groups), *shape[2:])

    def reference(self, x: Array, scale: Array | None = None, bias: Array | None = None) -> Array:  # noqa: D102
        shape = self._grouped(x.shape)
        size = int(shape[2])
        factors = [
            None if f is None else f.reshape((self.groups, size, *([1] * (x.ndim - 2))))
            for f in (scale, bias)
        ]
        parts = x.reshape((x.shape[0], self.groups, size, *x.shape[2:]))
        return LayerNorm(2, self.eps).reference(parts, *factors).reshape(x.shape)

    def decompose(self, x: Value, scale: Value | None = None, bias: Value | None = None) -> Value:
        """Return a layer norm of x viewed as [N, groups, C / groups, ...]."""
        shape = self._grouped(x.type.shape)
        factors = [
            None if f is None else reshape(f, (self.groups, shape[2], *([1] * (x.type.rank - 2))))
            for f in (scale, bias)
        ]
        y = layer_norm(reshape(x, shape), factors[0], factors[1], 2, self.eps)
        return reshape(y, x.type.shape)


@op("batch_norm")
@dataclass(frozen=True)
class BatchNorm(Op):
    """y = (x - mean) / sqrt(variance + eps) * scale + bias with given statistics.

    Per channel of x [N, C, ...]; all factors are [C]. Source: Ioffe, Szegedy 2015.
    """

    precision_class = OpClass.REDUCTION

    operands = ("x", "scale", "bias", "mean", "variance")
    eps: float = 1e-5
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample(
            (
                Operand((2, 3, 4, 5)),
                *(Operand((3,)) for _ in range(3)),
                Operand((3,), fill="positive"),
            ),
            {},
        ),
        Sample(
            (Operand((4, 3)), *(Operand((3,)) for _ in range(3)), Operand((3,), fill="positive")),
            {"eps": 1e-3},
        ),
    )

    def infer(self, x: TensorType, *factors: TensorType) -> TensorType:  # noqa: D102
        if len(factors) != 4:
            raise TypeRuleError(
                f"needs scale, bias, mean and variance, found {len(factors)} factors"
            )
        _check_channels(x, factors, 2)
        if any(f.dtype is not x.dtype for f in factors):
            raise TypeRuleError(
                f"x is {x.dtype}, the factors are {', '.join(str(f.dtype) for f in factors)}"
            )
        return x

    def reference(self, x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:  # noqa: D102
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(variance + np.asarray(self.eps, x.dtype))
            return (x - _spread(mean, x.ndim)) * _spread(factor, x.ndim) + _spread(bias, x.ndim)

    def decompose(self, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Value:
        """Return x * factor + shift, which depend on the params only (at least in f32)."""
        dtype = x.type.dtype
        wide = dtype.compute
        x, scale, bias, mean, variance = (
            ew.cast(v, wide) for v in (x, scale, bias, mean, variance)
        )
        factor = ew.div(scale, ew.sqrt(ew.add(variance, constant(self.eps, wide))))
        shift = ew.sub(bias, ew.mul(mean, factor))
        rank = x.type.rank
        return ew.cast(ew.add(ew.mul(x, _column(factor, rank)), _column(shift, rank)), dtype)


def instance_norm(x: Value, scale: Value, bias: Value, eps: float = 1e-5) -> Value:
    """Return every channel of x [N, C, ...] normalised over its spatial axes."""
    return emit_one(InstanceNorm(eps), x, scale, bias)


def group_norm(
    x: Value, groups: int, scale: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Value:
    """Return every group of channels of x [N, C, ...] normalised."""
    return emit_one(GroupNorm(groups, eps), x, scale, bias)


def batch_norm(
    x: Value, scale: Value, bias: Value, mean: Value, variance: Value, eps: float = 1e-5
) -> Value:
    """Return x [N, C, ...] normalised by given statistics per channel."""
    return emit_one(BatchNorm(eps), x, scale, bias, mean, variance)
