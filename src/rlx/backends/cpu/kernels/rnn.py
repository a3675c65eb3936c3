# SPDX-License-Identifier: Apache-2.0
"""The steps of recurrent layers (LSTM, GRU, RNN); `rnn_cells` has what a step computes.

    for every step: for every group of hidden units: products = h @ r for all gates of the group,
    then the cell

There are two schedules, and both give the same bits:

- Small layers walk: a chunk is one direction of a block of sequences and does all steps by itself,
  so no thread waits for another. States lie in the participant's scratch.
- Large layers step: a launch does one step, a chunk is a range of hidden units for all sequences,
  and the dispatcher's loop is what the threads meet at. So a thread keeps its part of the weights
  in its own cache over all steps, nothing waits inside a kernel for a thread that may never come,
  and a long sequence can be interrupted between its steps. States lie in a buffer of the plan; a
  launch before and one after the loop copy the initial and the final ones.

States are rows padded to whole vectors, in two copies, since all units read the state before any is
overwritten; what the padding holds is never read.

Measured on two shared cores of a virtual EPYC, microseconds per step of one sequence, walking and
stepping on 1 thread, stepping on 2: LSTM of 64 units 0.80, 0.85, 0.70; of 128 units 2.8, 2.7, 2.0; of
256 units 12.1, 12.0, 5.8. When the host puts both virtual cores on one real core, two threads take
3.8 instead of 2.0 and 8.4 instead of 5.8, hence the border between the schedules. 8 sequences of 128
units: 12.8, 12.7, 6.8. NSNet2 (two GRUs of 400 units, 399 steps): 31 ms on 1 thread, 25 ms on 2 when it
walked, 17.6 ms when it steps. Two to sixteen chunks per step differ by 3%. Asking ahead for the
states that the other core has written, or for the right to overwrite them, changed nothing.
"""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.abi import Emitted, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.activations import Activation
from rlx.backends.cpu.kernels.rnn_cells import (
    DIMS,
    STATES,
    CellEmitter,
    Sequences,
    Spec,
    Step,
    udiv,
)
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
"""Sequences per chunk of a walk: two tiles."""
_STEP_BYTES = 384 << 10
"""Weights of a step from which on it is worth a launch of its own."""
_PART_BYTES = 64 << 10
"""Least weights of a chunk of a step."""
_MOST_PARTS = 8
"""Most chunks of a step per direction."""


def _weight_bytes(isa: Isa, spec: Spec, part: int) -> int:
    """Return the size of the weights that product `part` of a step reads."""
    groups = -(-spec.hidden // isa.lanes(spec.dtype))
    return groups * isa.lanes(spec.dtype) * spec.hidden * spec.parts[part] * spec.dtype.itemsize


def _split(isa: Isa, spec: Spec, part: int) -> int:
    """Return the chunks of a step's product: a power of two, so that two and four threads get equal shares."""
    groups, count = -(-spec.hidden // isa.lanes(spec.dtype)), 1
    most = min(groups, _MOST_PARTS, _weight_bytes(isa, spec, part) // _PART_BYTES)
    while 2 * count <= most:
        count *= 2
    return count


@cache
def _walk_kernel(isa: Isa, spec: Spec) -> Emitted:
    """All steps of a block of sequences. Chunks are (direction, block); the last extent counts blocks."""
    module = Module(isa)
    emitter = CellEmitter(module, spec, range(len(spec.parts)), shares_states=False)
    with module.kernel(spec.cell, len(spec.slots) + len(DIMS) + 1) as k:
        s = Sequences(k, emitter, "blocks")
        blocks, batch, steps = s.dim["blocks"], s.dim["batch"], s.dim["steps"]
        with k.loop(k.begin, k.end) as chunk:
            turn = udiv(k, chunk.index, blocks)
            block = chunk.index - turn * blocks
            low = udiv(k, batch * block, blocks)
            rows = udiv(k, batch * (block + 1), blocks) - low
            s.choose(turn, low, rows, k.scratch(), k.i64(_ROWS))
            s.begin()
            with k.loop(0, steps, carry=s.states[:2]) as loop:
                before, after = loop.carry
                groups = k.i64(emitter.groups)
                step = Step(s.time(loop.index), before, after, k.i64(0), groups)
                for part in range(len(spec.parts)):
                    s.phase(part, step)
                loop.next(after, before)
            s.end(loop.out[0])
            chunk.next()
    return finish(module)


@cache
def _step_kernel(isa: Isa, spec: Spec, part: int) -> Emitted:
    """One product of one step. Chunks are (direction, range of groups); the last extent is the step."""
    module = Module(isa)
    emitter = CellEmitter(module, spec, (part,), shares_states=True)
    ranges = _split(isa, spec, part)
    with module.kernel(f"{spec.cell}_step", len(spec.slots) + 1 + len(DIMS) + 1) as k:
        s = Sequences(k, emitter, "step")
        batch, index = s.dim["batch"], s.dim["step"]
        odd = (index & 1).ne(0)
        with k.loop(k.begin, k.end) as chunk:
            turn = udiv(k, chunk.index, k.i64(ranges))
            which = chunk.index - turn * ranges
            s.choose(turn, k.i64(0), batch, _own_states(s, turn), batch)
            first, second = s.states[:2]
            before, after = k.select(odd, second, first), k.select(odd, first, second)
            low, high = (udiv(k, (which + i) * emitter.groups, k.i64(ranges)) for i in range(2))
            s.phase(part, Step(s.time(index), before, after, low, high))
            chunk.next()
    return finish(module)


@cache
def _edge_kernel(isa: Isa, spec: Spec) -> Emitted:
    """What surrounds the steps. Chunks are directions; the last extent is 1 after the steps, else 0."""
    module = Module(isa)
    emitter = CellEmitter(module, spec, (), shares_states=True)
    with module.kernel(f"{spec.cell}_edge", len(spec.slots) + 1 + len(DIMS) + 1) as k:
        s = Sequences(k, emitter, "after")
        batch = s.dim["batch"]
        with k.loop(k.begin, k.end) as chunk:
            s.choose(chunk.index, k.i64(0), batch, _own_states(s, chunk.index), batch)
            with k.if_(s.dim["after"].eq(0)):
                s.begin()
            with k.if_(s.dim["after"].ne(0)):
                odd = (s.dim["steps"] & 1).ne(0)
                s.end(k.select(odd, s.states[1], s.states[0]))
            chunk.next()
    return finish(module)


def _own_states(s: Sequences, turn: Value) -> Value:
    """Return where the states of a direction of the launch begin in the shared buffer."""
    return s.place(s.slot["states"], turn * s.dim["batch"] * (STATES * s.e.pitch))


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
    spec = Spec(
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
    inputs = [v for v in node.operands[:2] if v is not None] + list(present.values())
    buffers: list[Arg] = [SlotArg(ctx.slot(v)) for v in inputs]
    buffers += [SlotArg(ctx.slot(r), writes=True) for r in node.results]
    extents = (steps, batch, first, *_strides(layer, steps, batch))
    size = STATES * (-(-hidden // isa.lanes(dtype)) * isa.lanes(dtype)) * dtype.itemsize
    may_fail = "lens" in present
    parts = range(len(spec.parts))
    if max(_weight_bytes(isa, spec, part) for part in parts) < _STEP_BYTES:
        blocks = dim_max(1, ceildiv(batch, _ROWS))
        args = [*buffers, *map(DimArg, (*extents, blocks))]
        kernel, scratch = _walk_kernel(isa, spec), _ROWS * size
        ctx.launch(kernel, args, which[1] * blocks, scratch=scratch, may_fail=may_fail)
        return
    buffers.append(SlotArg(ctx.temporary(which[1] * batch * size), writes=True))

    def launch(kernel: Emitted, last: Dim, chunks: int, *, may_fail: bool = False) -> None:
        ctx.launch(kernel, [*buffers, *map(DimArg, (*extents, last))], chunks, may_fail=may_fail)

    launch(_edge_kernel(isa, spec), 0, which[1], may_fail=may_fail)
    with ctx.repeat(steps) as counter:
        for part in parts:
            launch(_step_kernel(isa, spec, part), counter, which[1] * _split(isa, spec, part))
    launch(_edge_kernel(isa, spec), 1, which[1])


def _strides(layer: Layer, steps: Dim, batch: Dim) -> tuple[Dim, ...]:
    """Return the strides of `DIMS`, in elements."""
    hidden, directions = layer.hidden, layer.directions
    wide, row = directions * layer.gates * hidden, directions * hidden
    if layer.layout:
        return wide, steps * wide, row, hidden, steps * row, hidden, row
    return batch * wide, wide, batch * row, batch * hidden, hidden, batch * hidden, hidden
