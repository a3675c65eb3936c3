# SPDX-License-Identifier: Apache-2.0
"""Brings a graph into the form that later passes look for, by rewrites that are exact."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.graph import Graph
from rlx.ir.rewrite import Rule, apply_rules
from rlx.passes.fold import fold_rule
from rlx.passes.manager import PassContext
from rlx.passes.rules.arithmetic import ARITHMETIC_RULES
from rlx.passes.rules.cast import CAST_RULES
from rlx.passes.rules.gather import GATHER_RULES
from rlx.passes.rules.movement import MOVEMENT_RULES
from rlx.passes.rules.select import SELECT_RULES

__all__ = ["RULES", "Canonicalize"]

RULES: tuple[Rule, ...] = (
    *CAST_RULES,
    *ARITHMETIC_RULES,
    *SELECT_RULES,
    *GATHER_RULES,
    *MOVEMENT_RULES,
)


@dataclass(frozen=True)
class Canonicalize:
    """All exact rules and constant folding, to a fixed point; dead nodes are removed.

    Every rule states what it does; none changes a bit of any result, except that x ** 2 becomes the
    correctly rounded square.
    """

    name = "canonicalize"
    ensures = ("canonical",)

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether anything changed."""
        return apply_rules(graph, (*RULES, fold_rule()), lambda text: ctx.note(self.name, text))
