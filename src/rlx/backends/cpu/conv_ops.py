# SPDX-License-Identifier: Apache-2.0
"""Operators private to the CPU backend: channels-last convolutions over packed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as cartesian
from math import prod

import numpy as np

from rlx.base.dims import Dim, product
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.conv import ConvTranspose
from rlx.ops.movement import concat, pad, reshape, slice_axis, transpose
from rlx.ops.spec import op
from rlx.ops.windows import Pads, window_count

__all__ = [
    "DepthwiseConv",
    "PackConv",
    "PackConvTranspose",
    "PackedConv",
    "PackedConvTranspose",
    "WindowOp",
    "pack_columns",
    "packed_columns",
    "phase_taps",
    "phases",
    "unpack_columns",
]


def _extents(
    spatial: Sequence[Dim],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Pads,
) -> tuple[Dim, ...]:
    """Return the output extents of a convolution, one per spatial axis."""
    axes = zip(spatial, pads, kernel, strides, dilations, strict=True)
    return tuple(window_count(*axis) for axis in axes)


def packed_columns(columns: int, lanes: int, width: int) -> int:
    """Return the columns of packed weights: whole panels, and a last one of whole vectors."""
    whole, rest = divmod(columns, width)
    return whole * width + -(-rest // lanes) * lanes


@op("cpu.pack_conv")
@dataclass(frozen=True)
class PackConv(Op):
    """[O, I / groups, *kernel] -> [groups, taps * (I / groups) * padded]: panels per group.

    A panel is [taps, I / groups, width]; the last one is only as many whole vectors wide as it
    needs, padded with zeros.

    Attributes:
        groups: of the convolution.
        lanes: elements of a vector.
        width: columns of a panel, a multiple of `lanes`.
    """

    operands = ("w",)
    keeps_elements = True
    groups: int
    lanes: int
    width: int

    def infer(self, w: TensorType) -> TensorType:  # noqa: D102
        if w.rank < 3 or not w.is_static or int(w.shape[0]) % self.groups:
            raise TypeRuleError(
                f"packs static weights [O, I / groups, *kernel] of {self.groups} groups, not {w}"
            )
        depth = product(w.shape[1:])
        return w.with_shape(
            (
                self.groups,
                depth * packed_columns(int(w.shape[0]) // self.groups, self.lanes, self.width),
            )
        )

    def reference(self, w: Array) -> Array:  # noqa: D102
        columns = w.shape[0] // self.groups
        # [groups, columns, channels, taps] -> [groups, taps, channels, columns]
        split = w.reshape(self.groups, columns, w.shape[1], prod(w.shape[2:])).transpose(0, 3, 2, 1)
        return pack_columns(split, self.lanes, self.width)

    def decompose(self, w: Value) -> Value:
        """Return the same made of moves, for weights that come at run time."""
        columns = int(w.type.shape[0]) // self.groups
        channels, *kernel = (int(d) for d in w.type.shape[1:])
        split = reshape(w, (self.groups, columns, channels, prod(kernel)))
        return _emit_pack(transpose(split, (0, 3, 2, 1)), self.lanes, self.width)


def _emit_pack(matrix: Value, lanes: int, width: int) -> Value:
    """[groups, taps, channels, columns] -> [groups, everything in panels], as `pack_columns` does."""
    groups, taps, channels, columns = (int(d) for d in matrix.type.shape)
    depth, padded = taps * channels, packed_columns(columns, lanes, width)
    full = reshape(matrix, (groups, depth, columns))
    full = pad(full, (0, 0, 0), (0, 0, padded - columns))
    whole = padded // width
    parts: list[Value] = []
    if whole:
        panels = reshape(slice_axis(full, 2, 0, whole * width), (groups, depth, whole, width))
        parts.append(reshape(transpose(panels, (0, 2, 1, 3)), (groups, depth * whole * width)))
    if padded > whole * width or not whole:
        rest = padded - whole * width
        parts.append(reshape(slice_axis(full, 2, whole * width, rest), (groups, depth * rest)))
    return concat(parts, 1)


def pack_columns(matrix: Array, lanes: int, width: int) -> Array:
    """[groups, taps, channels, columns] -> [groups, everything in panels]."""
    groups, taps, channels, columns = matrix.shape
    depth, padded = taps * channels, packed_columns(columns, lanes, width)
    full = np.zeros((groups, depth, padded), matrix.dtype)
    full[:, :, :columns] = matrix.reshape(groups, depth, columns)
    panels = [
        full[:, :, at : min(at + width, padded)].reshape(groups, -1)
        for at in range(0, padded, width)
    ]
    return np.concatenate(panels, axis=1) if panels else np.zeros((groups, 0), matrix.dtype)


def unpack_columns(
    packed: Array, taps: int, channels: int, columns: int, lanes: int, width: int
) -> Array:
    """Return the inverse of `pack_columns`."""
    groups, depth, padded = packed.shape[0], taps * channels, packed_columns(columns, lanes, width)
    parts = [
        packed[:, at * depth : min(at + width, padded) * depth].reshape(
            groups, depth, min(width, padded - at)
        )
        for at in range(0, padded, width)
    ]
    full = np.concatenate(parts, axis=2) if parts else np.zeros((groups, depth, 0), packed.dtype)
    return full[:, :, :columns].reshape(groups, taps, channels, columns)


@dataclass(frozen=True)
class WindowOp(Op):
    """What all channels-last convolutions have; pads are (before, after) per axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads

    def extents(self, x: TensorType) -> tuple[Dim, ...]:
        """Return the output extents for an input [N, *spatial, C].

        Raises:
            TypeRuleError: the rank does not fit.
        """
        if x.rank != len(self.kernel) + 2:
            raise TypeRuleError(f"a kernel {self.kernel} does not fit {x} [N, *spatial, C]")
        return _extents(x.shape[1:-1], self.kernel, self.strides, self.dilations, self.pads)

    def taps(self, x: Array) -> Iterator[tuple[int, Array]]:
        """Yield (tap, what it multiplies: the part of the zero-padded x, per output point)."""
        pads = [(int(b), int(a)) for b, a in self.pads]
        out = _extents(x.shape[1:-1], self.kernel, self.strides, self.dilations, tuple(pads))
        padded = np.pad(x, [(0, 0), *((max(b, 0), max(a, 0)) for b, a in pads), (0, 0)])
        for number, tap in enumerate(cartesian(*map(range, self.kernel))):
            where = tuple(
                slice(t * d - min(b, 0), t * d - min(b, 0) + (int(o) - 1) * s + 1, s)
                for t, d, s, o, (b, _) in zip(
                    tap, self.dilations, self.strides, out, pads, strict=True
                )
            )
            yield number, padded[(slice(None), *where, slice(None))]


@op("cpu.packed_conv")
@dataclass(frozen=True)
class PackedConv(WindowOp):
    """Convolution of x [N, *spatial, C] with weights of `PackConv` -> [N, *out, columns].

    Attributes:
        groups: channel groups; group g maps its C / groups channels to its columns / groups
            columns.
        columns: output channels.
        lanes: of the packed weights.
        width: of the packed weights.
    """

    operands = ("x", "w")
    groups: int
    columns: int
    lanes: int
    width: int

    def infer(self, x: TensorType, w: TensorType) -> TensorType:  # noqa: D102
        extents = self.extents(x)
        depth = x.shape[-1]
        padded = packed_columns(self.columns // self.groups, self.lanes, self.width)
        if not isinstance(depth, int) or depth % self.groups or x.dtype is not w.dtype:
            raise TypeRuleError(f"{x} and packed weights {w} do not fit {self.groups} groups")
        needed = (self.groups, depth // self.groups * prod(self.kernel) * padded)
        if w.shape != needed:
            raise TypeRuleError(f"packed weights are {w.shape}, needed {needed}")
        return x.with_shape((x.shape[0], *extents, self.columns))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        depth = prod(self.kernel) * (operands[0].shape[-1] // self.groups)
        return results[0].elements * depth * 2

    def reference(self, x: Array, w: Array) -> Array:  # noqa: D102
        per_group = x.shape[-1] // self.groups
        columns, count = self.columns // self.groups, prod(self.kernel)
        matrix = unpack_columns(w, count, per_group, columns, self.lanes, self.width)
        total: Array | None = None
        for tap, seen in self.taps(x):
            split = seen.reshape(*seen.shape[:-1], self.groups, per_group)
            term = np.einsum("...gc,gco->...go", split, matrix[:, tap])
            total = term if total is None else total + term
        assert total is not None
        return np.ascontiguousarray(total.reshape(*total.shape[:-2], self.columns))


@op("cpu.depthwise_conv")
@dataclass(frozen=True)
class DepthwiseConv(WindowOp):
    """Convolution where output channel c reads input channel c // multiplier only.

    x [N, *spatial, C] and w [taps, C * multiplier] -> [N, *out, C * multiplier].
    """

    operands = ("x", "w")

    def infer(self, x: TensorType, w: TensorType) -> TensorType:  # noqa: D102
        extents = self.extents(x)
        channels, columns = x.shape[-1], w.shape[-1]
        fits = (
            isinstance(channels, int)
            and isinstance(columns, int)
            and channels > 0
            and columns % channels == 0
        )
        if w.rank != 2 or w.shape[0] != prod(self.kernel) or not fits or x.dtype is not w.dtype:
            raise TypeRuleError(
                f"{x} and weights {w} are no depthwise convolution with kernel {self.kernel}"
            )
        return x.with_shape((x.shape[0], *extents, columns))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        del operands
        return results[0].elements * prod(self.kernel) * 2

    def reference(self, x: Array, w: Array) -> Array:  # noqa: D102
        multiplier = w.shape[-1] // x.shape[-1]
        total: Array | None = None
        for tap, seen in self.taps(x):
            term = np.repeat(seen, multiplier, axis=-1) * w[tap]
            total = term if total is None else total + term
        assert total is not None
        return total


def phase_taps(kernel: int, stride: int, dilation: int, phase: int) -> list[int]:
    """Return the taps that reach positions p with (p + before) % stride == phase, the last first.

    Read in this order they walk the input forward, `dilation / gcd(stride, dilation)` elements
    apart.
    """
    return [t for t in reversed(range(kernel)) if (t * dilation - phase) % stride == 0]


def phases(strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the phases of a transposed convolution in the order of its packed weights."""
    return list(cartesian(*map(range, strides)))


@op("cpu.pack_conv_transpose")
@dataclass(frozen=True)
class PackConvTranspose(Op):
    """[C, O / groups, *kernel] -> the weights of one phase in panels, laid out as by `PackConv`.

    Attributes:
        groups: of the transposed convolution.
        strides: of it.
        dilations: of it.
        phase: remainder of (output position + padding before) by the stride, per spatial axis.
        lanes: elements of a vector.
        width: columns of a panel, a multiple of `lanes`.
    """

    operands = ("w",)
    groups: int
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    phase: tuple[int, ...]
    lanes: int
    width: int

    def _taps(self, kernel: Sequence[int]) -> list[list[int]]:
        axes = zip(kernel, self.strides, self.dilations, self.phase, strict=True)
        return [phase_taps(*axis) for axis in axes]

    def infer(self, w: TensorType) -> TensorType:  # noqa: D102
        if w.rank != len(self.phase) + 2 or not w.is_static or int(w.shape[0]) % self.groups:
            raise TypeRuleError(
                f"packs static weights [C, O / groups, *kernel] of {self.groups} groups, not {w}"
            )
        channels, columns, *kernel = (int(d) for d in w.shape)
        depth = channels // self.groups * prod([len(t) for t in self._taps(kernel)])
        return w.with_shape((self.groups, depth * packed_columns(columns, self.lanes, self.width)))

    def reference(self, w: Array) -> Array:  # noqa: D102
        taps = self._taps(w.shape[2:])
        part = w[np.ix_(range(w.shape[0]), range(w.shape[1]), *taps)]
        channels, columns = w.shape[0] // self.groups, w.shape[1]
        count = prod([len(t) for t in taps])
        # [groups, channels, columns, taps] -> [groups, taps, channels, columns]
        split = part.reshape(self.groups, channels, columns, count).transpose(0, 3, 1, 2)
        return pack_columns(split, self.lanes, self.width)

    def decompose(self, w: Value) -> Value:
        """Return the same made of moves, for weights that come at run time."""
        channels, columns, *kernel = (int(d) for d in w.type.shape)
        taps = self._taps(kernel)
        for axis, chosen in enumerate(taps, 2):
            first, second = (*chosen, 0, 0)[:2]
            step = second - first if len(chosen) > 1 else 1
            w = slice_axis(w, axis, first, len(chosen), step)
        count = prod([len(t) for t in taps])
        split = reshape(w, (self.groups, channels // self.groups, columns, count))
        return _emit_pack(transpose(split, (0, 3, 1, 2)), self.lanes, self.width)


@op("cpu.packed_conv_transpose")
@dataclass(frozen=True)
class PackedConvTranspose(Op):
    """Transposed convolution of x [N, *spatial, C] with packed phases -> [N, *out, columns].

    Attributes:
        kernel: taps per spatial axis, of all phases together.
        strides: distance of neighbouring elements of x in the result.
        dilations: distance of the taps.
        pads: (before, after): elements cut off the full result.
        output_padding: elements added at its end before.
        groups: channel groups.
        columns: output channels.
        lanes: of the packed weights.
        width: of the packed weights.
    """

    operands = ("x", "w*")
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads
    output_padding: tuple[int, ...]
    groups: int
    columns: int
    lanes: int
    width: int

    def infer(self, x: TensorType, *weights: TensorType) -> TensorType:  # noqa: D102
        if len(weights) != prod(self.strides) or x.rank != len(self.kernel) + 2:
            raise TypeRuleError(f"{x} and {len(weights)} phases do not fit strides {self.strides}")
        out: list[Dim] = []
        for axis, extent in enumerate(x.shape[1:-1]):
            span = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            before, after = self.pads[axis]
            out.append(
                self.strides[axis] * (extent - 1)
                + span
                + self.output_padding[axis]
                - before
                - after
            )
        return x.with_shape((x.shape[0], *out, self.columns))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        del results
        return operands[0].elements * prod(self.kernel) * (self.columns // self.groups) * 2

    def reference(self, x: Array, *weights: Array) -> Array:  # noqa: D102
        channels, columns = x.shape[-1] // self.groups, self.columns // self.groups
        w = np.zeros((x.shape[-1], columns, *self.kernel), x.dtype)
        for phase, packed in zip(phases(self.strides), weights, strict=True):
            axes = zip(self.kernel, self.strides, self.dilations, phase, strict=True)
            taps = [phase_taps(*axis) for axis in axes]
            counts = [len(t) for t in taps]
            split = unpack_columns(packed, prod(counts), channels, columns, self.lanes, self.width)
            part = split.transpose(0, 2, 3, 1).reshape(x.shape[-1], columns, *counts)
            w[np.ix_(range(x.shape[-1]), range(columns), *taps)] = part
        whole = ConvTranspose(
            self.strides, self.dilations, self.pads, self.output_padding, self.groups, "nhwc"
        )
        return whole.reference(x, w)
