# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

_N = np.float32(np.nan)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("repeat", [1, 3, 9])
def test_relu_sign_max_and_min_keep_nan(
    dtype: Any, repeat: int, run_onnx: Callable[..., Any]
) -> None:
    # https://github.com/apache/tvm/issues/19579, https://github.com/microsoft/onnxruntime/issues/11010
    x = np.tile(np.array([_N, 1, _N, -2], dtype), repeat)
    np.testing.assert_array_equal(
        run_onnx("Relu", x)[0], np.tile(np.array([_N, 1, _N, 0], dtype), repeat)
    )
    np.testing.assert_array_equal(
        run_onnx("Sign", x)[0], np.tile(np.array([_N, 1, _N, -1], dtype), repeat)
    )
    zero = np.zeros_like(x)
    for a, b in ((x, zero), (zero, x)):
        np.testing.assert_array_equal(
            run_onnx("Max", a, b)[0], np.tile(np.array([_N, 1, _N, 0], dtype), repeat)
        )
        np.testing.assert_array_equal(
            run_onnx("Min", a, b)[0], np.tile(np.array([_N, 0, _N, -2], dtype), repeat)
        )


def test_hard_sigmoid_keeps_nan(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/openvinotoolkit/openvino/issues/35930
    x = np.array([_N, _N, 1e25, 5], np.float32)
    np.testing.assert_array_equal(
        run_onnx("HardSigmoid", x, alpha=0.16667, beta=0.5)[0], [_N, _N, 1, 1]
    )


def test_clip_keeps_nan_and_the_upper_bound_wins(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/onnx/onnx/issues/6003, https://github.com/apache/tvm/issues/19533
    x = np.array([_N, -20, 20], np.float32)
    y = run_onnx("Clip", x, np.float32(-10), np.float32(10))[0]
    np.testing.assert_array_equal(y, [_N, -10, 10])
    y = run_onnx("Clip", np.array([-3, 3, 9], np.float32), np.float32(5), np.float32(1))[0]
    np.testing.assert_array_equal(y, [1, 1, 1])


def test_masks_are_not_reassociated(
    run_graph: Callable[[Callable[[Any, Any], Any], Any, Any], Any],
) -> None:
    # https://github.com/iree-org/iree/issues/23914
    one = np.ones(5, np.float32)
    y = run_graph(lambda att, mask: att * mask + -1e10 * (1.0 - mask), one, one)
    np.testing.assert_array_equal(y, one)


def test_gelu_is_not_its_approximation(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/tenstorrent/tt-metal/issues/55130
    x = np.array([-3, 3], np.float32)
    y = run_onnx("Gelu", x, opset=20)[0]
    np.testing.assert_allclose(y, [-0.0040497, 2.9959503], atol=2e-7)
    y = run_onnx("Gelu", x, opset=20, approximate="tanh")[0]
    np.testing.assert_allclose(y, [-0.0036374, 2.9963627], atol=2e-7)
