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
from rlx.testing.tolerances import allowed_error, mismatch

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
Lower = Callable[[Graph, Isa], Any]
Shape = tuple[int, ...]


def _graph(op: Attention, shapes: list[tuple[Dim, ...]], mask: TensorType | None = None) -> Graph:
    graph = Graph()
    values = [
        graph.add_input(n, TensorType(DType.F32, s)) for n, s in zip("qkv", shapes, strict=True)
    ]
    extra = None if mask is None else graph.add_input("mask", mask)
    with graph.facts.active():
        (result,) = Builder(graph.block, graph.facts).emit(op, *values, extra)
    graph.set_outputs({"y": result})
    return graph


def _numbers(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _close(lowered: Any, arrays: dict[str, Array]) -> None:
    """Compare with the meaning in f64, within the bound of the operator's own derivation."""
    (node,) = lowered.graph.block.nodes()
    wide = [a if a.dtype == np.bool_ else a.astype(np.float64) for a in arrays.values()]
    operands = [*wide, *[None] * (4 - len(wide))]
    want = np.asarray(node.op.reference(*operands)).astype(np.float32)
    got = lowered.run(arrays)["y"]
    (allowed,) = allowed_error(node.op, operands, [want])
    assert not mismatch(got, want, allowed)


def _check(
    lower: Lower, isa: Isa, op: Attention, shapes: list[Shape], mask: Array | None = None
) -> None:
    kind = None if mask is None else TensorType(DType.of(mask.dtype), mask.shape)
    arrays = {n: _numbers(*s) for n, s in zip("qkv", shapes, strict=True)}
    lowered = lower(_graph(op, [tuple(s) for s in shapes], kind), isa)
    _close(lowered, arrays if mask is None else {**arrays, "mask": mask})


@_isas
def test_lengths(isa: Isa, lower_graph: Lower) -> None:
    s, t = symbol("s", lower=0), symbol("t", lower=0)
    op = Attention(0.35, masked_row="zeros")
    lowered = lower_graph(_graph(op, [(2, 3, s, 8), (2, 3, t, 8), (2, 3, t, 5)]), isa)
    for queries in (0, 1, 2, 5, 6, 7, 50):
        for keys in (0, 1, 5, 31, 32, 33, 64, 65, 97):
            shapes = ((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 5))
            _close(lowered, {n: _numbers(*x) for n, x in zip("qkv", shapes, strict=True)})


@_isas
@pytest.mark.parametrize(("depth", "value_depth"), [(1, 1), (16, 64), (65, 17)])
def test_depths(depth: int, value_depth: int, isa: Isa, lower_graph: Lower) -> None:
    shapes: list[Shape] = [(1, 2, 7, depth), (1, 2, 33, depth), (1, 2, 33, value_depth)]
    _check(lower_graph, isa, Attention(0.2), shapes)


@_isas
@pytest.mark.parametrize(
    "shape", [(2, 3, 7, 33), (2, 1, 7, 33), (2, 1, 1, 33), (1, 3, 7, 1), (33,), ()]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(shape: Shape, kind: str, isa: Isa, lower_graph: Lower) -> None:
    shapes: list[Shape] = [(2, 3, 7, 8), (2, 3, 33, 8), (2, 3, 33, 8)]
    mask = np.asarray(_numbers(*shape), np.float32)
    if kind == "bool":
        mask = np.asarray(mask > -0.5)
    _check(lower_graph, isa, Attention(0.35, masked_row="zeros"), shapes, mask)


@_isas
@pytest.mark.parametrize("causal", ["upper_left", "bottom_right"])
@pytest.mark.parametrize("masked_row", ["nan", "zeros", "nan_to_zeros"])
def test_causal(causal: Any, masked_row: Any, isa: Isa, lower_graph: Lower) -> None:
    s, t = symbol("s"), symbol("t")
    op = Attention(0.35, masked_row, causal)
    lowered = lower_graph(_graph(op, [(1, 2, s, 8), (1, 2, t, 8), (1, 2, t, 8)]), isa)
    for queries, keys in ((1, 1), (7, 7), (5, 33), (33, 5), (50, 65)):
        shapes = ((1, 2, queries, 8), (1, 2, keys, 8), (1, 2, keys, 8))
        _close(lowered, {n: _numbers(*x) for n, x in zip("qkv", shapes, strict=True)})


@_isas
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1)])
def test_grouped_heads(heads: int, kv_heads: int, isa: Isa, lower_graph: Lower) -> None:
    shapes: list[Shape] = [(2, heads, 7, 8), (2, kv_heads, 9, 8), (2, kv_heads, 9, 4)]
    _check(lower_graph, isa, Attention(0.35), shapes)
    op = Attention(0.35, causal="bottom_right", out_layout="bshd")
    _check(lower_graph, isa, op, shapes)


@_isas
def test_softcap(isa: Isa, lower_graph: Lower) -> None:
    shapes: list[Shape] = [(1, 2, 7, 8), (1, 2, 33, 8), (1, 2, 33, 8)]
    _check(lower_graph, isa, Attention(3.0, softcap=2.0), shapes)


@_isas
@pytest.mark.parametrize("masked_row", ["nan", "zeros", "nan_to_zeros"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_keys(masked_row: Any, kind: str, isa: Isa, lower_graph: Lower) -> None:
    shapes: list[Shape] = [(1, 2, 8, 8), (1, 2, 33, 8), (1, 2, 33, 8)]
    keep = np.ones((8, 33), np.bool_)
    keep[[0, 5, 7]] = False
    mask = keep if kind == "bool" else np.where(keep, 0, -np.inf).astype(np.float32)
    _check(lower_graph, isa, Attention(0.35, masked_row), shapes, mask)


@_isas
@pytest.mark.parametrize("masked_row", ["nan", "zeros", "nan_to_zeros"])
@pytest.mark.parametrize("causal", ["none", "upper_left", "bottom_right"])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_without_keys_every_row_is_zero(
    masked_row: Any, causal: Any, kind: str, isa: Isa, lower_graph: Lower
) -> None:
    op = Attention(0.35, masked_row, causal)
    shapes: list[Shape] = [(1, 2, 7, 8), (1, 2, 0, 8), (1, 2, 0, 5)]
    mask = (
        None if kind == "none" else np.zeros((1, 1, 7, 0), bool if kind == "bool" else np.float32)
    )
    kinds = None if mask is None else TensorType(DType.of(mask.dtype), mask.shape)
    lowered = lower_graph(_graph(op, [tuple(s) for s in shapes], kinds), isa)
    arrays = {n: _numbers(*s) for n, s in zip("qkv", shapes, strict=True)}
    got = lowered.run(arrays if mask is None else {**arrays, "mask": mask})["y"]
    assert got.tobytes() == np.zeros((1, 2, 7, 5), np.float32).tobytes()


@_isas
@pytest.mark.parametrize("shape", [(0, 2, 7, 8), (1, 0, 7, 8), (1, 2, 0, 8)])
def test_without_queries_nothing_is_computed(shape: Shape, isa: Isa, lower_graph: Lower) -> None:
    keys = (shape[0], shape[1], 9, 8)
    for causal in ("none", "upper_left", "bottom_right"):
        _check(lower_graph, isa, Attention(0.35, causal=causal), [shape, keys, keys])


@_isas
def test_hidden_nan_keys_do_not_reach_the_probabilities(isa: Isa, lower_graph: Lower) -> None:
    op = Attention(0.35)
    arrays = {n: _numbers(1, 1, 9, 8) for n in "qkv"}
    arrays["k"][0, 0, 4] = np.nan
    keep = np.ones(9, np.bool_)
    keep[4] = False
    kind = TensorType(DType.BOOL, (9,))
    lowered = lower_graph(_graph(op, [(1, 1, 9, 8)] * 3, kind), isa)
    _close(lowered, {**arrays, "mask": keep})
    assert np.isfinite(lowered.run({**arrays, "mask": keep})["y"]).all()
    shown = lowered.run({**arrays, "mask": np.ones(9, np.bool_)})["y"]
    assert np.isnan(shown).all()


@_isas
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_packed_operands_are_read_through_maps(layout: Any, isa: Isa, lower_graph: Lower) -> None:
    """One tensor [B, S, 3, H, D] holds q, k and v."""
    batch, heads, length, depth = 2, 3, 7, 8

    def part(index: int) -> IndexMap:
        return IndexMap(4, (AxisMap(0), AxisMap(2), AxisMap(None, index), AxisMap(1), AxisMap(3)))

    maps = tuple(part(i) for i in range(3))
    extents = (batch, heads, length, length, depth, depth)
    op = Attention(0.35, shape=extents, maps=maps, out_layout=layout)
    packed = _numbers(batch, length, 3, heads, depth)
    lowered = lower_graph(_graph(op, [packed.shape] * 3), isa)
    _close(lowered, {"q": packed, "k": packed, "v": packed})
    q, k, v = (np.ascontiguousarray(packed[:, :, i].transpose(0, 2, 1, 3)) for i in range(3))
    plain = lower_graph(_graph(Attention(0.35, out_layout=layout), [q.shape] * 3), isa)
    got = lowered.run({"q": packed, "k": packed, "v": packed})["y"]
    assert got.tobytes() == plain.run({"q": q, "k": k, "v": v})["y"].tobytes()


@_isas
def test_a_row_does_not_depend_on_the_others(isa: Isa, lower_graph: Lower) -> None:
    s = symbol("s")
    lowered = lower_graph(
        _graph(Attention(0.35), [(1, 1, s, 8), (1, 1, 33, 8), (1, 1, 33, 8)]), isa
    )
    q, k, v = _numbers(1, 1, 97, 8), _numbers(1, 1, 33, 8), _numbers(1, 1, 33, 8)
    whole = lowered.run({"q": q, "k": k, "v": v})["y"]
    for rows in (1, 2, 5, 6, 7, 49):
        part = lowered.run({"q": np.ascontiguousarray(q[:, :, :rows]), "k": k, "v": v})["y"]
        assert part.tobytes() == whole[:, :, :rows].tobytes()
