# SPDX-License-Identifier: Apache-2.0
"""Appending nodes with inferred types, and the only code that changes a graph."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

from rlx.base.diagnostics import UNKNOWN, Location
from rlx.base.errors import TypeRuleError
from rlx.base.facts import Facts
from rlx.base.types import TensorType
from rlx.ir.graph import Block, Node, Value
from rlx.ir.op import Op

__all__ = ["Builder", "Rewriter", "infer_types", "pass_name"]


def infer_types(
    op: Op,
    types: Sequence[TensorType | None],
    location: Location = UNKNOWN,
    regions: tuple[Block, ...] = (),
) -> tuple[TensorType, ...]:
    """Return the result types of an operator for operand types (and its regions, if it owns some).

    Raises:
        TypeRuleError: not accepted; the message names the operator, the operand types and the location.
    """
    try:
        found: Any = op.infer(*types, regions=regions) if regions else op.infer(*types)
    except TypeRuleError as error:
        shown = ", ".join(str(t) if t is not None else "none" for t in types)
        where = f" at node {location}" if location != UNKNOWN else ""
        raise TypeRuleError(f"{op.name}({shown}){where}: {error}") from error
    return cast("tuple[TensorType, ...]", found) if isinstance(found, tuple) else (found,)


class Builder:
    """Emits nodes into a block, at its end or before a given node.

    Args:
        block: where nodes go.
        facts: the graph's facts, consulted (and extended with guards) by type rules.
        before: insertion point; None appends.
    """

    def __init__(self, block: Block, facts: Facts, before: Node | None = None) -> None:
        self.block = block
        self.facts = facts
        self.before = before
        self.location = UNKNOWN

    def emit(
        self, op: Op, *operands: Value | None, regions: tuple[Block, ...] = ()
    ) -> tuple[Value, ...]:
        """Append a node and return its results.

        Raises:
            TypeRuleError: the operator does not accept the operands.
        """
        with self.facts.active():
            try:
                given = [v.type if v is not None else None for v in operands]
            except AttributeError:  # costs nothing where all are values
                raise TypeRuleError(
                    f"{op.name} takes values of a graph, found {_foreign(operands)}"
                ) from None
            types = infer_types(op, given, self.location, regions)
        return self.emit_typed(op, operands, types, regions).results

    def emit_one(self, op: Op, *operands: Value | None) -> Value:
        """Append a node with a single result and return it."""
        (value,) = self.emit(op, *operands)
        return value

    def emit_typed(
        self,
        op: Op,
        operands: Sequence[Value | None],
        types: Sequence[TensorType],
        regions: tuple[Block, ...] = (),
    ) -> Node:
        """Append a node whose result types are already known (from a type rule or a text)."""
        node = Node(op, tuple(operands), types, regions, self.location)
        self.block.insert(node, self.before)
        return node

    @contextmanager
    def at(self, location: Location) -> Generator[None]:
        """Give nodes emitted inside this location."""
        saved, self.location = self.location, location
        try:
            yield
        finally:
            self.location = saved


def pass_name(old: Value, new: Value) -> None:
    """Let a computed value without a name inherit that of the value it takes the place of."""
    if old.name and not new.name and new.producer is not None:
        new.name = old.name


class Rewriter:
    """All mutation of a graph goes through here, so use lists stay right."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.changed = False

    def before(self, node: Node) -> Builder:
        """Return a builder that inserts before a node, with its location."""
        assert node.block is not None
        builder = Builder(node.block, self.facts, node)
        builder.location = node.location
        return builder

    def replace_value(self, old: Value, new: Value, *, roots: Iterable[Block] = ()) -> None:
        """Make every reader of `old`, and the results of its block, read `new`; a name goes with it.

        Args:
            old: the value to retire.
            new: a value of the same type that is defined before all readers.
            roots: further blocks whose results may name `old`.
        """
        if old is new:
            return
        pass_name(old, new)
        for node, index in list(old.uses):
            self.set_operand(node, index, new)
        owner = old.producer.block if old.producer else old.block
        for block in {id(b): b for b in (owner, *roots) if b is not None}.values():
            if any(r is old for r in block.results):
                block.results = [new if r is old else r for r in block.results]
        self.changed = True

    def set_operand(self, node: Node, index: int, value: Value | None) -> None:
        """Replace one operand of a node."""
        old = node.operands[index]
        if old is not None:
            del old.uses[node, index]
        node.operands = (*node.operands[:index], value, *node.operands[index + 1 :])
        if value is not None:
            value.uses[node, index] = None
        self.changed = True

    def add_operand(self, node: Node, value: Value) -> None:
        """Append an operand to a node (a capture of its regions)."""
        value.uses[node, len(node.operands)] = None
        node.operands = (*node.operands, value)
        self.changed = True

    def replace_node(self, node: Node, values: Sequence[Value]) -> None:
        """Replace all results of a node and erase it."""
        for old, new in zip(node.results, values, strict=True):
            self.replace_value(old, new)
        self.erase(node)

    def move(self, node: Node, before: Node | None) -> None:
        """Put a node before another one of its block, or at the end; the caller sees to operands and readers."""
        block = node.block
        assert block is not None
        block.unlink(node)
        block.insert(node, before)
        self.changed = True

    def erase(self, node: Node) -> None:
        """Remove a node that nothing reads."""
        assert node.block is not None
        assert not any(r.uses for r in node.results), f"{node} still has readers"
        for index, operand in enumerate(node.operands):
            if operand is not None:
                del operand.uses[node, index]
        node.block.unlink(node)
        self.changed = True


def _foreign(operands: tuple[Any, ...]) -> str:
    """Return the first operand that is no value, for a message."""
    found = next(v for v in operands if v is not None and not isinstance(v, Value))
    return f"{type(found).__name__} {found!r:.80}; make a constant of it, or a param"
