# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlx.base.dtypes import INTEGERS, DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.types import TensorType
from rlx.ops import elementwise as ew
from rlx.ops.evaluate import run_op
from rlx.ops.region import Region

NAN, INF = math.nan, math.inf


def run(declared: Any, *arrays: Any, **attributes: Any) -> Any:
    (result,) = run_op(declared.op(**attributes), arrays)
    return result


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_nan_is_kept_by_what_selects_or_clamps(dtype: Any) -> None:
    x = np.array([NAN, 1, NAN, -2], dtype)
    zero = np.zeros((), dtype)
    np.testing.assert_array_equal(run(ew.relu, x), [NAN, 1, NAN, 0])
    np.testing.assert_array_equal(run(ew.sign, x), [NAN, 1, NAN, -1])
    np.testing.assert_array_equal(run(ew.maximum, x, zero), [NAN, 1, NAN, 0])
    np.testing.assert_array_equal(run(ew.maximum, zero, x), [NAN, 1, NAN, 0])
    np.testing.assert_array_equal(run(ew.minimum, x, zero), [NAN, 0, NAN, -2])
    for name in ("leaky_relu", "elu", "selu", "celu", "thresholded_relu", "hard_swish", "mish"):
        assert np.isnan(run(getattr(ew, name), x)[[0, 2]]).all(), name


def test_clamp() -> None:
    x = f32(NAN, -20, 20)
    np.testing.assert_array_equal(run(ew.clamp, x, f32(-10)[0], f32(10)[0]), [NAN, -10, 10])
    np.testing.assert_array_equal(run(ew.clamp, f32(0, 3, 9), f32(5)[0], f32(1)[0]), [1, 1, 1])


def test_hard_sigmoid_of_nan_and_large_numbers() -> None:
    y = run(ew.hard_sigmoid, f32(NAN, NAN, 1e25, 5), alpha=0.16667, beta=0.5)
    np.testing.assert_array_equal(y, [NAN, NAN, 1, 1])


@pytest.mark.parametrize(
    ("dtype", "a", "b", "quotient"),
    [
        (
            np.int32,
            [777777777, 1111111111, 1900000000, -1999999999],
            [11] * 4,
            [70707070, 101010101, 172727272, -181818181],
        ),
        (
            np.int64,
            [2**62, 2**40, 2**31, 2**31 - 1],
            [11] * 4,
            [419244183493398900, 99955602525, 195225786, 195225786],
        ),
        (np.int32, [-7, 7, -7, 7], [2, 2, -2, -2], [-3, 3, 3, -3]),
        (np.int32, [-(2**31)], [-1], [-(2**31)]),
        (np.uint8, [200, 255], [7, 255], [28, 1]),
    ],
)
def test_integer_division_truncates_in_integers(dtype: Any, a: Any, b: Any, quotient: Any) -> None:
    found = run(ew.div, np.array(a, dtype), np.array(b, dtype))
    assert found.dtype == dtype
    assert found.tolist() == quotient


@pytest.mark.parametrize("declared", [ew.div, ew.floor_mod, ew.fmod])
def test_integer_division_by_zero_is_an_error(declared: Any) -> None:
    for dtype in (np.int32, np.int8, np.uint64):
        with pytest.raises(ExecutionError, match="division by zero at element 1"):
            run(declared, np.array([1, 2, 3], dtype), np.array([1, 0, 0], dtype))
    i32 = TensorType(DType.I32, (2,))
    assert declared.op().may_fail(i32, i32)
    assert declared.op().region(i32, i32).may_fail(i32, i32)
    assert not declared.op().may_fail(TensorType(DType.F32, ()), TensorType(DType.F32, ()))


def test_float_division_by_zero_is_ieee() -> None:
    np.testing.assert_array_equal(run(ew.div, f32(1, -1, 0), f32(0, 0, 0)), [INF, -INF, NAN])


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str))
def test_integers_wrap(dtype: DType) -> None:
    kind = dtype.numpy
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    one = np.array([1], kind)
    assert run(ew.add, np.array([high], kind), one)[0] == low
    assert run(ew.sub, np.array([low], kind), one)[0] == high
    if dtype.is_signed:
        assert run(ew.abs, np.array([low], kind))[0] == low
        assert run(ew.neg, np.array([low], kind))[0] == low


def test_small_integer_sums_wrap_per_element() -> None:
    a, b = np.array([100, 127, -128, -100], np.int8), np.array([100, 10, -10, -50], np.int8)
    assert run(ew.add, a, b).tolist() == [-56, -119, 118, 106]


def test_shifts_of_the_width_or_more_are_zero() -> None:
    x, by = np.array([1, 1, 255], np.uint8), np.array([7, 8, 9], np.uint8)
    assert run(ew.shift_left, x, by).tolist() == [128, 0, 0]
    assert run(ew.shift_right, x, np.array([0, 8, 9], np.uint8)).tolist() == [1, 0, 0]
    assert run(ew.shift_left, np.array([3], np.uint64), np.array([64], np.uint64)).tolist() == [0]


def test_remainders() -> None:
    x, y = f32(-5, 5, -5.5, 1e30), f32(3, -3, 2, 7)
    np.testing.assert_array_equal(
        run(ew.fmod, x, y), f32(-2, 2, -1.5, np.fmod(f32(1e30), f32(7))[0])
    )
    np.testing.assert_array_equal(run(ew.floor_mod, x[:3], y[:3]), [1, -1, 0.5])
    a, b = np.array([-5, 5, -6, 6], np.int32), np.array([3, -3, 3, -3], np.int32)
    assert run(ew.floor_mod, a, b).tolist() == [1, -1, 0, 0]
    assert run(ew.fmod, a, b).tolist() == [-2, 2, 0, 0]


def test_gelu_by_erf_and_by_tanh() -> None:
    np.testing.assert_allclose(run(ew.gelu, f32(-3, 3)), [-0.0040497, 2.9959503], atol=2e-7)
    np.testing.assert_allclose(run(ew.gelu_tanh, f32(-3, 3)), [-0.0036374, 2.9963627], atol=2e-7)


def test_round_half_to_even_in_every_lane() -> None:
    x = np.arange(-8, 9, dtype=np.float32) + 0.5
    np.testing.assert_array_equal(run(ew.round, x), np.rint(x))


def test_activations_against_their_formulas_in_f64() -> None:
    x = np.linspace(-12, 12, 97, dtype=np.float64)
    sigmoid = 1 / (1 + np.exp(-x))
    softplus = np.logaddexp(0, x)
    expected = {
        "silu": x * sigmoid,
        "softplus": softplus,
        "mish": x * np.tanh(softplus),
        "softsign": x / (1 + np.abs(x)),
        "hard_swish": x * np.clip(x / 6 + 0.5, 0, 1),
        "elu": np.where(x < 0, np.expm1(x), x),
        "celu": np.where(x < 0, np.expm1(x), x),
        "leaky_relu": np.where(x < 0, 0.01 * x, x),
        "thresholded_relu": np.where(x > 1, x, 0),
        "sigmoid": sigmoid,
        "reciprocal": 1 / x[x != 0],
    }
    for name, want in expected.items():
        given = x[x != 0] if name == "reciprocal" else x
        np.testing.assert_allclose(run(getattr(ew, name), given), want, rtol=1e-13, atol=1e-15)
        narrow = run(getattr(ew, name), given.astype(np.float32))
        assert narrow.dtype == np.float32
        np.testing.assert_allclose(narrow, want, rtol=2e-6, atol=1e-6)


def test_extreme_arguments_stay_finite() -> None:
    x = f32(-1e4, 1e4)
    np.testing.assert_array_equal(run(ew.softplus, x), [0, 1e4])
    np.testing.assert_array_equal(run(ew.silu, x), [0, 1e4])
    np.testing.assert_array_equal(run(ew.sigmoid, x), [0, 1])


def test_infinity_by_sign() -> None:
    x = f32(INF, -INF, NAN, 1)
    assert run(ew.is_inf, x).tolist() == [True, True, False, False]
    assert run(ew.is_inf, x, detect_negative=False).tolist() == [True, False, False, False]
    assert run(ew.is_inf, x, detect_positive=False).tolist() == [False, True, False, False]
    assert not run(ew.is_inf, x, detect_positive=False, detect_negative=False).any()


def test_prelu_broadcasts_its_slope() -> None:
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 3, 2, 2)
    slope = f32(1, 2, 3).reshape(3, 1, 1)
    np.testing.assert_array_equal(run(ew.prelu, x, slope), np.where(x < 0, x * slope, x))


def test_masks_are_added_as_numbers() -> None:
    attention, mask = f32(1), f32(1)
    minus = run(ew.mul, f32(-1e10), run(ew.sub, f32(1), mask))
    assert run(ew.add, run(ew.mul, attention, mask), minus)[0] == 1


@pytest.mark.parametrize(
    ("to", "values", "expected"),
    [
        (DType.I32, [NAN, INF, -INF, 2.9, -2.9], [0, 2**31 - 1, -(2**31), 2, -2]),
        (DType.U8, [NAN, 300, -1, 254.9, 0.5], [0, 255, 0, 254, 0]),
        (DType.U32, [-1, 2, 4e9], [0, 2, 4000000000]),
        (DType.I64, [1e30, -1e30], [2**63 - 1, -(2**63)]),
        (DType.BOOL, [0.0, -0.0, NAN, 0.1], [False, False, True, True]),
    ],
)
def test_casts_from_float(to: DType, values: list[float], expected: list[Any]) -> None:
    (found,) = run_op(ew.Cast(to), [f32(*values)])
    assert found.dtype == to.numpy
    assert found.tolist() == expected


def test_fp8_saturates_by_its_attribute() -> None:
    kind = DType.F8E4M3.numpy
    (clamped,) = run_op(ew.Cast(DType.F8E4M3), [f32(3e10)])
    (lost,) = run_op(ew.Cast(DType.F8E4M3, saturate=False), [f32(3e10)])
    assert clamped == np.array([448], kind)
    assert np.isnan(lost.astype(np.float32))[0]


def test_narrow_floats_round_once() -> None:
    bf16 = DType.BF16.numpy
    x = np.array([1.0078125, 3.0], bf16)
    y = run(ew.gelu, x)
    assert y.dtype == bf16
    wide = run(ew.gelu, x.astype(np.float32))
    np.testing.assert_array_equal(y, wide.astype(bf16))


def test_type_rules() -> None:
    f, i, b = (TensorType(d, (2,)) for d in (DType.F32, DType.I32, DType.BOOL))
    assert ew.where.op().infer(b, f, TensorType(DType.F32, (3, 1))) == TensorType(DType.F32, (3, 2))
    assert ew.less.op().infer(i, i) == b
    for op, types, text in (
        (ew.add.op(), (f, i), "cast first"),
        (ew.exp.op(), (i,), "does not accept"),
        (ew.add.op(), (b, b), "does not accept"),
        (ew.add.op(), (TensorType(DType.F8E4M3, (2,)),) * 2, "does not accept"),
        (ew.where.op(), (f, f, f), "condition"),
        (ew.add.op(), (f, TensorType(DType.F32, (3,))), "differ"),
    ):
        with pytest.raises(TypeRuleError, match=text):
            op.infer(*types)


def test_region_says_the_same_as_the_operator() -> None:
    region = ew.gelu.op().region(TensorType(DType.F32, (5,)))
    assert isinstance(region, Region)
    x = f32(-2, -1, 0, 1, 2)
    np.testing.assert_array_equal(run_op(region, [x])[0], run(ew.gelu, x))
