# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array

onnx = pytest.importorskip("onnx")


def test_a_folded_dequantisation_keeps_the_sign(device: str) -> None:
    # https://github.com/microsoft/onnxruntime/issues/28491
    make = onnx.helper
    constants = [
        onnx.numpy_helper.from_array(np.array([12, -45, 7, -3], np.int8), "q"),
        onnx.numpy_helper.from_array(np.array(0.02, np.float32), "scale"),
        onnx.numpy_helper.from_array(np.array([2, 2]), "shape"),
    ]
    nodes = [
        make.make_node("DequantizeLinear", ["q", "scale"], ["d"]),
        make.make_node("Reshape", ["d", "shape"], ["r"]),
        make.make_node("Add", ["x", "r"], ["y"]),
    ]
    infos = [make.make_tensor_value_info(n, 1, [2, 2]) for n in ("x", "y")]
    model = make.make_model(make.make_graph(nodes, "g", infos[:1], infos[1:], constants))
    y = rlx.load(model, device)(np.zeros((2, 2), np.float32))
    np.testing.assert_allclose(y, [[0.24, -0.9], [0.14, -0.06]], rtol=1e-6)


def test_range_and_rounding_of_bytes(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/3442
    x = np.array([-129, -128, -127, 0.5, 1.5, 2.5, -0.5, 127.5], np.float32)
    y = run_onnx("QuantizeLinear", x, np.float32(1), np.int8(0))[0]
    np.testing.assert_array_equal(y, np.array([-128, -128, -127, 0, 2, 2, 0, 127], np.int8))


@pytest.mark.parametrize("n", [1, 7, 15, 16, 17, 31, 33])
def test_every_lane_and_the_tail_round_half_to_even(n: int, run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/pull/28606
    x = (np.arange(n) - n // 2 + 0.5).astype(np.float32)
    want = np.round(x)
    np.testing.assert_array_equal(run_onnx("Round", x)[0], want)
    y = run_onnx("QuantizeLinear", x, np.float32(1), np.int8(0))[0]
    np.testing.assert_array_equal(y, want.astype(np.int8))


def test_a_tie_is_decided_by_a_division_in_f32(run_onnx: Callable[..., list[Array]]) -> None:
    # https://github.com/tinygrad/tinygrad/pull/9301: x / scale is -127.49999, x * (1 / scale) is -127.5
    x = np.array([-2.5, 2.5, 0], np.float32)
    found = run_onnx("DynamicQuantizeLinear", x, outputs=3)
    y, scale, zero = found
    assert scale == np.float32(5) / np.float32(255)
    want = np.clip(np.round(x / scale) + np.round(np.clip(np.float32(2.5) / scale, 0, 255)), 0, 255)
    np.testing.assert_array_equal(y, want.astype(np.uint8))
    assert zero == np.uint8(np.round(np.float32(2.5) / scale))
