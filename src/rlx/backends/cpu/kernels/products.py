# SPDX-License-Identifier: Apache-2.0
"""One step of sums of products: elements, or bytes four at a time.

AVX-512 VNNI multiplies four unsigned bytes with four signed ones and adds the products to an i32 lane.
"""

from __future__ import annotations

from rlx.backends.cpu.builder import Function, Value
from rlx.backends.cpu.lltypes import I8, vec
from rlx.base.dtypes import DType

__all__ = ["multiply_add", "spread_factor"]


def spread_factor(f: Function, value: Value, lanes: int, quantized: DType | None = None) -> Value:
    """Return an element of the left operand for all columns.

    Args:
        f: where to emit.
        value: the element, or four bytes in one i32.
        lanes: of a vector.
        quantized: dtype of the bytes, i8 or u8.
    """
    if quantized is DType.I8:
        value = value ^ -0x7F7F7F80  # 0x80 in every byte: x + 128 as an unsigned byte
    return f.splat(value, lanes)


def multiply_add(f: Function, a: Value, b: Value, c: Value, *, quantized: bool = False) -> Value:
    """Return a * b + c: rounded once for floats, wrapping for integers, or the sum of four products of bytes."""
    if not quantized:
        return f.fma(a, b, c) if a.type.is_float else a * b + c
    lanes = c.type.lanes
    quads = vec(I8, 4 * lanes)
    name = f"x86.avx512.vpdpbusd.{32 * lanes}"
    return f.intrinsic(name, c, f.bitcast(a, quads), f.bitcast(b, quads))
