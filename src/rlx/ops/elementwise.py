# SPDX-License-Identifier: Apache-2.0
"""Elementwise operators: arithmetic, comparison, logic, activations, casts.

Each is one function over scalars, with NumPy broadcasting. Called on values it adds a node, called
on scalars it is part of another operator's body. Narrow floats are computed in f32 and rounded
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rlx.base import numeric
from rlx.base.dtypes import FLOATS, INTEGERS, NUMERIC, DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.expr.body import BodyBuilder, Scalar
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.region import Region
from rlx.ops.spec import Operand, Sample, elementwise, emit_one, op

__all__ = [
    "Cast",
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bit_and",
    "bit_not",
    "bit_or",
    "bit_xor",
    "cast",
    "ceil",
    "celu",
    "clamp",
    "cos",
    "cosh",
    "div",
    "elu",
    "equal",
    "erf",
    "exp",
    "expm1",
    "floor",
    "floor_mod",
    "fmod",
    "gelu",
    "gelu_tanh",
    "greater",
    "greater_equal",
    "hard_sigmoid",
    "hard_swish",
    "is_inf",
    "is_nan",
    "leaky_relu",
    "less",
    "less_equal",
    "log",
    "log1p",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mish",
    "mul",
    "neg",
    "not_equal",
    "pow",
    "prelu",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "selu",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "softsign",
    "sqrt",
    "sub",
    "tan",
    "tanh",
    "thresholded_relu",
    "trunc",
    "where",
]

_BOOL = frozenset({DType.BOOL})
_ANY = NUMERIC | _BOOL


def _unary(fill: str) -> tuple[Sample, ...]:
    return (Sample((Operand((3, 17), fill=fill),)), Sample((Operand((2, 0, 3), fill=fill),)))


def _divisor() -> tuple[Sample, ...]:
    return (
        Sample((Operand((3, 17)), Operand((3, 17), fill="nonzero"))),
        Sample((Operand((3, 17)), Operand((17,), fill="nonzero"))),
        Sample((Operand((3, 1)), Operand((), fill="nonzero"))),
    )


def _emit(name: str, *args: Scalar) -> Scalar:
    return args[0].builder.emit(name, *args)


def _number(value: float, like: Scalar) -> Scalar:
    return like.builder.const(value, like.dtype)


# -- one operand
# -------------------------------------------------------------------------------------


@elementwise(NUMERIC)
def neg(x: Scalar) -> Scalar:
    """-x. Integers wrap: the type's minimum stays itself."""
    return -x


@elementwise(NUMERIC)
def abs(x: Scalar) -> Scalar:  # noqa: A001
    """|x|. The minimum of a signed integer type stays itself."""
    return _emit("abs", x)


@elementwise(NUMERIC)
def sign(x: Scalar) -> Scalar:
    """-1, 0 or 1 like the sign of x; NaN stays NaN."""
    return _emit("sign", x)


@elementwise(FLOATS, samples=_unary("positive"))
def sqrt(x: Scalar) -> Scalar:
    """Square root; NaN below 0."""
    return _emit("sqrt", x)


@elementwise(FLOATS, samples=_unary("positive"))
def rsqrt(x: Scalar) -> Scalar:
    """1 / sqrt(x)."""
    return _emit("rsqrt", x)


@elementwise(FLOATS, samples=_unary("nonzero"))
def reciprocal(x: Scalar) -> Scalar:
    """1 / x."""
    return 1.0 / x


@elementwise(FLOATS)
def exp(x: Scalar) -> Scalar:
    """e^x."""
    return _emit("exp", x)


@elementwise(FLOATS)
def expm1(x: Scalar) -> Scalar:
    """e^x - 1, exact near 0."""
    return _emit("expm1", x)


@elementwise(FLOATS, samples=_unary("positive"))
def log(x: Scalar) -> Scalar:
    """Natural logarithm; -inf at 0, NaN below."""
    return _emit("log", x)


@elementwise(FLOATS, samples=_unary("positive"))
def log1p(x: Scalar) -> Scalar:
    """log(1 + x), exact near 0."""
    return _emit("log1p", x)


@elementwise(FLOATS)
def tanh(x: Scalar) -> Scalar:
    """Hyperbolic tangent."""
    return _emit("tanh", x)


@elementwise(FLOATS)
def sigmoid(x: Scalar) -> Scalar:
    """1 / (1 + e^-x)."""
    return _emit("sigmoid", x)


@elementwise(FLOATS)
def erf(x: Scalar) -> Scalar:
    """2 / sqrt(pi) times the integral of e^(-t^2) from 0 to x."""
    return _emit("erf", x)


@elementwise(FLOATS)
def sin(x: Scalar) -> Scalar:
    """Sine of radians."""
    return _emit("sin", x)


@elementwise(FLOATS)
def cos(x: Scalar) -> Scalar:
    """Cosine of radians."""
    return _emit("cos", x)


@elementwise(FLOATS)
def tan(x: Scalar) -> Scalar:
    """Tangent of radians."""
    return _emit("tan", x)


@elementwise(FLOATS, samples=_unary("unit"))
def asin(x: Scalar) -> Scalar:
    """Arc sine in radians; NaN outside [-1, 1]."""
    return _emit("asin", x)


@elementwise(FLOATS, samples=_unary("unit"))
def acos(x: Scalar) -> Scalar:
    """Arc cosine in radians; NaN outside [-1, 1]."""
    return _emit("acos", x)


@elementwise(FLOATS)
def atan(x: Scalar) -> Scalar:
    """Arc tangent in radians."""
    return _emit("atan", x)


@elementwise(FLOATS)
def sinh(x: Scalar) -> Scalar:
    """Hyperbolic sine."""
    return _emit("sinh", x)


@elementwise(FLOATS)
def cosh(x: Scalar) -> Scalar:
    """Hyperbolic cosine."""
    return _emit("cosh", x)


@elementwise(FLOATS)
def asinh(x: Scalar) -> Scalar:
    """Inverse hyperbolic sine."""
    return _emit("asinh", x)


@elementwise(FLOATS, samples=_unary("positive"))
def acosh(x: Scalar) -> Scalar:
    """Inverse hyperbolic cosine; NaN below 1."""
    return _emit("acosh", x)


@elementwise(FLOATS, samples=_unary("unit"))
def atanh(x: Scalar) -> Scalar:
    """Inverse hyperbolic tangent; NaN outside [-1, 1]."""
    return _emit("atanh", x)


@elementwise(FLOATS)
def floor(x: Scalar) -> Scalar:
    """The largest whole number <= x."""
    return _emit("floor", x)


@elementwise(FLOATS)
def ceil(x: Scalar) -> Scalar:
    """The smallest whole number >= x."""
    return _emit("ceil", x)


@elementwise(FLOATS)
def round(x: Scalar) -> Scalar:  # noqa: A001
    """The nearest whole number, halves to even."""
    return _emit("round", x)


@elementwise(FLOATS)
def trunc(x: Scalar) -> Scalar:
    """x without its fraction."""
    return _emit("trunc", x)


@elementwise(FLOATS)
def is_nan(x: Scalar) -> Scalar:
    """Whether x is NaN, as bool."""
    return _emit("isnan", x)


@elementwise(FLOATS)
def is_inf(x: Scalar, *, detect_negative: bool = True, detect_positive: bool = True) -> Scalar:
    """Whether x is infinite, as bool; each sign counts only where its flag says so."""
    if detect_negative and detect_positive:
        return _emit("isinf", x)
    if detect_positive:
        return x.equals(math.inf)
    if detect_negative:
        return x.equals(-math.inf)
    return _emit("and", x.equals(math.inf), x.equals(-math.inf))  # never, but with the shape of x


@elementwise(_BOOL)
def logical_not(x: Scalar) -> Scalar:
    """Not x."""
    return _emit("not", x)


@elementwise(INTEGERS)
def bit_not(x: Scalar) -> Scalar:
    """Every bit of x inverted."""
    return _emit("not", x)


# -- two operands
# ------------------------------------------------------------------------------------


@elementwise(NUMERIC)
def add(a: Scalar, b: Scalar) -> Scalar:
    """a + b; integers wrap."""
    return a + b


@elementwise(NUMERIC)
def sub(a: Scalar, b: Scalar) -> Scalar:
    """a - b; integers wrap."""
    return a - b


@elementwise(NUMERIC)
def mul(a: Scalar, b: Scalar) -> Scalar:
    """a * b; integers wrap."""
    return a * b


@elementwise(NUMERIC, samples=_divisor())
def div(a: Scalar, b: Scalar) -> Scalar:
    """a / b. Integers truncate toward zero.

    A divisor of 0 is an ExecutionError, the minimum by -1 wraps.
    """
    return a / b


@elementwise(NUMERIC, samples=_divisor())
def floor_mod(a: Scalar, b: Scalar) -> Scalar:
    """a - floor(a / b) * b, with the sign of b. An integer divisor of 0 is an ExecutionError."""
    return _emit("mod", a, b)


@elementwise(NUMERIC, samples=_divisor())
def fmod(a: Scalar, b: Scalar) -> Scalar:
    """a - trunc(a / b) * b, exact, with the sign of a.

    An integer divisor of 0 is an ExecutionError.
    """
    return _emit("fmod", a, b)


_POW = (
    Sample((Operand((3, 17), fill="positive"), Operand((3, 17)))),
    Sample((Operand((3, 17)), Operand((17,), fill="positive"))),
    Sample((Operand((3, 17), fill="nonzero"), Operand((3, 17), fill="unit"))),
    Sample((Operand((9, 17), fill="special"), Operand((9, 17), fill="special"))),
)


@elementwise(NUMERIC, samples=_POW)
def pow(a: Scalar, b: Scalar) -> Scalar:  # noqa: A001
    """a to the power b; integers wrap, and a negative exponent truncates 1 / a^|b|."""
    return _emit("pow", a, b)


@elementwise(NUMERIC)
def maximum(a: Scalar, b: Scalar) -> Scalar:
    """The larger of both; NaN if either is."""
    return _emit("max", a, b)


@elementwise(NUMERIC)
def minimum(a: Scalar, b: Scalar) -> Scalar:
    """The smaller of both; NaN if either is."""
    return _emit("min", a, b)


@elementwise(_ANY)
def equal(a: Scalar, b: Scalar) -> Scalar:
    """a = b, as bool; NaN equals nothing."""
    return a.equals(b)


@elementwise(_ANY)
def not_equal(a: Scalar, b: Scalar) -> Scalar:
    """Not a = b, as bool."""
    return a.differs(b)


@elementwise(NUMERIC)
def less(a: Scalar, b: Scalar) -> Scalar:
    """a < b, as bool."""
    return a < b


@elementwise(NUMERIC)
def greater(a: Scalar, b: Scalar) -> Scalar:
    """a > b, as bool."""
    return a > b


@elementwise(NUMERIC)
def less_equal(a: Scalar, b: Scalar) -> Scalar:
    """a <= b, as bool."""
    return a <= b


@elementwise(NUMERIC)
def greater_equal(a: Scalar, b: Scalar) -> Scalar:
    """a >= b, as bool."""
    return a >= b


@elementwise(_BOOL)
def logical_and(a: Scalar, b: Scalar) -> Scalar:
    """a and b."""
    return _emit("and", a, b)


@elementwise(_BOOL)
def logical_or(a: Scalar, b: Scalar) -> Scalar:
    """a or b."""
    return _emit("or", a, b)


@elementwise(_BOOL)
def logical_xor(a: Scalar, b: Scalar) -> Scalar:
    """Either a or b."""
    return _emit("xor", a, b)


@elementwise(INTEGERS)
def bit_and(a: Scalar, b: Scalar) -> Scalar:
    """The bits set in both."""
    return _emit("and", a, b)


@elementwise(INTEGERS)
def bit_or(a: Scalar, b: Scalar) -> Scalar:
    """The bits set in any."""
    return _emit("or", a, b)


@elementwise(INTEGERS)
def bit_xor(a: Scalar, b: Scalar) -> Scalar:
    """The bits set in one only."""
    return _emit("xor", a, b)


@elementwise(INTEGERS)
def shift_left(a: Scalar, b: Scalar) -> Scalar:
    """a shifted by b bits toward the high end; 0 for the width or more."""
    return _emit("shl", a, b)


@elementwise(INTEGERS)
def shift_right(a: Scalar, b: Scalar) -> Scalar:
    """a shifted by b bits toward the low end (keeping the sign of a signed type).

    0 for the width or more.
    """
    return _emit("shr", a, b)


@elementwise(FLOATS)
def atan2(a: Scalar, b: Scalar) -> Scalar:
    """The angle of the point (b, a) in radians."""
    return _emit("atan2", a, b)


# -- selection
# ---------------------------------------------------------------------------------------


@elementwise(
    _ANY,
    mixed=(0,),
    samples=(
        Sample((Operand((3, 17), DType.BOOL, "bool"), Operand((3, 17)), Operand((17,)))),
        Sample((Operand((3, 1), DType.BOOL, "bool"), Operand(()), Operand((3, 17)))),
    ),
)
def where(condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
    """a where the bool condition holds, else b."""
    return _emit("select", condition, a, b)


@elementwise(NUMERIC)
def clamp(x: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """min(max(x, low), high): NaN stays, and `high` wins where low > high."""
    return _emit("min", _emit("max", x, low), high)


# -- activations
# -------------------------------------------------------------------------------------


@elementwise(FLOATS | INTEGERS)
def relu(x: Scalar) -> Scalar:
    """max(x, 0); NaN stays."""
    return _emit("max", x, _number(0, x))


@elementwise(FLOATS)
def leaky_relu(x: Scalar, *, alpha: float = 0.01) -> Scalar:
    """x where x >= 0, else alpha * x."""
    return _emit("select", x < 0.0, x * alpha, x)


@elementwise(FLOATS)
def prelu(x: Scalar, slope: Scalar) -> Scalar:
    """x where x >= 0, else slope * x."""
    return _emit("select", x < 0.0, x * slope, x)


@elementwise(FLOATS)
def thresholded_relu(x: Scalar, *, alpha: float = 1.0) -> Scalar:
    """x where x > alpha, else 0; NaN stays."""
    return _emit("select", x <= alpha, _number(0, x), x)


@elementwise(FLOATS)
def elu(x: Scalar, *, alpha: float = 1.0) -> Scalar:
    """x where x >= 0, else alpha * (e^x - 1). Source: Clevert, Unterthiner, Hochreiter 2015."""
    return _emit("select", x < 0.0, _emit("expm1", x) * alpha, x)


@elementwise(FLOATS)
def celu(x: Scalar) -> Scalar:
    """max(x, 0) + min(e^x - 1, 0). Source: Barron 2017, with alpha = 1."""
    return _emit("select", x < 0.0, _emit("expm1", x), x)


# The f32 numbers of the ONNX text; the paper gives them with more digits.
_SELU_ALPHA = 1.67326319217681884765625
_SELU_GAMMA = 1.05070102214813232421875


@elementwise(FLOATS)
def selu(x: Scalar) -> Scalar:
    """gamma * elu(x, alpha) with the self-normalising constants. Source: Klambauer et al. 2017."""
    return _emit("select", x < 0.0, _emit("expm1", x) * _SELU_ALPHA, x) * _SELU_GAMMA


@elementwise(FLOATS)
def gelu(x: Scalar) -> Scalar:
    """0.5 x (1 + erf(x / sqrt 2)). Source: Hendrycks, Gimpel 2016."""
    return x * 0.5 * (1.0 + _emit("erf", x * math.sqrt(0.5)))


@elementwise(FLOATS)
def gelu_tanh(x: Scalar) -> Scalar:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Source: Hendrycks, Gimpel 2016."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * 0.5 * (1.0 + _emit("tanh", inner))


@elementwise(FLOATS)
def silu(x: Scalar) -> Scalar:
    """x * sigmoid(x). Source: Elfwing, Uchibe, Doya 2017."""
    return x * _emit("sigmoid", x)


def _softplus(x: Scalar) -> Scalar:
    # Written so that neither e^x overflows nor a small result is lost.
    return _emit("max", x, _number(0, x)) + _emit("log1p", _emit("exp", -_emit("abs", x)))


@elementwise(FLOATS)
def softplus(x: Scalar) -> Scalar:
    """log(1 + e^x)."""
    return _softplus(x)


@elementwise(FLOATS)
def mish(x: Scalar) -> Scalar:
    """x * tanh(softplus(x)). Source: Misra 2019."""
    return x * _emit("tanh", _softplus(x))


@elementwise(FLOATS)
def softsign(x: Scalar) -> Scalar:
    """x / (1 + |x|)."""
    return x / (1.0 + _emit("abs", x))


def _hard_sigmoid(x: Scalar, alpha: float, beta: float) -> Scalar:
    return _emit("max", _emit("min", x * alpha + beta, _number(1, x)), _number(0, x))


@elementwise(FLOATS)
def hard_sigmoid(x: Scalar, *, alpha: float = 0.2, beta: float = 0.5) -> Scalar:
    """max(0, min(1, alpha * x + beta)); NaN stays."""
    return _hard_sigmoid(x, alpha, beta)


@elementwise(FLOATS)
def hard_swish(x: Scalar) -> Scalar:
    """x * max(0, min(1, x / 6 + 0.5)). Source: Howard et al. 2019."""
    return x * _hard_sigmoid(x, 1 / 6, 0.5)


# -- casts
# -------------------------------------------------------------------------------------------


@op("cast")
@dataclass(frozen=True)
class Cast(Op):
    """x converted to a dtype, same shape.

    Float to integer truncates and saturates, NaN gives 0; anything to bool is ``!= 0``; to a
    narrower float rounds to nearest even.

    Attributes:
        to: the dtype of the result.
        saturate: for fp8 targets, clamp what is too large to the largest finite value instead of
            making it NaN or infinite.
    """

    operands = ("x",)
    to: DType
    saturate: bool = True
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((3, 17)),), {"to": DType.F32}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.I32}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.U8}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.BOOL}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.BF16}),
        Sample((Operand((), fill="special"),), {"to": DType.F16}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.F8E4M3}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.F8E5M2, "saturate": False}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.I4}),
        Sample((Operand((3, 17), fill="special"),), {"to": DType.U4}),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        return x.with_dtype(self.to)

    def reference(self, x: Array) -> Array:  # noqa: D102
        return numeric.cast(x, self.to, saturate=self.saturate)

    def region(self, x: TensorType) -> Region | None:
        """Return the conversion as a region; None for complex types."""
        if x.dtype.is_complex or self.to.is_complex:
            return None
        builder = BodyBuilder([x.dtype])
        saturate = self.saturate or self.to not in (DType.F8E4M3, DType.F8E5M2)
        return Region(builder.finish(builder.input(0).cast(self.to, saturate=saturate)), x.shape)


def cast(x: Value, to: DType | str, saturate: bool = True) -> Value:
    """Return x converted to a dtype or what names one; x itself where it has it already."""
    to = DType.of(to)
    return x if x.type.dtype is to else emit_one(Cast(to, saturate), x)
