# SPDX-License-Identifier: Apache-2.0
"""What a backend is. A backend author reads this file, then `rlx.testing.conformance`.

A backend finds targets, says which operators it claims, and compiles a graph of claimed operators into a
`CompiledGraph`. It registers under the entry point group ``rlx.backends`` (an instance named `backend`). Devices with
memory and streams of their own: `rlx.backends.device`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.base.precision import FULL, PrecisionPolicy
from rlx.base.target import Claims, Target
from rlx.base.types import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.kernel.program import Program
    from rlx.memory.report import Placement, Share

__all__ = [
    "AdoptingGraph",
    "Backend",
    "CompileOptions",
    "CompiledGraph",
    "MappedGraph",
    "MemoryReport",
    "Run",
    "SavedGraph",
    "SavingBackend",
    "ScheduledGraph",
    "Span",
    "StateMemory",
    "StatefulBackend",
    "StatefulGraph",
    "WatchableGraph",
    "watchable",
]


@dataclass(frozen=True)
class CompileOptions:
    """What a caller may choose.

    Attributes:
        threads: most participants of one run; None means all available CPUs.
        precision: which operators compute in what.
        host_ops: `allow` runs operators without a kernel on the host (named in the reports), `error` refuses them.
        skip: names of passes that do not run, for finding faults.
    """

    threads: int | None = None
    precision: PrecisionPolicy = FULL
    host_ops: str = "allow"
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MemoryReport:
    """Bytes a compiled graph needs, known before its first run.

    Attributes:
        weights: params as the kernels read them (packed, folded), and constants.
        arena: intermediate values at the upper bounds of the extents.
        arena_lower_bound: the maximum of simultaneously live intermediate bytes.
        scratch: working memory of all participants.
        state: values that persist between runs.
        tensors: every weight and intermediate buffer, with its place; empty where a backend does not say.
    """

    weights: int = 0
    arena: int = 0
    arena_lower_bound: int = 0
    scratch: int = 0
    state: int = 0
    tensors: Sequence[Placement] = field(default=(), repr=False)

    def top(self, count: int = 10, kind: str = "arena") -> list[Share]:
        """Return what takes the most bytes, summed by (operator, dtype and shape).

        Intermediate buffers share bytes over time, so their sum exceeds the arena.

        Args:
            count: rows at the most.
            kind: `arena`, `weight` or `state`.

        Raises:
            UsageError: it is another kind.
        """
        from rlx.memory.report import shares

        if kind not in ("arena", "weight", "state"):
            raise UsageError(f"memory is of kind 'arena', 'weight' or 'state', not {kind!r}")
        return shares(self.tensors, kind)[:count]

    def picture(self, title: str = "") -> str:
        """Return an SVG of the arena: time to the right, addresses up, a rectangle is a tensor while it lives.

        Raises:
            UsageError: the device plans no arena.
        """
        from rlx.memory.picture import arena_svg

        if self.arena and not any(t.kind == "arena" for t in self.tensors):
            raise UsageError("this device does not say where its tensors lie")
        return arena_svg(self.tensors, self.arena, title)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


Run: TypeAlias = Callable[[Sequence[Array], Sequence[Array], Mapping[str, int]], None]
"""(inputs, outputs, extents) -> nothing: `CompiledGraph.run`, or what does more around it."""


class CompiledGraph(Protocol):
    """A graph compiled for one target. Calls are serialised by the owner."""

    dispatch: Sequence[tuple[str, str, int]]
    """(operator, how it runs, number of nodes): `kernel`, `view`, `host` or `reference`."""

    def set_weight(self, name: str, data: Array) -> None:
        """Point a param (or derived param) at its data; the array is kept, not copied, and must be C-contiguous."""
        ...

    def plan(self, uppers: Mapping[str, int]) -> None:
        """(Re)plan memory for these upper bounds of the extents; code is untouched.

        Raises:
            OutOfMemoryError: there is not so much memory. The plan before stays in force.
        """
        ...

    def run(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> None:
        """Run once.

        Args:
            inputs: C-contiguous arrays in the graph's order, of exactly its dtypes and the shapes under `env`.
            outputs: likewise, to be filled.
            env: the value of every symbol, within the planned bounds.

        Raises:
            ExecutionError: the data broke a rule of an operator.
        """
        ...

    def memory(self) -> MemoryReport:
        """Return the bytes it needs at the planned bounds."""
        ...

    def clone(self) -> CompiledGraph:
        """Return another one of the same code, with memory of its own, that may run at the same time.

        Its weights are not set and it is not planned; closing one of the two leaves the other alone.
        """
        ...

    def trim(self) -> None:
        """Give back the memory of intermediate values; `plan` is called before the next run."""
        ...

    def close(self) -> None:
        """Give everything back; the object is not usable afterwards."""
        ...


class Backend(Protocol):
    """A kind of device."""

    name: str

    def targets(self) -> Sequence[Target]:
        """Return the devices found (empty where there are none)."""
        ...

    def claims(self, target: Target) -> Claims:
        """Return which operators, epilogues and layouts the backend takes."""
        ...

    def passes(self, target: Target) -> Sequence[Any]:
        """Return pipeline entries (`rlx.passes.manager.Entry`) that run after the shared passes.

        They rewrite the graph into operators private to the backend, for example to weights in packed layouts.
        """
        ...

    def compile(self, graph: Graph, target: Target, options: CompileOptions) -> CompiledGraph:
        """Compile a graph of claimed operators.

        Raises:
            CompileError: a kernel could not be built.
            UnsupportedOpError: an operator is not claimed.
        """
        ...

    def describe(self, target: Target) -> Mapping[str, Any]:
        """Return what a bug report needs to know about a target."""
        ...


@dataclass(frozen=True)
class SavedGraph:
    """A compiled graph as plain data, without its weights.

    Attributes:
        data: what JSON holds.
        blobs: bytes that go with it (machine code, constants).
    """

    data: Mapping[str, Any]
    blobs: Sequence[Any]


@runtime_checkable
class AdoptingGraph(Protocol):
    """A compiled graph with a better place for weights than where NumPy put them."""

    def adopt_weights(self, data: dict[str, Array]) -> dict[str, Array]:
        """Copy weights, by param name, to where kernels read them best, and return them there.

        The arrays returned belong to nobody else and are writable. Kernels are pointed at them by `set_weight`. The
        dict that was given is emptied, one array at a time, so that both copies of all never exist at once.
        """
        ...


class Span(NamedTuple):
    """When one thunk of a watched run ran, in nanoseconds of one monotonic clock."""

    thunk: int
    began: int
    ended: int


@runtime_checkable
class ScheduledGraph(Protocol):
    """A compiled graph whose schedule reports may read."""

    program: Program


@runtime_checkable
class MappedGraph(ScheduledGraph, Protocol):
    """A compiled graph whose memory the host sees."""

    def extents(self) -> Mapping[str, int]:
        """Return what the symbols were worth in the last run, counters of loops included."""
        ...

    def block(self, slot: int) -> tuple[Array, int] | None:
        """Return the bytes (u8) that a slot lies in, and where in them it begins.

        The array keeps the bytes alive, also beyond the program. None: they are a caller's, or not allocated.
        """
        ...


@runtime_checkable
class WatchableGraph(ScheduledGraph, Protocol):
    """A compiled graph that lets a caller look between its thunks: taps, profiles and checks are built on this.

    A program that is not watched must not pay for it.
    """

    threads: int
    """Most participants of a run."""

    def watched(
        self,
        after: Callable[[int], None] | None = None,
        thunks: Collection[int] = (),
        *,
        timed: bool = False,
    ) -> AbstractContextManager[list[Span]]:
        """Watch the runs inside the block.

        Args:
            after: called with the index of each of `thunks` whenever it is done. What it raises ends the run.
            thunks: indices of kernels and host operators in `program.thunks`.
            timed: time all kernels and host operators.

        Returns:
            A context manager; the list it gives holds, once the block is over, a span for all that was timed, in order.
            Calls of `after` lie between spans.

        Raises:
            UsageError: the program is watched already.
        """
        ...

    def extents(self) -> Mapping[str, int]:
        """Return what the symbols are worth at this point of the run, counters of loops included."""
        ...

    def view(self, slot: int, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Return what a slot holds as an array over the same bytes.

        Only for use inside `after`: later thunks overwrite the bytes.
        """
        ...


def watchable(compiled: CompiledGraph, what: str) -> WatchableGraph:
    """Return a compiled graph as one that can be watched.

    Args:
        compiled: what a backend made.
        what: what for; begins the message.

    Raises:
        UsageError: its backend gives no way to look between kernels.
    """
    if not isinstance(compiled, WatchableGraph):
        raise UsageError(
            f"{what} looks between kernels, which this device does not allow; use device='cpu'"
        )
    return compiled


class StateMemory(Protocol):
    """The bytes of one state on a device. Programs come and go, it stays."""

    def read(self, target: Array) -> None:
        """Copy the bytes into a C-contiguous array of as many."""
        ...

    def write(self, source: Array) -> None:
        """Replace the bytes by those of a C-contiguous array of as many."""
        ...


@runtime_checkable
class StatefulGraph(Protocol):
    """A compiled graph with states. A run replaces their values by the next ones.

    A run that raises leaves them undefined; the owner sees to it that nobody reads them then.
    """

    @property
    def states(self) -> Mapping[str, Shape]:
        """The extents of every state by name."""
        ...

    def set_state(self, name: str, memory: StateMemory) -> None:
        """Point a state at its bytes, which its backend made: as many as its extents take in the next runs."""
        ...


@runtime_checkable
class StatefulBackend(Protocol):
    """A backend that runs graphs with states. Backends without this method refuse them."""

    def state_memory(self, nbytes: int, target: Target) -> StateMemory:
        """Return memory for a state, all of its bytes zero.

        Raises:
            OutOfMemoryError: the device has no room.
        """
        ...


@runtime_checkable
class SavingBackend(Protocol):
    """A backend whose compiled graphs outlive the process. Backends without these methods compile every time."""

    def fingerprint(self, target: Target) -> str:
        """Return all that compiled code depends on beside the graph, the options and rlx's own version."""
        ...

    def save(self, compiled: Any) -> SavedGraph | None:
        """Return a compiled graph as data, or None if it has parts that only this process can hold."""
        ...

    def restore(self, saved: SavedGraph, target: Target, options: CompileOptions) -> CompiledGraph:
        """Return the compiled graph that was saved; its weights are not set yet.

        Raises:
            KeyError, IndexError, TypeError, ValueError, RlxError: the data is not what `save` gives.
        """
        ...
