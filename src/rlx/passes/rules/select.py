# SPDX-License-Identifier: Apache-2.0
"""Rules about choices: `where` and `if`."""

from __future__ import annotations

from rlx.ir.builder import Builder
from rlx.ir.clone import copy_block
from rlx.ir.graph import Block, Node, Value
from rlx.ir.rewrite import Match, rule
from rlx.ops.movement import Expand
from rlx.passes.rules.patterns import constant_of, is_all, named

__all__ = ["SELECT_RULES"]


@rule("where")
def resolve_where(node: Node, builder: Builder) -> Match:
    """where(true, a, b) -> a; where(false, a, b) -> b; where(c, a, a) -> a; where(not c, ..).

    What is left is expanded to the shape of the result. Exact.
    """
    condition, a, b = node.operands
    assert a is not None
    assert b is not None
    array = constant_of(condition)
    if a is b or is_all(array, True):
        return _fitted(a, node, builder)
    if is_all(array, False):
        return _fitted(b, node, builder)
    inverted = named(condition, "logical_not")
    return (
        builder.emit_typed(node.op, (inverted.operands[0], b, a), [node.result.type]).results
        if inverted
        else None
    )


def _fitted(value: Value, node: Node, builder: Builder) -> Value:
    """Return the value broadcast to the node's shape."""
    type_ = node.result.type
    return (
        value
        if value.type == type_
        else builder.emit_typed(Expand(type_.shape), [value], [type_]).result
    )


@rule("if")
def take_branch(node: Node, builder: Builder) -> Match:
    """if(constant) then a else b -> the nodes of the branch taken, in place."""
    condition = constant_of(node.operands[0])
    if condition is None:
        return None
    region = node.regions[0 if bool(condition.reshape(-1)[0]) else 1]
    if any(r.type != o.type for r, o in zip(region.results, node.results, strict=True)):
        return None
    return inline(region, node.operands[1:], builder)


def inline(region: Block, captures: tuple[Value | None, ...], builder: Builder) -> list[Value]:
    """Emit copies of a region's nodes with its parameters replaced; return its results."""
    values: dict[Value, Value] = {}
    for parameter, capture in zip(region.parameters, captures, strict=True):
        assert capture is not None
        values[parameter] = capture
    for node in region:
        regions: list[Block] = []
        for nested in node.regions:
            regions.append(Block())
            copy_block(nested, regions[-1], values, {})
        operands = [values[o] if o is not None else None for o in node.operands]
        with builder.at(node.location):
            copy = builder.emit_typed(
                node.op, operands, [r.type for r in node.results], tuple(regions)
            )
        values.update(zip(node.results, copy.results, strict=True))
    return [values[r] for r in region.results]


SELECT_RULES = (resolve_where, take_branch)
