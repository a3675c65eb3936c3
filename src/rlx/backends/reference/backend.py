# SPDX-License-Identifier: Apache-2.0
"""Runs a graph, fused or not, node by node with `Op.reference`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.protocol import CompiledGraph, CompileOptions, MemoryReport
from rlx.base.numeric import Array
from rlx.base.target import Claims, Target
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate

__all__ = ["ReferenceBackend"]


class _Compiled:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._weights: dict[str, Array] = {}
        counts = Counter(node.op.name for node in graph.block.walk())
        self.dispatch: Sequence[tuple[str, str, int]] = [
            (n, "reference", c) for n, c in sorted(counts.items())
        ]

    def set_weight(self, name: str, data: Array) -> None:
        self._weights[name] = data

    def plan(self, uppers: Mapping[str, int]) -> None:
        """NumPy allocates as it goes."""

    def run(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> None:
        del env
        named = {v.name: a for v, a in zip(self._graph.inputs, inputs, strict=True)}
        results = evaluate(self._graph, named, self._weights)
        for target, name in zip(outputs, self._graph.output_names, strict=True):
            np.copyto(target, results[name], casting="no")

    def memory(self) -> MemoryReport:
        return MemoryReport(weights=sum(w.nbytes for w in self._weights.values()))

    def clone(self) -> CompiledGraph:
        return _Compiled(self._graph)

    def trim(self) -> None:
        """Nothing is kept between runs."""

    def close(self) -> None:
        self._weights.clear()


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

    def describe(self, target: Target) -> Mapping[str, Any]:
        """Return the NumPy version."""
        del target
        return {"numpy": np.__version__}
