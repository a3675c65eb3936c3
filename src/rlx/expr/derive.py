# SPDX-License-Identifier: Apache-2.0
"""Derivatives of bodies: from the scalar expression that defines an operator to the one of its gradient.

`partials(body)` gives, for one upstream gradient per result, the gradient of every float input, by reverse
accumulation over the straight-line program. Conventions where calculus gives no answer: the derivative of `abs` and
`sign` at 0 is 0, ties of `max` and `min` share the gradient equally, comparisons and rounding have derivative 0, and
`sqrt` at 0 has an infinite derivative (as in NumPy's limit).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.expr.body import Body, BodyBuilder, Instr, Scalar

__all__ = ["partials"]

_Rule: TypeAlias = Callable[[Scalar, Scalar, list[Scalar]], list["Scalar | None"]]


def _emit(op: str, *args: Scalar) -> Scalar:
    return args[0].builder.emit(op, *args)


def _square(x: Scalar) -> Scalar:
    return x * x


def _ties(winner: Callable[[Scalar, Scalar], Scalar]) -> _Rule:
    def rule(dy: Scalar, _: Scalar, args: list[Scalar]) -> list[Scalar | None]:
        a, b = args
        half = dy * 0.5
        zero = dy.builder.const(0, dy.dtype)
        tied = a.equals(b)
        to_a = _emit("select", tied, half, _emit("select", winner(a, b), dy, zero))
        to_b = _emit("select", tied, half, _emit("select", winner(b, a), dy, zero))
        return [to_a, to_b]

    return rule


def _pow(dy: Scalar, y: Scalar, args: list[Scalar]) -> list[Scalar | None]:
    a, b = args
    zero = dy.builder.const(0, dy.dtype)
    # d(a^0)/da is 0 also at a = 0, and the log of a base that is not positive carries no gradient.
    to_a = _emit("select", b.equals(0.0), zero, dy * b * _emit("pow", a, b - 1.0))
    to_b = _emit("select", a > 0.0, dy * y * _emit("log", a), zero)
    return [to_a, to_b]


def _reciprocal_sqrt(dy: Scalar, y: Scalar, args: list[Scalar]) -> list[Scalar | None]:
    del args
    return [dy * y * y * y * -0.5]


def _select(dy: Scalar, _: Scalar, args: list[Scalar]) -> list[Scalar | None]:
    zero = dy.builder.const(0, dy.dtype)
    return [None, _emit("select", args[0], dy, zero), _emit("select", args[0], zero, dy)]


def _unary(derivative: Callable[[Scalar, Scalar], Scalar]) -> _Rule:
    """Make a rule of f'(x) written over (x, f(x))."""
    return lambda dy, y, args: [dy * derivative(args[0], y)]


_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
_RULES: dict[str, _Rule] = {
    "add": lambda dy, _, __: [dy, dy],
    "sub": lambda dy, _, __: [dy, -dy],
    "mul": lambda dy, _, args: [dy * args[1], dy * args[0]],
    "div": lambda dy, y, args: [dy / args[1], -(dy * y / args[1])],
    "fma": lambda dy, _, args: [dy * args[1], dy * args[0], dy],
    "neg": lambda dy, _, __: [-dy],
    "abs": _unary(lambda x, _: _emit("sign", x)),
    "sqrt": _unary(lambda _, y: 0.5 / y),
    "rsqrt": _reciprocal_sqrt,
    "exp": _unary(lambda _, y: y),
    "expm1": _unary(lambda _, y: y + 1.0),
    "log": _unary(lambda x, _: 1.0 / x),
    "log1p": _unary(lambda x, _: 1.0 / (x + 1.0)),
    "tanh": _unary(lambda _, y: 1.0 - y * y),
    "sigmoid": _unary(lambda _, y: y * (1.0 - y)),
    "erf": _unary(lambda x, _: _emit("exp", -(x * x)) * _TWO_OVER_ROOT_PI),
    "sin": _unary(lambda x, _: _emit("cos", x)),
    "cos": _unary(lambda x, _: -_emit("sin", x)),
    "tan": _unary(lambda _, y: 1.0 + y * y),
    "asin": _unary(lambda x, _: _emit("rsqrt", 1.0 - x * x)),
    "acos": _unary(lambda x, _: -_emit("rsqrt", 1.0 - x * x)),
    "atan": _unary(lambda x, _: 1.0 / (1.0 + x * x)),
    "sinh": _unary(lambda x, _: _emit("cosh", x)),
    "cosh": _unary(lambda x, _: _emit("sinh", x)),
    "asinh": _unary(lambda x, _: _emit("rsqrt", 1.0 + x * x)),
    "acosh": _unary(lambda x, _: _emit("rsqrt", x * x - 1.0)),
    "atanh": _unary(lambda x, _: 1.0 / (1.0 - x * x)),
    "atan2": lambda dy, _, args: [
        dy * args[1] / (_square(args[0]) + _square(args[1])),
        -(dy * args[0] / (_square(args[0]) + _square(args[1]))),
    ],
    "max": _ties(lambda a, b: a > b),
    "min": _ties(lambda a, b: a < b),
    "pow": _pow,
    "fmod": lambda dy, _, args: [dy, -(dy * _emit("trunc", args[0] / args[1]))],
    "mod": lambda dy, _, args: [dy, -(dy * _emit("floor", args[0] / args[1]))],
    "select": _select,
}
_FLAT = frozenset(
    {
        "const",
        "sign",
        "floor",
        "ceil",
        "trunc",
        "round",
        "isnan",
        "isinf",
        "not",
        "and",
        "or",
        "xor",
        "shl",
        "shr",
    }
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)
"""Operators whose derivative is zero wherever it exists."""


def partials(body: Body) -> Body:
    """Return the gradient body.

    Its inputs are those of `body` followed by one upstream gradient per float result; its results are the gradients
    of the float inputs, in order, in the inputs' dtypes.

    Raises:
        TypeRuleError: the body reduces over rows or uses an operator without derivative.
    """
    if body.has_rows:
        raise TypeRuleError(
            "a body with row reductions is differentiated by its operator's own rule"
        )
    float_results = [r for r in body.results if body.dtype(r).is_float]
    builder = BodyBuilder([*body.inputs, *(body.dtype(r) for r in float_results)])
    values = [builder.input(i) for i in range(len(body.inputs))]
    for instr in body.instrs:
        args = [values[a] for a in instr.args]
        values.append(_replay(builder, instr, args))
    gradients: list[Scalar | None] = [None] * len(values)
    for position, result in enumerate(float_results):
        upstream = builder.input(len(body.inputs) + position)
        gradients[result] = _plus(gradients[result], upstream)
    for position in range(len(body.instrs) - 1, -1, -1):
        index = position + len(body.inputs)
        upstream = gradients[index]
        instr = body.instrs[position]
        if upstream is None or instr.op in _FLAT:
            continue
        args = [values[a] for a in instr.args]
        for arg, gradient in zip(
            instr.args, _rule(instr)(upstream, values[index], args), strict=True
        ):
            if gradient is not None and values[arg].dtype.is_float:
                gradients[arg] = _plus(gradients[arg], gradient)
    results = [
        gradients[i] or builder.const(0, dtype)
        for i, dtype in enumerate(body.inputs)
        if dtype.is_float
    ]
    return builder.finish(*results)


def _replay(builder: BodyBuilder, instr: Instr, args: list[Scalar]) -> Scalar:
    if instr.op == "const":
        text = str(instr.attribute)
        if instr.dtype is DType.BOOL:
            return builder.const(text == "True", instr.dtype)
        return builder.const(float(text) if instr.dtype.is_float else int(text), instr.dtype)
    dtype = instr.dtype if instr.op == "cast" else None
    return builder.emit(instr.op, *args, dtype=dtype, attribute=instr.attribute)


def _rule(instr: Instr) -> _Rule:
    if instr.op == "cast":
        return lambda dy, _, args: [dy.cast(args[0].dtype) if args[0].dtype.is_float else None]
    if instr.op not in _RULES:
        raise TypeRuleError(f"scalar operator {instr.op!r} has no derivative")
    return _RULES[instr.op]


def _plus(total: Scalar | None, term: Scalar) -> Scalar:
    return term if total is None else total + term
