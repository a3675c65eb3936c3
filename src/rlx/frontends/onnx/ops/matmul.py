# SPDX-License-Identifier: Apache-2.0
"""Matrix products: MatMul, Gemm, Einsum and the integer forms."""

from __future__ import annotations

from rlx.frontends.onnx.ops.elementwise import scalar
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.integer import IntegerMatMul, centred
from rlx.ops.matmul import einsum, matmul
from rlx.ops.movement import reshape, transpose
from rlx.ops.spec import emit_one

__all__ = ["integer_product", "scalar_of"]


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
    return integer_product(call.value(0), call.maybe(2), call.value(1), call.maybe(3))


def integer_product(a: Value, a_zero: Value | None, b: Value, b_zero: Value | None) -> Value:
    """Return the product of bytes in i32.

    Args:
        a: the left operand.
        a_zero: its zero point, or one for each of its rows.
        b: the right operand.
        b_zero: its zero point, or one for each of its columns.
    """
    a_zero, b_zero = scalar_of(a_zero), scalar_of(b_zero)
    rows = a_zero is not None and a_zero.type.rank
    if rows or b.type.rank != 2 or (b_zero is not None and b_zero.type.rank > 1):
        return matmul(centred(a, _along_rows(a_zero)), centred(b, b_zero))
    return emit_one(IntegerMatMul(), a, a_zero, b, b_zero)


def scalar_of(value: Value | None) -> Value | None:
    """Return a parameter of a whole tensor, which may come as [1], with rank 0; others as they are."""
    if value is None or not value.type.rank or value.type.elements != 1:
        return value
    return reshape(value, ())


def _along_rows(zero: Value | None) -> Value | None:
    """Return the zero points of A's rows as a column."""
    if zero is None or zero.type.rank != 1:
        return zero
    return reshape(zero, (zero.type.shape[0], 1))
