# SPDX-License-Identifier: Apache-2.0
"""Sliding windows over channels-last tensors: geometry, and pointers to what taps read.

Convolutions and pools work on tiles of consecutive output pixels, (image, z, y, x) flattened. For
every tap a tile needs one pointer per pixel: to the input pixel, or where that lies outside of the
input to a row of neutral elements (zeros, or -inf for a maximum). A few vector instructions make
them for all pixels at once. Lines and images are volumes with extents of 1.

All extents are integers in a small array, the geometry, that a kernel fills from its arguments once
per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rlx.backends.cpu.abi import Kernel
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.lltypes import I32, I64, PTR, Type, vec
from rlx.base.dims import LIMIT, Dim, product
from rlx.base.dtypes import DType
from rlx.base.errors import UnsupportedOpError

__all__ = [
    "SPREAD_WORDS",
    "WINDOW_WORDS",
    "RowPointers",
    "Spread",
    "Taps",
    "Walk",
    "Window",
    "WindowEmitter",
    "divide",
    "window_words",
]

WINDOW_WORDS: list[str] = [
    "taps",
    "pixels",
    "columns",
    "pixel_bytes",
    "depth_in",
    "height",
    "width_in",
    "out_depth",
    "out_height",
    "out_width",
    "stride_z",
    "stride_y",
    "stride_x",
    "pad_z",
    "pad_y",
    "pad_x",
    "dilation_z",
    "dilation_y",
    "dilation_x",
    "span_y",
    "span_x",
    "step_x",
    "jump_y",
    "jump_z",
    "row_bytes",
    "plane_bytes",
    "image_bytes",
    "runs",
    "run_step",
    "pitch",
    "reach_y",
    "reach_x",
]
"""The integers every window kernel takes, in the order of its arguments; bytes where named so."""

SPREAD_WORDS: list[str] = ["out_image", "out_plane", "out_line", "out_step", "out_origin"]
"""Those of kernels with windows spread over the result: rows, linear in (n, z, y, x)."""

_PLACES = 192
_ROWS = 320
TABLE_WORDS = 56
"""i64 words of a tile's table: z, y, x of tap 0 as i32[16], its byte offset and row as i64[16]."""


@dataclass(frozen=True)
class Window:
    """Windows over x [N, *spatial, C]; tuples have one entry per spatial axis (1 to 3).

    Attributes:
        batch: N.
        space: extents of x.
        out: number of windows.
        channels: C.
        columns: channels of the result.
        kernel: taps.
        strides: distance of windows.
        dilations: distance of taps.
        before: elements of the first window that lie before x; may be negative.
        quantized: dtype of x where it is i8 or u8; C then counts quads of channels, if they are summed up.
    """

    batch: Dim
    space: tuple[Dim, ...]
    out: tuple[Dim, ...]
    channels: Dim
    columns: Dim
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Dim, ...]
    quantized: DType | None = None

    @property
    def pixels(self) -> Dim:
        """Number of windows in all."""
        return product((self.batch, *self.out))

    @property
    def is_volume(self) -> bool:
        """Whether there are three spatial axes."""
        return len(self.kernel) == 3

    @property
    def is_pointwise(self) -> bool:
        """Whether each window is exactly the pixel where the result is written."""
        same = all(
            k == 1 and s == 1 and b == 0
            for k, s, b in zip(self.kernel, self.strides, self.before, strict=True)
        )
        return same and self.space == self.out


@dataclass(frozen=True)
class Spread:
    """Where in a larger result windows are: per spatial axis extent, distance, first position."""

    space: tuple[Dim, ...]
    steps: tuple[int, ...]
    first: tuple[Dim, ...]


def _three(values: Sequence[Dim], fill: Dim) -> tuple[Dim, Dim, Dim]:
    z, y, x = (*(fill for _ in range(3 - len(values))), *values)
    return z, y, x


def window_words(g: Window, itemsize: int, spread: Spread | None = None) -> dict[str, Dim]:
    """Return the integers of `WINDOW_WORDS` and `SPREAD_WORDS` for elements of `itemsize`.

    Raises:
        UnsupportedOpError: a spatial axis is too long for positions of 32 bits.
    """
    for extent in (*g.space, *g.out, *g.before):
        if isinstance(extent, int) and extent > LIMIT:
            raise UnsupportedOpError(
                f"convolutions and pooling take spatial axes of at most {LIMIT} elements, found {extent}"
            )
    (d, h, w), (od, oh, ow) = _three(g.space, 1), _three(g.out, 1)
    (_, ky, kx), (sz, sy, sx) = _three(g.kernel, 1), _three(g.strides, 1)
    (dz, dy, dx), (bz, by, bx) = _three(g.dilations, 1), _three(g.before, 0)
    pixel = g.channels * itemsize
    span_y, span_x = ky * dy, kx * dx
    values: list[Dim] = [prod(g.kernel), g.pixels, g.columns, pixel, d, h, w, od, oh, ow]
    values += [sz, sy, sx, bz, by, bx, dz, dy, dx, span_y, span_x]
    values += [dx * pixel, (dy * w - span_x) * pixel, (dz * h - span_y) * w * pixel]
    values += [w * pixel, h * w * pixel, d * h * w * pixel]
    values += [ky, dy * w * pixel, sx * pixel, (ky - 1) * dy + 1, (kx - 1) * dx + 1]
    words: dict[str, Dim] = dict(zip(WINDOW_WORDS, values, strict=True))
    if spread is not None:
        (fd, fh, fw), (tz, ty, tx) = _three(spread.space, 1), _three(spread.steps, 1)
        pz, py, px = _three(spread.first, 0)
        rows: list[Dim] = [fd * fh * fw, tz * fh * fw, ty * fw, tx, (pz * fh + py) * fw + px]
        words |= dict(zip(SPREAD_WORDS, rows, strict=True))
    return words


def divide(f: Function, a: Value, b: Value) -> tuple[Value, Value]:
    """Return (quotient, remainder) of extents; the divisor is at least 1 wherever a chunk runs."""
    quotient = f.emit(I64, f"udiv i64 {a.text}, {b.text}")
    return quotient, a - quotient * b


@dataclass(frozen=True)
class Walk:
    """The state of a loop over the taps.

    Attributes:
        offset: bytes from tap 0 to this one.
        tap: z, y, x of this tap, in elements of x.
    """

    offset: Value
    tap: tuple[Value, Value, Value]

    @property
    def values(self) -> list[Value]:
        """The loop's carried values."""
        return [self.offset, *self.tap]

    @staticmethod
    def of(values: Sequence[Value]) -> Walk:
        """Return the state from carried values."""
        offset, z, y, x = values
        return Walk(offset, (z, y, x))


class Taps:
    """Pointers to what the pixels of a tile read at each tap, inside one function.

    Args:
        emitter: of the module.
        f: where to emit.
        geometry: pointer to the integers.
        table: the tile's table, filled by the locator.
        sources: pointers to x and to the row that stands for everything outside of it.
        lanes: pixels rounded up to 8 or 16.
    """

    def __init__(
        self,
        emitter: WindowEmitter,
        f: Function,
        geometry: Value,
        table: Value,
        sources: tuple[Value, Value],
        lanes: int,
    ) -> None:
        self.f = f
        self.lanes = lanes
        self.volume = emitter.volume

        def word(name: str) -> Value:
            return emitter.word(f, geometry, name)

        def narrow(name: str) -> Value:
            return f.trunc(word(name), I32)

        x, outside = sources
        index = vec(I32, lanes)
        self.places = [f.load(index, f.offset(table, array * 64)) for array in range(3)]
        self.bases = f.load(vec(I64, lanes), f.offset(table, _PLACES)) + f.splat(
            f.to_address(x), lanes
        )
        self.outside = f.splat(f.to_address(outside), lanes)
        self.extents = [f.splat(narrow(name), lanes) for name in ("depth_in", "height", "width_in")]
        self.dilation = [narrow(f"dilation_{axis}") for axis in "zyx"]
        self.span_x, self.span_y = narrow("span_x"), narrow("span_y")
        self.steps = [word(name) for name in ("step_x", "jump_y", "jump_z")]

    @property
    def kind(self) -> Type:
        """The type of `addresses`."""
        return vec(I64, self.lanes)

    def start(self) -> Walk:
        """Return the state at tap 0."""
        none = self.f.i32(0)
        return Walk(self.f.i64(0), (none, none, none))

    def within(
        self, walk: Walk, low: Sequence[Value] | None = None, high: Sequence[Value] | None = None
    ) -> Value:
        """Return the mask of pixels whose tap lies in x, or between bounds (z, y, x)."""
        axes = (0, 1, 2) if self.volume else (1, 2)
        out: Value | None = None
        for axis in axes:
            at = self.places[axis] + self.f.splat(walk.tap[axis], self.lanes)
            if low is None or high is None:
                inside = at.ult(self.extents[axis])
            else:
                inside = (at >= low[axis]) & (at < high[axis])
            out = inside if out is None else out & inside
        assert out is not None
        return out

    def addresses(self, walk: Walk, inside: Value) -> Value:
        """Return per pixel the address that it reads."""
        f = self.f
        return f.select(inside, self.bases + f.splat(walk.offset, self.lanes), self.outside)

    def next(self, walk: Walk) -> Walk:
        """Return the state at the next tap."""
        f, (z, y, x) = self.f, walk.tap
        x = x + self.dilation[2]
        wrap = x.eq(self.span_x)
        x = f.select(wrap, 0, x)
        y = f.select(wrap, y + self.dilation[1], y)
        offset = walk.offset + self.steps[0] + f.select(wrap, self.steps[1], 0)
        if self.volume:
            wrap = y.eq(self.span_y)
            y = f.select(wrap, 0, y)
            z = f.select(wrap, z + self.dilation[0], z)
            offset = offset + f.select(wrap, self.steps[2], 0)
        return Walk(offset, (z, y, x))


class WindowEmitter:
    """What the window kernels of one module share.

    Args:
        module: where functions go.
        names: the integers of the geometry, `WINDOW_WORDS` and the kernel's own.
        volume: three spatial axes.
        spread: windows are not consecutive rows of the result.
    """

    def __init__(
        self, module: Module, names: Sequence[str], *, volume: bool, spread: bool = False
    ) -> None:
        self.module = module
        self.volume = volume
        self.spread = spread
        self.names = names
        self._index = {name: index for index, name in enumerate(names)}
        self._locator: Function | None = None

    def word(self, f: Function, geometry: Value, name: str) -> Value:
        """Load one of the integers."""
        return f.load(I64, geometry, self._index[name])

    def fill(self, k: Kernel, first: int) -> tuple[Value, dict[str, Value]]:
        """Return the geometry from the arguments at `first` on: the array, and all by name."""
        geometry = k.alloca(I64, len(self.names))
        words = {name: k.dim(first + index) for name, index in self._index.items()}
        for name, index in self._index.items():
            k.store(words[name], geometry, index)
        return geometry, words

    def table(self, f: Function) -> Value:
        """Reserve the table of a tile."""
        return f.alloca(I64, TABLE_WORDS)

    def rows(self, f: Function, table: Value) -> Value:
        """Return a pointer to the row numbers of a located tile (spread windows only)."""
        return f.offset(table, _ROWS)

    @property
    def locator(self) -> Function:
        """The function (geometry, table, pixel, rows, count) that fills the table of a tile."""
        if self._locator is None:
            params = [
                ("geometry", PTR),
                ("table", PTR),
                ("pixel", I64),
                ("rows", I64),
                ("count", I64),
            ]
            with self.module.function("locate", params) as f:
                self._locate(f)
            self._locator = f
        return self._locator

    def _locate(self, f: Function) -> None:
        geometry, table, pixel, rows, count = f.args
        word = {name: self.word(f, geometry, name) for name in self.names}
        width, height, depth = word["out_width"], word["out_height"], word["out_depth"]
        line, x = divide(f, pixel, width)
        plane, y = divide(f, line, height)
        image, z = divide(f, plane, depth)
        with f.loop(0, rows, carry=[image, z, y, x]) as loop:
            image, z, y, x = loop.carry
            iz, iy, ix = (
                v * word[f"stride_{axis}"] - word[f"pad_{axis}"]
                for v, axis in zip((z, y, x), "zyx", strict=True)
            )
            offset = (
                image * word["image_bytes"]
                + iz * word["plane_bytes"]
                + iy * word["row_bytes"]
                + ix * word["pixel_bytes"]
            )
            for array, value in enumerate((iz, iy, ix)):
                f.store(f.trunc(value, I32), f.offset(table, array * 64), loop.index)
            f.store(offset, f.offset(table, _PLACES), loop.index)
            if self.spread:
                row = (
                    word["out_origin"]
                    + image * word["out_image"]
                    + z * word["out_plane"]
                    + y * word["out_line"]
                )
                f.store(row + x * word["out_step"], f.offset(table, _ROWS), loop.index)
            # Rows after the last valid one repeat it: they are computed and dropped.
            last = loop.index + 1 >= count
            wrap_x = (x + 1).eq(width)
            y1 = f.select(wrap_x, y + 1, y)
            wrap_y = y1.eq(height)
            z1 = f.select(wrap_y, z + 1, z)
            wrap_z = z1.eq(depth)
            loop.next(
                f.select(last, image, f.select(wrap_z, image + 1, image)),
                f.select(last, z, f.select(wrap_z, 0, z1)),
                f.select(last, y, f.select(wrap_y, 0, y1)),
                f.select(last, x, f.select(wrap_x, 0, x + 1)),
            )

    def inside(
        self, k: Function, words: dict[str, Value], pixel: Value, x: Value, rows: int
    ) -> tuple[Value, Value]:
        """Return whether a tile lies in one row of windows and wholly reads x, and its tap 0.

        For images and lines.
        """
        line, ox = divide(k, pixel, words["out_width"])
        image, oy = divide(k, line, words["out_height"])
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
class RowPointers:
    """Where the rows of a tile are: `at` gives a pointer per row, some elements further."""

    pointers: Sequence[Value] = ()
    base: Value | None = None
    multiples: tuple[tuple[int, Value], ...] = ()
    pitch: int = 0
    count: int = 0

    @staticmethod
    def listed(pointers: Sequence[Value]) -> RowPointers:
        """Rows anywhere, one pointer each."""
        return RowPointers(pointers, count=len(pointers))

    @staticmethod
    def placed(base: Value, pitch: int, count: int) -> RowPointers:
        """Rows a fixed number of elements apart."""
        return RowPointers(base=base, pitch=pitch, count=count)

    @staticmethod
    def spaced(base: Value, multiples: dict[int, Value], count: int) -> RowPointers:
        """Rows a run-time distance apart, of which the odd multiples in bytes are given.

        An even multiple is an odd one times a power of two, which the machine's address forms
        contain: all rows take a register for the base and half as many for the multiples, where a
            pointer for each would not fit.
        """
        return RowPointers(base=base, multiples=tuple(multiples.items()), count=count)

    def at(self, f: Function, index: Value, kind: Type) -> list[Value]:
        """Return the pointers, `index` elements of `kind` further."""
        if self.base is None:
            return [p if index.const == 0 else f.offset(p, index, kind) for p in self.pointers]
        first = self.base if index.const == 0 else f.offset(self.base, index, kind)
        if not self.multiples:
            return [f.offset(first, r * self.pitch, kind) for r in range(self.count)]
        odd = dict(self.multiples)
        out = [first]
        for r in range(1, self.count):
            twos = (r & -r).bit_length() - 1
            out.append(f.offset(first, odd[r >> twos].shl(twos)))
        return out
