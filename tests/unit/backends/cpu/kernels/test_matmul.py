# SPDX-License-Identifier: Apache-2.0
"""Matrix products with run-time and packed right operands, batches and epilogues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.kernels.gemm_tiles import panel_width
from rlx.backends.cpu.ops import PackedMatMul, PackPanels
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.expr.body import Body, BodyBuilder
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.evaluate import evaluate
from rlx.ops.matmul import MatMul
from rlx.ops.region import WithEpilogue

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_dtypes = pytest.mark.parametrize("dtype", [DType.F32, DType.F64], ids=str)
_ROWS, _DEPTHS, _COLUMNS = (0, 1, 2, 5, 6, 7, 97), (0, 1, 5, 64), (1, 63, 64, 65, 130)
Lower = Callable[[Graph, Isa], Any]


def _graph(op: Op, dtype: DType, shapes: Sequence[tuple[Dim, ...]]) -> Graph:
    graph = Graph()
    values = [graph.add_input(f"x{i}", TensorType(dtype, s)) for i, s in enumerate(shapes)]
    with graph.facts.active():
        results = Builder(graph.block, graph.facts).emit(op, *values)
    graph.set_outputs({f"y{i}": r for i, r in enumerate(results)})
    return graph


def _whole(dtype: DType, *shape: int) -> Array:
    """Return small integers: their products and sums are exact in every order."""
    return np.random.default_rng(len(shape)).integers(-8, 9, shape).astype(dtype.numpy)


def _exact(lowered: Any, arrays: Sequence[Array]) -> None:
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    got, want = lowered.run(inputs), evaluate(lowered.graph, inputs)
    for name, array in want.items():
        assert got[name].shape == array.shape
        np.testing.assert_array_equal(got[name], array)


@_isas
@_dtypes
def test_every_tail(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    m, k, n = (symbol(name, lower=0) for name in "mkn")
    lowered = lower_graph(_graph(MatMul(), dtype, [(m, k), (k, n)]), isa)
    for rows in _ROWS:
        for depth in _DEPTHS:
            for columns in _COLUMNS:
                _exact(lowered, [_whole(dtype, rows, depth), _whole(dtype, depth, columns)])


@_isas
@_dtypes
def test_packed_weights(dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    m, width = symbol("m", lower=0), panel_width(isa, dtype)
    for depth, columns in ((0, 65), (1, 63), (5, 1), (5, 130), (64, 64), (64, 65)):
        panels = PackPanels(width).reference(_whole(dtype, depth, columns))
        op = PackedMatMul(columns)
        lowered = lower_graph(_graph(op, dtype, [(m, depth), panels.shape]), isa)
        for rows in _ROWS:
            _exact(lowered, [_whole(dtype, rows, depth), panels])


@_isas
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 7, 5), (3, 5, 33)),
        ((3, 7, 5), (5, 33)),
        ((7, 5), (3, 5, 33)),
        ((2, 1, 4, 6), (3, 6, 5)),
        ((2, 1, 1, 6), (1, 3, 6, 65)),
        ((4, 2, 0, 3), (4, 1, 3, 2)),
        ((0, 7, 5), (0, 5, 3)),
        ((2, 3, 4, 0), (3, 0, 5)),
    ],
)
def test_batches_broadcast(
    a: tuple[int, ...], b: tuple[int, ...], isa: Isa, lower_graph: Lower
) -> None:
    lowered = lower_graph(_graph(MatMul(), DType.F32, [a, b]), isa)
    _exact(lowered, [_whole(DType.F32, *a), _whole(DType.F32, *b)])


def _epilogue(dtype: DType, extras: int) -> Body:
    builder = BodyBuilder([dtype] * (1 + extras))
    value = builder.input(0)
    for i in range(extras):
        value = value * 2.0 + builder.input(1 + i)
    return builder.finish(builder.emit("max", value, builder.const(0, dtype)))


_EXTRAS: dict[str, Callable[[Dim, Dim], tuple[Dim, ...]]] = {
    "full": lambda m, n: (m, n),
    "row": lambda m, _: (m, 1),
    "column": lambda _, n: (n,),
    "column2": lambda _, n: (1, n),
    "one": lambda _, __: (),
    "one2": lambda _, __: (1, 1),
}


@_isas
@_dtypes
@pytest.mark.parametrize(
    "kinds", [["full"], ["row", "one2"], ["column"], ["column2", "full", "row", "one"]]
)
def test_epilogues(kinds: list[str], dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    op = WithEpilogue(MatMul(), 2, _epilogue(dtype, len(kinds)))

    def shapes(m: Dim, k: Dim, n: Dim) -> list[tuple[Dim, ...]]:
        return [(m, k), (k, n), *(_EXTRAS[kind](m, n) for kind in kinds)]

    # A row and a matrix with one row or column are told apart before the run.
    m, k, n = symbol("m", lower=2), symbol("k", lower=0), symbol("n", lower=2)
    lowered = lower_graph(_graph(op, dtype, shapes(m, k, n)), isa)
    for sizes in ((2, 64, 130), (7, 5, 63), (97, 3, 65), (6, 0, 64)):
        _exact(lowered, [_whole(dtype, *map(int, map(str, s))) for s in shapes(*sizes)])
    for sizes in ((1, 5, 65), (97, 3, 1)):
        fixed = lower_graph(_graph(op, dtype, shapes(*sizes)), isa)
        _exact(fixed, [_whole(dtype, *map(int, map(str, s))) for s in shapes(*sizes)])


@_isas
def test_epilogues_of_batches(isa: Isa, lower_graph: Lower) -> None:
    op = WithEpilogue(MatMul(), 2, _epilogue(DType.F32, 3))
    shapes = [(2, 3, 7, 5), (3, 5, 33), (33,), (2, 3, 7, 33), (2, 3, 7, 1)]
    lowered = lower_graph(_graph(op, DType.F32, shapes), isa)
    _exact(lowered, [_whole(DType.F32, *s) for s in shapes])


@_isas
def test_epilogues_may_change_the_dtype(isa: Isa, lower_graph: Lower) -> None:
    builder = BodyBuilder([DType.F32])
    op = WithEpilogue(MatMul(), 2, builder.finish(builder.input(0).cast(DType.F16)))
    shapes = [(7, 5), (5, 65)]
    lowered = lower_graph(_graph(op, DType.F32, shapes), isa)
    _exact(lowered, [_whole(DType.F32, *s) for s in shapes])


@_isas
def test_a_row_does_not_depend_on_how_many_there_are(isa: Isa, lower_graph: Lower) -> None:
    m = symbol("m", lower=0)
    lowered = lower_graph(_graph(MatMul(), DType.F32, [(m, 64), (64, 65)]), isa)
    chance = np.random.default_rng(0)
    a, b = (chance.standard_normal(s).astype(np.float32) for s in ((97, 64), (64, 65)))
    whole = lowered.run({"x0": a, "x1": b})["y0"]
    wide = a.astype(np.float64) @ b.astype(np.float64)
    bound = 64 * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b))
    assert (np.abs(whole - wide) <= bound).all()
    for rows in (1, 2, 5, 6, 7):
        part = lowered.run({"x0": a[:rows], "x1": b})["y0"]
        assert part.tobytes() == whole[:rows].tobytes()


@_isas
def test_nan_and_infinity_stay_in_their_rows_and_columns(isa: Isa, lower_graph: Lower) -> None:
    lowered = lower_graph(_graph(MatMul(), DType.F32, [(7, 5), (5, 65)]), isa)
    a, b = _whole(DType.F32, 7, 5), _whole(DType.F32, 5, 65)
    a[3, 2], b[1, 64] = np.nan, np.inf
    _exact(lowered, [a, b])
