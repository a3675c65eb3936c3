# SPDX-License-Identifier: Apache-2.0
"""What recurrent layers compute in a step, as emitted code: products of the state, then the cell.

The weights of a group of `lanes` hidden units hold all gates side by side, so the product of a tile
of sequences leaves a whole cell's gates in registers. One sequence walks several groups at once, for
independent FMAs. Products are one chain of FMAs over the state in order: a result depends neither on
the sequence's neighbours nor on who computes which groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlx.backends.cpu.abi import Failure, Kernel
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.activations import Activation
from rlx.backends.cpu.lltypes import I32, I64, PTR, Type, scalar_type, vec
from rlx.base.dtypes import DType

__all__ = ["DIMS", "STATES", "CellEmitter", "Sequences", "Spec", "Step", "udiv"]

STATES = 4
"""Buffers of a direction's state: h before and after a step in turns, c, and what a GRU resets."""

_CHAINS = 8
"""Independent FMAs that hide each other's latency."""
_MOST_UNITS = 4
"""Groups of hidden units that a product walks at once, at most."""


@dataclass(frozen=True)
class Spec:
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


DIMS = (
    "steps",
    "batch",
    "first",
    "gates_t",
    "gates_b",
    "y_t",
    "y_d",
    "y_b",
    "state_d",
    "state_b",
)
"""Extents that every kernel of a layer takes after its buffers."""


def _tile_rows(isa: Isa, gates: int) -> int:
    """Return how many sequences a product of that many gates takes at once."""
    accumulators = 24 if isa.vector_registers == 32 else 9
    return min(6, max(1, accumulators // gates))


@dataclass
class Step:
    """One step of a block of sequences while it is emitted.

    Attributes:
        t: the step.
        before: the state that is read.
        after: where the new state goes.
        low: first group of hidden units.
        high: one past the last group.
    """

    t: Value
    before: Value
    after: Value
    low: Value
    high: Value


class CellEmitter:
    """Emits the functions that the kernels of one spec call.

    Args:
        module: where they go.
        spec: what they compute.
        parts: which products of a step the kernel does.
        shares_states: states lie in a buffer of their own, the last one of the kernel's arguments,
            not in the scratch of a participant.
    """

    def __init__(
        self, module: Module, spec: Spec, parts: Sequence[int], *, shares_states: bool
    ) -> None:
        self.module = module
        self.shares_states = shares_states
        self.spec = spec
        self.isa = module.isa
        self.scalar: Type = scalar_type(spec.dtype)
        self.lanes = self.isa.lanes(spec.dtype)
        self.vector: Type = vec(self.scalar, self.lanes)
        self.groups = -(-spec.hidden // self.lanes)
        self.pitch = self.groups * self.lanes  # elements from one sequence's state to the next
        self.products: dict[tuple[int, int, int], Function] = {}
        for gates in {spec.parts[part] for part in parts}:
            for rows in range(1, _tile_rows(self.isa, gates) + 1):
                for units in sorted({1, self.units_for(gates, rows)}):
                    self.product(gates, rows, units)

    @property
    def room(self) -> int:
        """Vectors that the largest product leaves."""
        return max((gates * rows * units for gates, rows, units in self.products), default=1)

    def group_size(self, part: int) -> int:
        """Return the elements of one group's weights in product `part` of a step."""
        return self.spec.hidden * self.spec.parts[part] * self.lanes

    def units_for(self, gates: int, rows: int) -> int:
        """Return how many groups of hidden units a product of that many sequences walks at once."""
        return min(self.groups, _MOST_UNITS, max(1, _CHAINS // (gates * rows)))

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


class Sequences:
    """Some sequences of one direction inside a kernel.

    Args:
        k: the kernel.
        emitter: its functions.
        last: name of the extent that follows `DIMS` in the kernel's arguments.
    """

    def __init__(self, k: Kernel, emitter: CellEmitter, last: str) -> None:
        spec = emitter.spec
        names = (*spec.slots, "states") if emitter.shares_states else spec.slots
        self.k = k
        self.e = emitter
        self.spec = spec
        self.slot = {name: k.slot(i) for i, name in enumerate(names)}
        self.dim = {name: k.dim(len(names) + i) for i, name in enumerate((*DIMS, last))}
        self.buffer = k.alloca(emitter.vector, emitter.room)

    def choose(self, turn: Value, low: Value, rows: Value, states: Value, capacity: Value) -> None:
        """Say which sequences: `rows` of them from `low` on, of the launch's direction `turn`.

        The state buffers lie one after the other at `states`, each with room for `capacity`
        sequences.
        """
        self.low, self.rows = low, rows
        self.direction = turn + self.dim["first"]
        self.backward = self.direction > 0 if self.spec.directions == 2 else None
        size = capacity * self.e.pitch
        self.states = [self.place(states, size * i) for i in range(STATES)]

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

    # Before, between and after the steps

    def begin(self) -> None:
        """Emit the initial states, and the check of the lengths."""
        self._begin("h0", self.states[0])
        if self.spec.cell == "lstm":
            self._begin("c0", self.states[2])
        if "lens" in self.spec.present:
            self._check_lengths()

    def end(self, h: Value) -> None:
        """Emit the copies of the final states; `h` is where the last step left it."""
        self._end("h", h)
        if self.spec.cell == "lstm":
            self._end("c", self.states[2])

    def time(self, index: Value) -> Value:
        """Return the step that comes at this place in the direction's order."""
        from_end = self.dim["steps"] - 1 - index
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

    # A step

    def phase(self, part: int, step: Step) -> None:
        """Emit product `part` of a step and what follows it."""
        if self.spec.cell == "lstm":
            self._phase(0, step.before, step, self._lstm)
        elif self.spec.cell == "rnn":
            self._phase(0, step.before, step, self._rnn)
        elif len(self.spec.parts) == 1:
            self._phase(0, step.before, step, self._gru)
        elif part == 0:
            self._phase(0, step.before, step, self._gru_gates)
        else:
            self._phase(1, self.states[3], step, self._gru_candidate)

    def _phase(self, part: int, source: Value, step: Step, cell: Callable[[_Point], None]) -> None:
        k, e = self.k, self.e
        gates = self.spec.parts[part]
        tile = _tile_rows(e.isa, gates)
        per_group = e.group_size(part)
        weights = self.own("r" if part == 0 else "r2", e.groups * per_group)
        tiles = udiv(k, self.rows + (tile - 1), k.i64(tile))

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

        products = {
            rows * _MOST_UNITS + units: function
            for (among, rows, units), function in e.products.items()
            if among == gates
        }
        # With one tile of sequences several groups of units may be walked at once.
        wide = k.i64(1)
        for count in range(1, tile + 1):
            units = e.units_for(gates, count)
            if units > 1:
                wide = k.select(self.rows.eq(count), units, wide)
        with k.while_([step.low]) as loop:
            unit = loop.carry[0]
            left = step.high - unit
            loop.test(left > 0)
            units = k.select(wide <= left, wide, k.i64(1))
            with k.loop(0, tiles) as loop_tiles:
                row = udiv(k, self.rows * loop_tiles.index, tiles)
                count = udiv(k, self.rows * (loop_tiles.index + 1), tiles) - row
                k.call_pointer(
                    k.choose(count * _MOST_UNITS + units, products, (PTR, PTR, PTR)),
                    self.place(source, row * e.pitch),
                    self.place(weights, unit * per_group),
                    self.buffer,
                )
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
        self, block: Sequences, step: Step, row: Value, unit: Value, products: Value
    ) -> None:
        self.block = block
        self.step = step
        self.row = row
        self.column = unit * block.e.lanes
        self.products = products
        k, spec = block.k, block.spec
        self.mask = None
        if spec.hidden % block.e.lanes:
            self.mask = k.tail_mask(spec.hidden - self.column, block.e.vector)
        self.is_live: Value | None = None
        if "lens" in spec.present:
            length = k.sext(k.load(I32, block.slot["lens"], block.low + row), I64)
            self.is_live = k.splat(step.t < length, block.e.lanes)

    def _load(self, pointer: Value) -> Value:
        k, vector = self.block.k, self.block.e.vector
        return (
            k.load(vector, pointer)
            if self.mask is None
            else k.load_masked(vector, pointer, self.mask)
        )

    def product(self, index: int) -> Value:
        """Return a gate's product with the state."""
        return self.block.k.load(self.block.e.vector, self.products, index * self.block.e.lanes)

    def input(self, gate: int) -> Value:
        """Return what the input adds to a gate, biases included."""
        block, dim, hidden = self.block, self.block.dim, self.block.spec.hidden
        base = self.step.t * dim["gates_t"] + (block.low + self.row) * dim["gates_b"]
        base = base + block.direction * (block.spec.gates * hidden)
        return self._load(block.place(block.slot["gates"], base + (self.column + gate * hidden)))

    def gate(self, index: int, gate: int) -> Value:
        """Return the argument of a gate's activation."""
        return self.input(gate) + self.product(index)

    def per_unit(self, name: str, rows: int, index: int) -> Value:
        """Return row `index` of an operand [D, rows * H]."""
        hidden = self.block.spec.hidden
        own = self.block.own(name, rows * hidden)
        return self._load(self.block.place(own, self.column + index * hidden))

    def _state_at(self, state: Value) -> Value:
        return self.block.place(state, self.row * self.block.e.pitch + self.column)

    def state(self, state: Value) -> Value:
        """Return the units of a state in scratch."""
        return self.block.k.load(self.block.e.vector, self._state_at(state))

    def keep(self, state: Value, value: Value) -> None:
        """Write the units of a state in scratch."""
        self.block.k.store(value, self._state_at(state))

    def live(self, new: Value, old: Value) -> Value:
        """Return the new value unless the sequence has ended."""
        return new if self.is_live is None else self.block.k.select(self.is_live, new, old)

    def finish(self, h: Value) -> None:
        """Write the new state and the output."""
        block, k = self.block, self.block.k
        self.keep(
            self.step.after,
            h if self.is_live is None else self.live(h, self.state(self.step.before)),
        )
        dim = block.dim
        at = (
            self.step.t * dim["y_t"]
            + block.direction * dim["y_d"]
            + (block.low + self.row) * dim["y_b"]
        )
        target = block.place(block.slot["y"], at + self.column)
        out = h if self.is_live is None else k.select(self.is_live, h, 0.0)
        if self.mask is None:
            k.store(out, target)
        else:
            k.store_masked(out, target, self.mask)


def udiv(f: Function, a: Value, b: Value) -> Value:
    """Divide extents: never negative, and the divisor is at least 1 by construction."""
    return f.emit(I64, f"udiv i64 {a.text}, {b.text}")
