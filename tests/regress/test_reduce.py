# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.ops.elementwise import where
from rlx.ops.leaf import constant
from rlx.ops.reduce import arg_max, arg_min, reduce_logsumexp, reduce_max, reduce_min, top_k


def test_no_axes_without_reduction_still_squares(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/26288
    x = np.array([[1, -2], [3, 4]], np.float32)
    axes = np.array([], np.int64)
    (y,) = run_onnx("ReduceSumSquare", x, axes, fixed=(1,), opset=18, noop_with_empty_axes=1)
    np.testing.assert_array_equal(y, x * x)


def test_empty_axes_may_mean_none(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/16586
    x = np.array([[1, -2], [3, 4]], np.float32)
    axes = np.array([], np.int64)
    (y,) = run_onnx("ReduceMean", x, axes, fixed=(1,), opset=18, noop_with_empty_axes=1)
    np.testing.assert_array_equal(y, x)
    (y,) = run_onnx("ReduceMean", x, axes, fixed=(1,), opset=18)
    np.testing.assert_array_equal(y, [[1.5]])


def test_an_empty_axis_sums_to_zero(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/7563
    x, axes = np.zeros((1, 0), np.float32), np.array([1])
    (y,) = run_onnx("ReduceSum", x, axes, fixed=(1,), keepdims=0)
    np.testing.assert_array_equal(y, [0])


@pytest.mark.parametrize("reduce", [reduce_max, reduce_min])
@pytest.mark.parametrize("n", [2, 3, 8, 16, 17, 33, 100])
def test_nan_is_kept_wherever_it_stands(
    reduce: Any, n: int, run_graph: Callable[[Callable[[Any], Any], Any], Any]
) -> None:
    # https://github.com/apache/tvm/issues/19572, https://github.com/ml-explore/mlx/issues/577
    x = np.ones((n + 1, n), np.float32)
    x[np.arange(n), np.arange(n)] = np.nan
    y = run_graph(lambda v: reduce(v, [1], False), x)
    np.testing.assert_array_equal(np.isnan(y), [True] * n + [False])
    y = run_graph(lambda v: reduce(v, [0], False), x)
    assert np.isnan(y).all()


def test_folded_arg_min_equals_the_one_that_runs(run_graph: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/31140
    mask, x = np.array([False, True, False, True]), np.array([1, 0, -1, 0], np.float32)

    def both(m: Any, v: Any) -> Any:
        folded = where(constant(mask), constant(np.float32(np.nan)), constant(x))
        runs = where(m, constant(np.float32(np.nan)), v)
        return arg_min(folded, 0), arg_min(runs, 0), arg_max(folded, 0), arg_max(runs, 0)

    # A NaN wins both ways, as it does in the minimum and the maximum themselves; the first one does.
    assert [int(y[0]) for y in run_graph(both, mask, x)] == [1, 1, 1, 1]


def test_top_k_of_many_infinities_takes_the_lowest_indices(
    run_graph: Callable[[Callable[[Any], Any], Any], Any],
) -> None:
    # https://github.com/microsoft/onnxruntime/issues/9843
    x = np.full(10000, np.inf, np.float32)
    x[::7] = 1
    values, indices = run_graph(lambda v: top_k(v, 5000, 0), x)
    assert np.isinf(values).all()
    np.testing.assert_array_equal(indices, np.flatnonzero(np.isinf(x))[:5000])


def test_log_sum_exp_of_infinities(run_graph: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    # https://github.com/ml-explore/mlx/issues/576
    x = np.array([[np.inf, 2, 3], [-np.inf, -np.inf, -np.inf], [1000, 1000, -np.inf]], np.float32)
    y = run_graph(lambda v: reduce_logsumexp(v, [1], False), x)
    np.testing.assert_allclose(y, [np.inf, -np.inf, 1000 + np.log(2)], rtol=1e-6)
