# SPDX-License-Identifier: Apache-2.0
"""The k greatest and least along any axis: equal to the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import NUMERIC, DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate
from rlx.ops.reduce import TopK, top_k

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_largest = pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
_DTYPES = sorted(NUMERIC, key=str)
Lower = Callable[[Graph, Isa], Any]


def _graph(op: TopK, dtype: DType, shape: tuple[Dim, ...]) -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(dtype, shape))
    with graph.facts.active():
        values, indices = Builder(graph.block, graph.facts).emit(op, x)
    graph.set_outputs({"values": values, "indices": indices})
    return graph


def _same(lowered: Any, given: Array | dict[str, Array]) -> None:
    inputs = given if isinstance(given, dict) else {"x": given}
    got, want = lowered.run(inputs), evaluate(lowered.graph, inputs)
    for name in ("values", "indices"):
        assert got[name].tobytes() == np.ascontiguousarray(want[name]).tobytes(), name


def _numbers(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Return numbers with many ties; of integers also the ends of the range, of floats all that is special."""
    rng = np.random.default_rng(0)
    x = np.round(rng.standard_normal(shape) * 3).astype(dtype.numpy)
    flat = x.reshape(-1)
    if not flat.size:
        return x
    if dtype.is_integer:
        info = np.iinfo(dtype.numpy)
        flat[::5], flat[::7] = info.max, info.min
    else:
        flat[::5], flat[::7], flat[::11], flat[::13] = np.nan, -np.inf, -0.0, -np.nan
        flat[3::17] = 1e-45 if dtype is DType.F32 else 0.0
    return x


@_isas
@_largest
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_dtypes_and_axes(dtype: DType, largest: bool, isa: Isa, lower_graph: Lower) -> None:
    for shape, axis, k in (((3, 70), 1, 9), ((3, 70), -1, 70), ((2, 40, 5), 1, 7)):
        op = TopK(k, axis, largest, sorted=axis < 0)
        _same(lower_graph(_graph(op, dtype, shape), isa), _numbers(dtype, shape))


@_isas
def test_small_and_empty_extents(isa: Isa, lower_graph: Lower) -> None:
    for shape, axis, k in (
        ((1, 1), 1, 1),
        ((3, 5), 0, 2),
        ((2, 0, 3), 1, 0),
        ((2, 4, 3), 1, 0),
        ((0, 4), 1, 3),
        ((130,), 0, 128),
    ):
        op = TopK(k, axis)
        _same(lower_graph(_graph(op, DType.F32, shape), isa), _numbers(DType.F32, shape))


@_isas
@_largest
@pytest.mark.parametrize("kind", ["ascending", "descending", "equal", "random", "sawtooth"])
def test_orders_of_the_data(kind: str, largest: bool, isa: Isa, lower_graph: Lower) -> None:
    n = 1000
    x = {
        "ascending": np.arange(n),
        "descending": np.arange(n)[::-1],
        "equal": np.zeros(n),
        "random": np.random.default_rng(1).standard_normal(n),
        "sawtooth": np.arange(n) % 37,
    }[kind].astype(np.float32)
    for k in (1, 17, 500, 1000):
        _same(lower_graph(_graph(TopK(k, 0, largest), DType.F32, (n,)), isa), x)


@_isas
def test_zeros_of_both_signs_are_equal_and_keep_their_sign(isa: Isa, lower_graph: Lower) -> None:
    x = np.array([-0.0, 0.0, -1.0, 0.0, -0.0], np.float32)
    got = lower_graph(_graph(TopK(4, 0), DType.F32, (5,)), isa).run({"x": x})
    assert got["indices"].tolist() == [0, 1, 3, 4]
    assert np.signbit(got["values"]).tolist() == [True, False, False, True]


@_isas
def test_a_nan_keeps_its_bits(isa: Isa, lower_graph: Lower) -> None:
    bits = np.array([0x7FC00001, 0x3F800000, 0xFFC12345, 0x7F800000], np.uint32)
    lowered = lower_graph(_graph(TopK(4, 0), DType.F32, (4,)), isa)
    got = lowered.run({"x": bits.view(np.float32)})
    assert got["indices"].tolist() == [0, 2, 3, 1]
    assert got["values"].view(np.uint32).tolist() == bits[[0, 2, 3, 1]].tolist()


@_isas
def test_symbolic_extents(isa: Isa, lower_graph: Lower) -> None:
    n, k, m = symbol("n"), symbol("k", lower=0), symbol("m")
    graph = _graph(TopK(k, 1), DType.F32, (2, n, m))
    graph.add_input("like", TensorType(DType.F32, (k,)))  # gives k its value
    lowered = lower_graph(graph, isa)
    for count, *extents in ((3, 3, 1), (5, 70, 5), (0, 9, 40)):
        like = np.zeros(count, np.float32)
        _same(lowered, {"x": _numbers(DType.F32, (2, *extents)), "like": like})


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_more_than_there_are_is_an_error(device: str) -> None:
    with rlx.Graph() as g:
        values, indices = top_k(g.input("x", [2, "N"]), 5)
        g.output("values", values)
        g.output("indices", indices)
    with rlx.compile(g, device, host_ops="error") as m:
        m.run({"x": np.zeros((2, 5), np.float32)})
        with pytest.raises(rlx.ExecutionError, match="top_k"):
            m.run({"x": np.zeros((2, 4), np.float32)})
