# SPDX-License-Identifier: Apache-2.0
"""Products of bytes: those of dequantised operands become integer products, weights lose their zero points.

Both before what follows from weights alone is hoisted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.base.dims import product
from rlx.base.dtypes import DType
from rlx.base.types import Shape
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Op
from rlx.ops.conv import Conv
from rlx.ops.elementwise import cast, mul, sub
from rlx.ops.integer import BYTES, IntegerConv, IntegerMatMul
from rlx.ops.leaf import Constant, constant
from rlx.ops.matmul import MatMul
from rlx.ops.movement import Transpose, reshape, transpose
from rlx.ops.qconv import QuantizedConv
from rlx.ops.qmatmul import MAX_INNER, QuantizedMatMul, sums_fit
from rlx.ops.quant import DequantizeLinear
from rlx.ops.reduce import reduce_sum
from rlx.ops.spec import building, emit_one
from rlx.passes.captures import is_known, weight_values
from rlx.passes.manager import PassContext

__all__ = ["CentreWeights", "RecognizeQuantizedProducts"]

_PRODUCTS: dict[type[Op], str] = {MatMul: QuantizedMatMul.name, Conv: QuantizedConv.name}


@dataclass(frozen=True)
class RecognizeQuantizedProducts:
    """matmul(dequantize(a), dequantize(w)) -> quantized_matmul(a, w) for a weight w; conv -> quantized_conv.

    For 8-bit a with one scale (which may be computed at run time), and 8-bit w (which may be transposed after it was
    dequantised) with one scale, or one per column, whose zero points are all 0 (128 for u8), and no more products per
    sum than i32 can hold. The integer sum is exact where the f32 product rounds, so results move by about the rounding
    of an f32 sum (reassociates).
    """

    name = "recognize-quantized-products"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        if not ctx.claims.ops:
            return False
        rewriter = Rewriter(graph.facts)
        weights = weight_values(graph)
        for node in list(graph.block.walk()):
            made = _PRODUCTS.get(type(node.op))
            if made is not None and ctx.claims.supports(made):
                reason = _rewrite(rewriter, node, weights)
                if reason:
                    ctx.note(self.name, f"{node.op.name} at {node.location}: {reason}")
        return rewriter.changed


def _dequantized(value: Value | None) -> Node | None:
    node = value.producer if value is not None else None
    return node if node is not None and isinstance(node.op, DequantizeLinear) else None


def _before_transpose(value: Value | None) -> Value | None:
    """Return the matrix that a value is the transpose of, or None."""
    node = value.producer if value is not None else None
    if node is None or not isinstance(node.op, Transpose) or node.op.perm != (1, 0):
        return None
    return node.operands[0]


def _rewrite(rewriter: Rewriter, node: Node, weights: set[Value]) -> str:
    """Replace a product if it is one of quantised operands; return why not, or an empty string."""
    conv = node.op if isinstance(node.op, Conv) else None
    flipped = _before_transpose(node.operands[1]) if conv is None else None
    left, right = _dequantized(node.operands[0]), _dequantized(flipped or node.operands[1])
    if left is None or right is None:
        return ""
    columns = 1 if conv is None and flipped is None else 0
    reason = _not_integers(left, right, conv, columns, weights)
    if reason:
        return reason
    a, a_scale, a_zero = (*left.operands, None)[:3]
    w, w_scale, w_zero = (*right.operands, None)[:3]
    assert a is not None
    assert a_scale is not None
    assert w is not None
    assert w_scale is not None
    op: Op = QuantizedMatMul() if conv is None else QuantizedConv.of(conv)
    with building(rewriter.before(node)):
        w, _ = _signed(w, w_zero)
        if flipped is not None:
            w = transpose(w, (1, 0))
        scales = () if w_scale.type.elements == 1 else (w_scale.type.elements,)
        flat = (_shaped(a_scale, ()), _shaped(a_zero, ()), w, _shaped(w_scale, scales))
        made = emit_one(op, a, *flat)
        bias = None if conv is None else (*node.operands, None)[2]
        if bias is not None:
            space = 1 if conv is None or conv.layout == "nhwc" else made.type.rank - 1
            made = made + reshape(bias, (*bias.type.shape, *[1] * (space - 1)))
    rewriter.replace_node(node, [made])
    return ""


@dataclass(frozen=True)
class CentreWeights:
    """integer_matmul(a, w, w_zero) -> integer_matmul(a, w') - w_zero' (rowsum(a) - K a_zero) for i8 w'.

    w' is w, or w - 128 for u8 w. Kernels multiply bytes with signed weights around 0. Convolutions likewise where the
    zero point is 0 then. Products that are none of a weight, and convolutions that keep a zero point or have groups
    that are neither whole quads of channels nor single ones, become products in i32. Exact.
    """

    name = "centre-weights"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        weights = weight_values(graph)
        for node in list(graph.block.walk()):
            op = node.op
            if not isinstance(op, IntegerMatMul | IntegerConv):
                continue
            if ctx.claims.ops and ctx.claims.supports(op.name):
                self._node(rewriter, node, op, weights)
        return rewriter.changed

    @staticmethod
    def _node(
        rewriter: Rewriter, node: Node, op: IntegerMatMul | IntegerConv, weights: set[Value]
    ) -> None:
        a, a_zero, w, w_zero = (*node.operands, None)[:4]
        assert a is not None
        assert w is not None
        fixed = all(v is None or is_known(v, weights) for v in (w, w_zero)) and w.type.is_static
        shifted = _has_zero_point(w, w_zero)
        is_conv = isinstance(op, IntegerConv)
        if not fixed or (is_conv and (shifted or _unfit_groups(op.conv, w))):
            with building(rewriter.before(node)):
                rewriter.replace_node(node, [op.decompose(a, a_zero, w, w_zero)])
            return
        if w.type.dtype is DType.I8 and w_zero is None:
            return
        with building(rewriter.before(node)):
            signed, zero = _signed(w, w_zero)
            made = emit_one(op, a, a_zero, signed, None)
            if shifted:
                rows = reduce_sum(cast(a, DType.I32), (a.type.rank - 1,))
                if a_zero is not None:
                    depth = constant(int(w.type.shape[0]), DType.I32)
                    rows = sub(rows, mul(cast(a_zero, DType.I32), depth))
                made = sub(made, mul(rows, zero))
            rewriter.replace_node(node, [made])


def _has_zero_point(w: Value, zero: Value | None) -> bool:
    """Return whether signed weights have a zero point besides 0, or may have: params are not looked at."""
    middle = 128 if w.type.dtype is DType.U8 else 0
    if zero is None:
        return middle != 0
    known = zero.producer.op if zero.producer is not None else None
    return not isinstance(known, Constant) or bool((known.data.array != middle).any())


def _signed(w: Value, zero: Value | None) -> tuple[Value, Value]:
    """Return i8 weights, and their zero points in i32."""
    wide = constant(0, DType.I32) if zero is None else cast(zero, DType.I32)
    if w.type.dtype is DType.I8:
        return w, wide
    middle = constant(128, DType.I32)
    return cast(sub(cast(w, DType.I32), middle), DType.I8), sub(wide, middle)


def _unfit_groups(op: Conv, w: Value) -> str:
    """Return why groups keep a convolution from being one of integers, or an empty string."""
    filters, depth = w.type.shape[:2]
    if op.groups == 1 or depth % 4 == 0 or (depth == 1 and filters == op.groups):
        return ""
    return f"integers are multiplied one or four channels at a time, its groups have {depth} for {filters} filters"


def _not_integers(
    left: Node, right: Node, conv: Conv | None, columns: int, weights: set[Value]
) -> str:
    """Return why the operands cannot be multiplied as integers, or an empty string; `columns` is an axis of w."""
    a, a_scale = left.operands[:2]
    w, w_scale, w_zero = (*right.operands, None)[:3]
    assert a is not None
    assert a_scale is not None
    assert w is not None
    assert w_scale is not None
    if not is_known(w, weights):
        return "both operands are computed at run time"
    shaped = w.type.rank == 2 or conv is not None
    if a.type.dtype not in BYTES or w.type.dtype not in BYTES or not shaped:
        return f"operands are {a.type} and {w.type}"
    inner = w.type.shape[1 - columns] if conv is None else product(w.type.shape[1:])
    if not sums_fit(inner):
        return f"sums of {inner} products may leave i32, which holds those of {MAX_INNER}"
    unfit = "" if conv is None else _unfit_groups(conv, w)
    if unfit:
        return unfit
    if a_scale.type.elements != 1:
        return "the left operand has more than one scale"
    if not is_known(w_scale, weights):
        return "the weight's scale is computed at run time"
    if not _per_channel(right, w_scale, columns) or _has_zero_point(w, w_zero):
        return (
            "the weight's scales are not per column, or its zero points are not all 0 (128 for u8)"
        )
    return ""


def _shaped(value: Value | None, shape: Shape) -> Value | None:
    return value if value is None or value.type.shape == shape else reshape(value, shape)


def _per_channel(node: Node, scale: Value, channel_axis: int) -> bool:
    op = node.op
    assert isinstance(op, DequantizeLinear)
    if op.block or op.to is not DType.F32:
        return False
    rank = node.results[0].type.rank
    return scale.type.elements == 1 or (op.axis is not None and op.axis % rank == channel_axis)
