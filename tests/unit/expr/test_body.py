# SPDX-License-Identifier: Apache-2.0
"""Bodies: tracing, sharing, canonical order, text form, inlining."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.base.errors import ParseError, TypeRuleError
from rlx.base.numeric import Array
from rlx.expr.body import Body, BodyBuilder, Instr, Scalar, canonical, parse_body, trace
from rlx.expr.evaluate import evaluate_body
from rlx.expr.table import TABLE

_F32 = DType.F32


_Results = Scalar | tuple[Scalar, ...]


def _unary(
    function: Callable[[Scalar], _Results], dtype: DType, result: DType | None = None
) -> Body:
    return trace(function, [dtype], result)


def _binary(function: Callable[[Scalar, Scalar], _Results], dtype: DType) -> Body:
    return trace(function, [dtype, dtype])


def _random_body(seed: int) -> Body:
    chance = np.random.default_rng(seed)
    builder = BodyBuilder([_F32] * 4)
    values = [builder.input(i) for i in range(4)]
    for _ in range(12):
        op = str(chance.choice(["add", "sub", "mul", "max", "neg", "abs", "const"]))
        if op == "const":
            values.append(builder.const(float(chance.integers(-3, 4)), _F32))
        else:
            picked = [values[int(i)] for i in chance.integers(0, len(values), TABLE[op].arity)]
            values.append(builder.emit(op, *picked))
    return builder.finish(values[-1], values[-3], values[int(chance.integers(0, 4))])


def _arrays(seed: int) -> list[Array]:
    chance = np.random.default_rng(seed)
    return [chance.integers(-4, 5, 7).astype(np.float32) for _ in range(4)]


@pytest.mark.parametrize("seed", range(30))
def test_canonical_keeps_the_meaning_and_is_stable(seed: int) -> None:
    body, arrays = _random_body(seed), _arrays(seed)
    new, order = canonical(body)
    assert sorted(order) == [0, 1, 2, 3]
    for a, b in zip(
        evaluate_body(body, arrays), evaluate_body(new, [arrays[i] for i in order]), strict=True
    ):
        assert np.broadcast_to(a, 7).tobytes() == np.broadcast_to(b, 7).tobytes()
    again, same = canonical(new)
    assert again == new
    assert same == (0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(30))
def test_canonical_forgets_the_order_of_construction(seed: int) -> None:
    body = _random_body(seed)
    chance = np.random.default_rng(seed)
    moved = [int(i) for i in chance.permutation(4)]  # input i is now input moved[i]
    # Any order in which arguments come first; the last instruction that is ready moves up.
    left, place = list(range(len(body.instrs))), dict(enumerate(moved))
    instrs: list[Instr] = []
    while left:
        ready = [i for i in left if all(a in place for a in body.instrs[i].args)]
        chosen = ready[int(chance.integers(0, len(ready)))]
        left.remove(chosen)
        instr = body.instrs[chosen]
        place[4 + chosen] = 4 + len(instrs)
        instrs.append(
            Instr(instr.op, instr.dtype, tuple(place[a] for a in instr.args), instr.attribute)
        )
    other = Body(body.inputs, tuple(instrs), tuple(place[r] for r in body.results))
    (first, order), (second, other_order) = canonical(body), canonical(other)
    used = {a for i in first.instrs for a in i.args} | set(first.results)
    assert first == second
    assert all(
        moved[a] == b for i, (a, b) in enumerate(zip(order, other_order, strict=True)) if i in used
    )


@pytest.mark.parametrize("seed", range(30))
def test_text_round_trips(seed: int) -> None:
    body = _random_body(seed)
    assert parse_body(str(body)) == body


def test_text_keeps_special_constants_and_attributes() -> None:
    builder = BodyBuilder([_F32, DType.BOOL])
    x = builder.input(0)
    special = [builder.const(v, _F32) for v in (-0.0, 0.0, float("inf"), float("nan"), 1e-45)]
    flag = builder.const(True, DType.BOOL)
    wrapped = builder.emit("cast", x, dtype=DType.I8, attribute="wrap")
    body = builder.finish(*special, flag, wrapped, builder.input(1))
    parsed = parse_body(str(body))
    assert parsed == body
    values = evaluate_body(parsed, [np.array(300.0, np.float32), np.array(False)])
    assert [np.asarray(v).tobytes() for v in values[:5]] == [
        np.float32(v).tobytes() for v in (-0.0, 0.0, np.inf, np.nan, 1e-45)
    ]
    assert bool(values[5])
    assert parsed.instrs[-1].attribute == "wrap"
    assert len({str(i) for i in body.instrs}) == len(body.instrs)


def test_an_empty_body_round_trips() -> None:
    builder = BodyBuilder([_F32])
    body = builder.finish(builder.input(0))
    assert str(body) == "(f32){}->(0)"
    assert parse_body(str(body)) == body


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(f32)",
        "(f32){}->",
        "(f33){}->(0)",
        "(f32){blub:f32 0}->(1)",
        "(f32){add:f32 0}->(1)",
        "(f32){neg:f32 x}->(1)",
        "(f32){neg:f32 0}->(7)",
        "(f32){neg:f32 1}->(1)",
        "(f32){neg:f32 -1}->(1)",
    ],
)
def test_what_is_no_body_is_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError, match="is not a body"):
        parse_body(text)


def test_equal_instructions_are_shared_and_dead_ones_dropped() -> None:
    def function(x: Scalar) -> Scalar:
        _ = x * 7.0
        return (x + 1.0) * (x + 1.0)

    body = trace(function, [_F32])
    assert [i.op for i in body.instrs] == ["const", "add", "mul"]
    assert body.instrs[-1].args == (2, 2)


def test_zero_and_negative_zero_are_different_constants() -> None:
    builder = BodyBuilder([])
    assert builder.const(0.0, _F32).index != builder.const(-0.0, _F32).index


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=str)
def test_narrow_floats_round_once(dtype: DType) -> None:
    numpy = dtype.numpy
    body = _binary(lambda x, y: x * y + 1.0, dtype)
    assert body.result_types == (dtype,)
    assert [i.dtype for i in body.instrs if i.op not in ("cast", "const")] == [_F32, _F32]
    assert sum(i.op == "cast" and i.dtype is dtype for i in body.instrs) == 1
    chance = np.random.default_rng(0)
    x, y = (chance.standard_normal(1000).astype(numpy) for _ in range(2))
    (got,) = evaluate_body(body, [x, y])
    want = (x.astype(np.float32) * y.astype(np.float32) + np.float32(1)).astype(numpy)
    twice = (x * y).astype(numpy) + np.array(1, numpy)
    assert got.tobytes() == want.tobytes()
    assert got.tobytes() != twice.tobytes()


def test_a_stated_result_dtype_wins() -> None:
    body = _unary(lambda x: x + 0.25, DType.F16, DType.F64)
    assert body.result_types == (DType.F64,)
    body = _unary(lambda x: x.equals(0.0), DType.F16)
    assert body.result_types == (DType.BOOL,)


def test_wide_operands_are_not_cast() -> None:
    body = _unary(lambda x: x + 0.25, DType.F64)
    assert [i.op for i in body.instrs] == ["const", "add"]


def test_reflected_operators() -> None:
    body = _unary(lambda x: (1.0 - x, 6.0 / x, 2.0 + x, 3.0 * x), _F32)
    assert [float(v) for v in evaluate_body(body, [np.array(2, np.float32)])] == [-1, 3, 4, 6]


def test_inlining_replaces_inputs_and_checks_dtypes() -> None:
    square = _unary(lambda x: x * x, _F32)
    builder = BodyBuilder([_F32, DType.F64])
    (once,) = builder.inline(square, [builder.input(0)])
    (twice,) = builder.inline(square, [once])
    body = builder.finish(twice)
    value = evaluate_body(body, [np.array(3, np.float32), np.array(0.0)])[0]
    assert float(value) == 81
    with pytest.raises(TypeRuleError, match="cannot take"):
        builder.inline(square, [builder.input(1)])


def test_operands_are_type_checked() -> None:
    builder = BodyBuilder([_F32, DType.F64, DType.I32])
    with pytest.raises(TypeRuleError, match="different dtypes"):
        builder.emit("add", builder.input(0), builder.input(1))
    with pytest.raises(TypeRuleError, match="needs a float"):
        builder.emit("exp", builder.input(2))
    with pytest.raises(TypeRuleError, match="bool condition"):
        builder.emit("select", builder.input(0), builder.input(0), builder.input(0))


def test_uniform_follows_rows() -> None:
    def function(x: Scalar, row: Scalar) -> Scalar:
        top = x.builder.emit("rmax", x)
        return x.builder.emit("exp", x - top) * row + top * row

    body = trace(function, [_F32, _F32])
    flags = dict(zip((i.op for i in body.instrs), body.uniform([False, True])[2:], strict=False))
    assert body.has_rows
    assert flags["rmax"]
    assert not flags["exp"]
    assert body.uniform([False, True])[:2] == [False, True]
    values = evaluate_body(body, [np.eye(3, dtype=np.float32), np.ones((3, 1), np.float32)], 1)
    want = np.exp(np.eye(3) - 1) + 1
    assert np.abs(values[0] - want).max() < 1e-6
