# SPDX-License-Identifier: Apache-2.0
"""Attention against direct loops; masks, alignment, rows without keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.attention import Attention, attention
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.spec import building


def _normal(*shape: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed + sum(shape))
    return np.asarray(rng.standard_normal(shape), np.float32)


def _decomposed(op: Attention, arrays: list[Array | None]) -> Array:
    """Return what the operator's decomposition computes."""
    graph = Graph("g")
    given = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    with building(Builder(graph.block, graph.facts)):
        values = [
            graph.add_input(n, TensorType(DType.of(a.dtype), a.shape)) for n, a in given.items()
        ]
        graph.set_outputs({"y": op.decompose(*values)})
    return evaluate(graph, given)["y"]


def _direct(q: Array, k: Array, v: Array, mask: Array | None, op: Attention) -> Array:
    b, h, s, _ = q.shape
    hk, t = k.shape[1:3]
    y = np.zeros((b, h, s, v.shape[3]))
    offset = {"none": t, "upper_left": 0, "bottom_right": t - s}[op.causal]
    full = None if mask is None else np.broadcast_to(mask, (b, h, s, t))
    for n, i, r in np.ndindex(b, h, s):
        g = i // (h // hk)
        scores: dict[int, float] = {}
        for c in range(t):
            if c > r + offset:
                continue
            score = float(q[n, i, r].astype(float) @ k[n, g, c].astype(float)) * op.scale
            if op.softcap:
                score = op.softcap * math.tanh(score / op.softcap)
            if full is not None and full.dtype == np.bool_:
                if not full[n, i, r, c]:
                    continue
            elif full is not None:
                score += float(full[n, i, r, c])
            if score != -math.inf:
                scores[c] = score
        if not scores:
            y[n, i, r] = 0.0 if op.masked_row == "zeros" else math.nan
            continue
        top = max(scores.values())
        weights = {c: math.exp(x - top) for c, x in scores.items()}
        total = sum(weights.values())
        y[n, i, r] = sum(w / total * v[n, g, c].astype(float) for c, w in weights.items())
    return y


@pytest.mark.parametrize("causal", ["none", "upper_left", "bottom_right"])
@pytest.mark.parametrize("mask", [None, "bool", "float", "rows"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("masked_row", ["zeros", "nan"])
def test_direct(causal: Any, mask: str | None, heads: tuple[int, int], masked_row: Any) -> None:
    h, hk = heads
    q, k, v = _normal(2, h, 5, 8), _normal(2, hk, 4, 8), _normal(2, hk, 4, 3)
    rng = np.random.default_rng(4)
    given: Array | None = None
    if mask == "bool":
        given = rng.random((2, 1, 5, 4)) > 0.5
    elif mask == "float":
        given = np.where(rng.random((5, 4)) > 0.4, _normal(5, 4), -np.inf).astype(np.float32)
    elif mask == "rows":
        given = np.array([True, True, False, True])
    op = Attention(0.35, masked_row, causal, 1.5 if mask is None else 0.0)
    (got,) = run_op(op, [q, k, v, given])
    np.testing.assert_allclose(got, _direct(q, k, v, given, op), rtol=1e-4, atol=1e-5)


def test_nan_in_a_masked_key_does_not_reach_the_row() -> None:
    # pytorch #101967: promised for boolean masks, not for additive ones.
    q = np.ones((1, 1, 1, 2), np.float32)
    k = np.array([[[[1, 2], [np.nan, np.nan]]]], np.float32)
    v = np.array([[[[1, 2], [3, 4]]]], np.float32)
    keep = np.array([[True, False]])
    np.testing.assert_array_equal(run_op(Attention(1.0), [q, k, v, keep])[0].reshape(-1), [1, 2])
    added = np.array([[0.0, -np.inf]], np.float32)
    assert np.isnan(run_op(Attention(1.0), [q, k, v, added])[0]).all()


def test_causal_alignment() -> None:
    # onnxruntime #29020: one query, four keys.
    q, k = np.ones((1, 1, 1, 2), np.float32), _normal(1, 1, 4, 2)
    v = np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1)
    (upper,) = run_op(Attention(1.0, causal="upper_left"), [q, k, v, None])
    assert upper.item() == 0.0
    (lower,) = run_op(Attention(1.0, causal="bottom_right"), [q, k, v, None])
    (full,) = run_op(Attention(1.0), [q, k, v, None])
    np.testing.assert_array_equal(lower, full)


@pytest.mark.parametrize("keys", [1, 127, 128])
def test_fully_masked_rows(keys: int) -> None:
    q, k, v = _normal(1, 1, 2, 4), _normal(1, 1, keys, 4), _normal(1, 1, keys, 4)
    hidden = np.zeros((1, keys), np.bool_)
    assert np.isnan(run_op(Attention(1.0), [q, k, v, hidden])[0]).all()
    assert (run_op(Attention(1.0, "zeros"), [q, k, v, hidden])[0] == 0).all()


@pytest.mark.parametrize("masked_row", ["nan", "zeros", "nan_to_zeros"])
@pytest.mark.parametrize("causal", ["none", "upper_left", "bottom_right"])
@pytest.mark.parametrize("mask", [None, np.bool_, np.float32])
def test_without_keys_rows_are_sums_of_nothing(masked_row: Any, causal: Any, mask: Any) -> None:
    op = Attention(0.35, masked_row, causal)
    q, k, v = _normal(1, 2, 3, 4), _normal(1, 1, 0, 4), _normal(1, 1, 0, 5)
    given = None if mask is None else np.zeros((3, 0), mask)
    want = np.zeros((1, 2, 3, 5), np.float32)
    np.testing.assert_array_equal(run_op(op, [q, k, v, given])[0], want)
    np.testing.assert_array_equal(_decomposed(op, [q, k, v, given]), want)


def test_finite_masks_are_numbers() -> None:
    q, k, v = _normal(1, 1, 1, 4), _normal(1, 1, 3, 4), _normal(1, 1, 3, 4)
    low = np.full((1, 3), np.finfo(np.float32).min, np.float32)
    (y,) = run_op(Attention(0.0), [q, k, v, low])
    np.testing.assert_allclose(y[0, 0, 0], v[0, 0].mean(axis=0), rtol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 1, 1), 1e4, np.float32)
    k = np.array([[[[1e4], [-1e4]]]], np.float32)
    v = np.array([[[[1.0], [2.0]]]], np.float32)
    assert run_op(Attention(1.0), [q, k, v, None])[0].item() == 1.0


def test_half_is_rounded_once() -> None:
    q, k, v = (_normal(1, 2, 3, 8, seed=i).astype(np.float16) for i in range(3))
    (y,) = run_op(Attention(0.35), [q, k, v, None])
    want = _direct(q, k, v, None, Attention(0.35))
    np.testing.assert_allclose(y.astype(float), want, rtol=6e-4, atol=1e-6)


def test_maps_read_other_layouts() -> None:
    q, k, v = _normal(2, 3, 4, 8), _normal(2, 3, 5, 8), _normal(2, 3, 5, 6)
    (want,) = run_op(Attention(0.35), [q, k, v, None])
    # One tensor [B, S, 3 slots, H, D] holds q; k is [T, B, H, D] reversed along its positions.
    packed = np.stack([q.transpose(0, 2, 1, 3)] * 3, axis=2)
    q_map = IndexMap(4, (AxisMap(0), AxisMap(2), AxisMap(None, 1), AxisMap(1), AxisMap(3)))
    turned = np.ascontiguousarray(k.transpose(2, 0, 1, 3)[::-1])
    k_map = IndexMap(4, (AxisMap(2, 4, -1), AxisMap(0), AxisMap(1), AxisMap(3)))
    v_map = IndexMap(4, tuple(AxisMap(i) for i in range(4)))
    op = Attention(0.35, shape=(2, 3, 4, 5, 8, 6), maps=(q_map, k_map, v_map), out_layout="bshd")
    (got,) = run_op(op, [packed, turned, v, None])
    np.testing.assert_allclose(got, want.transpose(0, 2, 1, 3), rtol=1e-6)
    np.testing.assert_allclose(_decomposed(op, [packed, turned, v]), got, rtol=1e-5, atol=1e-6)


def test_symbolic_lengths() -> None:
    s, t = symbol("S"), symbol("T")
    graph = Graph("g")
    with building(Builder(graph.block, graph.facts)):
        q = graph.add_input("q", TensorType(DType.F32, (1, 4, s, 8)))
        k = graph.add_input("k", TensorType(DType.F32, (1, 2, t, 8)))
        v = graph.add_input("v", TensorType(DType.F32, (1, 2, t, 8)))
        y = attention(q, k, v, causal="bottom_right", masked_row="zeros")
        op = Attention(1 / math.sqrt(8), "zeros", "bottom_right")
        graph.set_outputs({"y": y, "z": op.decompose(q, k, v)})
    assert y.type.shape == (1, 4, s, 8)
    for queries, keys in ((1, 1), (3, 7), (5, 2)):
        given = {
            "q": _normal(1, 4, queries, 8),
            "k": _normal(1, 2, keys, 8),
            "v": _normal(1, 2, keys, 8),
        }
        found = evaluate(graph, given)
        want = _direct(given["q"], given["k"], given["v"], None, op)
        np.testing.assert_allclose(found["y"], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["z"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        (((1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)), {}, "multiple"),
        (((1, 2, 2, 4), (1, 2, 2, 5), (1, 2, 2, 4)), {}, "depth"),
        (((1, 2, 2, 4), (1, 2, 3, 4), (1, 2, 2, 4)), {}, "positions"),
        (((2, 2, 4), (2, 2, 4), (2, 2, 4)), {}, "rank 4"),
        (((1, 2, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)), {"causal": "left"}, "causal"),
        (((1, 2, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4), (2, 2)), {}, "broadcast"),
    ],
)
def test_refusals(shapes: Any, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        Attention(1.0, **attributes).infer(*(TensorType(DType.F32, s) for s in shapes))
