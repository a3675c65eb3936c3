# SPDX-License-Identifier: Apache-2.0
"""Products of dequantised operands become integer products, before dequantised weights are hoisted."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.base.dtypes import DType
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.leaf import Constant
from rlx.ops.matmul import MatMul
from rlx.ops.movement import Reshape
from rlx.ops.qmatmul import QuantizedMatMul
from rlx.ops.quant import DequantizeLinear
from rlx.passes.captures import weight_values
from rlx.passes.manager import PassContext

__all__ = ["RecognizeQuantizedMatMul"]


@dataclass(frozen=True)
class RecognizeQuantizedMatMul:
    """matmul(dequantize(a), dequantize(w)) -> quantized_matmul(a, w) for a weight w.

    For 8-bit a with one scale and i8 w with zero points that are all 0 and one scale, or one per column. The integer
    sum is exact where the f32 product rounds, so results move by about the rounding of an f32 sum (reassociates).
    """

    name = "recognize-quantized-matmul"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        if not ctx.claims.ops or not ctx.claims.supports(QuantizedMatMul.name):
            return False
        rewriter = Rewriter(graph.facts)
        weights = weight_values(graph)
        for node in list(graph.block.walk()):
            if isinstance(node.op, MatMul):
                reason = _rewrite(rewriter, node, weights)
                if reason:
                    ctx.note(self.name, f"{node.location}: {reason}")
        return rewriter.changed


def _dequantized(value: Value | None) -> Node | None:
    node = value.producer if value is not None else None
    return node if node is not None and isinstance(node.op, DequantizeLinear) else None


def _rewrite(rewriter: Rewriter, node: Node, weights: set[Value]) -> str:
    """Replace a product if it is one of quantised operands; return why not, or an empty string."""
    left, right = _dequantized(node.operands[0]), _dequantized(node.operands[1])
    if left is None or right is None:
        return ""
    a, a_scale, a_zero = (*left.operands, None)[:3]
    w, w_scale, w_zero = (*right.operands, None)[:3]
    assert a is not None
    assert a_scale is not None
    assert w is not None
    assert w_scale is not None
    if w not in weights:
        return "both operands are computed at run time"
    if a.type.dtype not in (DType.I8, DType.U8) or w.type.dtype is not DType.I8 or w.type.rank != 2:
        return f"operands are {a.type} and {w.type}"
    fixed = all(v is None or _is_fixed(v, weights) for v in (a_scale, a_zero, w_scale))
    if a_scale.type.elements != 1 or not fixed:
        return (
            "the scale or zero point of an operand is computed at run time, or a has more than one"
        )
    if not _per_column(right, w_scale) or not _is_zero(w_zero):
        return "the weight's scales are not per column, or its zero points are not all 0"
    builder = rewriter.before(node)

    def flat(value: Value | None, rank: int) -> Value | None:
        if value is None or value.type.rank == rank:
            return value
        return builder.emit_one(Reshape(() if rank == 0 else (value.type.elements,)), value)

    rank = 0 if w_scale.type.elements == 1 else 1
    operands = (a, flat(a_scale, 0), flat(a_zero, 0), w, flat(w_scale, rank))
    rewriter.replace_node(node, builder.emit(QuantizedMatMul(), *operands))
    return ""


def _is_fixed(value: Value, weights: set[Value]) -> bool:
    return value in weights or (
        value.producer is not None and isinstance(value.producer.op, Constant)
    )


def _per_column(node: Node, scale: Value) -> bool:
    op = node.op
    assert isinstance(op, DequantizeLinear)
    if op.block or op.to is not DType.F32:
        return False
    return scale.type.elements == 1 or op.axis in (1, -1)


def _is_zero(value: Value | None) -> bool:
    if value is None:
        return True
    if value.producer is None or not isinstance(value.producer.op, Constant):
        return False
    return not value.producer.op.data.array.any()
