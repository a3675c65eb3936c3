# SPDX-License-Identifier: Apache-2.0
"""Operators whose kernels take no narrow dtypes compute in wider ones."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import Match, Rule, apply_rules
from rlx.ops.elementwise import cast
from rlx.ops.spec import building, emit
from rlx.passes.manager import PassContext

__all__ = ["Widen"]


@dataclass(frozen=True)
class Widen:
    """op(x) -> cast(op(cast(x))) where the target computes `op` on x's dtype in a wider one.

    Exact: by its meaning an operator on narrow floats is computed in f32 and rounded once, and integers go through
    wider ones only where results wrap (`Limit.wider`). The casts become part of what is around them, those of weights
    are hoisted.
    """

    name = "widen"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether an operator was rewritten."""
        claims = ctx.claims
        if not claims.limits:
            return False

        def apply(node: Node, builder: Builder) -> Match:
            limit, first = claims.limit_of(node.op.name), node.operands[0]
            if limit is None or first is None:
                return None
            narrow = first.type.dtype
            wide = limit.wider_than(narrow)
            if wide is None:
                return None
            with building(builder):
                operands = [
                    cast(o, wide) if o is not None and o.type.dtype is narrow else o
                    for o in node.operands
                ]
                results = emit(node.op, *operands)
                pairs = zip(results, node.results, strict=True)
                return [cast(new, old.type.dtype) for new, old in pairs]

        return apply_rules(graph, [Rule(self.name, tuple(n for n, _ in claims.limits), apply)])
