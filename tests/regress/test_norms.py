# SPDX-License-Identifier: Apache-2.0
"""Norms and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.ops.norm import layer_norm, softmax


def test_variance_far_from_zero_is_not_a_difference_of_squares(
    run_onnx: Callable[..., Any],
) -> None:
    # https://github.com/microsoft/onnxruntime/issues/28463
    x = np.array([[40000, 40001, 40002, 40003]], np.float32)
    y = run_onnx("LayerNormalization", x, np.ones(4, np.float32), epsilon=1e-5)[0]
    np.testing.assert_allclose(y, [[-1.3416, -0.4472, 0.4472, 1.3416]], atol=1e-4)


def test_rows_far_from_zero_have_mean_zero_and_variance_one(run_graph: Callable[..., Any]) -> None:
    # https://github.com/pytorch/pytorch/issues/51102
    x = (np.random.default_rng(0).standard_normal((5, 4)) + 2000).astype(np.float32)
    y = run_graph(layer_norm, x).astype(np.float64)
    np.testing.assert_allclose(y.mean(1), 0, atol=1e-3)
    np.testing.assert_allclose(y.var(1), 1, atol=1e-3)


def test_the_variance_of_half_floats_does_not_overflow(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/ml-explore/mlx/issues/4228
    board = np.where(np.indices((8, 8)).sum(0) % 2, 512, -512).astype(np.float16)
    one, zero = np.ones(1, np.float16), np.zeros(1, np.float16)
    y = run_onnx("InstanceNormalization", board[None, None], one, zero)[0]
    np.testing.assert_array_equal(y[0, 0], np.sign(board))


def test_constant_half_rows_with_a_tiny_epsilon_are_zero(
    run_graph: Callable[[Callable[[Any], Any], Any], Any],
) -> None:
    # https://github.com/pytorch/pytorch/issues/41527
    y = run_graph(lambda v: layer_norm(v, eps=1e-12), np.zeros((2, 10), np.float16))
    np.testing.assert_array_equal(y, 0)


def test_old_softmax_flattens_to_a_matrix(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/openvinotoolkit/openvino/issues/37823
    x = (np.arange(12, dtype=np.float32) / 10).reshape(1, 3, 2, 2)
    e = np.exp(x.astype(np.float64))
    y = run_onnx("Softmax", x, opset=11, axis=1)[0]
    np.testing.assert_allclose(y, e / e.sum(), rtol=1e-6)
    y = run_onnx("Softmax", x, opset=13, axis=1)[0]
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 127, 128, 129, 1000])
def test_softmax_of_minus_infinities_does_not_depend_on_the_length(
    n: int, run_graph: Callable[..., Any]
) -> None:
    # https://github.com/ml-explore/mlx/issues/1467
    x = np.full((2, n), -np.inf, np.float32)
    assert np.isnan(run_graph(softmax, x)).all()
    x[1, n // 2] = 3
    y = run_graph(softmax, x)
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], np.arange(n) == n // 2)
