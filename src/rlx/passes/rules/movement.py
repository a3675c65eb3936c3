# SPDX-License-Identifier: Apache-2.0
"""Rules about operators that move data. All are exact: no element changes."""

from __future__ import annotations

from dataclasses import replace

from rlx.base.errors import TypeRuleError, UndecidedError
from rlx.base.facts import Facts
from rlx.base.types import broadcast_shapes
from rlx.ir.builder import Builder
from rlx.ir.graph import Node, Value
from rlx.ir.rewrite import Match, Reject, rule
from rlx.ops.movement import Concat, Expand, Pad, Reshape, Slice, Tile, Transpose
from rlx.ops.spec import ElementwiseOp
from rlx.passes.rules.patterns import made_by

__all__ = ["MOVEMENT_RULES"]


@rule("transpose")
def merge_transpose(node: Node, builder: Builder) -> Match:
    """Merge transpose(transpose(x)) into one; drop transpose[0, 1, ...](x)."""
    (x,) = node.operands
    perm = _transpose(node).perm
    assert x is not None
    inner = made_by(x, Transpose)
    if inner is not None:
        op, producer = inner
        return builder.emit_one(Transpose(tuple(op.perm[p] for p in perm)), producer.operands[0])
    return x if perm == tuple(range(len(perm))) else None


def _transpose(node: Node) -> Transpose:
    assert isinstance(node.op, Transpose)
    return node.op


@rule("reshape")
def merge_reshape(node: Node, builder: Builder) -> Match:
    """reshape(reshape(x)) -> reshape(x); reshape to the shape x has -> x."""
    x = node.operands[0]
    assert x is not None
    if x.type == node.result.type:
        return x
    inner = made_by(x, Reshape)
    if inner is None:
        return None
    source = inner[1].operands[0]
    assert source is not None
    return source if source.type == node.result.type else builder.emit_one(node.op, source)


@rule("slice")
def merge_slice(node: Node, builder: Builder) -> Match:
    """slice(slice(x)) -> slice(x); a slice that takes everything -> x."""
    x, op = node.operands[0], node.op
    assert x is not None
    assert isinstance(op, Slice)
    if _takes_all(op, x):
        return x
    inner = made_by(x, Slice)
    if inner is None:
        return None
    first, producer = inner
    starts = tuple(a + s * b for a, s, b in zip(first.starts, first.steps, op.starts, strict=True))
    steps = tuple(a * b for a, b in zip(first.steps, op.steps, strict=True))
    return builder.emit_one(replace(op, starts=starts, steps=steps), producer.operands[0])


def _takes_all(op: Slice, x: Value) -> bool:
    return (
        all(s == 0 for s in op.starts)
        and all(s == 1 for s in op.steps)
        and op.sizes == x.type.shape
    )


@rule("expand")
def merge_expand(node: Node, builder: Builder) -> Match:
    """expand(expand(x)) -> expand(x); expand to the shape x has -> x."""
    x = node.operands[0]
    assert x is not None
    if x.type == node.result.type:
        return x
    inner = made_by(x, Expand)
    return builder.emit_one(node.op, inner[1].operands[0]) if inner else None


@rule()
def absorb_expand(node: Node, builder: Builder) -> Match:
    """f(expand(x), y) -> f(x, y) for an elementwise f whose result keeps its shape."""
    if not isinstance(node.op, ElementwiseOp):
        return None
    operands = list(node.operands)
    for index, operand in enumerate(operands):
        found = made_by(operand, Expand)
        if found is None:
            continue
        source = found[1].operands[0]
        shapes = [(source if i == index else o) for i, o in enumerate(operands)]
        if _broadcasts_to(shapes, node.result):
            operands[index] = source
    if tuple(operands) == node.operands:
        expanded = any(made_by(o, Expand) for o in operands)
        return (
            Reject("without the expand its result would have another shape") if expanded else None
        )
    return builder.emit_typed(node.op, operands, [node.result.type]).results


def _broadcasts_to(values: list[Value | None], result: Value) -> bool:
    """Return whether the operands give the result's shape without any assumption about extents."""
    try:
        with Facts().active():
            return (
                broadcast_shapes(*(v.type.shape for v in values if v is not None))
                == result.type.shape
            )
    except (UndecidedError, TypeRuleError):
        return False


@rule("concat")
def drop_concat(node: Node, builder: Builder) -> Match:
    """concat(x) -> x; concat(concat(x, y), z) along one axis -> concat(x, y, z)."""
    if len(node.operands) == 1 and node.operands[0] is not None:
        return node.operands[0] if node.operands[0].type == node.result.type else None
    flat: list[Value | None] = []
    for operand in node.operands:
        inner = made_by(operand, Concat)
        merge = (
            inner is not None
            and inner[0] == node.op
            and operand is not None
            and len(operand.uses) == 1
        )
        flat.extend(inner[1].operands if merge and inner is not None else (operand,))
    if len(flat) == len(node.operands):
        return None
    return builder.emit_typed(node.op, flat, [node.result.type]).results


@rule("pad", "tile")
def drop_pad(node: Node, builder: Builder) -> Match:
    """Padding by nothing and repeating once -> x."""
    del builder
    op, x = node.op, node.operands[0]
    nothing = isinstance(op, Pad) and all(p == 0 for p in (*op.before, *op.after))
    once = isinstance(op, Tile) and all(r == 1 for r in op.repeats)
    return x if (nothing or once) and x is not None and x.type == node.result.type else None


MOVEMENT_RULES = (
    merge_transpose,
    merge_reshape,
    merge_slice,
    merge_expand,
    drop_concat,
    drop_pad,
    absorb_expand,
)
