# SPDX-License-Identifier: Apache-2.0
"""Convolutions against direct loops."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import floordiv, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.spec import building, emit_one


def _direct_conv(x: Array, w: Array, b: Array | None, op: Conv) -> Array:
    groups, per_group = op.groups, w.shape[1]
    filters = w.shape[0]
    rank = x.ndim - 2
    out = [
        (x.shape[2 + a] + sum(op.pads[a]) - op.dilations[a] * (w.shape[2 + a] - 1) - 1)
        // op.strides[a]
        + 1
        for a in range(rank)
    ]
    y = np.zeros((x.shape[0], filters, *(int(o) for o in out)), np.float64)
    for n, o, *p in np.ndindex(*y.shape):
        total = 0.0 if b is None else float(b[o])
        first = (o // (filters // groups)) * per_group
        for c, *t in np.ndindex(*w.shape[1:]):
            at = [
                p[a] * op.strides[a] + t[a] * op.dilations[a] - op.pads[a][0] for a in range(rank)
            ]
            if all(0 <= at[a] < x.shape[2 + a] for a in range(rank)):
                total += float(x[(n, first + c, *at)]) * float(w[(o, c, *t)])
        y[(n, o, *p)] = total
    return y


def _direct_transpose(x: Array, w: Array, b: Array | None, op: ConvTranspose) -> Array:
    rank, groups, per_group = x.ndim - 2, op.groups, w.shape[1]
    full = [
        op.strides[a] * (x.shape[2 + a] - 1)
        + op.dilations[a] * (w.shape[2 + a] - 1)
        + 1
        + op.output_padding[a]
        - int(op.pads[a][0])
        - int(op.pads[a][1])
        for a in range(rank)
    ]
    y = np.zeros((x.shape[0], per_group * groups, *full), np.float64)
    if b is not None:
        y += b.reshape(-1, *[1] * rank)
    for n, c, *i in np.ndindex(*x.shape):
        group = c // (x.shape[1] // groups)
        for o, *t in np.ndindex(*w.shape[1:]):
            at = [
                i[a] * op.strides[a] + t[a] * op.dilations[a] - int(op.pads[a][0])
                for a in range(rank)
            ]
            if all(0 <= at[a] < full[a] for a in range(rank)):
                y[(n, group * per_group + o, *at)] += float(x[(n, c, *i)]) * float(w[(c, o, *t)])
    return y


def _normal(*shape: int) -> Array:
    return np.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), np.float32)


GRID = list(
    product(((1, 1), (2, 3)), ((1, 1), (2, 1)), ([(0, 0), (0, 0)], [(2, 1), (0, 3)]), (1, 2, 4))
)


@pytest.mark.parametrize(("strides", "dilations", "pads", "groups"), GRID)
def test_conv_2d(strides: Any, dilations: Any, pads: Any, groups: int) -> None:
    op = Conv(strides, dilations, tuple(pads), groups)
    x, w, b = _normal(2, 4, 7, 6), _normal(4, 4 // groups, 3, 2), _normal(4)
    (got,) = run_op(op, [x, w, b])
    np.testing.assert_allclose(got, _direct_conv(x, w, b, op), rtol=1e-5, atol=1e-5)
    last = Conv(strides, dilations, tuple(pads), groups, "nhwc")
    (moved,) = run_op(last, [np.ascontiguousarray(np.moveaxis(x, 1, -1)), w, b])
    np.testing.assert_array_equal(np.moveaxis(moved, -1, 1), got)


def test_conv_1d_and_3d() -> None:
    line = Conv((2,), (3,), ((1, 4),), 1)
    x, w = _normal(2, 3, 11), _normal(5, 3, 3)
    np.testing.assert_allclose(
        run_op(line, [x, w, None])[0], _direct_conv(x, w, None, line), rtol=1e-5, atol=1e-5
    )
    cube = Conv((1, 2, 1), (1, 1, 2), ((0, 1), (1, 0), (0, 0)), 2)
    x, w, b = _normal(1, 2, 3, 4, 5), _normal(4, 1, 2, 3, 2), _normal(4)
    np.testing.assert_allclose(
        run_op(cube, [x, w, b])[0], _direct_conv(x, w, b, cube), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("strides", "dilations", "pads", "groups"), GRID)
def test_conv_transpose_2d(strides: Any, dilations: Any, pads: Any, groups: int) -> None:
    extra = tuple(s - 1 for s in strides)
    op = ConvTranspose(strides, dilations, tuple(pads), extra, groups)
    x, w, b = _normal(2, 4, 4, 5), _normal(4, 3, 3, 2), _normal(3 * groups)
    (got,) = run_op(op, [x, w, b])
    np.testing.assert_allclose(got, _direct_transpose(x, w, b, op), rtol=1e-5, atol=1e-5)


def test_unfolding_in_slabs_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Conv((2, 1), (2, 1), ((1, 2), (1, 1)), 2)
    x, w = _normal(2, 4, 19, 7), _normal(6, 2, 3, 3)
    (whole,) = run_op(op, [x, w, None])
    monkeypatch.setattr("rlx.ops.conv._UNFOLD_LIMIT", 600)
    np.testing.assert_allclose(run_op(op, [x, w, None])[0], whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4"])
def test_integers_wrap(dtype: str) -> None:
    rng = np.random.default_rng(3)
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, (1, 2, 5), dtype=dtype)
    w = rng.integers(info.min, info.max, (2, 2, 3), dtype=dtype)
    (got,) = run_op(Conv((1,), (1,), ((1, 1),)), [x, w, None])
    padded = np.pad(x.astype(object), ((0, 0), (0, 0), (1, 1)))
    for o, p in np.ndindex(2, 5):
        total = (padded[0, :, p : p + 3] * w[o].astype(object)).sum()
        assert int(got[0, o, p]) % 2**info.bits == total % 2**info.bits


def test_output_padding() -> None:
    # onnxruntime #11927: one more row and column, and they are part of the sum.
    op = ConvTranspose((2, 2), (1, 1), ((1, 1), (1, 1)), (1, 1))
    (y,) = run_op(op, [np.ones((1, 2, 3, 3), "f4"), np.ones((2, 1, 3, 3), "f4"), None])
    assert y.shape == (1, 1, 6, 6)
    np.testing.assert_array_equal(y[0, 0, 0], [2, 4, 2, 4, 2, 2])


def test_extents_are_expressions() -> None:
    n, h = symbol("N"), symbol("H")
    x, w = TensorType(DType.F32, (n, 3, h, 20)), TensorType(DType.F32, (8, 3, 3, 3))
    found = Conv((2, 2), (1, 1), ((1, 1), (1, 1))).infer(x, w)
    assert found.shape == (n, 8, floordiv(h - 1, 2) + 1, 10)
    back = ConvTranspose((2, 2), (1, 1), ((0, 0), (0, 0)), (0, 0))
    assert back.infer(x, TensorType(DType.F32, (3, 5, 2, 2))).shape == (n, 5, 2 * h, 40)


@pytest.mark.parametrize("kernel", [2, 3])
def test_transpose_decomposes_with_symbols(kernel: int) -> None:
    h = symbol("H")
    op = ConvTranspose((2,), (1,), ((0, kernel - 2),), (0,), 2)
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.F32, (1, 4, h)))
    w = graph.add_input("w", TensorType(DType.F32, (4, 3, kernel)))
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": op.decompose(x, w), "z": emit_one(op, x, w, None)})
    assert graph.outputs[0].type == graph.outputs[1].type
    for extent in (1, 2, 5):
        given = {"x": _normal(1, 4, extent), "w": _normal(4, 3, kernel)}
        found = evaluate(graph, given)
        np.testing.assert_allclose(found["y"], found["z"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "x", "w", "message"),
    [
        (Conv((1,), (1,), ((0, 0),)), (1, 2, 3), (1, 2, 5), "extent -1"),
        (Conv((1,), (1,), ((0, 0),)), (1, 3, 9), (1, 2, 5), "channels"),
        (Conv((1,), (1,), ((0, 0),), 2), (1, 4, 9), (3, 2, 5), "groups"),
        (Conv((1, 1), (1,), ((0, 0),)), (1, 4, 9), (3, 4, 5), "strides"),
        (Conv((0,), (1,), ((0, 0),)), (1, 4, 9), (3, 4, 5), "at least 1"),
        (Conv((1,), (1,), ((-1, 0),)), (1, 4, 9), (3, 4, 5), "negative"),
        (ConvTranspose((1,), (1,), ((3, 3),), (0,)), (1, 2, 3), (2, 1, 3), "extent -1"),
    ],
)
def test_refusals(op: Any, x: Any, w: Any, message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        op.infer(TensorType(DType.F32, x), TensorType(DType.F32, w))


def test_symbolic_kernel_is_refused() -> None:
    w = TensorType(DType.F32, (1, 2, symbol("K")))
    with pytest.raises(TypeRuleError, match="static"):
        Conv((1,), (1,), ((0, 0),)).infer(TensorType(DType.F32, (1, 2, 9)), w)
