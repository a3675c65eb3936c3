# SPDX-License-Identifier: Apache-2.0
"""What one call costs when there is next to nothing to compute.

Usage: python benchmarks/overhead.py [--engines ...] [--peers-python PYTHON]

The graph is three operators on f32[1,16] (MatMul, Add, Sigmoid): a run is almost only binding
inputs, entering native code and handing out results. Prints the median microseconds of a call, per
engine.

Then what handing runs to a queue costs: 8 runs of a graph of about 1 ms, one after the other, with
`run_pipelined` (of a list, and of a generator), and with `run_async`, each as a ratio to the time in
compiled code alone (medians of ratios of neighbours in time). `bare queue` is the least that a hand-over
to another thread costs in Python.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

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


def pipelining(rounds: int = 200) -> list[list[str]]:
    """Return rows: how the runs were started, milliseconds per run, ratio to the compiled code alone."""
    import rlx

    random = np.random.default_rng(0)
    with rlx.Graph("products") as g:
        y = g.input("x", [72, 512])
        w = g.param("w", random.standard_normal((512, 512)).astype(np.float32) / 23)
        for _ in range(3):
            y = y @ w
        g.output("y", y)
    m = rlx.compile(g, threads=1)
    inputs = [random.standard_normal((72, 512)).astype(np.float32) for _ in range(8)]
    buffer = np.empty((72, 512), np.float32)
    m.warmup()
    compiled = m.program.compiled

    def alone() -> None:
        for x in inputs:
            compiled.run([x], [buffer], {})

    bare: SimpleQueue[tuple[np.ndarray, Lock]] = SimpleQueue()

    def serve() -> None:
        while True:
            x, done = bare.get()
            compiled.run([x], [buffer], {})
            done.release()

    Thread(target=serve, daemon=True).start()

    def hand_over() -> None:
        locks = [Lock() for _ in inputs]
        for x, lock in zip(inputs, locks, strict=True):
            lock.acquire()
            bare.put((x, lock))
        for lock in locks:
            lock.acquire()

    ways: dict[str, Callable[[], object]] = {
        "alone": alone,
        "bare queue": hand_over,
        "run": lambda: [m.run([x]) for x in inputs],
        "run_pipelined, list": lambda: m.run_pipelined([[x] for x in inputs]),
        "run_pipelined, generator": lambda: m.run_pipelined([x] for x in inputs),
        "run_async": lambda: [f.result() for f in [m.run_async([x]) for x in inputs]],
    }
    seconds = _interleaved(ways, rounds)
    rows: list[list[str]] = []
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds["alone"], strict=True)]
        median = statistics.median(found) / len(inputs) * 1e3
        rows.append([name, f"{median:.3f}", f"{statistics.median(ratios):.3f}"])
    return rows


def _interleaved(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every way in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return seconds


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
    print(common.markdown(["engine", "microseconds per call", "note"], rows) + "\n")
    print(common.markdown(["8 runs by", "ms per run", "ratio"], pipelining()))


if __name__ == "__main__":
    main()
