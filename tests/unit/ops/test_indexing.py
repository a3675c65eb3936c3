# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops import indexing as ix
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.spec import building

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def run(op: Any, *arrays: Any) -> Any:
    (result,) = run_op(op, arrays)
    return result


def i64(*values: Any) -> Any:
    return np.array(values[0] if len(values) == 1 else values, np.int64)


def f32(values: list[float]) -> Any:
    return np.array(values, np.float32)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.int8, np.uint8])
def test_gather(kind: Any) -> None:
    index = np.array([[0, 2], [1, 0]], kind)
    np.testing.assert_array_equal(run(ix.Gather(0), X, index), X[index])
    np.testing.assert_array_equal(run(ix.Gather(1), X, index), X[:, index])
    np.testing.assert_array_equal(run(ix.Gather(1), X, np.array(3, kind)), X[:, 3])


def test_negative_indices_count_from_the_end() -> None:
    np.testing.assert_array_equal(run(ix.Gather(0), X, i64(-1, -3)), X[[2, 0]])
    assert run(ix.GatherND(), X, i64([[-1, -1], [0, -2]])).tolist() == [11, 2]
    found = run(ix.GatherElements(1), X, i64([[-1], [0], [-2]]))
    assert found.tolist() == [[3], [4], [10]]
    y = run(ix.ScatterND(), X, i64([[-1, -1]]), np.array([99], np.float32))
    assert y[2, 3] == 99
    y = run(ix.ScatterElements(1), X, i64([[-4]]), np.array([[99]], np.float32))
    assert y[0, 0] == 99


@pytest.mark.parametrize("index", [3, -4])
def test_indices_out_of_range_are_an_error(index: int) -> None:
    one = np.ones((1, 4), np.float32)
    for op, arrays in (
        (ix.Gather(0), (X, i64([0, index]))),
        (ix.GatherElements(0), (X, i64([[0, index]]))),
        (ix.GatherND(), (X, i64([[0], [index]]))),
        (ix.ScatterND(), (X, i64([[index]]), one)),
        (ix.ScatterElements(0), (X, i64([[0, index]]), one[:, :2])),
    ):
        with pytest.raises(ExecutionError, match=rf"index {index} .* outside \[-3, 3\) of axis 0"):
            run(op, *arrays)
        assert op.may_fail()


def test_gather_elements_with_fewer_rows() -> None:
    index = i64([[0, 2, 1]])
    assert run(ix.GatherElements(0), X, index).tolist() == [[0, 9, 6]]
    with pytest.raises(TypeRuleError, match="larger"):
        run(ix.GatherElements(1), X, i64(np.zeros((4, 1))))


def test_gather_nd_forms() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(run(ix.GatherND(), x, i64([[1], [0]])), x[[1, 0]])
    np.testing.assert_array_equal(run(ix.GatherND(), x, i64([[1, 2], [0, 1]])), x[[1, 0], [2, 1]])
    batched = run(ix.GatherND(1), x, i64([[[2, 3]], [[0, 1]]]))
    assert batched.tolist() == [[11], [13]]
    np.testing.assert_array_equal(run(ix.GatherND(1), x, i64([[2], [0]])), x[[0, 1], [2, 0]])
    assert run(ix.GatherND(), x, np.empty((2, 0), np.int64)).shape == (2, 2, 3, 4)
    assert run(ix.GatherND(), np.arange(3.0), i64([1])).shape == ()


def test_scatter_nd_with_partial_indices() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    y = run(ix.ScatterND(), x, i64([[[0, 0]]]), np.array([[[100, 101]]], np.float32))
    assert y.tolist() == [[[100, 101], [2, 3]], [[4, 5], [6, 7]]]
    assert x[0, 0, 0] == 0  # the operand is not written


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("add", [1, 4, 1, 6]), ("mul", [1, 2, 1, 5]), ("max", [1, 2, 1, 5]), ("min", [1, 1, 1, 1])],
)
def test_duplicates_merge(reduction: str, expected: list[int]) -> None:
    x, updates = np.ones(4, np.float32), np.array([1, 2, 5], np.float32)
    assert run(ix.ScatterND(reduction), x, i64([[1], [1], [3]]), updates).tolist() == expected
    assert run(ix.ScatterElements(0, reduction), x, i64(1, 1, 3), updates).tolist() == expected


def test_scatter_add_from_zero() -> None:
    found = run(ix.ScatterND("add"), np.zeros(4, np.float32), i64([[1], [1], [3]]), f32([1, 2, 5]))
    assert found.tolist() == [0, 3, 0, 5]


def test_the_last_of_duplicates_wins() -> None:
    found = run(ix.ScatterElements(0), np.zeros(3, np.float32), i64(1, 1, 1), f32([1, 2, 3]))
    assert found.tolist() == [0, 3, 0]


def test_scatter_keeps_nan_in_max() -> None:
    found = run(ix.ScatterElements(0, "max"), f32([np.nan, 1]), i64(0, 1), f32([5, np.nan]))
    assert np.isnan(found).all()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_hot_and_its_decomposition(axis: int) -> None:
    with pytest.raises(TypeRuleError, match="u4; cast first"):
        ix.OneHot(5, axis).infer(TensorType(DType.I64, (3,)), TensorType(DType.U4, (2,)))
    index, values = i64([0, -1, 4, 7, -6]), np.array([2, 9], np.float32)
    eye = np.full((5, 5), 2, np.float32)
    eye[[0, 1, 2], [0, 4, 4]] = 9
    want = eye.T if axis == 0 else eye
    op = ix.OneHot(5, axis)
    np.testing.assert_array_equal(run(op, index, values), want)
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.I64, (symbol("N"),)))
    v = graph.add_input("v", TensorType(DType.F32, (2,)))
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": op.decompose(x, v)})
    np.testing.assert_array_equal(evaluate(graph, {"x": index, "v": values})["y"], want)
