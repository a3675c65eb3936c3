# SPDX-License-Identifier: Apache-2.0
"""Pooling against direct loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import ceildiv, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.pool import Pool
from rlx.ops.spec import building, emit_one


def _direct(x: Array, op: Pool) -> Array:
    rank = x.ndim - 2
    y = np.zeros((*x.shape[:2], *(int(d) for d in op.out)), np.float64)
    for n, c, *p in np.ndindex(*y.shape):
        values: list[float] = []
        count = 0
        for t in np.ndindex(*op.kernel):
            at = [
                p[a] * op.strides[a] + t[a] * op.dilations[a] - int(op.pads[a][0])
                for a in range(rank)
            ]
            if all(0 <= at[a] < x.shape[2 + a] for a in range(rank)):
                values.append(float(x[(n, c, *at)]))
            in_pads = (
                -int(op.pads[a][0]) <= at[a] < x.shape[2 + a] + int(op.pads[a][1])
                for a in range(rank)
            )
            count += all(in_pads)
        divisor = count if op.count_include_pad else len(values)
        y[(n, c, *p)] = np.max(values) if op.kind == "max" else sum(values) / divisor
    return y


def _normal(*shape: int) -> Array:
    return np.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), np.float32)


CASES = [
    ((2, 3, 7, 6), (2, 2), (2, 2), (1, 1), ((0, 0), (0, 0)), (3, 3)),
    ((1, 2, 7, 6), (3, 2), (1, 2), (1, 1), ((1, 1), (0, 1)), (7, 3)),
    ((1, 2, 7, 6), (3, 3), (2, 2), (1, 1), ((0, 0), (0, 0)), (3, 3)),
    ((1, 1, 9, 9), (2, 3), (1, 2), (3, 2), ((1, 2), (2, 1)), (9, 4)),
    ((1, 2, 10), (4,), (3,), (1,), ((2, 1),), (4,)),
    ((1, 2, 4, 5, 6), (2, 3, 2), (2, 1, 2), (1, 1, 2), ((0, 0), (1, 1), (1, 0)), (2, 5, 3)),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("include", [False, True])
def test_direct(case: Any, kind: Any, include: bool) -> None:
    shape, kernel, strides, dilations, pads, out = case
    x = _normal(*shape)
    op = Pool(kind, kernel, strides, dilations, pads, out, include)
    (got,) = run_op(op, [x])
    np.testing.assert_allclose(got, _direct(x, op), rtol=1e-6, atol=1e-6)
    last = replace(op, layout="nhwc")
    (moved,) = run_op(last, [np.ascontiguousarray(np.moveaxis(x, 1, -1))])
    np.testing.assert_array_equal(np.moveaxis(moved, -1, 1), got)


def test_padding_at_the_end_counts() -> None:
    # onnxruntime #24681: k 5 over 6 rows, same-lower padding, divided by 5 everywhere.
    x = np.arange(12, dtype=np.float32).reshape(1, 1, 6, 2)
    op = Pool("avg", (5, 1), (1, 1), (1, 1), ((2, 2), (0, 0)), (6, 2), True)
    wide = np.pad(x, ((0, 0), (0, 0), (2, 2), (0, 0)))
    want = np.stack([wide[:, :, i : i + 5].sum(axis=2) / 5 for i in range(6)], axis=2)
    np.testing.assert_allclose(run_op(op, [x])[0], want, rtol=1e-6)


@pytest.mark.parametrize("include", [False, True])
def test_ceil_mode_divisor(include: bool) -> None:
    # onnx #4958: what lies beyond the padding never counts.
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    op = Pool("avg", (3, 3), (2, 2), (1, 1), ((0, 0), (0, 0)), (2, 2), include)
    np.testing.assert_array_equal(run_op(op, [x])[0][0, 0], [[6, 7.5], [12, 13.5]])


def test_last_window_in_the_padding_is_dropped() -> None:
    # onnxruntime #15446: the extents of ceil mode that the importer gives leave no empty window ...
    x = _normal(1, 2, 3, 6, 5)
    pads = ((1, 1),) * 3
    op = Pool("max", (3, 3, 3), (3, 3, 3), (1, 1, 1), pads, (2, 3, 2))
    (got,) = run_op(op, [x])
    np.testing.assert_array_equal(got, _direct(x, op).astype(np.float32))
    # ... and one more is refused.
    with pytest.raises(TypeRuleError, match="window 3 of spatial axis 1 lies wholly outside"):
        Pool("max", (3, 3, 3), (3, 3, 3), (1, 1, 1), pads, (2, 4, 2)).infer(
            TensorType(DType.F32, x.shape)
        )


def test_nan_propagates_from_every_position() -> None:
    for at in range(4):
        x = np.zeros((1, 1, 4), np.float32)
        x[0, 0, at] = np.nan
        for kind in ("max", "avg"):
            (y,) = run_op(Pool(kind, (4,), (1,), (1,), ((0, 0),), (1,)), [x])
            assert np.isnan(y).all()


def test_maxima_of_negative_values_and_of_integers_ignore_the_padding() -> None:
    window: Any = ((3,), (1,), (1,), ((1, 1),), (3,))
    (y,) = run_op(Pool("max", *window), [np.array([[[-5.0, -7.0, -6.0]]], np.float32)])
    np.testing.assert_array_equal(y, [[[-5, -5, -6]]])
    (z,) = run_op(Pool("max", *window), [np.array([[[-128, -127, -128]]], np.int8)])
    np.testing.assert_array_equal(z, [[[-127, -127, -127]]])
    with pytest.raises(TypeRuleError, match="cast first"):
        Pool("avg", *window).infer(TensorType(DType.I8, (1, 1, 3)))


def test_half_averages_in_f32() -> None:
    x = np.full((1, 1, 2048), 40.0, np.float16)
    (y,) = run_op(Pool("avg", (2048,), (1,), (1,), ((0, 0),), (1,)), [x])
    assert y[0, 0, 0] == 40.0


def test_symbolic_extents() -> None:
    h = symbol("H")
    out = ceildiv(h - 2, 2) + 1
    op = Pool("max", (2,), (2,), (1,), ((0, 0),), (out,))
    graph = Graph("g")
    with building(Builder(graph.block, graph.facts)):
        y = emit_one(op, graph.add_input("x", TensorType(DType.F32, (1, 1, h))))
    graph.set_outputs({"y": y})
    for extent in (2, 3, 4):
        x = np.arange(extent, dtype=np.float32).reshape(1, 1, extent)
        want = [max(i, min(i + 1, extent - 1)) for i in range(0, extent, 2)]
        np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"][0, 0], want)


def test_an_empty_window_of_a_symbolic_extent_is_an_error_of_the_run() -> None:
    h = symbol("H")
    graph = Graph("g")
    with building(Builder(graph.block, graph.facts)):
        x = graph.add_input("x", TensorType(DType.F32, (1, 1, h)))
        y = emit_one(Pool("max", (2,), (2,), (1,), ((0, 0),), (3,)), x)
    graph.set_outputs({"y": y})
    with pytest.raises(ExecutionError, match="window 2"):
        evaluate(graph, {"x": np.zeros((1, 1, 4), np.float32)})
