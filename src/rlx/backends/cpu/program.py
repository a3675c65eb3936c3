# SPDX-License-Identifier: Apache-2.0
"""A scheduled program made runnable: kernels compiled and linked, tables filled, memory planned, arrays bound."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.abi import Emitted, Failure
from rlx.backends.cpu.context import DONE, Context, Outcome
from rlx.backends.cpu.dispatch import Status, native
from rlx.backends.cpu.extents import Extents
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.jit import Library, ObjectCache, compile_all
from rlx.backends.cpu.pool import aligned_bytes
from rlx.backends.cpu.thunks import Flag, Thunks, ThunkTable
from rlx.backends.protocol import MemoryReport
from rlx.base import config
from rlx.base.dims import evaluate
from rlx.base.errors import BuildError, ExecutionError, UsageError
from rlx.base.numeric import Array
from rlx.ir.clone import bind_dims
from rlx.ir.graph import Node, Value
from rlx.kernel.program import DimArg, Program, SlotArg, Thunk, ThunkKind
from rlx.memory.check import check_plan
from rlx.memory.plan import Plan, plan_memory
from rlx.ops.evaluate import run_op
from rlx.ops.leaf import Constant

__all__ = ["CpuProgram"]

_ALIGNMENT = 128


class CpuProgram:
    """A compiled graph on the CPU: implements `rlx.backends.protocol.CompiledGraph`."""

    def __init__(
        self,
        program: Program,
        isa: Isa,
        threads: int,
        dispatch: Sequence[tuple[str, str, int]],
        cache: ObjectCache | None,
    ) -> None:
        self.dispatch = dispatch
        self.program = program
        self._threads = threads
        self._extents = Extents()
        self._nodes: list[Node] = []
        self._weights: dict[int, Array] = {}
        self._names = {value.name: slot for slot, value in program.weights.items() if value.producer is None}
        self._library, table = self._build(isa, cache)
        self._code = native(isa, cache)
        self._context = self._make_context(table, 0)
        self._plan = Plan()
        self._arena: npt.NDArray[np.uint8] = aligned_bytes(_ALIGNMENT)
        self._env: Mapping[str, int] | None = None
        self._host = self._run_host
        self._closed = False
        self._io = [*program.inputs, *program.outputs]

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(self, isa: Isa, cache: ObjectCache | None) -> tuple[Library, Thunks]:
        kernels: dict[str, str] = {}
        for thunk in self.program.thunks:
            if isinstance(thunk.kernel, Emitted):
                kernels[thunk.kernel.symbol] = thunk.kernel.text
        objects = compile_all(kernels.values(), isa, cache)
        library = Library(objects, kernels, isa)
        table = self._table()
        return library, table.build(library.addresses)

    def _table(self) -> ThunkTable:
        """Return the dispatcher's table. Thunk i of the program is at pc i + 1; pc 0 evaluates the extents."""
        for thunk in self.program.thunks:  # all extents must be known before the first thunk names how many there are
            for dim in (thunk.chunks, *(a.dim for a in thunk.args if isinstance(a, DimArg))):
                self._extents.index(dim)
        table = ThunkTable()
        table.dims(0, len(self._extents.program))
        ids: dict[Node | None, int] = {None: -1}
        for thunk in self.program.thunks:
            if thunk.node not in ids:
                assert thunk.node is not None
                ids[thunk.node] = len(self._nodes)
                self._nodes.append(thunk.node)
            self._append(table, thunk, ids[thunk.node])
        table.end()
        return table

    def _append(self, table: ThunkTable, thunk: Thunk, node: int) -> None:
        index = self._extents.index
        args = [a.slot if isinstance(a, SlotArg) else index(a.dim) for a in thunk.args]
        target = thunk.target + 1
        match thunk.kind:
            case ThunkKind.CALL:
                flags = Flag.MAY_FAIL if thunk.may_fail else Flag.NONE
                table.call(thunk.kernel.symbol, args, index(thunk.chunks), flags=flags, node=node)
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
            threads=self._threads,
            scratch=scratch,
            code=self._code,
        )

    # -- memory ------------------------------------------------------------------------------------------------------

    def set_weight(self, name: str, data: Array) -> None:
        """Point a param at its data; the array is kept, not copied."""
        slot = self._names[name]
        self._weights[slot] = data
        self._context.set_slot(slot, data)

    def plan(self, uppers: Mapping[str, int]) -> None:
        """Plan memory for these upper bounds, allocate it, and point all slots at it."""
        plan = plan_memory(self.program, uppers)
        if config.CHECK.get():
            check_plan(self.program, plan)
        if plan.scratch > self._plan.scratch:
            self._context = self._make_context(self._context.thunks, plan.scratch)
        self._plan = plan
        self._env = None
        self._arena = aligned_bytes(max(plan.arena, 1), _ALIGNMENT)
        base = int(self._arena.ctypes.data)
        for slot, offset in plan.offsets.items():
            self._context.slots[slot] = base + offset
        for slot, value in self.program.weights.items():
            data = self._weights.get(slot)
            if data is None and value.producer is not None and isinstance(value.producer.op, Constant):
                data = self._weights[slot] = np.ascontiguousarray(value.producer.op.data.array)
            if data is not None:
                self._context.set_slot(slot, data)

    def memory(self) -> MemoryReport:
        """Return the bytes it needs at the planned bounds."""
        return MemoryReport(
            weights=sum(w.nbytes for w in self._weights.values()),
            arena=self._plan.arena,
            arena_lower_bound=self._plan.lower_bound,
            scratch=self._plan.scratch * self._threads,
        )

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]) -> None:
        """Run once; see the protocol."""
        context = self._context
        slots = context.slots
        for slot, array in zip(self._io, (*inputs, *outputs), strict=True):
            slots[slot] = array.__array_interface__["data"][0]
        if env is self._env:
            pc = 1
        else:
            for name, index in self._extents.symbols.items():
                if name in env:
                    context.dims[index] = env[name]
            self._env = env
            pc = 0
        if config.CHECK.get():
            self._arena[:] = 0xFF  # NaN in every float dtype: a read before a write shows
        outcome = context.run(self._host, pc)
        if outcome is not DONE:
            self._env = None
            raise self._error(outcome)

    def _error(self, outcome: Outcome) -> Exception:
        if outcome.status is not Status.ERROR:
            return BuildError(f"the dispatcher stopped with status {outcome.status.name} at thunk {outcome.pc}")
        if outcome.failure is Failure.DIM_OVERFLOW and outcome.pc == 0:
            return UsageError(f"the extents {dict(self._env or {})} overflow 64-bit sizes")
        node = self._nodes[self._context.thunks.node(outcome.pc)]
        what = {
            Failure.DIVIDE_BY_ZERO: "integer division by zero",
            Failure.INDEX_OUT_OF_RANGE: "index out of range",
            Failure.OVER_BOUND: "a value exceeds its bound",
        }.get(outcome.failure or Failure.DIM_OVERFLOW, "size overflow")
        operands = ", ".join(str(o.type) for o in node.operands if o is not None)
        return ExecutionError(f"{what} in {node.op.name}({operands}) at node {node.location}, element {outcome.flat_index}")

    def _run_host(self, pc: int) -> None:
        """Run an operator without a kernel by its reference, on views of its buffers."""
        node = self._nodes[self._context.thunks.node(pc)]
        env = dict(self._env or {})
        thunk = self.program.thunks[pc - 1]
        slots = iter([a.slot for a in thunk.args if isinstance(a, SlotArg)])
        operands = [None if o is None else self._view(next(slots), o, env) for o in node.operands]
        results = [self._view(next(slots), r, env) for r in node.results]
        try:
            values = run_op(bind_dims(node.op, dict(env)), operands)
        except ExecutionError as error:
            raise ExecutionError(f"{error} at node {node.location}") from error
        for target, value in zip(results, values, strict=True):
            np.copyto(target, value, casting="no")

    def _view(self, slot: int, value: Value, env: Mapping[str, int]) -> Array:
        shape = tuple(evaluate(d, env) for d in value.type.shape)
        dtype = value.type.dtype.numpy
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        buffer = (ctypes.c_char * nbytes).from_address(int(self._context.slots[slot]))
        return np.frombuffer(buffer, dtype).reshape(shape)

    def close(self) -> None:
        """Unmap the code and drop all memory."""
        if not self._closed:
            self._closed = True
            self._library.close()
            self._weights.clear()
            self._arena = aligned_bytes(_ALIGNMENT)
