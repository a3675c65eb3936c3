# SPDX-License-Identifier: Apache-2.0
"""Rows are gathered from a table as it is stored, and widened afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.builder import Builder, Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.elementwise import Cast
from rlx.ops.indexing import Gather
from rlx.ops.leaf import Constant
from rlx.ops.movement import Reshape
from rlx.ops.quant import DequantizeLinear
from rlx.ops.spec import ElementwiseOp
from rlx.passes.captures import weight_values
from rlx.passes.manager import PassContext

__all__ = ["GatherStored"]

_LEAST_BYTES = 1 << 20
_MOST_STEPS = 4
"""Operators that a lookup may repeat per row instead of once per version of the weights."""


@dataclass(frozen=True)
class GatherStored:
    """gather(f(w), i) -> f(gather(w, i)) for an elementwise f of a weight that has fewer bytes than f(w).

    Exact: the same numbers are computed, for the rows in use. Without it the wide table would be
    computed once and kept: four times the memory of an embedding that is stored in 8 bits. Tables
    below 1 MB stay, and those that something else reads whole.
    """

    name = "gather-stored"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether a gather moved; reasons why one did not go into the report."""
        if not ctx.claims.ops:
            return False
        rewriter = Rewriter(graph.facts)
        weights = weight_values(graph)
        for node in list(graph.block.walk()):
            table = node.operands[0] if isinstance(node.op, Gather) else None
            if table is None or table.producer is None or not _is_large(table):
                continue
            chain = _Chain(weights, node)
            if chain.find(table):
                rewriter.replace_node(node, (chain.emit(rewriter.before(node), table),))
            elif chain.reason:
                ctx.note(self.name, f"{node.location}: {chain.reason}")
        return rewriter.changed


def _is_large(value: Value) -> bool:
    size = value.type.nbytes
    return isinstance(size, int) and size >= _LEAST_BYTES


class _Chain:
    """The operators between a gather and the weight that it reads rows of."""

    def __init__(self, weights: set[Value], gather: Node) -> None:
        assert isinstance(gather.op, Gather)
        self.weights = weights
        self.axis = gather.op.axis
        self.gather = gather
        self.steps: dict[Value, tuple[Node, int]] = {}  # result -> node, operand that goes on
        self.reason = ""

    def find(self, table: Value) -> bool:
        """Walk from the table to the weight; return whether the gather should move there."""
        value = table
        while value not in self.weights:
            node = value.producer
            wide = None if node is None else self._next(node)
            if node is None or wide is None or len(self.steps) == _MOST_STEPS:
                return False
            users = value.users
            alone = len(users) == 1 or (value is table and all(_is_gather(u, value) for u in users))
            block = self.gather.block
            assert block is not None
            if not alone or value in block.results:
                self.reason = f"{value.name or 'the wide table'} is read whole as well"
                return False
            self.steps[value] = (node, wide)
            operand = node.operands[wide]
            assert operand is not None
            value = operand
        return value.type.dtype.itemsize < table.type.dtype.itemsize

    def _next(self, node: Node) -> int | None:
        """Return which operand of an elementwise node on weights has all of its elements, if one alone has."""
        op = node.op
        plain = isinstance(op, (Cast, ElementwiseOp))
        plain = plain or (isinstance(op, DequantizeLinear) and op.axis is None)
        types = [None if o is None else o.type for o in node.operands]
        if not plain or op.may_fail(*types):
            return None
        full = [i for i, t in enumerate(types) if t and t.shape == node.result.type.shape]
        rest = [o for i, o in enumerate(node.operands) if o is not None and i not in full]
        if len(full) != 1 or not all(self._is_fixed(o) for o in rest):
            return None
        return full[0]

    def _is_fixed(self, value: Value) -> bool:
        return value in self.weights or (
            value.producer is not None and isinstance(value.producer.op, Constant)
        )

    def emit(self, builder: Builder, value: Value) -> Value:
        """Return the gathered rows of a value of the chain."""
        indices = self.gather.operands[1]
        assert indices is not None
        if value not in self.steps:
            return builder.emit_one(Gather(self.axis), value, indices)
        node, wide = self.steps[value]
        operands = [
            None
            if o is None
            else self.emit(builder, o)
            if i == wide
            else self._aligned(builder, o, node, indices)
            for i, o in enumerate(node.operands)
        ]
        return builder.emit_one(node.op, *operands)

    def _aligned(self, builder: Builder, value: Value, node: Node, indices: Value) -> Value:
        """Return a broadcast operand for the gathered rows: its own rows, or axes of extent 1 in place of one."""
        shape = value.type.shape
        at = self.axis - (node.result.type.rank - len(shape))
        if at < 0:
            return value
        if shape[at] != 1:
            return builder.emit_one(Gather(at), value, indices)
        ones = (1,) * indices.type.rank
        return builder.emit_one(Reshape((*shape[:at], *ones, *shape[at + 1 :])), value)


def _is_gather(user: Node, value: Value) -> bool:
    return isinstance(user.op, Gather) and user.operands[0] is value
