# SPDX-License-Identifier: Apache-2.0
"""Channels-last convolution as a matrix product that reads its left operand through pointers.

    out[p, o] = epilogue(sum_{tap, c} x[pixel(p, tap), c] * w[tap, c, o]),   p = (n, z, y, x)
    flattened

`x` is [N, *spatial, C]. Weights lie in panels of `width` columns, [taps, C / groups, width], the
last one as many whole vectors wide as it needs. The micro-kernel keeps R pixels x V vectors of
columns in registers; for every tap it makes R pointers, to the pixel's input row or, where the tap
is in the padding, to a row of zeros, then walks the channels as a matrix product does: V loads of
weights, R broadcasts, R x V FMAs per channel. Nothing is copied.

A tile is any R consecutive output pixels, also across rows and images, so small maps fill the
registers as well. The pointer arithmetic of a tap is a few vector instructions beside C / groups x
R x V FMAs. A tile that lies in one output row and touches no padding does without it: there the
taps of a kernel row are one run of memory, and pixels are a fixed distance apart. Each element is
one chain of FMAs over (tap, channel) in order: neither chunks, tiles nor threads change a bit of
it.

Windows that are spread over a larger result (the phases of a transposed convolution) take the row
numbers of a tile from a table. All extents, strides and the kernel size are arguments; a kernel is
specialised on its epilogue, on which panel widths occur, and on the channel count when that is
below 8 (the loop over channels is then unrolled).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.conv_ops import PackedConv, packed_columns
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.products import multiply_add, spread_factor
from rlx.backends.cpu.kernels.tile import Finish, Place, TileFinisher, plan_finish
from rlx.backends.cpu.kernels.window import (
    SPREAD_WORDS,
    WINDOW_WORDS,
    RowPointers,
    Spread,
    Taps,
    Walk,
    Window,
    WindowEmitter,
    divide,
    window_words,
)
from rlx.backends.cpu.lltypes import I8, I32, I64, PTR, Type, scalar_type, vec
from rlx.backends.cpu.lowering import lowering, split_epilogue
from rlx.backends.cpu.ops import PRODUCT_DTYPES
from rlx.backends.cpu.quantized_ops import PackedQuantizedConv
from rlx.base.dims import Dim, ceildiv
from rlx.base.dtypes import DType
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext

__all__ = ["conv_width", "launch_conv", "tile_rows"]

_UNROLLED_DEPTH = 8
"""Channel counts below this are compiled into the kernel."""
_UNROLLED_RUN = 32
"""Runs (kernel width x channels) of few channels up to this long are compiled into the kernel."""
_ROW_MULTIPLE = 24
"""Pixels per chunk are a multiple of this: every tile height divides it."""
_FLOPS_PER_CHUNK = 6_000_000
_LEAST_ROWS = 96
"""Pixels that a panel of weights should at least serve once it is in the cache."""


def conv_width(isa: Isa) -> int:
    """Return how many vectors of columns a panel has: 4 with 32 registers, 2 with 16."""
    return 4 if isa.vector_registers == 32 else 2


def tile_rows(isa: Isa, vectors: int) -> int:
    """Return how many pixels a tile of that many vectors keeps in registers."""
    budget = 24 if isa.vector_registers == 32 else 12
    return min(12, budget // vectors)


@dataclass(frozen=True)
class _Spec:
    """What a convolution kernel is specialised on.

    Attributes:
        finish: dtypes and epilogue.
        full: whole panels occur.
        tail: vectors of the last, partial panel; 0 when there is none.
        depth: channels per group when they are few, None when they are an argument.
        pointwise: pixels are read where they are written.
        volume: three spatial axes.
        spread: the result's rows come from a table.
        runs: the taps of a kernel row are contiguous in memory, so tiles without padding can be
            read in runs.
        run: elements of such a run when it is compiled in, else None.
        pitch: elements from one pixel of a tile to the next when that is compiled in, else None.
        quantized: dtype of x where it is i8 or u8: then four channels are one element, an i32.
    """

    finish: Finish
    full: bool
    tail: int
    depth: int | None
    pointwise: bool
    volume: bool
    spread: bool
    runs: bool
    run: int | None
    pitch: int | None
    quantized: DType | None


_OWN_WORDS = [
    "depth",
    "group_columns",
    "group_panels",
    "run_length",
    "blocks",
    "column_groups",
    "block_pixels",
    "group_bytes",
    "group_depth_bytes",
]


def _names(*, spread: bool) -> list[str]:
    return [*WINDOW_WORDS, *_OWN_WORDS, *(SPREAD_WORDS if spread else ())]


class _Emitter:
    """Emits the functions of one kernel."""

    def __init__(self, module: Module, spec: _Spec) -> None:
        self.module = module
        self.spec = spec
        dtype = spec.finish.dtype
        self.lanes = module.isa.lanes(dtype)
        self.scalar: Type = scalar_type(dtype)
        self.vector: Type = vec(self.scalar, self.lanes)
        self.vectors = conv_width(module.isa)
        self.windows = WindowEmitter(
            module, _names(spread=spec.spread), volume=spec.volume, spread=spec.spread
        )
        self.finisher = TileFinisher(module, spec.finish, spread=spec.spread)
        self.micros: dict[tuple[int, int, bool], Function] = {}
        self.inner: dict[tuple[int, bool], Function] = {}

    def sizes(self, vectors: int) -> list[int]:
        """Return the tile heights for that many vectors; a rest takes the next larger one."""
        rows = tile_rows(self.module.isa, vectors)
        return [*(s for s in (2, 4, 8) if s < rows), rows]

    def emit(self, vectors: int, *, masked: bool) -> None:
        """Emit all micro-kernels of a panel shape."""
        self.finisher.prepare(vectors, masked)
        least = 1
        for rows in self.sizes(vectors):
            self.micros[vectors, rows, masked] = self._micro(vectors, rows, least, masked)
            least = rows + 1
        if self.spec.runs:
            rows = tile_rows(self.module.isa, vectors)
            self.inner[vectors, masked] = self._micro(vectors, rows, rows, masked, inner=True)

    def _micro(
        self, vectors: int, rows: int, least: int, masked: bool, *, inner: bool = False
    ) -> Function:
        params = [(name, PTR) for name in ("w", "geometry", "table", "zero", "x", "out")]
        params += [*self.finisher.pointers]
        params += [(name, I64) for name in ("row", "count", "n", "col", "limit")]
        name = f"{'run' if inner else 'tile'}{rows}x{vectors}{'t' if masked else ''}"
        with self.module.function(name, params) as f:
            w, geometry, table, zero, x, out, *rest = f.args
            extras, place = rest[:-5], rest[-5:]
            row, count, n, col, limit = place
            if inner:
                acc = self._runs(f, w, geometry, x, rows, vectors)
            elif self.spec.pointwise:
                acc = self._pointwise(f, w, geometry, x, (row, count), rows, vectors)
            else:
                acc = self._windows(f, w, geometry, (table, zero, x), rows, vectors)
            tile = [acc[r * vectors : (r + 1) * vectors] for r in range(rows)]
            numbers = self.windows.rows(f, table) if self.spec.spread else None
            where = Place(row, count, n, col, limit, numbers)
            self.finisher.tile(f, tile, out, extras, where, masked=masked, certain=least)
        return f

    def _pointwise(
        self,
        f: Function,
        w: Value,
        geometry: Value,
        x: Value,
        place: tuple[Value, Value],
        rows: int,
        vectors: int,
    ) -> list[Value]:
        row, count = place
        pitch = self.windows.word(f, geometry, "pixel_bytes")
        base = f.offset(x, row * pitch)
        pointers = [
            f.offset(base, f.smin(count - 1, r) * pitch) if r else base for r in range(rows)
        ]
        zero = f.const(0, self.vector)
        depth = self._depth(f, geometry)
        acc, _ = self._channels(
            f, depth, w, RowPointers.listed(pointers), [zero] * (rows * vectors)
        )
        return acc

    def _runs(
        self, f: Function, w: Value, geometry: Value, x: Value, rows: int, vectors: int
    ) -> list[Value]:
        """A tile without padding: x is the first pixel at tap 0."""
        spec = self.spec
        step, pitch = (self.windows.word(f, geometry, name) for name in ("run_step", "pitch"))
        multiples = {odd: pitch * odd for odd in range(1, rows, 2)} if spec.pitch is None else {}
        acc = [f.const(0, self.vector)] * (rows * vectors)
        with f.loop(0, self.windows.word(f, geometry, "runs"), carry=[*acc, w, x]) as loop:
            *acc, weights, base = loop.carry
            length = (
                spec.run if spec.run is not None else self.windows.word(f, geometry, "run_length")
            )
            if spec.pitch is None:
                pointers = RowPointers.spaced(base, multiples, rows)
            else:
                pointers = RowPointers.placed(base, spec.pitch, rows)
            acc, weights = self._channels(f, length, weights, pointers, acc)
            loop.next(*acc, weights, f.offset(base, step))
        return loop.out[: rows * vectors]

    def _windows(
        self,
        f: Function,
        w: Value,
        geometry: Value,
        sources: tuple[Value, Value, Value],
        rows: int,
        vectors: int,
    ) -> list[Value]:
        table, zero, x = sources
        taps = Taps(self.windows, f, geometry, table, (x, zero), 8 if rows <= 8 else 16)
        spread = f.alloca(taps.kind)
        channels = self._depth(f, geometry)
        acc = [f.const(0, self.vector)] * (rows * vectors)
        with f.loop(
            0, self.windows.word(f, geometry, "taps"), carry=[*acc, w, *taps.start().values]
        ) as loop:
            acc, weights = loop.carry[: rows * vectors], loop.carry[rows * vectors]
            walk = Walk.of(loop.carry[rows * vectors + 1 :])
            f.store(taps.addresses(walk, taps.within(walk)), spread)
            pointers = [f.to_pointer(f.load(I64, spread, r)) for r in range(rows)]
            acc, weights = self._channels(f, channels, weights, RowPointers.listed(pointers), acc)
            loop.next(*acc, weights, *taps.next(walk).values)
        return loop.out[: rows * vectors]

    def _depth(self, f: Function, geometry: Value) -> Value | int:
        return (
            self.spec.depth
            if self.spec.depth is not None
            else self.windows.word(f, geometry, "depth")
        )

    def _channels(
        self, f: Function, depth: Value | int, w: Value, rows: RowPointers, acc: Sequence[Value]
    ) -> tuple[list[Value], Value]:
        """Add `depth` products per accumulator; return accumulators and the next weights."""
        line = len(acc) // rows.count * self.lanes
        current = list(acc)
        # A body of many rows must stay short: the scheduler would move its loads up until registers
        # spill.
        unroll = 4 if rows.count <= 6 else 1
        if isinstance(depth, int) and (unroll > 1 or depth < 4):
            at = rows.at(f, f.i64(0), self.scalar)
            for c in range(depth):
                self._step(f, w, at, c, c * line, current)
            return current, f.offset(w, depth * line, self.scalar)
        end = f.i64(depth) if isinstance(depth, int) else depth
        main = end & -unroll if unroll > 1 else end
        for low, high, step in ((f.i64(0), main, unroll), (main, end, 1))[
            : 1 if unroll == 1 else 2
        ]:
            with f.loop(low, high, step, carry=current) as loop:
                current = list(loop.carry)
                base = f.offset(w, loop.index * line, self.scalar)
                at = rows.at(f, loop.index, self.scalar)
                for u in range(step):
                    self._step(f, base, at, u, u * line, current)
                loop.next(*current)
            current = list(loop.out)
        return current, f.offset(w, end * line, self.scalar)

    def _step(
        self,
        f: Function,
        w: Value,
        pointers: Sequence[Value],
        channel: int,
        at: int,
        acc: list[Value],
    ) -> None:
        vectors = len(acc) // len(pointers)
        columns = [f.load(self.vector, w, at + j * self.lanes) for j in range(vectors)]
        for r, pointer in enumerate(pointers):
            value, quantized = f.load(self.scalar, pointer, channel), self.spec.quantized
            factor = spread_factor(f, value, self.lanes, quantized)
            for j in range(vectors):
                acc[r * vectors + j] = multiply_add(
                    f, factor, columns[j], acc[r * vectors + j], quantized=quantized is not None
                )


@cache
def _conv_kernel(isa: Isa, spec: _Spec) -> Emitted:
    """Arguments: x, w, out, extras..., (zero point,) then the integers of `_names`.

    Scratch: a row of zeros, or of the zero point.
    """
    module = Module(isa)
    emitter = _Emitter(module, spec)
    if spec.full:
        emitter.emit(emitter.vectors, masked=False)
    if spec.tail:
        emitter.emit(spec.tail, masked=True)
    extras = 3 + len(spec.finish.extras)
    first = extras + (spec.quantized is not None)
    if not spec.pointwise:
        _ = emitter.windows.locator
    with module.kernel("conv", first + len(emitter.windows.names)) as k:
        geometry, words = emitter.windows.fill(k, first)
        zero = k.scratch()
        if not spec.pointwise:
            byte = k.zext(k.load(I8, k.slot(extras)), I32) if spec.quantized else 0
            k.memset(zero, byte, words["group_depth_bytes"])
        work = _Chunk(k, emitter, geometry, words, zero)
        with k.loop(k.begin, k.end) as chunk:
            work.emit(chunk.index)
            chunk.next()
    return finish(module)


class _Chunk:
    """The loops of one chunk: panels of a column group, tiles of a block of pixels."""

    def __init__(
        self, k: Kernel, emitter: _Emitter, geometry: Value, words: dict[str, Value], zero: Value
    ) -> None:
        self.k = k
        self.emitter = emitter
        self.geometry = geometry
        self.words = words
        self.zero = zero
        self.table = emitter.windows.table(k)

    def emit(self, index: Value) -> None:
        """Emit a chunk: pixel blocks vary fastest, then column groups, then channel groups."""
        k, words, emitter = self.k, self.words, self.emitter
        rest, block = divide(k, index, words["blocks"])
        group, part = divide(k, rest, words["column_groups"])
        first = block * words["block_pixels"]
        last = k.smin(first + words["block_pixels"], words["pixels"])
        panels, groups = words["group_panels"], words["column_groups"]
        low, _ = divide(k, panels * part, groups)
        high, _ = divide(k, panels * (part + 1), groups)
        width = emitter.vectors * emitter.lanes
        whole, _ = divide(k, words["group_columns"], k.i64(width))
        depth = words["taps"] * words["depth"]
        x = k.offset(k.slot(0), group * words["group_depth_bytes"])
        w = k.offset(k.slot(1), group * words["group_bytes"])
        column = group * words["group_columns"]
        if emitter.spec.full:
            with k.loop(low, k.smin(high, whole)) as loop:
                at = loop.index * width
                panel = k.offset(w, at * depth, emitter.scalar)
                self._tiles(
                    (first, last),
                    (x, panel),
                    column + at,
                    k.i64(width),
                    emitter.vectors,
                    masked=False,
                )
                loop.next()
        if emitter.spec.tail:
            with k.if_(high > whole):
                at = whole * width
                panel = k.offset(w, at * depth, emitter.scalar)
                limit = words["group_columns"] - at
                self._tiles(
                    (first, last), (x, panel), column + at, limit, emitter.spec.tail, masked=True
                )

    def _tiles(
        self,
        pixels: tuple[Value, Value],
        sources: tuple[Value, Value],
        column: Value,
        limit: Value,
        vectors: int,
        *,
        masked: bool,
    ) -> None:
        k = self.k
        first, last = pixels
        sizes = self.emitter.sizes(vectors)
        rows = sizes[-1]
        whole, rest = divide(k, last - first, k.i64(rows))
        end = first + whole * rows

        def call(micro: Function, x: Value, pixel: Value, count: Value) -> None:
            extras = [k.slot(3 + i) for i in range(len(self.emitter.spec.finish.extras))]
            place = (pixel, count, self.words["columns"], column, limit)
            k.call(
                micro,
                sources[1],
                self.geometry,
                self.table,
                self.zero,
                x,
                k.slot(2),
                *extras,
                *place,
            )

        def run(pixel: Value, size: int, count: Value) -> None:
            if not self.emitter.spec.pointwise:
                k.call(
                    self.emitter.windows.locator,
                    self.geometry,
                    self.table,
                    pixel,
                    k.i64(size),
                    count,
                )
            call(self.emitter.micros[vectors, size, masked], sources[0], pixel, count)

        with k.loop(first, end, rows) as loop:
            pixel = loop.index
            if self.emitter.spec.runs:
                inside, base = self.emitter.windows.inside(k, self.words, pixel, sources[0], rows)
                with k.if_else(inside) as choice:
                    with choice.then():
                        call(self.emitter.inner[vectors, masked], base, pixel, k.i64(rows))
                    with choice.otherwise():
                        run(pixel, rows, k.i64(rows))
            else:
                run(pixel, rows, k.i64(rows))
            loop.next()
        below = 0
        for size in sizes:
            with k.if_((rest > below) & (rest <= size)):
                run(end, size, rest)
            below = size


def _chunking(depth: int, columns: int, width: int) -> tuple[int, int]:
    """Return (pixels per chunk, column groups) for a product of that depth."""
    panels = max(1, -(-columns // width))
    per_pixel = 2 * max(depth, 1) * min(width, max(columns, 1))
    rows = _FLOPS_PER_CHUNK // (per_pixel * panels)
    groups = 1
    if rows < _LEAST_ROWS:
        together = max(1, _FLOPS_PER_CHUNK // (per_pixel * _LEAST_ROWS))
        groups = -(-panels // min(together, panels))
        rows = _LEAST_ROWS
    return min(rows // _ROW_MULTIPLE, 256) * _ROW_MULTIPLE, groups


def launch_conv(
    ctx: LoweringContext,
    isa: Isa,
    g: Window,
    groups: int,
    slots: Sequence[SlotArg],
    plan: Finish,
    spread: Spread | None = None,
) -> None:
    """Emit the launch of a convolution.

    Args:
        ctx: where to.
        isa: the target.
        g: its windows.
        groups: channel groups.
        slots: x, packed weights, result, operands of the epilogue; the zero point where x is quantised.
        plan: dtype of the sums and the epilogue.
        spread: where the windows are in the result, when they are not all of its rows.
    """
    dtype = plan.dtype
    lanes = isa.lanes(dtype)
    width = conv_width(isa) * lanes
    columns, depth = int(g.columns) // groups, int(g.channels) // groups
    whole, rest = divmod(columns, width)
    pointwise = g.is_pointwise and spread is None
    few, row = depth < _UNROLLED_DEPTH, g.kernel[-1]
    contiguous = row == 1 or (g.dilations[-1] == 1 and groups == 1)
    runs = contiguous and not (pointwise or g.is_volume or spread is not None)
    unrolled = runs and few and row * depth <= _UNROLLED_RUN
    spec = _Spec(
        plan,
        whole > 0,
        -(-rest // lanes),
        depth if few else None,
        pointwise,
        g.is_volume,
        spread is not None,
        runs,
        row * depth if unrolled else None,
        g.strides[-1] * int(g.channels) if unrolled else None,
        g.quantized,
    )
    taps = prod(g.kernel)
    words = window_words(g, dtype.itemsize, spread)
    rows, column_groups = _chunking(depth * taps, columns, width)
    blocks = ceildiv(g.pixels, rows)
    group_bytes = depth * taps * packed_columns(columns, lanes, width) * dtype.itemsize
    own = (
        depth,
        columns,
        -(-columns // width),
        row * depth,
        blocks,
        column_groups,
        rows,
        group_bytes,
    )
    words |= dict(zip(_OWN_WORDS, (*own, depth * dtype.itemsize), strict=True))
    args: list[Arg] = [*slots, *(DimArg(words[name]) for name in _names(spread=spread is not None))]
    ctx.launch(
        _conv_kernel(isa, spec),
        args,
        blocks * column_groups * groups,
        scratch=max(depth * dtype.itemsize, 64),
    )


@lowering(PackedConv)
def lower_packed_conv(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Weights in panels, x channels-last, any dtype of `PRODUCT_DTYPES`."""
    x = node.operands[0]
    assert x is not None
    channels = x.type.shape[-1]
    if x.type.dtype not in PRODUCT_DTYPES or not isinstance(channels, int):
        return False
    return _lower(node, ctx, isa, x.type.dtype, channels)


@lowering(PackedQuantizedConv)
def lower_quantized_conv(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """i8 weights in panels of quads, bytes channels-last; sums in i32."""
    x = node.operands[0]
    assert x is not None
    return _lower(node, ctx, isa, DType.I32, x.type.shape[-1] // 4, x.type.dtype)


def _lower(
    node: Node,
    ctx: LoweringContext,
    isa: Isa,
    dtype: DType,
    channels: Dim,
    quantized: DType | None = None,
) -> bool | None:
    op, operands, body, extras = split_epilogue(node)
    assert isinstance(op, PackedConv | PackedQuantizedConv)
    x, w, *zero = operands
    assert x is not None
    assert w is not None
    result = node.result.type
    plan = plan_finish(dtype, result.shape, result.dtype, body, extras)
    if plan is None:
        return False
    before = tuple(b for b, _ in op.pads)
    window = (op.kernel, op.strides, op.dilations, before)
    shape, out = x.type.shape, result.shape
    g = Window(shape[0], shape[1:-1], out[1:-1], channels, op.columns, *window, quantized)
    slots = [
        SlotArg(ctx.slot(x)),
        SlotArg(ctx.slot(w)),
        SlotArg(ctx.slot(node.result), writes=True),
    ]
    slots += [SlotArg(ctx.slot(e)) for e in (*extras, *zero) if e is not None]
    launch_conv(ctx, isa, g, op.groups, slots, plan)
    return None
