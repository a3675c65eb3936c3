# SPDX-License-Identifier: Apache-2.0
"""One engine, one process: what `rlx bench` starts.

Usage: python -m rlx.cli.bench_worker ENGINE MODEL INPUTS.npz OUTPUTS.npz THREADS SECONDS

Prints one line of JSON: the engine's version and the milliseconds of every run.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlx.base.errors import UsageError
from rlx.cli.arrays import read_arrays, write_arrays

__all__: list[str] = []

_WARM_UP_SECONDS = 1.0
_LEAST_RUNS = 10
_Run = Callable[[], dict[str, Any]]


def _rlx(model: str, inputs: dict[str, Any], threads: int) -> tuple[str, _Run]:
    import rlx

    loaded = rlx.load(model, threads=threads)
    return rlx.__version__, lambda: loaded.run(inputs)


def _onnxruntime(model: str, inputs: dict[str, Any], threads: int) -> tuple[str, _Run]:
    engine: Any = _engine("onnxruntime")
    options = engine.SessionOptions()
    options.intra_op_num_threads = threads
    session = engine.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return engine.__version__, lambda: dict(zip(names, session.run(None, inputs), strict=True))


def _openvino(model: str, inputs: dict[str, Any], threads: int) -> tuple[str, _Run]:
    engine: Any = _engine("openvino")
    core = engine.Core()
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(core.read_model(model), "CPU", settings)
    request = compiled.create_infer_request()

    def run() -> dict[str, Any]:
        results = request.infer(inputs)
        return {port.get_any_name(): results[port] for port in compiled.outputs}

    return engine.__version__.split("-")[0], run


def _engine(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed here: pip install {name}") from error


def _main() -> None:
    engine, model, job, output, threads, seconds = sys.argv[1:]
    inputs = read_arrays(Path(job))
    make = {"rlx": _rlx, "onnxruntime": _onnxruntime, "openvino": _openvino}[engine]
    version, run = make(model, inputs, int(threads))
    results = run()
    write_arrays(Path(output), results)
    _timed(run, _WARM_UP_SECONDS)
    sys.stdout.write(json.dumps({"version": version, "ms": _timed(run, float(seconds))}) + "\n")


def _timed(run: _Run, seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < _LEAST_RUNS:
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return times


if __name__ == "__main__":
    _main()
