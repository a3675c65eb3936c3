# SPDX-License-Identifier: Apache-2.0
"""Moves what is computed from weights alone out of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.graph import Graph
from rlx.passes.manager import PassContext
from rlx.passes.params import GROWTH, ParamProgram, split_params

__all__ = ["Hoist", "ParamProgram", "split_params"]


@dataclass(frozen=True)
class Hoist:
    """f(param) -> derived param, for the largest f that reads only params and constants.

    Exact: the same operators run, earlier. Stays in the graph: what may fail for some data, what
        has regions or a
    symbolic shape, and what would blow a small weight up (`growth`).

    Attributes:
        growth: a derived weight may have at most this many times the bytes of what it is computed
            from.
    """

    growth: int = GROWTH
    name = "hoist"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether something moved; the param program in the context is extended."""
        before = len(ctx.params.results)
        split_params(graph, ctx.params, growth=self.growth)
        return len(ctx.params.results) != before
