# SPDX-License-Identifier: Apache-2.0
"""From a graph to a program: slots for values, views, control flow flattened into thunks.

The backend's `Lowerer` turns one node into launches; this file decides which values share a slot (aliases), which are
views with a run-time offset, and where results are written so that copies are rare.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.base.dims import Dim, less_equal, product, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import PassError
from rlx.base.types import TensorType
from rlx.expr.body import Scalar, trace
from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ir.op import Op
from rlx.kernel.program import (
    Arg,
    DimArg,
    NodeInfo,
    Program,
    Slot,
    SlotArg,
    SlotKind,
    StateSlots,
    Thunk,
    ThunkKind,
    ValueInfo,
    Weight,
)
from rlx.kernel.states import place_in_states, refuse_copy
from rlx.ops.control import If, Loop, Scan
from rlx.ops.custom import Custom
from rlx.ops.indexing import ScatterElements, ScatterND
from rlx.ops.leaf import Constant, DimTensor
from rlx.ops.movement import Slice
from rlx.ops.region import Region
from rlx.ops.state import WriteRows

__all__ = ["Lowerer", "LoweringContext", "schedule"]


class Lowerer(Protocol):
    """What a backend provides to the scheduler."""

    def lower(self, node: Node, ctx: LoweringContext) -> None:
        """Emit the launches of one node.

        Raises:
            UnsupportedOpError: the backend does not run it.
        """
        ...

    def copy(self, ctx: LoweringContext, source: int, target: int, nbytes: Dim) -> None:
        """Emit a copy of bytes from one slot to another."""
        ...

    def check(self, ctx: LoweringContext, margins: Sequence[Dim]) -> None:
        """Emit a check that makes the run fail at this node if an extent is negative."""
        ...


class LoweringContext:
    """Where a lowering finds slots and puts launches. One per program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.node: Node | None = None
        self._slots: dict[Value, int] = {}
        self._infos: dict[Node, NodeInfo] = {}
        self._loops = 0
        self._types: dict[TensorType, str] = {}

    def slot(self, value: Value) -> int:
        """Return the slot of a value, creating an arena slot for a result seen for the first time."""
        index = self._slots.get(value)
        if index is None:
            index = self.new_slot(SlotKind.ARENA, value.type.nbytes)
            self._slots[value] = index
        return index

    def assign(self, value: Value, slot: int) -> None:
        """Make a value live in an existing slot."""
        self._slots[value] = slot

    def is_assigned(self, value: Value) -> bool:
        """Return whether the value has a slot already."""
        return value in self._slots

    def new_slot(self, kind: SlotKind, nbytes: Dim, root: int | None = None) -> int:
        """Add a slot and return its index."""
        self.program.slots.append(Slot(kind, nbytes, root))
        return len(self.program.slots) - 1

    def temporary(self, nbytes: Dim) -> int:
        """Return a slot for an intermediate buffer of this node; the planner gives it bytes and takes them back."""
        return self.new_slot(SlotKind.ARENA, nbytes)

    def launch(
        self,
        kernel: Any,
        args: Sequence[Arg],
        chunks: Dim = 1,
        *,
        inplace: Sequence[tuple[int, int]] = (),
        scratch: Dim = 0,
        may_fail: bool = False,
        copies: bool = False,
    ) -> None:
        """Append a CALL of `kernel` over `chunks` independent chunks. See `Thunk` for the arguments."""
        self.append(
            Thunk(
                ThunkKind.CALL,
                tuple(args),
                kernel,
                chunks,
                inplace=tuple(inplace),
                scratch=scratch,
                may_fail=may_fail,
                copies=copies,
            )
        )

    def counter(self) -> Dim:
        """Return an extent of its own for a loop to count in: launches may take it, expressions of it may not."""
        self._loops += 1
        return symbol(f"_iteration{self._loops - 1}", lower=0)

    @contextmanager
    def repeat(self, trip: Dim) -> Generator[Dim]:
        """Emit a loop around what is appended in the block; yields the counter, 0 to trip - 1."""
        counter = self.counter()
        self.append(Thunk(ThunkKind.SET_DIM, (DimArg(counter),), immediate=0))
        head = self.position
        leave = self.append(Thunk(ThunkKind.JUMP_GE, (DimArg(counter), DimArg(trip))))
        yield counter
        self.append(Thunk(ThunkKind.ADD_DIM, (DimArg(counter),), immediate=1))
        self.append(Thunk(ThunkKind.JUMP, target=head))
        self.program.loops.append((head, self.position - 1))
        leave.target = self.position

    def append(self, thunk: Thunk) -> Thunk:
        """Append a thunk, remembering the node that is being lowered."""
        if self.node is not None:
            thunk.node = self.info(self.node)
        self.program.thunks.append(thunk)
        return thunk

    def info(self, node: Node) -> NodeInfo:
        """Return what errors say about a node."""
        found = self._infos.get(node)
        if found is None:
            operands = ", ".join(self._text(o.type) for o in node.operands if o is not None)
            types = [None if o is None else o.type for o in node.operands]
            flops = node.op.flops(types, [r.type for r in node.results])
            found = self._infos[node] = NodeInfo(
                node.op.label,
                operands,
                str(node.location),
                node.location.names,
                flops,
            )
        return found

    def _text(self, kind: TensorType) -> str:
        found = self._types.get(kind)
        if found is None:  # large graphs have few types
            found = self._types[kind] = str(kind)
        return found

    def describe_values(self, graph: Graph) -> None:
        """Tell the program which values its slots hold; the graph's outputs are there under their own names too."""
        held = [(value, slot, value.name) for value, slot in self._slots.items()]
        held += zip(graph.outputs, self.program.outputs, graph.output_names, strict=True)
        known = dict.fromkeys(
            ValueInfo(slot, value.type.dtype, value.type.shape, name) for value, slot, name in held
        )
        named = {info[:3] for info in known if info.name}
        self.program.values = [info for info in known if info.name or info[:3] not in named]

    @property
    def position(self) -> int:
        """Index of the next thunk."""
        return len(self.program.thunks)


def schedule(graph: Graph, lowerer: Lowerer) -> Program:
    """Return the program of a graph whose nodes the lowerer runs."""
    program = Program(graph.name, graph.facts)
    ctx = LoweringContext(program)
    for state in graph.states:
        slot = ctx.new_slot(SlotKind.STATE, state.value.type.nbytes)
        ctx.assign(state.value, slot)
        program.states.append(StateSlots(state.name, state.value.type.shape, slot, slot))
    for value in graph.inputs:
        ctx.assign(value, ctx.new_slot(SlotKind.INPUT, value.type.nbytes))
        program.inputs.append(ctx.slot(value))
    for name, param in graph.params.items():
        slot = ctx.new_slot(SlotKind.WEIGHT, param.value.type.nbytes)
        ctx.assign(param.value, slot)
        program.weights[slot] = Weight(name)
    walker = _Walker(ctx, lowerer)
    targets = [ctx.new_slot(SlotKind.OUTPUT, v.type.nbytes) for v in graph.outputs]
    program.outputs = targets
    walker.run_graph(graph, targets)
    ctx.describe_values(graph)
    return program


class _Walker:
    def __init__(self, ctx: LoweringContext, lowerer: Lowerer) -> None:
        self.ctx = ctx
        self.lowerer = lowerer
        self._checked: set[Dim] = set()

    def run(self, block: Block, targets: Sequence[int]) -> None:
        """Lower a block so that its results end in the target slots."""
        pending = self._place_results(block, block.results, targets)
        self._nodes(block)
        self._copy_results(pending)

    def run_graph(self, graph: Graph, targets: Sequence[int]) -> None:
        """Lower a graph so that its outputs end in the target slots and next values in those of their states."""
        ctx, program, block = self.ctx, self.ctx.program, graph.block
        following = [s.next for s in graph.states]
        written = {root for v in following if _writes_in_place(root := _alias_root(v))}
        pending = self._place_results(block, graph.outputs, targets, written)
        self._nodes(block)
        late = [ctx.slot(v) for v, _ in pending]
        placed = place_in_states(program, [ctx.slot(v) for v in following], late)
        for index, (slots, value) in enumerate(zip(program.states, following, strict=True)):
            if index in placed:
                aliases = placed[index]
                program.states[index] = replace(slots, following=aliases[-1], aliases=aliases)
            else:
                pending.append((value, slots.slot))
        for node in block.walk():
            if isinstance(node.op, WriteRows) and not node.op.copy:
                source = node.operands[0]
                assert source is not None
                refuse_copy(program, ctx.slot(source), ctx.slot(node.result), ctx.info(node), late)
        self._copy_results(pending)

    def _nodes(self, block: Block) -> None:
        outer, self._checked = self._checked, set(self._checked)  # a block may not be executed
        for node in block:
            self.ctx.node = node
            self._node(node)
        self.ctx.node = None
        self._checked = outer

    def _place_results(
        self,
        block: Block,
        results: Sequence[Value],
        targets: Sequence[int],
        elsewhere: Collection[Value] = (),
    ) -> list[tuple[Value, int]]:
        """Let producers write straight into the targets; return the (value, target) pairs that need a copy.

        Values that are to be written `elsewhere` are copied.
        """
        pending: list[tuple[Value, int]] = []
        placed = set(elsewhere)
        for value, target in zip(results, targets, strict=True):
            root = _alias_root(value)
            owned = root.producer is not None and root.producer.block is block
            if (
                owned
                and root not in placed
                and not _is_view(root)
                and not isinstance(root.producer.op, Constant)  # pyright: ignore[reportOptionalMemberAccess]
            ):
                self.ctx.assign(root, target)
                placed.add(root)
            else:
                pending.append((value, target))
        return pending

    def _copy_results(self, pending: list[tuple[Value, int]]) -> None:
        ctx = self.ctx
        overwritten: set[int] = set()
        moves: list[tuple[int, int, Dim]] = []
        for value, target in pending:
            source, nbytes = ctx.slot(value), value.type.nbytes
            if source == target:
                continue
            if ctx.program.root(source) in overwritten:  # by an earlier move: save it first
                saved = ctx.temporary(nbytes)
                self.lowerer.copy(ctx, source, saved, nbytes)
                source = saved
            moves.append((source, target, nbytes))
            overwritten.add(target)
        for source, target, nbytes in moves:
            self.lowerer.copy(ctx, source, target, nbytes)

    def _check(self, node: Node) -> None:
        """Check what no type rule could decide: that results have no negative extents, and slices lie inside."""
        facts, source = self.ctx.program.facts, node.operands[0] if node.operands else None
        dims = dict.fromkeys(facts.canon(d) for r in node.results for d in r.type.shape)
        margins = [d for d in dims if less_equal(0, d) is not True and d not in self._checked]
        self._checked.update(margins)
        if isinstance(node.op, Slice) and source is not None:
            margins += node.op.margins(source.type.shape)
        if margins:
            self.lowerer.check(self.ctx, margins)

    def _node(self, node: Node) -> None:
        self._check(node)
        ctx, op = self.ctx, node.op
        if isinstance(op, Constant):
            slot = ctx.new_slot(SlotKind.WEIGHT, node.result.type.nbytes)
            ctx.assign(node.result, slot)
            ctx.program.weights[slot] = Weight(data=np.ascontiguousarray(op.data.array))
        elif op.alias:
            source = node.operands[0]
            assert source is not None
            if not ctx.is_assigned(node.result):
                ctx.assign(node.result, ctx.slot(source))
        elif (
            isinstance(op, Slice)
            and not ctx.is_assigned(node.result)
            and view_offset(node) is not None
        ):
            self._view(node)
        elif isinstance(op, If):
            self._if(node)
        elif isinstance(op, Scan):
            self._scan(node, op)
        elif isinstance(op, Loop):
            self._loop(node, op)
        elif node.regions:
            raise PassError(f"no schedule for operator {op.name!r} at node {node.location}")
        else:
            if isinstance(op, Custom):
                ctx.program.custom[op.name] = op.operator.stamp
            self.lowerer.lower(node, ctx)

    def _view(self, node: Node) -> None:
        ctx = self.ctx
        source, offset = node.operands[0], view_offset(node)
        assert source is not None
        assert offset is not None
        if offset == 0:
            ctx.assign(node.result, ctx.slot(source))
            return
        ctx.assign(node.result, self._bind(ctx.slot(source), offset, 1, node.result.type.nbytes))

    def _bind(self, root: int, offset: Dim, factor: Dim, nbytes: Dim) -> int:
        ctx = self.ctx
        slot = ctx.new_slot(SlotKind.VIEW, nbytes, root=root)
        ctx.append(
            Thunk(ThunkKind.BIND, (SlotArg(slot), SlotArg(root), DimArg(offset), DimArg(factor)))
        )
        return slot

    def _if(self, node: Node) -> None:
        ctx = self.ctx
        condition, captures = node.operands[0], node.operands[1:]
        assert condition is not None
        targets = [ctx.slot(r) for r in node.results]
        then, otherwise = node.regions
        skip = ctx.append(Thunk(ThunkKind.JUMP_UNLESS, (SlotArg(ctx.slot(condition)),)))
        self._enter(then, captures)
        self.run(then, targets)
        leave = ctx.append(Thunk(ThunkKind.JUMP))
        skip.target = ctx.position
        self._enter(otherwise, captures)
        self.run(otherwise, targets)
        leave.target = ctx.position
        ctx.node = node

    def _enter(self, block: Block, values: Sequence[Value | None]) -> None:
        for parameter, value in zip(block.parameters, values, strict=True):
            assert value is not None
            self.ctx.assign(parameter, self.ctx.slot(value))

    def _scan(self, node: Node, op: Scan) -> None:
        ctx, (body,) = self.ctx, node.regions
        n, m = op.carried, op.scan_inputs
        carried, scanned, captures = (
            node.operands[:n],
            node.operands[n : n + m],
            node.operands[n + m :],
        )
        state = [ctx.slot(r) for r in node.results[:n]]
        for value, slot in zip(carried, state, strict=True):
            assert value is not None
            self.lowerer.copy(ctx, ctx.slot(value), slot, value.type.nbytes)
        with ctx.repeat(op.trip) as counter:
            slices = body.parameters[n : n + m]
            for parameter, value in zip(slices, scanned, strict=True):
                assert value is not None
                nbytes = parameter.type.nbytes
                ctx.assign(parameter, self._bind(ctx.slot(value), counter, nbytes, nbytes))
            for parameter, slot in zip(body.parameters[:n], state, strict=True):
                ctx.assign(parameter, slot)
            self._enter_rest(body.parameters[n + m :], captures)
            stacked = [
                self._bind(ctx.slot(r), counter, s.type.nbytes, s.type.nbytes)
                for r, s in zip(node.results[n:], body.results[n:], strict=True)
            ]
            # The new state must not be written over the old one while the body still reads it.
            fresh = [ctx.temporary(r.type.nbytes) for r in body.results[:n]]
            self.run(body, [*fresh, *stacked])
            ctx.node = node
            for source, slot, result in zip(fresh, state, body.results[:n], strict=True):
                self.lowerer.copy(ctx, source, slot, result.type.nbytes)

    def _loop(self, node: Node, op: Loop) -> None:
        ctx, (body,) = self.ctx, node.regions
        limit, condition = node.operands[:2]
        n = op.carried
        counter = ctx.counter()
        state = [ctx.slot(r) for r in node.results[:n]]
        for value, slot in zip(node.operands[2 : 2 + n], state, strict=True):
            assert value is not None
            self.lowerer.copy(ctx, ctx.slot(value), slot, value.type.nbytes)
        going = ctx.temporary(1)
        self.lowerer.copy(ctx, self._true() if condition is None else ctx.slot(condition), going, 1)
        ctx.append(Thunk(ThunkKind.SET_DIM, (DimArg(counter),), immediate=0))
        head = ctx.position
        iteration = self._emit(DimTensor((counter,)), (), TensorType(DType.I64, ()))
        leaves: list[Thunk] = []
        if op.trip is not None:  # then the condition stays true
            leaves.append(ctx.append(Thunk(ThunkKind.JUMP_GE, (DimArg(counter), DimArg(op.trip)))))
        else:
            leaves.append(ctx.append(Thunk(ThunkKind.JUMP_UNLESS, (SlotArg(going),))))
        if op.trip is None and limit is not None:
            more = self._emit(
                Region(trace(_below, (DType.I64, DType.I64)), ()),
                (iteration, limit),
                TensorType(DType.BOOL, ()),
            )
            leaves.append(ctx.append(Thunk(ThunkKind.JUMP_UNLESS, (SlotArg(ctx.slot(more)),))))
        own = (ctx.slot(iteration), going, *state)
        for parameter, slot in zip(body.parameters[: 2 + n], own, strict=True):
            ctx.assign(parameter, slot)
        self._enter_rest(body.parameters[2 + n :], node.operands[2 + n :])
        stacked = [
            self._bind(ctx.slot(r), counter, s.type.nbytes, s.type.nbytes)
            for r, s in zip(node.results[n:], body.results[1 + n :], strict=True)
        ]
        # The new state must not be written over the old one while the body still reads it.
        fresh = [ctx.temporary(r.type.nbytes) for r in body.results[: 1 + n]]
        self.run(body, [*fresh, *stacked])
        ctx.node = node
        for source, slot, result in zip(fresh, (going, *state), body.results[: 1 + n], strict=True):
            self.lowerer.copy(ctx, source, slot, result.type.nbytes)
        ctx.append(Thunk(ThunkKind.ADD_DIM, (DimArg(counter),), immediate=1))
        ctx.append(Thunk(ThunkKind.JUMP, target=head))
        ctx.program.loops.append((head, ctx.position - 1))
        for leave in leaves:
            leave.target = ctx.position

    def _emit(self, op: Op, operands: tuple[Value, ...], type_: TensorType) -> Value:
        """Lower a node that no graph holds, at the place of the current one; return its result."""
        node = Node(op, operands, [type_])
        try:
            self.lowerer.lower(node, self.ctx)
        finally:
            for index, operand in enumerate(operands):
                del operand.uses[node, index]
        return node.result

    def _true(self) -> int:
        slot = self.ctx.new_slot(SlotKind.WEIGHT, 1)
        self.ctx.program.weights[slot] = Weight(data=np.array(True))
        return slot

    def _enter_rest(self, parameters: Sequence[Value], values: Sequence[Value | None]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            assert value is not None
            self.ctx.assign(parameter, self.ctx.slot(value))


def _below(iteration: Scalar, limit: Scalar) -> Scalar:
    return iteration.builder.emit("lt", iteration, limit)


def _alias_root(value: Value) -> Value:
    """Follow aliasing nodes to the value whose bytes these are."""
    while value.producer is not None and value.producer.op.alias:
        source = value.producer.operands[0]
        assert source is not None
        value = source
    return value


def _writes_in_place(value: Value) -> bool:
    """Return whether the value is an operand of its operator with some elements replaced."""
    producer = value.producer
    return producer is not None and isinstance(producer.op, WriteRows | ScatterElements | ScatterND)


def _is_view(value: Value) -> bool:
    """Return whether the value would be a view of another slot rather than written by a kernel."""
    producer = value.producer
    return (
        producer is not None
        and isinstance(producer.op, Slice)
        and view_offset(producer) is not None
    )


def view_offset(node: Node) -> Dim | None:
    """Return the byte offset of a Slice whose result is one contiguous run of its operand, else None.

    That is a slice with step 1 of the outermost axis whose extent is not 1, with all later axes whole.
    """
    op, source = node.op, node.operands[0]
    assert isinstance(op, Slice)
    assert source is not None
    shape = source.type.shape
    axis = next((i for i, d in enumerate(shape) if d != 1), None)
    if axis is None:
        return 0
    if op.steps[axis] != 1:
        return None
    whole = all(
        op.sizes[i] == shape[i] and op.starts[i] == 0 and op.steps[i] == 1
        for i in range(axis + 1, len(shape))
    )
    if not whole:
        return None
    return op.starts[axis] * (product(shape[axis + 1 :]) * source.type.dtype.itemsize)
