# SPDX-License-Identifier: Apache-2.0
"""An executable whose runs a test can hold and let go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

import rlx
from rlx.backends.protocol import CompiledGraph, CompileOptions
from rlx.backends.reference.backend import ReferenceBackend
from rlx.base.numeric import Array
from rlx.base.target import Target
from rlx.ir.graph import Graph
from rlx.runtime.executable import Executable
from rlx.runtime.source import graph_source

_SECONDS = 30


class Gate:
    """Holds every run before it computes, until it is opened.

    Attributes:
        began: how many runs have come to the gate.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = 0
        self.began = 0

    def pass_through(self) -> None:
        """Wait for the gate; called by runs."""
        with self._changed:
            self.began += 1
            self._changed.notify_all()
            mine = self.began
            assert self._changed.wait_for(lambda: self._open >= mine, _SECONDS)

    def open(self, runs: int = 1_000_000) -> None:
        """Let so many more runs pass."""
        with self._changed:
            self._open += runs
            self._changed.notify_all()

    def wait_for(self, runs: int) -> None:
        """Wait until so many runs have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.began >= runs, _SECONDS)


class _GatedBackend(ReferenceBackend):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def compile(self, graph: Graph, target: Target, options: CompileOptions) -> CompiledGraph:
        compiled = super().compile(graph, target, options)
        run = compiled.run

        def gated(
            inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
        ) -> None:
            self._gate.pass_through()
            run(inputs, outputs, env)

        # Not a proxy: protocols look at what an object's class has.
        compiled.run = gated
        return compiled


@pytest.fixture
def gated() -> Iterator[Callable[[rlx.Graph], tuple[Executable, Gate]]]:
    """Compile a graph for the reference with a gate before every run."""
    gates: list[Gate] = []

    def compile_gated(graph: rlx.Graph) -> tuple[Executable, Gate]:
        gates.append(Gate())
        backend = _GatedBackend(gates[-1])
        (target,) = backend.targets()
        return Executable(graph_source(graph.ir), backend, target, CompileOptions()), gates[-1]

    yield compile_gated
    for gate in gates:
        gate.open()
