# SPDX-License-Identifier: Apache-2.0
"""Matrix multiplication of quantised operands in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType, require_equal
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.integer import BYTES
from rlx.ops.matmul import product_flops
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["MAX_INNER", "QuantizedMatMul", "check_quantized", "sums_fit"]

MAX_INNER = (2**31 - 1) // (255 * 128)
"""The largest K whose sums fit i32 whatever the operands: a - a_zero is within 255 of 0, w within 128."""


def sums_fit(inner: Dim | int) -> bool:
    """Return whether sums of that many products of bytes fit i32."""
    return isinstance(inner, int) and inner <= MAX_INNER


def check_quantized(
    a: TensorType,
    a_scale: TensorType,
    a_zero: TensorType | None,
    w: TensorType,
    w_scale: TensorType,
) -> None:
    """Check dtypes, and the ranks of scales and of the zero point, of a product of quantised operands.

    Raises:
        TypeRuleError: one does not fit.
    """
    if a.dtype not in BYTES or w.dtype is not DType.I8:
        raise TypeRuleError(f"needs i8 or u8 times i8, found {a} and {w}")
    if (
        a_scale.dtype is not DType.F32
        or a_scale.rank
        or w_scale.dtype is not DType.F32
        or w_scale.rank > 1
    ):
        raise TypeRuleError(f"needs f32 scales [] and [N] or [], found {a_scale} and {w_scale}")
    if a_zero is not None and (a_zero.dtype is not a.dtype or a_zero.rank):
        raise TypeRuleError(f"needs a zero point {a.dtype}[], found {a_zero}")


@op("quantized_matmul")
@dataclass(frozen=True)
class QuantizedMatMul(Op):
    """a_scale * w_scale * (a - a_zero) @ w, summed exactly in i32.

    a: [..., K] i8 or u8; a_scale: [] f32; a_zero: [] of a's dtype, 0 where absent; w: [K, N] i8; w_scale: [N] or []
    f32 -> [..., N] f32. K is at most 65,793, so that no sum leaves i32. It is what dequantising both and multiplying in
    f32 approximates: the integer sum is exact, then converted and multiplied by the rounded product of the scales.
    """

    operands = ("a", "a_scale", "a_zero?", "w", "w_scale")
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample(
            (
                Operand((5, 16), DType.U8, "index", 100),
                Operand((), DType.F32, "positive"),
                Operand((), DType.U8, "index", 100),
                Operand((16, 9), DType.I8, "index", 100),
                Operand((9,), DType.F32, "positive"),
            )
        ),
        Sample(
            (
                Operand((2, 3, 20), DType.I8, "index", 100),
                Operand((), DType.F32, "positive"),
                None,
                Operand((20, 70), DType.I8, "index", 100),
                Operand((), DType.F32, "positive"),
            )
        ),
    )

    def infer(  # noqa: D102
        self,
        a: TensorType,
        a_scale: TensorType,
        a_zero: TensorType | None,
        w: TensorType,
        w_scale: TensorType,
    ) -> TensorType:
        check_quantized(a, a_scale, a_zero, w, w_scale)
        if a.rank < 1 or w.rank != 2:
            raise TypeRuleError(f"needs [..., K] and [K, N], found {a} and {w}")
        require_equal(a.shape[-1], w.shape[0], "the inner extents of a and w")
        if not sums_fit(w.shape[0]):
            raise TypeRuleError(f"needs an inner extent of at most {MAX_INNER}, found {w.shape[0]}")
        if w_scale.rank:
            require_equal(w_scale.shape[0], w.shape[1], "the columns of w and its scales")
        return TensorType(DType.F32, (*a.shape[:-1], w.shape[1]))

    def reference(  # noqa: D102
        self, a: Array, a_scale: Array, a_zero: Array | None, w: Array, w_scale: Array
    ) -> Array:
        # Sums of bytes are exact in f64, which is much faster than NumPy's integer product.
        shifted = a.astype(np.float64) - (0.0 if a_zero is None else float(a_zero))
        total = np.matmul(shifted, w.astype(np.float64))
        return total.astype(a_scale.dtype) * (a_scale * w_scale)

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return product_flops(operands, results)

    def decompose(
        self, a: Value, a_scale: Value, a_zero: Value | None, w: Value, w_scale: Value
    ) -> Value:
        """Return it as a product of dequantised operands in f32."""
        from rlx.ops.matmul import matmul
        from rlx.ops.quant import DequantizeLinear

        axis = 1 if w_scale.type.rank else None
        return matmul(
            emit_one(DequantizeLinear(), a, a_scale, a_zero),
            emit_one(DequantizeLinear(axis=axis), w, w_scale, None),
        )
