# SPDX-License-Identifier: Apache-2.0
"""Attention: masks, causal, grouped heads, index maps, rows without keys."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.attention import Attention
from rlx.ops.evaluate import evaluate
from rlx.testing.tolerances import Tolerance

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
Lower = Callable[[Graph, Isa], Any]
Shape = tuple[int, ...]
_TOLERANCE = 2.0**-24 * 64
"""Relative to the largest |v|: rounding of scores, exponentials and sums of up to 100 keys."""
_ = Tolerance
