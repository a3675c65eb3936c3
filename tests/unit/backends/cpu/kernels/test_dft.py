# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms and framing on the CPU against their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx.backends.cpu.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport]
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.kernels.fft import buffer_points, factors
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.evaluate import evaluate
from rlx.ops.signal import DFT, STFT, Frame

Lower = Callable[[Graph, Isa], Any]
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_BOUND = {DType.F32: 4e-7, DType.F64: 1e-15}
"""Error relative to the largest number of a row, per stage and a little more."""


def _graph(op: Op, dtype: DType, shapes: list[tuple[Dim, ...]]) -> Graph:
    graph = Graph()
    values = [graph.add_input(f"x{i}", TensorType(dtype, s)) for i, s in enumerate(shapes)]
    with graph.facts.active():
        (result,) = Builder(graph.block, graph.facts).emit(op, *values)
    graph.set_outputs({"y": result})
    return graph


def _check(lowered: Any, *shapes: tuple[int, ...], exact: bool = False) -> None:
    rng = np.random.default_rng(0)
    graph: Graph = lowered.graph
    dtype = graph.inputs[0].type.dtype
    inputs = {f"x{i}": rng.standard_normal(s).astype(dtype.numpy) for i, s in enumerate(shapes)}
    want = evaluate(graph, inputs, exact=True)["y"].astype(np.float64)
    found = lowered.run(inputs)["y"]
    assert found.shape == want.shape
    if exact:
        assert found.tobytes() == want.astype(found.dtype).tobytes()
    elif want.size:
        error = np.abs(found - want).max() / max(float(np.abs(want).max()), 1e-30)
        assert error <= _BOUND[dtype]


@_isas
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 22, 30, 34, 64, 74, 105, 400])
@pytest.mark.parametrize("kind", ["real", "onesided", "complex", "inverse", "to_real"])
def test_dft(n: int, kind: str, isa: Isa, lower_graph: Lower) -> None:
    inverse, onesided = kind in ("inverse", "to_real"), kind in ("onesided", "to_real")
    components = 1 if kind in ("real", "onesided") else 2
    extent = n // 2 + 1 if kind == "to_real" else n
    op = DFT(1, inverse, onesided, n)
    lowered = lower_graph(
        _graph(op, DType.F32, [(symbol("rows", lower=0), extent, components)]), isa
    )
    for rows in (3, 17, 0):
        _check(lowered, (rows, extent, components))


@pytest.mark.parametrize("extent", [1, 4, 9, 20])
@pytest.mark.parametrize("kind", ["real", "complex", "to_real", "real_inverse"])
def test_rows_are_cut_or_padded(extent: int, kind: str, lower_graph: Lower) -> None:
    components = 1 if kind.startswith("real") else 2
    op = DFT(1, kind not in ("real", "complex"), kind == "to_real", 12)
    _check(
        lower_graph(_graph(op, DType.F64, [(5, extent, components)]), _HOST),
        (5, extent, components),
    )


def test_other_axes(lower_graph: Lower) -> None:
    for axis in (0, 1):
        op = DFT(axis, inverse=False, onesided=True, length=10)
        shape = (10, 4, 1) if axis == 0 else (3, 10, 7, 1)
        _check(lower_graph(_graph(op, DType.F32, [shape]), _HOST), shape)


def test_long_transforms(lower_graph: Lower) -> None:
    for n in (4096, 5000, 1021):
        op = DFT(1, inverse=False, onesided=False, length=n)
        _check(lower_graph(_graph(op, DType.F32, [(2, n, 2)]), _HOST), (2, n, 2))


@_isas
@pytest.mark.parametrize("dtype", [DType.F32, DType.F64], ids=str)
@pytest.mark.parametrize("length", [15, 16, 50])
@pytest.mark.parametrize("windowed", [False, True])
def test_stft(length: int, windowed: bool, dtype: DType, isa: Isa, lower_graph: Lower) -> None:
    samples = symbol("samples", lower=length)
    for tail, onesided in (((), True), ((1,), False), ((2,), False)):
        op = STFT(7, length, onesided)
        extra: list[tuple[Dim, ...]] = [(length,)] if windowed else []
        lowered = lower_graph(_graph(op, dtype, [(2, samples, *tail), *extra]), isa)
        for count in (length, length + 20, length + 140):
            _check(lowered, (2, count, *tail), *([(length,)] if windowed else []))


@_isas
def test_frame(isa: Isa, lower_graph: Lower) -> None:
    for dtype in (DType.F32, DType.F16, DType.I64):
        for length, step in ((8, 3), (4, 4), (3, 5), (20, 1)):
            shape: tuple[Dim, ...] = (2, symbol("samples", lower=20))
            lowered = lower_graph(_graph(Frame(length, step), dtype, [shape]), isa)
            for count in (20, 21, 67):
                _check(lowered, (2, count), exact=True)


def test_factors() -> None:
    assert factors(400) == [4, 4, 5, 5]
    assert factors(1) == []
    assert factors(17) is None
    assert buffer_points(400) == 400
    assert buffer_points(17) >= 33
