# SPDX-License-Identifier: Apache-2.0
"""Windows in which every channel is on its own: depthwise convolution, maximum and average pooling.

    depthwise   out[p, c] = epilogue(sum_tap x[pixel(p, tap), c // m] * w[tap, c])
    pooling     out[p, c] = max or mean over taps of x[pixel(p, tap), c]

A tile is 8 consecutive output pixels; channels are walked a vector at a time, with 8 accumulators.
Where a tile lies in one row of windows and touches no padding, each input vector of a kernel row is
loaded once and serves every pixel that sees it (10 loads for 24 products with a 3x3 kernel).
Elsewhere a list of pointers, made once per tile for all taps, says where each pixel reads. Each
element is one chain over the taps in order. Bytes are widened as they are read and summed in f32,
which holds their sums exactly, up to the conversion to i32 at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.emit import encode, load_value, maximum
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.products import multiply_add
from rlx.backends.cpu.kernels.tile import Finish, Place, TileFinisher
from rlx.backends.cpu.kernels.window import (
    WINDOW_WORDS,
    RowPointers,
    Taps,
    Walk,
    Window,
    WindowEmitter,
    window_words,
)
from rlx.backends.cpu.lltypes import F32, I32, I64, PTR, Type, scalar_type, storage_type, vec
from rlx.base.dims import Dim, ceildiv
from rlx.base.dtypes import DType
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext

__all__ = ["launch_channelwise"]

_ROWS = 8
_WIDEST_RUN = 7
"""Kernel rows up to this many taps are compiled in; longer ones are walked by a loop."""
_OPERATIONS_PER_CHUNK = 800_000
_UNKNOWN_COLUMNS = 64
"""What a chunk is sized for where the number of channels is known only at run time."""
_OWN_WORDS = [
    "multiplier",
    "step_p",
    "blocks",
    "block_pixels",
    "line_bytes",
    "high_z",
    "high_y",
    "high_x",
]
_NAMES = [*WINDOW_WORDS, *_OWN_WORDS]


@dataclass(frozen=True)
class _Spec:
    """What a kernel is specialised on.

    Attributes:
        kind: `conv`, `max` or `avg`.
        dtype: of x; narrow floats are computed in f32, as bytes of a convolution are.
        finish: what is stored, and the epilogue.
        volume: three spatial axes.
        run: (taps, dilation, stride) along x when kernel rows are compiled in, else None.
        multiplied: several output channels read one input channel.
        padding: averages count the padding.
    """

    kind: str
    dtype: DType
    finish: Finish
    volume: bool
    run: tuple[int, int, int] | None
    multiplied: bool = False
    padding: bool = False

    @property
    def widens(self) -> bool:
        """Whether it is a convolution of bytes."""
        return self.kind == "conv" and self.dtype in (DType.I8, DType.U8)

    @property
    def compute(self) -> DType:
        """What sums and maxima are computed in."""
        return DType.F32 if self.widens else self.dtype.compute


class _Emitter:
    """Emits the functions of one kernel."""

    def __init__(self, module: Module, spec: _Spec) -> None:
        self.module = module
        self.spec = spec
        self.lanes = module.isa.lanes(spec.compute)
        self.vector: Type = vec(scalar_type(spec.compute), self.lanes)
        self.stored: Type = storage_type(spec.dtype)
        self.factor = spec.compute if spec.widens else spec.dtype
        self.windows = WindowEmitter(module, _NAMES, volume=spec.volume)
        self.finisher = TileFinisher(module, spec.finish)
        self.finisher.prepare(1, masked=False)
        self.finisher.prepare(1, masked=True)
        _ = self.windows.locator
        self.listing = self._listing()
        self.inner = None if spec.volume or spec.multiplied else self._tile(inner=True)
        self.edge = self._tile(inner=False)

    def neutral(self, f: Function, kind: Type) -> Value:
        """Return what does not change a sum or a maximum."""
        if self.spec.kind != "max":
            return f.const(0, kind)
        if self.spec.dtype.is_float:
            return f.const(float("-inf"), kind)
        return f.const(-(1 << (kind.bits - 1)) if self.spec.dtype.is_signed else 0, kind)

    def combine(self, f: Function, acc: Value, x: Value, w: Value | None) -> Value:
        """Add one tap."""
        if self.spec.kind == "max":
            return maximum(f, self.spec.dtype, acc, x)
        return acc + x if w is None else multiply_add(f, x, w, acc)

    # Pointers of an edge tile

    def _listing(self) -> Function:
        """Fill list[tap][pixel] with addresses and counts[pixel] with the elements it averages."""
        params = [(name, PTR) for name in ("geometry", "table", "list", "counts", "outside", "x")]
        with self.module.function("list_taps", params) as f:
            geometry, table, target, counts, outside, x = f.args
            taps = Taps(self.windows, f, geometry, table, (x, outside), _ROWS)
            low, high = self._bounds(f, geometry)
            none = f.const(0, vec(I32, _ROWS))
            with f.loop(
                0, self.windows.word(f, geometry, "taps"), carry=[none, *taps.start().values]
            ) as loop:
                total, walk = loop.carry[0], Walk.of(loop.carry[1:])
                inside = taps.within(walk)
                f.store(taps.addresses(walk, inside), f.offset(target, loop.index * _ROWS, I64))
                counted = taps.within(walk, low, high) if self.spec.padding else inside
                loop.next(total + f.zext(counted, I32), *taps.next(walk).values)
            f.store(loop.out[0], counts)
        return f

    def _bounds(self, f: Function, geometry: Value) -> tuple[list[Value], list[Value]]:
        def spread(value: Value) -> Value:
            return f.splat(f.trunc(value, I32), _ROWS)

        word = self.windows.word
        low = [spread(f.i64(0) - word(f, geometry, f"pad_{axis}")) for axis in "zyx"]
        return low, [spread(word(f, geometry, f"high_{axis}")) for axis in "zyx"]

    # Tiles

    def _tile(self, *, inner: bool) -> Function:
        params = [(name, PTR) for name in ("x", "w", "geometry", "list", "counts", "out")]
        params += [*self.finisher.pointers, ("row", I64), ("count", I64)]
        with self.module.function("inner" if inner else "edge", params) as f:
            x, w, geometry, listed, counts, out, *extras, row, count = f.args
            n = self.windows.word(f, geometry, "columns")
            whole = n & -self.lanes
            divisors = self._divisors(f, geometry, None if inner else counts)
            mask = f.tail_mask(n - whole, self.vector)

            def block(col: Value, tail: Value | None) -> None:
                if inner:
                    acc = self._inner(f, x, w, geometry, col, tail)
                else:
                    acc = self._edge(f, listed, w, geometry, col, tail)
                if self.spec.widens:
                    acc = [f.cast("fptosi", a, I32) for a in acc]
                rows = [[a if d is None else a / d] for a, d in zip(acc, divisors, strict=True)]
                place = Place(row, count, n, col, n - col)
                certain = _ROWS if inner else 1
                self.finisher.tile(
                    f, rows, out, extras, place, masked=tail is not None, certain=certain
                )

            with f.loop(0, whole, self.lanes) as loop:
                block(loop.index, None)
                loop.next()
            with f.if_(whole < n):
                block(whole, mask)
        return f

    def _divisors(self, f: Function, geometry: Value, counts: Value | None) -> list[Value | None]:
        """Return per pixel what its sum is divided by, as vectors."""
        if self.spec.kind != "avg":
            return [None] * _ROWS
        scalar = self.vector.scalar
        if counts is None:
            whole = f.int_to_float(self.windows.word(f, geometry, "taps"), scalar, signed=True)
            return [f.splat(whole, self.lanes)] * _ROWS
        numbers = [
            f.int_to_float(f.load(I32, counts, p), scalar, signed=True) for p in range(_ROWS)
        ]
        return [f.splat(number, self.lanes) for number in numbers]

    def _read(self, f: Function, pointer: Value, index: Value | int, mask: Value | None) -> Value:
        value = load_value(f, self.spec.dtype, pointer, index, self.lanes, mask)
        if not self.spec.widens:
            return value
        return f.int_to_float(value, F32, signed=self.spec.dtype.is_signed)

    def _factor(self, f: Function, pointer: Value, mask: Value | None) -> Value | None:
        """Return weights, where there are any."""
        if self.spec.kind != "conv":
            return None
        return load_value(f, self.factor, pointer, 0, self.lanes, mask)

    def _inner(
        self, f: Function, x: Value, w: Value, geometry: Value, col: Value, mask: Value | None
    ) -> list[Value]:
        word = self.windows.word
        acc = [self.neutral(f, self.vector)] * _ROWS
        first = f.offset(x, col, self.stored)
        weights = f.offset(w, col, storage_type(self.factor))
        step = word(f, geometry, "run_step")
        with f.loop(0, word(f, geometry, "runs"), carry=[*acc, first, weights]) as loop:
            *acc, base, weights = loop.carry
            acc, weights = self._run(f, geometry, base, weights, acc, mask)
            loop.next(*acc, f.offset(base, step), weights)
        return loop.out[:_ROWS]

    def _run(
        self,
        f: Function,
        geometry: Value,
        base: Value,
        w: Value,
        acc: list[Value],
        mask: Value | None,
    ) -> tuple[list[Value], Value]:
        """Add one kernel row; return the accumulators and where the next row's weights are."""
        line = self.windows.word(f, geometry, "line_bytes")
        conv = self.spec.kind == "conv"
        if self.spec.run is None:
            return self._long_run(f, geometry, base, w, acc, mask)
        taps, dilation, stride = self.spec.run
        factors: list[Value | None] = [None] * taps
        if conv:
            for tap in range(taps):
                factors[tap] = self._factor(f, w, mask)
                w = f.offset(w, line)
        pitch = self.windows.word(f, geometry, "pixel_bytes")
        length = (_ROWS - 1) * stride + (taps - 1) * dilation + 1
        pointers = RowPointers.spaced(
            base, {odd: pitch * odd for odd in range(1, length, 2)}, length
        )
        at = pointers.at(f, f.i64(0), self.stored)
        out = list(acc)
        # Input positions ascend, so the taps of each pixel do as well.
        for position in range(length):
            users = [
                (p, t)
                for p in range(_ROWS)
                for t in range(taps)
                if p * stride + t * dilation == position
            ]
            if users:
                value = self._read(f, at[position], 0, mask)
                for p, t in users:
                    out[p] = self.combine(f, out[p], value, factors[t])
        return out, w

    def _long_run(
        self,
        f: Function,
        geometry: Value,
        base: Value,
        w: Value,
        acc: list[Value],
        mask: Value | None,
    ) -> tuple[list[Value], Value]:
        word = self.windows.word
        line, step, pitch = (word(f, geometry, name) for name in ("line_bytes", "step_p", "pitch"))
        odd = {m: pitch * m for m in range(1, _ROWS, 2)}
        with f.loop(
            0, word(f, geometry, "span_x"), word(f, geometry, "dilation_x"), carry=[*acc, base, w]
        ) as loop:
            *current, at, weights = loop.carry
            factor = self._factor(f, weights, mask)
            pointers = RowPointers.spaced(at, odd, _ROWS).at(f, f.i64(0), self.stored)
            current = [
                self.combine(f, a, self._read(f, pointer, 0, mask), factor)
                for a, pointer in zip(current, pointers, strict=True)
            ]
            loop.next(*current, f.offset(at, step), f.offset(weights, line))
        return loop.out[:_ROWS], loop.out[-1]

    def _edge(
        self, f: Function, listed: Value, w: Value, geometry: Value, col: Value, mask: Value | None
    ) -> list[Value]:
        word = self.windows.word
        acc = [self.neutral(f, self.vector)] * _ROWS
        line = word(f, geometry, "line_bytes")
        sources = self._sources(f, geometry, col)
        with f.loop(
            0, word(f, geometry, "taps"), carry=[*acc, f.offset(w, col, storage_type(self.factor))]
        ) as loop:
            *acc, weights = loop.carry
            factor = self._factor(f, weights, mask)
            here = f.offset(listed, loop.index * _ROWS, I64)
            current: list[Value] = []
            for p in range(_ROWS):
                pointer = f.load(PTR, here, p)
                if sources is not None:
                    value = f.gather(self.vector, pointer, sources, mask)
                else:
                    value = self._read(f, pointer, col, mask)
                current.append(self.combine(f, acc[p], value, factor))
            loop.next(*current, f.offset(weights, line))
        return loop.out[:_ROWS]

    def _sources(self, f: Function, geometry: Value, col: Value) -> Value | None:
        """Return the input channel of each lane where output channels share them, else None."""
        if not self.spec.multiplied:
            return None
        kind = vec(I64, self.lanes)
        number = f.splat(col, self.lanes) + f.iota(kind)
        quotient, _ = f.divide_nonzero(
            "udiv", number, f.splat(self.windows.word(f, geometry, "multiplier"), self.lanes)
        )
        return quotient


@cache
def _channelwise_kernel(isa: Isa, spec: _Spec) -> Emitted:
    """Arguments: x, w (x again for pooling), out, extras..., what is outside of bytes, integers.

    Scratch: a neutral row, then pointers.
    """
    module = Module(isa)
    emitter = _Emitter(module, spec)
    first = 3 + len(spec.finish.extras) + spec.widens
    with module.kernel(
        "depthwise" if spec.kind == "conv" else f"pool_{spec.kind}", first + len(_NAMES)
    ) as k:
        geometry, words = emitter.windows.fill(k, first)
        table, counts = emitter.windows.table(k), k.alloca(I32, 16)
        outside = k.scratch()
        row_bytes = (words["pixel_bytes"] + 127) & -64
        if spec.widens:
            neutral = k.splat(k.load(emitter.stored, k.slot(first - 1)), emitter.lanes)
        else:
            neutral = encode(k, spec.dtype, emitter.neutral(k, emitter.vector))
        with k.loop(0, words["pixel_bytes"], emitter.lanes * spec.dtype.itemsize) as loop:
            k.store(neutral, k.offset(outside, loop.index))
            loop.next()
        listed = k.offset(outside, row_bytes)
        with k.loop(k.begin, k.end) as chunk:
            start = chunk.index * words["block_pixels"]
            end = k.smin(start + words["block_pixels"], words["pixels"])
            with k.loop(start, end, _ROWS) as loop:
                _pixels(
                    k,
                    emitter,
                    (geometry, words),
                    (table, counts, outside, listed),
                    (loop.index, end),
                )
                loop.next()
            chunk.next()
    return finish(module)


def _pixels(
    k: Kernel,
    emitter: _Emitter,
    geometry: tuple[Value, dict[str, Value]],
    buffers: tuple[Value, Value, Value, Value],
    span: tuple[Value, Value],
) -> None:
    """Emit one tile, from span[0] on."""
    array, words = geometry
    table, counts, outside, listed = buffers
    pixel, end = span
    count = k.smin(end - pixel, _ROWS)
    x, w, out = (k.slot(i) for i in range(3))
    extras = [k.slot(3 + i) for i in range(len(emitter.spec.finish.extras))]

    def edge() -> None:
        k.call(emitter.windows.locator, array, table, pixel, k.i64(_ROWS), count)
        k.call(emitter.listing, array, table, listed, counts, outside, x)
        k.call(emitter.edge, x, w, array, listed, counts, out, *extras, pixel, count)

    if emitter.inner is None:
        edge()
        return
    inside, base = emitter.windows.inside(k, words, pixel, x, _ROWS)
    with k.if_else(inside & count.eq(_ROWS)) as choice:
        with choice.then():
            k.call(emitter.inner, base, w, array, listed, counts, out, *extras, pixel, count)
        with choice.otherwise():
            edge()


def launch_channelwise(
    ctx: LoweringContext,
    isa: Isa,
    kind: str,
    g: Window,
    slots: Sequence[SlotArg],
    plan: Finish,
    *,
    counted: tuple[Dim, ...] | None = None,
) -> None:
    """Emit the launch of a depthwise convolution or a pool.

    Args:
        ctx: where to.
        isa: the target.
        kind: `conv`, `max` or `avg`.
        g: its windows.
        slots: x, weights [taps, columns] (x again for a pool), result, operands of the epilogue, and for bytes what
            is read outside of x.
        plan: the epilogue.
        counted: per axis where the padding ends that an average counts; None when it counts none.
    """
    # Convolutions have widened x already, but for bytes; a pool stores what it reads.
    dtype = g.quantized or (plan.dtype if kind == "conv" else plan.result)
    taps, dilation, stride = g.kernel[-1], g.dilations[-1], g.strides[-1]
    short = taps <= _WIDEST_RUN and stride <= 4 and dilation <= 4
    spec = _Spec(
        kind,
        dtype,
        plan,
        g.is_volume,
        (taps, dilation, stride) if short else None,
        g.columns != g.channels,
        counted is not None,
    )
    words = window_words(g, dtype.itemsize)
    count = prod(g.kernel)
    width = g.columns if isinstance(g.columns, int) else _UNKNOWN_COLUMNS
    pixels = max(1, _OPERATIONS_PER_CHUNK // max(1, count * width * _ROWS)) * _ROWS
    blocks = ceildiv(g.pixels, pixels)
    highs: tuple[Dim, ...] = (*(1 for _ in range(3 - len(g.kernel))), *(counted or g.space))
    own: list[Dim] = [
        1 if g.columns == g.channels else int(g.columns) // max(1, int(g.channels)),
        dilation * g.channels * dtype.itemsize,
        blocks,
        pixels,
    ]
    line = g.columns * spec.compute.itemsize if spec.widens else g.columns * dtype.itemsize
    words.update(zip(_OWN_WORDS, [*own, line, *highs], strict=True))
    args: list[Arg] = [*slots, *(DimArg(words[name]) for name in _NAMES)]
    scratch = g.channels * dtype.itemsize + 256 + count * _ROWS * 8
    ctx.launch(_channelwise_kernel(isa, spec), args, blocks, scratch=scratch)
