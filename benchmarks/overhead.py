# SPDX-License-Identifier: Apache-2.0
"""What one call costs when there is next to nothing to compute.

Usage: python benchmarks/overhead.py [--engines ...] [--peers-python PYTHON]

The graph is three operators on f32[1,16] (MatMul, Add, Sigmoid): a run is almost only binding
inputs, entering native code and handing out results. Prints the median microseconds of a call, per
engine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import common


def write_model(path: Path) -> None:
    """Write sigmoid(x @ w + b) for x: f32[1,16]."""
    random = np.random.default_rng(0)
    w = random.standard_normal((16, 16)).astype(np.float32)
    b = random.standard_normal(16).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("Add", ["product", "b"], ["sum"]),
            helper.make_node("Sigmoid", ["sum"], ["y"]),
        ],
        "three",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def main() -> None:
    """Measure one thread per engine and print the table."""
    options = common.options(__doc__, ("rlx", "onnxruntime", "openvino"))
    plan = common.Plan(processes=options.processes, runs=5000, python=options.python)
    with tempfile.TemporaryDirectory(prefix="rlx-bench-") as folder:
        model = Path(folder) / "three.onnx"
        write_model(model)
        inputs = {"x": np.ones((1, 16), np.float32)}
        workload = common.Workload("three operators", model, inputs, threads=1)
        results = common.measure(workload, options.engines, plan)
    print(common.describe(common.machine(), common.versions([results])) + "\n")
    rows = [
        [engine, f"{r.median() * 1e6:.2f}" if r.answers else "-", r.note or "-"]
        for engine, r in results.items()
    ]
    print(common.markdown(["engine", "microseconds per call", "note"], rows))


if __name__ == "__main__":
    main()
