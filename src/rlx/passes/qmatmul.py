# SPDX-License-Identifier: Apache-2.0
"""Products of dequantised operands become integer products, before dequantised weights are hoisted."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.base.dtypes import DType
from rlx.base.types import Shape
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.conv import Conv
from rlx.ops.leaf import Constant
from rlx.ops.matmul import MatMul
from rlx.ops.movement import reshape, transpose
from rlx.ops.qmatmul import MAX_INNER, QuantizedMatMul, sums_fit
from rlx.ops.quant import DequantizeLinear
from rlx.ops.spec import building, emit_one
from rlx.passes.captures import weight_values
from rlx.passes.manager import PassContext

__all__ = ["RecognizeQuantizedMatMul"]


@dataclass(frozen=True)
class RecognizeQuantizedMatMul:
    """matmul(dequantize(a), dequantize(w)) -> quantized_matmul(a, w) for a weight w; so are 1x1 convolutions.

    For 8-bit a with one scale and i8 w with zero points that are all 0 and one scale, or one per column, and no more
    products per sum than i32 can hold. The integer sum is exact where the f32 product rounds, so results move by about
    the rounding of an f32 sum (reassociates).
    """

    name = "recognize-quantized-matmul"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        if not ctx.claims.ops or not ctx.claims.supports(QuantizedMatMul.name):
            return False
        rewriter = Rewriter(graph.facts)
        weights = weight_values(graph)
        for node in list(graph.block.walk()):
            if isinstance(node.op, MatMul | Conv):
                reason = _rewrite(rewriter, node, weights)
                if reason:
                    ctx.note(self.name, f"{node.op.name} at {node.location}: {reason}")
        return rewriter.changed


def _dequantized(value: Value | None) -> Node | None:
    node = value.producer if value is not None else None
    return node if node is not None and isinstance(node.op, DequantizeLinear) else None


def _rewrite(rewriter: Rewriter, node: Node, weights: set[Value]) -> str:
    """Replace a product if it is one of quantised operands; return why not, or an empty string."""
    left, right = _dequantized(node.operands[0]), _dequantized(node.operands[1])
    if left is None or right is None:
        return ""
    is_matmul = isinstance(node.op, MatMul)
    reason = "" if is_matmul else _more_than_a_product(node)
    reason = reason or _not_integers(left, right, 1 if is_matmul else 0, weights)
    if reason:
        return reason
    a, a_scale, a_zero = (*left.operands, None)[:3]
    w, w_scale = right.operands[:2]
    assert a is not None
    assert a_scale is not None
    assert w is not None
    assert w_scale is not None
    builder = rewriter.before(node)
    with building(builder):
        if not is_matmul:
            channels = a.type.rank - 1
            a = transpose(a, (0, *range(2, channels + 1), 1))
            w = transpose(reshape(w, w.type.shape[:2]), (1, 0))
        columns = () if w_scale.type.elements == 1 else (w_scale.type.elements,)
        flat = (_shaped(a_scale, ()), _shaped(a_zero, ()), w, _shaped(w_scale, columns))
        made = emit_one(QuantizedMatMul(), a, *flat)
        if not is_matmul:
            bias = (*node.operands, None)[2]
            made = made if bias is None else made + bias
            made = transpose(made, (0, made.type.rank - 1, *range(1, made.type.rank - 1)))
    rewriter.replace_node(node, [made])
    return ""


def _more_than_a_product(node: Node) -> str:
    """Return why a convolution is not a product of every position with a matrix, or an empty string."""
    op, w = node.op, node.operands[1]
    assert isinstance(op, Conv)
    assert w is not None
    if op.layout != "nchw":
        return f"it is laid out {op.layout}"
    if op.groups != 1 or any(d != 1 for d in w.type.shape[2:]):
        return "integer convolutions have one group and a window of one element"
    if any(s != 1 for s in op.strides) or any(p != 0 for pair in op.pads for p in pair):
        return "integer convolutions have no stride and no padding"
    return ""


def _not_integers(left: Node, right: Node, channel_axis: int, weights: set[Value]) -> str:
    """Return why the operands cannot be multiplied as integers, or an empty string."""
    a, a_scale, a_zero = (*left.operands, None)[:3]
    w, w_scale, w_zero = (*right.operands, None)[:3]
    assert a is not None
    assert a_scale is not None
    assert w is not None
    assert w_scale is not None
    if w not in weights:
        return "both operands are computed at run time"
    matrix = channel_axis == 0 or w.type.rank == 2
    if a.type.dtype not in (DType.I8, DType.U8) or w.type.dtype is not DType.I8 or not matrix:
        return f"operands are {a.type} and {w.type}"
    inner = w.type.shape[1 - channel_axis]
    if not sums_fit(inner):
        return f"sums of {inner} products may leave i32, which holds those of {MAX_INNER}"
    fixed = all(v is None or _is_fixed(v, weights) for v in (a_scale, a_zero, w_scale))
    if a_scale.type.elements != 1 or not fixed:
        return (
            "the scale or zero point of an operand is computed at run time, or a has more than one"
        )
    if not _per_channel(right, w_scale, channel_axis) or not _is_zero(w_zero):
        return "the weight's scales are not per column, or its zero points are not all 0"
    return ""


def _shaped(value: Value | None, shape: Shape) -> Value | None:
    return value if value is None or value.type.shape == shape else reshape(value, shape)


def _is_fixed(value: Value, weights: set[Value]) -> bool:
    return value in weights or (
        value.producer is not None and isinstance(value.producer.op, Constant)
    )


def _per_channel(node: Node, scale: Value, channel_axis: int) -> bool:
    op = node.op
    assert isinstance(op, DequantizeLinear)
    if op.block or op.to is not DType.F32:
        return False
    rank = node.results[0].type.rank
    return scale.type.elements == 1 or (op.axis is not None and op.axis % rank == channel_axis)


def _is_zero(value: Value | None) -> bool:
    if value is None:
        return True
    if value.producer is None or not isinstance(value.producer.op, Constant):
        return False
    return not value.producer.op.data.array.any()
