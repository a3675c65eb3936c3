# SPDX-License-Identifier: Apache-2.0
"""Derivatives of bodies against finite differences, and the conventions where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.expr.body import Body, BodyBuilder, Scalar, trace
from rlx.expr.derive import partials
from rlx.expr.evaluate import evaluate_body
from rlx.expr.table import TABLE

_POINTS = [-2.3, -0.7, 0.4, 1.9]
_INSIDE = [-0.9, -0.3, 0.2, 0.8]
_POSITIVE = [0.1, 0.6, 1.7, 4.0]
_BETWEEN = [-1.7, -0.4, 0.3, 1.2]
_UNARY: dict[str, list[float]] = {
    **dict.fromkeys("neg abs exp expm1 tanh sigmoid erf sin cos tan".split(), _POINTS),
    **dict.fromkeys("atan sinh cosh asinh".split(), _POINTS),
    **dict.fromkeys("sqrt rsqrt log log1p".split(), _POSITIVE),
    **dict.fromkeys("asin acos atanh".split(), _INSIDE),
    "acosh": [1.1, 2.0, 5.0],
    # Between the steps, where the derivative is 0.
    **dict.fromkeys("sign floor ceil trunc round".split(), _BETWEEN),
}
_PAIRS = [(-2.3, 0.7), (1.4, -0.6), (0.8, 2.9), (3.1, 1.2), (-0.4, -1.7)]
_BINARY: dict[str, list[tuple[float, float]]] = {
    **dict.fromkeys("add sub mul div max min atan2 fmod mod".split(), _PAIRS),
    "pow": [(0.3, 2.0), (1.7, -1.5), (2.2, 0.4), (0.9, 3.0)],
}
_NO_FLOAT_DERIVATIVE = frozenset(
    "const cast isnan isinf not and or xor shl shr eq ne lt le gt ge".split()
)


def _of(op: str, count: int) -> Body:
    builder = BodyBuilder([DType.F64] * count)
    return builder.finish(builder.emit(op, *(builder.input(i) for i in range(count))))


def _gradients(body: Body, point: Sequence[float], upstream: float = 1.0) -> list[float]:
    arrays = [np.array(p) for p in (*point, upstream)]
    return [float(g) for g in evaluate_body(partials(body), arrays)]


def _differences(body: Body, point: Sequence[float]) -> list[float]:
    def value(at: Sequence[float]) -> float:
        return float(evaluate_body(body, [np.array(p) for p in at])[0])

    found: list[float] = []
    for i, p in enumerate(point):
        h = 1e-6 * max(1.0, abs(p))
        above, below = [*point], [*point]
        above[i], below[i] = p + h, p - h
        found.append((value(above) - value(below)) / (2 * h))
    return found


def _agree(body: Body, point: Sequence[float]) -> None:
    want = _differences(body, point)
    for upstream in (1.0, -2.5):
        for got, slope in zip(_gradients(body, point, upstream), want, strict=True):
            assert abs(got - upstream * slope) <= 1e-8 + 3e-7 * abs(slope)


def test_every_scalar_operator_is_covered() -> None:
    rows = {name for name, rule in TABLE.items() if rule.is_row}
    known = {*_UNARY, *_BINARY, *_NO_FLOAT_DERIVATIVE, *rows, "fma", "select"}
    assert known == set(TABLE)


@pytest.mark.parametrize("op", _UNARY)
def test_unary(op: str) -> None:
    for x in _UNARY[op]:
        _agree(_of(op, 1), [x])


@pytest.mark.parametrize("op", _BINARY)
def test_binary(op: str) -> None:
    for point in _BINARY[op]:
        _agree(_of(op, 2), point)


def test_fma_and_select() -> None:
    _agree(_of("fma", 3), (1.5, -0.7, 2.0))

    def function(c: Scalar, x: Scalar, y: Scalar) -> Scalar:
        return x.builder.emit("select", c, x * x, y * 3.0)

    body = trace(function, [DType.BOOL, DType.F64, DType.F64])
    for condition, want in ((True, [5.0, 0.0]), (False, [0.0, 3.0])):
        arrays = [np.array(condition), np.array(2.5), np.array(1.0), np.array(1.0)]
        assert [float(g) for g in evaluate_body(partials(body), arrays)] == want


def test_chains_sum_over_all_paths() -> None:
    def function(x: Scalar, y: Scalar) -> Scalar:
        e = x.builder.emit("exp", x * y)
        return e * e + x / y - e * x

    _agree(trace(function, [DType.F64] * 2), (0.6, -1.3))


def test_several_results_have_one_upstream_each() -> None:
    builder = BodyBuilder([DType.F64])
    x = builder.input(0)
    body = builder.finish(x * x, x * 3.0)
    arrays = [np.array(v) for v in (5.0, 10.0, 100.0)]
    assert [float(g) for g in evaluate_body(partials(body), arrays)] == [2 * 5 * 10 + 3 * 100]


def test_an_input_that_is_a_result_and_one_that_is_unused() -> None:
    builder = BodyBuilder([DType.F64, DType.F64])
    body = builder.finish(builder.input(0))
    assert _gradients(body, (2.0, 3.0), 7.0) == [7.0, 0.0]


@pytest.mark.parametrize(
    ("op", "point", "want"),
    [
        ("abs", (0.0,), [0.0]),
        ("sign", (0.0,), [0.0]),
        ("max", (1.5, 1.5), [0.5, 0.5]),
        ("min", (-2.0, -2.0), [0.5, 0.5]),
        ("sqrt", (0.0,), [np.inf]),
        ("pow", (0.0, 0.0), [0.0, 0.0]),
        ("pow", (0.0, 1.0), [1.0, 0.0]),
        ("pow", (0.0, 2.0), [0.0, 0.0]),
        ("pow", (-3.0, 2.0), [-6.0, 0.0]),
        ("pow", (-3.0, 0.0), [0.0, 0.0]),
    ],
)
def test_conventions(op: str, point: tuple[float, ...], want: list[float]) -> None:
    assert _gradients(_of(op, len(point)), point) == want


@pytest.mark.parametrize("op", ["eq", "lt", "ge", "isnan"])
def test_bool_results_have_no_upstream(op: str) -> None:
    count = TABLE[op].arity
    gradient = partials(_of(op, count))
    assert gradient.inputs == (DType.F64,) * count
    values = evaluate_body(gradient, [np.array(1.0)] * count)
    assert [float(v) for v in values] == [0.0] * count


def test_integers_and_flags_have_no_gradient() -> None:
    builder = BodyBuilder([DType.I32, DType.F64])
    body = builder.finish(builder.input(0).cast(DType.F64) * builder.input(1))
    gradient = partials(body)
    assert gradient.inputs == (DType.I32, DType.F64, DType.F64)
    (value,) = evaluate_body(gradient, [np.array(3, np.int32), np.array(2.0), np.array(1.0)])
    assert float(value) == 3.0


def test_integers_inside_are_replayed() -> None:
    def function(n: Scalar, x: Scalar) -> Scalar:
        return (n + (2**53 + 1)).cast(DType.F64) * x

    body = trace(function, [DType.I64, DType.F64])
    arrays: list[Any] = [np.array(-(2**53), np.int64), np.array(2.0), np.array(1.0)]
    (value,) = evaluate_body(partials(body), arrays)
    assert float(value) == 1.0


def test_gradients_have_the_dtypes_of_the_inputs() -> None:
    def product(x: Scalar, y: Scalar) -> Scalar:
        return x * y

    body = trace(product, [DType.F16, DType.F16])
    gradient = partials(body)
    assert gradient.result_types == (DType.F16, DType.F16)
    arrays = [np.array(v, np.float16) for v in (1.5, 2.0, 3.0)]
    assert [float(v) for v in evaluate_body(gradient, arrays)] == [6.0, 4.5]


def test_rows_are_refused() -> None:
    with pytest.raises(TypeRuleError, match="row"):
        partials(_of("rsum", 1))
