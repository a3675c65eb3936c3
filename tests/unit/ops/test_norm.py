# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LogSoftmax, RmsNorm, Softmax
from rlx.ops.spec import building

INF = math.inf
RNG = np.random.default_rng(3)


def run(op: Any, *arrays: Any) -> Any:
    (result,) = run_op(op, arrays)
    return result


def decomposed(op: Any, types: list[TensorType | None], arrays: list[Any]) -> Any:
    graph = Graph()
    values = [None if t is None else graph.add_input(f"x{i}", t) for i, t in enumerate(types)]
    with building(Builder(graph.block, graph.facts)):
        result = op.decompose(*values)
    assert result is not None
    graph.set_outputs({"y": result})
    return evaluate(graph, {f"x{i}": a for i, a in enumerate(arrays) if a is not None})["y"]


def softmax(x: Any, axis: int) -> Any:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_softmax_along_any_axis(axis: int) -> None:
    x = RNG.standard_normal((3, 4, 5))
    np.testing.assert_allclose(run(Softmax(axis), x), softmax(x, axis), rtol=1e-13)
    np.testing.assert_allclose(run(LogSoftmax(axis), x), np.log(softmax(x, axis)), rtol=1e-12)
    if axis in (0, 1):
        types: list[TensorType | None] = [TensorType(DType.F64, (symbol("N"), 4, 5))]
        np.testing.assert_allclose(
            decomposed(Softmax(axis), types, [x]), softmax(x, axis), rtol=1e-13
        )


def test_softmax_never_overflows() -> None:
    x = np.array([[1e4, 1e4, -1e4], [3e38, -3e38, 0]], np.float32)
    np.testing.assert_allclose(run(Softmax(1), x), [[0.5, 0.5, 0], [1, 0, 0]])
    log2 = math.log(2)
    np.testing.assert_allclose(run(LogSoftmax(1), x[:1]), [[-log2, -log2, -2e4 - log2]], rtol=1e-6)
    pair = run(LogSoftmax(0), np.array([1e8, 1e8], np.float32))
    np.testing.assert_allclose(pair, [-0.6931472] * 2, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 1000])
def test_softmax_of_minus_infinity_alone_is_nan(length: int) -> None:
    assert np.isnan(run(Softmax(0), np.full(length, -INF, np.float32))).all()


def test_softmax_with_some_minus_infinity() -> None:
    np.testing.assert_array_equal(
        run(Softmax(0), np.array([-INF, 0, 0], np.float32)), [0, 0.5, 0.5]
    )


def test_softmax_over_flattened_axes() -> None:
    x = (np.arange(12, dtype=np.float32) / 10).reshape(1, 12)
    assert run(Softmax(1), x).sum() == pytest.approx(1, rel=1e-6)


def test_layer_norm_far_from_zero() -> None:
    x = np.array([[40000, 40001, 40002, 40003]], np.float32)
    found = run(LayerNorm(-1, 1e-5), x, None, None)
    np.testing.assert_allclose(found, [[-1.3416355, -0.4472118, 0.4472118, 1.3416355]], rtol=1e-6)
    y = run(
        LayerNorm(-1, 1e-5), (RNG.standard_normal((5, 64)) + 2000).astype(np.float32), None, None
    )
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-4)
    np.testing.assert_allclose(y.var(axis=1), 1, rtol=1e-3)


def test_layer_norm_of_a_constant_row_is_zero() -> None:
    assert not run(LayerNorm(-1, 1e-12), np.zeros((2, 10), np.float16), None, None).any()
    assert not run(LayerNorm(-1, 1e-12), np.full((2, 8), 7, np.float32), None, None).any()


def layer_norm(x: Any, axes: tuple[int, ...], eps: float) -> Any:
    mean = x.mean(axis=axes, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axis=axes, keepdims=True) + eps)


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("factors", [(False, False), (True, False), (False, True), (True, True)])
def test_layer_norm_against_numpy(axis: int, factors: tuple[bool, bool]) -> None:
    x = RNG.standard_normal((3, 4, 5))
    shape = x.shape[axis:] if axis else x.shape
    scale, bias = (RNG.standard_normal(shape) if f else None for f in factors)
    want = layer_norm(x, tuple(range(axis % 3, 3)), 1e-3)
    want = want if scale is None else want * scale
    want = want if bias is None else want + bias
    np.testing.assert_allclose(
        run(LayerNorm(axis, 1e-3), x, scale, bias), want, rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_norms_over_a_symbolic_row(dtype: DType) -> None:
    row = TensorType(dtype, (3, symbol("N")))
    vector = TensorType(dtype, (symbol("N"),))
    x, scale, bias = (RNG.standard_normal(s).astype(dtype.numpy) for s in ((3, 9), (9,), (9,)))
    assert LayerNorm().region(row, vector, vector) is None
    np.testing.assert_array_equal(
        decomposed(LayerNorm(), [row, vector, vector], [x, scale, bias]),
        run(LayerNorm(), x, scale, bias),
    )
    np.testing.assert_array_equal(
        decomposed(LayerNorm(), [row, None, vector], [x, None, bias]),
        run(LayerNorm(), x, None, bias),
    )
    np.testing.assert_array_equal(
        decomposed(RmsNorm(), [row, vector], [x, scale]), run(RmsNorm(), x, scale)
    )


def test_region_is_bit_equal_to_the_reference() -> None:
    x, scale = (
        RNG.standard_normal((4, 33)).astype(np.float16),
        RNG.standard_normal(33).astype(np.float16),
    )
    t, v = TensorType(DType.F16, (4, 33)), TensorType(DType.F16, (33,))
    region = RmsNorm().region(t, v)
    assert region is not None
    np.testing.assert_array_equal(run(region, x, scale), run(RmsNorm(), x, scale))


def test_instance_norm_in_half_precision_does_not_overflow() -> None:
    board = np.where((np.indices((8, 8)).sum(0) % 2) == 0, 512, -512).astype(np.float16)
    x = np.stack([board, -board])[None]
    one, zero = np.ones(2, np.float16), np.zeros(2, np.float16)
    np.testing.assert_array_equal(run(InstanceNorm(), x, one, zero), np.sign(x))


def test_channel_norms_and_their_decompositions() -> None:
    x = RNG.standard_normal((2, 6, 4, 5))
    scale, bias, mean = (RNG.standard_normal(6) for _ in range(3))
    variance = RNG.uniform(0.5, 2, 6)
    types: list[TensorType | None] = [TensorType(DType.F64, (symbol("N"), 6, symbol("H"), 5))]
    vector = TensorType(DType.F64, (6,))

    def spread(v: Any) -> Any:
        return v.reshape(6, 1, 1)

    grouped = layer_norm(x.reshape(2, 3, 2, 4, 5), (2, 3, 4), 1e-5).reshape(x.shape)
    cases: list[tuple[Any, list[Any], Any]] = [
        (InstanceNorm(), [scale, bias], layer_norm(x, (2, 3), 1e-5) * spread(scale) + spread(bias)),
        (GroupNorm(3), [scale, bias], grouped * spread(scale) + spread(bias)),
        (
            BatchNorm(),
            [scale, bias, mean, variance],
            (x - spread(mean)) / np.sqrt(spread(variance) + 1e-5) * spread(scale) + spread(bias),
        ),
    ]
    for op, factors, want in cases:
        np.testing.assert_allclose(run(op, x, *factors), want, rtol=1e-10, atol=1e-12)
        given = [*types, *(vector for _ in factors)]
        np.testing.assert_allclose(
            decomposed(op, given, [x, *factors]), want, rtol=1e-10, atol=1e-11
        )


def test_type_rules() -> None:
    x = TensorType(DType.F32, (2, 4, 3))
    with pytest.raises(TypeRuleError, match="groups"):
        GroupNorm(3).infer(x)
    with pytest.raises(TypeRuleError, match="cast to a float"):
        Softmax().infer(x.with_dtype(DType.I32))
    with pytest.raises(TypeRuleError, match="axis"):
        Softmax(3).infer(x)
    with pytest.raises(TypeRuleError, match="differ"):
        LayerNorm().infer(x, TensorType(DType.F32, (4,)), None)
    with pytest.raises(TypeRuleError, match="channels"):
        InstanceNorm().infer(x, TensorType(DType.F32, (3,)), TensorType(DType.F32, (4,)))
