# SPDX-License-Identifier: Apache-2.0
"""Arithmetic, comparison, logic, activations and casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.leaf import constant

__all__ = ["scalar"]

_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": ew.abs,
    "Acos": ew.acos,
    "Acosh": ew.acosh,
    "Asin": ew.asin,
    "Asinh": ew.asinh,
    "Atan": ew.atan,
    "Atanh": ew.atanh,
    "BitwiseNot": ew.bit_not,
    "Ceil": ew.ceil,
    "Cos": ew.cos,
    "Cosh": ew.cosh,
    "Erf": ew.erf,
    "Exp": ew.exp,
    "Floor": ew.floor,
    "HardSwish": ew.hard_swish,
    "IsNaN": ew.is_nan,
    "Log": ew.log,
    "Mish": ew.mish,
    "Neg": ew.neg,
    "Not": ew.logical_not,
    "Reciprocal": ew.reciprocal,
    "Round": ew.round,
    "Sigmoid": ew.sigmoid,
    "Sign": ew.sign,
    "Sin": ew.sin,
    "Sinh": ew.sinh,
    "Softplus": ew.softplus,
    "Softsign": ew.softsign,
    "Sqrt": ew.sqrt,
    "Tan": ew.tan,
    "Tanh": ew.tanh,
}

_BINARY: dict[str, Callable[..., Any]] = {
    "Add": ew.add,
    "And": ew.logical_and,
    "BitwiseAnd": ew.bit_and,
    "BitwiseOr": ew.bit_or,
    "BitwiseXor": ew.bit_xor,
    "Div": ew.div,
    "Equal": ew.equal,
    "Greater": ew.greater,
    "GreaterOrEqual": ew.greater_equal,
    "Less": ew.less,
    "LessOrEqual": ew.less_equal,
    "Mul": ew.mul,
    "Or": ew.logical_or,
    "PRelu": ew.prelu,
    "Sub": ew.sub,
    "Xor": ew.logical_xor,
}

_VARIADIC: dict[str, Callable[..., Any]] = {"Max": ew.maximum, "Min": ew.minimum, "Sum": ew.add}


def _declare_unary(name: str, function: Callable[..., Any]) -> None:
    @onnx_op(name)
    def unary(call: Call) -> Mapped:
        return function(call.value(0))


def _declare_binary(name: str, function: Callable[..., Any]) -> None:
    @onnx_op(name)
    def binary(call: Call) -> Mapped:
        return function(call.value(0), call.value(1))


def _declare_variadic(name: str, function: Callable[..., Any]) -> None:
    @onnx_op(name)
    def variadic(call: Call) -> Mapped:
        return reduce(function, call.values())


for _name, _function in _UNARY.items():
    _declare_unary(_name, _function)
for _name, _function in _BINARY.items():
    _declare_binary(_name, _function)
for _name, _function in _VARIADIC.items():
    _declare_variadic(_name, _function)


def scalar(number: float, like: Value) -> Value:
    """Return a number as a rank-0 tensor of the dtype of another value."""
    return constant(number, like.type.dtype)


@onnx_op("Mean")
def _mean(call: Call) -> Mapped:
    values = call.values()
    return ew.div(reduce(ew.add, values), scalar(len(values), values[0]))


@onnx_op("Relu")
def _relu(call: Call) -> Mapped:
    return ew.relu(call.value(0))


@onnx_op("Identity")
def _identity(call: Call) -> Mapped:
    return call.value(0)


@onnx_op("Where")
def _where(call: Call) -> Mapped:
    return ew.where(call.value(0), call.value(1), call.value(2))


@onnx_op("IsInf", "detect_negative detect_positive")
def _is_inf(call: Call) -> Mapped:
    return ew.is_inf(
        call.value(0),
        detect_negative=call.get_flag("detect_negative", default=True),
        detect_positive=call.get_flag("detect_positive", default=True),
    )


@onnx_op("Pow")
def _pow(call: Call) -> Mapped:
    """The result has the dtype of the base, whatever that of the exponent."""
    base, exponent = call.value(0), call.value(1)
    own, other = base.type.dtype, exponent.type.dtype
    if own is other:
        return ew.pow(base, exponent)
    if own.is_integer and other.is_float:
        return ew.cast(ew.pow(ew.cast(base, other), exponent), own)
    return ew.pow(base, ew.cast(exponent, own))


@onnx_op("Mod", "fmod")
def _mod(call: Call) -> Mapped:
    return (ew.fmod if call.get_flag("fmod") else ew.floor_mod)(call.value(0), call.value(1))


@onnx_op("BitShift", "direction")
def _bit_shift(call: Call) -> Mapped:
    x, amount = call.value(0), call.value(1)
    if call.get_choice("direction", ("LEFT", "RIGHT")) == "LEFT":
        return ew.shift_left(x, amount)
    if (
        x.type.dtype.is_signed
    ):  # ONNX fills with the sign however far; rlx gives 0 from the width on
        last = scalar(8 * x.type.dtype.itemsize - 1, amount)
        inside = ew.logical_and(ew.less_equal(scalar(0, amount), amount), ew.less(amount, last))
        amount = ew.where(inside, amount, last)
    return ew.shift_right(x, amount)


@onnx_op("Clip", "min max")
def _clip_attributes(call: Call) -> Mapped:
    x = call.value(0)
    low = scalar(call.get_float("min"), x) if call.has("min") else None
    high = scalar(call.get_float("max"), x) if call.has("max") else None
    return _clamp(x, low, high)


@onnx_op("Clip", since=11)
def _clip(call: Call) -> Mapped:
    return _clamp(call.value(0), call.maybe(1), call.maybe(2))


def _clamp(x: Value, low: Value | None, high: Value | None) -> Value:
    if low is not None and high is not None:
        return ew.clamp(x, low, high)
    if low is not None:
        return ew.maximum(x, low)
    return x if high is None else ew.minimum(x, high)


@onnx_op("LeakyRelu", "alpha")
def _leaky_relu(call: Call) -> Mapped:
    return ew.leaky_relu(call.value(0), alpha=call.get_float("alpha", 0.01))


@onnx_op("Elu", "alpha")
def _elu(call: Call) -> Mapped:
    return ew.elu(call.value(0), alpha=call.get_float("alpha", 1.0))


@onnx_op("Celu", "alpha")
def _celu(call: Call) -> Mapped:
    """max(0, x) + min(0, alpha * (e^(x / alpha) - 1)), which is an elu of x / alpha."""
    x, alpha = call.value(0), call.get_float("alpha", 1.0)
    if alpha == 1.0:
        return ew.celu(x)
    factor = scalar(alpha, x)
    return ew.mul(factor, ew.elu(ew.div(x, factor), alpha=1.0))


_SELU = (1.67326319217681884765625, 1.05070102214813232421875)  # the f32 values of the ONNX text


@onnx_op("Selu", "alpha gamma")
def _selu(call: Call) -> Mapped:
    x = call.value(0)
    alpha, gamma = call.get_float("alpha", _SELU[0]), call.get_float("gamma", _SELU[1])
    if (alpha, gamma) == _SELU:
        return ew.selu(x)
    return ew.mul(scalar(gamma, x), ew.elu(x, alpha=alpha))


@onnx_op("ThresholdedRelu", "alpha")
def _thresholded_relu(call: Call) -> Mapped:
    return ew.thresholded_relu(call.value(0), alpha=call.get_float("alpha", 1.0))


@onnx_op("HardSigmoid", "alpha beta")
def _hard_sigmoid(call: Call) -> Mapped:
    return ew.hard_sigmoid(
        call.value(0), alpha=call.get_float("alpha", 0.2), beta=call.get_float("beta", 0.5)
    )


@onnx_op("Shrink", "lambd bias")
def _shrink(call: Call) -> Mapped:
    """x + bias below -lambd, x - bias above lambd, 0 between."""
    x = call.value(0)
    bias, threshold = scalar(call.get_float("bias", 0.0), x), call.get_float("lambd", 0.5)
    above = ew.where(ew.greater(x, scalar(threshold, x)), ew.sub(x, bias), scalar(0, x))
    return ew.where(ew.less(x, scalar(-threshold, x)), ew.add(x, bias), above)


@onnx_op("Gelu", "approximate")
def _gelu(call: Call) -> Mapped:
    exact = call.get_choice("approximate", ("none", "tanh"), "none") == "none"
    return (ew.gelu if exact else ew.gelu_tanh)(call.value(0))


@onnx_op("Swish", "alpha")
def _swish(call: Call) -> Mapped:
    """x * sigmoid(alpha * x)."""
    return _swished(call.value(0), call.get_float("alpha", 1.0))


def _swished(x: Value, alpha: float) -> Value:
    return ew.silu(x) if alpha == 1.0 else ew.mul(x, ew.sigmoid(ew.mul(scalar(alpha, x), x)))


@onnx_op("SwiGLU", "alpha")
def _swiglu(call: Call) -> Mapped:
    """swish(a) * b."""
    return ew.mul(_swished(call.value(0), call.get_float("alpha", 1.0)), call.value(1))


@onnx_op("Cast", "to saturate", only={"round_mode": ("up",)})
def _cast(call: Call) -> Mapped:
    return ew.cast(
        call.value(0), call.get_dtype("to"), saturate=call.get_flag("saturate", default=True)
    )


@onnx_op("CastLike", "saturate", only={"round_mode": ("up",)})
def _cast_like(call: Call) -> Mapped:
    saturate = call.get_flag("saturate", default=True)
    return ew.cast(call.value(0), call.type_of(1).dtype, saturate=saturate)
