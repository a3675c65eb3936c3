# SPDX-License-Identifier: Apache-2.0
"""Channels-last layout for convolutions and pools, with transposes moved away and cancelled.

`ChannelsLast` gives every convolution and pool the layout a backend prefers, between two transposes. `SinkTransposes`
moves a transpose below its reader (elementwise operators, concat, reductions, pad, slice, resize, softmax), so that it
meets the next one and both vanish; what is left stands at the graph's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from rlx.base.dtypes import DType
from rlx.base.types import TensorType
from rlx.ir.builder import Builder, Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Op
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.elementwise import Cast
from rlx.ops.integer import IntegerConv
from rlx.ops.leaf import Constant
from rlx.ops.movement import Concat, Pad, Reshape, Slice, Transpose
from rlx.ops.norm import LogSoftmax, Softmax
from rlx.ops.pool import Pool
from rlx.ops.qconv import QuantizedConv
from rlx.ops.quant import DequantizeLinear, QuantizeLinear
from rlx.ops.reduce import Reduce
from rlx.ops.resize import Resize
from rlx.ops.spec import ElementwiseOp
from rlx.passes.manager import PassContext

__all__ = ["ChannelsLast", "SinkTransposes"]

T = TypeVar("T")
Permutation = tuple[int, ...]
_Layouted: TypeAlias = Conv | ConvTranspose | IntegerConv | Pool | QuantizedConv


_COSTS = Value(TensorType(DType.BOOL, ()), None, 0, "no value: a transpose would be needed")


def _permuted(items: Sequence[T], perm: Permutation) -> tuple[T, ...]:
    return tuple(items[p] for p in perm)


def _inverse(perm: Permutation) -> Permutation:
    return tuple(perm.index(i) for i in range(len(perm)))


@dataclass(frozen=True)
class ChannelsLast:
    """conv(x, w), channels first -> transpose(conv(transpose(x), w)), channels last; pools likewise. Exact."""

    name = "channels-last"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        for node in list(graph.block.walk()):
            op = node.op
            wanted = ctx.claims.layout_of(op.name) == "nhwc"
            if wanted and isinstance(op, _Layouted) and op.layout == "nchw":
                _to_channels_last(rewriter, node, op)
        return rewriter.changed


def _to_channels_last(rewriter: Rewriter, node: Node, op: _Layouted) -> None:
    x = node.operands[0]
    assert x is not None
    rank = x.type.rank
    last = (0, *range(2, rank), 1)
    builder = rewriter.before(node)
    moved = builder.emit_one(Transpose(last), x)
    (result,) = builder.emit(replace(op, layout="nhwc"), moved, *node.operands[1:])
    rewriter.replace_node(node, [builder.emit_one(Transpose(_inverse(last)), result)])


@dataclass(frozen=True)
class SinkTransposes:
    """f(transpose(x), transpose(y)) -> transpose(f(x, y)) where all large operands are transposed alike. Exact."""

    name = "sink-transposes"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks in order; return whether anything changed."""
        del ctx
        rewriter, leaves = Rewriter(graph.facts), graph.param_values()
        for node in list(graph.block.walk()):
            if node.block is not None:
                _sink(rewriter, node, leaves)
        return rewriter.changed


def _sink(rewriter: Rewriter, node: Node, leaves: set[Value]) -> None:
    if isinstance(node.op, Transpose):
        _cancel(rewriter, node)
        return
    rule = _rule(node.op)
    if rule is None or len(node.results) != 1:
        return
    rank = node.result.type.rank
    perms = {p for o in node.operands if o is not None and (p := _permutation(o)) is not None}
    if len(perms) != 1:
        return
    (perm,) = perms
    if len(perm) != rank:
        return
    back = _inverse(perm)
    builder = rewriter.before(node)
    sources: list[Value | None] = []
    for operand in node.operands:
        source = _before_transpose(
            builder, operand, perm, back, leaves, isinstance(node.op, ElementwiseOp)
        )
        if source is _COSTS:
            return
        sources.append(source)
    (result,) = builder.emit(rule(node.op, perm), *sources)
    rewriter.replace_node(node, [builder.emit_one(Transpose(perm), result)])


def _cancel(rewriter: Rewriter, node: Node) -> None:
    """transpose(transpose(x, p), q) -> x or one transpose, even where the inner one has other readers."""
    source = node.operands[0]
    assert source is not None
    assert isinstance(node.op, Transpose)
    inner = source.producer
    if inner is None or not isinstance(inner.op, Transpose):
        return
    origin = inner.operands[0]
    assert origin is not None
    combined = _permuted(inner.op.perm, node.op.perm)
    if combined == tuple(range(len(combined))):
        rewriter.replace_node(node, [origin])
    else:
        new = rewriter.before(node).emit_one(Transpose(combined), origin)
        rewriter.replace_node(node, [new])


def _permutation(value: Value) -> Permutation | None:
    node = value.producer
    if node is not None and isinstance(node.op, Transpose) and not _is_small(value.type):
        return node.op.perm
    return None


def _is_small(type_: TensorType) -> bool:
    return all(d == 1 for d in type_.shape)


def _before_transpose(
    builder: Builder,
    operand: Value | None,
    perm: Permutation,
    back: Permutation,
    leaves: set[Value],
    broadcasts: bool,
) -> Value | None:
    """Return the operand with the transpose taken off, or `_COSTS` where that takes a transpose at run time."""
    if operand is None or operand.type.rank == 0:
        return operand
    producer = operand.producer
    if producer is not None and isinstance(producer.op, Transpose) and producer.op.perm == perm:
        return producer.operands[0]
    if not broadcasts:
        return _COSTS
    if _is_small(operand.type):
        return operand
    free = _is_param_only(operand, leaves)
    ones = sum(d != 1 for d in operand.type.shape) <= 1
    if not free and not ones:
        return _COSTS
    full = operand
    if operand.type.rank < len(perm):
        full = builder.emit_one(
            Reshape((*([1] * (len(perm) - operand.type.rank)), *operand.type.shape)), operand
        )
    if ones:
        return builder.emit_one(Reshape(_permuted(full.type.shape, back)), full)
    return builder.emit_one(Transpose(back), full)


def _is_param_only(value: Value, leaves: set[Value]) -> bool:
    pending = [value]
    for _ in range(64):
        if not pending:
            return True
        current = pending.pop()
        if current in leaves:
            continue
        node = current.producer
        if node is None:
            return False
        if not isinstance(node.op, Constant):
            pending.extend(o for o in node.operands if o is not None)
    return False


def _rule(op: Op) -> Callable[..., Op] | None:
    """Return how the operator looks below a transpose: (operator, perm) -> operator on the untransposed operand."""
    if isinstance(op, ElementwiseOp | Cast):
        return _unmoved
    if isinstance(op, QuantizeLinear | DequantizeLinear):
        return _unmoved if op.axis is None else None
    for kind, rule in _RULES.items():
        if isinstance(op, kind):
            if isinstance(op, Reduce) and not op.keepdims:
                return None
            return rule
    return None


# Axis a of the transposed tensor is axis perm[a] of the tensor below; attribute tuples move by the inverse.


def _unmoved(op: Op, _: Permutation) -> Op:
    return op


def _move_concat(op: Concat, perm: Permutation) -> Op:
    return replace(op, axis=perm[op.axis])


def _move_softmax(op: Softmax | LogSoftmax, perm: Permutation) -> Op:
    return replace(op, axis=perm[op.axis])


def _move_reduce(op: Reduce, perm: Permutation) -> Op:
    return replace(op, axes=tuple(sorted(perm[a] for a in op.axes)))


def _move_pad(op: Pad, perm: Permutation) -> Op:
    back = _inverse(perm)
    return replace(op, before=_permuted(op.before, back), after=_permuted(op.after, back))


def _move_slice(op: Slice, perm: Permutation) -> Op:
    back = _inverse(perm)
    starts, sizes = _permuted(op.starts, back), _permuted(op.sizes, back)
    return replace(op, starts=starts, sizes=sizes, steps=_permuted(op.steps, back))


def _move_resize(op: Resize, perm: Permutation) -> Op:
    back = _inverse(perm)
    return replace(op, sizes=_permuted(op.sizes, back), scales=_permuted(op.scales, back))


_RULES: dict[type[Op], Callable[..., Op]] = {
    Concat: _move_concat,
    Softmax: _move_softmax,
    LogSoftmax: _move_softmax,
    Reduce: _move_reduce,
    Pad: _move_pad,
    Slice: _move_slice,
    Resize: _move_resize,
}
