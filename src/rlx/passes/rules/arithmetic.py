# SPDX-License-Identifier: Apache-2.0
"""Algebra that holds for every value: NaN, infinities, -0.0, integer wrap-around."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.ir.builder import Builder
from rlx.ir.graph import Node, Value
from rlx.ir.rewrite import Match, Reject, rule
from rlx.ops.elementwise import mul, sqrt
from rlx.ops.spec import building
from rlx.passes.rules.patterns import constant_of, is_all, named

__all__ = ["ARITHMETIC_RULES"]

# operator -> (neutral number for floats, for integers, for bool; on which sides); None: there is
# none.
_NEUTRAL: Mapping[str, tuple[float | None, int | None, bool | None, str]] = {
    "add": (-0.0, 0, None, "lr"),  # x + 0.0 would turn -0.0 into 0.0
    "sub": (0.0, 0, None, "r"),
    "mul": (1.0, 1, None, "lr"),
    "div": (1.0, 1, None, "r"),
    "pow": (1.0, 1, None, "r"),
    "maximum": (-np.inf, None, None, "lr"),
    "minimum": (np.inf, None, None, "lr"),
    "logical_and": (None, None, True, "lr"),
    "logical_or": (None, None, False, "lr"),
    "logical_xor": (None, None, False, "lr"),
    "bit_or": (None, 0, None, "lr"),
    "bit_xor": (None, 0, None, "lr"),
    "shift_left": (None, 0, None, "r"),
    "shift_right": (None, 0, None, "r"),
}


@rule(*_NEUTRAL)
def drop_neutral(node: Node, builder: Builder) -> Match:
    """x * 1, x + -0.0, x - 0.0, x / 1, x ** 1, max(x, -inf), x and true, ... -> x."""
    del builder
    left, right = node.operands
    sides = _NEUTRAL[node.op.name][3]
    for constant, kept, side in ((right, left, "r"), (left, right, "l")):
        if side not in sides or kept is None or constant is None:
            continue
        if _is_neutral(node.op.name, constant_of(constant), kept.type.dtype):
            if kept.type == node.result.type:
                return kept
            return Reject(f"the constant broadcasts {kept.type} to {node.result.type}")
    return None


def _is_neutral(name: str, array: Array | None, dtype: DType) -> bool:
    real, whole, truth, _ = _NEUTRAL[name]
    number = truth if dtype is DType.BOOL else real if dtype.is_float else whole
    return number is not None and is_all(array, number)


_INVOLUTIONS = ("neg", "logical_not", "bit_not")
_IDEMPOTENT = ("abs", "relu", "floor", "ceil", "round", "trunc", "sign")


@rule(*_INVOLUTIONS)
def drop_double(node: Node, builder: Builder) -> Match:
    """-(-x), not not x, ~~x -> x."""
    del builder
    inner = named(node.operands[0], node.op.name)
    return inner.operands[0] if inner else None


@rule(*_IDEMPOTENT)
def drop_repeated(node: Node, builder: Builder) -> Match:
    """f(f(x)) -> f(x) for abs, relu, floor, ceil, round, trunc, sign."""
    del builder
    return node.operands[0] if named(node.operands[0], node.op.name) else None


@rule("clamp")
def drop_clamp(node: Node, builder: Builder) -> Match:
    """clamp(x, -inf, inf) -> x."""
    del builder
    x, low, high = node.operands
    assert x is not None
    if not x.type.dtype.is_float or x.type != node.result.type:
        return None
    return x if is_all(constant_of(low), -np.inf) and is_all(constant_of(high), np.inf) else None


@rule("pow")
def expand_power(node: Node, builder: Builder) -> Match:
    """x ** 2 -> x * x; x ** 0.5 -> sqrt(x) where x is never negative or -0.0.

    x * x is the correctly rounded square, at least as exact as the power. sqrt(-0.0) is -0.0 and
    sqrt(-inf) is NaN where the power is 0.0 and inf, hence the condition.
    """
    x, exponent = node.operands
    assert x is not None
    if x.type != node.result.type:
        return None
    array = constant_of(exponent)
    with building(builder):
        if is_all(array, 2):
            return mul(x, x)
        if x.type.dtype.is_float and is_all(array, 0.5):
            if _is_not_negative(x):
                return sqrt(x)
            return Reject("x ** 0.5 is not sqrt(x) for -0.0 and -inf, and x may be those")
    return None


_NOT_NEGATIVE = frozenset({"abs", "exp", "sigmoid"})


def _is_not_negative(value: Value, depth: int = 4) -> bool:
    """Return whether no element is negative or -0.0 (NaN may be)."""
    node = value.producer
    if node is None or depth == 0:
        return False
    name = node.op.name
    if name in _NOT_NEGATIVE:
        return True
    if name == "mul":
        return node.operands[0] is node.operands[1]
    if name == "constant":
        array = constant_of(value)
        return array is not None and array.dtype.kind == "f" and not bool(np.any(np.signbit(array)))
    if name == "reduce":
        kind = getattr(node.op, "kind", "")
        return kind == "sumsq" or (kind in ("sum", "mean", "max", "min") and _of(node, depth))
    return name in ("add", "div", "reshape", "transpose", "expand") and _of(node, depth)


def _of(node: Node, depth: int) -> bool:
    return all(o is not None and _is_not_negative(o, depth - 1) for o in node.operands)


ARITHMETIC_RULES = (drop_neutral, drop_double, drop_repeated, drop_clamp, expand_power)
