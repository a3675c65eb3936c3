# SPDX-License-Identifier: Apache-2.0
"""Matrix products: MatMul, Gemm, Einsum and the integer forms."""

from __future__ import annotations

from rlx.base.dtypes import DType
from rlx.frontends.onnx.ops.elementwise import scalar
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.matmul import einsum, matmul
from rlx.ops.movement import reshape, transpose

__all__ = ["centred"]


@onnx_op("MatMul")
def _matmul(call: Call) -> Mapped:
    return matmul(call.value(0), call.value(1))


@onnx_op("Gemm", "alpha beta transA transB")
def _gemm(call: Call) -> Mapped:
    """alpha * A' @ B' + beta * C."""
    a, b, c = call.value(0), call.value(1), call.maybe(2)
    a = transpose(a, (1, 0)) if call.get_flag("transA") else a
    b = transpose(b, (1, 0)) if call.get_flag("transB") else b
    product = _times(call.get_float("alpha", 1.0), matmul(a, b))
    return product if c is None else ew.add(product, _times(call.get_float("beta", 1.0), c))


def _times(factor: float, x: Value) -> Value:
    return x if factor == 1.0 else ew.mul(x, scalar(factor, x))


@onnx_op("Einsum", "equation")
def _einsum(call: Call) -> Mapped:
    return einsum(call.get_string("equation"), *call.values())


@onnx_op("MatMulInteger")
def _matmul_integer(call: Call) -> Mapped:
    """(A - zero point of A) @ (B - zero point of B) in i32."""
    a = centred(call.value(0), _along_rows(call.maybe(2)))
    return matmul(a, centred(call.value(1), call.maybe(3)))


def _along_rows(zero: Value | None) -> Value | None:
    """Return the zero points of A's rows as a column."""
    if zero is None or zero.type.rank != 1 or zero.type.shape == (1,):
        return zero
    return reshape(zero, (zero.type.shape[0], 1))


def centred(x: Value, zero: Value | None) -> Value:
    """Return x minus its zero point, in i32."""
    wide = ew.cast(x, DType.I32)
    return wide if zero is None else ew.sub(wide, ew.cast(zero, DType.I32))
