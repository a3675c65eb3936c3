# SPDX-License-Identifier: Apache-2.0
"""Runs a graph, fused or not, node by node with `Op.reference`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.backends.host import HostMemory
from rlx.backends.protocol import CompiledGraph, CompileOptions, MemoryReport, StateMemory
from rlx.base.dims import DimExpr, bounds
from rlx.base.dims import evaluate as evaluate_dim
from rlx.base.numeric import Array
from rlx.base.target import Claims, Target
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate

__all__ = ["ReferenceBackend"]


class _Compiled:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._weights: dict[str, Array] = {}
        self._states: dict[str, HostMemory] = {}
        self._state_bytes = 0
        self.states = {s.name: s.value.type.shape for s in graph.states}
        counts = Counter(node.op.name for node in graph.block.walk())
        self.dispatch: Sequence[tuple[str, str, int]] = [
            (n, "reference", c) for n, c in sorted(counts.items())
        ]

    def set_weight(self, name: str, data: Array) -> None:
        self._weights[name] = data

    def set_state(self, name: str, memory: StateMemory) -> None:
        """Point a state at its bytes; see the protocol."""
        assert isinstance(memory, HostMemory)
        self._states[name] = memory

    def plan(self, uppers: Mapping[str, int]) -> None:
        """NumPy allocates as it goes; only states have a size that is planned."""
        self._state_bytes = sum(
            bounds(nbytes, uppers)[1] if isinstance(nbytes, DimExpr) else nbytes
            for nbytes in (s.value.type.nbytes for s in self._graph.states)
        )

    def run(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> None:
        named = {v.name: a for v, a in zip(self._graph.inputs, inputs, strict=True)}
        following = self._views(env)
        results = evaluate(self._graph, named, self._weights, states=following)
        for target, name in zip(outputs, self._graph.output_names, strict=True):
            np.copyto(target, results[name], casting="no")
        # One state may take the value another one has now: nothing is overwritten before all is copied.
        fresh = {n: np.array(a, order="C") for n, a in following.items()}
        for name, array in fresh.items():
            self._states[name].write(array)

    def _views(self, env: Mapping[str, int]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for state in self._graph.states:
            shape = tuple(evaluate_dim(d, env) for d in state.value.type.shape)
            found[state.name] = self._states[state.name].view(state.value.type.dtype, shape)
        return found

    def memory(self) -> MemoryReport:
        return MemoryReport(
            weights=sum(w.nbytes for w in self._weights.values()), state=self._state_bytes
        )

    def clone(self) -> CompiledGraph:
        return _Compiled(self._graph)

    def trim(self) -> None:
        """Nothing is kept between runs."""

    def close(self) -> None:
        self._weights.clear()
        self._states.clear()


class ReferenceBackend:
    """The NumPy backend: slow, and what every other backend is compared with."""

    name = "reference"

    def targets(self) -> Sequence[Target]:
        """Return the one target; NumPy is always there."""
        return [Target("reference", description="NumPy, the meaning of every operator (slow)")]

    def claims(self, target: Target) -> Claims:
        """Return claims that accept everything, so nothing is decomposed."""
        del target
        return Claims()

    def passes(self, target: Target) -> Sequence[Any]:
        """Return none."""
        del target
        return ()

    def compile(self, graph: Graph, target: Target, options: CompileOptions) -> CompiledGraph:
        """Return the graph wrapped for evaluation."""
        del target, options
        return _Compiled(graph)

    def state_memory(self, nbytes: int, target: Target) -> StateMemory:
        """Return memory of NumPy's."""
        del target
        return HostMemory(np.zeros(nbytes, np.uint8))

    def describe(self, target: Target) -> Mapping[str, Any]:
        """Return the NumPy version."""
        del target
        return {"numpy": np.__version__}
