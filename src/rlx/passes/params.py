# SPDX-License-Identifier: Apache-2.0
"""What is computed from weights alone: a graph of its own that runs once per version of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np

from rlx.base.numeric import Array
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import GraphRewriter
from rlx.ops.indexing import Gather
from rlx.ops.leaf import Constant

__all__ = ["GROWTH", "ParamProgram", "split_params"]

GROWTH: Final = 8
"""A derived weight has at most this many times the bytes of what it is computed from."""
_FREE_BYTES = 1 << 16


@dataclass
class ParamProgram:
    """How derived weights follow from a model's own.

    Attributes:
        graph: its params are the model's own weights (by their names), its outputs the derived
            ones. It has no inputs.
        results: name of each derived param -> names of the own params it depends on; what
            `set_param` has to recompute.
    """

    graph: Graph = field(default_factory=lambda: Graph("params"))
    results: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def affected(self, name: str) -> list[str]:
        """Return the derived params that depend on one of the model's own."""
        return [derived for derived, sources in self.results.items() if name in sources]


def split_params(
    graph: Graph, program: ParamProgram | None = None, *, growth: int = GROWTH
) -> ParamProgram:
    """Move param-only nodes of a graph into a param program; their results become params.

    Args:
        graph: changed in place; params that it no longer reads are removed from it.
        program: an earlier result for the same graph, which is extended; derived params it already
            gives may be computed further.
        growth: a derived weight may have at most this many times the bytes of what it is computed
            from.

    Returns:
        The program: evaluate its graph on the model's own weights to get the derived ones.
    """
    program = ParamProgram() if program is None else program
    _Splitter(graph, program, growth).run()
    return program


class _Splitter:
    def __init__(self, graph: Graph, program: ParamProgram, growth: int) -> None:
        self.graph = graph
        self.program = program
        self.growth = growth
        self.rewriter = GraphRewriter(graph)
        self.names = {p.value: n for n, p in graph.params.items()}
        # Value of the graph -> own params it depends on, for all that is param-only.
        self.sources: dict[Value, frozenset[str]] = {}
        self.moved: dict[Value, Value] = {}
        self.numbers: dict[str, int] = {}
        self.outputs = dict(zip(program.graph.output_names, program.graph.outputs, strict=True))
        self.builder = Builder(program.graph.block, program.graph.facts)

    def run(self) -> None:
        for value, name in self.names.items():
            self.sources[value] = self.program.results.get(name, frozenset({name}))
        chosen = [node for node in self.graph.block if self._is_param_only(node)]
        inside = set(chosen)
        for node in chosen:
            for result in node.results:
                if self.rewriter.is_root(result) or any(u not in inside for u in result.users):
                    self._derive(result)
        for node in reversed(chosen):
            self._erase_if_dead(node)
        self._forget_unread()

    def _erase_if_dead(self, node: Node) -> None:
        """Remove a node that nothing reads any more, and constants that only it read."""
        if not self.rewriter.is_dead(node):
            return
        constants = [o for o in node.operands if o is not None and _is_constant(o)]
        self.rewriter.erase(node)
        for constant in dict.fromkeys(constants):
            if constant.producer is not None and self.rewriter.is_dead(constant.producer):
                self.rewriter.erase(constant.producer)

    def _is_param_only(self, node: Node) -> bool:
        """Decide on a node in order, and remember what its results depend on."""
        if node.regions or not node.op.foldable or not all(r.type.is_static for r in node.results):
            return False
        sources: set[str] = set()
        nbytes = 0
        for operand in node.operands:
            if operand is None or _is_constant(operand):
                continue
            known = self.sources.get(operand)
            if known is None:
                return False
            sources |= known
            nbytes += cast("int", operand.type.nbytes)
        if not sources or _may_fail(node):
            return False
        if any(
            cast("int", r.type.nbytes) > self.growth * nbytes + _FREE_BYTES for r in node.results
        ):
            return False
        self.sources.update(dict.fromkeys(node.results, frozenset(sources)))
        return True

    def _derive(self, result: Value) -> None:
        """Make a value of the graph a derived param."""
        name = self._fresh(result)
        self.outputs[name] = self._move(result)
        self.program.results[name] = self.sources[result]
        leaf = self.graph.add_param(name, None, result.type)
        # Other derived values may be computed from this one, which they read as a leaf from here
        # on.
        self.names[leaf] = name
        self.rewriter.replace_value(result, leaf)

    def _fresh(self, result: Value) -> str:
        producer = result.producer
        assert producer is not None
        base = f"{producer.location.name or producer.op.name}:{result.index}"
        taken = (self.graph.params, self.program.graph.params, self.program.results)
        while True:
            number = self.numbers[base] = self.numbers.get(base, 0) + 1
            name = base if number == 1 else f"{base}.{number}"
            if not any(name in names for names in taken):
                return name

    def _move(self, value: Value) -> Value:
        """Return the value's copy in the param program, copying what it needs first."""
        stack = [value]
        while stack:
            top = stack[-1]
            if top in self.moved:
                stack.pop()
                continue
            producer = top.producer
            if producer is None:
                self.moved[top] = self._leaf(top)
                continue
            missing = [o for o in producer.operands if o is not None and o not in self.moved]
            if missing:
                stack.extend(missing)
                continue
            operands = [self.moved[o] if o is not None else None for o in producer.operands]
            with self.builder.at(producer.location):
                copy = self.builder.emit_typed(
                    producer.op, operands, [r.type for r in producer.results]
                )
            self.moved.update(zip(producer.results, copy.results, strict=True))
        return self.moved[value]

    def _leaf(self, value: Value) -> Value:
        name = self.names[value]
        if name in self.outputs:
            return self.outputs[name]
        own = self.program.graph.params.get(name)
        if own is None:
            param = self.graph.params[name]
            return self.program.graph.add_param(name, param.data, value.type, param.identity)
        return own.value

    def _forget_unread(self) -> None:
        """Drop params that nothing reads any more, and derived ones that became intermediate."""
        for name, param in list(self.graph.params.items()):
            used = bool(param.value.uses) or self.rewriter.is_root(param.value)
            derived_from = name in self.program.graph.params or name in self.program.results
            if not used and derived_from:
                del self.graph.params[name]
                if name in self.program.results:
                    del self.program.results[name]
                    del self.outputs[name]
        self.program.graph.set_outputs(self.outputs)


def _may_fail(node: Node) -> bool:
    """Return whether the node may raise for some weights: then it has to raise in a run."""
    if not node.op.may_fail(*(o.type if o is not None else None for o in node.operands)):
        return False
    data, known = node.operands[0], _constant(node.operands[1] if len(node.operands) == 2 else None)
    if data is None or known is None or not known.size:
        return True
    if isinstance(node.op, Gather):
        extent = data.type.shape[node.op.axis]
        return (
            not isinstance(extent, int)
            or not -extent <= int(known.min()) <= int(known.max()) < extent
        )
    return node.op.name not in _DIVISIONS or not bool(np.all(known != 0))


_DIVISIONS = ("div", "floor_mod", "fmod")


def _constant(value: Value | None) -> Array | None:
    producer = value.producer if value is not None else None
    return producer.op.data.array if producer and isinstance(producer.op, Constant) else None


def _is_constant(value: Value) -> bool:
    return value.producer is not None and isinstance(value.producer.op, Constant)
