# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError, UsageError
from rlx.base.facts import Facts
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ops import movement as mv
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.spec import building

N, M = symbol("N"), symbol("M")
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def run(op: Any, *arrays: Any) -> Any:
    (result,) = run_op(op, arrays)
    return result


def build(
    function: Callable[[Value], Value | None], shape: tuple[Dim, ...], dtype: DType = DType.F32
) -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(dtype, shape))
    with building(Builder(graph.block, graph.facts)):
        y = function(x)
    assert y is not None
    graph.set_outputs({"y": y})
    return graph


def apply(
    function: Callable[[Value], Value | None], x: Any, shape: tuple[Dim, ...] | None = None
) -> Any:
    graph = build(function, x.shape if shape is None else shape, DType.of(x.dtype))
    return evaluate(graph, {"x": x})["y"]


def test_reshape_over_symbols() -> None:
    t = TensorType(DType.F32, (N, 3, 4))
    assert mv.Reshape((N * 12,)).infer(t).shape == (12 * N,)
    assert mv.Reshape((3, N, 4)).infer(t).shape == (3, N, 4)
    with pytest.raises(TypeRuleError, match="elements"):
        mv.Reshape((N, 13)).infer(t)
    with pytest.raises(TypeRuleError, match="negative"):
        mv.Reshape((-1,)).infer(t)
    with pytest.raises(UsageError, match="not known before the first call"):
        mv.Reshape((M, 6)).infer(t)
    facts = Facts(hints={"N": 4, "M": 8})
    with facts.active():
        assert mv.Reshape((M, 6)).infer(t).shape == (M, 6)
    assert [str(g) for g in facts.guards] == ["12*N == 6*M (reshape of f32[N,3,4])"]


def test_reshape_of_nothing() -> None:
    assert run(mv.Reshape((0, 0, 4)), np.empty((0, 8), np.float32)).shape == (0, 0, 4)
    assert run(mv.Reshape(()), np.ones((1, 1), np.float32)).shape == ()


def test_squeeze_unsqueeze_flatten() -> None:
    x = X[:, None]
    assert apply(lambda v: mv.squeeze(v, (1,)), x).shape == (2, 3, 4)
    assert apply(lambda v: mv.unsqueeze(v, (0, -1)), X).shape == (1, 2, 3, 4, 1)
    assert apply(lambda v: mv.flatten(v, 2), X).shape == (6, 4)
    assert apply(lambda v: mv.flatten(v, 0), X).shape == (1, 24)
    assert apply(lambda v: mv.flatten(v, 3), X).shape == (24, 1)
    with pytest.raises(TypeRuleError, match="squeeze"):
        build(lambda v: mv.squeeze(v, (1,)), (2, 3))


@pytest.mark.parametrize("perm", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_transpose(perm: tuple[int, ...]) -> None:
    want = X.transpose(perm)
    np.testing.assert_array_equal(run(mv.Transpose(perm), X), want)
    region = mv.Transpose(perm).region(TensorType(DType.F32, X.shape))
    np.testing.assert_array_equal(run(region, X), want)


@pytest.mark.parametrize(
    ("starts", "sizes", "steps"),
    [
        ((0, 1, 2), (2, 2, 2), (1, 1, 1)),
        ((1, 2, 3), (2, 3, 4), (-1, -1, -1)),
        ((0, 0, 3), (1, 2, 2), (1, 2, -3)),
        ((1, 0, 0), (0, 3, 4), (1, 1, 1)),
    ],
)
def test_slice(starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]) -> None:
    op = mv.Slice(starts, sizes, steps)
    lines = [s + t * np.arange(n) for s, n, t in zip(starts, sizes, steps, strict=True)]
    want = X[np.ix_(*lines)] if 0 not in sizes else np.empty(sizes, np.float32)
    np.testing.assert_array_equal(run(op, X), want)
    region = op.region(TensorType(DType.F32, X.shape))
    np.testing.assert_array_equal(run(region, X), want)


def test_slice_refuses_what_is_outside() -> None:
    t = TensorType(DType.F32, (N, 4))
    assert mv.Slice((0, 1), (N, 3), (1, 1)).infer(t).shape == (N, 3)
    for op in (
        mv.Slice((0, 1), (N, 4), (1, 1)),
        mv.Slice((1, 0), (N, 4), (1, 1)),
        mv.Slice((0, -1), (N, 2), (1, 1)),
        mv.Slice((0, 1), (N, 3), (1, -1)),
    ):
        with pytest.raises(TypeRuleError, match="outside"):
            op.infer(t)
    with pytest.raises(TypeRuleError, match="step"):
        mv.Slice((0, 0), (N, 4), (1, 0)).infer(t)


def test_split_and_concat() -> None:
    def swap(x: Value) -> Value:
        a, b = mv.split(x, (1, N - 1), 0)
        return mv.concat((b, a), 0)

    graph = build(swap, (N, 3))
    assert graph.outputs[0].type.shape == (N, 3)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], np.roll(x, -1, 0))
    with pytest.raises(TypeRuleError, match="split"):
        build(lambda v: mv.split(v, (1, 1), 1)[0], (N, 3))
    with pytest.raises(TypeRuleError, match="differ"):
        mv.Concat(0).infer(TensorType(DType.F32, (2, 3)), TensorType(DType.F32, (2, 4)))


def test_concat_keeps_the_order_of_its_operands() -> None:
    def function(x: Value) -> Value:
        a = mv.slice_axis(x, 1, 1, 3)
        return mv.concat((mv.flip(a, 1), a), 1)

    x = X[0]
    np.testing.assert_array_equal(
        apply(function, x), np.concatenate([x[:, 1:][:, ::-1], x[:, 1:]], 1)
    )


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad_and_its_decomposition(mode: Any) -> None:
    op = mv.Pad((1, 2, 0), (0, 1, 3), mode)
    want = np.pad(X, [(1, 0), (2, 1), (0, 3)], mode=mode)
    np.testing.assert_array_equal(run(op, X, None), want)
    np.testing.assert_array_equal(apply(op.decompose, X, (N, 3, M)), want)


def test_pad_value_and_rules() -> None:
    one = np.array(1, np.float32)
    assert run(mv.Pad((1,), (0,)), np.zeros(2, np.float32), one).tolist() == [1, 0, 0]
    assert run(mv.Pad((1, 0), (0, 1)), np.empty((0, 2), np.float32), one).tolist() == [[1, 1, 1]]
    t = TensorType(DType.F32, (3,))
    for op, text in (
        (mv.Pad((-1,), (0,)), "negative"),
        (mv.Pad((3,), (0,), "reflect"), "reflect"),
        (mv.Pad((4,), (0,), "wrap"), "wrap"),
    ):
        with pytest.raises(TypeRuleError, match=text):
            op.infer(t, None)
    with pytest.raises(TypeRuleError, match="value"):
        mv.Pad((1,), (0,)).infer(t, TensorType(DType.I32, ()))


@pytest.mark.parametrize("repeats", [(1, 2, 3), (2, 1, 1), (0, 1, 1)])
def test_tile(repeats: Any) -> None:
    np.testing.assert_array_equal(run(mv.Tile(repeats), X), np.tile(X, repeats))
    np.testing.assert_array_equal(
        apply(mv.Tile(repeats).decompose, X, (N, M, 4)), np.tile(X, repeats)
    )


def test_expand() -> None:
    want = np.broadcast_to(X[:, :1], (5, 2, 3, 4))
    np.testing.assert_array_equal(run(mv.Expand((5, 2, 3, 4)), X[:, :1]), want)
    with pytest.raises(TypeRuleError, match="differ"):
        mv.Expand((2, 3)).infer(TensorType(DType.F32, (2, 2)))


@pytest.mark.parametrize("block", [2, 3])
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(block: int, mode: str) -> None:
    b, c = block, 2
    x = np.arange(c * b * b * 9, dtype=np.float32).reshape(1, c * b * b, 3, 3)
    if mode == "DCR":
        want = x.reshape(1, b, b, c, 3, 3).transpose(0, 3, 4, 1, 5, 2)
    else:
        want = x.reshape(1, c, b, b, 3, 3).transpose(0, 1, 4, 2, 5, 3)
    want = want.reshape(1, c, 3 * b, 3 * b)
    np.testing.assert_array_equal(apply(lambda v: mv.depth_to_space(v, b, mode), x), want)
    if mode == "DCR":
        np.testing.assert_array_equal(apply(lambda v: mv.space_to_depth(v, b), want), x)


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("k", [-2, 0, 1, 5])
def test_trilu(upper: bool, k: int) -> None:
    want = np.triu(X, k) if upper else np.tril(X, k)
    np.testing.assert_array_equal(run(mv.Trilu(upper, k), X), want)
    np.testing.assert_array_equal(apply(mv.Trilu(upper, k).decompose, X, (2, N, M)), want)


@pytest.mark.parametrize("dtype", [DType.I4, DType.F8E5M2, DType.C64], ids=str)
def test_trilu_refuses_what_it_cannot_select(dtype: DType) -> None:
    with pytest.raises(TypeRuleError, match=f"{dtype}; cast first"):
        mv.Trilu().infer(TensorType(dtype, (2, 2)))


def test_range() -> None:
    found = run(mv.Range(4), np.array(3, np.int64), np.array(-2, np.int64))
    assert found.tolist() == [3, 1, -1, -3]
    assert run(mv.Range(0), np.array(0.5, np.float32), np.array(1, np.float32)).shape == (0,)


@pytest.mark.parametrize("dtype", list(DType))
def test_movement_accepts_every_dtype(dtype: DType) -> None:
    x = np.array([[1, 0], [1, 1]]).astype(dtype.numpy)
    for op in (mv.Transpose((1, 0)), mv.Reshape((4,)), mv.Concat(0), mv.Tile((2, 1))):
        assert run(op, x).dtype == dtype.numpy
    np.testing.assert_array_equal(run(mv.Transpose((1, 0)), x), x.T)
