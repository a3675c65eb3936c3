# SPDX-License-Identifier: Apache-2.0
"""Schedules and plans any graph without a device, so the compiler can be tested anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.device import Buffer, Device, Stream
from rlx.backends.host import HostMemory
from rlx.backends.null.device import NullDevice
from rlx.backends.null.launching import Launcher
from rlx.backends.protocol import CompiledGraph, CompileOptions, MemoryReport, StateMemory
from rlx.base.dims import Dim
from rlx.base.errors import DeviceError
from rlx.base.numeric import Array
from rlx.base.target import Claims, Target
from rlx.ir.graph import Graph, Node
from rlx.kernel.program import DimArg, Program, SlotArg
from rlx.kernel.schedule import LoweringContext, schedule
from rlx.memory.plan import Plan, plan_memory
from rlx.memory.report import placements
from rlx.ops.state import WriteRows

__all__ = ["NullBackend"]

_ANCHORS = frozenset({"matmul", "conv", "conv_transpose"})


class _Lowerer:
    """One launch per node, named after its operator."""

    def lower(self, node: Node, ctx: LoweringContext) -> None:
        args = [SlotArg(ctx.slot(o)) for o in node.operands if o is not None]
        results = [SlotArg(ctx.slot(r), writes=True) for r in node.results]
        inplace = [(args[0].slot, results[0].slot)] if isinstance(node.op, WriteRows) else []
        ctx.launch(node.op.label, [*args, *results], inplace=inplace)

    def copy(self, ctx: LoweringContext, source: int, target: int, nbytes: Dim) -> None:
        del nbytes
        ctx.launch("copy", [SlotArg(source), SlotArg(target, writes=True)])

    def check(self, ctx: LoweringContext, margins: Sequence[Dim]) -> None:
        ctx.launch("check", [DimArg(d) for d in margins], may_fail=True)


class _Compiled:
    """A scheduled program with a memory plan and nothing to run it on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._plan = Plan()
        self._weights: dict[str, Array] = {}
        self._states: dict[str, StateMemory] = {}
        self._launcher = Launcher(program)
        self.states = {s.name: s.shape for s in program.states}
        counts = Counter(str(t.kernel) for t in program.thunks if t.kernel is not None)
        self.dispatch: Sequence[tuple[str, str, int]] = [
            (n, "kernel", c) for n, c in sorted(counts.items())
        ]

    def set_weight(self, name: str, data: Array) -> None:
        self._weights[name] = data
        self._launcher.forget_weights()

    def set_state(self, name: str, memory: StateMemory) -> None:
        """Point a state at its bytes; runs need them on the device of their stream (`DeviceMemory`)."""
        self._states[name] = memory

    def plan(self, uppers: Mapping[str, int]) -> None:
        self._plan = plan_memory(self.program, uppers)
        self._launcher.release()

    def enqueue(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        env: Mapping[str, int],
        stream: Stream,
    ) -> None:
        """Enter the launches of a run in the books of the device; nothing is computed."""
        self._launcher.enqueue(
            self._plan, self._weights, self._states, inputs, outputs, env, stream
        )

    def run(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> None:
        del inputs, outputs, env
        raise DeviceError("the null device compiles and plans, it does not run; use device='cpu'")

    def memory(self) -> MemoryReport:
        return MemoryReport(
            weights=sum(w.nbytes for w in self._weights.values()),
            arena=self._plan.arena,
            arena_lower_bound=self._plan.lower_bound,
            state=self._plan.state,
            tensors=placements(
                self.program,
                self._plan,
                {
                    slot: self._weights[weight.name].nbytes if weight.name in self._weights else 0
                    for slot, weight in self.program.weights.items()
                },
            ),
        )

    def clone(self) -> CompiledGraph:
        return _Compiled(self.program)

    def trim(self) -> None:
        self._plan = Plan()
        self._launcher.release()

    def close(self) -> None:
        self._launcher.release()
        self._weights.clear()
        self._states.clear()


class NullBackend:
    """Compiles for no device at all."""

    name = "null"

    def targets(self) -> Sequence[Target]:
        """Return the one target."""
        return (Target("null", description="compiles and plans, runs nothing"),)

    def claims(self, target: Target) -> Claims:
        """Return claims on every operator, so graphs stay as they are but for fusion."""
        del target
        return Claims(epilogue_anchors=_ANCHORS)

    def passes(self, target: Target) -> Sequence[Any]:
        """Return none."""
        del target
        return ()

    def compile(self, graph: Graph, target: Target, options: CompileOptions) -> CompiledGraph:
        """Schedule a graph with one launch per node."""
        del target, options
        with graph.facts.active():
            return _Compiled(schedule(graph, _Lowerer()))

    def state_memory(self, nbytes: int, target: Target) -> StateMemory:
        """Return memory of the host."""
        del target
        return HostMemory(np.zeros(nbytes, np.uint8))

    def device(self, target: Target) -> Device:
        """Return a device that checks the rules of its use."""
        del target
        return NullDevice()

    def describe(self, target: Target) -> Mapping[str, Any]:
        """Return nothing: there is no device."""
        del target
        return {}
