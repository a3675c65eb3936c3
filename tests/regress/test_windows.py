# SPDX-License-Identifier: Apache-2.0
"""Pooling and convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def test_average_counts_the_padding_at_both_ends(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/24681
    x = np.arange(12, dtype=np.float32).reshape(1, 1, 6, 2)
    y = run_onnx(
        "AveragePool", x, opset=19, kernel_shape=[5, 1], auto_pad="SAME_LOWER", count_include_pad=1
    )[0]
    padded = np.pad(x[0, 0], ((2, 2), (0, 0)))
    want = np.stack([padded[i : i + 5].sum(0) / np.float32(5) for i in range(6)])
    np.testing.assert_allclose(y[0, 0], want, rtol=1e-6)


def test_windows_beyond_the_end_average_what_is_there(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/onnx/onnx/issues/4958, https://github.com/microsoft/onnxruntime/issues/16351
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    y = run_onnx("AveragePool", x, opset=19, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)[0]
    np.testing.assert_array_equal(y[0, 0], [[6, 7.5], [12, 13.5]])


def test_no_window_lies_in_the_padding_alone(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/15446
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 6, 5)).astype(np.float32)
    y = run_onnx("MaxPool", x, kernel_shape=[3] * 3, strides=[3] * 3, pads=[1] * 6, ceil_mode=1)[0]
    assert y.shape == (1, 2, 2, 3, 2)
    assert np.isin(y, x).all()


def test_output_padding_of_a_transposed_convolution(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/11927
    x, w = np.ones((1, 2, 3, 3), np.float32), np.ones((2, 1, 3, 3), np.float32)
    y = run_onnx("ConvTranspose", x, w, strides=[2, 2], output_padding=[1, 1], pads=[1, 1, 1, 1])[0]
    assert y.shape == (1, 1, 6, 6)
    np.testing.assert_array_equal(y[0, 0, 0], [2, 4, 2, 4, 2, 2])
