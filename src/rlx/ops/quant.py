# SPDX-License-Identifier: Apache-2.0
"""Quantising floats linearly, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rlx.base import numeric
from rlx.base.dims import Dim, ceildiv
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.facts import current_facts
from rlx.base.numeric import Array
from rlx.base.types import Shape, TensorType, require_equal
from rlx.expr.body import Scalar, trace
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.region import Region
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["DequantizeLinear", "QuantizeLinear"]

_REAL = frozenset({DType.F16, DType.BF16, DType.F32})
_FP8 = frozenset({DType.F8E4M3, DType.F8E5M2})
_PACKED = frozenset({DType.I4, DType.U4})
_QUANTIZED = frozenset({DType.I8, DType.U8, DType.I16, DType.U16}) | _FP8 | _PACKED


def _f32(*shape: int, fill: str = "normal") -> Operand:
    return Operand(shape, DType.F32, fill)


def _int(dtype: DType, *shape: int) -> Operand:
    return Operand(shape, dtype)


def _check_parameters(
    op_: QuantizeLinear | DequantizeLinear,
    x: TensorType,
    scale: TensorType,
    zero_point: TensorType | None,
    quantized: DType,
) -> None:
    if quantized not in _QUANTIZED and not (
        quantized is DType.I32 and isinstance(op_, DequantizeLinear)
    ):
        raise TypeRuleError(
            f"{quantized} is no quantised dtype; use an integer of 4, 8 or 16 bits or fp8"
        )
    if scale.dtype not in _REAL:
        raise TypeRuleError(f"the scale must be f16, bf16 or f32, found {scale.dtype}")
    if zero_point is not None:
        if zero_point.dtype is not quantized:
            raise TypeRuleError(f"the zero point must be {quantized}, found {zero_point.dtype}")
        if zero_point.rank != scale.rank:
            raise TypeRuleError(f"scale {scale} and zero point {zero_point} have different shapes")
        for a, b in zip(scale.shape, zero_point.shape, strict=True):
            require_equal(a, b, "the scale and the zero point")
    _check_scale(op_, x, scale)


def _check_scale(op_: QuantizeLinear | DequantizeLinear, x: TensorType, scale: TensorType) -> None:
    if op_.axis is None:
        _check_broadcast(x, scale)
        return
    if not 0 <= op_.axis < x.rank:
        raise TypeRuleError(f"axis {op_.axis} is out of range for {x}")
    if op_.block < 0:
        raise TypeRuleError(f"block is {op_.block}; it must be at least 0")
    if op_.block:
        _check_blocks(x, scale, op_.axis, op_.block)
    elif scale.rank != 1:
        raise TypeRuleError(f"the scale along axis {op_.axis} must have rank 1, found {scale}")
    else:
        require_equal(scale.shape[0], x.shape[op_.axis], f"the scale and axis {op_.axis} of x")


def _check_broadcast(x: TensorType, scale: TensorType) -> None:
    if scale.elements == 1:
        return
    facts = current_facts()
    lead = x.rank - scale.rank
    fits = lead >= 0 and all(
        d == 1 or facts.equal(d, e) is not False
        for d, e in zip(scale.shape, x.shape[lead:], strict=True)
    )
    if not fits:
        raise TypeRuleError(
            f"the scale {scale} does not broadcast to {x}; name the axis it goes along"
        )


def _check_blocks(x: TensorType, scale: TensorType, axis: int, block: int) -> None:
    if scale.rank != x.rank:
        raise TypeRuleError(f"the scale of blocks must have the rank of {x}, found {scale}")
    for index, (have, extent) in enumerate(zip(scale.shape, x.shape, strict=True)):
        want = ceildiv(extent, block) if index == axis else extent
        require_equal(have, want, f"axis {index} of the scale of blocks of {block}")


def _spread(parameter: Array, axis: int | None, block: int, shape: tuple[int, ...]) -> Array:
    """Return a scale or zero point so that it broadcasts to x of this shape."""
    if axis is None:
        return parameter.reshape(()) if parameter.size == 1 else parameter
    if block:
        repeated = np.repeat(parameter, block, axis)
        return repeated[(*(slice(None),) * axis, slice(0, shape[axis]))]
    return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _column(value: Value | None, shape: Shape) -> Value | None:
    from rlx.ops.movement import reshape

    return None if value is None else reshape(value, shape)


def _decompose(
    op_: QuantizeLinear | DequantizeLinear, x: Value, scale: Value, zero_point: Value | None
) -> Value | None:
    """Return the operator over operands whose scale broadcasts; None where impossible."""
    from rlx.ops.movement import reshape

    axis, shape = op_.axis, x.type.shape
    plain = replace(op_, axis=None, block=0)
    if axis is None:
        if scale.type.rank <= x.type.rank:
            return None  # expressed by `region`, or not at all
        return emit_one(plain, x, _column(scale, ()), _column(zero_point, ()))
    if not op_.block:
        column = tuple(d if i == axis else 1 for i, d in enumerate(shape))
        return emit_one(plain, x, _column(scale, column), _column(zero_point, column))
    extent = shape[axis]
    if not isinstance(extent, int) or extent % op_.block:
        return emit_one(
            plain, x, *(_repeated(p, axis, op_.block, shape) for p in (scale, zero_point))
        )
    blocks: tuple[Dim, ...] = (*shape[:axis], extent // op_.block, op_.block, *shape[axis + 1 :])
    column = (*blocks[: axis + 1], 1, *blocks[axis + 2 :])
    y = emit_one(plain, reshape(x, blocks), _column(scale, column), _column(zero_point, column))
    return reshape(y, shape)


def _repeated(parameter: Value | None, axis: int, block: int, shape: Shape) -> Value | None:
    """Return a parameter of blocks with an element for every one of x; the last block may be short."""
    from rlx.ops.movement import expand, reshape, slice_axis

    if parameter is None:
        return None
    lead, count, rest = (
        parameter.type.shape[:axis],
        parameter.type.shape[axis],
        parameter.type.shape[axis + 1 :],
    )
    column = reshape(parameter, (*lead, count, 1, *rest))
    wide = expand(column, (*lead, count, block, *rest))
    return slice_axis(reshape(wide, (*lead, count * block, *rest)), axis, 0, shape[axis])


def _region(
    function: Callable[..., Scalar],
    x: TensorType,
    parameters: tuple[TensorType | None, ...],
    result: DType,
) -> Region | None:
    """Return the region over x and the present parameters; None where one does not broadcast."""
    present = [t for t in (x, *parameters) if t is not None]
    if any(t.rank > x.rank for t in present):
        return None
    return Region(trace(function, [t.dtype for t in present], result), x.shape)


@op("quantize_linear")
@dataclass(frozen=True)
class QuantizeLinear(Op):
    """y = saturate(round(x / scale) + zero_point), x's shape.

    The division is an f32 division, halves round to even, the sum saturates to the range of `to`;
    NaN gives 0. For fp8 targets nothing is rounded before the conversion.

    x: any float but f64, or i32; scale: f16, bf16 or f32; zero_point: `to`, 0 where absent.

    Attributes:
        axis: the axis that scales go along: [extent] without, [.., ceil(extent / block), ..] with
            blocks. None: the scale has one element, or broadcasts to x.
        block: number of neighbours along `axis` that share a scale; 0 for one scale per index.
        to: dtype of the result.
        saturate: for fp8 targets, clamp what is too large instead of making it NaN or infinite.
    """

    operands = ("x", "scale", "zero_point?")
    axis: int | None = None
    block: int = 0
    to: DType = DType.U8
    saturate: bool = True
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((_f32(3, 17), _f32(fill="positive"), _int(DType.U8)), {}),
        Sample((_f32(3, 17, fill="special"), _f32(fill="positive"), None), {"to": DType.I8}),
        Sample(
            (_f32(3, 5, 4), _f32(5, fill="positive"), _int(DType.I8, 5)),
            {"axis": 1, "to": DType.I8},
        ),
        Sample(
            (_f32(3, 5), _f32(5, fill="positive"), _int(DType.U16, 5)), {"axis": 1, "to": DType.U16}
        ),
        Sample((_f32(3, 5), _f32(fill="positive"), _int(DType.I16)), {"to": DType.I16}),
        Sample((_f32(3, 5), _f32(fill="positive"), None), {"to": DType.I4}),
        Sample((_f32(3, 5), _f32(fill="positive"), None), {"to": DType.U4}),
        Sample((_f32(3, 5), _f32(fill="positive"), None), {"to": DType.F8E4M3}),
        Sample((_f32(3, 5), _f32(fill="positive"), None), {"to": DType.F8E5M2, "saturate": False}),
        Sample(
            (_f32(2, 6), _f32(2, 2, fill="positive"), _int(DType.U8, 2, 2)), {"axis": 1, "block": 3}
        ),
        Sample((_f32(5, 2), _f32(3, 2, fill="positive"), None), {"axis": 0, "block": 2}),
        Sample((_int(DType.I32, 4), _f32(fill="positive"), None), {}),
        Sample((_f32(0, 4), _f32(fill="positive"), None), {}),
        Sample((_f32(), _f32(1, fill="positive"), None), {}),
        Sample((_f32(3, 5), _f32(4, fill="positive"), None), {"axis": 1}, error="axis 1"),
    )

    def infer(  # noqa: D102
        self, x: TensorType, scale: TensorType, zero_point: TensorType | None = None
    ) -> TensorType:
        if x.dtype not in _REAL and x.dtype is not DType.I32:
            raise TypeRuleError(f"x must be f16, bf16, f32 or i32, found {x.dtype}; cast first")
        _check_parameters(self, x, scale, zero_point, self.to)
        return x.with_dtype(self.to)

    def reference(self, x: Array, scale: Array, zero_point: Array | None = None) -> Array:  # noqa: D102
        # The meaning is an f32 division even where a wider one was possible: at ties the two round
        # differently.
        wide = _spread(scale.astype(np.float32), self.axis, self.block, x.shape)
        with np.errstate(all="ignore"):
            y = x.astype(np.float32) / wide
        if self.to not in _FP8:
            y = numeric.round_half_even(y)
        if zero_point is not None:
            y = y + _spread(numeric.cast(zero_point, DType.F32), self.axis, self.block, x.shape)
        return numeric.cast(np.broadcast_to(y, x.shape), self.to, saturate=self.saturate)

    def region(
        self, x: TensorType, scale: TensorType, zero_point: TensorType | None = None
    ) -> Region | None:
        """Return it as an elementwise region; None with scales along an axis or in blocks."""
        if self.axis is not None:
            return None
        to, saturate = self.to, self.saturate or self.to not in _FP8

        def quantize(value: Scalar, by: Scalar, zero: Scalar | None = None) -> Scalar:
            ratio = value.cast(DType.F32) / by.cast(DType.F32)
            whole = ratio if to in _FP8 else ratio.builder.emit("round", ratio)
            # The conversion saturates, and below 2**24 the sum is exact.
            total = whole if zero is None else whole + zero.cast(DType.F32)
            return total.cast(to, saturate=saturate)

        return _region(quantize, x, (scale, zero_point), to)

    def decompose(self, x: Value, scale: Value, zero_point: Value | None = None) -> Value | None:
        """Return it with a scale that broadcasts to (reshaped) x. Exact."""
        return _decompose(self, x, scale, zero_point)


@op("dequantize_linear")
@dataclass(frozen=True)
class DequantizeLinear(Op):
    """y = (x - zero_point) * scale, x's shape.

    The difference is exact (for i32 it wraps) and is rounded to f32 before the product; fp8
    operands are subtracted in f32.

    x: an integer of 4, 8 or 16 bits, i32, or fp8; scale: f16, bf16 or f32; zero_point: x's dtype, 0
        where absent.

    Attributes:
        axis: as for `QuantizeLinear`.
        block: as for `QuantizeLinear`.
        to: dtype of the result: f16, bf16 or f32.
    """

    operands = ("x", "scale", "zero_point?")
    axis: int | None = None
    block: int = 0
    to: DType = DType.F32
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((_int(DType.U8, 3, 17), _f32(fill="positive"), _int(DType.U8)), {}),
        Sample((_int(DType.I8, 3, 17), _f32(fill="positive"), None), {}),
        Sample((_int(DType.I8, 3, 5, 4), _f32(5, fill="positive"), _int(DType.I8, 5)), {"axis": 1}),
        Sample((_int(DType.I16, 3, 5), _f32(5, fill="positive"), _int(DType.I16, 5)), {"axis": 1}),
        Sample((_int(DType.U16, 3, 5), _f32(fill="positive"), None), {"to": DType.F16}),
        Sample((_int(DType.I4, 3, 5), _f32(fill="positive"), None), {}),
        Sample((_int(DType.U4, 4, 2), _f32(2, 2, fill="positive"), None), {"axis": 0, "block": 2}),
        Sample((_int(DType.F8E4M3, 3, 5), _f32(fill="positive"), None), {}),
        Sample((_int(DType.F8E5M2, 3, 5), _f32(fill="positive"), None), {"to": DType.BF16}),
        Sample((_int(DType.I32, 5), _f32(fill="positive"), None), {}),
        Sample((_int(DType.U8, 0, 4), _f32(fill="positive"), None), {}),
        Sample((_int(DType.U8, 3), Operand((), DType.F64, "positive"), None), {}, error="scale"),
    )

    def infer(  # noqa: D102
        self, x: TensorType, scale: TensorType, zero_point: TensorType | None = None
    ) -> TensorType:
        if self.to not in _REAL:
            raise TypeRuleError(
                f"dequantises to f16, bf16 or f32, not to {self.to}; cast the result"
            )
        _check_parameters(self, x, scale, zero_point, x.dtype)
        return x.with_dtype(self.to)

    def reference(self, x: Array, scale: Array, zero_point: Array | None = None) -> Array:  # noqa: D102
        wide = DType.F32 if x.dtype.kind == "f" else DType.I32
        y = numeric.cast(x, wide)
        with np.errstate(all="ignore"):
            if zero_point is not None:
                y = y - _spread(numeric.cast(zero_point, wide), self.axis, self.block, x.shape)
            factor = _spread(scale, self.axis, self.block, x.shape)
            return np.asarray(
                np.broadcast_to(y.astype(np.float32).astype(scale.dtype) * factor, x.shape)
            )

    def region(
        self, x: TensorType, scale: TensorType, zero_point: TensorType | None = None
    ) -> Region | None:
        """Return it as an elementwise region; None with scales along an axis or in blocks."""
        if self.axis is not None:
            return None
        to, kind = self.to, DType.F32 if x.dtype in _FP8 else DType.I32

        def dequantize(value: Scalar, by: Scalar, zero: Scalar | None = None) -> Scalar:
            wide = value.cast(kind)
            centred = wide if zero is None else wide - zero.cast(kind)
            return (centred.cast(DType.F32) * by.cast(DType.F32)).cast(to)

        return _region(dequantize, x, (scale, zero_point), to)

    def decompose(self, x: Value, scale: Value, zero_point: Value | None = None) -> Value | None:
        """Return it with a scale that broadcasts to (reshaped) x. Exact."""
        return _decompose(self, x, scale, zero_point)
