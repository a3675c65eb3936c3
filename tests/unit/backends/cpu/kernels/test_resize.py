# SPDX-License-Identifier: Apache-2.0
"""Interpolation against its NumPy meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import Shape, TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate
from rlx.ops.resize import Resize

Lower = Callable[[Graph, Isa], Any]


def _isas() -> list[Isa]:
    host = host_isa()
    return [host, host.restricted("v3")] if host.name == "v4" else [host]


ISAS = pytest.mark.parametrize("isa", _isas(), ids=lambda isa: isa.name)
COORDINATES = (
    "half_pixel",
    "asymmetric",
    "align_corners",
    "pytorch_half_pixel",
    "half_pixel_symmetric",
)
ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
SHAPES: list[tuple[Shape, Shape, tuple[float | None, ...] | None]] = [
    ((2, 5, 7, 24), (2, 10, 14, 24), None),
    ((2, 5, 7, 19), (2, 3, 9, 19), (1.0, 0.6, 1.3, 1.0)),
    ((2, 3, 20), (2, 3, 51), (1.0, 1.0, 2.55)),
    ((2, 3, 5, 6), (2, 3, 4, 13), None),
    ((1, 3, 4, 5, 6), (1, 6, 3, 7, 6), None),
    ((3, 4, 5), (6, 4, 3), None),
    ((2, 4, 1), (2, 1, 1), None),
    ((0, 3, 4), (0, 5, 4), None),
]


def _graph(dtype: DType, shape: Shape, op: Resize) -> Graph:
    graph = Graph()
    builder = Builder(graph.block, graph.facts)
    graph.set_outputs({"y": builder.emit_one(op, graph.add_input("x", TensorType(dtype, shape)))})
    return graph


def _data(shape: Shape, dtype: DType) -> Array:
    x = np.random.default_rng(2).standard_normal([int(d) for d in shape]) * 40
    return (np.abs(x) if dtype is DType.U8 else x).astype(dtype.numpy)


def _check(dtype: DType, shape: Shape, op: Resize, isa: Isa, lower: Lower) -> None:
    graph = _graph(dtype, shape, op)
    x = _data(shape, dtype)
    y = lower(graph, isa).run({"x": x})["y"]
    expected = evaluate(graph, {"x": x})["y"]
    if op.mode == "nearest" or dtype.is_integer:
        np.testing.assert_array_equal(y, expected)
    else:
        tolerance = {DType.F32: 1e-6, DType.F64: 1e-14, DType.F16: 1e-3, DType.BF16: 8e-3}[dtype]
        np.testing.assert_allclose(
            y.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=40 * tolerance
        )


@pytest.mark.parametrize("coordinate", COORDINATES)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_interpolates(shapes: Any, coordinate: Any, lower_graph: Lower) -> None:
    shape, sizes, scales = shapes
    given = scales or (None,) * len(sizes)
    for mode, outside in (("linear", False), ("linear", True), ("cubic", False), ("cubic", True)):
        op = Resize(sizes, given, mode, coordinate, "floor", -0.6, outside)  # pyright: ignore[reportArgumentType]
        _check(DType.F32, shape, op, host_isa(), lower_graph)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_takes_the_nearest(shapes: Any, rounding: Any, lower_graph: Lower) -> None:
    shape, sizes, scales = shapes
    for coordinate in COORDINATES:
        op = Resize(sizes, scales or (None,) * len(sizes), "nearest", coordinate, rounding)
        _check(DType.F32, shape, op, host_isa(), lower_graph)


@ISAS
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    "dtype", [DType.F16, DType.BF16, DType.F64, DType.I8, DType.U8, DType.I32, DType.I64], ids=str
)
def test_dtypes(dtype: DType, mode: Any, isa: Isa, lower_graph: Lower) -> None:
    _check(dtype, (2, 5, 7, 24), Resize((2, 9, 14, 24), (None,) * 4, mode), isa, lower_graph)
    _check(dtype, (2, 5, 7), Resize((2, 9, 14), (None,) * 3, mode), isa, lower_graph)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_symbolic_extents(mode: Any, lower_graph: Lower) -> None:
    n, h, w = symbol("N"), symbol("H"), symbol("W")
    op = Resize((n, h * 2, 7, 24), (None, 2.0, None, None), mode)
    graph = _graph(DType.F32, (n, h, w, 24), op)
    lowered = lower_graph(graph, host_isa())
    for extents in ((1, 1, 1), (2, 5, 9), (0, 3, 3)):
        x = _data((*extents, 24), DType.F32)
        expected = evaluate(graph, {"x": x})["y"]
        np.testing.assert_allclose(lowered.run({"x": x})["y"], expected, rtol=1e-6, atol=1e-5)
