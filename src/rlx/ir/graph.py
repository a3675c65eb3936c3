# SPDX-License-Identifier: Apache-2.0
"""Values, nodes, blocks and graphs.

A `Block` is a linked list of nodes with typed parameters and results; a `Graph` is a block whose parameters are the
program's inputs, plus params (weights), symbols' facts and names. A node may own regions (blocks); a region uses
only its own parameters and nodes, so captures are explicit operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlx.base.diagnostics import UNKNOWN, Location
from rlx.base.facts import Facts
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.op import Op

__all__ = ["Block", "Graph", "Node", "Param", "State", "Value"]


class Value:
    """One typed tensor: a result of a node, or a leaf (block parameter, graph input, param)."""

    __slots__ = ("block", "index", "name", "producer", "type", "uses")

    def __init__(
        self,
        type_: TensorType,
        producer: Node | None,
        index: int,
        name: str = "",
        block: Block | None = None,
    ) -> None:
        self.type = type_
        self.producer = producer
        self.index = index
        self.name = name
        self.block = block  # of a leaf: the block that it belongs to
        self.uses: dict[tuple[Node, int], None] = {}

    @property
    def users(self) -> list[Node]:
        """The nodes that read this value, each once, in order of first use."""
        return list(dict.fromkeys(node for node, _ in self.uses))

    if TYPE_CHECKING:  # `rlx.ops` installs the operators; the graph itself knows none

        def __add__(self, other: Any) -> Value: ...
        def __radd__(self, other: Any) -> Value: ...
        def __sub__(self, other: Any) -> Value: ...
        def __rsub__(self, other: Any) -> Value: ...
        def __mul__(self, other: Any) -> Value: ...
        def __rmul__(self, other: Any) -> Value: ...
        def __truediv__(self, other: Any) -> Value: ...
        def __rtruediv__(self, other: Any) -> Value: ...
        def __matmul__(self, other: Any) -> Value: ...
        def __neg__(self) -> Value: ...
        def __lt__(self, other: Any) -> Value: ...
        def __le__(self, other: Any) -> Value: ...
        def __gt__(self, other: Any) -> Value: ...
        def __ge__(self, other: Any) -> Value: ...
        def __getitem__(self, index: Any) -> Value: ...

    def __repr__(self) -> str:
        origin = f"{self.producer.op.name}#{self.index}" if self.producer else "leaf"
        return f"<Value {self.name or origin}: {self.type}>"


class Node:
    """One application of an operator. Created by a `Builder`, changed only by a `Rewriter`."""

    __slots__ = ("block", "location", "next", "op", "operands", "prev", "regions", "results")

    def __init__(
        self,
        op: Op,
        operands: tuple[Value | None, ...],
        result_types: Sequence[TensorType],
        regions: tuple[Block, ...] = (),
        location: Location = UNKNOWN,
    ) -> None:
        self.op = op
        self.operands = operands
        self.results = tuple(Value(t, self, i) for i, t in enumerate(result_types))
        self.regions = regions
        self.location = location
        self.block: Block | None = None
        self.prev: Node | None = None
        self.next: Node | None = None
        for index, operand in enumerate(operands):
            if operand is not None:
                operand.uses[self, index] = None

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    def __repr__(self) -> str:
        return f"<Node {self.op.name} {self.location}>"


class Block:
    """A list of nodes in execution order with typed parameters and results."""

    __slots__ = ("first", "last", "parameters", "results")

    def __init__(self) -> None:
        self.parameters: list[Value] = []
        self.results: list[Value] = []
        self.first: Node | None = None
        self.last: Node | None = None

    def add_parameter(self, type_: TensorType, name: str = "") -> Value:
        """Append a parameter and return its value."""
        value = Value(type_, None, len(self.parameters), name, self)
        self.parameters.append(value)
        return value

    def __iter__(self) -> Iterator[Node]:
        """Iterate nodes in order; the current node may be removed and nodes inserted meanwhile."""
        node = self.first
        while node is not None:
            following = node.next
            yield node
            node = following

    def nodes(self) -> list[Node]:
        """Return the nodes as a list."""
        return list(self)

    def walk(self) -> Iterator[Node]:
        """Iterate all nodes including those of nested regions, owners first."""
        for node in self:
            yield node
            for region in node.regions:
                yield from region.walk()

    def insert(self, node: Node, before: Node | None = None) -> None:
        """Link a new node before another one, or at the end."""
        node.block = self
        node.next = before
        node.prev = self.last if before is None else before.prev
        if node.prev is None:
            self.first = node
        else:
            node.prev.next = node
        if before is None:
            self.last = node
        else:
            before.prev = node

    def unlink(self, node: Node) -> None:
        """Take a node out of the list (its operand uses stay)."""
        if node.prev is None:
            self.first = node.next
        else:
            node.prev.next = node.next
        if node.next is None:
            self.last = node.prev
        else:
            node.next.prev = node.prev
        node.block = node.prev = node.next = None


@dataclass
class Param:
    """A weight: a leaf value with a default array that `set_param` may replace. Passes never look at its data."""

    value: Value
    data: Array | None = None
    identity: tuple[Any, ...] = ()
    """Stable identity of the data across processes (file stamp and offset), or empty."""


class State:
    """A value that persists between runs: `next` becomes `value` when a run ends well.

    Attributes:
        name: what callers know it by.
        value: the leaf that holds it during a run.
        init: what it is at first; of its dtype, broadcast to its shape.
    """

    __slots__ = ("_graph", "_index", "init", "name", "value")

    def __init__(self, graph: Graph, name: str, value: Value, init: Array) -> None:
        self.name = name
        self.value = value
        self.init = init
        self._graph = graph
        self._index = len(graph.states)

    @property
    def next(self) -> Value:
        """The value that takes its place; a result of the graph's block like an output."""
        return self._graph.block.results[len(self._graph.output_names) + self._index]

    @next.setter  # noqa: A003  (the builtin is not used here)
    def next(self, value: Value) -> None:
        self._graph.block.results[len(self._graph.output_names) + self._index] = value

    def __repr__(self) -> str:
        return f"<State {self.name}: {self.value.type}>"


@dataclass
class Graph:
    """A whole program.

    `block.parameters` are the inputs in order. `block.results` are the outputs, then the next value of every state: so
    whoever keeps the results of a block right keeps states right.
    """

    name: str = "graph"
    block: Block = field(default_factory=Block)
    output_names: list[str] = field(default_factory=list[str])
    params: dict[str, Param] = field(default_factory=dict[str, Param])
    states: list[State] = field(default_factory=list[State])
    facts: Facts = field(default_factory=Facts)

    @property
    def inputs(self) -> list[Value]:
        """The input values in order; each has a name."""
        return self.block.parameters

    @property
    def outputs(self) -> list[Value]:
        """The output values, in the order of `output_names`."""
        return self.block.results[: len(self.output_names)]

    def add_input(self, name: str, type_: TensorType) -> Value:
        """Append an input."""
        return self.block.add_parameter(type_, name)

    def add_param(
        self, name: str, data: Array | None, type_: TensorType, identity: tuple[Any, ...] = ()
    ) -> Value:
        """Add a weight with its default data and return its value."""
        value = Value(type_, None, len(self.params), name, self.block)
        self.params[name] = Param(value, data, identity)
        return value

    def add_state(self, name: str, type_: TensorType, init: Array) -> State:
        """Add a state, which stays as it is until its `next` is set."""
        return self.make_state(name, Value(type_, None, len(self.states), name, self.block), init)

    def make_state(self, name: str, value: Value, init: Array) -> State:
        """Make a leaf of the graph, which is not an input any more, a state."""
        state = State(self, name, value, init)
        self.states.append(state)
        self.block.results = [*self.block.results, value]
        return state

    def set_outputs(self, outputs: dict[str, Value]) -> None:
        """Declare the outputs by name, replacing earlier ones."""
        following = self.block.results[len(self.output_names) :]
        self.block.results = [*outputs.values(), *following]
        self.output_names = list(outputs)

    def param_values(self) -> set[Value]:
        """Return the set of param leaf values."""
        return {p.value for p in self.params.values()}
