# SPDX-License-Identifier: Apache-2.0
"""Channels-last convolution as a matrix product that reads its left operand through pointers.

    out[p, o] = epilogue(sum_{tap, c} x[pixel(p, tap), c] * w[tap, c, o]),   p = (n, z, y, x) flattened

`x` is [N, *spatial, C]. Weights lie in panels of `width` columns, [taps, C / groups, width], the last one as many
whole vectors wide as it needs. The micro-kernel keeps R pixels x V vectors of columns in registers; for every tap it
makes R pointers, to the pixel's input row or, where the tap is in the padding, to a row of zeros, then walks the
channels as a matrix product does: V loads of weights, R broadcasts, R x V FMAs per channel. Nothing is copied.

A tile is any R consecutive output pixels, also across rows and images, so small maps fill the registers as well. The
pointer arithmetic of a tap is a few vector instructions beside C / groups x R x V FMAs. A tile that lies in one output
row and touches no padding does without it: there the taps of a kernel row are one run of memory, and pixels are a
fixed distance apart. Each element is one chain of FMAs over (tap, channel) in order: neither chunks, tiles nor threads
change a bit of it.

All extents, strides and the kernel size are arguments; a kernel is specialised on its epilogue, on which panel widths
occur, and on the channel count when that is below 8 (the loop over channels is then unrolled).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.conv_ops import PackedConv, packed_columns
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.tile import Finish, TileFinisher, plan_finish
from rlx.backends.cpu.lltypes import I32, I64, PTR, Type, scalar_type, vec
from rlx.backends.cpu.lowering import lowering, split_epilogue
from rlx.base.dims import Dim, ceildiv, product
from rlx.base.dtypes import DType
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext

__all__ = ["Geometry", "conv_width", "launch_conv", "tile_rows"]

_UNROLLED_DEPTH = 8
"""Channel counts below this are compiled into the kernel."""
_UNROLLED_RUN = 32
"""Runs (kernel width x channels) of few channels up to this many elements are compiled into the kernel."""
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
        spatial: 1 when pixels are read where they are written (kernel 1, stride 1, no padding), 2 for images (and
            lines), 3 for volumes.
        runs: the taps of a kernel row are contiguous in memory, so tiles without padding can be read in runs.
        run: elements of such a run when it is unrolled, else None.
        pitch: elements from one pixel of a tile to the next when that is compiled in, else None.
    """

    finish: Finish
    full: bool
    tail: int
    depth: int | None
    spatial: int
    runs: bool = False
    run: int | None = None
    pitch: int | None = None


# The integers a micro-kernel needs, in the order of the kernel's extent arguments; offsets and jumps are in bytes.
_GEOMETRY = (
    "taps depth pixels columns group_columns pixel_bytes group_panels depth_in height width_in "
    "out_depth out_height out_width stride_z stride_y stride_x pad_z pad_y pad_x "
    "dilation_z dilation_y dilation_x span_y span_x step_x jump_y jump_z row_bytes plane_bytes image_bytes "
    "runs run_length run_step pitch reach_y reach_x "
    "blocks column_groups block_pixels group_bytes group_depth_bytes"
).split()
_WORD = {name: index for index, name in enumerate(_GEOMETRY)}


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
        self.finisher = TileFinisher(module, spec.finish)
        self.micros: dict[tuple[int, int, bool], Function] = {}
        self.inner: dict[tuple[int, bool], Function] = {}
        self.locator: Function | None = None

    def word(self, f: Function, geometry: Value, name: str) -> Value:
        """Load one of the integers of the geometry."""
        return f.load(I64, geometry, _WORD[name])

    def sizes(self, vectors: int) -> list[int]:
        """Return the tile heights for a panel of that many vectors, ascending; a rest takes the next larger one."""
        rows = tile_rows(self.module.isa, vectors)
        return [*(s for s in (2, 4, 8) if s < rows), rows]

    def emit(self, vectors: int, *, masked: bool) -> None:
        """Emit all micro-kernels of a panel shape."""
        self.finisher.prepare(vectors, masked)
        if self.spec.spatial > 1 and self.locator is None:
            self.locator = self._locator()
        least = 1
        for rows in self.sizes(vectors):
            self.micros[vectors, rows, masked] = self._micro(vectors, rows, least, masked)
            least = rows + 1
        if self.spec.runs:
            rows = tile_rows(self.module.isa, vectors)
            self.inner[vectors, masked] = self._micro(vectors, rows, rows, masked, inner=True)

    # Where a tile's pixels lie. The table holds, per row of the tile: z, y, x of tap 0 (may lie in the padding) as
    # three arrays of i32, then the byte offset of that tap from the start of x as i64.

    def _locator(self) -> Function:
        params = [("geometry", PTR), ("table", PTR), ("pixel", I64), ("rows", I64), ("count", I64)]
        with self.module.function("locate", params) as f:
            geometry, table, pixel, rows, count = f.args

            names = "out_width out_height out_depth image_bytes plane_bytes row_bytes pixel_bytes".split()
            names += [f"{what}_{axis}" for what in ("stride", "pad") for axis in "zyx"]
            word = {name: self.word(f, geometry, name) for name in names}
            width, height, depth = word["out_width"], word["out_height"], word["out_depth"]
            line, x = _divide(f, pixel, width)
            plane, y = _divide(f, line, height)
            image, z = _divide(f, plane, depth)
            with f.loop(0, rows, carry=[image, z, y, x]) as loop:
                image, z, y, x = loop.carry
                iz, iy, ix = (
                    v * word[f"stride_{axis}"] - word[f"pad_{axis}"] for v, axis in zip((z, y, x), "zyx", strict=True)
                )
                offset = (
                    image * word["image_bytes"]
                    + iz * word["plane_bytes"]
                    + iy * word["row_bytes"]
                    + ix * word["pixel_bytes"]
                )
                at = loop.index
                for array, value in enumerate((iz, iy, ix)):
                    f.store(f.trunc(value, I32), f.offset(table, array * 64), at)
                f.store(offset, f.offset(table, 192), at)
                # Rows after the last valid one repeat it: they are computed and dropped.
                last = at + 1 >= count
                x1 = x + 1
                wrap_x = x1.eq(width)
                y1 = f.select(wrap_x, y + 1, y)
                wrap_y = y1.eq(height)
                z1 = f.select(wrap_y, z + 1, z)
                wrap_z = z1.eq(depth)
                loop.next(
                    f.select(last, image, f.select(wrap_z, image + 1, image)),
                    f.select(last, z, f.select(wrap_z, 0, z1)),
                    f.select(last, y, f.select(wrap_y, 0, y1)),
                    f.select(last, x, f.select(wrap_x, 0, x1)),
                )
        return f

    # Micro-kernels

    def _micro(self, vectors: int, rows: int, least: int, masked: bool, *, inner: bool = False) -> Function:
        params = [(name, PTR) for name in ("w", "geometry", "table", "zero", "x", "out")]
        params += [*self.finisher.pointers]
        params += [(name, I64) for name in ("row", "count", "n", "col", "limit")]
        name = f"{'run' if inner else 'tile'}{rows}x{vectors}{'t' if masked else ''}"
        with self.module.function(name, params) as f:
            w, geometry, table, zero, x, out, *rest = f.args
            extras, place = rest[:-5], rest[-5:]
            if inner:
                acc = self._runs(f, w, geometry, x, rows, vectors)
            elif self.spec.spatial == 1:
                acc = self._pointwise(f, w, geometry, x, place, rows, vectors)
            else:
                acc = self._windows(f, w, geometry, (table, zero, x), rows, vectors)
            tile = [acc[r * vectors : (r + 1) * vectors] for r in range(rows)]
            row, count, n, col, limit = place
            self.finisher.tile(
                f, tile, out, extras, (row, count, n, col, limit), masked=masked, certain=least
            )
        return f

    def _pointwise(
        self, f: Function, w: Value, geometry: Value, x: Value, place: Sequence[Value], rows: int, vectors: int
    ) -> list[Value]:
        row, count = place[0], place[1]
        pitch = self.word(f, geometry, "pixel_bytes")
        base = f.offset(x, row * pitch)
        pointers = [f.offset(base, f.smin(count - 1, r) * pitch) if r else base for r in range(rows)]
        zero = f.const(0.0, self.vector)
        acc, _ = self._channels(f, self._depth(f, geometry), w, _listed(f, pointers), [zero] * (rows * vectors))
        return acc

    def _runs(self, f: Function, w: Value, geometry: Value, x: Value, rows: int, vectors: int) -> list[Value]:
        """A tile without padding: x is the first pixel at tap 0."""
        spec = self.spec
        step, pitch = self.word(f, geometry, "run_step"), self.word(f, geometry, "pitch")
        multiples = {odd: pitch * odd for odd in range(1, rows, 2)} if spec.pitch is None else {}
        acc = [f.const(0.0, self.vector)] * (rows * vectors)
        with f.loop(0, self.word(f, geometry, "runs"), carry=[*acc, w, x]) as loop:
            *acc, weights, base = loop.carry
            length = spec.run if spec.run is not None else self.word(f, geometry, "run_length")
            spaced = _spaced(f, base, multiples, rows) if spec.pitch is None else _placed(f, base, spec.pitch, rows)
            acc, weights = self._channels(f, length, weights, spaced, acc)
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
        table, zero_row, x = sources
        lanes = 8 if rows <= 8 else 16
        volume = self.spec.spatial == 3

        def word(name: str) -> Value:
            return self.word(f, geometry, name)

        def narrow(name: str) -> Value:
            return f.trunc(word(name), I32)

        index = vec(I32, lanes)
        places = [f.load(index, f.offset(table, array * 64)) for array in range(3)]
        bases = f.load(vec(I64, lanes), f.offset(table, 192)) + f.splat(f.to_address(x), lanes)
        zeros = f.splat(f.to_address(zero_row), lanes)
        spread = f.alloca(vec(I64, lanes))
        extents = [f.splat(narrow(name), lanes) for name in ("depth_in", "height", "width_in")]
        dilation = [narrow(f"dilation_{axis}") for axis in "zyx"]
        span_x, span_y = narrow("span_x"), narrow("span_y")
        step_x, jump_y, jump_z = word("step_x"), word("jump_y"), word("jump_z")
        none, start = f.i32(0), f.i64(0)
        channels = self._depth(f, geometry)
        acc = [f.const(0.0, self.vector)] * (rows * vectors)
        with f.loop(0, word("taps"), carry=[*acc, w, start, none, none, none]) as loop:
            *acc, weights, offset, dz, dy, dx = loop.carry
            inside = (places[1] + f.splat(dy, lanes)).ult(extents[1]) & (places[2] + f.splat(dx, lanes)).ult(extents[2])
            if volume:
                inside = inside & (places[0] + f.splat(dz, lanes)).ult(extents[0])
            f.store(f.select(inside, bases + f.splat(offset, lanes), zeros), spread)
            pointers = [f.to_pointer(f.load(I64, spread, r)) for r in range(rows)]
            acc, weights = self._channels(f, channels, weights, _listed(f, pointers), acc)
            dx = dx + dilation[2]
            wrap = dx.eq(span_x)
            dx = f.select(wrap, 0, dx)
            dy = f.select(wrap, dy + dilation[1], dy)
            offset = offset + step_x + f.select(wrap, jump_y, 0)
            if volume:
                wrap = dy.eq(span_y)
                dy = f.select(wrap, 0, dy)
                dz = f.select(wrap, dz + dilation[0], dz)
                offset = offset + f.select(wrap, jump_z, 0)
            loop.next(*acc, weights, offset, dz, dy, dx)
        return loop.out[: rows * vectors]

    def _depth(self, f: Function, geometry: Value) -> Value | int:
        return self.spec.depth if self.spec.depth is not None else self.word(f, geometry, "depth")

    def _channels(
        self, f: Function, depth: Value | int, w: Value, rows: _Rows, acc: Sequence[Value]
    ) -> tuple[list[Value], Value]:
        """Add `depth` products per accumulator; return the accumulators and where the weights go on."""
        line = len(acc) // rows.count * self.lanes
        current = list(acc)
        # A body of many rows must stay short: the scheduler would move its loads up until registers spill.
        unroll = 4 if rows.count <= 6 else 1
        if isinstance(depth, int) and (unroll > 1 or depth < 4):
            at = rows.at(f.i64(0), self.scalar)
            for c in range(depth):
                self._step(f, w, at, c, c * line, current)
            return current, f.offset(w, depth * line, self.scalar)
        end = f.i64(depth) if isinstance(depth, int) else depth
        main = end & -unroll if unroll > 1 else end
        for low, high, step in ((f.i64(0), main, unroll), (main, end, 1))[: 1 if unroll == 1 else 2]:
            with f.loop(low, high, step, carry=current) as loop:
                current = list(loop.carry)
                base = f.offset(w, loop.index * line, self.scalar)
                at = rows.at(loop.index, self.scalar)
                for u in range(step):
                    self._step(f, base, at, u, u * line, current)
                loop.next(*current)
            current = list(loop.out)
        return current, f.offset(w, end * line, self.scalar)

    def _step(
        self, f: Function, w: Value, pointers: Sequence[Value], channel: int, at: int, acc: list[Value]
    ) -> None:
        vectors = len(acc) // len(pointers)
        columns = [f.load(self.vector, w, at + j * self.lanes) for j in range(vectors)]
        for r, pointer in enumerate(pointers):
            factor = f.splat(f.load(self.scalar, pointer, channel), self.lanes)
            for j in range(vectors):
                acc[r * vectors + j] = f.fma(factor, columns[j], acc[r * vectors + j])


@dataclass(frozen=True)
class _Rows:
    """Where the rows of a tile's left operand are: `at(channel, scalar type)` gives a pointer per row."""

    count: int
    at: Callable[[Value, Type], list[Value]]


def _listed(f: Function, pointers: Sequence[Value]) -> _Rows:
    """Rows anywhere, one pointer each."""
    return _Rows(len(pointers), lambda c, kind: [p if c.const == 0 else f.offset(p, c, kind) for p in pointers])


def _placed(f: Function, base: Value, pitch: int, rows: int) -> _Rows:
    """Rows a fixed number of elements apart."""
    return _Rows(rows, lambda c, kind: [f.offset(f.offset(base, c, kind), r * pitch, kind) for r in range(rows)])


def _spaced(f: Function, base: Value, multiples: dict[int, Value], rows: int) -> _Rows:
    """Rows a run-time distance apart, of which the odd multiples are given.

    An even multiple is an odd one times a power of two, which the machine's address forms contain: all rows take one
    register for the base and half as many for the multiples, where a pointer for each would not fit.
    """

    def at(c: Value, kind: Type) -> list[Value]:
        first = f.offset(base, c, kind)
        out = [first]
        for r in range(1, rows):
            twos = (r & -r).bit_length() - 1
            out.append(f.offset(first, multiples[r >> twos].shl(twos)))
        return out

    return _Rows(rows, at)


def _divide(f: Function, a: Value, b: Value) -> tuple[Value, Value]:
    """Return (quotient, remainder) of extents; the divisor is at least 1 where this runs."""
    quotient = f.emit(I64, f"udiv i64 {a.text}, {b.text}")
    return quotient, a - quotient * b


@cache
def _conv_kernel(isa: Isa, spec: _Spec) -> Emitted:
    """Arguments: x, w, out, extras..., then the integers of `_GEOMETRY`. Scratch: a row of zeros."""
    module = Module(isa)
    emitter = _Emitter(module, spec)
    if spec.full:
        emitter.emit(emitter.vectors, masked=False)
    if spec.tail:
        emitter.emit(spec.tail, masked=True)
    count = len(spec.finish.extras)
    with module.kernel("conv", 3 + count + len(_GEOMETRY)) as k:
        geometry = k.alloca(I64, len(_GEOMETRY))
        words = {name: k.dim(3 + count + index) for index, name in enumerate(_GEOMETRY)}
        for index, name in enumerate(_GEOMETRY):
            k.store(words[name], geometry, index)
        zero = k.scratch()
        if spec.spatial > 1:
            k.memset(zero, 0, words["group_depth_bytes"])
        with k.loop(k.begin, k.end) as chunk:
            _Chunk(k, emitter, geometry, words, zero).emit(chunk.index)
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
        self.table = k.alloca(I64, 40)

    def emit(self, index: Value) -> None:
        """Emit the work of a chunk: blocks of pixels vary fastest, then column groups, then channel groups."""
        k, words, emitter = self.k, self.words, self.emitter
        rest, block = _divide(k, index, words["blocks"])
        group, part = _divide(k, rest, words["column_groups"])
        first = block * words["block_pixels"]
        last = k.smin(first + words["block_pixels"], words["pixels"])
        panels, groups = words["group_panels"], words["column_groups"]
        low, _ = _divide(k, panels * part, groups)
        high, _ = _divide(k, panels * (part + 1), groups)
        width = emitter.vectors * emitter.lanes
        whole, _ = _divide(k, words["group_columns"], k.i64(width))
        depth = words["taps"] * words["depth"]
        x = k.offset(k.slot(0), group * words["group_depth_bytes"])
        w = k.offset(k.slot(1), group * words["group_bytes"])
        column = group * words["group_columns"]
        if emitter.spec.full:
            with k.loop(low, k.smin(high, whole)) as loop:
                at = loop.index * width
                panel = k.offset(w, at * depth, emitter.scalar)
                self._tiles((first, last), (x, panel), column + at, k.i64(width), emitter.vectors, masked=False)
                loop.next()
        if emitter.spec.tail:
            with k.if_(high > whole):
                at = whole * width
                panel = k.offset(w, at * depth, emitter.scalar)
                limit = words["group_columns"] - at
                self._tiles((first, last), (x, panel), column + at, limit, emitter.spec.tail, masked=True)

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
        whole, rest = _divide(k, last - first, k.i64(rows))
        end = first + whole * rows

        def call(micro: Function, x: Value, pixel: Value, count: Value) -> None:
            extras = [k.slot(3 + i) for i in range(len(self.emitter.spec.finish.extras))]
            place = (pixel, count, self.words["columns"], column, limit)
            k.call(micro, sources[1], self.geometry, self.table, self.zero, x, k.slot(2), *extras, *place)

        def run(pixel: Value, size: int, count: Value) -> None:
            if self.emitter.locator is not None:
                k.call(self.emitter.locator, self.geometry, self.table, pixel, k.i64(size), count)
            call(self.emitter.micros[vectors, size, masked], sources[0], pixel, count)

        with k.loop(first, end, rows) as loop:
            pixel = loop.index
            if self.emitter.spec.runs:
                inside, base = self._inside(pixel, sources[0], rows)
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

    def _inside(self, pixel: Value, x: Value, rows: int) -> tuple[Value, Value]:
        """Return whether a whole tile lies in one output row and reads no padding, and where its tap 0 is."""
        k, words = self.k, self.words
        line, ox = _divide(k, pixel, words["out_width"])
        image, oy = _divide(k, line, words["out_height"])
        iy = oy * words["stride_y"] - words["pad_y"]
        ix = ox * words["stride_x"] - words["pad_x"]
        inside = (
            (ox + rows <= words["out_width"])
            & (ix >= 0)
            & (iy >= 0)
            & (ix + words["stride_x"] * (rows - 1) + words["reach_x"] <= words["width_in"])
            & (iy + words["reach_y"] <= words["height"])
        )
        offset = image * words["image_bytes"] + iy * words["row_bytes"] + ix * words["pixel_bytes"]
        return inside, k.offset(x, offset)


@dataclass(frozen=True)
class Geometry:
    """A channels-last convolution: extents of x [N, *spatial, C] and of the result, and its window.

    Spatial attributes have one entry per axis (1 to 3).
    """

    batch: Dim
    space: tuple[Dim, ...]
    out: tuple[Dim, ...]
    channels: int
    columns: int
    groups: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Dim, ...]

    @property
    def pointwise(self) -> bool:
        """Whether each pixel reads exactly the pixel where it is written."""
        same = all(k == 1 and s == 1 and b == 0 for k, s, b in zip(self.kernel, self.strides, self.before, strict=True))
        return same and self.space == self.out


def _three(values: Sequence[Dim], fill: Dim) -> tuple[Dim, Dim, Dim]:
    z, y, x = (*(fill for _ in range(3 - len(values))), *values)
    return z, y, x


def _words(g: Geometry, itemsize: int, isa: Isa, dtype: DType) -> dict[str, Dim]:
    lanes = isa.lanes(dtype)
    width = conv_width(isa) * lanes
    (d, h, w), (od, oh, ow) = _three(g.space, 1), _three(g.out, 1)
    (kz, ky, kx), (sz, sy, sx) = _three(g.kernel, 1), _three(g.strides, 1)
    (dz, dy, dx), (bz, by, bx) = _three(g.dilations, 1), _three(g.before, 0)
    del kz
    depth, columns = g.channels // g.groups, g.columns // g.groups
    pixels = product((g.batch, od, oh, ow))
    pixel = g.channels * itemsize
    span_y, span_x = ky * dy, kx * dx
    panels = -(-columns // width)
    rows, column_groups = _chunking(depth * prod(g.kernel), columns, width)
    return {
        "taps": prod(g.kernel),
        "depth": depth,
        "pixels": pixels,
        "columns": g.columns,
        "group_columns": columns,
        "pixel_bytes": pixel,
        "group_panels": panels,
        "depth_in": d,
        "height": h,
        "width_in": w,
        "out_depth": od,
        "out_height": oh,
        "out_width": ow,
        "stride_z": sz,
        "stride_y": sy,
        "stride_x": sx,
        "pad_z": bz,
        "pad_y": by,
        "pad_x": bx,
        "dilation_z": dz,
        "dilation_y": dy,
        "dilation_x": dx,
        "span_y": span_y,
        "span_x": span_x,
        "step_x": dx * pixel,
        "jump_y": (dy * w - span_x) * pixel,
        "jump_z": (dz * h - span_y) * w * pixel,
        "row_bytes": w * pixel,
        "plane_bytes": h * w * pixel,
        "image_bytes": d * h * w * pixel,
        "runs": ky,
        "run_length": kx * depth,
        "run_step": dy * w * pixel,
        "pitch": sx * pixel,
        "reach_y": (ky - 1) * dy + 1,
        "reach_x": (kx - 1) * dx + 1,
        "blocks": ceildiv(pixels, rows),
        "column_groups": column_groups,
        "block_pixels": rows,
        "group_bytes": depth * prod(g.kernel) * packed_columns(columns, lanes, width) * itemsize,
        "group_depth_bytes": depth * itemsize,
    }


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


def launch_conv(ctx: LoweringContext, isa: Isa, g: Geometry, slots: Sequence[SlotArg], finish_: Finish) -> None:
    """Emit the launch of a convolution.

    Args:
        ctx: where to.
        isa: the target.
        g: what is computed.
        slots: x, packed weights, result, operands of the epilogue.
        finish_: dtype of the operands and the epilogue.
    """
    dtype = finish_.dtype
    lanes = isa.lanes(dtype)
    columns, depth = g.columns // g.groups, g.channels // g.groups
    whole, rest = divmod(columns, conv_width(isa) * lanes)
    spatial = 1 if g.pointwise else 3 if len(g.kernel) == 3 else 2
    few = depth < _UNROLLED_DEPTH
    row = g.kernel[-1]
    runs = spatial == 2 and (row == 1 or (g.dilations[-1] == 1 and g.groups == 1))
    unrolled = runs and few and row * depth <= _UNROLLED_RUN
    spec = _Spec(
        finish_,
        whole > 0,
        -(-rest // lanes),
        depth if few else None,
        spatial,
        runs,
        row * depth if unrolled else None,
        g.strides[-1] * g.channels if unrolled else None,
    )
    words = _words(g, dtype.itemsize, isa, dtype)
    args: list[Arg] = [*slots, *(DimArg(words[name]) for name in _GEOMETRY)]
    chunks = words["blocks"] * words["column_groups"] * g.groups
    ctx.launch(_conv_kernel(isa, spec), args, chunks, scratch=max(words["group_depth_bytes"], 64))


@lowering(PackedConv)
def lower_packed_conv(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Weights in panels, x channels-last, f32 or f64."""
    op, operands, body, extras = split_epilogue(node)
    assert isinstance(op, PackedConv)
    x, w = operands
    assert x is not None
    assert w is not None
    result, dtype = node.result.type, x.type.dtype
    plan = plan_finish(dtype, result.shape, result.dtype, body, extras)
    channels = x.type.shape[-1]
    if plan is None or dtype not in (DType.F32, DType.F64) or not isinstance(channels, int):
        return False
    g = Geometry(
        x.type.shape[0],
        x.type.shape[1:-1],
        result.shape[1:-1],
        channels,
        op.columns,
        op.groups,
        op.kernel,
        op.strides,
        op.dilations,
        tuple(b for b, _ in op.pads),
    )
    slots = [SlotArg(ctx.slot(x)), SlotArg(ctx.slot(w)), SlotArg(ctx.slot(node.result), writes=True)]
    slots += [SlotArg(ctx.slot(e)) for e in extras]
    launch_conv(ctx, isa, g, slots, plan)
    return None
