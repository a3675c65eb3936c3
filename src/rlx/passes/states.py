# SPDX-License-Identifier: Apache-2.0
"""Writes into states come after the last read of what they overwrite, so that they can be done in place."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import GraphRewriter
from rlx.ops.indexing import ScatterElements, ScatterND
from rlx.ops.state import WriteRows
from rlx.passes.manager import PassContext

__all__ = ["LateStateWrites"]

_WRITERS = (WriteRows, ScatterElements, ScatterND)


@dataclass(frozen=True)
class LateStateWrites:
    """y = write(state), z = read(state) -> z = read(state), y = write(state), with what reads y.

    Exact: the same operators on the same operands, in another order. Nothing moves where a read of the old value needs
    the written one.
    """

    name = "late-state-writes"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether a write moved."""
        rewriter = GraphRewriter(graph)
        for state in graph.states:
            readers, writers = _uses(graph, state.value)
            for writer in writers:
                others = readers | {w for w in writers if w is not writer}
                if not _move(rewriter, graph, writer, others):
                    ctx.note(
                        self.name,
                        f"{writer.op.name} at {writer.location} stays before a read of state {state.name!r}",
                    )
        return rewriter.changed


def _uses(graph: Graph, state: Value) -> tuple[set[Node], list[Node]]:
    """Return the nodes that read a state or an alias of it, and those that write into a copy, in order."""
    same, readers, writers = {state}, set[Node](), list[Node]()
    for node in graph.block:
        if not any(o in same for o in node.operands if o is not None):
            continue
        if node.op.alias:
            same.update(node.results)
        elif isinstance(node.op, _WRITERS) and node.operands[0] in same:
            writers.append(node)
        else:
            readers.add(node)
    return readers, writers


def _move(rewriter: GraphRewriter, graph: Graph, writer: Node, readers: set[Node]) -> bool:
    """Move a write and what depends on it behind the last reader; False where that reads what depends on it."""
    following = graph.block.nodes()
    following = following[following.index(writer) + 1 :]
    last = max((i for i, node in enumerate(following) if node in readers), default=-1)
    moved, values = [writer], set(writer.results)
    for node in following[: last + 1]:
        if any(o in values for o in node.operands if o is not None):
            if node in readers:
                return False
            moved.append(node)
            values.update(node.results)
    if last >= 0:
        behind = following[last + 1] if last + 1 < len(following) else None
        for node in moved:
            rewriter.move(node, behind)
    return True
