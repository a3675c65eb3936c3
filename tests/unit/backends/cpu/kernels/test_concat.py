# SPDX-License-Identifier: Apache-2.0
"""Moves: joining, padding, repetition, transposes and slices are exact for every dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ir.op import Op
from rlx.ops.evaluate import evaluate
from rlx.ops.movement import Concat, Expand, Pad, PadMode, Slice, Tile, Transpose
from rlx.ops.spec import building

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_SIZES = (DType.BOOL, DType.F16, DType.F32, DType.I64, DType.C64, DType.C128)
_dtypes = pytest.mark.parametrize("dtype", _SIZES, ids=str)
Lower = Callable[[Graph, Isa], Any]


def _graph(op: Op, dtype: DType, shapes: Sequence[tuple[Dim, ...] | None]) -> Graph:
    """Return a graph of one operator; movement operators become the regions they declare."""
    graph = Graph()
    values: list[Value | None] = [
        None if s is None else graph.add_input(f"x{i}", TensorType(dtype, s))
        for i, s in enumerate(shapes)
    ]
    region_of = getattr(op, "region", None)
    builder = Builder(graph.block, graph.facts)
    with graph.facts.active(), building(builder):
        if region_of is not None:
            op = region_of(*(v.type for v in values if v is not None))
        results = builder.emit(op, *values)
    graph.set_outputs({"y": results[0]})
    return graph


def _check(lowered: Any, dtype: DType, shapes: Sequence[tuple[int, ...] | None]) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"x{i}": (rng.standard_normal(s) * 50).astype(dtype.numpy)
        for i, s in enumerate(shapes)
        if s is not None
    }
    want = evaluate(lowered.graph, arrays)["y"]
    found = lowered.run(arrays)["y"]
    assert found.shape == want.shape
    assert found.tobytes() == np.ascontiguousarray(want).tobytes()


def _exact(lower: Lower, isa: Isa, op: Op, dtype: DType, *shapes: tuple[int, ...] | None) -> None:
    _check(lower(_graph(op, dtype, shapes), isa), dtype, shapes)


@_isas
@_dtypes
def test_concat(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    _exact(lower_graph, isa, Concat(1), dtype, (3, 4), (3, 5), (3, 0))
    _exact(lower_graph, isa, Concat(0), dtype, (3, 4), (2, 4))
    _exact(lower_graph, isa, Concat(-1), dtype, (300, 40), (300, 33), (300, 1))
    _exact(lower_graph, isa, Concat(1), dtype, (2, 3, 4), (2, 1, 4))


@_isas
@_dtypes
def test_tile_and_expand(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    _exact(lower_graph, isa, Tile((2, 3)), dtype, (3, 7))
    _exact(lower_graph, isa, Tile((1, 0)), dtype, (3, 7))
    _exact(lower_graph, isa, Expand((4, 5, 33)), dtype, (5, 1))
    _exact(lower_graph, isa, Expand((4, 5, 33)), dtype, (33,))


_PERMUTATIONS = [
    ((5, 7), (1, 0)),
    ((33, 50), (1, 0)),
    ((16, 32), (1, 0)),
    ((3, 40, 50), (0, 2, 1)),
    ((20, 3, 33), (2, 0, 1)),
    ((1, 3, 20, 30), (0, 2, 3, 1)),
    ((2, 20, 30, 3), (0, 3, 1, 2)),
    ((2, 20, 30, 40), (0, 2, 1, 3)),
    ((1, 0, 5), (2, 1, 0)),
    ((9, 10, 11, 12), (3, 2, 1, 0)),
]


@_isas
@_dtypes
def test_transposes(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    for shape, perm in _PERMUTATIONS:
        _exact(lower_graph, isa, Transpose(perm), dtype, shape)


@_isas
@_dtypes
def test_slices_with_steps(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    _exact(lower_graph, isa, Slice((3, 39), (4, 20), (2, -2)), dtype, (20, 40))
    _exact(lower_graph, isa, Slice((0, 5), (20, 0), (1, 1)), dtype, (20, 40))


@_isas
@_dtypes
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad(mode: Any, dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    _exact(lower_graph, isa, Pad((1, 2, 3), (2, 0, 1), mode), dtype, (5, 4, 6), None)
    _exact(lower_graph, isa, Pad((0, 0, 1, 1), (0, 0, 1, 1), mode), dtype, (2, 3, 20, 40), None)
    if mode == "constant":
        _exact(lower_graph, isa, Pad((0, 2), (5, 0), mode), dtype, (0, 3), ())
        _exact(lower_graph, isa, Pad((0, 2), (5, 1), mode), dtype, (4, 33), ())


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
def test_padding_that_would_read_outside_fails(mode: PadMode, lower_graph: Lower) -> None:
    s = symbol("s", lower=0)
    lowered = lower_graph(_graph(Pad((0, 2), (0, 1), mode), DType.F32, [(3, s), None]), _HOST)
    least = {"edge": 1, "reflect": 3, "wrap": 2}[mode]
    for extent in (least, least + 1, 40):
        _check(lowered, DType.F32, [(3, extent), None])
    with pytest.raises(AssertionError):  # the harness finds the recorded failure
        lowered.run({"x0": np.zeros((3, least - 1), np.float32)})


@_isas
def test_symbolic_extents_on_one_compile(isa: Isa, lower_graph: Lower) -> None:
    s = symbol("s")
    joined = lower_graph(_graph(Concat(1), DType.F32, [(3, s), (3, s * 2)]), isa)
    turned = lower_graph(_graph(Transpose((0, 2, 1)), DType.F32, [(3, s, 20)]), isa)
    padded = lower_graph(_graph(Pad((0, s), (1, 0), "constant"), DType.F32, [(3, s), None]), isa)
    for n in (1, 3, 50):
        _check(joined, DType.F32, [(3, n), (3, 2 * n)])
        _check(turned, DType.F32, [(3, n, 20)])
        _check(padded, DType.F32, [(3, n), None])
