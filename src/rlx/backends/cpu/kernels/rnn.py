# SPDX-License-Identifier: Apache-2.0
"""The steps of recurrent layers (LSTM, GRU, RNN).

    for every step: for every group of hidden units: products = h @ r for all gates of the group,
    then the cell

A chunk is one direction of a block of sequences; it walks all steps by itself, so no thread waits
for another. The weights of a group of `lanes` hidden units hold all gates side by side, so the
product of a tile of sequences leaves a whole cell's gates in registers, and the weights of a group
are read once per step for all sequences of the block. One sequence walks several groups at once,
for independent FMAs. Products are one chain of FMAs over the state in order: a sequence's result
does not depend on its neighbours.

States lie in scratch (two copies, since all units read the state before any is overwritten), in
rows padded to whole vectors; what the padding holds is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from rlx.backends.cpu.abi import Emitted, Failure, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.activations import Activation
from rlx.backends.cpu.lltypes import I32, I64, PTR, Type, scalar_type, vec
from rlx.backends.cpu.lowering import lowering
from rlx.backends.cpu.rnn_ops import Layer, Recurrence, gate_parts, one_direction
from rlx.base.dims import Dim, ceildiv, dim_max
from rlx.base.dtypes import DType
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.rnn import ACTIVATIONS, GRU, LSTM

__all__ = ["lower_recurrence"]

_ROWS = 12
"""Sequences per chunk: two tiles."""
_CHAINS = 8
"""Independent FMAs that hide each other's latency."""


@dataclass(frozen=True)
class _Spec:
    """What a kernel is specialised on.

    Attributes:
        dtype: f32 or f64.
        cell: `lstm`, `gru` or `rnn`.
        hidden: hidden units.
        parts: gates per product of a step.
        directions: how many the gates hold side by side.
        backward: whether the first direction of the launch runs from the end; the second one always
            does.
        activations: in the order of the layer.
        input_forget: an LSTM whose forget gate is 1 - i.
        present: names of optional operands that are there.
    """

    dtype: DType
    cell: str
    hidden: int
    parts: tuple[int, ...]
    directions: int
    backward: bool
    activations: tuple[Activation, ...]
    input_forget: bool
    present: tuple[str, ...]

    @property
    def gates(self) -> int:
        """Gates of a direction."""
        return sum(self.parts)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the buffers in the order of the arguments."""
        results = ("y", "h", "c") if self.cell == "lstm" else ("y", "h")
        return ("gates", "r", *self.present, *results)


_DIMS = (
    "steps",
    "batch",
    "blocks",
    "first",
    "gates_t",
    "gates_b",
    "y_t",
    "y_d",
    "y_b",
    "state_d",
    "state_b",
)


def _tile_rows(isa: Isa, gates: int) -> int:
    """Return how many sequences a product of that many gates takes at once."""
    accumulators = 24 if isa.vector_registers == 32 else 9
    return min(6, max(1, accumulators // gates))


@dataclass
class _Step:
    """One step of a block of sequences while it is emitted.

    Attributes:
        t: the step.
        before: the state that is read.
        after: where the new state goes.
    """

    t: Value
    before: Value
    after: Value


class _Emitter:
    """Emits the functions and the kernel of one spec."""

    def __init__(self, module: Module, spec: _Spec) -> None:
        self.module = module
        self.spec = spec
        self.isa = module.isa
        self.scalar: Type = scalar_type(spec.dtype)
        self.lanes = self.isa.lanes(spec.dtype)
        self.vector: Type = vec(self.scalar, self.lanes)
        self.groups = -(-spec.hidden // self.lanes)
        self.pitch = self.groups * self.lanes  # elements from one sequence's state to the next
        self.products: dict[tuple[int, int, int], Function] = {}

    def units_for(self, gates: int, rows: int) -> int:
        """Return how many groups of hidden units a product of that many sequences walks at once."""
        return min(self.groups, 4, max(1, _CHAINS // (gates * rows)))

    def product(self, gates: int, rows: int, units: int) -> Function:
        """Return (state, weights of a group, out): out[row][unit][gate] = state @ weights."""
        key = (gates, rows, units)
        if key not in self.products:
            params = [("state", PTR), ("r", PTR), ("out", PTR)]
            with self.module.function(f"product{gates}x{rows}x{units}", params) as f:
                self._product(f, gates, rows, units)
            self.products[key] = f
        return self.products[key]

    def _product(self, f: Function, gates: int, rows: int, units: int) -> None:
        state, weights, out = f.args
        hidden, wide = self.spec.hidden, gates * self.lanes
        columns = units * gates
        unroll = next(u for u in (4, 2, 1) if hidden % u == 0)
        streams = [f.offset(weights, u * hidden * wide, self.scalar) for u in range(units)]
        zero = f.const(0.0, self.vector)
        with f.loop(0, hidden, unroll, carry=[zero] * (rows * columns)) as loop:
            acc = list(loop.carry)
            at = [f.offset(s, loop.index * wide, self.scalar) for s in streams]
            left = f.offset(state, loop.index, self.scalar)
            for step in range(unroll):
                right = [
                    f.load(self.vector, p, step * wide + g * self.lanes)
                    for p in at
                    for g in range(gates)
                ]
                for row in range(rows):
                    factor = f.splat(f.load(self.scalar, left, row * self.pitch + step), self.lanes)
                    for j in range(columns):
                        acc[row * columns + j] = f.fma(factor, right[j], acc[row * columns + j])
            loop.next(*acc)
        for index, value in enumerate(loop.out):
            f.store(value, out, index * self.lanes)


class _Chunk:
    """One direction of a block of sequences inside the kernel."""

    def __init__(self, k: Kernel, emitter: _Emitter, buffer: Value, index: Value) -> None:
        self.k = k
        self.e = emitter
        self.spec = emitter.spec
        self.buffer = buffer
        spec = self.spec
        self.slot = {name: k.slot(i) for i, name in enumerate(spec.slots)}
        self.dim = {name: k.dim(len(spec.slots) + i) for i, name in enumerate(_DIMS)}
        blocks, batch = self.dim["blocks"], self.dim["batch"]
        turn = _udiv(k, index, blocks)
        block = index - turn * blocks
        self.direction = turn + self.dim["first"]
        self.low = _udiv(k, batch * block, blocks)
        self.rows = _udiv(k, batch * (block + 1), blocks) - self.low
        self.backward = self.direction > 0 if spec.directions == 2 else None
        state = _ROWS * emitter.pitch
        self.states = [k.offset(k.scratch(), i * state, emitter.scalar) for i in range(4)]

    # Places

    def place(self, pointer: Value, index: Value) -> Value:
        """Return a pointer moved by elements."""
        return self.k.offset(pointer, index, self.e.scalar)

    def own(self, name: str, count: int) -> Value:
        """Return this direction's part of an operand of `count` elements per direction."""
        return self.place(self.slot[name], self.direction * count)

    def state_row(self, name: str, row: Value) -> Value:
        """Return one sequence of an initial or final state."""
        at = self.direction * self.dim["state_d"] + (self.low + row) * self.dim["state_b"]
        return self.place(self.slot[name], at)

    # The walk

    def emit(self) -> None:
        """Emit all steps of the block."""
        k, spec = self.k, self.spec
        first, second, cell = self.states[:3]
        self._begin("h0", first)
        if spec.cell == "lstm":
            self._begin("c0", cell)
        if "lens" in spec.present:
            self._check_lengths()
        steps = self.dim["steps"]
        with k.loop(0, steps, carry=[first, second]) as loop:
            self._step(_Step(self._time(loop.index, steps), loop.carry[0], loop.carry[1]))
            loop.next(loop.carry[1], loop.carry[0])
        self._end("h", loop.out[0])
        if spec.cell == "lstm":
            self._end("c", cell)

    def _time(self, index: Value, steps: Value) -> Value:
        """Return the step that comes at this place in the direction's order."""
        from_end = steps - 1 - index
        if self.backward is not None:
            return self.k.select(self.backward, from_end, index)
        return from_end if self.spec.backward else index

    def _begin(self, name: str, state: Value) -> None:
        k, size = self.k, self.spec.hidden * self.e.scalar.itemsize
        with k.loop(0, self.rows) as loop:
            row = self.place(state, loop.index * self.e.pitch)
            if name in self.spec.present:
                k.memcpy(row, self.state_row(name, loop.index), size)
            else:
                k.memset(row, 0, size)
            loop.next()

    def _end(self, name: str, state: Value) -> None:
        k, size = self.k, self.spec.hidden * self.e.scalar.itemsize
        with k.loop(0, self.rows) as loop:
            k.memcpy(
                self.state_row(name, loop.index), self.place(state, loop.index * self.e.pitch), size
            )
            loop.next()

    def _check_lengths(self) -> None:
        k = self.k
        with k.loop(self.low, self.low + self.rows) as loop:
            length = k.sext(k.load(I32, self.slot["lens"], loop.index), I64)
            with k.if_((length < 0) | (length > self.dim["steps"])):
                k.fail(Failure.INDEX_OUT_OF_RANGE, loop.index)
            loop.next()

    def _step(self, step: _Step) -> None:
        spec, states = self.spec, self.states
        if spec.cell == "lstm":
            self._phase(0, step.before, step, self._lstm)
        elif spec.cell == "rnn":
            self._phase(0, step.before, step, self._rnn)
        elif len(spec.parts) == 1:
            self._phase(0, step.before, step, self._gru)
        else:
            self._phase(0, step.before, step, self._gru_gates)
            self._phase(1, states[3], step, self._gru_candidate)

    def _phase(self, part: int, source: Value, step: _Step, cell: Callable[[_Point], None]) -> None:
        """Emit one product of a step and what follows it, for all units and sequences."""
        k, e = self.k, self.e
        gates = self.spec.parts[part]
        tile = _tile_rows(e.isa, gates)
        per_group = self.spec.hidden * gates * e.lanes
        weights = self.own("r" if part == 0 else "r2", e.groups * per_group)
        tiles = _udiv(k, self.rows + (tile - 1), k.i64(tile))

        def rows_of(source_row: Value, count: int, unit: Value, units: int) -> None:
            state = self.place(source, source_row * e.pitch)
            k.call(
                e.product(gates, count, units),
                state,
                self.place(weights, unit * per_group),
                self.buffer,
            )

        def finish_units(row: Value, count: Value, unit: Value, units: Value) -> None:
            with k.loop(0, count) as loop_rows:
                with k.loop(0, units) as loop_units:
                    at = (loop_rows.index * units + loop_units.index) * (gates * e.lanes)
                    cell(
                        _Point(
                            self,
                            step,
                            row + loop_rows.index,
                            unit + loop_units.index,
                            self.place(self.buffer, at),
                        )
                    )
                    loop_units.next()
                loop_rows.next()

        # With one tile of sequences several groups of units may be walked at once.
        wide = k.i64(1)
        for count in range(1, tile + 1):
            units = e.units_for(gates, count)
            if units > 1:
                wide = k.select(self.rows.eq(count), units, wide)
        with k.while_([k.i64(0)]) as loop:
            unit = loop.carry[0]
            left = e.groups - unit
            loop.test(left > 0)
            units = k.select(wide <= left, wide, k.i64(1))
            with k.loop(0, tiles) as loop_tiles:
                row = _udiv(k, self.rows * loop_tiles.index, tiles)
                count = _udiv(k, self.rows * (loop_tiles.index + 1), tiles) - row
                for rows in range(1, tile + 1):
                    for several in sorted({1, e.units_for(gates, rows)}):
                        with k.if_(count.eq(rows) & units.eq(several)):
                            rows_of(row, rows, unit, several)
                finish_units(row, count, unit, units)
                loop_tiles.next()
            loop.next(unit + units)

    # The cells

    def _lstm(self, at: _Point) -> None:
        k, spec = self.k, self.spec
        gate, candidate, output = spec.activations
        i, o, f, g = (at.gate(index, index) for index in range(4))
        c = at.state(self.states[2])
        peep = [at.per_unit("p", 3, index) if "p" in spec.present else None for index in range(3)]
        i = gate.emit(k, i if peep[0] is None else k.fma(peep[0], c, i))
        seen = f if peep[2] is None else k.fma(peep[2], c, f)
        f = 1.0 - i if spec.input_forget else gate.emit(k, seen)
        new = k.fma(f, c, i * candidate.emit(k, g))
        o = gate.emit(k, o if peep[1] is None else k.fma(peep[1], new, o))
        at.keep(self.states[2], at.live(new, c))
        at.finish(o * output.emit(k, new))

    def _rnn(self, at: _Point) -> None:
        (function,) = self.spec.activations
        at.finish(function.emit(self.k, at.gate(0, 0)))

    def _gru(self, at: _Point) -> None:
        gate, candidate = self.spec.activations
        z, reset = (gate.emit(self.k, at.gate(index, index)) for index in range(2))
        inner = at.product(2)
        if "recurrent" in self.spec.present:
            inner = inner + at.per_unit("recurrent", 1, 0)
        self._blend(at, z, candidate.emit(self.k, self.k.fma(reset, inner, at.input(2))))

    def _gru_gates(self, at: _Point) -> None:
        gate, _ = self.spec.activations
        z, reset = (gate.emit(self.k, at.gate(index, index)) for index in range(2))
        at.keep(self.states[2], z)
        at.keep(self.states[3], reset * at.state(at.step.before))

    def _gru_candidate(self, at: _Point) -> None:
        _, candidate = self.spec.activations
        self._blend(at, at.state(self.states[2]), candidate.emit(self.k, at.gate(0, 2)))

    def _blend(self, at: _Point, z: Value, new: Value) -> None:
        at.finish(self.k.fma(z, at.state(at.step.before), (1.0 - z) * new))


class _Point:
    """A group of hidden units of one sequence at one step: what a cell reads and writes."""

    def __init__(
        self, chunk: _Chunk, step: _Step, row: Value, unit: Value, products: Value
    ) -> None:
        self.chunk = chunk
        self.step = step
        self.row = row
        self.column = unit * chunk.e.lanes
        self.products = products
        k, spec = chunk.k, chunk.spec
        self.mask = None
        if spec.hidden % chunk.e.lanes:
            self.mask = k.tail_mask(spec.hidden - self.column, chunk.e.vector)
        self.is_live: Value | None = None
        if "lens" in spec.present:
            length = k.sext(k.load(I32, chunk.slot["lens"], chunk.low + row), I64)
            self.is_live = k.splat(step.t < length, chunk.e.lanes)

    def _load(self, pointer: Value) -> Value:
        k, vector = self.chunk.k, self.chunk.e.vector
        return (
            k.load(vector, pointer)
            if self.mask is None
            else k.load_masked(vector, pointer, self.mask)
        )

    def product(self, index: int) -> Value:
        """Return a gate's product with the state."""
        return self.chunk.k.load(self.chunk.e.vector, self.products, index * self.chunk.e.lanes)

    def input(self, gate: int) -> Value:
        """Return what the input adds to a gate, biases included."""
        chunk, dim, hidden = self.chunk, self.chunk.dim, self.chunk.spec.hidden
        base = self.step.t * dim["gates_t"] + (chunk.low + self.row) * dim["gates_b"]
        base = base + chunk.direction * (chunk.spec.gates * hidden)
        return self._load(chunk.place(chunk.slot["gates"], base + (self.column + gate * hidden)))

    def gate(self, index: int, gate: int) -> Value:
        """Return the argument of a gate's activation."""
        return self.input(gate) + self.product(index)

    def per_unit(self, name: str, rows: int, index: int) -> Value:
        """Return row `index` of an operand [D, rows * H]."""
        hidden = self.chunk.spec.hidden
        own = self.chunk.own(name, rows * hidden)
        return self._load(self.chunk.place(own, self.column + index * hidden))

    def _state_at(self, state: Value) -> Value:
        return self.chunk.place(state, self.row * self.chunk.e.pitch + self.column)

    def state(self, state: Value) -> Value:
        """Return the units of a state in scratch."""
        return self.chunk.k.load(self.chunk.e.vector, self._state_at(state))

    def keep(self, state: Value, value: Value) -> None:
        """Write the units of a state in scratch."""
        self.chunk.k.store(value, self._state_at(state))

    def live(self, new: Value, old: Value) -> Value:
        """Return the new value unless the sequence has ended."""
        return new if self.is_live is None else self.chunk.k.select(self.is_live, new, old)

    def finish(self, h: Value) -> None:
        """Write the new state and the output."""
        chunk, k = self.chunk, self.chunk.k
        self.keep(
            self.step.after,
            h if self.is_live is None else self.live(h, self.state(self.step.before)),
        )
        dim = chunk.dim
        at = (
            self.step.t * dim["y_t"]
            + chunk.direction * dim["y_d"]
            + (chunk.low + self.row) * dim["y_b"]
        )
        target = chunk.place(chunk.slot["y"], at + self.column)
        out = h if self.is_live is None else k.select(self.is_live, h, 0.0)
        if self.mask is None:
            k.store(out, target)
        else:
            k.store_masked(out, target, self.mask)


def _udiv(f: Function, a: Value, b: Value) -> Value:
    """Divide extents: never negative, and the divisor is at least 1 by construction."""
    return f.emit(I64, f"udiv i64 {a.text}, {b.text}")


@cache
def _kernel(isa: Isa, spec: _Spec) -> Emitted:
    module = Module(isa)
    emitter = _Emitter(module, spec)
    for gates in set(spec.parts):
        for rows in range(1, _tile_rows(isa, gates) + 1):
            for units in sorted({1, emitter.units_for(gates, rows)}):
                emitter.product(gates, rows, units)
    room = max(gates * rows * units for gates, rows, units in emitter.products)
    with module.kernel(spec.cell, len(spec.slots) + len(_DIMS)) as k:
        buffer = k.alloca(emitter.vector, room)
        with k.loop(k.begin, k.end) as chunk:
            _Chunk(k, emitter, buffer, chunk.index).emit()
            chunk.next()
    return finish(module)


def _activations(layer: Layer) -> tuple[Activation, ...]:
    """Return the activations of a layer of one direction."""
    names = layer.activations or layer.defaults
    out: list[Activation] = []
    for index, name in enumerate(names):
        _, alpha, beta = ACTIVATIONS[name]
        given = [items[index] if items else None for items in (layer.alphas, layer.betas)]
        a, b = (
            default if value is None else value
            for default, value in zip((alpha, beta), given, strict=True)
        )
        out.append(Activation(name, a, b, layer.clip))
    return tuple(out)


@lowering(Recurrence)
def lower_recurrence(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Emit the steps: one launch, or one per direction where their activations differ."""
    op = node.op
    assert isinstance(op, Recurrence)
    layer = op.layer
    gates = node.operands[0]
    assert gates is not None
    if gates.type.dtype not in (DType.F32, DType.F64):
        return False
    functions = [_activations(one_direction(layer, index)) for index in range(layer.directions)]
    if len(set(functions)) == 1:
        _launch(node, ctx, isa, functions[0], (0, layer.directions))
    else:
        for index, activations in enumerate(functions):
            _launch(node, ctx, isa, activations, (index, 1))
    return None


def _launch(
    node: Node,
    ctx: LoweringContext,
    isa: Isa,
    activations: tuple[Activation, ...],
    which: tuple[int, int],
) -> None:
    op = node.op
    assert isinstance(op, Recurrence)
    layer, first = op.layer, which[0]
    named = dict(zip(op.operands[2:], node.operands[2:], strict=False))
    present = {name.rstrip("?"): value for name, value in named.items() if value is not None}
    gates = node.operands[0]
    assert gates is not None
    dtype, hidden, directions = gates.type.dtype, layer.hidden, layer.directions
    forget = isinstance(layer, LSTM) and layer.input_forget
    cell = "lstm" if isinstance(layer, LSTM) else "gru" if isinstance(layer, GRU) else "rnn"
    spec = _Spec(
        dtype,
        cell,
        hidden,
        gate_parts(layer),
        directions,
        layer.direction == "reverse",
        activations,
        forget,
        tuple(present),
    )
    steps, batch = gates.type.shape[layer.layout], gates.type.shape[1 - layer.layout]
    blocks = dim_max(1, ceildiv(batch, _ROWS))
    inputs = [v for v in node.operands[:2] if v is not None] + list(present.values())
    args: list[Arg] = [SlotArg(ctx.slot(v)) for v in inputs]
    args += [SlotArg(ctx.slot(r), writes=True) for r in node.results]
    args += map(DimArg, (steps, batch, blocks, first, *_strides(layer, steps, batch)))
    pitch = -(-hidden // isa.lanes(dtype)) * isa.lanes(dtype)
    scratch = 4 * _ROWS * pitch * dtype.itemsize
    ctx.launch(
        _kernel(isa, spec), args, which[1] * blocks, scratch=scratch, may_fail="lens" in present
    )


def _strides(layer: Layer, steps: Dim, batch: Dim) -> tuple[Dim, ...]:
    """Return the strides of `_DIMS`, in elements."""
    hidden, directions = layer.hidden, layer.directions
    wide, row = directions * layer.gates * hidden, directions * hidden
    if layer.layout:
        return wide, steps * wide, row, hidden, steps * row, hidden, row
    return batch * wide, wide, batch * row, batch * hidden, hidden, batch * hidden, hidden
