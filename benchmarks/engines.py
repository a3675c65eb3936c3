# SPDX-License-Identifier: Apache-2.0
"""One adapter per library: load a model, return a function that runs it once.

Each is asked for its best settings for repeated f32 inference on a fixed number of threads. A
worker process imports exactly one of the libraries, none of them before its adapter is called.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENGINES", "PACKAGES", "Unavailable", "library_version"]

Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
Run: TypeAlias = Callable[[], Arrays]
"""Runs the model once on the inputs it was built with."""


class Unavailable(Exception):  # noqa: N818  (a result, not a failure)
    """The library, or something it needs, is not installed; the message says what."""


def load_rlx(model: Path, inputs: Arrays, threads: int) -> Run:
    """Rlx, through its public API."""
    import rlx

    make = rlx.open if model.suffix == ".rlxp" else rlx.load
    program = make(model, threads=threads)
    return lambda: program.run(inputs)


def load_onnxruntime(model: Path, inputs: Arrays, threads: int) -> Run:
    """ONNX Runtime on its CPU provider, all graph optimisations (the default), no inter-op pool."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feed = dict(inputs)
    return lambda: dict(zip(names, session.run(names, feed), strict=True))


def load_openvino(model: Path, inputs: Arrays, threads: int) -> Run:
    """OpenVINO on CPU, latency hint, f32 (its default may be bf16), shapes as in the file."""
    return _openvino(model, inputs, threads, static=False)


def load_openvino_static(model: Path, inputs: Arrays, threads: int) -> Run:
    """OpenVINO after its model was reshaped to these inputs: it recompiles for every new shape."""
    return _openvino(model, inputs, threads, static=True)


def _openvino(model: Path, inputs: Arrays, threads: int, static: bool) -> Run:
    import openvino as ov

    core = ov.Core()
    graph = core.read_model(str(model))
    if static:
        graph.reshape({name: array.shape for name, array in inputs.items()})
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        # By default it quantises the activations of products with 8-bit weights, which is not f32
        # inference: its outputs for MiniLM with 8-bit weights are then off by 0.09, without by 3e-6.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
    }
    request = core.compile_model(graph, "CPU", settings).create_infer_request()
    count = len(graph.outputs)
    feed = dict(inputs)

    def run() -> Arrays:
        values = request.infer(feed, share_inputs=True, share_outputs=True)
        return {str(index): values[index] for index in range(count)}

    return run


def load_torch(model: Path, inputs: Arrays, threads: int) -> Run:
    """PyTorch eager on the hand-written module; `model` is the safetensors file."""
    return _torch(model, inputs, threads, compiled=False)


def load_torch_compile(model: Path, inputs: Arrays, threads: int) -> Run:
    """torch.compile (Inductor) on the same module, specialised to these shapes."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise Unavailable("torch.compile needs a C++ compiler and there is none")
    return _torch(model, inputs, threads, compiled=True)


def _torch(model: Path, inputs: Arrays, threads: int, compiled: bool) -> Run:
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    import minilm_torch

    module = minilm_torch.load(model)
    if compiled:
        module = torch.compile(module, dynamic=False)
    arguments = [torch.from_numpy(np.ascontiguousarray(a)) for a in inputs.values()]

    def run() -> Arrays:
        with torch.inference_mode():
            return {"last_hidden_state": module(*arguments).numpy()}

    return run


ENGINES: dict[str, Callable[[Path, Arrays, int], Run]] = {
    "rlx": load_rlx,
    "onnxruntime": load_onnxruntime,
    "openvino": load_openvino,
    "openvino_static": load_openvino_static,
    "torch": load_torch,
    "torch_compile": load_torch_compile,
}
PACKAGES = {"openvino_static": "openvino", "torch_compile": "torch"}
"""Package of an engine whose name differs from it."""


def library_version(engine: str) -> str:
    """Return the installed version of the engine's package."""
    return version(PACKAGES.get(engine, engine))
