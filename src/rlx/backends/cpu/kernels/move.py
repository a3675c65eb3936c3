# SPDX-License-Identifier: Apache-2.0
"""Moving elements between any two walks: strided copies, and transposes in register tiles.

    for every point p of the space:  target[p * target_strides] = source[p * source_strides]

Elements are moved as unsigned integers of their size. Where both sides walk an axis in memory order
the copy is an elementwise kernel; where the source is contiguous along another axis than the
target, tiles of L x L elements are read as L vectors, transposed by log2(L) rounds of shuffles and
written as L vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import memory_type
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.elementwise import launch_elementwise, moves
from rlx.backends.cpu.kernels.nest import Arguments, Rows, Stream, Walk, rows_args, stream_args
from rlx.backends.cpu.kernels.space import Access, Step, collapse
from rlx.backends.cpu.lltypes import vec
from rlx.base.dims import Dim, ceildiv, dim_max, floordiv, product
from rlx.base.dtypes import DType
from rlx.base.types import Shape
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext

__all__ = ["launch_move", "transpose_kernel"]

_UNSIGNED = {1: DType.U8, 2: DType.U16, 4: DType.U32, 8: DType.U64}
_CHUNK_BYTES = 64 << 10
_NARROW = 8
"""Static extents below this are not worth a tile."""


def launch_move(
    ctx: LoweringContext, isa: Isa, shape: Shape, source: Access, target: Access
) -> None:
    """Emit the move of every element of a space from one walk to another.

    Args:
        ctx: where the launch goes.
        isa: the target.
        shape: the iteration space.
        source: how it walks what is read; of any dtype.
        target: how it walks what is written, of the same dtype; no two points write one element.
    """
    shape, source, target = _as_unsigned(shape, source, target)
    extents, (read, write), _ = collapse(shape, [source, target])
    if len(extents) > 1 and read.step is Step.ANY:
        axis = next((i for i, s in enumerate(read.strides) if s == 1), None)
        if axis is not None:
            extents, read, write = _axis_to(extents, read, write, axis, len(extents) - 2)
            small = [isinstance(d, int) and d < _NARROW for d in extents[-2:]]
            if write.step is Step.UNIT and not any(small):
                _launch_transpose(ctx, isa, extents, read, write)
                return
            if small[1] and not small[0]:  # read long vectors, write scattered
                extents, read, write = _axis_to(
                    extents, read, write, len(extents) - 2, len(extents) - 1
                )
    launch_elementwise(ctx, isa, moves(read.dtype), extents, [read], [write])


def _as_unsigned(shape: Shape, source: Access, target: Access) -> tuple[Shape, Access, Access]:
    """Name the elements by their size; 16-byte ones become two on an axis of their own."""
    size = source.dtype.itemsize
    if size <= 8:
        dtype = _UNSIGNED[size]
        return shape, replace(source, dtype=dtype), replace(target, dtype=dtype)

    def halves(access: Access) -> Access:
        strides = (*(s * 2 for s in access.strides), 1)
        return Access(access.slot, DType.U64, strides, access.offset * 2)

    return (*shape, 2), halves(source), halves(target)


def _axis_to(
    shape: Shape, read: Access, write: Access, axis: int, place: int
) -> tuple[Shape, Access, Access]:
    """Move one axis of the space to another place; points are the same in another order."""

    def moved(items: Sequence[Dim]) -> tuple[Dim, ...]:
        rest = [d for i, d in enumerate(items) if i != axis]
        return (*rest[:place], items[axis], *rest[place:])

    return (
        moved(shape),
        replace(read, strides=moved(read.strides)),
        replace(write, strides=moved(write.strides)),
    )


def _tile(isa: Isa, size: int) -> int:
    """Return the elements along each side of a tile."""
    return 16 if size <= 2 else isa.vector_bits // (8 * size)


def _launch_transpose(
    ctx: LoweringContext, isa: Isa, shape: Shape, read: Access, write: Access
) -> None:
    """Emit the tiled move: the source is contiguous along the axis before the target's."""
    size = read.dtype.itemsize
    side = _tile(isa, size)
    *lead, across, n = shape
    bands = (*lead, ceildiv(across, side))  # a band is `side` rows of the target
    count = product(bands)
    per_chunk = dim_max(1, floordiv(_CHUNK_BYTES // (side * size), dim_max(1, n)))
    args: list[Arg] = [SlotArg(read.slot), SlotArg(write.slot, writes=True)]
    args += [DimArg(n), DimArg(across), DimArg(per_chunk), DimArg(write.strides[-2])]
    args += rows_args(bands)
    for access in (read, write):
        strides = (*access.strides[:-2], access.strides[-2] * side, access.strides[-1])
        args += stream_args(replace(access, strides=strides))
    kernel = transpose_kernel(isa, len(bands), Walk.of(read), Walk.of(write))
    chunks = ceildiv(count, per_chunk)
    if n == 0:
        chunks = 0
    ctx.launch(kernel, args, chunks)


@cache
def transpose_kernel(isa: Isa, rank: int, read: Walk, write: Walk) -> Emitted:
    """Return the tiled transpose over `rank` axes of bands and one axis along them."""
    module = Module(isa)
    count = 2 + 4 + rank + 2 * rank + 1 + read.has_offset + write.has_offset
    with module.kernel(f"transpose{rank}", count) as k:
        _Transpose(k, rank, read, write).emit()
    return finish(module)


class _Transpose:
    def __init__(self, k: Kernel, rank: int, read: Walk, write: Walk) -> None:
        self.k = k
        self.kind = memory_type(read.dtype)
        self.side = _tile(k.isa, read.dtype.itemsize)
        args = Arguments(k)
        slots = args.slot(), args.slot()
        self.n, self.across, self.per_chunk, self.row = (args.dim() for _ in range(4))
        self.bands = Rows(k, args, rank)
        self.read = Stream.take(k, args, read, slots[0], rank)
        self.write = Stream.take(k, args, write, slots[1], rank)

    def emit(self) -> None:
        k = self.k
        with k.loop(k.begin, k.end) as chunks:
            first = chunks.index * self.per_chunk
            last = k.smin(first + self.per_chunk, self.bands.count)
            with self.bands.range(first, last) as (_, position):
                left = self.across - position[-1] * self.side
                self._band(self.read.at(k, position), self.write.at(k, position), left)

    def _band(self, source: Value, target: Value, left: Value) -> None:
        k, side = self.k, self.side
        whole = self.n - (self.n & (side - 1))
        # Without a whole tile across, everything goes the careful way.
        fast = k.select(left >= side, whole, k.i64(0))
        with k.loop(0, fast, side) as tiles:
            rows = [self._row(source, tiles.index + j) for j in range(side)]
            lines = [k.load(vec(self.kind, side), row) for row in rows]
            for i, line in enumerate(self._transposed(lines)):
                k.store(line, k.offset(target, self.row * i + tiles.index, self.kind))
        with k.loop(fast, self.n, side) as tiles:
            self._edge(source, target, tiles.index, left)

    def _row(self, source: Value, index: Value) -> Value:
        assert self.read.step is not None
        return self.k.offset(source, index * self.read.step, self.kind)

    def _edge(self, source: Value, target: Value, index: Value, left: Value) -> None:
        """Move a tile of which some rows or columns are outside."""
        k, side = self.k, self.side
        kind = vec(self.kind, side)
        inside = k.tail_mask(left, kind)
        lines: list[Value] = []
        for j in range(side):
            # Lines beyond the last are read from the last again and never written.
            row = self._row(source, k.smin(index + j, self.n - 1))
            lines.append(k.load_masked(kind, row, inside))
        along = k.tail_mask(self.n - index, kind)
        for i, line in enumerate(self._transposed(lines)):
            with k.if_(left > i):
                k.store_masked(line, k.offset(target, self.row * i + index, self.kind), along)

    def _transposed(self, lines: list[Value]) -> list[Value]:
        """Swap the off-diagonal quarters of ever smaller blocks."""
        k, side = self.k, self.side
        lines = list(lines)
        half = side // 2
        while half:
            for i in range(side):
                if i & half:
                    continue
                a, b = lines[i], lines[i + half]
                low = [lane if not lane & half else side + lane - half for lane in range(side)]
                high = [lane + half if not lane & half else side + lane for lane in range(side)]
                lines[i], lines[i + half] = k.shuffle(a, b, low), k.shuffle(a, b, high)
            half //= 2
        return lines
