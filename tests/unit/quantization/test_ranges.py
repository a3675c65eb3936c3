# SPDX-License-Identifier: Apache-2.0
"""Histograms hold every value, and ranges, scales and zero points follow from them."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.quantization.ranges import Histogram, Range, scale_and_zero


def _seen(*batches: object) -> Histogram:
    found = Histogram()
    for batch in batches:
        found.add(np.asarray(batch, np.float32))
    return found


def test_every_value_is_counted_however_the_reach_grows() -> None:
    found = _seen([0.01, -0.01], [5.0], [-700.0, 3.0], [])
    assert found.counts.sum() == 5
    assert found.reach == 1024
    assert found.range("minmax") == Range(-700.0, 5.0)


def test_growing_keeps_counts_where_they_were() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    at_once, by_and_by = _seen([900.0], values), _seen(values, [900.0])
    assert np.array_equal(at_once.counts, by_and_by.counts)


def test_a_range_holds_zero() -> None:
    assert _seen([3.0, 4.0]).range("minmax") == Range(0.0, 4.0)
    assert _seen([-3.0, -2.0]).range("minmax") == Range(-3.0, 0.0)
    assert _seen([0.0]).range("mse") == Range(0.0, 0.0)
    with pytest.raises(UsageError, match="holds 0"):
        Range(1.0, 2.0)


def test_percentile_leaves_outliers_out_on_either_side() -> None:
    values = np.concatenate([np.linspace(-1, 1, 100_000), [50.0, -90.0]])
    found = _seen(values).range("percentile", 99.9)
    assert -1.1 < found.low < -0.9
    assert 0.9 < found.high < 1.1
    assert _seen(values).range("percentile", 100.0) == Range(-90.0, 50.0)


def test_mse_gives_up_an_outlier_for_finer_steps() -> None:
    values = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    values[0] = 7.0

    def error(chosen: Range) -> float:
        scale, zero = scale_and_zero(chosen, DType.U8)
        steps = np.clip(np.rint(values / scale) + zero, 0, 255)
        return float(np.mean(((steps - zero) * scale - values) ** 2))

    found = _seen(values)
    assert error(found.range("mse")) < 0.8 * error(found.range("minmax"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(UsageError, match="NaNs or infinities"):
        _seen([1.0, value])


def test_scale_and_zero_reach_both_ends() -> None:
    scale, zero = scale_and_zero(Range(-1.0, 3.0), DType.U8)
    assert (0 - zero) * scale == pytest.approx(-1.0, abs=float(scale) / 2)
    assert (255 - zero) * scale == pytest.approx(3.0, abs=float(scale) / 2)
    scale, zero = scale_and_zero(Range(-1.0, 3.0), DType.I8)
    assert (zero, 127 * scale) == (0, pytest.approx(3.0))
    assert scale_and_zero(Range(0.0, 0.0), DType.U8) == (1.0, 0)
    assert scale_and_zero(Range(0.0, 1e-44), DType.I8) == (1.0, 0)
