# SPDX-License-Identifier: Apache-2.0
"""What regions capture: no more than they read, and no constants."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ir.rewrite import GraphRewriter
from rlx.ops.control import If, Loop, Scan
from rlx.ops.leaf import Constant, DimTensor
from rlx.passes.manager import PassContext

__all__ = ["Captures", "first_capture", "is_known", "weight_values"]


@dataclass(frozen=True)
class Captures:
    """Copy captured constants into regions, and drop captures that no region reads.

    Exact. Rules look at one block at a time: a constant that is a parameter would be none to them,
    and a value that is captured for nothing would be kept alive.
    """

    name = "captures"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether a node changed."""
        del ctx
        rewriter = GraphRewriter(graph)
        _visit(graph.block, rewriter)
        return rewriter.changed


def _visit(block: Block, rewriter: GraphRewriter) -> None:
    for node in block:
        first = first_capture(node)
        if first is None:
            continue
        for index in range(first[0], len(node.operands)):
            _copy_constant(node, index, index - first[0] + first[1], rewriter)
        for region in node.regions:
            _visit(region, rewriter)
        _drop_unread(node, first, rewriter)


def first_capture(node: Node) -> tuple[int, int] | None:
    """Return (operand index, region parameter index) of the first capture."""
    match node.op:
        case If():
            return 1, 0
        case Loop(carried=carried):
            return 2 + carried, 2 + carried
        case Scan(carried=carried, scan_inputs=scanned):
            return carried + scanned, carried + scanned
        case _:
            return None


def _copy_constant(node: Node, index: int, parameter: int, rewriter: GraphRewriter) -> None:
    operand = node.operands[index]
    if operand is None or operand.producer is None:
        return
    op = operand.producer.op
    if not isinstance(op, Constant | DimTensor):
        return
    for region in node.regions:
        inner = region.parameters[parameter]
        if inner.uses or rewriter.is_root(inner):
            copy = Node(op, (), [operand.type], (), operand.producer.location)
            region.insert(copy, region.first)
            rewriter.replace_value(inner, copy.result)


def _drop_unread(node: Node, first: tuple[int, int], rewriter: GraphRewriter) -> None:
    unread: list[int] = []
    for position in range(len(node.operands) - first[0]):
        inner = [region.parameters[first[1] + position] for region in node.regions]
        if not any(v.uses or rewriter.is_root(v) for v in inner):
            unread.append(position)
    if not unread:
        return
    gone = {first[0] + position for position in unread}
    operands = [o for i, o in enumerate(node.operands) if i not in gone]
    for region in node.regions:
        for position in reversed(unread):
            del region.parameters[first[1] + position]
        for index, parameter in enumerate(region.parameters):
            parameter.index = index
    types = [r.type for r in node.results]
    new = rewriter.before(node).emit_typed(node.op, operands, types, node.regions)
    rewriter.replace_node(node, new.results)


def weight_values(graph: Graph) -> set[Value]:
    """Return the params of a graph and the region parameters that capture them."""
    found = graph.param_values()
    _collect(graph.block, found)
    return found


def is_known(value: Value, weights: set[Value]) -> bool:
    """Return whether a value is a constant or one of these weights: what follows from such is computed once."""
    producer = value.producer
    return value in weights or (producer is not None and isinstance(producer.op, Constant))


def _collect(block: Block, found: set[Value]) -> None:
    for node in block:
        first = first_capture(node)
        if first is None:
            continue
        for region in node.regions:
            for index in range(first[0], len(node.operands)):
                if node.operands[index] in found:
                    found.add(region.parameters[first[1] + index - first[0]])
            _collect(region, found)
