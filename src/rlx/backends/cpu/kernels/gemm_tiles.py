# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of matrix multiplication, and the panels they read.

They write raw sums, so all products of an element type share one unit, whatever their epilogues.
LLVM takes 21 ms for it; a kernel with micro-kernels of its own and a call of each behind a branch took
48 ms, one that calls these through a pointer takes 22 ms, at the same speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlx.backends.cpu.abi import Emitted, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.products import multiply_add, spread_factor
from rlx.backends.cpu.lltypes import I64, PTR, Type, scalar_type, vec
from rlx.base.dtypes import DType

__all__ = [
    "TILE_PARAMS",
    "Tile",
    "panel_width",
    "panels_for",
    "tile_keys",
    "tile_shape",
    "tile_unit",
]

_PREFETCH_BYTES = 1024
_PARAMS = (("a", PTR), ("b", PTR), ("out", PTR), ("pitch", I64), ("step", I64), ("k", I64))
TILE_PARAMS = tuple(kind for _, kind in _PARAMS)
"""Types of a micro-kernel's parameters."""


@dataclass(frozen=True)
class Tile:
    """The register tile of an instruction set: `rows` x `vectors` accumulators."""

    rows: int
    vectors: int


def tile_shape(isa: Isa) -> Tile:
    """Return the tile: 6 x 4 vectors with 32 registers, 6 x 2 with 16."""
    return Tile(6, 4) if isa.vector_registers == 32 else Tile(6, 2)


def panel_width(isa: Isa, dtype: DType) -> int:
    """Return the number of columns of a panel of packed weights."""
    return tile_shape(isa).vectors * isa.lanes(dtype)


def panels_for(rows: int) -> int:
    """Return how many panels a micro-kernel of that many rows walks at once."""
    return {1: 4, 2: 2}.get(rows, 1)


def tile_keys(isa: Isa) -> Sequence[tuple[int, int]]:
    """Return (rows, panels) of every micro-kernel."""
    return [
        (rows, panels)
        for rows in range(1, tile_shape(isa).rows + 1)
        for panels in sorted({1, panels_for(rows)})
    ]


@cache
def tile_unit(isa: Isa, dtype: DType, quantized: DType | None) -> Emitted:
    """Return the unit with a micro-kernel for each of `tile_keys`, in that order.

    The functions are (a, b, out, pitch, step, k): the sum of row i and panel p goes to
    out + i * pitch + p * step, in elements.

    Args:
        isa: the target.
        dtype: of the elements that are walked.
        quantized: of a where it is i8 or u8: then b holds i8, four of a column's k in one i32.
    """
    module = Module(isa)
    tiles = _Tiles(module, dtype, quantized)
    for rows, panels in tile_keys(isa):
        tiles.emit(rows, panels)
    return finish(module)


class _Tiles:
    """Emits micro-kernels into a module."""

    def __init__(self, module: Module, dtype: DType, quantized: DType | None) -> None:
        self.module = module
        self.quantized = quantized
        self.tile = tile_shape(module.isa)
        self.lanes = module.isa.lanes(dtype)
        self.width = self.tile.vectors * self.lanes
        self.scalar: Type = scalar_type(dtype)
        self.vector: Type = vec(self.scalar, self.lanes)

    def emit(self, rows: int, panels: int) -> None:
        """Emit the function of `rows` rows and `panels` panels."""
        with self.module.shared(f"tile{rows}x{panels}", _PARAMS) as f:
            a, b, out, pitch, step, k = f.args
            for i, line in enumerate(self._accumulate(f, (a, b), k, rows, panels)):
                for j, value in enumerate(line):
                    p, start = divmod(j, self.tile.vectors)
                    base = f.offset(out, pitch * i + step * p, self.scalar)
                    f.store(value, base, start * self.lanes)

    def _accumulate(
        self, f: Function, operands: tuple[Value, Value], k: Value, rows: int, panels: int
    ) -> list[list[Value]]:
        a, b = operands
        count = panels * self.tile.vectors
        # Panels follow one another at a distance of k lines.
        bases = [
            b if p == 0 else f.offset(b, k * (self.width * p), self.scalar) for p in range(panels)
        ]
        with f.loop(0, k, carry=[f.const(0, self.vector)] * (rows * count)) as loop:
            current = list(loop.carry)
            streams = [f.offset(base, loop.index * self.width, self.scalar) for base in bases]
            left = f.offset(a, loop.index, self.scalar)
            columns = [
                f.load(self.vector, stream, j * self.lanes)
                for stream in streams
                for j in range(self.tile.vectors)
            ]
            if rows <= 4:
                for stream in streams:
                    self._prefetch(f, stream)
            for i in range(rows):
                value = f.load(self.scalar, f.offset(left, k * i, self.scalar))
                factor = spread_factor(f, value, self.lanes, self.quantized)
                for j in range(count):
                    at = i * count + j
                    current[at] = multiply_add(
                        f, factor, columns[j], current[at], quantized=self.quantized is not None
                    )
            loop.next(*current)
        return [loop.out[i * count : (i + 1) * count] for i in range(rows)]

    def _prefetch(self, f: Function, stream: Value) -> None:
        for start in range(0, self.scalar.itemsize * self.width, 64):
            f.prefetch(f.offset(stream, start + _PREFETCH_BYTES))
