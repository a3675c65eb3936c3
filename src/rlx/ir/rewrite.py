# SPDX-License-Identifier: Apache-2.0
"""The rule driver: local rewrites applied from a worklist until nothing changes.

A rule looks at one node. It answers None (not its pattern), `Reject` (its pattern, but a condition
does not hold: the reason goes to the report), or the values that take the place of the node's
results. Rules emit nodes through the `Builder` they are given, and only once they know that they
apply.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rlx.base.errors import PassError
from rlx.base.types import TensorType
from rlx.ir.builder import Builder, Rewriter, pass_name
from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ir.op import Op

__all__ = ["GraphRewriter", "Match", "Reject", "Rule", "apply_rules", "rule"]


@dataclass(frozen=True, slots=True)
class Reject:
    """A rule's pattern is there but the rewrite is not legal; says why."""

    reason: str


Match: TypeAlias = "Value | Sequence[Value] | Reject | None"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rewrite.

    Attributes:
        name: for reports and errors.
        ops: names of the operators it looks at; empty means every node.
        apply: (node, builder that inserts before it) -> see the module's docstring.
    """

    name: str
    ops: tuple[str, ...]
    apply: Callable[[Node, Builder], Match]


def rule(*ops: str) -> Callable[[Callable[[Node, Builder], Match]], Rule]:
    """Declare a rule by its function; `ops` are the operators it looks at."""

    def declare(function: Callable[[Node, Builder], Match]) -> Rule:
        return Rule(function.__name__.strip("_").replace("_", "-"), ops, function)

    return declare


class GraphRewriter(Rewriter):
    """A `Rewriter` of a whole graph: keeps the results of all blocks right, and knows what is live.

    Args:
        graph: all of its blocks may be changed through this object, and only through it while it is
            used.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.facts)
        self.graph = graph
        self._roots: Counter[Value] = Counter()
        self._owners: dict[Value, dict[Block, None]] = {}
        self.enter(graph.block)

    def enter(self, block: Block) -> None:
        """Take note of a block (and those nested in it) that became part of the graph."""
        for value in block.results:
            self._roots[value] += 1
            self._owners.setdefault(value, {})[block] = None
        for node in block:
            for region in node.regions:
                self.enter(region)

    def is_root(self, value: Value) -> bool:
        """Return whether a block returns the value (of the graph's: as an output or to a state)."""
        return value in self._roots

    def is_dead(self, node: Node) -> bool:
        """Return whether nothing reads any result of the node."""
        return not any(r.uses or r in self._roots for r in node.results)

    def replace_value(self, old: Value, new: Value, *, roots: Iterable[Block] = ()) -> None:
        """Make every reader of `old` and all block results read `new`."""
        del roots  # every block of the graph is known
        if old is new:
            return
        pass_name(old, new)
        for node, index in list(old.uses):
            self.set_operand(node, index, new)
        count = self._roots.pop(old, 0)
        if count:
            self._roots[new] += count
            for block in self._owners.pop(old, {}):
                block.results = [new if r is old else r for r in block.results]
                self._owners.setdefault(new, {})[block] = None
        self.changed = True


class _RecordingBuilder(Builder):
    """Remembers what a rule emitted, so that it is looked at next."""

    def __init__(self, block: Block, before: Node, rewriter: GraphRewriter) -> None:
        super().__init__(block, rewriter.facts, before)
        self.location = before.location
        self.emitted: list[Node] = []
        self._rewriter = rewriter

    def emit_typed(
        self,
        op: Op,
        operands: Sequence[Value | None],
        types: Sequence[TensorType],
        regions: tuple[Block, ...] = (),
    ) -> Node:
        """Append a node and remember it."""
        node = super().emit_typed(op, operands, types, regions)
        self.emitted.append(node)
        for region in regions:
            self._rewriter.enter(region)
            self.emitted.extend(region.walk())
        return node


@dataclass
class _Driver:
    rewriter: GraphRewriter
    by_op: dict[str, list[Rule]]
    anywhere: list[Rule]
    note: Callable[[str], None]
    limit: int
    queue: deque[Node] = field(default_factory=deque[Node])
    queued: set[Node] = field(default_factory=set[Node])
    applied: int = 0
    recent: deque[str] = field(default_factory=lambda: deque[str](maxlen=64))
    tables: dict[str, tuple[Rule, ...]] = field(default_factory=dict[str, tuple[Rule, ...]])

    def push(self, node: Node) -> None:
        if node not in self.queued:
            self.queued.add(node)
            self.queue.append(node)

    def run(self) -> None:
        while self.queue:
            node = self.queue.popleft()
            self.queued.discard(node)
            if node.block is None:
                continue
            if self.rewriter.is_dead(node):
                self.erase(node)
            else:
                self.visit(node)

    def erase(self, node: Node) -> None:
        """Remove a dead node; what only it read is looked at again."""
        producers = [o.producer for o in node.operands if o is not None and o.producer is not None]
        self.rewriter.erase(node)
        for producer in producers:
            self.push(producer)

    def rules_of(self, name: str) -> tuple[Rule, ...]:
        table = self.tables.get(name)
        if table is None:
            table = self.tables[name] = (*self.by_op.get(name, ()), *self.anywhere)
        return table

    def visit(self, node: Node) -> None:
        for candidate in self.rules_of(node.op.name):
            assert node.block is not None
            builder = _RecordingBuilder(node.block, node, self.rewriter)
            match = candidate.apply(node, builder)
            if match is None:
                continue
            if isinstance(match, Reject):
                self.note(
                    f"{candidate.name}: {node.op.name} at {node.location} stays: {match.reason}"
                )
                continue
            self.substitute(
                node, candidate, builder, [match] if isinstance(match, Value) else match
            )
            return

    def adopt_type(self, old: Value, new: Value, builder: _RecordingBuilder) -> bool:
        """Give a new value the type it replaces, if the guards of the graph make them equal."""
        a, b = old.type, new.type
        if new.producer not in builder.emitted or a.dtype is not b.dtype or a.rank != b.rank:
            return False
        if not all(map(self.rewriter.facts.equal, a.shape, b.shape)):
            return False
        new.type = a
        return True

    def substitute(
        self, node: Node, by: Rule, builder: _RecordingBuilder, values: Sequence[Value]
    ) -> None:
        self.applied += 1
        self.recent.append(by.name)
        if self.applied > self.limit:
            names = ", ".join(n for n, _ in Counter(self.recent).most_common())
            raise PassError(
                f"rules do not reach a fixed point after {self.limit} applications; the cycling "
                f"rules are: {names} (last at {node.op.name} {node.location})"
            )
        users = [u for r in node.results for u in r.users]
        for old, new in zip(node.results, values, strict=True):
            if old.type != new.type and not self.adopt_type(old, new, builder):
                raise PassError(
                    f"rule {by.name} replaced {node.op.name} at {node.location} of type {old.type} "
                    f"by a value of type {new.type}; a rewrite must keep types"
                )
            if not new.name and new.producer is not None:
                new.name = old.name
            self.rewriter.replace_value(old, new)
        for emitted in builder.emitted:
            self.push(emitted)
        for user in users:
            self.push(user)
        self.erase(node)


def apply_rules(
    graph: Graph,
    rules: Iterable[Rule],
    note: Callable[[str], None] = lambda _: None,
    *,
    limit_per_node: int = 32,
) -> bool:
    """Apply rules to all blocks until none applies; dead nodes met on the way are removed.

    Args:
        graph: changed in place.
        rules: tried in order on each node.
        note: receives the reason of every rejected match.
        limit_per_node: applications allowed per node of the graph, on average.

    Returns:
        Whether anything changed.

    Raises:
        PassError: the rules cycle (the message names them), or one changed a type.
    """
    by_op: dict[str, list[Rule]] = {}
    anywhere: list[Rule] = []
    for entry in rules:
        for name in entry.ops:
            by_op.setdefault(name, []).append(entry)
        if not entry.ops:
            anywhere.append(entry)
    nodes = list(graph.block.walk())
    driver = _Driver(
        GraphRewriter(graph), by_op, anywhere, note, limit_per_node * len(nodes) + 1000
    )
    for node in nodes:
        driver.push(node)
    with graph.facts.active():
        driver.run()
    return driver.rewriter.changed
