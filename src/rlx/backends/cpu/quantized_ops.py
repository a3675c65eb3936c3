# SPDX-License-Identifier: Apache-2.0
"""Operators private to the CPU backend: sums of products of bytes, over i8 weights in quads.

A quad is four consecutive k of one column of a weight matrix (or four channels of a filter). The instruction that
multiplies bytes takes one signed and one unsigned operand, so an i8 activation is read as activation + 128, its shift.
What that and the zero point add to a sum is taken off again in the epilogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rlx.backends.cpu.conv_ops import WindowOp, pack_columns, packed_columns, unpack_columns
from rlx.base.dims import Dim, ceildiv
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.op import Op
from rlx.ops.matmul import product_flops
from rlx.ops.spec import op

__all__ = [
    "MAX_TAPS",
    "DepthwiseBytes",
    "PackConvQuads",
    "PackQuads",
    "PackedQuantizedConv",
    "PackedQuantizedMatMul",
    "shift_of",
]


MAX_TAPS = 512
"""Up to so many products of bytes are summed in f32 without rounding."""


def shift_of(dtype: DType) -> int:
    """Return what the kernels add to activations of a dtype to read them as unsigned bytes."""
    return 128 if dtype is DType.I8 else 0


@op("cpu.pack_quads")
@dataclass(frozen=True)
class PackQuads(Op):
    """i8 [K, N] -> [ceil(N / width), ceil(K / 4), width, 4]: four consecutive k of a column lie together.

    The last quad is padded with zeros.
    """

    operands = ("w",)
    keeps_elements = True
    width: int

    def infer(self, w: TensorType) -> TensorType:  # noqa: D102
        if w.rank != 2 or w.dtype is not DType.I8:
            raise TypeRuleError(f"packs an i8 matrix, not {w}")
        return w.with_shape(
            (ceildiv(w.shape[1], self.width), ceildiv(w.shape[0], 4), self.width, 4)
        )

    def reference(self, w: Array) -> Array:  # noqa: D102
        rows, columns = w.shape
        panels = -(-columns // self.width)
        padded = np.zeros((-(-rows // 4) * 4, panels * self.width), w.dtype)
        padded[:rows, :columns] = w
        quads = padded.reshape(-1, 4, panels, self.width)
        return np.ascontiguousarray(quads.transpose(2, 0, 3, 1))


@op("cpu.packed_quantized_matmul")
@dataclass(frozen=True)
class PackedQuantizedMatMul(Op):
    """sum_k (a + shift) * w: [..., K] of bytes times w in quads -> i32 [..., N].

    Attributes:
        columns: N.
    """

    operands = ("a", "w")
    columns: int

    def infer(self, a: TensorType, w: TensorType) -> TensorType:  # noqa: D102
        if (
            w.rank != 4
            or a.rank < 1
            or a.shape[-1] != w.shape[1] * 4
            or a.dtype not in (DType.I8, DType.U8)
        ):
            raise TypeRuleError(f"{a} and quads {w} do not multiply")
        return TensorType(DType.I32, (*a.shape[:-1], self.columns))

    def reference(self, a: Array, w: Array) -> Array:  # noqa: D102
        panels, quads, width, _ = w.shape
        matrix = w.transpose(1, 3, 0, 2).reshape(quads * 4, panels * width)[:, : self.columns]
        shifted = a.astype(np.float64) + shift_of(DType.of(a.dtype))
        return np.matmul(shifted, matrix.astype(np.float64)).astype(np.int32)

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return product_flops(operands, results)


@op("cpu.pack_conv_quads")
@dataclass(frozen=True)
class PackConvQuads(Op):
    """i8 [O, I / groups, *kernel] -> [groups, taps * quads * padded, 4]: as `PackConv`, with quads for elements.

    The channels of a group are padded with zeros to whole quads.

    Attributes:
        groups: of the convolution.
        lanes: quads of a vector.
        width: columns of a panel, a multiple of `lanes`.
    """

    operands = ("w",)
    keeps_elements = True
    groups: int
    lanes: int
    width: int

    def infer(self, w: TensorType) -> TensorType:  # noqa: D102
        whole = w.rank >= 3 and w.is_static and w.dtype is DType.I8
        if not whole or int(w.shape[0]) % self.groups:
            raise TypeRuleError(
                f"packs static i8 weights [O, I / groups, *kernel] of {self.groups} groups, not {w}"
            )
        columns, channels, *kernel = (int(d) for d in w.shape)
        padded = packed_columns(columns // self.groups, self.lanes, self.width)
        return w.with_shape((self.groups, prod(kernel) * -(-channels // 4) * padded, 4))

    def reference(self, w: Array) -> Array:  # noqa: D102
        columns, channels = w.shape[0] // self.groups, w.shape[1]
        # [groups, columns, channels, taps] -> [groups, taps, quads, columns, 4]
        split = w.reshape(self.groups, columns, channels, prod(w.shape[2:]))
        split = np.pad(split, ((0, 0), (0, 0), (0, -channels % 4), (0, 0)))
        split = split.reshape(self.groups, columns, -1, 4, split.shape[3]).transpose(0, 4, 2, 1, 3)
        # By any element type: what reads weights back packs the numbers of their elements.
        return np.stack([pack_columns(split[..., i], self.lanes, self.width) for i in range(4)], -1)


@op("cpu.packed_quantized_conv")
@dataclass(frozen=True)
class PackedQuantizedConv(WindowOp):
    """Sums of (x + shift) * w over windows of bytes x [N, *spatial, C] -> i32 [N, *out, columns].

    w: from `PackConvQuads`; zero: [] of x's dtype, what is read outside of x. C / groups is a multiple of 4.

    Attributes:
        groups: channel groups.
        columns: output channels.
        lanes: of the packed weights.
        width: of the packed weights.
    """

    operands = ("x", "w", "zero")
    groups: int
    columns: int
    lanes: int
    width: int

    def infer(self, x: TensorType, w: TensorType, zero: TensorType) -> TensorType:  # noqa: D102
        extents = self.extents(x)
        depth = x.shape[-1]
        if not isinstance(depth, int) or depth % (4 * self.groups) or x.dtype is not zero.dtype:
            raise TypeRuleError(
                f"{x} and a zero point {zero} do not fit {self.groups} groups of quads"
            )
        padded = packed_columns(self.columns // self.groups, self.lanes, self.width)
        needed = (self.groups, depth // self.groups // 4 * prod(self.kernel) * padded, 4)
        if w.shape != needed or w.dtype is not DType.I8:
            raise TypeRuleError(f"packed weights are {w}, needed i8{list(needed)}")
        return TensorType(DType.I32, (x.shape[0], *extents, self.columns))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        depth = prod(self.kernel) * (operands[0].shape[-1] // self.groups)
        return results[0].elements * depth * 2

    def reference(self, x: Array, w: Array, zero: Array) -> Array:  # noqa: D102
        per_group = x.shape[-1] // self.groups
        columns, count = self.columns // self.groups, prod(self.kernel)
        elements = np.ascontiguousarray(w).view(np.int32)[..., 0]
        quads = unpack_columns(elements, count, per_group // 4, columns, self.lanes, self.width)
        split = np.ascontiguousarray(quads).view(np.int8).reshape(*quads.shape, 4)
        matrix = split.transpose(0, 1, 2, 4, 3).reshape(self.groups, count, per_group, columns)
        matrix = matrix.astype(np.float64)
        # Outside of x - zero lie zeros; what zero and the shift are worth is added to the sums.
        shift = float(zero) + shift_of(DType.of(x.dtype))
        total = shift * matrix.sum(axis=(1, 2))
        for tap, seen in self.taps(x.astype(np.float64) - float(zero)):
            grouped = seen.reshape(*seen.shape[:-1], self.groups, per_group)
            total = total + np.einsum("...gc,gco->...go", grouped, matrix[:, tap])
        flat = total.reshape(*total.shape[:-2], self.columns)
        return np.ascontiguousarray(flat.astype(np.int32))


@op("cpu.depthwise_bytes")
@dataclass(frozen=True)
class DepthwiseBytes(WindowOp):
    """Sums of x * w over the windows of each channel of bytes x [N, *spatial, C] -> i32 [N, *out, C].

    w: f32 [taps, C] of whole numbers that fit i8, at most `MAX_TAPS` taps; zero: [] of x's dtype, what is read outside
    of x.
    """

    operands = ("x", "w", "zero")

    def infer(self, x: TensorType, w: TensorType, zero: TensorType) -> TensorType:  # noqa: D102
        extents, count = self.extents(x), prod(self.kernel)
        if w.shape != (count, x.shape[-1]) or w.dtype is not DType.F32 or count > MAX_TAPS:
            raise TypeRuleError(f"weights are {w}, needed f32[{count},{x.shape[-1]}]")
        if x.dtype is not zero.dtype or x.dtype not in (DType.I8, DType.U8):
            raise TypeRuleError(f"{x} are no bytes with a zero point {zero}")
        return TensorType(DType.I32, (x.shape[0], *extents, x.shape[-1]))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        del operands
        return results[0].elements * prod(self.kernel) * 2

    def reference(self, x: Array, w: Array, zero: Array) -> Array:  # noqa: D102
        # Outside of x - zero lie zeros; what zero is worth is added to the sums.
        total = float(zero) * w.astype(np.float64).sum(axis=0)
        for tap, seen in self.taps(x.astype(np.float64) - float(zero)):
            total = total + seen * w[tap]
        return np.ascontiguousarray(total.astype(np.int32))
