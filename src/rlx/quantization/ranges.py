# SPDX-License-Identifier: Apache-2.0
"""From observed values to a range, and from a range to scale and zero point."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array

__all__ = ["METHODS", "Histogram", "Method", "Range", "scale_and_zero"]

Method: TypeAlias = Literal["minmax", "percentile", "mse"]
METHODS: tuple[Method, ...] = ("minmax", "percentile", "mse")
_BINS = 4096
_SHRINK = np.geomspace(1.0, 0.05, 61)
"""Fractions of either end that `mse` tries."""


@dataclass(frozen=True)
class Range:
    """The values a tensor may take, `low` <= 0 <= `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low <= 0 <= self.high):
            raise UsageError(f"a range is finite and holds 0; found [{self.low}, {self.high}]")


@dataclass
class Histogram:
    """Counts of values in equal bins over [-reach, reach], which doubles when a value lies outside."""

    low: float = 0.0
    high: float = 0.0
    reach: float = 0.0
    total: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    def add(self, values: Array) -> None:
        """Count values.

        Raises:
            UsageError: one of them is not finite.
        """
        flat = np.asarray(values, np.float64).ravel()
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not np.isfinite(low + high):
            raise UsageError("there are NaNs or infinities among the values")
        self.total += flat.size
        self.low, self.high = min(self.low, low), max(self.high, high)
        largest = max(-low, high)
        if largest > self.reach:
            self._widen(largest)
        if self.reach:
            bins = ((flat / self.reach + 1) * (_BINS // 2)).astype(np.int64)
            np.clip(bins, 0, _BINS - 1, out=bins)  # the reach itself belongs to the last bin
            self.counts += np.bincount(bins, minlength=_BINS)

    def _widen(self, largest: float) -> None:
        wanted = 2.0 ** np.ceil(np.log2(largest))
        while 0 < self.reach < wanted and self.counts.any():
            merged = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts[:] = 0
            self.counts[_BINS // 4 : 3 * _BINS // 4] = merged
            self.reach *= 2
        self.reach = wanted

    def range(self, method: Method, percentile: float = 99.99) -> Range:
        """Return the range to quantise by.

        Args:
            method: `minmax` for all that was seen, `percentile` to leave out the outermost values on either side,
                `mse` for the least squared error of 8-bit values.
            percentile: how many per cent of the values lie below the upper end, and above the lower one.
        """
        full = Range(min(self.low, 0.0), max(self.high, 0.0))
        if method == "minmax" or not self.counts.any():
            return full
        if method == "percentile":
            return self._percentile(percentile, full)
        best = full
        for _ in range(2):  # one end at a time, and once more now that the other has moved
            best = min((Range(best.low, full.high * f) for f in _SHRINK), key=self._error)
            best = min((Range(full.low * f, best.high) for f in _SHRINK), key=self._error)
        return best

    def _percentile(self, percentile: float, full: Range) -> Range:
        edges = np.linspace(-self.reach, self.reach, _BINS + 1)
        below = np.cumsum(self.counts) / self.counts.sum()
        share = percentile / 100
        high = edges[1 + int(np.searchsorted(below, share))]
        low = edges[int(np.searchsorted(below, 1 - share, side="right"))]
        return Range(max(full.low, min(low, 0.0)), min(full.high, max(high, 0.0)))

    def _error(self, chosen: Range) -> float:
        width = 2 * self.reach / _BINS
        centres = -self.reach + width * (np.arange(_BINS) + 0.5)
        scale, zero = scale_and_zero(chosen, DType.U8)
        steps = np.clip(np.rint(centres / scale) + zero, 0, 255)
        return float(np.sum(self.counts * ((steps - zero) * scale - centres) ** 2))


def scale_and_zero(chosen: Range, dtype: DType) -> tuple[np.float32, int]:
    """Return the scale and zero point of an 8-bit dtype for a range: u8 uses both ends, i8 is symmetric about 0."""
    if dtype is DType.I8:
        return _positive(max(-chosen.low, chosen.high) / 127), 0
    scale = _positive((chosen.high - chosen.low) / 255)
    return scale, int(np.clip(np.rint(-chosen.low / scale), 0, 255))


def _positive(scale: float) -> np.float32:
    """Return a scale that can be divided by; a tensor of zeros has 1."""
    tiny = np.finfo(np.float32).tiny
    return np.float32(scale) if scale >= tiny else np.float32(1.0)
