# SPDX-License-Identifier: Apache-2.0
"""What a compiled model is, as text for people and JSON for programs: operators, fusion, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlx.backends.protocol import CompiledGraph, MemoryReport, ScheduledGraph

__all__ = ["Dispatch", "Fused", "ModelReport", "Remark"]


@dataclass(frozen=True)
class Dispatch:
    """How the nodes of one operator run: by a `kernel`, as a `view`, on the `host`, or by their `reference`."""

    op: str
    how: str
    nodes: int


@dataclass(frozen=True)
class Fused:
    """A kernel that does the work of several nodes.

    Attributes:
        op: what it is.
        nodes: their names in the model; its own comes first.
    """

    op: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Remark:
    """What a pass has to say, most often why something did not fuse."""

    step: str
    text: str


@dataclass(frozen=True)
class ModelReport:
    """Everything that is known about a compiled model without running it.

    Attributes:
        model: its name.
        device: what it is compiled for.
        inputs: name, dtype and shape.
        states: likewise.
        outputs: likewise.
        guards: what the program assumes about extents.
        dispatch: how operators run.
        fused: what was fused.
        remarks: what was not, and why.
        memory: bytes, by tensor too.
        seconds: how long each stage took.
    """

    model: str
    device: str
    inputs: Sequence[str]
    states: Sequence[str]
    outputs: Sequence[str]
    guards: Sequence[str]
    dispatch: Sequence[Dispatch]
    fused: Sequence[Fused]
    remarks: Sequence[Remark]
    memory: MemoryReport
    seconds: dict[str, float]

    @classmethod
    def of(
        cls,
        title: tuple[str, str],
        interface: tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]],
        compiled: CompiledGraph,
        remarks: Sequence[str],
        seconds: dict[str, float],
    ) -> ModelReport:
        """Return the report of a program.

        Args:
            title: names of the model and the device.
            interface: inputs, states, outputs and guards.
            compiled: the backend's part.
            remarks: of the passes, each with its pass in front.
            seconds: by stage.
        """
        thunks = compiled.program.thunks if isinstance(compiled, ScheduledGraph) else ()
        nodes = dict.fromkeys(t.node for t in thunks if t.node is not None)
        inputs, states, outputs, guards = ([str(item) for item in part] for part in interface)
        return cls(
            *title,
            inputs,
            states,
            outputs,
            guards,
            [Dispatch(*row) for row in compiled.dispatch],
            [Fused(n.op, n.names) for n in nodes if len(n.names) > 1],
            [Remark(*line.split(": ", 1)) for line in remarks],
            compiled.memory(),
            dict(seconds),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "memory": self.memory.to_json()}

    def text(self, top: int = 10) -> str:
        """Return it as lines.

        Args:
            top: rows of the lists that may be long.
        """
        memory = self.memory
        lines = [
            f"{self.model} on {self.device}",
            *(f"  input   {s}" for s in self.inputs),
            *(f"  state   {s}" for s in self.states),
            *(f"  output  {s}" for s in self.outputs),
            *(f"  assumes {g}" for g in self.guards),
            "operators",
            *(f"  {d.nodes:5}  {d.how:9}  {d.op}" for d in self.dispatch),
            "memory, bytes",
            f"  {memory.weights:13,}  weights",
            f"  {memory.arena:13,}  arena (no plan is below {memory.arena_lower_bound:,})",
            f"  {memory.scratch:13,}  scratch",
            f"  {memory.state:13,}  state",
            "largest intermediate values, which share the arena",
            *(f"  {s.nbytes:13,}  {s.count:4} x {s.op} {s.type}" for s in memory.top(top)),
            "fused",
            *(f"  {f.op}: {', '.join(f.nodes)}" for f in self.fused[:top]),
            *([f"  and {len(self.fused) - top} more"] if len(self.fused) > top else []),
            "not fused",
            *(f"  {r.step}: {r.text}" for r in self.remarks[:top]),
            *([f"  and {len(self.remarks) - top} more"] if len(self.remarks) > top else []),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()
