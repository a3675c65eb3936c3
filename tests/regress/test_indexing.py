# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def test_indices_may_be_negative(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/apache/tvm/issues/20217
    x, i = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([[-1, -1], [0, -2]])
    np.testing.assert_array_equal(run_onnx("GatherND", x, i)[0], [11, 2])
    np.testing.assert_array_equal(run_onnx("GatherElements", x, i, axis=1)[0], [[3, 3], [4, 6]])
    y = run_onnx("ScatterND", x, i, np.array([-5, -6], np.float32))[0]
    assert (y[2, 3], y[0, 2]) == (-5, -6)
    y = run_onnx("OneHot", np.array([-1]), np.array(5), np.array([0, 1], np.float32), fixed=(1,))[0]
    np.testing.assert_array_equal(y, [[0, 0, 0, 0, 1]])


def test_a_scatter_of_rows_takes_whole_rows(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/onnx/onnx-mlir/issues/3611, https://github.com/onnx/onnx/issues/6019
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    y = run_onnx("ScatterND", x, np.array([[[0, 0]]]), np.array([[[100, 101]]], np.float32))[0]
    np.testing.assert_array_equal(y, [[[100, 101], [2, 3]], [[4, 5], [6, 7]]])


def test_repeated_indices_add_up_the_same_in_every_run(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/18048
    zeros, i, updates = (
        np.zeros(4, np.float32),
        np.array([1, 1, 3]),
        np.array([1, 2, 5], np.float32),
    )
    np.testing.assert_array_equal(
        run_onnx("ScatterElements", zeros, i, updates, opset=18, reduction="add")[0], [0, 3, 0, 5]
    )
    many = np.random.default_rng(0).integers(0, 4, 5000)
    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    runs = {
        run_onnx("ScatterElements", zeros, many, values, opset=18, reduction="add")[0].tobytes()
        for _ in range(3)
    }
    assert len(runs) == 1


@pytest.mark.parametrize("length", [2, 64, 100, 4096])
def test_a_value_is_not_read_while_its_mirror_is_written(
    length: int, run_graph: Callable[..., Any]
) -> None:
    # https://github.com/pytorch/pytorch/issues/198033
    from rlx.ops.movement import flip

    x = np.random.default_rng(0).random((3, length)).astype(np.float32)

    def twice(v: Any) -> Any:
        doubled = v + v
        mirrored = doubled + flip(doubled, 1)
        return mirrored + flip(mirrored, 0)

    doubled = x + x
    mirrored = doubled + doubled[:, ::-1]
    np.testing.assert_array_equal(run_graph(twice, x), mirrored + mirrored[::-1])
