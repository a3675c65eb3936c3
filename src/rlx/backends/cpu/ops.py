# SPDX-License-Identifier: Apache-2.0
"""Operators private to the CPU backend: weights in the layouts its kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlx.base.dims import Dim, ceildiv
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.op import Op
from rlx.ops.matmul import product_flops
from rlx.ops.spec import op

__all__ = [
    "PRODUCT_DTYPES",
    "PackPanels",
    "PackQuads",
    "PackedMatMul",
    "PackedQuantizedMatMul",
    "QuadOffsets",
]

PRODUCT_DTYPES = frozenset({DType.F32, DType.F64, DType.I32, DType.U32, DType.I64, DType.U64})
"""What the kernels of matrix products and convolutions compute in."""


@op("cpu.pack_panels")
@dataclass(frozen=True)
class PackPanels(Op):
    """[K, N] -> [ceil(N / width), K, width]: panels of `width` columns, the last one padded with zeros."""

    operands = ("x",)
    keeps_elements = True
    width: int

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if x.rank != 2:
            raise TypeRuleError(f"packs a matrix, not {x}")
        return x.with_shape((ceildiv(x.shape[1], self.width), x.shape[0], self.width))

    def reference(self, x: Array) -> Array:  # noqa: D102
        rows, columns = x.shape
        panels = -(-columns // self.width)
        padded = np.zeros((rows, panels * self.width), x.dtype)
        padded[:, :columns] = x
        return np.ascontiguousarray(padded.reshape(rows, panels, self.width).transpose(1, 0, 2))


@op("cpu.packed_matmul")
@dataclass(frozen=True)
class PackedMatMul(Op):
    """a @ b for b in panels: [..., K] and [ceil(N / width), K, width] -> [..., N].

    Attributes:
        columns: N.
    """

    operands = ("a", "b")
    columns: int

    def infer(self, a: TensorType, b: TensorType) -> TensorType:  # noqa: D102
        if b.rank != 3 or a.rank < 1 or a.shape[-1] != b.shape[1] or a.dtype is not b.dtype:
            raise TypeRuleError(f"{a} and panels {b} do not multiply")
        shape: tuple[Dim, ...] = (*a.shape[:-1], self.columns)
        return a.with_shape(shape)

    def reference(self, a: Array, b: Array) -> Array:  # noqa: D102
        panels, depth, width = b.shape
        matrix = b.transpose(1, 0, 2).reshape(depth, panels * width)[:, : self.columns]
        return np.matmul(a, matrix)

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return product_flops(operands, results)


@op("cpu.pack_quads")
@dataclass(frozen=True)
class PackQuads(Op):
    """i8 [K, N] -> [ceil(N / width), K / 4, width, 4]: four consecutive k of a column lie together. K % 4 == 0."""

    operands = ("w",)
    keeps_elements = True
    width: int

    def infer(self, w: TensorType) -> TensorType:  # noqa: D102
        if (
            w.rank != 2
            or w.dtype is not DType.I8
            or not isinstance(w.shape[0], int)
            or w.shape[0] % 4
        ):
            raise TypeRuleError(f"packs an i8 matrix with a multiple of 4 rows, not {w}")
        return w.with_shape((ceildiv(w.shape[1], self.width), w.shape[0] // 4, self.width, 4))

    def reference(self, w: Array) -> Array:  # noqa: D102
        rows, columns = w.shape
        panels = -(-columns // self.width)
        padded = np.zeros((rows, panels * self.width), w.dtype)
        padded[:, :columns] = w
        quads = padded.reshape(rows // 4, 4, panels, self.width)
        return np.ascontiguousarray(quads.transpose(2, 0, 3, 1))


@op("cpu.quad_offsets")
@dataclass(frozen=True)
class QuadOffsets(Op):
    """What the zero point of a adds to an integer sum: -(a_zero + shift) * sum_k w[k, n], in i32.

    Attributes:
        shift: 128 where a is i8, because the kernel reads it as unsigned bytes; else 0.
    """

    operands = ("w", "a_zero?")
    shift: int = 0

    def infer(self, w: TensorType, a_zero: TensorType | None = None) -> TensorType:  # noqa: D102
        if w.rank != 2 or w.dtype is not DType.I8 or (a_zero is not None and a_zero.rank):
            raise TypeRuleError(
                f"needs an i8 matrix and a zero point of rank 0, found {w} and {a_zero}"
            )
        return TensorType(DType.I32, (w.shape[1],))

    def reference(self, w: Array, a_zero: Array | None = None) -> Array:  # noqa: D102
        zero = self.shift + (0 if a_zero is None else int(a_zero))
        return (-zero * w.sum(axis=0, dtype=np.int64)).astype(np.int32)


@op("cpu.packed_quantized_matmul")
@dataclass(frozen=True)
class PackedQuantizedMatMul(Op):
    """(sum_k (a + shift) * w + offset[n]) * scale[n]: [..., K] of bytes times w in quads -> f32 [..., N].

    Attributes:
        columns: N.
    """

    operands = ("a", "w", "offsets", "scales")
    columns: int

    def infer(  # noqa: D102
        self, a: TensorType, w: TensorType, offsets: TensorType, scales: TensorType
    ) -> TensorType:
        if (
            w.rank != 4
            or a.rank < 1
            or a.shape[-1] != w.shape[1] * 4
            or a.dtype not in (DType.I8, DType.U8)
        ):
            raise TypeRuleError(f"{a} and quads {w} do not multiply")
        if offsets.shape != (self.columns,) or scales.shape != (self.columns,):
            raise TypeRuleError(
                f"needs offsets and scales [{self.columns}], found {offsets} and {scales}"
            )
        return TensorType(DType.F32, (*a.shape[:-1], self.columns))

    def reference(self, a: Array, w: Array, offsets: Array, scales: Array) -> Array:  # noqa: D102
        panels, quads, width, _ = w.shape
        matrix = w.transpose(1, 3, 0, 2).reshape(quads * 4, panels * width)[:, : self.columns]
        shift = 128.0 if a.dtype.kind == "i" else 0.0
        total = np.matmul(a.astype(np.float64) + shift, matrix.astype(np.float64)) + offsets
        return total.astype(scales.dtype) * scales

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return product_flops(operands, results)
