# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.reduce import ArgReduce, CumSum, Reduce, TopK
from rlx.ops.spec import building

NAN, INF = math.nan, math.inf


def _sum(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    return np.sum(x, axis=axis, keepdims=keepdims)


NUMPY: dict[str, Callable[[Array, tuple[int, ...], bool], Array]] = {
    "sum": _sum,
    "mean": lambda x, axes, keep: np.mean(x, axis=axes, keepdims=keep),
    "max": lambda x, axes, keep: np.max(x, axis=axes, keepdims=keep),
    "min": lambda x, axes, keep: np.min(x, axis=axes, keepdims=keep),
    "prod": lambda x, axes, keep: np.prod(x, axis=axes, keepdims=keep),
    "sumsq": lambda x, axes, keep: _sum(x * x, axes, keep),
    "l1": lambda x, axes, keep: _sum(np.abs(x), axes, keep),
    "l2": lambda x, axes, keep: np.sqrt(_sum(x * x, axes, keep)),
    "logsum": lambda x, axes, keep: np.log(_sum(x, axes, keep)),
    "logsumexp": lambda x, axes, keep: np.log(_sum(np.exp(x), axes, keep)),
}


def run(op: Any, *arrays: Any) -> Any:
    found = run_op(op, arrays)
    return found[0] if len(found) == 1 else found


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("keepdims", [True, False])
def test_kinds_and_axes_against_numpy(kind: str, axes: tuple[int, ...], keepdims: bool) -> None:
    x = np.random.default_rng(1).uniform(0.5, 1.5, (3, 4, 5))
    found = run(Reduce(kind, axes, keepdims), x)
    want = NUMPY[kind](x, axes, keepdims)
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, rtol=1e-12)


@pytest.mark.parametrize("kind", ["max", "min", "sum", "mean", "l2", "logsumexp"])
def test_nan_is_kept_wherever_it_stands(kind: str) -> None:
    x = np.array([[NAN, 1], [2, NAN], [1, 2]], np.float32)
    assert np.isnan(run(Reduce(kind, (1,)), x)).tolist() == [[True], [True], [False]]


def test_without_axes_every_element_is_a_row() -> None:
    x = np.array([-2.0, 3.0], np.float32)
    np.testing.assert_array_equal(run(Reduce("sumsq", ()), x), [4, 9])
    np.testing.assert_array_equal(run(Reduce("mean", ()), x), x)
    np.testing.assert_array_equal(run(Reduce("l2", (), keepdims=False), x), [2, 3])


def test_empty_rows_give_the_identity() -> None:
    x = np.empty((1, 0), np.float32)
    assert run(Reduce("sum", (1,), keepdims=False), x).tolist() == [0]
    assert run(Reduce("prod", (1,)), x).tolist() == [[1]]
    assert run(Reduce("max", (1,)), x).tolist() == [[-INF]]
    assert run(Reduce("min", (1,)), x).tolist() == [[INF]]
    assert run(Reduce("logsumexp", (1,)), x).tolist() == [[-INF]]
    assert np.isnan(run(Reduce("mean", (1,)), x)).all()
    whole = np.empty((2, 0), np.int8)
    assert run(Reduce("max", (1,)), whole).tolist() == [[-128], [-128]]
    assert run(Reduce("min", (1,)), whole).tolist() == [[127], [127]]
    with pytest.raises(ExecutionError, match="zero"):
        run(Reduce("mean", (1,)), whole)


def test_logsumexp_of_infinities_and_large_numbers() -> None:
    x = np.array([[INF, 2, 3], [-INF, -INF, -INF], [1000, 1000, 1000], [-INF, 0, -INF]], np.float32)
    found = run(Reduce("logsumexp", (1,), keepdims=False), x)
    np.testing.assert_allclose(found, [INF, -INF, 1000 + math.log(3), 0], rtol=1e-7)


def test_integers_stay_integers() -> None:
    x = np.array([[100, 100, 100]], np.int8)
    assert run(Reduce("sum", (1,)), x).tolist() == [[44]]
    assert run(Reduce("mean", (1,)), x).tolist() == [[100]]
    assert run(Reduce("mean", (1,)), np.array([[-7, 0]], np.int32)).tolist() == [[-3]]
    assert run(Reduce("l2", (1,)), np.array([[3, 4]], np.int32)).tolist() == [[5]]
    big = np.array([2**62, 1], np.int64)
    assert run(Reduce("sum", (0,), keepdims=False), big) == 2**62 + 1


def test_narrow_floats_accumulate_wide() -> None:
    x = np.full(4096, 0.1, DType.BF16.numpy)
    found = run(Reduce("sum", (0,)), x)
    want = x.astype(np.float32).sum(dtype=np.float64)
    assert found.dtype == DType.BF16.numpy
    np.testing.assert_array_equal(found, np.array([want]).astype(np.float32).astype(found.dtype))


def test_region_where_the_axes_are_the_last() -> None:
    n = symbol("N")
    t = TensorType(DType.F32, (2, n, 4))
    assert Reduce("sum", (2,)).region(t) is not None
    assert Reduce("sum", (1, 2)).region(t) is not None
    assert Reduce("sum", (2,), keepdims=False).region(t) is None
    assert Reduce("sum", (1,)).region(t) is None
    assert Reduce("mean", (1, 2)).region(t) is None  # the count is symbolic
    region = Reduce("mean", (2,)).region(t)
    assert region is not None
    assert region.infer(t)[0] == t.with_shape((2, n, 1))


@pytest.mark.parametrize("kind", ["mean", "sum", "logsumexp"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.I32])
def test_decomposition_over_symbolic_extents(
    kind: str, axes: tuple[int, ...], dtype: DType
) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(dtype, (symbol("N"), symbol("M"), 3)))
    op = Reduce(kind, axes, keepdims=False)
    with building(Builder(graph.block, graph.facts)):
        y = op.decompose(x)
    assert y is not None
    graph.set_outputs({"y": y})
    data = np.random.default_rng(0).uniform(-5, 5, (4, 6, 3)).astype(dtype.numpy)
    rtol = 1e-3 if dtype is DType.F16 else 1e-6
    np.testing.assert_allclose(
        evaluate(graph, {"x": data})["y"], run(op, data), rtol=rtol, atol=rtol
    )


def test_arg_reductions() -> None:
    x = np.array([[1, 3, 3, 0], [2, NAN, 5, NAN]], np.float32)
    assert run(ArgReduce("max", 1), x).tolist() == [[1], [1]]
    assert run(ArgReduce("max", 1, select_last=True), x).tolist() == [[2], [3]]
    assert run(ArgReduce("min", 1, keepdims=False), x).tolist() == [3, 1]
    assert run(ArgReduce("min", 0, keepdims=False), np.array([[2, 1], [2, 0]])).tolist() == [0, 1]
    with pytest.raises(TypeRuleError, match="empty"):
        run(ArgReduce("max", 1), np.empty((2, 0), np.float32))


@pytest.mark.parametrize("kind", ["max", "min"])
def test_arg_reductions_point_at_what_max_and_min_return(kind: str) -> None:
    """NaN comes through both, so a NaN is what both positions hold: the first, or the last with `select_last`."""
    x = np.random.default_rng(0).integers(-3, 3, (50, 9)).astype(np.float32)
    x[np.random.default_rng(1).random(x.shape) < 0.1] = NAN
    first, last = (run(ArgReduce(kind, 1, select_last=s), x) for s in (False, True))
    extremum = run(Reduce(kind, (1,)), x)
    for index in (first, last):
        np.testing.assert_array_equal(np.take_along_axis(x, index, 1), extremum)
    np.testing.assert_array_equal(first, (np.argmax if kind == "max" else np.argmin)(x, 1)[:, None])
    same = (x == extremum) | (np.isnan(x) & np.isnan(extremum))
    np.testing.assert_array_equal(last[:, 0], 8 - np.argmax(same[:, ::-1], 1))


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("last", [True, False])
def test_arg_reduction_decomposes(kind: str, last: bool) -> None:
    x = np.array(
        [[1, 3, 3, 1], [2, NAN, 5, NAN], [NAN, 0, 0, 0], [INF, INF, -INF, -INF]], np.float32
    )
    op = ArgReduce(kind, 1, keepdims=False, select_last=last)
    graph = Graph()
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": op.decompose(graph.add_input("x", TensorType(DType.F32, (4, 4))))})
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], run(op, x))


def test_cumulative_sums() -> None:
    x = np.array([2**33, 2**34, 2**35, 5, 7], np.int64)
    want = [8589934592, 25769803776, 60129542144, 60129542149, 60129542156]
    assert run(CumSum(0), x).tolist() == want
    assert run(CumSum(0, exclusive=True), x).tolist() == [0, *want[:-1]]
    assert run(CumSum(0, reverse=True), np.array([1, 2, 3])).tolist() == [6, 5, 3]
    assert run(CumSum(0, exclusive=True, reverse=True), np.array([1, 2, 3])).tolist() == [5, 3, 0]
    assert run(CumSum(-2, exclusive=True), np.array([[1, 2]])).tolist() == [[0, 0]]
    assert run(CumSum(0, exclusive=True), np.array([INF, 1.0])).tolist() == [0, INF]


def test_top_k_order_of_nan_and_ties() -> None:
    x = np.array([1, NAN, 3, 3, -INF, NAN], np.float32)
    values, indices = run(TopK(4, 0), x)
    np.testing.assert_array_equal(values, [NAN, NAN, 3, 3])
    assert indices.tolist() == [1, 5, 2, 3]
    values, indices = run(TopK(5, 0, largest=False), x)
    np.testing.assert_array_equal(values, [-INF, 1, 3, 3, NAN])
    assert indices.tolist() == [4, 0, 2, 3, 1]
    many = np.full(10000, INF, np.float32)
    many[:100] = 0
    assert run(TopK(5000, 0), many)[1].tolist() == list(range(100, 5100))
    with pytest.raises(TypeRuleError, match="extent"):
        run(TopK(7, 0), x)
