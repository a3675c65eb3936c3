# SPDX-License-Identifier: Apache-2.0
"""Dead code: nodes whose results nobody reads, and captures that no region reads."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.graph import Block, Graph
from rlx.ir.rewrite import GraphRewriter
from rlx.passes.manager import PassContext

__all__ = ["Dce"]


@dataclass(frozen=True)
class Dce:
    """Remove nodes whose results nobody reads, in all blocks.

    Exact. An operator that could have raised for some data is removed like any other: nothing asked
    for its value.
    """

    name = "dce"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether a node was removed."""
        del ctx
        rewriter = GraphRewriter(graph)
        _sweep(graph.block, rewriter)
        return rewriter.changed


def _sweep(block: Block, rewriter: GraphRewriter) -> None:
    for node in reversed(
        block.nodes()
    ):  # readers before producers, so one sweep removes whole chains
        if rewriter.is_dead(node):
            rewriter.erase(node)
            continue
        for region in node.regions:
            _sweep(region, rewriter)
