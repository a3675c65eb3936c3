# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.base.numeric import Array


def test_a_tie_rounds_up_where_round_prefer_ceil_says_so(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/28291
    x = np.linspace(0, 1, 20, dtype=np.float32).reshape(1, 1, 1, 20)
    sizes = np.array([1, 1, 1, 6])
    attributes = {
        "coordinate_transformation_mode": "half_pixel",
        "nearest_mode": "round_prefer_ceil",
    }
    (y,) = run_onnx(
        "Resize", x, None, None, sizes, fixed=(3,), opset=18, mode="nearest", **attributes
    )
    np.testing.assert_array_equal(y[0, 0, 0], x[0, 0, 0, [1, 5, 8, 11, 15, 18]])


def test_half_pixel_with_floor_stays_inside(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/iree-org/iree/issues/24264
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    scales = np.array([1, 1, 2, 2], np.float32)
    (y,) = run_onnx(
        "Resize",
        x,
        None,
        scales,
        fixed=(2,),
        opset=18,
        mode="nearest",
        coordinate_transformation_mode="half_pixel",
        nearest_mode="floor",
    )
    index = [0, 0, 0, 1, 1, 2, 2, 3]
    np.testing.assert_array_equal(y[0, 0], x[0, 0][np.ix_(index, index)])


def test_linear_resize_of_bytes_rounds_to_nearest(run_onnx: Callable[..., list[Array]]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/25417 (the standard leaves the rounding open)
    x = np.arange(1, 9, dtype=np.uint8).reshape(1, 1, 2, 4)
    scales = np.array([1, 1, 0.6, 0.6], np.float32)
    (y,) = run_onnx("Resize", x, None, scales, fixed=(2,), opset=18, mode="linear")
    (exact,) = run_onnx(
        "Resize", x.astype(np.float32), None, scales, fixed=(2,), opset=18, mode="linear"
    )
    rounded = np.round(exact)
    np.testing.assert_array_equal(y, rounded.astype(np.uint8))
    np.testing.assert_allclose(exact[0, 0, 0], [2.6666667, 4.3333335], rtol=1e-6)
