# SPDX-License-Identifier: Apache-2.0
"""rlx compiles and runs machine-learning models.

`rlx.load(path)` gives an object that runs an ONNX model; `rlx.Graph` builds a graph by hand and `rlx.compile` compiles
it. See the guide in `docs/`.

Importing this package costs little: the compiler is imported by the first use of a name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx._version import __version__
from rlx.base.errors import (
    CompileError,
    DeviceError,
    ExecutionError,
    ModelError,
    OutOfMemoryError,
    ParseError,
    RlxError,
    TypeRuleError,
    UnsupportedOpError,
    UsageError,
)

if TYPE_CHECKING:
    from rlx.api.custom import op
    from rlx.api.graph import Graph
    from rlx.api.io import Device, compile, devices, load  # noqa: A004  (rlx.compile, as in re.compile)
    from rlx.api.package import open  # noqa: A004  (as in gzip.open)
    from rlx.api.quantize import calibrate, quantize
    from rlx.base.dlpack import dlpack
    from rlx.base.dtypes import DType
    from rlx.base.precision import PrecisionPolicy
    from rlx.base.rng import RngPolicy
    from rlx.base.types import TensorType
    from rlx.quantization.calibration import Calibration
    from rlx.runtime.bind import RowFeed
    from rlx.runtime.executable import Executable

__all__ = [
    "Calibration",
    "CompileError",
    "DType",
    "Device",
    "DeviceError",
    "Executable",
    "ExecutionError",
    "Graph",
    "ModelError",
    "OutOfMemoryError",
    "ParseError",
    "PrecisionPolicy",
    "RlxError",
    "RngPolicy",
    "RowFeed",
    "TensorType",
    "TypeRuleError",
    "UnsupportedOpError",
    "UsageError",
    "__version__",
    "calibrate",
    "compile",
    "devices",
    "dlpack",
    "load",
    "op",
    "open",
    "quantize",
]

_LAZY = {
    "Calibration": "rlx.quantization.calibration",
    "calibrate": "rlx.api.quantize",
    "quantize": "rlx.api.quantize",
    "DType": "rlx.base.dtypes",
    "Device": "rlx.api.io",
    "Executable": "rlx.runtime.executable",
    "Graph": "rlx.api.graph",
    "RngPolicy": "rlx.base.rng",
    "RowFeed": "rlx.runtime.bind",
    "PrecisionPolicy": "rlx.base.precision",
    "TensorType": "rlx.base.types",
    "compile": "rlx.api.io",
    "devices": "rlx.api.io",
    "dlpack": "rlx.base.dlpack",
    "load": "rlx.api.io",
    "op": "rlx.api.custom",
    "open": "rlx.api.package",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlx' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
