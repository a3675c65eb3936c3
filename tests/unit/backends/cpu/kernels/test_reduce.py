# SPDX-License-Identifier: Apache-2.0
"""Reductions and softmax over axes that are not the last ones."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.evaluate import evaluate
from rlx.ops.norm import LogSoftmax, Softmax
from rlx.ops.reduce import Reduce

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_N, _M = symbol("n", lower=0), symbol("m", lower=0)
_SHAPES: list[tuple[Dim, ...]] = [(_N, 3, _M), (_N, _M, 5)]
Lower = Callable[[Graph, Isa], Any]


def _graph(op: Op, dtype: DType, shape: tuple[Dim, ...]) -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(dtype, shape))
    with graph.facts.active():
        (result,) = Builder(graph.block, graph.facts).emit(op, x)
    graph.set_outputs({"y": result})
    return graph


def _check(lowered: Any, n: int, m: int) -> None:
    graph: Graph = lowered.graph
    (x,) = graph.inputs
    sizes = {"n": n, "m": m}
    shape = [sizes.get(str(d), d) for d in x.type.shape]
    values = np.random.default_rng(n * 7 + m).uniform(-2, 2, shape)
    array = (values * (1 if x.type.dtype.is_float else 20)).astype(x.type.dtype.numpy)
    want = evaluate(graph, {"x": array}, exact=True)["y"]
    found = lowered.run({"x": array})["y"]
    if x.type.dtype.is_float:
        np.testing.assert_allclose(found, want.astype(np.float64), rtol=4e-6, atol=4e-6)
    else:
        np.testing.assert_array_equal(found, want)


@_isas
@pytest.mark.parametrize("kind", ["sum", "max", "sumsq", "logsumexp", "l2"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1)], ids=str)
def test_reductions(kind: str, axes: tuple[int, ...], isa: Isa, lower_graph: Lower) -> None:
    for shape in _SHAPES:
        for keepdims in (True, False):
            lowered = lower_graph(_graph(Reduce(kind, axes, keepdims), DType.F32, shape), isa)
            for n, m in ((1, 1), (2, 19), (33, 4), (5, 70)):
                _check(lowered, n, m)


@pytest.mark.parametrize("dtype", [DType.I32, DType.U8, DType.I64], ids=str)
def test_integers(dtype: DType, lower_graph: Lower) -> None:
    for kind in ("sum", "max", "prod"):
        lowered = lower_graph(_graph(Reduce(kind, (1,), True), dtype, _SHAPES[0]), _HOST)
        for n, m in ((1, 1), (2, 37), (0, 3)):
            _check(lowered, n, m)


def test_mean_over_static_axes(lower_graph: Lower) -> None:
    lowered = lower_graph(_graph(Reduce("mean", (1,), False), DType.F32, _SHAPES[0]), _HOST)
    for n, m in ((1, 1), (2, 37)):
        _check(lowered, n, m)


@_isas
@pytest.mark.parametrize("kind", [Softmax, LogSoftmax])
def test_softmax(kind: type[Softmax | LogSoftmax], isa: Isa, lower_graph: Lower) -> None:
    for axis in (0, 1):
        for shape in _SHAPES:
            lowered = lower_graph(_graph(kind(axis), DType.F32, shape), isa)
            for n, m in ((1, 1), (2, 19), (33, 4)):
                _check(lowered, n, m)
