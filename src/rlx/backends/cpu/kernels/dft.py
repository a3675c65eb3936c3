# SPDX-License-Identifier: Apache-2.0
"""Lowering of `DFT` and `STFT`: rows in, spectra out, one row per lane.

    for every block of rows: read, transpose -> transform -> (real rows) split -> transpose, write

A real row of even length n is read as n / 2 complex points and its spectrum is split off
afterwards; other real rows are complex rows without an imaginary part. The pieces of an `STFT` are
read where they lie in the signal, and multiplied by the window on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.fft import Point, Transform, buffer_points
from rlx.backends.cpu.kernels.move import launch_move
from rlx.backends.cpu.kernels.shuffles import transposed
from rlx.backends.cpu.kernels.space import Access, dense, dense_access
from rlx.backends.cpu.lltypes import I64, Type, scalar_type, vec
from rlx.backends.cpu.lowering import lowering
from rlx.base.dims import Dim, ceildiv, dim_min, product
from rlx.base.dtypes import DType
from rlx.base.types import Shape
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.signal import DFT, STFT

__all__ = ["lower_dft", "lower_stft"]

_LONGEST = 1 << 16
"""Longer transforms would put too large tables into a kernel."""
_POINTS_PER_CHUNK = 4096


@dataclass(frozen=True)
class _Form:
    """What a kernel is specialised on.

    Attributes:
        dtype: f32 or f64.
        n: length of the transform.
        components: 1 for real rows, 2 for complex ones.
        inverse: the inverse transform.
        onesided: a real signal to or from the first half of its spectrum.
        windowed: rows are multiplied by a window.
    """

    dtype: DType
    n: int
    components: int
    inverse: bool
    onesided: bool
    windowed: bool

    @property
    def halved(self) -> bool:
        """Whether pairs of real numbers are read as complex points."""
        return self.components == 1 and self.n % 2 == 0 and not self.inverse

    @property
    def points(self) -> int:
        """Points that are transformed."""
        return self.n // 2 if self.halved else self.n

    @property
    def to_real(self) -> bool:
        """Whether the result is a real signal."""
        return self.inverse and self.onesided

    @property
    def results(self) -> int:
        """Numbers in a row of the result."""
        if self.to_real:
            return self.n
        return 2 * (self.n // 2 + 1 if self.onesided else self.n)

    @property
    def room(self) -> int:
        """Points of each of the two buffers."""
        return max(buffer_points(self.points), self.n // 2 + 1, self.results // 2)


class _Rows:
    """The kernel: arguments x, window?, y, rows, rows per batch, batch pitch, row pitch, used."""

    def __init__(self, module: Module, k: Kernel, form: _Form) -> None:
        self.k = k
        self.form = form
        self.scalar: Type = scalar_type(form.dtype)
        self.lanes = module.isa.lanes(form.dtype)
        self.vector = vec(self.scalar, self.lanes)
        self.transform = Transform(module, form.points, self.vector)
        first = 2 + form.windowed
        self.window = k.slot(1) if form.windowed else None
        self.x, self.y = k.slot(0), k.slot(first - 1)
        self.rows, self.per_batch, self.batch_pitch, self.row_pitch, self.used = (
            k.dim(first + i) for i in range(5)
        )
        size = form.room * 2 * self.lanes
        self.buffers = k.scratch(), k.offset(k.scratch(), size, self.vector)

    def emit(self, block: Value) -> None:
        """Emit a block of as many rows as there are lanes."""
        k, form = self.k, self.form
        first = block * self.lanes
        source, spare = self.buffers
        swap = form.inverse
        self._read(first, source)
        if form.to_real:
            self._mirror(source)
        result = self.transform.emit(k, source, spare, swap=swap)
        if form.halved:
            target = spare if result is source else source
            self._split(result, target)
            result = target
        self._write(first, result)

    # Rows to points

    def _row_pointers(self, first: Value) -> list[Value]:
        """Return where each lane's row starts; lanes beyond the last row read that one again."""
        k = self.k
        out: list[Value] = []
        for lane in range(self.lanes):
            row = k.smin(first + lane, self.rows - 1)
            batch = _udiv(k, row, self.per_batch)
            at = batch * self.batch_pitch + (row - batch * self.per_batch) * self.row_pitch
            out.append(k.offset(self.x, at, self.scalar))
        return out

    def _read(self, first: Value, buffer: Value) -> None:
        """Fill a buffer: number i of a row is part i of the points (i-th point for real rows)."""
        k, form, lanes = self.k, self.form, self.lanes
        rows = self._row_pointers(first)
        spread = 1 if form.components == 2 or form.halved else 2
        whole = self.used - (self.used & (lanes - 1))
        with k.loop(0, whole, lanes) as loop:
            lines = [k.load(self.vector, row, loop.index) for row in rows]
            for i, line in enumerate(transposed(k, lines)):
                self._place(line, loop.index + i, buffer, spread)
            loop.next()
        with k.loop(whole, self.used) as loop:
            line = k.pack([k.load(self.scalar, row, loop.index) for row in rows])
            self._place(line, loop.index, buffer, spread)
            loop.next()
        total = 2 * form.points if not form.to_real else 2 * (form.n // 2 + 1)
        zero = k.const(0.0, self.vector)
        with k.loop(self.used * spread, total) as loop:
            k.store(zero, buffer, loop.index * lanes)
            loop.next()

    def _place(self, line: Value, index: Value, buffer: Value, spread: int) -> None:
        k, lanes = self.k, self.lanes
        if self.window is not None:
            at = index if self.form.components == 1 else index.lshr(1)
            line = line * k.splat(k.load(self.scalar, self.window, at), lanes)
        k.store(line, buffer, index * (lanes * spread))
        if spread == 2:
            k.store(k.const(0.0, self.vector), buffer, index * (2 * lanes) + lanes)

    def _mirror(self, buffer: Value) -> None:
        """Complete the spectrum of a real signal: z[n - k] is the conjugate of z[k]."""
        k, form, transform = self.k, self.form, self.transform
        zero = k.const(0.0, self.vector)
        for index in {0, form.n // 2} if form.n % 2 == 0 else {0}:
            point = transform.load(k, buffer, k.i64(index))
            transform.store(k, Point(point.re, zero), buffer, k.i64(index))
        with k.loop(1, (form.n + 1) // 2) as loop:
            point = transform.load(k, buffer, loop.index)
            mirrored = Point(point.re, -point.im)
            transform.store(k, mirrored, buffer, form.n - loop.index)
            loop.next()

    def _split(self, source: Value, target: Value) -> None:
        """Turn the transform of n / 2 pairs into the spectrum of n real numbers.

        With e and o the transforms of even and odd elements, z = e + i o, and both are spectra of
        real signals; x[k] = e[k] + w^k o[k], w = e^(-2 pi i / n).
        """
        k, form, transform = self.k, self.form, self.transform
        half = form.n // 2
        # w^k / 2
        angles = 2 * np.pi * np.arange(half + 1) / form.n
        turns = transform.table(k, (0.5 * np.exp(-1j * angles)).astype(np.complex128))
        with k.loop(0, half + 1) as loop:
            index = loop.index
            here = transform.load(k, source, k.select(index.eq(half), 0, index))
            there = transform.load(k, source, k.select(index.eq(0), 0, half - index))
            even = Point((here.re + there.re) * 0.5, (here.im - there.im) * 0.5)
            odd = Point(here.im + there.im, there.re - here.re)
            out = even + odd.times(k, transform.factor(k, turns, index))
            transform.store(k, out, target, index)
            if not form.onesided:
                with k.if_((index > 0) & (index < half)):
                    mirrored = Point(out.re, -out.im)
                    transform.store(k, mirrored, target, form.n - index)
            loop.next()

    # Points to rows

    def _write(self, first: Value, buffer: Value) -> None:
        """Write each lane's row of results."""
        k, form, lanes = self.k, self.form, self.lanes
        spread = 2 if form.to_real else 1
        scale = 1.0 / form.n if form.inverse else None
        left = self.rows - first
        with k.loop(0, form.results, lanes) as loop:
            mask = k.tail_mask(form.results - loop.index, self.vector)
            lines: list[Value] = []
            for i in range(lanes):
                # Numbers beyond the last are read from the last again and never written.
                at = k.smin(loop.index + i, form.results - 1) * (lanes * spread)
                line = k.load(self.vector, buffer, at)
                lines.append(line if scale is None else line * scale)
            for lane, line in enumerate(transposed(k, lines)):
                with k.if_(left > lane):
                    row = k.offset(self.y, (first + lane) * form.results, self.scalar)
                    k.store_masked(line, row, mask, loop.index)
            loop.next()


def _udiv(k: Kernel, a: Value, b: Value) -> Value:
    """Divide extents: never negative, and the divisor is at least 1 by construction."""
    return k.emit(I64, f"udiv i64 {a.text}, {b.text}")


def _blocks_per_chunk(form: _Form) -> int:
    return max(1, _POINTS_PER_CHUNK // form.n)


@cache
def _kernel(isa: Isa, form: _Form) -> Emitted:
    module = Module(isa)
    count = _blocks_per_chunk(form)
    with module.kernel("dft", 7 + form.windowed) as k:
        rows = _Rows(module, k, form)
        blocks = _udiv(k, rows.rows + (rows.lanes - 1), k.i64(rows.lanes))
        with k.loop(k.begin * count, k.smin(k.end * count, blocks)) as loop:
            rows.emit(loop.index)
            loop.next()
    return finish(module)


def _launch(
    ctx: LoweringContext,
    isa: Isa,
    form: _Form,
    slots: Sequence[int],
    rows: tuple[Dim, Dim, Dim, Dim],
    used: Dim,
) -> None:
    """Emit the launch.

    Args:
        ctx: where the launch goes.
        isa: the target.
        form: the kernel.
        slots: x, the window if there is one, y.
        rows: batches, rows of a batch, elements between batches and between rows.
        used: numbers of a row that are read; the others are zeros.
    """
    batches, per_batch, batch_pitch, row_pitch = rows
    lanes = isa.lanes(form.dtype)
    total = batches * per_batch
    args: list[Arg] = [SlotArg(s) for s in slots[:-1]]
    args.append(SlotArg(slots[-1], writes=True))
    args += map(DimArg, (total, per_batch, batch_pitch, row_pitch, used))
    chunks = ceildiv(total, lanes * _blocks_per_chunk(form))
    scratch = 2 * form.room * 2 * lanes * form.dtype.itemsize
    ctx.launch(_kernel(isa, form), args, chunks, scratch=scratch)


@lowering(STFT)
def lower_stft(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Emit the transform of the pieces; False for narrow floats and very long pieces."""
    op = node.op
    assert isinstance(op, STFT)
    signal = node.operands[0]
    window = node.operands[1] if len(node.operands) > 1 else None
    assert signal is not None
    dtype, shape = signal.type.dtype, signal.type.shape
    if dtype not in (DType.F32, DType.F64) or op.frame_length > _LONGEST:
        return False
    components = 2 if len(shape) == 3 and shape[2] == 2 else 1
    form = _Form(dtype, op.frame_length, components, False, op.onesided, window is not None)
    slots = [ctx.slot(v) for v in (signal, window, node.result) if v is not None]
    batches, frames = node.result.type.shape[:2]
    pitch = shape[1] * components
    rows = (batches, frames, pitch, op.frame_step * components)
    _launch(ctx, isa, form, slots, rows, op.frame_length * components)
    return None


@lowering(DFT)
def lower_dft(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Emit the transform; False for narrow floats, and for very long, symbolic and empty lengths."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, DFT)
    assert x is not None
    dtype, shape, n = x.type.dtype, x.type.shape, op.length
    components = shape[-1]
    if dtype not in (DType.F32, DType.F64) or not isinstance(n, int) or not 0 < n <= _LONGEST:
        return False
    assert isinstance(components, int)
    form = _Form(dtype, n, components, op.inverse, op.onesided, windowed=False)
    lines = product(shape[: op.axis]) * product(shape[op.axis + 1 : -1])
    limit = n // 2 + 1 if form.to_real else n
    used = dim_min(shape[op.axis], limit) * components
    source, target = ctx.slot(x), ctx.slot(node.result)
    pitch = shape[op.axis] * components
    if all(d == 1 for d in shape[op.axis + 1 : -1]):
        _launch(ctx, isa, form, [source, target], (1, lines, 0, pitch), used)
        return None
    moved_in = ctx.temporary(x.type.nbytes)
    moved_out = ctx.temporary(node.result.type.nbytes)
    _move(ctx, isa, dtype, shape, op.axis, (source, moved_in), back=False)
    _launch(ctx, isa, form, [moved_in, moved_out], (1, lines, 0, pitch), used)
    _move(ctx, isa, dtype, node.result.type.shape, op.axis, (moved_out, target), back=True)
    return None


def _move(
    ctx: LoweringContext,
    isa: Isa,
    dtype: DType,
    shape: Shape,
    axis: int,
    slots: tuple[int, int],
    *,
    back: bool,
) -> None:
    """Emit the move of an axis to the last place but one, or back from there."""
    perm = [*(a for a in range(len(shape) - 1) if a != axis), axis, len(shape) - 1]
    moved = tuple(shape[a] for a in perm)
    strides = dense(shape)
    plain = Access(slots[1] if back else slots[0], dtype, tuple(strides[a] for a in perm))
    last = dense_access(slots[0] if back else slots[1], dtype, moved)
    source, target = (last, plain) if back else (plain, last)
    launch_move(ctx, isa, moved, source, target)
