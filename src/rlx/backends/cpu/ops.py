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
    "PackedMatMul",
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
