# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter: negative indices, duplicates, every reduction, indices out of range."""

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
from rlx.base.errors import ExecutionError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.elementwise import mul
from rlx.ops.evaluate import evaluate
from rlx.ops.indexing import (
    Gather,
    GatherElements,
    GatherND,
    ScatterElements,
    ScatterND,
    gather,
    gather_elements,
    gather_nd,
    scatter_elements,
    scatter_nd,
)
from rlx.ops.movement import reshape

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_DTYPES = (DType.F32, DType.F64, DType.F16, DType.I8, DType.I64, DType.BOOL)
_REDUCTIONS = ("none", "add", "mul", "max", "min")
Lower = Callable[[Graph, Isa], Any]
Shape = tuple[int, ...]


def _graph(op: Op, types: Sequence[TensorType]) -> Graph:
    graph = Graph()
    values = [graph.add_input(f"x{i}", t) for i, t in enumerate(types)]
    with graph.facts.active():
        (result,) = Builder(graph.block, graph.facts).emit(op, *values)
    graph.set_outputs({"y": result})
    return graph


def _types(arrays: Sequence[Array]) -> list[TensorType]:
    return [TensorType(DType.of(a.dtype), a.shape) for a in arrays]


def _exact(lower: Lower, isa: Isa, op: Op, *arrays: Array) -> None:
    lowered = lower(_graph(op, _types(arrays)), isa)
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    want, got = evaluate(lowered.graph, inputs)["y"], lowered.run(inputs)["y"]
    assert got.shape == want.shape
    assert got.tobytes() == np.ascontiguousarray(want).tobytes()


def _data(dtype: DType, *shape: int) -> Array:
    whole = np.random.default_rng(0).integers(-9, 10, shape)
    return (whole > 0 if dtype is DType.BOOL else whole).astype(dtype.numpy)


def _indices(limit: int, *shape: int, dtype: Any = np.int64) -> Array:
    return np.random.default_rng(1).integers(-limit, limit, shape).astype(dtype)


@_isas
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("index", [np.int64, np.int32, np.int16])
def test_gather(dtype: DType, index: Any, isa: Isa, lower_graph: Lower) -> None:
    cases: list[tuple[Shape, int, Shape]] = [
        ((9, 17), 0, (2, 3)),
        ((4, 5, 3), 1, (7,)),
        ((2, 3, 40), 2, (5,)),
        ((300, 5), 0, ()),
        ((4, 5), 1, (0,)),
        ((0, 5), 1, (3,)),
    ]
    for shape, axis, picked in cases:
        indices = _indices(shape[axis], *picked, dtype=index)
        _exact(lower_graph, isa, Gather(axis), _data(dtype, *shape), indices)


@_isas
def test_gather_of_symbolic_extents(isa: Isa, lower_graph: Lower) -> None:
    n, m = symbol("n", lower=0), symbol("m", lower=0)
    shapes: tuple[tuple[Dim, ...], tuple[Dim, ...]] = ((n, 6), (m,))
    types = [TensorType(d, s) for d, s in zip((DType.F32, DType.I64), shapes, strict=True)]
    lowered = lower_graph(_graph(Gather(0), types), isa)
    for rows, count in ((1, 1), (50, 4000), (3, 0), (0, 0)):
        x, indices = _data(DType.F32, rows, 6), _indices(max(rows, 1), count)
        got = lowered.run({"x0": x, "x1": indices})["y"]
        assert got.tobytes() == x[indices].tobytes()


@_isas
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_gather_elements_and_nd(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    x = _data(dtype, 4, 5, 3)
    _exact(lower_graph, isa, GatherElements(1), x, _indices(5, 4, 7, 3))
    _exact(lower_graph, isa, GatherElements(0), x, _indices(4, 2, 3, 2))
    _exact(lower_graph, isa, GatherElements(2), x, _indices(3, 4, 5, 0))
    _exact(lower_graph, isa, GatherND(), x, _indices(4, 6, 2))
    _exact(lower_graph, isa, GatherND(), x, _indices(3, 6, 3))
    _exact(lower_graph, isa, GatherND(1), x, _indices(5, 4, 6, 1))
    _exact(lower_graph, isa, GatherND(), x, _indices(4, 2, 0))


@_isas
@pytest.mark.parametrize("index", [np.uint8, np.uint64, np.int8])
def test_indices_of_any_integer_dtype(index: Any, isa: Isa, lower_graph: Lower) -> None:
    x, picked = _data(DType.F32, 4, 5), np.array([[3, 0], [1, 1], [2, 3]], index)
    _exact(lower_graph, isa, GatherElements(1), x, picked)
    _exact(lower_graph, isa, GatherND(), x, picked)
    _exact(lower_graph, isa, ScatterElements(1, "add"), x, picked, _data(DType.F32, 3, 2))
    _exact(lower_graph, isa, ScatterND(), x, picked, _data(DType.F32, 3))


@_isas
@pytest.mark.parametrize("reduction", _REDUCTIONS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.I8, DType.U8, DType.I64], ids=str)
def test_scatter(dtype: DType, reduction: str, isa: Isa, lower_graph: Lower) -> None:
    """Several updates meet in one element: order decides, and whole numbers sum exactly."""
    x = _data(dtype, 4, 5)
    elements = ScatterElements(1, reduction)
    _exact(lower_graph, isa, elements, x, _indices(5, 3, 9), _data(dtype, 3, 9))
    elements = ScatterElements(0, reduction)
    _exact(lower_graph, isa, elements, x, _indices(4, 11, 2), _data(dtype, 11, 2))
    _exact(lower_graph, isa, elements, x, _indices(4, 0, 2), _data(dtype, 0, 2))
    block = ScatterND(reduction)
    _exact(lower_graph, isa, block, x, _indices(4, 9, 1), _data(dtype, 9, 5))
    _exact(lower_graph, isa, block, x, _indices(4, 3, 5, 2), _data(dtype, 3, 5))
    _exact(lower_graph, isa, block, x, _indices(4, 3, 0), _data(dtype, 3, 4, 5))


@_isas
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_nan_wins_in_scatter(reduction: str, isa: Isa, lower_graph: Lower) -> None:
    x = np.array([np.nan, 1, 2, 3], np.float32)
    updates = np.array([5, np.nan, 7, -1], np.float32)
    lowered = lower_graph(
        _graph(ScatterElements(0, reduction), _types([x, np.arange(4), updates])), isa
    )
    got = lowered.run({"x0": x, "x1": np.arange(4), "x2": updates})["y"]
    want = {"max": [np.nan, np.nan, 7, 3], "min": [np.nan, np.nan, 2, -1]}[reduction]
    np.testing.assert_array_equal(got, np.array(want, np.float32))


_WRONG = [5, -6, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("index", [*_WRONG, 2**62, -(2**63)])
@pytest.mark.parametrize("kind", ["gather", "elements", "nd", "scatter_elements", "scatter_nd"])
def test_an_index_out_of_range_names_the_node(kind: str, index: int) -> None:
    with rlx.Graph() as g:
        x = g.input("x", [5])
        i = g.input("i", [3], "i64")
        updates = g.input("u", [3])
        g.output("u2", mul(updates, updates))
        results = {
            "gather": lambda: gather(x, i),
            "elements": lambda: gather_elements(x, i),
            "nd": lambda: gather_nd(x, reshape(i, (3, 1))),
            "scatter_elements": lambda: scatter_elements(x, i, updates, reduction="add"),
            "scatter_nd": lambda: scatter_nd(x, reshape(i, (3, 1)), updates),
        }
        g.output("y", results[kind]())
    model = rlx.compile(g)
    arrays = {"x": np.arange(5, dtype=np.float32), "u": np.ones(3, np.float32)}
    with pytest.raises(ExecutionError, match="index out of range") as error:
        model.run({**arrays, "i": np.array([4, index, -5])})
    assert "test_indexing.py" in str(error.value)
    assert "1" in str(error.value)
    assert model.run({**arrays, "i": np.array([4, -1, -5])})["y"].dtype == np.float32


@pytest.mark.parametrize("index", _WRONG)
def test_narrow_indices_are_checked_too(index: int) -> None:
    with rlx.Graph() as g:
        g.output("y", gather(g.input("x", [5]), g.input("i", [3], "i32")))
    model = rlx.compile(g)
    with pytest.raises(ExecutionError, match="index out of range"):
        model.run({"x": np.zeros(5, np.float32), "i": np.array([0, index, 0], np.int32)})


def test_nothing_can_be_taken_from_nothing() -> None:
    with rlx.Graph() as g:
        g.output("y", gather(g.input("x", ["n"]), g.input("i", [3], "i64")))
    model = rlx.compile(g)
    with pytest.raises(ExecutionError, match="index out of range"):
        model.run({"x": np.zeros(0, np.float32), "i": np.zeros(3, np.int64)})
