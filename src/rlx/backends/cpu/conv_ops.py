# SPDX-License-Identifier: Apache-2.0
"""Operators private to the CPU backend: channels-last convolutions with weights in the layouts its kernels read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as cartesian

import numpy as np

from rlx.base.dims import Dim, floordiv, product
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.op import Op
from rlx.ops.spec import op

__all__ = ["DepthwiseConv", "PackConv", "PackedConv", "Pads", "conv_extents", "packed_columns"]

Pads = tuple[tuple[Dim, Dim], ...]


def conv_extents(
    spatial: Sequence[Dim], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Pads
) -> tuple[Dim, ...]:
    """Return the output extents of a convolution, one per spatial axis."""
    out: list[Dim] = []
    for extent, k, stride, dilation, (before, after) in zip(spatial, kernel, strides, dilations, pads, strict=True):
        out.append(floordiv(extent + before + after - (k - 1) * dilation - 1, stride) + 1)
    return tuple(out)


def packed_columns(columns: int, lanes: int, width: int) -> int:
    """Return how many columns packed weights have: whole panels, and a last one padded to whole vectors."""
    whole, rest = divmod(columns, width)
    return whole * width + -(-rest // lanes) * lanes


@op("cpu.pack_conv")
@dataclass(frozen=True)
class PackConv(Op):
    """[O, I / groups, *kernel] -> [groups, taps * (I / groups) * padded]: per group panels of `width` columns.

    A panel is [taps, I / groups, width]; the last one is only as many whole vectors wide as it needs, padded with
    zeros.

    Attributes:
        groups: of the convolution.
        lanes: elements of a vector.
        width: columns of a panel, a multiple of `lanes`.
    """

    operands = ("w",)
    groups: int
    lanes: int
    width: int

    def infer(self, w: TensorType) -> TensorType:  # noqa: D102
        if w.rank < 3 or not w.is_static or int(w.shape[0]) % self.groups:
            raise TypeRuleError(f"packs static weights [O, I / groups, *kernel] with O % {self.groups} == 0, not {w}")
        depth = product(w.shape[1:])
        return w.with_shape((self.groups, depth * packed_columns(int(w.shape[0]) // self.groups, self.lanes, self.width)))

    def reference(self, w: Array) -> Array:  # noqa: D102
        columns = w.shape[0] // self.groups
        depth = int(np.prod(w.shape[1:]))
        padded = packed_columns(columns, self.lanes, self.width)
        # [groups, columns, channels, taps] -> [groups, taps, channels, columns]
        split = w.reshape(self.groups, columns, w.shape[1], -1).transpose(0, 3, 2, 1).reshape(self.groups, depth, columns)
        full = np.zeros((self.groups, depth, padded), w.dtype)
        full[:, :, :columns] = split
        panels = [
            full[:, :, at : min(at + self.width, padded)].reshape(self.groups, -1) for at in range(0, padded, self.width)
        ]
        return np.concatenate(panels, axis=1) if panels else np.zeros((self.groups, 0), w.dtype)


@dataclass(frozen=True)
class _Window(Op):
    """What all channels-last convolutions have: kernel, strides, dilations and (before, after) padding per axis."""

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
        return conv_extents(x.shape[1:-1], self.kernel, self.strides, self.dilations, self.pads)

    def taps(self, x: Array) -> Iterator[tuple[int, Array]]:
        """Yield (tap, the part of the zero-padded x that it multiplies, one element per output point)."""
        pads = [(int(b), int(a)) for b, a in self.pads]
        out = conv_extents(x.shape[1:-1], self.kernel, self.strides, self.dilations, tuple(pads))
        padded = np.pad(x, [(0, 0), *((max(b, 0), max(a, 0)) for b, a in pads), (0, 0)])
        for number, tap in enumerate(cartesian(*map(range, self.kernel))):
            where = tuple(
                slice(t * d - min(b, 0), t * d - min(b, 0) + (int(o) - 1) * s + 1, s)
                for t, d, s, o, (b, _) in zip(tap, self.dilations, self.strides, out, pads, strict=True)
            )
            yield number, padded[(slice(None), *where, slice(None))]


@op("cpu.packed_conv")
@dataclass(frozen=True)
class PackedConv(_Window):
    """Convolution of x [N, *spatial, C] with weights of `PackConv` -> [N, *out, columns].

    Attributes:
        groups: channel groups; group g maps its C / groups channels to its columns / groups columns.
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
        needed = (self.groups, depth // self.groups * int(np.prod(self.kernel)) * padded)
        if w.shape != needed:
            raise TypeRuleError(f"packed weights are {w.shape}, needed {needed}")
        return x.with_shape((x.shape[0], *extents, self.columns))

    def reference(self, x: Array, w: Array) -> Array:  # noqa: D102
        per_group = x.shape[-1] // self.groups
        columns = self.columns // self.groups
        padded = packed_columns(columns, self.lanes, self.width)
        depth = per_group * int(np.prod(self.kernel))
        parts = [
            w[:, at * depth : min(at + self.width, padded) * depth].reshape(self.groups, depth, -1)
            for at in range(0, padded, self.width)
        ]
        matrix = np.concatenate(parts, axis=2)[:, :, :columns].reshape(self.groups, -1, per_group, columns)
        total: Array | None = None
        for tap, seen in self.taps(x):
            split = seen.reshape(*seen.shape[:-1], self.groups, per_group)
            term = np.einsum("...gc,gco->...go", split, matrix[:, tap])
            total = term if total is None else total + term
        assert total is not None
        return np.ascontiguousarray(total.reshape(*total.shape[:-2], self.columns))


@op("cpu.depthwise_conv")
@dataclass(frozen=True)
class DepthwiseConv(_Window):
    """Convolution where output channel c reads input channel c // multiplier only.

    x [N, *spatial, C] and w [taps, C * multiplier] -> [N, *out, C * multiplier].
    """

    operands = ("x", "w")

    def infer(self, x: TensorType, w: TensorType) -> TensorType:  # noqa: D102
        extents = self.extents(x)
        channels, columns = x.shape[-1], w.shape[-1]
        fits = isinstance(channels, int) and isinstance(columns, int) and channels > 0 and columns % channels == 0
        if w.rank != 2 or w.shape[0] != int(np.prod(self.kernel)) or not fits or x.dtype is not w.dtype:
            raise TypeRuleError(f"{x} and weights {w} are no depthwise convolution with kernel {self.kernel}")
        return x.with_shape((x.shape[0], *extents, columns))

    def reference(self, x: Array, w: Array) -> Array:  # noqa: D102
        multiplier = w.shape[-1] // x.shape[-1]
        total: Array | None = None
        for tap, seen in self.taps(x):
            term = np.repeat(seen, multiplier, axis=-1) * w[tap]
            total = term if total is None else total + term
        assert total is not None
        return total


