# SPDX-License-Identifier: Apache-2.0
"""rlx compiles and runs machine-learning models.

`rlx.load(path)` gives an object that runs an ONNX model; `rlx.Graph` builds a graph by hand and `rlx.compile` compiles
it. See the guide in `docs/`.
"""

from __future__ import annotations

from rlx._version import __version__
from rlx.api.graph import Graph
from rlx.api.io import Device, compile, devices, load  # noqa: A004  (rlx.compile, as in re.compile)
from rlx.base.errors import (
    CompileError,
    DeviceError,
    ExecutionError,
    ModelError,
    ParseError,
    RlxError,
    TypeRuleError,
    UnsupportedOpError,
    UsageError,
)
from rlx.runtime.executable import Executable

__all__ = [
    "CompileError",
    "Device",
    "DeviceError",
    "ExecutionError",
    "Executable",
    "Graph",
    "ModelError",
    "ParseError",
    "RlxError",
    "TypeRuleError",
    "UnsupportedOpError",
    "UsageError",
    "__version__",
    "compile",
    "devices",
    "load",
]
