# SPDX-License-Identifier: Apache-2.0
"""Convolution of quantised operands in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlx.base.dims import Dim, product
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType, require_equal
from rlx.ir.graph import Value
from rlx.ops.integer import ByteConv, conv_sample
from rlx.ops.qmatmul import MAX_INNER, check_quantized, sums_fit
from rlx.ops.quant import DequantizeLinear
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["QuantizedConv"]


def _sample(
    x: tuple[int, ...],
    w: tuple[int, ...],
    *,
    zero: bool = True,
    dtype: DType = DType.U8,
    **attributes: object,
) -> Sample:
    operands = (
        Operand(x, dtype, "index", 100),
        Operand((), DType.F32, "positive"),
        Operand((), dtype, "index", 100) if zero else None,
        Operand(w, DType.I8, "index", 100),
        Operand((w[0],) if zero else (), DType.F32, "positive"),
    )
    return conv_sample(operands, len(w) - 2, **attributes)


@op("quantized_conv")
@dataclass(frozen=True)
class QuantizedConv(ByteConv):
    """x_scale * w_scale[o] * (sum over c, t of (x[n, c, p stride + t dilation - before] - x_zero) w[o, c, t]).

    x: i8 or u8, [N, C, *space] (layout nchw) or [N, *space, C] (nhwc); x_scale: [] f32; x_zero: [] of x's dtype, 0
    where absent; w: i8 [O, C / groups, *kernel] in both layouts; w_scale: [O] or [] f32. The result is f32 of the shape
    that `conv` gives. Outside of x it reads x_zero. A sum has at most 65,793 products, so that none leaves i32. It is
    what dequantising both and a convolution in f32 approximate: the integer sum is exact, then converted and multiplied
    by the rounded product of the scales.

    Attributes:
        strides: step of the window per spatial axis.
        dilations: distance of the window's taps.
        pads: (before, after) per spatial axis; may be symbolic, never negative.
        groups: number of groups that the channels are split into.
        layout: `nchw` or `nhwc`.
    """

    operands = ("x", "x_scale", "x_zero?", "w", "w_scale")
    samples: ClassVar[tuple[Sample, ...]] = (
        _sample((2, 8, 6, 7), (9, 8, 3, 3), pads=((1, 1), (0, 2))),
        _sample(
            (1, 3, 9, 8), (5, 3, 3, 2), strides=(2, 1), dilations=(1, 2), pads=((1, 0), (1, 1))
        ),
        _sample((2, 8, 5, 5), (6, 4, 3, 3), zero=False, dtype=DType.I8, groups=2),
        _sample((1, 5, 6, 8), (70, 8, 1, 1), layout="nhwc", dtype=DType.I8),
        _sample((2, 6, 4), (4, 2, 3), groups=3, pads=((1, 1),), zero=False),
        _sample((1, 4, 3, 4, 5), (3, 4, 2, 3, 1), pads=((1, 0), (1, 1), (0, 0))),
    )

    def infer(  # noqa: D102
        self,
        x: TensorType,
        x_scale: TensorType,
        x_zero: TensorType | None,
        w: TensorType,
        w_scale: TensorType,
    ) -> TensorType:
        check_quantized(x, x_scale, x_zero, w, w_scale)
        result = self.conv.infer(x.with_dtype(DType.F32), w.with_dtype(DType.F32))
        depth = product(w.shape[1:])
        if not sums_fit(depth):
            raise TypeRuleError(f"needs sums of at most {MAX_INNER} products, found {depth}")
        if w_scale.rank:
            require_equal(w_scale.shape[0], w.shape[0], "the filters of w and their scales")
        return result

    def reference(  # noqa: D102
        self, x: Array, x_scale: Array, x_zero: Array | None, w: Array, w_scale: Array
    ) -> Array:
        # Sums of bytes are exact in f64, which is much faster than NumPy's integer product.
        shifted = x.astype(np.float64) - (0.0 if x_zero is None else float(x_zero))
        total = self.conv.reference(shifted, w.astype(np.float64))
        scale = x_scale * w_scale
        if scale.ndim and self.layout == "nchw":
            scale = scale.reshape(-1, *[1] * (x.ndim - 2))
        return total.astype(x_scale.dtype) * scale

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return results[0].elements * product(operands[3].shape[1:]) * 2

    def decompose(
        self, x: Value, x_scale: Value, x_zero: Value | None, w: Value, w_scale: Value
    ) -> Value:
        """Return it as a convolution of dequantised operands in f32."""
        axis = 0 if w_scale.type.rank else None
        return emit_one(
            self.conv,
            emit_one(DequantizeLinear(), x, x_scale, x_zero),
            emit_one(DequantizeLinear(axis=axis), w, w_scale, None),
        )
