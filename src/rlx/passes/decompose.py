# SPDX-License-Identifier: Apache-2.0
"""Operators that the target does not run are replaced by what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.base.target import Claims
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import Match, Rule, apply_rules
from rlx.ops.spec import building
from rlx.passes.manager import PassContext

__all__ = ["Decompose"]


@dataclass(frozen=True)
class Decompose:
    """op(x) -> op.decompose(x) where the target does not claim `op`, or not for these operands, repeatedly.

    An operator that can be expressed as a region stays if the target runs regions. An operator with
    neither stays as
    well: the backend runs it on the host or refuses it by name. Numerical effect: that of the
        operator's own
    decomposition, which its declaration states.
    """

    name = "decompose"
    ensures = ("decomposed",)

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether an operator was replaced."""
        claims = ctx.claims
        if not claims.ops:
            return False

        def expand(node: Node, builder: Builder) -> Match:
            if _is_taken(node, claims) or _is_region(node, claims):
                return None
            decompose: Any = getattr(node.op, "decompose", None)
            if decompose is None:
                return None
            with building(builder):
                found: Any = decompose(*node.operands)
            if found is not None:
                ctx.note(self.name, f"{node.op.name} at {node.location}")
            return found

        return apply_rules(graph, [Rule("decompose", (), expand)])


def _is_taken(node: Node, claims: Claims) -> bool:
    limit = claims.limit_of(node.op.name)
    types = [o.type if o is not None else None for o in node.operands]
    return claims.supports(node.op.name) and (limit is None or limit.takes(types))


def _is_region(node: Node, claims: Claims) -> bool:
    region_of: Any = getattr(node.op, "region", None)
    if region_of is None or not claims.supports("region"):
        return False
    return region_of(*(o.type if o is not None else None for o in node.operands)) is not None
