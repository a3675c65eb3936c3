# SPDX-License-Identifier: Apache-2.0
"""An executable whose runs a test can hold and let go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

import rlx
from rlx.backends.lanes import Job, JobState
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

    def close(self) -> None:
        """Begin anew, as if no run had come."""
        self._open = self.began = 0

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


class _LanedGraph:
    """A compiled graph all of whose runs can be jobs, but for those with states."""

    def __init__(self, inner: CompiledGraph) -> None:
        self._inner = inner
        self.run = inner.run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def job(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> HostJob:
        return HostJob(lambda: self._inner.run(inputs, outputs, env))


class HostJob:
    """A job in Python that keeps the rules of `rlx.backends.lanes`. A run that raises has stopped."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self.state = JobState.WAITING
        self.error: Exception | None = None
        self.wanted = False

    def wait(self, seconds: float) -> JobState:
        with self._changed:
            self._changed.wait_for(lambda: self.state >= JobState.DONE, seconds)
            return self.state

    def become(self, state: JobState) -> bool:
        """Go on to a state unless it was withdrawn."""
        with self._changed:
            if self.state is JobState.WITHDRAWN:
                return False
            self.state = state
            self._changed.notify_all()
            return True

    def withdraw(self) -> bool:
        with self._changed:
            return self.state is JobState.WAITING and self.become(JobState.WITHDRAWN)

    def want(self) -> JobState:
        with self._changed:
            self.wanted = True
            return self.state

    def do(self) -> bool:
        """Run; return whether Python has something to do now."""
        if not self.become(JobState.RUNNING):
            return False
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  (`finish` raises it)
            self.error = error
        with self._changed:
            self.become(JobState.DONE if self.error is None else JobState.STOPPED)
            return self.wanted or self.error is not None

    def finish(self) -> None:
        assert self.error is not None
        raise self.error


class HostLane:
    """A lane in Python that keeps the rules of `rlx.backends.lanes`."""

    capacity = 4

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: list[HostJob] = []
        self._called = False
        self.passed = 0

    @property
    def pushed(self) -> int:
        return len(self._jobs)

    def push(self, job: Job) -> None:
        assert isinstance(job, HostJob)
        with self._changed:
            assert self.pushed - self.passed < self.capacity
            self._jobs.append(job)
            self._changed.notify_all()

    def call(self) -> None:
        with self._changed:
            self._called = True
            self._changed.notify_all()

    def serve(self, seconds: float) -> bool:
        while True:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: self._called or self.passed < self.pushed, seconds
                ):
                    return True
                if self._called:
                    self._called = False
                    return False
                job = self._jobs[self.passed]
            wanted = job.do()
            self.passed += 1
            if wanted:
                return False
            seconds = 0.0005

    def after_fork_in_child(self) -> None:
        self._jobs.clear()
        self.passed = 0


class _LanedBackend(_GatedBackend):
    def compile(self, graph: Graph, target: Target, options: CompileOptions) -> CompiledGraph:
        compiled = super().compile(graph, target, options)
        return compiled if graph.states else cast("CompiledGraph", _LanedGraph(compiled))

    def lane(self, target: Target) -> HostLane:
        del target
        return HostLane()


@pytest.fixture(params=("python", "lane"))
def gated(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[rlx.Graph], tuple[Executable, Gate]]]:
    """Compile a graph for the reference with a gate before every run, which Python does, or a lane."""
    gates: list[Gate] = []

    def compile_gated(graph: rlx.Graph) -> tuple[Executable, Gate]:
        gates.append(Gate())
        backend = (_LanedBackend if request.param == "lane" else _GatedBackend)(gates[-1])
        (target,) = backend.targets()
        made = Executable(graph_source(graph.ir), backend, target, CompileOptions())
        if request.param == "lane" and not made.state:  # runs are jobs once their shapes are known
            gates[-1].open(1)
            shapes = [[n if isinstance(n, int) else 3 for n in i.shape] for i in made.inputs]
            ones = [np.ones(s, i.dtype.numpy) for s, i in zip(shapes, made.inputs, strict=True)]
            made.run(ones)
            gates[-1].close()
        return made, gates[-1]

    yield compile_gated
    for gate in gates:
        gate.open()
