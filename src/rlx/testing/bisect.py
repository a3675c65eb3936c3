# SPDX-License-Identifier: Apache-2.0
"""Where two ways to run a model part: `check` compares outputs, `bisect` finds the first node that differs.

The nodes in front of the diverging outputs are cut at a position of their order: all values that cross the cut become
the outputs of a truncated graph, which is compiled and run in both ways. If one of them differs, the fault lies in
front of the cut, else behind it. From a faulty node to the output leads a path of values that differ, and every cut
between the two crosses it, so halving finds a node whose operands agree and whose result does not. Only values that
live at once are ever held. A fault that no truncated graph has is searched in the same way in the program of the whole
model, among the values that it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.backends.protocol import ScheduledGraph, WatchableGraph
from rlx.base.errors import RlxError, UsageError
from rlx.base.numeric import Array
from rlx.ir.clone import bind_dims, clone_graph
from rlx.ir.graph import Graph, Node, Value
from rlx.kernel.program import Program
from rlx.ops.evaluate import run_op
from rlx.ops.leaf import Constant
from rlx.passes.pipelines import OPTIONAL
from rlx.runtime.derive import exposing
from rlx.runtime.executable import Executable
from rlx.runtime.taps import Stored, named_values
from rlx.testing.compare import Difference, difference, differences
from rlx.testing.settings import Setting

__all__ = ["Finding", "bisect", "check"]

_MOST_RUNS = 29
_STORED = "the stored values"
_SUSPECTS = frozenset(
    "canonicalize channels-last fuse-epilogues fuse-regions recognize-attention "
    "recognize-quantized-products sink-transposes".split()
)
"""Passes that change the most; they are tried first, since runs are bounded."""


def check(
    model: Executable,
    inputs: Mapping[str, Any],
    left: Setting | Mapping[str, Array],
    right: Setting,
    tolerance: float | None = None,
) -> list[Difference]:
    """Return the outputs that differ between two ways to run a model.

    Args:
        model: any executable of it.
        inputs: as for `run`.
        left: how to run it, or stored outputs by name.
        right: how to run it the other way.
        tolerance: see `difference`.

    Raises:
        UsageError: a stored output is none of the model's.
    """
    _check_tolerance(tolerance)
    found = right.run(model, inputs)
    if isinstance(left, Setting):
        return differences(left.run(model, inputs), found, tolerance)
    _check_stored(left)
    unknown = [n for n in left if n not in found]
    if unknown:
        raise UsageError(
            f"stored output {unknown[0]!r} is none of the model's, which are {', '.join(found)}"
        )
    return differences(_all_typed(left, found), found, tolerance)


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"a tolerance is a number of at least 0, not {tolerance!r}")


def _check_stored(stored: object) -> None:
    if not isinstance(stored, Mapping):
        raise UsageError(
            f"one side is a Setting or stored arrays by name, not a {type(stored).__name__}"
        )
    if not stored:
        raise UsageError("there are no stored values to compare with")


def _all_typed(stored: Mapping[str, Any], like: Mapping[str, Array]) -> dict[str, Array]:
    return {name: _typed(np.asarray(array), like[name]) for name, array in stored.items()}


def _typed(stored: Array, like: Array) -> Array:
    """Return a stored array in the dtype it had: files name bf16 and fp8 only as so many bytes."""
    opaque = stored.dtype.kind == "V" and stored.dtype.itemsize == like.dtype.itemsize
    return stored.view(like.dtype) if opaque else stored.astype(stored.dtype.newbyteorder("="))


@dataclass(frozen=True)
class Finding:
    """The first node whose operands agree between two settings and whose result does not.

    Attributes:
        node: its name in the model, or its source.
        op: its operator and the types of its operands.
        difference: of its result.
        kernels: per setting the kernel that computes it, with the names of all nodes it does the work of.
        guilty: the side whose result differs from the reference: from the operator's on the same operands for a
            setting, from the model's on the same inputs for stored values; empty if that cannot be told.
        passes: passes without which, one at a time, the right setting agrees with the left one.
        runs: how often a model was run.
        nodes: among how many it was searched.
    """

    node: str
    op: str
    difference: Difference
    kernels: tuple[str, str]
    guilty: str
    passes: tuple[str, ...]
    runs: int
    nodes: int

    def __str__(self) -> str:
        lines = [
            f"node {self.node}: {self.op}",
            f"  differs in {self.difference}",
            *(f"  computed by {kernel}" for kernel in self.kernels if kernel),
        ]
        if self.guilty == _STORED:
            lines.append(
                "  the stored value is not what the model's own meaning gives, the computed one is"
            )
        elif self.guilty:
            lines.append(
                f"  wrong on {self.guilty}, by the operator's reference on the same operands"
            )
        if self.passes:
            lines.append(f"  agrees without pass {' or '.join(self.passes)}")
        lines.append(f"  found with {self.runs} runs among {self.nodes} nodes")
        return "\n".join(lines)


def bisect(
    model: Executable,
    inputs: Mapping[str, Any],
    left: Setting | Mapping[str, Array],
    right: Setting,
    tolerance: float | None = None,
) -> Finding | None:
    """Return the first node where two ways to run a model part, or None if their outputs agree.

    Stored values may be of outputs, and of any values or nodes between. The first of them, in the order of the graph,
    that the right side does not give is looked at: where the reference gives it, the search goes on between the
    reference and the right side; where it does not, or agrees with both, its node is the
    finding.

    Args:
        model: any executable of it.
        inputs: as for `run`.
        left: how to run it, or stored values by name.
        right: the other way.
        tolerance: see `difference`.

    Raises:
        UsageError: the outputs differ, but nothing that can be looked at in front of them does; a stored value is none
            of the model's.
    """
    _check_tolerance(tolerance)
    if isinstance(left, Setting):
        return _Search(model, inputs, left, right, tolerance).run()
    _check_stored(left)
    return _bisect_stored(model, inputs, left, right, tolerance)


def _bisect_stored(
    model: Executable,
    inputs: Mapping[str, Any],
    stored: Mapping[str, Array],
    right: Setting,
    tolerance: float | None,
) -> Finding | None:
    order: dict[str, int] = {}
    nodes: dict[str, Node | None] = {}

    def chosen(graph: Graph) -> dict[str, Value]:
        values = exposing(list(stored))(graph)
        positions = _positions(graph)
        for name in stored:
            node = nodes[name] = values[name].producer
            order[name] = -1 if node is None else positions[node]
        return {name: values[name] for name in stored}

    found = right.run(model, inputs, chosen)
    expected = _all_typed(stored, found)
    parted = sorted(differences(expected, found, tolerance), key=lambda d: order[d.name])
    if not parted:
        return None
    first = parted[0]

    def alone(graph: Graph) -> dict[str, Value]:
        return {first.name: chosen(graph)[first.name]}

    oracle = Setting("reference", skip=OPTIONAL)
    meant = oracle.run(model, inputs, alone)[first.name]
    with model.derive(alone) as part:
        search = _Search(part, inputs, oracle, right, tolerance, runs=2)
        if difference(first.name, expected[first.name], meant, tolerance) is None:
            finding = search.run()
            if finding is not None:
                return finding
        node = nodes[first.name]
        if node is None:
            raise UsageError(
                f"stored value {first.name!r} differs, and no node computes it: it is an input, weight, state or "
                "constant"
            )
        right_holds = difference("", meant, found[first.name], tolerance) is None
        stored_holds = difference("", meant, expected[first.name], tolerance) is None
        guilty = _STORED if right_holds and not stored_holds else ""
        types = ", ".join("none" if o is None else str(o.type) for o in node.operands)
        kernels = ("", search.kernel(right, node))
        return Finding(
            str(node.location),
            f"{node.op.name}({types})",
            first,
            kernels,
            guilty,
            (),
            3,
            len(stored),
        )


@dataclass
class _Search:
    model: Executable
    inputs: Mapping[str, Any]
    left: Setting
    right: Setting
    tolerance: float | None
    runs: int = 0
    graph: Graph = field(default_factory=Graph)
    """Before all passes, to look at; what is compiled are further graphs of the same nodes in the same order."""
    order: list[Node] = field(default_factory=list[Node])

    def run(self) -> Finding | None:
        found = self._differing(self._all)
        if not found:
            return None
        outputs = _outputs(self.graph)
        bad = [outputs[d.name] for d in found]
        self.order = _ancestors(self.graph, bad)
        if not self.order:
            raise UsageError(
                f"output {found[0].name!r} differs, and no node computes it: it is an input, weight, state or constant"
            )
        low, high = -1, len(self.order) - 1
        at_high = found
        while high - low > 1:
            middle = (low + high) // 2
            differing = self._differing(self._crossing(middle, bad))
            if differing:
                high, at_high = middle, differing
            else:
                low = middle
        if high == len(self.order) - 1 and not self._differing(self._around(high, bad)):
            return self._in_whole_program(found)
        node = self.order[high]
        prefix = f"{_positions(self.graph)[node]}:"
        own = [d for d in at_high if d.name.startswith(prefix)]
        own = own or [d for d in at_high if d.name in outputs and outputs[d.name].producer is node]
        return self._finding(node, (own or at_high)[0], self._crossing(high, bad))

    def _in_whole_program(self, found: list[Difference]) -> Finding:
        """Search by the same argument among the values that the right side's whole program stores, through taps."""
        outputs = {d.name for d in found}
        known = named_values(self.graph)
        with self.right.compiled(self.model) as program:
            program.warmup({n: _shape(a) for n, a in self.inputs.items()})
            compiled = program.program.compiled
            lives = _lives(compiled.program, known) if isinstance(compiled, WatchableGraph) else {}
            steps = sorted({first for first, _ in lives.values()})

            def differing(step: int) -> list[Difference]:
                names = [
                    n
                    for n, (a, b) in lives.items()
                    if a <= steps[step] and (b > steps[step] or n in outputs)
                ]
                self.runs += 1
                found = program.tap(names, self.inputs)
                expected = self._run(self.left, lambda graph: _named(graph, names))
                return differences(expected, found, self.tolerance)

            low, high = -1, len(steps) - 1
            last = differing(high) if steps else []
            while last and high - low > 1:
                middle = (low + high) // 2
                here = differing(middle)
                low, high, last = (low, middle, here) if here else (middle, high, last)
            guilty = [d for d in last if lives[d.name][0] == steps[high]] or last
        if not guilty:
            raise UsageError(
                f"outputs differ ({found[0]}), but not if the model is cut to what leads to them, and the device does "
                "not show what its whole program computes on the way"
            )
        producer = known[guilty[0].name].producer
        assert producer is not None
        return self._finding(producer, guilty[0], _outputs)

    # -- running both ------------------------------------------------------------------------------------------------

    def _all(self, graph: Graph) -> dict[str, Value]:
        self.graph = clone_graph(graph)  # the passes change the one that is compiled
        return _outputs(graph)

    def _crossing(self, position: int, bad: Sequence[Value]) -> Callable[[Graph], dict[str, Value]]:
        """Return a choice of the values that nodes up to a position make and later ones, or the outputs, read."""
        index, last = _positions(self.graph), set(bad)
        later = set(self.order[position + 1 :])
        crossing = [
            (index[node], result.index)
            for node in self.order[: position + 1]
            for result in node.results
            if result in last or any(u in later for u in result.users)
        ]

        def choose(graph: Graph) -> dict[str, Value]:
            nodes = graph.block.nodes()
            return {f"{node}:{result}": nodes[node].results[result] for node, result in crossing}

        return choose

    def _around(self, position: int, bad: Sequence[Value]) -> Callable[[Graph], dict[str, Value]]:
        """Return a choice of what crosses the cuts before and behind a node: not the program of the whole model."""
        before, behind = self._crossing(position - 1, bad), self._crossing(position, bad)
        return lambda graph: {**before(graph), **behind(graph)}

    def _run(
        self, setting: Setting, choose: Callable[[Graph], dict[str, Value]]
    ) -> dict[str, Array]:
        self.runs += 1
        return setting.run(self.model, self.inputs, choose)

    def _differing(self, choose: Callable[[Graph], dict[str, Value]]) -> list[Difference]:
        expected = self._run(self.left, choose)
        return differences(expected, self._run(self.right, choose), self.tolerance)

    # -- the result --------------------------------------------------------------------------------------------------

    def _finding(
        self, node: Node, first: Difference, choose: Callable[[Graph], dict[str, Value]]
    ) -> Finding:
        types = ", ".join("none" if o is None else str(o.type) for o in node.operands)
        name = next((r.name for r in node.results if r.name), "") or f"result of {node.op.name}"
        return Finding(
            str(node.location),
            f"{node.op.name}({types})",
            Difference(name, first.what, first.error),
            (self.kernel(self.left, node), self.kernel(self.right, node)),
            self._guilty(node),
            self._passes(choose),
            self.runs,
            len(self.order),
        )

    def kernel(self, setting: Setting, node: Node) -> str:
        """Return which kernel of the whole program does the work of a node; empty if that is not known."""
        with setting.compiled(self.model) as compiled:
            compiled.warmup({n: _shape(a) for n, a in self.inputs.items()})
            program = compiled.program.compiled
            if not isinstance(program, ScheduledGraph):
                return ""
            for thunk in reversed(program.program.thunks):
                info = thunk.node
                if info is not None and any(n in info.names for n in node.location.names):
                    kernel, work = thunk.kernel or "the host", ", ".join(info.names)
                    return f"{kernel} on {setting}, {info.op}, which does {work}"
        return f"no kernel on {setting}: the passes folded or rewrote it"

    def _guilty(self, node: Node) -> str:
        """Compare both results with the operator's reference on the operands of the left side."""
        if node.regions or self.runs + 3 > _MOST_RUNS:
            return ""
        index = _positions(self.graph)[node]

        def operands(graph: Graph) -> dict[str, Value]:
            chosen = graph.block.nodes()[index].operands
            return {str(i): v for i, v in enumerate(chosen) if v is not None}

        def results(graph: Graph) -> dict[str, Value]:
            return {str(r.index): r for r in graph.block.nodes()[index].results}

        given = self._run(self.left, operands)
        arrays = [given.get(str(i)) for i in range(len(node.operands))]
        try:
            expected = run_op(bind_dims(node.op, self._extents()), arrays)
        except RlxError:
            return ""
        wrong: list[Setting] = []
        for setting in (self.left, self.right):
            got = self._run(setting, results)
            if any(
                difference("", array, got[str(i)], self.tolerance) is not None
                for i, array in enumerate(expected)
                if str(i) in got
            ):
                wrong.append(setting)
        return str(wrong[0]) if len(wrong) == 1 else ""

    def _extents(self) -> dict[str, Any]:
        extents: dict[str, Any] = {}
        for value in self.graph.inputs:
            for dim, extent in zip(
                value.type.shape, _shape(self.inputs.get(value.name)), strict=False
            ):
                extents.setdefault(str(dim), extent)
        return extents

    def _passes(self, choose: Callable[[Graph], dict[str, Value]]) -> tuple[str, ...]:
        """Return the passes without which both sides agree, as far as the budget of runs allows."""
        if self.runs >= _MOST_RUNS:
            return ()
        expected = self._run(self.left, choose)
        found: list[str] = []
        for name in sorted(OPTIONAL - self.right.skip, key=lambda n: (n not in _SUSPECTS, n)):
            if self.runs >= _MOST_RUNS:
                break
            got = self._run(self.right.without(name), choose)
            if not differences(expected, got, self.tolerance):
                found.append(name)
        return tuple(found)


def _lives(program: Program, known: Mapping[str, Value]) -> dict[str, tuple[int, int]]:
    """Return the first and last thunk of every stored value that a node of the graph makes."""
    stored = Stored(program)
    reads: dict[int, int] = {}
    for index, thunk in enumerate(program.thunks):
        for slot in thunk.reads():
            reads[program.root(slot)] = index
    found: dict[str, tuple[int, int]] = {}
    for name, value in stored.names.items():
        slot = value.slot if value.slot in stored.writers else program.root(value.slot)
        if name in known and known[name].producer is not None and slot in stored.writers:
            found[name] = (stored.writers[slot][-1], reads.get(program.root(slot), -1))
    return found


def _named(graph: Graph, names: Sequence[str]) -> dict[str, Value]:
    known = named_values(graph)
    return {name: known[name] for name in names}


def _positions(graph: Graph) -> dict[Node, int]:
    return {node: index for index, node in enumerate(graph.block)}


def _ancestors(graph: Graph, values: Sequence[Value]) -> list[Node]:
    """Return the nodes that values are computed by, in order; constants alone in front of a cut would tell nothing."""
    needed: set[Node] = set()
    stack = [v.producer for v in values if v.producer is not None]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [o.producer for o in node.operands if o is not None and o.producer is not None]
    return [n for n in graph.block if n in needed and not isinstance(n.op, Constant)]


def _outputs(graph: Graph) -> dict[str, Value]:
    return dict(zip(graph.output_names, graph.outputs, strict=True))


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(np.shape(given))
