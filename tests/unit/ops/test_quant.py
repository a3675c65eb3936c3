# SPDX-License-Identifier: Apache-2.0
"""Linear quantisation: rounding, saturation, scales along axes and in blocks, storage types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.quant import DequantizeLinear, QuantizeLinear
from rlx.ops.spec import building, emit_one

ONE = np.array(1.0, np.float32)


def _quantize(x: Any, scale: Any = ONE, zero: Any = None, **attributes: Any) -> Array:
    (y,) = run_op(QuantizeLinear(**attributes), [np.asarray(x, np.float32), scale, zero])
    return y


def _dequantize(x: Array, scale: Array, zero: Array | None = None, **attributes: Any) -> Array:
    return run_op(DequantizeLinear(**attributes), [x, scale, zero])[0]


def test_range_and_rounding() -> None:
    # onnxruntime #3442, #18576
    x = [-129, -128, -127, 0.5, 1.5, 2.5, -0.5, 127.5]
    got = _quantize(x, to=DType.I8)
    np.testing.assert_array_equal(got, [-128, -128, -127, 0, 2, 2, 0, 127])


@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 17, 31, 33])
def test_every_element_rounds_half_to_even(length: int) -> None:
    # onnxruntime PR #28606: no length has a tail that rounds otherwise.
    k = np.arange(length)
    np.testing.assert_array_equal(_quantize(k + 0.5, to=DType.U8), k + k % 2)


def test_division_not_multiplication_by_the_reciprocal() -> None:
    # tinygrad PR #9301: in f32, -2.5 / (5 / 255) is -127.49999.
    x, scale = np.float32(-2.5), np.float32(5) / np.float32(255)
    assert x / scale > np.float32(-127.5)
    assert x * (np.float32(1) / scale) == np.float32(-127.5)
    zero = np.array(128, np.uint8)
    got = _quantize([x], np.array(scale), zero, to=DType.U8)
    np.testing.assert_array_equal(got, [1])
    exact = run_op(QuantizeLinear(), [np.array([x]), np.array(scale), zero], exact=True)[0]
    np.testing.assert_array_equal(exact, got)


@pytest.mark.parametrize("to", ["i8", "u8", "i16", "u16"])
def test_zero_point_and_saturation(to: str) -> None:
    dtype = DType(to)
    info = np.iinfo(dtype.numpy)
    zero = np.array(info.max - 3, dtype.numpy)
    x = [-1e9, -1.0, 0.0, 3.0, 4.0, 1e30, np.inf, -np.inf]
    got = _quantize(x, zero=zero, to=dtype)
    top = info.max
    want = [info.min, top - 4, top - 3, top, top, top, top, info.min]
    np.testing.assert_array_equal(got, want)


def test_nan_gives_zero() -> None:
    np.testing.assert_array_equal(_quantize([np.nan], to=DType.I8), [0])


def test_along_an_axis() -> None:
    rng = np.random.default_rng(0)
    x = np.asarray(rng.standard_normal((2, 3, 4)) * 50, np.float32)
    scale = np.array([0.5, 1.0, 2.0], np.float32)
    zero = np.array([1, -2, 3], np.int8)
    got = _quantize(x, scale, zero, axis=1, to=DType.I8)
    rounded = np.rint(x / scale[:, None]) + zero[:, None].astype(np.float32)
    np.testing.assert_array_equal(got, np.clip(rounded, -128, 127))
    back = _dequantize(got, scale, zero, axis=1)
    want = (got.astype(np.float32) - zero[:, None].astype(np.float32)) * scale[:, None]
    np.testing.assert_array_equal(back, want)


@pytest.mark.parametrize("extent", [6, 5])
def test_blocks(extent: int) -> None:
    rng = np.random.default_rng(1)
    x = np.asarray(rng.standard_normal((2, extent)) * 9, np.float32)
    scale = np.array([[0.5, 1.0, 2.0], [1.0, 0.25, 4.0]], np.float32)
    zero = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    got = _quantize(x, scale, zero, axis=1, block=2)
    for i, j in np.ndindex(2, extent):
        value = np.rint(x[i, j] / scale[i, j // 2]) + zero[i, j // 2]
        assert got[i, j] == np.clip(value, 0, 255)
    back = _dequantize(got, scale, zero, axis=1, block=2)
    for i, j in np.ndindex(2, extent):
        assert back[i, j] == (int(got[i, j]) - int(zero[i, j // 2])) * scale[i, j // 2]


def test_four_bits() -> None:
    x = [-9.0, -8.0, -1.5, 0.0, 6.5, 7.0, 8.0, 15.0, 16.0]
    signed = _quantize(x, to=DType.I4)
    assert signed.dtype == DType.I4.numpy
    np.testing.assert_array_equal(signed.astype(np.int8), [-8, -8, -2, 0, 6, 7, 7, 7, 7])
    unsigned = _quantize(x, to=DType.U4)
    np.testing.assert_array_equal(unsigned.astype(np.int8), [0, 0, 0, 0, 6, 7, 8, 15, 15])
    zero = np.array(-3, np.int8).astype(DType.I4.numpy)
    back = _dequantize(signed, np.array(2.0, np.float32), zero)
    np.testing.assert_array_equal(back, (signed.astype(np.int8) + 3) * 2.0)


@pytest.mark.parametrize(("to", "largest"), [("f8e4m3", 448.0), ("f8e5m2", 57344.0)])
def test_fp8(to: str, largest: float) -> None:
    x = [0.0, 1.0, 1.0625, 3e10, -3e10]
    half = np.array(0.5, np.float32)
    got = _quantize(x, half, to=DType(to)).astype(np.float32)
    # 2.125 lies between two numbers and goes to the even one.
    np.testing.assert_array_equal(got, [0.0, 2.0, 2.0, largest, -largest])
    loose = _quantize(x, half, to=DType(to), saturate=False).astype(np.float32)
    assert not np.isfinite(loose[3:]).any()
    stored = np.array([1.5, -448.0], np.float32).astype(DType(to).numpy)
    np.testing.assert_array_equal(_dequantize(stored, half), stored.astype(np.float32) / 2)


def test_integers_of_32_bits() -> None:
    (y,) = run_op(
        QuantizeLinear(), [np.array([5, 300, -7], np.int32), np.array(2, np.float32), None]
    )
    np.testing.assert_array_equal(y, [2, 150, 0])
    x = np.array([2**24 + 1, -5], np.int32)
    np.testing.assert_array_equal(_dequantize(x, ONE), [2.0**24, -5])


def test_narrow_scales_give_narrow_results() -> None:
    scale = np.array(0.1, np.float16)
    y = _dequantize(np.array([100, 7], np.int8), scale, to=DType.F16)
    want = (np.array([100, 7], np.float32) * scale.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(y, want)


def test_per_axis_decomposes_to_a_region_with_symbols() -> None:
    n = symbol("N")
    graph = Graph("g")
    with building(Builder(graph.block, graph.facts)):
        x = graph.add_input("x", TensorType(DType.F32, (n, 3, 2)))
        scale = graph.add_input("scale", TensorType(DType.F32, (3,)))
        op = QuantizeLinear(1, 0, DType.I8)
        found = op.decompose(x, scale)
        assert found is not None
        graph.set_outputs({"y": emit_one(op, x, scale, None), "z": found})
    (plain,) = [
        o for node in graph.block if isinstance(o := node.op, QuantizeLinear) and o.axis is None
    ]
    types = [TensorType(DType.F32, (n, 3, 2)), TensorType(DType.F32, (1, 3, 1))]
    region = plain.region(*types)
    assert region is not None
    assert region.infer(*types)[0] == TensorType(DType.I8, (n, 3, 2))
    given = {
        "x": np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32) * 9,
        "scale": np.array([0.1, 0.5, 2.0], np.float32),
    }
    got = evaluate(graph, given)
    np.testing.assert_array_equal(got["y"], got["z"])


@pytest.mark.parametrize(
    ("op", "types", "message"),
    [
        (QuantizeLinear(to=DType.I32), ("f32[4]", "f32[]"), "no quantised dtype"),
        (QuantizeLinear(), ("f64[4]", "f32[]"), "cast first"),
        (QuantizeLinear(), ("f32[4]", "f64[]"), "scale"),
        (QuantizeLinear(1), ("f32[4]", "f32[4]"), "out of range"),
        (QuantizeLinear(0), ("f32[4]", "f32[3]"), "differ"),
        (QuantizeLinear(0), ("f32[4]", "f32[]"), "rank 1"),
        (QuantizeLinear(0, 2), ("f32[4]", "f32[3]"), "blocks"),
        (QuantizeLinear(), ("f32[4]", "f32[]", "i8[]"), "zero point"),
        (QuantizeLinear(), ("f32[4]", "f32[3]"), "broadcast"),
        (DequantizeLinear(to=DType.F64), ("i8[4]", "f32[]"), "f64"),
    ],
)
def test_refusals(op: Any, types: tuple[str, ...], message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        op.infer(*map(_type, types))


def _type(text: str) -> TensorType:
    dtype, _, shape = text.removesuffix("]").partition("[")
    return TensorType(DType(dtype), tuple(int(d) for d in shape.split(",") if d))
