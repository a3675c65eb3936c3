# SPDX-License-Identifier: Apache-2.0
"""A scheduled program made runnable: kernels compiled and linked, tables filled, memory planned, arrays bound."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.buffers import WeightBuffer, address_of, aligned_bytes, bytes_at
from rlx.backends.cpu.context import DONE, Context, Outcome
from rlx.backends.cpu.dispatch import Status, native
from rlx.backends.cpu.extents import Extents
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.jit import Library, ObjectCache
from rlx.backends.cpu.lane import CpuJob
from rlx.backends.cpu.thunks import Flag, Thunks, ThunkTable
from rlx.backends.cpu.watch import Watch
from rlx.backends.cpu.words import Failure
from rlx.backends.host import HostMemory
from rlx.backends.protocol import MemoryReport, Span, StateMemory
from rlx.base import config
from rlx.base.allocation import out_of_memory
from rlx.base.dims import evaluate
from rlx.base.dtypes import DType
from rlx.base.errors import BuildError, ExecutionError, UsageError
from rlx.base.numeric import Array
from rlx.kernel.program import DimArg, NodeInfo, Program, SlotArg, SlotKind, Thunk, ThunkKind
from rlx.memory.plan import Plan, plan_memory
from rlx.memory.report import placements

if TYPE_CHECKING:
    from rlx.backends.device import Buffer, Stream
    from rlx.ir.graph import Value

__all__ = ["CpuProgram"]

_ALIGNMENT = 128
_NO_NODE = NodeInfo("the program")


class CpuProgram:
    """A compiled graph on the CPU: implements `rlx.backends.protocol.CompiledGraph`.

    Args:
        program: its CALL thunks name kernels by symbol.
        objects: the machine code of all kernels.
        isa: what the objects were compiled for.
        threads: most participants of a run.
        dispatch: the report of how operators run.
        cache: where the runtime's own object is kept.
        library: the objects, linked already.
    """

    def __init__(
        self,
        program: Program,
        objects: Sequence[bytes],
        isa: Isa,
        threads: int,
        dispatch: Sequence[tuple[str, str, int]],
        cache: ObjectCache | None,
        library: Library | None = None,
    ) -> None:
        self.dispatch = dispatch
        self.program = program
        self.objects = objects
        self.threads = threads
        self._extents = Extents()
        self._nodes: list[NodeInfo] = []
        self._weights: dict[int, Array] = {
            s: w.data for s, w in program.weights.items() if w.data is not None
        }
        self._states: dict[int, Array] = {}
        self.states = {s.name: s.shape for s in program.states}
        self._names = {
            weight.name: slot for slot, weight in program.weights.items() if weight.data is None
        }
        symbols = dict.fromkeys(t.kernel for t in program.thunks if t.kind is ThunkKind.CALL)
        self._library = library or Library(objects, symbols, isa)
        self._isa, self._cache = isa, cache
        self._code = native(isa, cache)
        self._context = self._make_context(self._table().build(self._library.addresses), 0)
        self._plan = Plan()
        self._arena: npt.NDArray[np.uint8] = aligned_bytes(_ALIGNMENT)
        self._alive = (self._arena,)
        self._env: Mapping[str, int] | None = None
        self._host = self._run_host
        self._hosts = any(t.kind is ThunkKind.HOST for t in program.thunks)
        self._held: tuple[Sequence[Array], ...] = ()
        self._graves: dict[int, list[tuple[int, int]]] | None = None
        self._closed = False
        self._io = [*program.inputs, *program.outputs]
        self._io_table = np.array(self._io, np.int64)

    # -- building ----------------------------------------------------------------------------------------------------

    def _table(self) -> ThunkTable:
        """Return the dispatcher's table. Thunk i of the program is at pc i + 1; pc 0 evaluates the extents."""
        for thunk in (
            self.program.thunks
        ):  # all extents must be known before the first thunk names how many there are
            for dim in (thunk.chunks, *(a.dim for a in thunk.args if isinstance(a, DimArg))):
                self._extents.index(dim)
        table = ThunkTable()
        table.dims(0, len(self._extents.program))
        ids: dict[int, int] = {}
        for thunk in self.program.thunks:
            info = thunk.node or _NO_NODE
            if id(info) not in ids:
                ids[id(info)] = len(self._nodes)
                self._nodes.append(info)
            self._append(table, thunk, ids[id(info)])
        table.end()
        return table

    def _append(self, table: ThunkTable, thunk: Thunk, node: int) -> None:
        index = self._extents.index
        args = [a.slot if isinstance(a, SlotArg) else index(a.dim) for a in thunk.args]
        target = thunk.target + 1
        match thunk.kind:
            case ThunkKind.CALL:
                flags = Flag.MAY_FAIL if thunk.may_fail else Flag.NONE
                table.call(thunk.kernel, args, index(thunk.chunks), flags=flags, node=node)
            case ThunkKind.JUMP:
                table.jump(target, node=node)
            case ThunkKind.JUMP_UNLESS:
                table.jump_unless(args[0], target, node=node)
            case ThunkKind.JUMP_GE:
                table.jump_ge(args[0], args[1], target, node=node)
            case ThunkKind.SET_DIM:
                table.set_dim(args[0], thunk.immediate, node=node)
            case ThunkKind.ADD_DIM:
                table.add_dim(args[0], thunk.immediate, node=node)
            case ThunkKind.BIND:
                table.bind(args[0], args[1], args[2], args[3], node=node)
            case ThunkKind.HOST:
                table.host(node=node)

    def _make_context(self, table: Thunks, scratch: int) -> Context:
        return Context(
            table,
            slots=len(self.program.slots),
            dims=self._extents.values,
            dim_program=self._extents.program,
            threads=self.threads,
            scratch=scratch,
            code=self._code,
        )

    # -- memory ------------------------------------------------------------------------------------------------------

    def set_weight(self, name: str, data: Array) -> None:
        """Point a param at its data; the array is kept, not copied."""
        slot = self._names.get(name)
        if slot is None:
            raise UsageError(f"the program reads no weight {name!r}")
        wanted = self.program.slots[slot].nbytes
        if data.nbytes != wanted or not data.flags.c_contiguous:
            raise UsageError(
                f"weight {name!r} has {data.nbytes} bytes, kernels read {wanted}, in row-major order"
            )
        self._weights[slot] = data
        self._context.set_slot(slot, data)

    def adopt_weights(self, data: dict[str, Array]) -> dict[str, Array]:
        """Copy weights into one allocation of this program, in huge pages, and empty the dict on the way."""
        buffer = WeightBuffer({self._names[name]: array.nbytes for name, array in data.items()})
        return {name: buffer.place(self._names[name], data.pop(name)) for name in list(data)}

    def plan(self, uppers: Mapping[str, int]) -> None:
        """Plan memory for these upper bounds, allocate it, and point all slots at it."""
        plan = plan_memory(self.program, uppers)
        graves = self._checked(plan) if config.CHECK.get() else None
        # All that may fail comes first: a plan that does not fit leaves the one before in force.
        context = self._context
        try:
            arena = aligned_bytes(max(plan.arena, 1), _ALIGNMENT)
            if plan.scratch > self._plan.scratch:
                context = self._make_context(self._context.thunks, plan.scratch)
        except MemoryError as error:
            wanted = plan.arena + plan.scratch * self.threads
            raise out_of_memory("intermediate values", wanted, uppers) from error
        for slot, data in (*self._weights.items(), *self._states.items()):
            context.set_slot(slot, data)
        # Ctrl-C may come between any two of these lines: whatever a slot points at is alive after each of them.
        self._alive = (*self._alive, arena)
        base = int(arena.ctypes.data)
        context.slots[list(plan.offsets)] = [base + offset for offset in plan.offsets.values()]
        self._env = None
        self._context = context
        self._plan = plan
        self._arena = arena
        self._graves = graves
        self._alive = (arena,)

    def _checked(self, plan: Plan) -> dict[int, list[tuple[int, int]]]:
        """Check a plan; return which bytes of the arena nobody may need any more, by the pc after which."""
        from rlx.memory.check import check_plan
        from rlx.memory.deaths import deaths

        check_plan(self.program, plan)
        return {thunk + 1: places for thunk, places in deaths(self.program, plan).items()}

    def clone(self) -> CpuProgram:
        """Return a program of the same code with tables and memory of its own."""
        return CpuProgram(
            self.program,
            self.objects,
            self._isa,
            self.threads,
            self.dispatch,
            self._cache,
            self._library.share(),
        )

    def trim(self) -> None:
        """Drop the arena and the scratch memory."""
        self._plan, self._env = Plan(), None
        self._context = self._make_context(self._context.thunks, 0)
        self._arena = aligned_bytes(_ALIGNMENT)
        self._graves = None
        self._alive = (self._arena,)

    def set_state(self, name: str, memory: StateMemory) -> None:
        """Point the slots of a state at its bytes; see the protocol."""
        assert isinstance(memory, HostMemory)
        slots = next(s for s in self.program.states if s.name == name)
        for slot in (slots.slot, *slots.aliases):
            self._states[slot] = memory.data
            self._context.set_slot(slot, memory.data)

    def memory(self) -> MemoryReport:
        """Return the bytes it needs at the planned bounds, weights that are not set yet included."""
        weights = {s: evaluate(self.program.slots[s].nbytes, {}) for s in self.program.weights}
        plan = self._plan  # another one when a run in another thread makes it grow
        return MemoryReport(
            weights=sum(weights.values()),
            arena=plan.arena,
            arena_lower_bound=plan.lower_bound,
            scratch=plan.scratch * self.threads,
            state=plan.state,
            tensors=placements(self.program, plan, weights),
        )

    # -- running -----------------------------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> None:
        """Run once; see the protocol."""
        context = self._context
        slots = context.slots
        for slot, array in zip(self._io, (*inputs, *outputs), strict=True):
            slots[slot] = address_of(array)
        if env is self._env:
            pc = 1
        else:
            if len(self._weights) < len(self.program.weights):
                raise UsageError(f"{self.program.name}: not all weights are set")
            for name, index in self._extents.symbols.items():
                if name in env:
                    context.dims[index] = env[name]
            self._env = env
            pc = 0
        if self._graves is not None:
            outcome = self._run_checked(inputs, outputs, pc)
        elif self._hosts:
            outcome = self._run_holding(inputs, outputs, pc)
        else:
            outcome = context.run(self._host, pc)
        if outcome is not DONE:
            raise self._failed(outcome)

    def job(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> CpuJob | None:
        """Return a run as a job of a lane; see `rlx.backends.lanes.LaneGraph`."""
        context = self._context
        needs_python = self._hosts or self._graves is not None or context.is_watched
        if needs_python or env != self._env:
            return None
        context.start_pool()
        return CpuJob(
            self._code.lane_code,
            context.address,
            1,
            self._io_table,
            (*inputs, *outputs),
            self._resume,
        )

    def _resume(self, status: int) -> None:
        outcome = self._context.resume(status)
        if outcome is not DONE:
            raise self._failed(outcome)

    def _failed(self, outcome: Outcome) -> Exception:
        self._env = None
        return self._error(outcome)

    def _run_holding(self, inputs: Sequence[Array], outputs: Sequence[Array], pc: int) -> Outcome:
        """Run with operators on the host: views of the caller's arrays keep these alive."""
        self._held = (inputs, outputs)
        try:
            return self._context.run(self._host, pc)
        finally:
            self._held = ()

    def _run_checked(self, inputs: Sequence[Array], outputs: Sequence[Array], pc: int) -> Outcome:
        """Run with all bits set, a NaN in every float dtype, in bytes that hold no value yet or a dead one."""
        self._arena[:] = 0xFF
        if self._context.is_watched:  # by somebody who buries the dead as well
            return self._run_holding(inputs, outputs, pc)
        with self._context.watched(Watch(self._bury, self._graves or ())):
            return self._run_holding(inputs, outputs, pc)

    def _bury(self, pc: int) -> None:
        for offset, nbytes in (self._graves or {}).get(pc, ()):
            self._arena[offset : offset + nbytes] = 0xFF

    @contextmanager
    def watched(
        self,
        after: Callable[[int], None] | None = None,
        thunks: Collection[int] = (),
        *,
        timed: bool = False,
    ) -> Generator[list[Span]]:
        """Watch the runs inside the block; see the protocol."""
        wanted = {t + 1 for t in thunks}

        def ended(pc: int) -> None:
            if after is not None and pc in wanted:
                after(pc - 1)
            self._bury(pc)

        watch, spans = Watch(ended, wanted.union(self._graves or ()), timed=timed), list[Span]()
        with self._context.watched(watch):
            yield spans
        spans += [Span(pc - 1, began, end) for pc, began, end in watch.spans()]

    def extents(self) -> Mapping[str, int]:
        """Return the values of all symbols; see the protocol."""
        table = (
            self._context.dims
        )  # also has what thunks set: counters of loops, extents that data gave
        known = {name: int(table[index]) for name, index in self._extents.symbols.items()}
        return {**known, **(self._env or {})}

    def view(self, slot: int, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Return a slot's bytes as an array; see the protocol."""
        return self._array(slot, dtype.numpy, shape)

    def block(self, slot: int) -> tuple[Array, int] | None:
        """Return the bytes that a slot lies in, and where; see the protocol."""
        root = self.program.root(slot)
        match self.program.slots[root].kind:
            case SlotKind.ARENA:
                held = self._arena
            case SlotKind.WEIGHT:
                held = self._weights.get(root)
            case SlotKind.STATE:
                held = self._states.get(root)
            case _:
                held = None
        if held is None:
            return None
        held = held.reshape(-1).view(np.uint8)
        offset = int(self._context.slots[slot]) - int(held.ctypes.data)
        return (held, offset) if 0 <= offset <= held.nbytes else None

    def enqueue(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        env: Mapping[str, int],
        stream: Stream,
    ) -> None:
        """Run once on buffers; see `rlx.backends.device.EnqueuingGraph`."""
        from rlx.backends.host_device import enqueue_on_host

        enqueue_on_host(self, self.program, inputs, outputs, env, stream)

    def _error(self, outcome: Outcome) -> Exception:
        if outcome.status is not Status.ERROR:
            return BuildError(
                f"the dispatcher stopped with status {outcome.status.name} at thunk {outcome.pc}"
            )
        if outcome.failure is Failure.DIM_OVERFLOW and outcome.pc == 0:
            return UsageError(f"the extents {dict(self._env or {})} overflow 64-bit sizes")
        node = self._nodes[self._context.thunks.node(outcome.pc)]
        what = {
            Failure.DIVIDE_BY_ZERO: "integer division by zero",
            Failure.INDEX_OUT_OF_RANGE: "index out of range",
            Failure.OVER_BOUND: "a value exceeds its bound",
        }.get(outcome.failure or Failure.DIM_OVERFLOW, "size overflow")
        return ExecutionError(f"{what} in {node}, element {outcome.flat_index}")

    def _run_host(self, pc: int) -> None:
        """Run an operator without a kernel by its reference, on views of its buffers."""
        from rlx.ir.clone import bind_dims
        from rlx.ops import custom, run_op

        thunk = self.program.thunks[pc - 1]
        node = thunk.host
        assert node is not None
        slots = iter([a.slot for a in thunk.args if isinstance(a, SlotArg)])
        env = self.extents()
        operands = [None if o is None else self._view(next(slots), o, env) for o in node.operands]
        results = [self._view(next(slots), r, env) for r in node.results]
        op, where = node.op, f"{node.op.name} at node {node.location}"
        if isinstance(op, custom.Custom):
            kernel = op.operator.kernels.get("cpu")
            if isinstance(kernel, custom.HostKernel):
                op.run_on(kernel, operands, results, where)
                return
        values = run_op(bind_dims(op, dict(env)), operands, where=where)
        for target, value in zip(results, values, strict=True):
            np.copyto(target, value, casting="no")

    def _view(self, slot: int, value: Value, env: Mapping[str, int]) -> Array:
        shape = tuple(evaluate(d, env) for d in value.type.shape)
        return self._array(slot, value.type.dtype.numpy, shape)

    def _array(self, slot: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        root = slot
        while (beneath := self.program.slots[root].root) is not None:
            root = beneath
        keep = (self._arena, self._held, self._weights.get(root), self._states.get(root))
        return bytes_at(int(self._context.slots[slot]), nbytes, keep).view(dtype).reshape(shape)

    def close(self) -> None:
        """Unmap the code and drop all memory."""
        if not self._closed:
            self._closed = True
            self._library.close()
            self._weights.clear()
            self._states.clear()
            self._arena = aligned_bytes(_ALIGNMENT)
            self._alive = (self._arena,)
            self._context = self._make_context(self._context.thunks, 0)
