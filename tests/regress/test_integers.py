# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.base.dtypes import DType
from rlx.ops.elementwise import cast, div, floor, floor_mod, fmod
from rlx.ops.matmul import matmul


def test_division_of_integers_is_done_in_integers(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/openvinotoolkit/openvino/issues/35830
    x = np.array([777777777, 1111111111, 1900000000, -1999999999], np.int32)
    y = run_onnx("Div", x, np.int32(11))[0]
    np.testing.assert_array_equal(y, [70707070, 101010101, 172727272, -181818181])


def test_division_of_long_integers_is_not_narrowed(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/openvinotoolkit/openvino/issues/37766
    x = np.array([2**62, 2**40, 2**31, 2**31 - 1])
    y = run_onnx("Div", x, np.int64(11))[0]
    np.testing.assert_array_equal(y, [419244183493398900, 99955602525, 195225786, 195225786])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_division_truncates_and_modulo_floors(dtype: Any, run_onnx: Callable[..., Any]) -> None:
    # https://github.com/openvinotoolkit/openvino/issues/38248
    a, b = np.array([-7, 7, -7, 7, -5], dtype), np.array([2, -2, -2, 2, 2], dtype)
    np.testing.assert_array_equal(run_onnx("Div", a, b)[0], [-3, -3, 3, 3, -2])
    np.testing.assert_array_equal(run_onnx("Mod", a, b)[0], [1, -1, -1, 1, 1])
    np.testing.assert_array_equal(run_onnx("Mod", a, b, fmod=1)[0], [-1, 1, -1, 1, -1])


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]
)
@pytest.mark.parametrize("divide", [div, floor_mod, fmod])
def test_division_by_zero_is_an_error_and_the_process_lives(
    dtype: Any, divide: Any, run_graph: Callable[..., Any]
) -> None:
    # https://github.com/apache/tvm/issues/19541, https://github.com/microsoft/onnxruntime/issues/16998
    with pytest.raises(rlx.ExecutionError, match="zero"):
        run_graph(divide, np.array([1, 2], dtype), np.array([0, 1], dtype))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_the_minimum_divided_by_minus_one_wraps(dtype: Any, run_graph: Callable[..., Any]) -> None:
    # https://github.com/apache/tvm/issues/19541
    least = np.iinfo(dtype).min
    a, b = np.array([least, 5], dtype), np.array([-1, -1], dtype)
    np.testing.assert_array_equal(run_graph(div, a, b), [least, -5])
    np.testing.assert_array_equal(run_graph(floor_mod, a, b), [0, 0])
    np.testing.assert_array_equal(run_graph(fmod, a, b), [0, 0])


def test_bytes_wrap(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/openvinotoolkit/openvino/issues/35651
    a, b = np.array([100, 127, -128, -100], np.int8), np.array([100, 10, -10, -50], np.int8)
    np.testing.assert_array_equal(
        run_onnx("Add", a, b)[0], np.array([-56, -119, 118, 106], np.int8)
    )
    np.testing.assert_array_equal(
        run_onnx("Abs", np.array([-128], np.int8))[0], np.array([-128], np.int8)
    )


def test_cumulative_sums_of_long_integers_are_exact(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/openvinotoolkit/openvino/issues/35837
    x = np.array([2**33, 2**34, 2**35, 5, 7])
    y = run_onnx("CumSum", x, np.array(0), fixed=(1,))[0]
    np.testing.assert_array_equal(y, np.cumsum(x))


def test_an_exclusive_cumulative_sum_of_one_element_is_zero(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/13165
    x = np.array([[1, 2]], np.float32)
    y = run_onnx("CumSum", x, np.array(-2), fixed=(1,), exclusive=1)[0]
    np.testing.assert_array_equal(y, [[0, 0]])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_shifts_beyond_the_width_give_zero(dtype: Any, run_onnx: Callable[..., Any]) -> None:
    # https://github.com/pytorch/pytorch/issues/143566
    width = np.iinfo(dtype).bits
    a = np.array([1, 1, np.iinfo(dtype).max], dtype)
    b = np.array([width - 1, width, width + 1], dtype)
    np.testing.assert_array_equal(
        run_onnx("BitShift", a, b, direction="LEFT")[0], np.array([1 << width - 1, 0, 0], dtype)
    )
    a = np.array([np.iinfo(dtype).max] * 3, dtype)
    np.testing.assert_array_equal(
        run_onnx("BitShift", a, b, direction="RIGHT")[0], np.array([1, 0, 0], dtype)
    )


def test_floor_of_a_quotient_from_the_remainder_is_not_off_by_one(
    run_graph: Callable[[Callable[[Any, Any], Any], Any, Any], Any],
) -> None:
    # https://github.com/pytorch/pytorch/issues/197895
    a, b = np.array([1.0, 0.5, 6.0]), np.array([0.1, 0.1, 0.2])
    y = run_graph(lambda p, q: floor((p - floor_mod(p, q)) / q + 0.5), a, b)
    np.testing.assert_array_equal(y, [9, 4, 29])


def test_large_floats_become_unsigned_integers(run_onnx: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/25207
    x = np.array([-1, 2, 4e9, np.nan, np.inf, 5e9] * 5, np.float32)
    y = run_onnx("Cast", x, to=12)[0]
    np.testing.assert_array_equal(y, [0, 2, 4000000000, 0, 2**32 - 1, 2**32 - 1] * 5)


def test_what_is_too_large_for_a_byte_float_saturates_or_not(
    run_graph: Callable[[Callable[[Any], Any], Any], Any],
) -> None:
    # https://github.com/onnx/onnx/issues/6220
    x = np.array([3e10, -3e10, np.inf, 1], np.float32)
    y, z = run_graph(lambda v: (cast(v, DType.F8E4M3), cast(v, DType.F8E4M3, saturate=False)), x)
    np.testing.assert_array_equal(y.astype(np.float32), [448, -448, 448, 1])
    assert y.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(z.astype(np.float32), [np.nan, np.nan, np.nan, 1])


def test_remainders_of_huge_floats(run_onnx: Callable[..., Any]) -> None:
    a, b = np.array([-5, 5, -5.5, 1e30], np.float32), np.array([3, -3, 2, 7], np.float32)
    y = run_onnx("Mod", a, b, fmod=1)[0]
    np.testing.assert_array_equal(y, np.fmod(a, b))
    np.testing.assert_array_equal(y[:3], [-2, 2, -1.5])


def test_sums_of_products_wrap_alike_however_they_are_grouped(
    run_graph: Callable[[Callable[[Any, Any, Any], Any], Any, Any, Any], Any],
) -> None:
    # https://github.com/pytorch/pytorch/issues/190764
    edges = np.array([2**31 - 1, -(2**31), -1, 7], np.int32)
    x, y, z = (np.random.default_rng(i).choice(edges, (9, 9)) for i in range(3))
    first, second = run_graph(
        lambda a, b, c: (matmul(a, b) + matmul(a, c), matmul(a, b + c)), x, y, z
    )
    np.testing.assert_array_equal(first, second)
    wide = x.astype(object) @ (y.astype(object) + z.astype(object))
    np.testing.assert_array_equal(first, (wide + 2**31) % 2**32 - 2**31)
