# SPDX-License-Identifier: Apache-2.0
"""Maxima and averages over sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal

import numpy as np

from rlx.base import numeric
from rlx.base.dims import Dim, less_equal
from rlx.base.dtypes import FLOATS, NUMERIC
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType
from rlx.ir.op import Op
from rlx.ops.spec import Operand, Sample, op
from rlx.ops.windows import (
    Layout,
    Pads,
    channels_first,
    channels_last,
    check_attributes,
    check_extent,
    padded,
    spatial_type,
    split_shape,
    tap_slices,
    taps,
    window_span,
)

__all__ = ["Pool"]


def _sample(
    kind: str, shape: tuple[int, ...], fill: str, error: str = "", **attributes: Any
) -> Sample:
    given = {"dilations": (1,) * len(attributes["kernel"]), **attributes}
    return Sample((Operand(shape, fill=fill),), {"kind": kind, **given}, error)


def _samples(kind: str) -> Iterator[Sample]:
    none = (0, 0)
    yield _sample(
        kind, (2, 3, 6, 7), "normal", kernel=(2, 2), strides=(2, 2), pads=(none, none), out=(3, 3)
    )
    yield _sample(
        kind,
        (1, 2, 6, 7),
        "special",
        kernel=(3, 3),
        strides=(1, 1),
        pads=((1, 1), (1, 1)),
        out=(6, 7),
    )
    uneven: dict[str, Any] = {
        "kernel": (3, 2),
        "strides": (2, 2),
        "pads": ((1, 0), (0, 1)),
        "out": (2, 3),
    }
    yield _sample(kind, (1, 2, 5, 5), "normal", **uneven, count_include_pad=True)
    # Ceil mode: the last windows reach beyond x.
    yield _sample(
        kind, (1, 1, 4, 4), "normal", kernel=(3, 3), strides=(2, 2), pads=(none, none), out=(2, 2)
    )
    wide: dict[str, Any] = {"kernel": (2, 3), "strides": (2, 1), "dilations": (3, 2)}
    yield _sample(kind, (1, 2, 9, 8), "normal", **wide, pads=(none, (1, 1)), out=(3, 6))
    yield _sample(kind, (2, 3, 9), "normal", kernel=(4,), strides=(3,), pads=((2, 1),), out=(3,))
    deep: dict[str, Any] = {
        "kernel": (2, 3, 1),
        "strides": (1, 2, 2),
        "pads": ((1, 0), (1, 1), none),
    }
    yield _sample(kind, (1, 2, 4, 5, 3), "normal", **deep, out=(4, 3, 2))
    last: dict[str, Any] = {
        "kernel": (3, 3),
        "strides": (2, 2),
        "pads": ((1, 1), (1, 1)),
        "out": (3, 3),
    }
    yield _sample(kind, (2, 5, 6, 3), "normal", **last, layout="nhwc")
    yield _sample(kind, (0, 3, 4), "normal", kernel=(2,), strides=(1,), pads=(none,), out=(3,))
    yield _sample(
        kind, (1, 3, 4), "normal", "window 2", kernel=(2,), strides=(2,), pads=(none,), out=(3,)
    )


@op("pool")
@dataclass(frozen=True)
class Pool(Op):
    """The largest element, or the average, of every window of every channel.

    x: [N, C, *space] (layout nchw) or [N, *space, C] (nhwc). Window p of a spatial axis holds the
        elements
    p * stride + t * dilation - before, t < kernel. What lies outside of x never is a maximum, and
    counts in an average only where `count_include_pad` is set and it lies within `pads`: what a
    window of ceil mode has beyond them never counts. NaN in a window gives NaN.

    Attributes:
        kind: `max` (any numeric dtype) or `avg` (floats; f16 and bf16 accumulate in f32).
        kernel: extent of the window per spatial axis.
        strides: step of the window.
        dilations: distance of the window's taps.
        pads: (before, after) per spatial axis; may be symbolic.
        out: number of windows per spatial axis, by which floor and ceil mode differ.
        count_include_pad: averages count the zeros of the padding.
        layout: `nchw` or `nhwc`.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    kind: Literal["max", "avg"]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads
    out: tuple[Dim, ...]
    count_include_pad: bool = False
    layout: Layout = "nchw"
    samples: ClassVar[tuple[Sample, ...]] = (*_samples("max"), *_samples("avg"))

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if self.kind not in ("max", "avg"):
            raise TypeRuleError(f"kind {self.kind!r} is neither max nor avg")
        if x.dtype not in (NUMERIC if self.kind == "max" else FLOATS):
            raise TypeRuleError(f"{self.kind} does not accept {x.dtype}; cast first")
        _, channels, space = split_shape(x, self.layout)
        positive = {"kernel": self.kernel, "strides": self.strides, "dilations": self.dilations}
        check_attributes(len(space), self.layout, positive, self.pads)
        if any(less_equal(0, p) is False for pair in self.pads for p in pair):
            raise TypeRuleError(f"pads {self.pads} must not be negative; use a slice")
        if len(self.out) != len(space):
            raise TypeRuleError(
                f"out {self.out} needs one entry for each of the {len(space)} spatial axes"
            )
        for axis, (extent, found) in enumerate(zip(space, self.out, strict=True)):
            check_extent(found, axis, f"the extent of x is {extent}, its padding {self.pads[axis]}")
            fixed = (extent, found, *self.pads[axis])
            if all(isinstance(d, int) for d in fixed):
                empty = self._first_empty(axis, *(int(d) for d in fixed))
                if empty is not None:
                    raise TypeRuleError(self._outside(axis, empty))
        return spatial_type(x, self.layout, channels, self.out)

    def _counts(
        self, axis: int, extent: int, out: int, before: int, after: int, *, padding: bool
    ) -> Array:
        """Return per window of an axis how many of its taps lie in x, or in x and its padding."""
        starts = np.arange(out) * self.strides[axis] - before
        where = starts[:, None] + np.arange(self.kernel[axis]) * self.dilations[axis]
        low, high = (-before, extent + after) if padding else (0, extent)
        return ((where >= low) & (where < high)).sum(axis=1)

    def _first_empty(self, axis: int, extent: int, out: int, before: int, after: int) -> int | None:
        """Return the first window that has nothing to reduce, None if there is none."""
        counts = self._counts(
            axis, extent, out, before, after, padding=self.kind == "avg" and self.count_include_pad
        )
        return int(np.argmin(counts)) if counts.size and not counts.all() else None

    def _outside(self, axis: int, window: int) -> str:
        return (
            f"window {window} of spatial axis {axis} lies wholly outside of x "
            f"(kernel {self.kernel[axis]}, stride {self.strides[axis]}, pads {self.pads[axis]})"
        )

    def reference(self, x: Array) -> Array:  # noqa: D102
        x = channels_first(x, self.layout)
        out = [int(d) for d in self.out]
        pads = [(int(a), int(b)) for a, b in self.pads]
        for axis, extent in enumerate(x.shape[2:]):
            empty = self._first_empty(axis, extent, out[axis], *pads[axis])
            if empty is not None:
                raise ExecutionError(self._outside(axis, empty))
        y = self._maxima(x, out, pads) if self.kind == "max" else self._averages(x, out, pads)
        return np.ascontiguousarray(channels_last(y, self.layout))

    def _widths(
        self, x: Array, out: list[int], pads: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return the padding that makes every window fit: in ceil mode more than `pads`."""
        widths: list[tuple[int, int]] = []
        for axis, extent in enumerate(x.shape[2:]):
            span = window_span(self.kernel[axis], self.dilations[axis])
            end = (out[axis] - 1) * self.strides[axis] + span - pads[axis][0]
            widths.append((pads[axis][0], max(0, end - extent)))
        return widths

    def _maxima(self, x: Array, out: list[int], pads: list[tuple[int, int]]) -> Array:
        lowest: Any = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        wide = padded(x, self._widths(x, out, pads), lowest)
        windows = (
            wide[tap_slices(tap, out, self.strides, self.dilations)] for tap in taps(self.kernel)
        )
        return reduce(numeric.maximum, windows)

    def _averages(self, x: Array, out: list[int], pads: list[tuple[int, int]]) -> Array:
        wide = padded(x, self._widths(x, out, pads), 0)
        y = np.zeros((*x.shape[:2], *out), x.dtype)
        with np.errstate(all="ignore"):
            for tap in taps(self.kernel):
                y += wide[tap_slices(tap, out, self.strides, self.dilations)]
            y /= self._divisors(x, out, pads).astype(y.dtype)
        return y

    def _divisors(self, x: Array, out: list[int], pads: list[tuple[int, int]]) -> Array:
        """Return the number of elements that each window averages: [*out]."""
        total = np.ones([1] * len(out), np.int64)
        for axis, extent in enumerate(x.shape[2:]):
            counts = self._counts(
                axis, extent, out[axis], *pads[axis], padding=self.count_include_pad
            )
            total = total * counts.reshape([-1 if i == axis else 1 for i in range(len(out))])
        return total
