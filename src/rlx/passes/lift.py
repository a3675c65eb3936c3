# SPDX-License-Identifier: Apache-2.0
"""Param-only work inside regions moves out of them, so that it can be hoisted."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.builder import Rewriter
from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ops.leaf import Constant
from rlx.passes.captures import first_capture
from rlx.passes.manager import PassContext

__all__ = ["LiftParamWork"]


@dataclass(frozen=True)
class LiftParamWork:
    """if(c) { f(captured weight) } -> w' = f(weight); if(c) { captured w' }, innermost regions first.

    Exact: f runs whatever the condition says, so only operators that cannot fail move. Operators that read constants
    alone stay; they are folded where they are.
    """

    name = "lift-param-work"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether a node moved."""
        del ctx
        rewriter = Rewriter(graph.facts)
        _visit(graph.block, rewriter, graph.param_values())
        return rewriter.changed


def _visit(block: Block, rewriter: Rewriter, weights: set[Value]) -> set[Value]:
    """Lift out of the regions of a block's nodes; return the block's values that depend on weights alone."""
    pure = set(weights)
    for node in block.nodes():
        for region in node.regions:
            _lift(node, region, rewriter, pure)
        if _is_param_only(node, pure):
            pure.update(node.results)
    return pure


def _lift(owner: Node, region: Block, rewriter: Rewriter, outer_pure: set[Value]) -> None:
    first = first_capture(owner)
    if first is None:
        return
    captured = {
        region.parameters[first[1] + i]: owner.operands[first[0] + i]
        for i in range(len(owner.operands) - first[0])
    }
    weights = {inner for inner, outer in captured.items() if outer in outer_pure}
    pure = _visit(region, rewriter, weights)
    moved: dict[Value, Value] = {
        inner: outer for inner, outer in captured.items() if outer is not None
    }
    for node in region.nodes():
        if not node.results or node.results[0] not in pure:
            continue
        builder = rewriter.before(owner)
        builder.location = node.location
        operands = [
            None if o is None else _outside(o, moved, rewriter, owner) for o in node.operands
        ]
        copy = builder.emit_typed(node.op, operands, [r.type for r in node.results])
        outer_pure.update(copy.results)
        moved.update(zip(node.results, copy.results, strict=True))
    for node in region.nodes():
        if node.results and node.results[0] in pure:
            for inner in node.results:
                if any(u.results and u.results[0] not in pure for u in inner.users) or _is_result(
                    inner, region
                ):
                    rewriter.replace_value(
                        inner, _capture(owner, region, moved[inner], first, rewriter)
                    )
    _erase_unread(region, pure, rewriter)


def _erase_unread(region: Block, pure: set[Value], rewriter: Rewriter) -> None:
    """Erase what was lifted: it would be lifted again by the next run."""
    for node in reversed(region.nodes()):
        lifted = node.results and node.results[0] in pure
        if lifted and not any(r.uses or _is_result(r, region) for r in node.results):
            rewriter.erase(node)


def _is_result(value: Value, block: Block) -> bool:
    return any(r is value for r in block.results)


def _outside(value: Value, moved: dict[Value, Value], rewriter: Rewriter, owner: Node) -> Value:
    """Return what an operand inside the region is outside; a constant is copied there."""
    if value not in moved:
        assert value.producer is not None
        copy = rewriter.before(owner).emit_typed(value.producer.op, (), [value.type])
        moved[value] = copy.result
    return moved[value]


def _is_param_only(node: Node, pure: set[Value]) -> bool:
    if (
        node.regions
        or not node.operands
        or node.op.may_fail(*(None if o is None else o.type for o in node.operands))
    ):
        return False
    if not all(r.type.is_static for r in node.results):
        return False
    present = [o for o in node.operands if o is not None]
    if not any(o in pure for o in present):
        return False
    return all(
        o in pure or (o.producer is not None and isinstance(o.producer.op, Constant))
        for o in present
    )


def _capture(
    owner: Node, region: Block, value: Value, first: tuple[int, int], rewriter: Rewriter
) -> Value:
    """Return the region's parameter for an outer value, adding a capture to the owner where there is none."""
    for index in range(first[0], len(owner.operands)):
        if owner.operands[index] is value:
            return region.parameters[first[1] + index - first[0]]
    rewriter.add_operand(owner, value)
    added = [block.add_parameter(value.type) for block in owner.regions]
    return added[owner.regions.index(region)]
