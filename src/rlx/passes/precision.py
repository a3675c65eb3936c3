# SPDX-License-Identifier: Apache-2.0
"""Operators on f32 values compute in the dtype that the precision policy gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.precision import NARROW, OpClass, PrecisionPolicy
from rlx.ir.builder import Builder, Rewriter
from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ops.elementwise import Cast
from rlx.ops.leaf import Constant
from rlx.ops.quant import DequantizeLinear
from rlx.passes.captures import weight_values
from rlx.passes.manager import PassContext

__all__ = ["ApplyPrecision"]


@dataclass(frozen=True)
class ApplyPrecision:
    """op(x: f32) -> cast(op(cast(x))) with every cast made once, and none where both ends are narrow.

    Numerical effect: every result of a narrowed operator is rounded to its dtype. Stays f32: what the policy says,
    operands an operator keeps (masks, statistics), an operator that does not take the dtype, one that reads a
    constant the dtype cannot hold, and a product of dequantised activations: the same node is an integer product
    where the target has one, and means the same everywhere.

    Attributes:
        precision: which operators compute in what: a policy, or the name of one.
    """

    precision: str | PrecisionPolicy = "f32"
    name = "apply-precision"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        policy = PrecisionPolicy.of(self.precision)
        if not policy.narrows:
            return False
        rewriter = Rewriter(graph.facts)
        weights = weight_values(graph)
        for block in [graph.block, *(r for n in graph.block.walk() for r in n.regions)]:
            _Retyper(policy, block, rewriter, weights, ctx).run()
        return rewriter.changed


class _Retyper:
    """Gives the nodes of one block their dtypes; values do not cross blocks, so blocks are independent."""

    def __init__(
        self,
        policy: PrecisionPolicy,
        block: Block,
        rewriter: Rewriter,
        weights: set[Value],
        ctx: PassContext,
    ) -> None:
        self.policy, self.block, self.rewriter, self.weights = policy, block, rewriter, weights
        self.ctx = ctx
        self.narrowed: dict[Value, Value] = {}  # f32 value -> what is computed in its place
        self.casts: dict[tuple[Value, DType], Value] = {}

    def run(self) -> None:
        replaced: list[Node] = []
        for node in self.block.nodes():
            dtype = self._dtype(node)
            made = None if dtype is DType.F32 else self._retyped(node, dtype)
            if made is None:
                self._widen_operands(node)
                continue
            for old, new in zip(node.results, made, strict=True):
                if old.type.dtype is not new.type.dtype:
                    self.narrowed[old] = new
                else:
                    self.rewriter.replace_value(old, new)
            replaced.append(node)
        self.block.results = [self._as(v, v.type.dtype) for v in self.block.results]
        for node in reversed(replaced):
            self.rewriter.erase(node)

    def _dtype(self, node: Node) -> DType:
        """Return what a node computes in."""
        kind = node.op.precision_class
        dtype = self.policy.dtype_of(node.op.name, kind)
        if kind is OpClass.FIXED or node.regions:
            return DType.F32
        if kind is OpClass.COMPUTE and any(map(self._is_dequantized, node.operands)):
            return DType.F32
        if kind is OpClass.ELEMENTWISE and any(map(_is_wide_integer, node.operands)):
            self._note(node, "reads integers that are converted, stays f32")
            return DType.F32
        if dtype is None:
            read = [v for v in self._retypable(node) if not self._is_fixed(v)]
            found = {self.narrowed[v].type.dtype if v in self.narrowed else DType.F32 for v in read}
            dtype = found.pop() if len(found) == 1 else DType.F32
        if dtype in NARROW and not all(_holds(v, dtype) for v in self._retypable(node)):
            self._note(node, f"reads a constant that {dtype} cannot hold, stays f32")
            return DType.F32
        return dtype

    def _retypable(self, node: Node) -> list[Value]:
        return [
            v
            for i, v in enumerate(node.operands)
            if v is not None and v.type.dtype is DType.F32 and not node.op.keeps_dtype(i)
        ]

    def _is_fixed(self, value: Value) -> bool:
        return value in self.weights or (
            value.producer is not None and isinstance(value.producer.op, Constant)
        )

    def _is_dequantized(self, value: Value | None) -> bool:
        """Return whether a value comes, perhaps moved, out of the dequantisation of what is no weight."""
        if value is None or value.producer is None:
            return False
        op, source = (
            value.producer.op,
            value.producer.operands[0] if value.producer.operands else None,
        )
        if op.precision_class is OpClass.MOVEMENT:
            return self._is_dequantized(source)
        return (
            isinstance(op, DequantizeLinear) and source is not None and not self._is_fixed(source)
        )

    def _retyped(self, node: Node, dtype: DType) -> tuple[Value, ...] | None:
        """Return the results of the node over narrow operands; None if it takes none, or not this dtype."""
        if not self._retypable(node):
            return None
        builder = self.rewriter.before(node)
        operands: list[Value | None] = []
        for index, value in enumerate(node.operands):
            kept = value is None or node.op.keeps_dtype(index) or value.type.dtype is not DType.F32
            operands.append(
                None if value is None else self._as(value, value.type.dtype if kept else dtype)
            )
        try:
            return builder.emit(node.op, *operands)
        except TypeRuleError as error:
            self._note(node, f"stays f32: {error}")
            return None

    def _widen_operands(self, node: Node) -> None:
        for index, value in enumerate(node.operands):
            if value is not None and value in self.narrowed:
                self.rewriter.set_operand(node, index, self._as(value, DType.F32))

    def _as(self, value: Value, dtype: DType) -> Value:
        """Return a value in a dtype, by a cast right after the value where it needs one."""
        source = self.narrowed.get(value, value)
        if source.type.dtype is dtype:
            return source
        key = (source, dtype)
        if key not in self.casts:
            producer = source.producer
            before = self.block.first if producer is None else producer.next
            builder = Builder(self.block, self.rewriter.facts, before)
            if producer is not None:
                builder.location = producer.location
            self.casts[key] = builder.emit_one(Cast(dtype), source)
            self.rewriter.changed = True
        return self.casts[key]

    def _note(self, node: Node, text: str) -> None:
        self.ctx.note(ApplyPrecision.name, f"{node.op.name} at {node.location} {text}")


def _is_wide_integer(value: Value | None) -> bool:
    """Return whether a value is made of integers, such as sums of products of bytes, that f16 may not hold."""
    producer = value.producer if value is not None else None
    if producer is None or not isinstance(producer.op, Cast) or producer.operands[0] is None:
        return False
    dtype = producer.operands[0].type.dtype
    return dtype.is_integer and dtype.itemsize >= 4


def _holds(value: Value, dtype: DType) -> bool:
    """Return whether every finite element of a constant is finite in a dtype."""
    producer = value.producer
    if producer is None or not isinstance(producer.op, Constant):
        return True
    data = producer.op.data.array
    with np.errstate(over="ignore"):
        return bool(np.all(np.isfinite(data.astype(dtype.numpy)) | ~np.isfinite(data)))
