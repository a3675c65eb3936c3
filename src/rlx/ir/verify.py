# SPDX-License-Identifier: Apache-2.0
"""Checks that a graph is well formed. Run after every pass in tests and under ``RLX_VERIFY=1``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from rlx.base.errors import PassError, RlxError
from rlx.base.facts import Facts
from rlx.base.types import TensorType
from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ir.op import Op

__all__ = ["verify"]


def verify(graph: Graph) -> None:
    """Check structure, use lists and types of all blocks.

    Every operand is defined earlier in its own block (a region sees only its parameters, so
    captures are explicit), use lists say exactly who reads what, the linked lists of nodes are
    consistent, operand counts fit the operator, and result types are what the type rules give.

    Raises:
        PassError: something is wrong; the message names the node and what was found.
    """
    facts = graph.facts
    check = Facts(dict(facts.uppers), dict(facts.hints), list(facts.guards), dict(facts.equalities))
    leaves = {p.value: f"param {n!r}" for n, p in graph.params.items()}
    leaves.update({s.value: f"state {s.name!r}" for s in graph.states})
    with check.active():
        verifier = _Verifier(check)
        for value, what in leaves.items():
            verifier.leaf(value, graph.block, what)
        verifier.block(graph.block, set(leaves), "the graph")
    results = len(graph.block.results) - len(graph.states)
    if len(graph.output_names) != results:
        raise PassError(f"{results} outputs have {len(graph.output_names)} names")
    if len(set(graph.output_names)) != len(graph.output_names):
        raise PassError(f"output names {graph.output_names} are not unique")
    _check_states(graph, verifier)
    verifier.finish((*leaves, *_values(graph.block)))


def _check_states(graph: Graph, verifier: _Verifier) -> None:
    names = [s.name for s in graph.states]
    if len(set(names)) != len(names):
        raise PassError(f"state names {names} are not unique")
    for state in graph.states:
        kind = state.value.type
        if not verifier.same(state.next.type, kind):
            raise PassError(f"state {state.name!r} is {kind}, its next value {state.next.type}")
        shape = (*[1] * (kind.rank - state.init.ndim), *state.init.shape)
        fits = len(shape) == kind.rank and all(
            a in (1, b) for a, b in zip(shape, kind.shape, strict=True)
        )
        if state.init.dtype != kind.dtype.numpy or not fits:
            found = f"{state.init.dtype}{list(state.init.shape)}"
            raise PassError(
                f"state {state.name!r} is {kind}, its initial value {found} does not broadcast to it"
            )


def _said(node: Node) -> str:
    return f"{node.op.name} at {node.location}"


class _Verifier:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.reads: dict[Value, int] = {}

    def leaf(self, value: Value, block: Block, what: str) -> None:
        if value.producer is not None or value.block is not block:
            raise PassError(f"{what} is not a leaf of its block")

    def block(self, block: Block, outer: set[Value], what: str) -> set[Value]:
        """Check one block; return the values defined in it."""
        defined = outer
        for index, parameter in enumerate(block.parameters):
            self.leaf(parameter, block, f"parameter {index} of {what}")
            if parameter in defined:
                raise PassError(f"parameter {index} of {what} is there twice")
            defined.add(parameter)
        previous: Node | None = None
        node = block.first
        while node is not None:
            if node.block is not block or node.prev is not previous:
                raise PassError(f"{_said(node)} is linked wrongly into {what}")
            self.node(node, defined)
            previous, node = node, node.next
        if block.last is not previous:
            raise PassError(f"the last node of {what} is not the end of its list")
        for index, result in enumerate(block.results):
            if result not in defined:
                raise PassError(f"result {index} of {what} ({result!r}) is not defined in it")
        return defined

    def node(self, node: Node, defined: set[Value]) -> None:
        for index, operand in enumerate(node.operands):
            if operand is None:
                continue
            if operand not in defined:
                raise PassError(
                    f"operand {index} of {_said(node)} ({operand!r}) is not defined before it in "
                    "its block"
                )
            if (node, index) not in operand.uses:
                raise PassError(
                    f"operand {index} of {_said(node)} ({operand!r}) does not list it as a reader"
                )
            self.reads[operand] = self.reads.get(operand, 0) + 1
        _check_count(node)
        for position, region in enumerate(node.regions):
            self.block(region, set(), f"region {position} of {_said(node)}")
        self.types(node)
        for index, result in enumerate(node.results):
            if result.producer is not node or result.index != index:
                raise PassError(f"result {index} of {_said(node)} names another producer")
            defined.add(result)

    def types(self, node: Node) -> None:
        operands = [o.type if o is not None else None for o in node.operands]
        try:
            found = _infer(node.op, operands, node)
        except RlxError as error:
            shown = ", ".join(str(t) if t is not None else "none" for t in operands)
            raise PassError(f"{_said(node)} does not accept ({shown}): {error}") from error
        have = [r.type for r in node.results]
        if len(found) != len(have) or not all(map(self.same, found, have)):
            raise PassError(
                f"{_said(node)} has results ({', '.join(map(str, have))}), its type rule gives "
                f"({', '.join(map(str, found))})"
            )

    def same(self, a: TensorType, b: TensorType) -> bool:
        """Return whether two types are equal, given the guards."""
        return a == b or (
            a.dtype is b.dtype and a.rank == b.rank and all(map(self.facts.equal, a.shape, b.shape))
        )

    def finish(self, values: Iterable[Value]) -> None:
        """Check that no value lists a reader that is not in the graph."""
        for value in values:
            if len(value.uses) != self.reads.get(value, 0):
                raise PassError(
                    f"{value!r} lists {len(value.uses)} reads, {self.reads.get(value, 0)} are there"
                )


def _infer(op: Op, operands: Sequence[TensorType | None], node: Node) -> tuple[TensorType, ...]:
    found = op.infer(*operands, regions=node.regions) if node.regions else op.infer(*operands)
    return cast("tuple[TensorType, ...]", found if isinstance(found, tuple) else (found,))


def _check_count(node: Node) -> None:
    """Check the number of operands, and which may be absent, against the operator's declaration."""
    names = node.op.operands
    variadic = bool(names) and names[-1].endswith("*")
    fixed = names[:-1] if variadic else names
    needed = [i for i, n in enumerate(fixed) if not n.endswith("?")]
    if len(node.operands) > len(fixed) and not variadic:
        raise PassError(
            f"{_said(node)} has {len(node.operands)} operands, at most {len(fixed)} are declared"
        )
    for index in needed:
        if index >= len(node.operands) or node.operands[index] is None:
            raise PassError(f"{_said(node)} lacks operand {fixed[index]!r}")


def _values(block: Block) -> Iterator[Value]:
    yield from block.parameters
    for node in block:
        yield from node.results
        for region in node.regions:
            yield from _values(region)
