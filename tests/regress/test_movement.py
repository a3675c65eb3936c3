# SPDX-License-Identifier: Apache-2.0
"""Movement, einsum, broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.ops.leaf import constant
from rlx.ops.matmul import matmul
from rlx.ops.movement import concat, slice_axis


@pytest.mark.parametrize("mode", ["CRD", "DCR"])
def test_depth_to_space_of_a_block_of_three(mode: str, run_onnx: Callable[..., Any]) -> None:
    # https://github.com/iree-org/iree/issues/24179
    x = np.arange(162, dtype=np.float32).reshape(1, 18, 3, 3)
    y = run_onnx("DepthToSpace", x, blocksize=3, mode=mode)[0]
    if mode == "CRD":
        want = x.reshape(1, 2, 3, 3, 3, 3).transpose(0, 1, 4, 2, 5, 3)
    else:
        want = x.reshape(1, 3, 3, 2, 3, 3).transpose(0, 3, 4, 1, 5, 2)
    np.testing.assert_array_equal(y, want.reshape(1, 2, 9, 9))


def test_einsum_of_three_operands(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/7375
    rng = np.random.default_rng(0)
    a, b, c = rng.random((2, 2, 2)), rng.random((2, 2)), rng.random((2, 2, 2))
    y = run_onnx("Einsum", a, b, c, equation="abc,cd,def->abd")[0]
    np.testing.assert_allclose(y, np.einsum("abc,cd,def->abd", a, b, c), rtol=1e-12)


def test_reshapes_that_merge_keep_zero_extents(device: str) -> None:
    # https://github.com/microsoft/onnxruntime/issues/28449
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    nodes = [
        make.make_node("Reshape", ["x", "first"], ["m"]),
        make.make_node("Reshape", ["m", "second"], ["y"], allowzero=1),
    ]
    shapes = [
        onnx.numpy_helper.from_array(np.array(s), n)
        for s, n in (([4, 2, -1], "first"), ([0, 0, 4], "second"))
    ]
    x, y = make.make_tensor_value_info("x", 1, [0, 8, 2]), make.make_tensor_value_info("y", 1, None)
    model = make.make_model(make.make_graph(nodes, "g", [x], [y], shapes))
    assert rlx.load(model, device)(np.zeros((0, 8, 2), np.float32)).shape == (0, 0, 4)


def test_a_linear_layer_of_no_rows(
    run_graph: Callable[[Callable[[Any, Any, Any], Any], Any, Any, Any], Any],
) -> None:
    # https://github.com/microsoft/onnxruntime/issues/4559
    x, w, b = np.zeros((1, 0, 8), np.float32), np.ones((8, 3), np.float32), np.ones(3, np.float32)
    assert run_graph(lambda p, q, r: matmul(p, q) + r, x, w, b).shape == (1, 0, 3)


def test_concat_keeps_its_order_after_fusion(run_graph: Callable[..., Any]) -> None:
    # https://github.com/iree-org/iree/issues/20819
    x = np.random.default_rng(0).random((3, 5)).astype(np.float32)

    def build(v: Any) -> Any:
        a = slice_axis(v, 1, 1, 4)
        b = a - a
        return concat([a + b, b], 1)

    np.testing.assert_array_equal(
        run_graph(build, x), np.concatenate([x[:, 1:], np.zeros((3, 4))], 1)
    )


def test_a_slope_per_channel_broadcasts(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/apache/tvm/issues/18598
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 2)).astype(np.float32)
    slope = np.array([0.1, 0.2, 0.3], np.float32).reshape(3, 1, 1)
    np.testing.assert_array_equal(run_onnx("PRelu", x, slope)[0], np.where(x < 0, x * slope, x))


def test_reflection_with_a_negative_pad_never_reads_beyond(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/11828
    x, pads = np.arange(6, dtype=np.float32), np.array([-5, 5])
    try:
        (y,) = run_onnx("Pad", x, pads, fixed=(1,), mode="reflect")
    except rlx.RlxError:
        return  # refusing is right as well
    np.testing.assert_array_equal(y, [5, 4, 3, 2, 1, 0])


def test_halving_constants_are_read_as_they_are(
    run_graph: Callable[[Callable[[Any], Any], Any], Any],
) -> None:
    # A one-element constant is inlined into kernel text; two kernels of equal text must not share its value.
    x = np.ones(4, np.float32)
    first, second = run_graph(
        lambda v: (v * constant(np.float32(0.3)), v * constant(np.float32(0.7))), x
    )
    np.testing.assert_array_equal(first, np.full(4, 0.3, np.float32))
    np.testing.assert_array_equal(second, np.full(4, 0.7, np.float32))
