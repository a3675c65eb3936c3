# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx import UsageError
from rlx.base.convert import convert_exactly
from rlx.base.dtypes import DType
from rlx.base.numeric import Array

_NAN, _INF = float("nan"), float("inf")


def _convert(values: Any, source: Any, to: str) -> Array:
    return convert_exactly(np.array(values, source), DType.of(to), "param 'w'")


@pytest.mark.parametrize(
    ("values", "source", "to"),
    [
        ([0, 1, 255], np.int64, "u8"),
        ([-128, 127], np.float32, "i8"),
        ([2**63 - 1, -(2**63)], np.int64, "i64"),
        ([2**64 - 1, 0], np.uint64, "u64"),
        ([2**24, -(2**24)], np.int32, "f32"),
        ([2**60, -(2**62)], np.int64, "f32"),
        ([True, False], np.bool_, "f16"),
        ([0.0, 1.0, -0.0], np.float64, "bool"),
        ([1, 0], np.int8, "bool"),
        ([-8, 7], np.int32, "i4"),
        ([448.0, -448.0], np.float32, "f8e4m3"),
        ([1.5, _INF, -_INF], np.float64, "f16"),
        ([1.0, 2.0], np.float32, "c64"),
    ],
)
def test_values_that_fit_arrive_exactly(values: list[Any], source: Any, to: str) -> None:
    found = _convert(values, source, to)
    assert DType.of(found.dtype) is DType.of(to)
    assert [complex(v) for v in found] == [complex(v) for v in values]


def test_floats_round_to_the_nearest_and_nan_stays() -> None:
    found = _convert([0.1, _NAN, 1e-300], np.float64, "f32")
    assert found[0] == np.float32(0.1)
    assert np.isnan(found[1])
    assert found[2] == 0
    assert np.isnan(_convert([_NAN], np.float32, "f8e4m3").astype(np.float32)[0])
    # Halfway cases: to even, and once, not by way of f32.
    assert _convert([1 + 2**-9 + 2**-40], np.float64, "bf16")[0] == ml_dtypes.bfloat16(1)
    assert _convert([1 + 2**-8 + 2**-40], np.float64, "bf16")[0] == ml_dtypes.bfloat16(1.0078125)


@pytest.mark.parametrize(
    ("values", "source", "to", "index"),
    [
        ([0, 256], np.int64, "u8", 1),
        ([-1], np.int32, "u64", 0),
        ([2**63], np.uint64, "i64", 0),
        ([1.0, 2.0**63], np.float64, "i64", 1),
        ([1.0, 2.0**64], np.float64, "u64", 1),
        ([0.5], np.float32, "i32", 0),
        ([_NAN], np.float32, "i32", 0),
        ([_INF], np.float32, "bool", 0),
        ([2], np.int32, "bool", 0),
        ([2**24 + 1], np.int32, "f32", 0),
        ([0, 2**53 + 1], np.int64, "f64", 1),
        ([2**64 - 1], np.uint64, "f64", 0),
        ([70000], np.int32, "f16", 0),
        ([1.0, 1e39], np.float64, "f32", 1),
        ([70000.0], np.float32, "f16", 0),
        ([449.0], np.float32, "f8e4m3", 0),
        ([_INF], np.float32, "f8e4m3", 0),
        ([60000.0], np.float32, "f8e5m2", 0),
        ([8], np.int32, "i4", 0),
        ([-1], np.int32, "u4", 0),
        ([1e39 + 0j], np.complex128, "c64", 0),
    ],
)
def test_nothing_is_clipped_wrapped_or_truncated(
    values: list[Any], source: Any, to: str, index: int
) -> None:
    with pytest.raises(
        UsageError, match=rf"param 'w' is {to}, which cannot hold .*element {index} "
    ):
        _convert(values, source, to)


def test_complex_values_have_no_real_dtype() -> None:
    with pytest.raises(UsageError, match="real part"):
        _convert([1 + 0j], np.complex64, "f32")


def test_the_element_is_named_beyond_the_first_block() -> None:
    values = np.zeros((3, 1 << 20), np.int32)
    values[2, 5] = 300
    with pytest.raises(UsageError, match=f"element {2 * (1 << 20) + 5} "):
        convert_exactly(values, DType.U8, "param 'w'")


def test_the_result_is_a_copy_in_row_major_order() -> None:
    source = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = convert_exactly(source, DType.F32, "w")
    assert found.flags.c_contiguous
    assert not np.shares_memory(found, source)
    np.testing.assert_array_equal(found, source)
    assert convert_exactly(np.array(3.0), DType.F32, "w").shape == ()
