# SPDX-License-Identifier: Apache-2.0
"""Rules about conversions."""

from __future__ import annotations

from rlx.base.dtypes import DType
from rlx.ir.builder import Builder
from rlx.ir.graph import Node
from rlx.ir.rewrite import Match, Reject, rule
from rlx.ops.elementwise import Cast
from rlx.passes.rules.patterns import made_by

__all__ = ["CAST_RULES", "preserves"]

# Significant bits (with the hidden one) and the exponent range that integers and floats hold
# exactly.
_DIGITS = {DType.F16: 11, DType.BF16: 8, DType.F32: 24, DType.F64: 53}
_EXPONENT = {DType.F16: 15, DType.BF16: 127, DType.F32: 127, DType.F64: 1023}


def preserves(source: DType, target: DType) -> bool:
    """Return whether every value of `source` converts to `target` unchanged."""
    if source is target or source is DType.BOOL:
        return True
    if target is DType.BOOL:
        return False
    if source in _DIGITS:
        return (
            target in _DIGITS
            and _DIGITS[source] <= _DIGITS[target]
            and _EXPONENT[source] <= _EXPONENT[target]
            # f16 denormals reach 2**-24 and bf16 ones 2**-133: f32 and f64 hold them, bf16 not all
            # of f16's digits.
        )
    bits = source.itemsize * 8 - source.is_signed
    if target in _DIGITS:
        return bits <= _DIGITS[target] and bits <= _EXPONENT[target]
    room = target.itemsize * 8 - target.is_signed
    return bits <= room and (target.is_signed or not source.is_signed)


def _is_ordinary(dtype: DType) -> bool:
    return (
        dtype in _DIGITS
        or dtype is DType.BOOL
        or (dtype.is_integer and dtype not in (DType.I4, DType.U4))
    )


def _chains(source: DType, middle: DType, target: DType) -> bool:
    """Return whether source -> middle -> target is source -> target for every value."""
    if not preserves(source, middle):
        return False
    if target.is_integer and not source.is_float and middle.is_float:
        return preserves(source, target)  # from a float it would saturate, from an integer wrap
    return True


@rule("cast")
def merge_cast(node: Node, builder: Builder) -> Match:
    """cast(x) to the dtype it has -> x; cast(cast(x)) -> cast(x) where the first loses nothing."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, Cast)
    assert x is not None
    if x.type == node.result.type:
        return x
    inner = made_by(x, Cast)
    source = inner[1].operands[0] if inner else None
    if source is None:
        return None
    dtypes = (source.type.dtype, x.type.dtype, op.to)
    if not all(map(_is_ordinary, dtypes)) or not _chains(*dtypes):
        return Reject(f"casting {dtypes[0]} to {dtypes[1]} to {dtypes[2]} is not casting once")
    return source if source.type == node.result.type else builder.emit_one(op, source)


CAST_RULES = (merge_cast,)
