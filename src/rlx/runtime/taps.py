# SPDX-License-Identifier: Apache-2.0
"""Intermediate values of a compiled run, by the names that the model gives them.

Nothing is recompiled: the program that runs is the one that always runs, and an array is copied out right after the
kernel that wrote it. So only values that the program stores can be had; of others `missing` says where they went.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod

from rlx.backends.protocol import WatchableGraph
from rlx.base.dims import evaluate
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.ir.graph import Graph, Node, Value
from rlx.kernel.program import DimArg, Program, SlotArg, SlotKind, ThunkKind, ValueInfo

__all__ = ["Stored", "named_values", "tap"]

_RUNS = (ThunkKind.CALL, ThunkKind.HOST)
_CONSTANT = "constant"


class Stored:
    """The values that a program stores, and who writes them."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def writers(self) -> Mapping[int, Sequence[int]]:
        """Slot -> the kernels and host operators that write it, in order."""
        found: dict[int, list[int]] = {}
        for index, thunk in enumerate(self.program.thunks):
            if thunk.kind in _RUNS:
                for slot in thunk.writes():
                    found.setdefault(slot, []).append(index)
        return found

    @cached_property
    def names(self) -> Mapping[str, ValueInfo]:
        """The stored values by name."""
        return {v.name: v for v in reversed(self.program.values) if v.name}

    def find(self, names: Iterable[str], build: Callable[[], Graph] | None) -> dict[str, ValueInfo]:
        """Return the stored values of these names; the name of a node stands for its result.

        Args:
            names: what is asked for.
            build: makes the graph before all passes, which knows the nodes; None where there is none.

        Raises:
            UsageError: the graph has no such value, the program does not store it, or it is a state.
        """
        found: dict[str, ValueInfo] = {}
        graph: Graph | None = None
        states = {s.name for s in self.program.states}
        for name in names:
            if name in states:
                raise UsageError(
                    f"{name!r} is a state of {self.program.name}: state[{name!r}].get() returns it"
                )
            value = self.names.get(name)
            if value is None:
                if build is None:
                    raise UsageError(
                        f"{self.program.name} stores no value {name!r}.{_close(name, self.names)} It comes from a "
                        "package; load the model itself to learn what became of other values"
                    )
                graph = graph or build()
                value = self._of_node(name, graph)
            found[name] = value
        return found

    def _of_node(self, name: str, graph: Graph) -> ValueInfo:
        known = named_values(graph, nested=True)
        value = known.get(name)
        if value is None:
            hint = _close(name, [*known, *self.names])
            raise UsageError(f"{graph.name} has no value or node {name!r}.{hint}")
        stored = self.names.get(value.name)
        if stored is not None:
            return stored
        raise UsageError(f"value {name!r} of {graph.name} is not stored: {self._why(name, value)}")

    def _why(self, name: str, value: Value) -> str:
        """Return what became of a value that no slot is known to hold."""
        producer = value.producer
        if producer is None:
            return "it is a weight, which the program reads in another form"
        remedy = f"expose({name!r}) compiles a variant that keeps it"
        if producer.op.name == _CONSTANT:
            return f"it is a constant, which was folded or is one with an equal constant; {remedy}"
        if not value.name:
            return f"node {producer.location} gives its result no name; name it, or {remedy}"
        for thunk in reversed(self.program.thunks):
            node = thunk.node
            if node is not None and any(n in node.names for n in producer.location.names):
                work = ", ".join(map(repr, node.names))
                return (
                    f"kernel {thunk.kernel or node.op} computes it on the way, as part of {node}, which does the work "
                    f"of {work}; {remedy}"
                )
        return f"the passes folded or rewrote node {producer.location}, so the program does not compute it; {remedy}"

    def bytes_of(self, value: ValueInfo, env: Mapping[str, int]) -> tuple[int, int]:
        """Return (slot that is written, offset in it) of a value: what a view points at."""
        slot, offset = value.slot, 0
        while slot not in self.writers and self.program.slots[slot].kind is SlotKind.VIEW:
            bind = next(
                t
                for t in self.program.thunks
                if t.kind is ThunkKind.BIND and t.args[0] == SlotArg(slot)
            )
            _, root, index, stride = bind.args
            assert isinstance(root, SlotArg)
            assert isinstance(index, DimArg)
            assert isinstance(stride, DimArg)
            slot, offset = root.slot, offset + evaluate(index.dim, env) * evaluate(stride.dim, env)
        return slot, offset


def _close(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Close names: {', '.join(map(repr, dict.fromkeys(close)))}." if close else ""


def named_values(graph: Graph, *, nested: bool = False) -> dict[str, Value]:
    """Return the values of a graph by their names and by the names of their nodes.

    A node stands for the first result that has a name, or else for the first result of the last operator that it
    was imported as.

    Args:
        graph: before all passes.
        nested: look into branches and loops too.
    """
    found = {v.name: v for v in graph.inputs} | {n: p.value for n, p in graph.params.items()}
    found |= {s.name: s.value for s in graph.states}
    nodes: dict[str, Value] = {}
    for node in graph.block.walk() if nested else graph.block:
        for result in node.results:
            if result.name:
                found.setdefault(result.name, result)
        name = node.location.name or node.location.source
        if name and node.results and _stands_for(node, nodes.get(name)):
            nodes[name] = next((r for r in node.results if r.name), node.results[0])
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    return {**nodes, **found, **outputs}


def _stands_for(node: Node, before: Value | None) -> bool:
    """Whether a node is what its name means, rather than the value that was taken for it before.

    Constants among the operators that a node was imported as are its operands.
    """
    if before is None:
        return True
    if before.producer is not None and before.producer.op.name == _CONSTANT:
        return True
    return not before.name and node.op.name != _CONSTANT


def tap(
    compiled: WatchableGraph,
    stored: Stored,
    wanted: Mapping[str, ValueInfo],
    run: Callable[[], None],
) -> dict[str, Array]:
    """Run once and return copies of stored values.

    Args:
        compiled: what runs.
        stored: the values of its program.
        wanted: which, by the names they are returned under.
        run: runs it.

    Raises:
        UsageError: a value lies in a branch that was not taken.
    """
    found: dict[str, Array] = {}
    at: dict[int, list[str]] = {}
    late: list[str] = []
    for name, value in wanted.items():
        slot = value.slot
        while slot not in stored.writers and (root := stored.program.slots[slot].root) is not None:
            slot = root
        for thunk in stored.writers.get(slot, ()):
            at.setdefault(thunk, []).append(name)
        if slot not in stored.writers:
            late.append(name)  # an input or a weight: nothing writes it

    def copy(name: str) -> None:
        value, env = wanted[name], compiled.extents()
        shape = tuple(evaluate(d, env) for d in value.shape)
        slot, offset = stored.bytes_of(value, env)
        dtype = value.dtype.numpy
        nbytes = prod(shape) * dtype.itemsize
        raw = compiled.view(slot, DType.U8, (offset + nbytes,))[offset:]
        found[name] = raw.copy().view(dtype).reshape(shape)

    def after(thunk: int) -> None:
        for name in at[thunk]:
            copy(name)

    with compiled.watched(after, at):
        run()
        for name in late:
            copy(name)
    absent = [n for n in wanted if n not in found]
    if absent:
        raise UsageError(
            f"value {absent[0]!r} was not computed in this run: it lies in a branch that was not taken"
        )
    return {name: found[name] for name in wanted}
