# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.config import override

onnx = pytest.importorskip("onnx")


def _loop(device: str, state: str) -> list[Any]:
    """Run a loop whose body gives (condition, carried + 1, carried, iteration); the carried value is called `state`."""
    make, kinds = onnx.helper, onnx.TensorProto
    body = make.make_graph(
        [
            make.make_node("Identity", ["cond"], ["cond_out"]),
            make.make_node("Add", [state, "one"], ["next"]),
            make.make_node("Identity", [state], ["scan"]),
            make.make_node("Identity", ["i"], ["scan_i"]),
        ],
        "body",
        [
            make.make_tensor_value_info("i", kinds.INT64, []),
            make.make_tensor_value_info("cond", kinds.BOOL, []),
            make.make_tensor_value_info(state, kinds.FLOAT, []),
        ],
        [
            make.make_tensor_value_info("cond_out", kinds.BOOL, []),
            make.make_tensor_value_info("next", kinds.FLOAT, []),
            make.make_tensor_value_info("scan", kinds.FLOAT, []),
            make.make_tensor_value_info("scan_i", kinds.INT64, []),
        ],
    )
    nodes = [
        make.make_node("Mul", ["c", "c"], ["outer"]),
        make.make_node("Loop", ["m", "", "c"], ["last", "scans", "steps"], body=body),
        make.make_node("Add", ["outer", "last"], ["sum"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(np.array(3), "m"),
        onnx.numpy_helper.from_array(np.array(1, np.float32), "one"),
    ]
    outputs = [make.make_tensor_value_info(n, 1, None) for n in ("last", "scans", "steps", "sum")]
    graph = make.make_graph(
        nodes, "g", [make.make_tensor_value_info("c", 1, [])], outputs, constants
    )
    with rlx.load(make.make_model(graph), device) as run:
        return list(run.run({"c": np.array(10, np.float32)}).values())


@pytest.mark.parametrize("state", ["state", "outer"], ids=["plain", "shadowing"])
def test_a_loop_scans_before_it_steps_and_its_names_are_its_own(state: str, device: str) -> None:
    # https://github.com/onnx/onnx-mlir/issues/1153, https://github.com/microsoft/onnxruntime/issues/4210,
    # https://github.com/onnx/onnx/issues/2082
    last, scans, steps, total = _loop(device, state)
    assert last == 13
    np.testing.assert_array_equal(scans, [10, 11, 12])
    np.testing.assert_array_equal(steps, [0, 1, 2])
    assert total == 113


def _collatz(device: str) -> rlx.Executable:
    """A loop that ends when its data says so: the steps from x to 1, at most `limit`."""
    make, kinds = onnx.helper, onnx.TensorProto
    scalar = make.make_tensor_value_info
    body = make.make_graph(
        [
            make.make_node("Mod", ["x", "two"], ["odd"]),
            make.make_node("Cast", ["odd"], ["is_odd"], to=kinds.BOOL),
            make.make_node("Div", ["x", "two"], ["half"]),
            make.make_node("Mul", ["x", "three"], ["tripled"]),
            make.make_node("Add", ["tripled", "one"], ["more"]),
            make.make_node("Where", ["is_odd", "more", "half"], ["next"]),
            make.make_node("Add", ["count", "one"], ["counted"]),
            make.make_node("Greater", ["next", "one"], ["again"]),
        ],
        "body",
        [
            scalar("i", kinds.INT64, []),
            scalar("cond", kinds.BOOL, []),
            scalar("x", kinds.INT64, []),
            scalar("count", kinds.INT64, []),
        ],
        [
            scalar("again", kinds.BOOL, []),
            scalar("next", kinds.INT64, []),
            scalar("counted", kinds.INT64, []),
        ],
    )
    constants = [
        onnx.numpy_helper.from_array(np.array(v), n)
        for v, n in ((0, "zero"), (1, "one"), (2, "two"), (3, "three"))
    ]
    nodes = [
        make.make_node("Greater", ["start", "one"], ["first"]),
        make.make_node("Loop", ["limit", "first", "start", "zero"], ["last", "steps"], body=body),
    ]
    inputs = [scalar(n, kinds.INT64, []) for n in ("start", "limit")]
    outputs = [scalar(n, kinds.INT64, []) for n in ("last", "steps")]
    return rlx.load(
        make.make_model(make.make_graph(nodes, "g", inputs, outputs, constants)), device
    )


@pytest.mark.parametrize(
    ("start", "limit", "want"),
    [(1, 99, (1, 0)), (6, 99, (1, 8)), (27, 999, (1, 111)), (6, 3, (5, 3)), (6, 0, (6, 0))],
)
def test_a_loop_ends_when_its_data_says_so(
    start: int, limit: int, want: tuple[int, int], device: str
) -> None:
    with override(RLX_CHECK=True), _collatz(device) as run:
        found = run.run({"start": np.array(start), "limit": np.array(limit)})
        assert (int(found["last"]), int(found["steps"])) == want
