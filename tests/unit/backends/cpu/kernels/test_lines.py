# SPDX-License-Identifier: Apache-2.0
"""CumSum and ArgReduce along any axis, Range, extents as data: equal to the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.evaluate import evaluate
from rlx.ops.leaf import DimTensor
from rlx.ops.movement import Range
from rlx.ops.reduce import ArgReduce, CumSum, arg_max

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_DTYPES = (DType.F32, DType.F64, DType.F16, DType.BF16, DType.I8, DType.U8, DType.I64, DType.U64)
_dtypes = pytest.mark.parametrize("dtype", _DTYPES, ids=str)
_SHAPES = [
    ((3, 17), 1),
    ((3, 4, 2), 1),
    ((5, 40), 0),
    ((2, 3, 100), 2),
    ((4, 1), 1),
    ((2, 0, 3), 2),
    ((1, 300, 33), 1),
]
Lower = Callable[[Graph, Isa], Any]


def _graph(op: Op, dtype: DType, shapes: Sequence[tuple[Dim, ...]]) -> Graph:
    graph = Graph()
    values = [graph.add_input(f"x{i}", TensorType(dtype, s)) for i, s in enumerate(shapes)]
    used = [] if isinstance(op, DimTensor) else values
    with graph.facts.active():
        (result,) = Builder(graph.block, graph.facts).emit(op, *used)
    graph.set_outputs({"y": result})
    return graph


def _exact(lower: Lower, isa: Isa, op: Op, *arrays: Array) -> None:
    lowered = lower(_graph(op, DType.of(arrays[0].dtype), [a.shape for a in arrays]), isa)
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    want = evaluate(lowered.graph, inputs)["y"]
    assert lowered.run(inputs)["y"].tobytes() == np.ascontiguousarray(want).tobytes()


def _numbers(dtype: DType, shape: Sequence[int]) -> Array:
    """Return numbers with many ties."""
    return np.round(np.random.default_rng(0).standard_normal(shape) * 3).astype(dtype.numpy)


@_isas
@_dtypes
def test_cumsum(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    for shape, axis in _SHAPES:
        for flags in range(4):
            op = CumSum(axis, exclusive=bool(flags & 1), reverse=bool(flags & 2))
            _exact(lower_graph, isa, op, _numbers(dtype, shape))


@_isas
@_dtypes
def test_arg_reduce_with_ties_and_nan(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    for shape, axis in _SHAPES:
        numbers = _numbers(dtype, shape)
        if dtype.is_float and numbers.size:
            numbers.reshape(-1)[::7] = np.nan
            numbers.reshape(-1)[::11] = -np.inf
        for flags in range(4):
            op = ArgReduce("max" if flags & 1 else "min", axis, select_last=bool(flags & 2))
            _exact(lower_graph, isa, op, numbers)


@_isas
@_dtypes
def test_range(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    start, delta = np.array(3, dtype.numpy), np.array(2, dtype.numpy)
    for size in (0, 1, 17, 100):
        _exact(lower_graph, isa, Range(size), start, delta)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_an_empty_axis_is_an_error_that_names_the_node(device: str) -> None:
    with rlx.Graph() as g:
        x = g.ir.add_input("x", TensorType(DType.F32, (2, symbol("n", lower=0))))
        g.output("y", arg_max(x, 1))
    with rlx.compile(g, device, host_ops="error") as m:
        assert m(np.array([[1, 3], [5, 4]], np.float32)).tolist() == [[1], [0]]
        with pytest.raises(rlx.ExecutionError, match="arg_reduce"):
            m(np.zeros((2, 0), np.float32))


@_isas
@pytest.mark.parametrize("dtype", [DType.I64, DType.I32, DType.F32, DType.F16], ids=str)
def test_extents_as_data(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    s = symbol("s")
    dims: tuple[Dim, ...] = (s, s * 2 + 1, 5, s, s, s, s, s, s * s, 3)
    lowered = lower_graph(_graph(DimTensor(dims, (2, 5), dtype), DType.F32, [(s,)]), isa)
    for n in (1, 7):
        want = np.array([[n, 2 * n + 1, 5, n, n], [n, n, n, n * n, 3]], dtype.numpy)
        assert lowered.run({"x0": np.zeros(n, np.float32)})["y"].tobytes() == want.tobytes()
