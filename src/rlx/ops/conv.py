# SPDX-License-Identifier: Apache-2.0
"""Convolutions and transposed convolutions over one to three spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from rlx.base.dims import Dim, less_equal, product
from rlx.base.dtypes import NUMERIC
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType, require_equal
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.matmul import array_matmul
from rlx.ops.spec import Operand, Sample, emit_one, op
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
    window_count,
    window_span,
)

__all__ = ["Conv", "ConvTranspose"]

# The reference unfolds at most this many elements at a time.
_UNFOLD_LIMIT = 1 << 24


def _static_kernel(w: TensorType, rank: int) -> tuple[int, ...]:
    if w.rank != rank + 2:
        raise TypeRuleError(f"weights {w} need {rank + 2} axes for {rank} spatial axes of x")
    for extent in w.shape[2:]:
        if not isinstance(extent, int) or extent < 1:
            raise TypeRuleError(
                f"the kernel extents of the weights {w} must be static and at least 1"
            )
    return tuple(int(d) for d in w.shape[2:])


def _check_operands(x: TensorType, w: TensorType, bias: TensorType | None, channels: Dim) -> None:
    if x.dtype not in NUMERIC or w.dtype is not x.dtype:
        raise TypeRuleError(
            f"needs x and weights of one numeric dtype, found {x.dtype} and {w.dtype}; cast first"
        )
    if bias is None:
        return
    if bias.rank != 1 or bias.dtype is not x.dtype:
        raise TypeRuleError(f"the bias must be {x.dtype}[{channels}], found {bias}")
    require_equal(bias.shape[0], channels, "the bias and the channels of the result")


def _static_pads(pads: Pads) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in pads]


def _add_bias(y: Array, bias: Array | None) -> Array:
    if bias is not None:
        with np.errstate(all="ignore"):
            y += bias.reshape(-1, *[1] * (y.ndim - 2))
    return y


def _samples(first: tuple[int, ...]) -> tuple[Operand, Operand, Operand]:
    n, c, o = first[:3]
    space = first[3:]
    return Operand((n, c, *space)), Operand((o, c, *[3] * len(space))), Operand((o,))


@op("conv")
@dataclass(frozen=True)
class Conv(Op):
    """y[n, o, p] = bias[o] + sum over c, t of x[n, c, p stride + t dilation - before] w[o, c, t].

    x: [N, C, *space] (layout nchw) or [N, *space, C] (nhwc); w: [O, C / groups, *kernel] in both
        layouts; bias: [O].
    The result has x's layout, O channels and floor((extent + pads - span) / stride) + 1 elements
    per spatial axis, where span = dilation * (kernel - 1) + 1. Outside of x it reads zeros. The
    channels of group g of the result read group g of x. f16 and bf16 accumulate in f32; integers
    wrap.

    Attributes:
        strides: step of the window per spatial axis.
        dilations: distance of the window's taps.
        pads: (before, after) per spatial axis; may be symbolic, never negative.
        groups: number of groups that the channels are split into.
        layout: `nchw` or `nhwc`.
    """

    precision_class = OpClass.COMPUTE

    operands = ("x", "w", "bias?")
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads
    groups: int = 1
    layout: Layout = "nchw"
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample(
            (*_samples((2, 3, 4, 8, 9)),),
            {"strides": (1, 1), "dilations": (1, 1), "pads": ((1, 1), (1, 1))},
        ),
        Sample(
            (Operand((1, 4, 9, 10)), Operand((6, 2, 3, 2)), None),
            {"strides": (2, 3), "dilations": (2, 1), "pads": ((0, 2), (3, 1)), "groups": 2},
        ),
        Sample(
            (Operand((2, 8, 7, 7)), Operand((8, 1, 3, 3)), Operand((8,))),
            {"strides": (2, 2), "dilations": (1, 1), "pads": ((1, 1), (1, 1)), "groups": 8},
        ),
        Sample(
            (Operand((1, 3, 6)), Operand((6, 1, 3)), Operand((6,))),
            {"strides": (1,), "dilations": (1,), "pads": ((1, 0),), "groups": 3},
        ),
        Sample(
            (Operand((1, 1, 40)), Operand((6, 1, 16)), None),
            {"strides": (4,), "dilations": (1,), "pads": ((0, 0),)},
        ),
        Sample(
            (Operand((1, 2, 5, 4, 6)), Operand((3, 2, 2, 3, 1)), Operand((3,))),
            {"strides": (1, 2, 1), "dilations": (1, 1, 2), "pads": ((0, 1), (1, 0), (0, 0))},
        ),
        Sample(
            (Operand((2, 5, 6, 4)), Operand((6, 2, 3, 3)), Operand((6,))),
            {
                "strides": (1, 2),
                "dilations": (1, 1),
                "pads": ((1, 1), (0, 1)),
                "groups": 2,
                "layout": "nhwc",
            },
        ),
        Sample(
            (Operand((2, 16, 5, 5)), Operand((24, 16, 1, 1)), Operand((24,))),
            {"strides": (1, 1), "dilations": (1, 1), "pads": ((0, 0), (0, 0))},
        ),
        Sample(
            (Operand((0, 2, 5, 5)), Operand((3, 2, 3, 3)), None),
            {"strides": (1, 1), "dilations": (1, 1), "pads": ((0, 0), (0, 0))},
        ),
        Sample(
            (Operand((1, 2, 3, 3)), Operand((3, 2, 5, 5)), None),
            {"strides": (1, 1), "dilations": (1, 1), "pads": ((0, 0), (0, 0))},
            error="extent -1",
        ),
        Sample(
            (Operand((1, 4, 5)), Operand((3, 2, 3)), None),
            {"strides": (1,), "dilations": (1,), "pads": ((0, 0),), "groups": 2},
            error="groups",
        ),
    )

    def infer(self, x: TensorType, w: TensorType, bias: TensorType | None = None) -> TensorType:  # noqa: D102
        _, channels, space = split_shape(x, self.layout)
        kernel = _static_kernel(w, len(space))
        positive = {"strides": self.strides, "dilations": self.dilations}
        check_attributes(len(space), self.layout, positive, self.pads)
        if any(less_equal(0, p) is False for pair in self.pads for p in pair):
            raise TypeRuleError(f"pads {self.pads} must not be negative; use a slice")
        self._check_groups(w.shape[0])
        require_equal(
            channels,
            w.shape[1] * self.groups,
            "the channels of x and those of all groups of the weights",
        )
        _check_operands(x, w, bias, w.shape[0])
        out: list[Dim] = []
        for axis, extent in enumerate(space):
            found = window_count(
                extent, self.pads[axis], kernel[axis], self.strides[axis], self.dilations[axis]
            )
            span = window_span(kernel[axis], self.dilations[axis])
            why = f"the window spans {span}, x with its padding {extent + sum(self.pads[axis])}"
            out.append(check_extent(found, axis, why))
        return spatial_type(x, self.layout, w.shape[0], out)

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return results[0].elements * product(operands[1].shape[1:]) * 2

    def _check_groups(self, filters: Dim) -> None:
        if self.groups < 1 or (isinstance(filters, int) and filters % self.groups):
            raise TypeRuleError(
                f"{filters} channels of the result do not split into {self.groups} groups"
            )

    def reference(self, x: Array, w: Array, bias: Array | None = None) -> Array:  # noqa: D102
        x = padded(channels_first(x, self.layout), _static_pads(self.pads), 0)
        out = tuple(
            max(0, (extent - window_span(k, d)) // s + 1)
            for extent, k, s, d in zip(
                x.shape[2:], w.shape[2:], self.strides, self.dilations, strict=True
            )
        )
        depthwise = w.shape[1] == 1 and w.shape[0] == self.groups
        y = self._depthwise(x, w, out) if depthwise else self._unfolded(x, w, out)
        return np.ascontiguousarray(channels_last(_add_bias(y, bias), self.layout))

    def _depthwise(self, x: Array, w: Array, out: tuple[int, ...]) -> Array:
        y = np.zeros((*x.shape[:2], *out), x.dtype)
        ones = [1] * len(out)
        with np.errstate(all="ignore"):
            for tap in taps(w.shape[2:]):
                y += x[tap_slices(tap, out, self.strides, self.dilations)] * w[
                    (slice(None), 0, *tap)
                ].reshape(-1, *ones)
        return y

    def _unfolded(self, x: Array, w: Array, out: tuple[int, ...]) -> Array:
        """One product [O / g, C / g * K] @ [C / g * K, P] per sample and slab of the first axis."""
        n, g, (filters, depth) = x.shape[0], self.groups, w.shape[:2]
        count = prod(w.shape[2:])
        weights = np.ascontiguousarray(w.reshape(g, filters // g, depth * count))
        y = np.empty((n, filters, *out), x.dtype)
        per_row = max(1, g * depth * count * prod(out[1:]))
        rows = max(1, _UNFOLD_LIMIT // per_row)
        for sample in range(n):
            for first in range(0, out[0], rows):
                part = (min(rows, out[0] - first), *out[1:])
                begin = first * self.strides[0]
                columns = self._unfold(x[sample : sample + 1, :, begin:], w.shape[2:], part)
                product_ = array_matmul(weights, columns.reshape(g, depth * count, prod(part)))
                y[sample, :, first : first + part[0]] = product_.reshape(filters, *part)
        return y

    def _unfold(self, x: Array, kernel: tuple[int, ...], out: tuple[int, ...]) -> Array:
        """Return [C, *kernel, *out] of x [1, C, *space]."""
        columns = np.empty((x.shape[1], *kernel, *out), x.dtype)
        for tap in taps(kernel):
            columns[(slice(None), *tap)] = x[tap_slices(tap, out, self.strides, self.dilations)][0]
        return columns


@op("conv_transpose")
@dataclass(frozen=True)
class ConvTranspose(Op):
    """y[n, o, i * stride + t * dilation - before] += x[n, c, i] * w[c, o, t].

    y starts as the bias.

    x: [N, C, *space] (layout nchw) or [N, *space, C] (nhwc); w: [C, O / groups, *kernel] in both
        layouts; bias: [O].
    The result has x's layout, O channels and stride * (extent - 1) + output_padding + span - pads
    elements per spatial axis, where span = dilation * (kernel - 1) + 1. f16 and bf16 accumulate in
    f32; integers wrap.

    Attributes:
        strides: distance of neighbouring elements of x in the result, per spatial axis.
        dilations: distance of the window's taps.
        pads: (before, after): elements cut off the full result; negative ones extend it. May be
            symbolic.
        output_padding: elements added at the end of the full result before `pads` are cut off.
        groups: number of groups that the channels are split into.
        layout: `nchw` or `nhwc`.
    """

    precision_class = OpClass.COMPUTE

    operands = ("x", "w", "bias?")
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads
    output_padding: tuple[int, ...]
    groups: int = 1
    layout: Layout = "nchw"
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample(
            (Operand((2, 3, 4, 5)), Operand((3, 4, 3, 3)), Operand((4,))),
            {
                "strides": (2, 2),
                "dilations": (1, 1),
                "pads": ((1, 1), (1, 1)),
                "output_padding": (1, 1),
            },
        ),
        Sample(
            (Operand((1, 6, 4, 5)), Operand((6, 4, 2, 2)), None),
            {
                "strides": (2, 2),
                "dilations": (1, 1),
                "pads": ((0, 0), (0, 0)),
                "output_padding": (0, 0),
            },
        ),
        Sample(
            (Operand((1, 4, 4, 3)), Operand((4, 3, 3, 2)), Operand((6,))),
            {
                "strides": (1, 3),
                "dilations": (2, 1),
                "pads": ((0, 2), (1, 0)),
                "output_padding": (0, 2),
                "groups": 2,
            },
        ),
        Sample(
            (Operand((1, 2, 5)), Operand((2, 3, 4)), Operand((3,))),
            {"strides": (3,), "dilations": (1,), "pads": ((-1, 0),), "output_padding": (0,)},
        ),
        Sample(
            (Operand((1, 2, 2, 3, 2)), Operand((2, 3, 2, 1, 3)), None),
            {
                "strides": (1, 2, 2),
                "dilations": (1, 1, 1),
                "pads": ((0, 0), (0, 0), (0, 1)),
                "output_padding": (0, 1, 0),
            },
        ),
        Sample(
            (Operand((1, 4, 5, 3)), Operand((3, 2, 3, 3)), Operand((2,))),
            {
                "strides": (2, 1),
                "dilations": (1, 1),
                "pads": ((1, 0), (0, 1)),
                "output_padding": (0, 0),
                "layout": "nhwc",
            },
        ),
        Sample(
            (Operand((0, 2, 3)), Operand((2, 3, 2)), None),
            {"strides": (1,), "dilations": (1,), "pads": ((0, 0),), "output_padding": (0,)},
        ),
        Sample(
            (Operand((1, 2, 2)), Operand((2, 3, 2)), None),
            {"strides": (1,), "dilations": (1,), "pads": ((2, 2),), "output_padding": (0,)},
            error="extent -1",
        ),
    )

    def infer(self, x: TensorType, w: TensorType, bias: TensorType | None = None) -> TensorType:  # noqa: D102
        _, channels, space = split_shape(x, self.layout)
        kernel = _static_kernel(w, len(space))
        check_attributes(
            len(space),
            self.layout,
            {"strides": self.strides, "dilations": self.dilations},
            self.pads,
        )
        if len(self.output_padding) != len(space) or any(p < 0 for p in self.output_padding):
            raise TypeRuleError(
                f"output_padding {self.output_padding} must have {len(space)} entries of at least 0"
            )
        if self.groups < 1 or (isinstance(channels, int) and channels % self.groups):
            raise TypeRuleError(f"{channels} channels of x do not split into {self.groups} groups")
        require_equal(channels, w.shape[0], "the channels of x and of the weights")
        filters = w.shape[1] * self.groups
        _check_operands(x, w, bias, filters)
        out: list[Dim] = []
        for axis, extent in enumerate(space):
            full = self.strides[axis] * (extent - 1) + window_span(
                kernel[axis], self.dilations[axis]
            )
            found = full + self.output_padding[axis] - self.pads[axis][0] - self.pads[axis][1]
            out.append(
                check_extent(found, axis, f"the pads {self.pads[axis]} cut off more than there is")
            )
        return spatial_type(x, self.layout, filters, out)

    def reference(self, x: Array, w: Array, bias: Array | None = None) -> Array:  # noqa: D102
        x = channels_first(x, self.layout)
        n, g = x.shape[0], self.groups
        kernel = w.shape[2:]
        filters = w.shape[1] * g
        space = x.shape[2:]
        full = tuple(
            max(0, s * (e - 1) + window_span(k, d))
            for e, k, s, d in zip(space, kernel, self.strides, self.dilations, strict=True)
        )
        weights = w.reshape(g, w.shape[0] // g, prod(w.shape[1:])).swapaxes(1, 2)
        y = np.zeros((n, filters, *full), x.dtype)
        with np.errstate(all="ignore"):
            for sample in range(n):
                columns = array_matmul(weights, x[sample].reshape(g, x.shape[1] // g, prod(space)))
                columns = columns.reshape(filters, *kernel, *space)
                for tap in taps(kernel):
                    where = tap_slices(tap, space, self.strides, self.dilations)
                    y[sample : sample + 1][where] += columns[(slice(None), *tap)]
        return np.ascontiguousarray(channels_last(_add_bias(self._crop(y), bias), self.layout))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        del results
        return operands[0].elements * product(operands[1].shape[1:]) * 2

    def _crop(self, y: Array) -> Array:
        """Return the full result with its output padding added and its pads cut off."""
        ends = [
            (-a, extra - b)
            for (a, b), extra in zip(_static_pads(self.pads), self.output_padding, strict=True)
        ]
        y = padded(y, [(max(0, a), max(0, b)) for a, b in ends], 0)
        inner = (
            slice(max(0, -a), extent - max(0, -b))
            for (a, b), extent in zip(ends, y.shape[2:], strict=True)
        )
        return np.ascontiguousarray(y[(slice(None), slice(None), *inner)])

    def decompose(self, x: Value, w: Value, bias: Value | None = None) -> Value:
        """Return a convolution: pointwise where windows do not overlap, else over x spread out."""
        from rlx.ops.movement import transpose

        if self.layout == "nhwc":
            rank = x.type.rank
            first = (0, rank - 1, *range(1, rank - 1))
            op_ = ConvTranspose(
                self.strides, self.dilations, self.pads, self.output_padding, self.groups
            )
            return transpose(op_.decompose(transpose(x, first), w, bias), (0, *range(2, rank), 1))
        kernel = _static_kernel(w.type, len(self.strides))
        untouched = not any(self.output_padding) and all(p == 0 for pair in self.pads for p in pair)
        if kernel == self.strides and set(self.dilations) == {1} and untouched:
            return self._shuffled(x, w, bias, kernel)
        return self._spread(x, w, bias, kernel)

    def _shuffled(self, x: Value, w: Value, bias: Value | None, kernel: tuple[int, ...]) -> Value:
        """y[n, o, i * k + t] = sum over c of x[n, c, i] * w[c, o, t], then a shuffle."""
        from rlx.ops.elementwise import add
        from rlx.ops.movement import reshape, transpose

        rank, g = len(kernel), self.groups
        channels, per_group = w.type.shape[:2]
        count = prod(kernel)
        split = reshape(w, (g, channels // g, per_group * count))
        weights = reshape(
            transpose(split, (0, 2, 1)), (g * per_group * count, channels // g, *[1] * rank)
        )
        ones = (1,) * rank
        flat = emit_one(Conv(ones, ones, ((0, 0),) * rank, g), x, weights)
        batch, space = x.type.shape[0], x.type.shape[2:]
        parts = reshape(flat, (batch, g * per_group, *kernel, *space))
        order = [axis for i in range(rank) for axis in (2 + rank + i, 2 + i)]
        shuffled = transpose(parts, (0, 1, *order))
        y = reshape(
            shuffled, (batch, g * per_group, *(d * k for d, k in zip(space, kernel, strict=True)))
        )
        return y if bias is None else add(y, reshape(bias, (bias.type.shape[0], *ones)))

    def _spread(self, x: Value, w: Value, bias: Value | None, kernel: tuple[int, ...]) -> Value:
        """A convolution with mirrored weights over x with stride - 1 zeros behind every element."""
        rank = len(kernel)
        pads: list[tuple[Dim, Dim]] = []
        for axis in range(rank):
            span = window_span(kernel[axis], self.dilations[axis])
            before = span - 1 - self.pads[axis][0]
            after = span - self.strides[axis] + self.output_padding[axis] - self.pads[axis][1]
            x = _spread_axis(x, 2 + axis, self.strides[axis])
            x, before, after = _cut(x, 2 + axis, before, after)
            pads.append((before, after))
        op_ = Conv((1,) * rank, self.dilations, tuple(pads), self.groups)
        return emit_one(op_, x, self._mirrored(w, kernel), bias)

    def _mirrored(self, w: Value, kernel: tuple[int, ...]) -> Value:
        """[C, O / g, *kernel] -> [O, C / g, *kernel] with every kernel axis reversed."""
        from rlx.ops.movement import flip, reshape, transpose

        g, (channels, per_group) = self.groups, w.type.shape[:2]
        split = reshape(w, (g, channels // g, per_group, *kernel))
        swapped = transpose(split, (0, 2, 1, *range(3, 3 + len(kernel))))
        out = reshape(swapped, (g * per_group, channels // g, *kernel))
        for axis, extent in enumerate(kernel, 2):
            out = flip(out, axis) if extent > 1 else out
        return out


def _spread_axis(x: Value, axis: int, stride: int) -> Value:
    """Return x with stride - 1 zeros behind every element of an axis."""
    from rlx.ops.movement import pad, reshape

    if stride == 1:
        return x
    shape = x.type.shape
    column = reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    after = [0] * (len(shape) + 1)
    after[axis + 1] = stride - 1
    wide = pad(column, [0] * len(after), after)
    return reshape(wide, (*shape[:axis], product((shape[axis], stride)), *shape[axis + 1 :]))


def _cut(x: Value, axis: int, before: Dim, after: Dim) -> tuple[Value, Dim, Dim]:
    """Return x with negative pads cut off it, and the pads that are left.

    Raises:
        TypeRuleError: a symbolic pad may have either sign.
    """
    from rlx.ops.movement import slice_axis

    cuts: list[Dim] = []
    for count in (before, after):
        sign = less_equal(0, count)
        if sign is None:
            raise TypeRuleError(
                f"padding of {count} may have either sign; give the extent it depends on"
            )
        cuts.append(0 if sign else -count)
    if cuts != [0, 0]:
        x = slice_axis(x, axis, cuts[0], x.type.shape[axis] - cuts[0] - cuts[1])
    return x, before + cuts[0], after + cuts[1]
