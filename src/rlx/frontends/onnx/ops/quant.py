# SPDX-License-Identifier: Apache-2.0
"""Quantising and the operators on quantised operands."""

from __future__ import annotations

from rlx.base.dtypes import DType
from rlx.base.types import normalize_axis
from rlx.frontends.onnx.ops.convolution import convolution
from rlx.frontends.onnx.ops.elementwise import scalar
from rlx.frontends.onnx.ops.matmul import integer_product, scalar_of
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.integer import IntegerConv
from rlx.ops.movement import reshape
from rlx.ops.quant import DequantizeLinear, QuantizeLinear
from rlx.ops.reduce import reduce_max, reduce_min
from rlx.ops.spec import emit_one


@onnx_op("QuantizeLinear", "axis block_size output_dtype saturate", only={"precision": (0, 1)})
def _quantize(call: Call) -> Mapped:
    axis, scale, zero = _parameters(call)
    default = zero.type.dtype if zero is not None else DType.U8
    saturate = call.get_flag("saturate", default=True)
    op = QuantizeLinear(axis, call.get_int("block_size", 0), _output(call, default), saturate)
    return emit_one(op, call.value(0), scale, zero)


@onnx_op("DequantizeLinear", "axis block_size output_dtype")
def _dequantize(call: Call) -> Mapped:
    axis, scale, zero = _parameters(call)
    to = _output(call, scale.type.dtype)
    op = DequantizeLinear(axis, call.get_int("block_size", 0), to)
    return emit_one(op, call.value(0), scale, zero)


def _output(call: Call, default: DType) -> DType:
    return call.get_dtype("output_dtype") if call.get_int("output_dtype", 0) else default


def _parameters(call: Call) -> tuple[int | None, Value, Value | None]:
    """Return (axis, scale, zero point); one scale for all has no axis and rank 0."""
    x, scale, zero = call.value(0), call.value(1), call.maybe(2)
    if scale.type.elements == 1 and not call.get_int("block_size", 0):
        return None, _scalar_of(scale), None if zero is None else _scalar_of(zero)
    return normalize_axis(call.get_int("axis", 1), x.type.rank), scale, zero


@onnx_op("DynamicQuantizeLinear", outputs=3)
def _dynamic_quantize(call: Call) -> Mapped:
    """u8 values whose range is that of x, widened to hold 0; also the scale and the zero point."""
    x = call.value(0)
    axes = tuple(range(x.type.rank))
    zero = scalar(0.0, x)
    low = ew.minimum(reduce_min(x, axes, False), zero)
    high = ew.maximum(reduce_max(x, axes, False), zero)
    scale = ew.div(ew.sub(high, low), scalar(255.0, x))
    point = ew.clamp(ew.round(ew.div(ew.neg(low), scale)), zero, scalar(255.0, x))
    zero_point = ew.cast(point, DType.U8)
    return (
        emit_one(QuantizeLinear(None, 0, DType.U8, True), x, scale, zero_point),
        scale,
        zero_point,
    )


@onnx_op("QLinearMatMul")
def _qlinear_matmul(call: Call) -> Mapped:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (call.value(i) for i in range(8))
    total = integer_product(a, a_zero, b, b_zero)
    scale = ew.cast(ew.mul(_column(a_scale), b_scale), DType.F32)
    real = ew.mul(ew.cast(total, DType.F32), scale)
    return _requantize(real, y_scale, y_zero)


def _column(value: Value) -> Value:
    """Return per-row parameters of a matrix as a column."""
    if value.type.rank != 1 or value.type.shape == (1,):
        return value
    return reshape(value, (value.type.shape[0], 1))


def _requantize(real: Value, scale: Value, zero: Value) -> Value:
    wide = ew.cast(_scalar_of(scale), DType.F32)
    return emit_one(QuantizeLinear(None, 0, zero.type.dtype, True), real, wide, _scalar_of(zero))


def _scalar_of(value: Value) -> Value:
    found = scalar_of(value)
    assert found is not None
    return found


@onnx_op("ConvInteger", "auto_pad dilations group kernel_shape pads strides")
def _conv_integer(call: Call) -> Mapped:
    return _integer_conv(call, call.value(0), call.maybe(2), call.value(1), call.maybe(3))


def _integer_conv(
    call: Call, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None
) -> Value:
    op = IntegerConv.of(convolution(call, x, w))
    return emit_one(op, x, scalar_of(x_zero), w, scalar_of(w_zero))


@onnx_op("QLinearConv", "auto_pad dilations group kernel_shape pads strides")
def _qlinear_conv(call: Call) -> Mapped:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (call.value(i) for i in range(8))
    total = _integer_conv(call, x, x_zero, w, w_zero)
    bias = call.maybe(8)
    spatial = [1] * (x.type.rank - 2)
    if bias is not None:
        total = ew.add(total, reshape(bias, (bias.type.shape[0], *spatial)))
    scale = ew.mul(_scalar_of(x_scale), _scalar_of(w_scale))
    if scale.type.rank:
        scale = reshape(scale, (scale.type.shape[0], *spatial))
    return _requantize(ew.mul(ew.cast(total, DType.F32), scale), y_scale, y_zero)
