# SPDX-License-Identifier: Apache-2.0
"""Matrix multiplication with a fused epilogue.

    c[m, n] = epilogue(sum_k a[m, k] * b[k, n])

`a` is dense row-major. `b` lies in panels of `width` columns, [ceil(n / width)][k][width]: weights are packed once per
version, a run-time operand is packed by a kernel just before. The micro-kernel keeps rows x width accumulators in
registers (6 x 4 vectors with 32 registers) and walks k once: per k, 4 loads of b, 6 broadcasts of a, 24 FMAs; `a` is
never packed. Two rows walk 2 panels and one row walks 4 panels at once, which gives enough independent FMAs and as
many memory streams. Each element is one chain of FMAs over k in order, so a row's result does not depend on how many
rows there are, on chunks or on threads. Integers of 32 and 64 bits take the same path; products and sums wrap.

Micro-kernels (`gemm_tiles`) write raw sums: into the result where there is no epilogue, else into a tile-sized buffer
that a second function finishes, so the code of an epilogue exists once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.gemm_tiles import (
    TILE_PARAMS,
    panel_width,
    panels_for,
    tile_keys,
    tile_shape,
    tile_unit,
)
from rlx.backends.cpu.kernels.tile import Finish, Finisher, plan_finish
from rlx.backends.cpu.lltypes import I64, PTR, Type, scalar_type, storage_type, vec
from rlx.backends.cpu.lowering import lowering, split_epilogue
from rlx.backends.cpu.ops import PRODUCT_DTYPES, PackedMatMul
from rlx.backends.cpu.quantized_ops import PackedQuantizedMatMul
from rlx.base.dims import Dim, ceildiv, dim_max, dim_min, product
from rlx.base.dtypes import DType
from rlx.base.facts import current_facts
from rlx.base.types import Shape
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.matmul import MatMul

_ROW_TILES_PER_CHUNK = 16
_FLOPS_PER_CHUNK = 6_000_000
_FEW_ROWS = 2
"""Tiles of at most so many rows walk several panels at once."""


@dataclass(frozen=True)
class _Spec:
    """What a matmul kernel is specialised on. Extents are not: dynamic ones measured just as fast."""

    finish: Finish
    batch_axes: int = 0
    quantized: DType | None = None
    """Of a where it is i8 or u8: then b holds i8, four of a column's k in one i32."""


class _Emitter:
    """Emits the functions of one kernel: micro-kernels that leave raw sums, and one that finishes a tile of them."""

    def __init__(self, module: Module, spec: _Spec) -> None:
        self.module = module
        self.spec = spec
        isa = module.isa
        self.tile = tile_shape(isa)
        self.lanes = isa.lanes(spec.finish.dtype)
        self.width = self.tile.vectors * self.lanes
        self.vector: Type = vec(scalar_type(spec.finish.dtype), self.lanes)
        self.scalar: Type = scalar_type(spec.finish.dtype)
        unit = tile_unit(isa, spec.finish.dtype, spec.quantized)
        module.need(unit)
        self.micros = dict(zip(tile_keys(isa), unit.symbols, strict=True))
        self.plain = spec.finish.body is None and spec.finish.result is spec.finish.dtype
        self.finishers = {
            masked: self._finisher(masked) for masked in (False, True) if masked or not self.plain
        }

    def _finisher(self, masked: bool) -> Function:
        """Return the function that applies the epilogue to a tile of sums and stores it."""
        extras = [(f"x{i}", PTR) for i in range(len(self.spec.finish.extras))]
        params = [
            ("tile", PTR),
            ("out", PTR),
            *extras,
            *((name, I64) for name in ("row", "rows", "col", "n")),
        ]
        with self.module.function(f"finish{'t' if masked else ''}", params) as f:
            tile, out, *pointers = f.args[:-4]
            row, rows, col, n = f.args[-4:]
            starts = range(0, self.width, self.lanes)
            masks = [f.tail_mask(n - col - s, self.vector) if masked else None for s in starts]
            finisher = Finisher(f, self.spec.finish, pointers, n, col, masks)
            with f.loop(0, rows) as loop:
                base = f.offset(tile, loop.index * self.width, self.scalar)
                sums = [f.load(self.vector, base, s) for s in starts]
                finisher.row(sums, out, row + loop.index)
                loop.next()
        return f

    def run(self, k: Kernel, operands: _Operands, at: _Place, *, tail: bool) -> None:
        """Emit one tile: sums straight into the result where nothing else is to be done, else through a buffer."""
        depth, n = operands.depth, operands.n
        left = k.offset(operands.a, at.row * depth, self.scalar)
        right = k.offset(operands.b, at.panel * depth * self.width, self.scalar)
        col = at.panel * self.width
        if self.plain and not tail:
            out = k.offset(operands.c, at.row * n + col, self.scalar)
            k.call_pointer(at.micro, left, right, out, n, k.i64(self.width), depth)
            return
        step = at.rows * self.width
        k.call_pointer(at.micro, left, right, operands.buffer, k.i64(self.width), step, depth)
        with k.loop(0, at.panels) as loop:
            sums = k.offset(operands.buffer, loop.index * step, self.scalar)
            place = (at.row, at.rows, col + loop.index * self.width, n)
            k.call(self.finishers[tail], sums, operands.c, *operands.extras, *place)
            loop.next()

    def micro(self, k: Kernel, rows: Value, panels: Callable[[int], int], most: int) -> Value:
        """Return the micro-kernel for a number of rows, at most `most`, and of panels."""
        functions = {count: self.micros[count, panels(count)] for count in range(1, most + 1)}
        return k.choose(rows, functions, TILE_PARAMS)


@dataclass(frozen=True)
class _Place:
    """One call of a micro-kernel: which one, and its first row and panel, with their numbers."""

    micro: Value
    row: Value
    rows: Value
    panel: Value
    panels: Value | int = 1


@dataclass(frozen=True)
class _Operands:
    """What all tiles of a chunk share: pointers, k, columns, and a buffer for one tile of sums."""

    a: Value
    b: Value
    c: Value
    extras: tuple[Value, ...]
    depth: Value
    n: Value
    buffer: Value


def _row_tiles(f: Function, m: Value, tile: int) -> tuple[Value, Value, Value]:
    """Return (number of row tiles, rows of a short tile, how many tiles have one row more)."""
    count = _udiv(f, m + (tile - 1), f.i64(tile))
    short = _udiv(f, m, f.smax(count, 1))
    return count, short, m - short * count


def _tile_rows(
    f: Function,
    emitter: _Emitter,
    call: Callable[[Value, Value], None],
    first: Value,
    last: Value,
    m: Value,
) -> None:
    """Emit: for every row tile in [first, last), `call(first row, rows)`."""
    _, short, longer = _row_tiles(f, m, emitter.tile.rows)
    with f.loop(first, last) as loop:
        index = loop.index
        row = index * short + f.smin(index, longer)
        call(row, short + f.zext(index < longer, I64))
        loop.next()


@cache
def _matmul_kernel(isa: Isa, spec: _Spec) -> Emitted:
    """Multiply by panels.

    Arguments: a, b, c, extras..., m, row blocks, column groups, k, n, then per batch axis
    (extent, a, b) strides.
    """
    module = Module(isa)
    emitter = _Emitter(module, spec)
    nargs = 3 + len(spec.finish.extras) + 5 + 3 * spec.batch_axes
    with module.kernel("qgemm" if spec.quantized else "gemm", nargs) as k:
        buffer = k.alloca(emitter.vector, emitter.tile.rows * emitter.tile.vectors)
        with k.loop(k.begin, k.end) as chunk:
            _chunk(k, emitter, chunk.index, buffer)
            chunk.next()
    return finish(module)


def _chunk(k: Kernel, emitter: _Emitter, index: Value, buffer: Value) -> None:
    spec, count = emitter.spec, len(emitter.spec.finish.extras)
    m, blocks, groups = k.dim(3 + count), k.dim(4 + count), k.dim(5 + count)
    depth, n = k.dim(6 + count), k.dim(7 + count)
    a, b, c = k.slot(0), k.slot(1), k.slot(2)
    extras = [k.slot(3 + i) for i in range(count)]
    per_batch = blocks * groups
    batch = _udiv(k, index, per_batch)
    rest = index - batch * per_batch
    if spec.batch_axes:
        a, b = _batch_pointers(k, emitter, batch, a, b, 8 + count)
        c = k.offset(c, batch * m * n, storage_type(spec.finish.result))
        extras = [
            k.offset(x, batch * (m * n if e.kind == "full" else m), storage_type(e.dtype))
            if e.kind in ("full", "row")
            else x
            for x, e in zip(extras, spec.finish.extras, strict=True)
        ]
    group = _udiv(k, rest, blocks)
    block = rest - group * blocks
    tiles, _, _ = _row_tiles(k, m, emitter.tile.rows)
    rows = (*_share(k, tiles, block, blocks), m)
    whole = _udiv(k, n, k.i64(emitter.width))
    panels = _udiv(k, n + (emitter.width - 1), k.i64(emitter.width))
    low, high = _share(k, panels, group, groups)
    operands = _Operands(a, b, c, tuple(extras), depth, n, buffer)
    _panels(k, emitter, operands, rows, (low, k.smin(high, whole), high))


def _panels(
    k: Kernel,
    emitter: _Emitter,
    operands: _Operands,
    rows: tuple[Value, Value, Value],
    columns: tuple[Value, Value, Value],
) -> None:
    """Emit the loops over panels and row tiles of a chunk: full panels, then the last partial one."""
    first, last, m = rows
    low, full_end, high = columns
    _, short, longer = _row_tiles(k, m, emitter.tile.rows)

    def each_row(panel: Value, *, tail: bool) -> None:
        def run(row: Value, count: Value) -> None:
            micro = emitter.micro(k, count, lambda _: 1, emitter.tile.rows)
            emitter.run(k, operands, _Place(micro, row, count, panel), tail=tail)

        _tile_rows(k, emitter, run, first, last, m)

    # One or two rows walk several panels at once, so panels are the inner loop there.
    few = (short + k.zext(longer > 0, I64)) <= _FEW_ROWS
    with k.if_else(few) as branch:
        with branch.then():

            def run(row: Value, count: Value) -> None:
                _many_panels(k, emitter, operands, (row, count), (low, full_end))

            _tile_rows(k, emitter, run, first, last, m)
        with branch.otherwise(), k.loop(low, full_end) as loop:
            each_row(loop.index, tail=False)
            loop.next()
    with k.loop(k.smax(low, full_end), high) as loop:
        each_row(loop.index, tail=True)
        loop.next()


def _many_panels(
    k: Kernel,
    emitter: _Emitter,
    operands: _Operands,
    rows: tuple[Value, Value],
    panels: tuple[Value, Value],
) -> None:
    """Emit a tile of few rows over full panels: several at once, then the rest one by one."""
    (row, count), (low, high) = rows, panels
    step = k.i64(panels_for(_FEW_ROWS))
    for number in range(1, _FEW_ROWS):
        step = k.select(count.eq(number), panels_for(number), step)
    start = low + _udiv(k, k.smax(high - low, 0), step) * step
    wide = emitter.micro(k, count, panels_for, _FEW_ROWS)
    with k.loop(low, start, step) as loop:
        emitter.run(k, operands, _Place(wide, row, count, loop.index, step), tail=False)
        loop.next()
    narrow = emitter.micro(k, count, lambda _: 1, _FEW_ROWS)
    with k.loop(start, high) as loop:
        emitter.run(k, operands, _Place(narrow, row, count, loop.index), tail=False)
        loop.next()


def _share(k: Function, total: Value, part: Value, parts: Value) -> tuple[Value, Value]:
    """Return the range [first, last) of `total` items that belongs to `part` of `parts` equal shares."""
    return _udiv(k, total * part, parts), _udiv(k, total * (part + 1), parts)


def _udiv(f: Function, a: Value, b: Value) -> Value:
    """Divide extents: never negative, and the divisor is at least 1 by construction."""
    return f.emit(I64, f"udiv i64 {a.text}, {b.text}")


def _batch_pointers(
    k: Kernel, emitter: _Emitter, batch: Value, a: Value, b: Value, first: int
) -> tuple[Value, Value]:
    axes = emitter.spec.batch_axes
    rest = batch
    a_offset, b_offset = k.i64(0), k.i64(0)
    for axis in range(axes - 1, -1, -1):
        extent, a_stride, b_stride = (k.dim(first + 3 * axis + i) for i in range(3))
        outer = _udiv(k, rest, extent)
        position = rest - outer * extent
        a_offset, b_offset = a_offset + position * a_stride, b_offset + position * b_stride
        rest = outer
    return k.offset(a, a_offset, emitter.scalar), k.offset(b, b_offset, emitter.scalar)


def _groups(m: Dim, n: Dim, k: Dim, width: int) -> Dim:
    """Return into how many column groups a row block is split: about `_FLOPS_PER_CHUNK` each, at least a few."""
    panels = ceildiv(n, width)
    if not isinstance(k, int) or not isinstance(panels, int):
        return dim_max(1, dim_min(panels, 4))
    rows = 6 * _ROW_TILES_PER_CHUNK
    per_group = max(1, _FLOPS_PER_CHUNK // (2 * rows * max(k, 1) * width))
    full = max(1, -(-panels // per_group))
    # Fewer rows are less work: a single row is memory bound and is worth only a few chunks.
    return dim_min(full, dim_max(min(panels, 4), ceildiv(m * full, rows)))


@lowering(PackedMatMul)
def lower_packed(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Weights in panels: [..., K] x panels -> [..., N]."""
    a = node.operands[0]
    assert a is not None
    if a.type.dtype not in PRODUCT_DTYPES:
        return False
    return _by_panels(node, ctx, isa, a.type.dtype, a.type.shape[-1])


@lowering(PackedQuantizedMatMul)
def lower_quantized(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Bytes times i8 weights in quads: [..., K] x [panels, K / 4, width, 4] -> sums in i32."""
    a = node.operands[0]
    assert a is not None
    return _by_panels(node, ctx, isa, DType.I32, a.type.shape[-1] // 4, a.type.dtype)


def _by_panels(
    node: Node,
    ctx: LoweringContext,
    isa: Isa,
    dtype: DType,
    k: Dim,
    quantized: DType | None = None,
) -> bool | None:
    """Multiply by weights in panels.

    Args:
        node: the product.
        ctx: where launches go.
        isa: the target.
        dtype: of the elements that are walked and of the sums.
        k: how many are walked.
        quantized: of a where it is i8 or u8.
    """
    op, operands, body, extras = split_epilogue(node)
    assert isinstance(op, PackedMatMul | PackedQuantizedMatMul)
    a, b = operands
    assert a is not None
    assert b is not None
    result = node.result.type
    how = plan_finish(dtype, result.shape, result.dtype, body, extras)
    if how is None:
        return False
    m = product(a.type.shape[:-1])
    blocks = ceildiv(m, tile_shape(isa).rows * _ROW_TILES_PER_CHUNK)
    groups = _groups(m, op.columns, k, panel_width(isa, dtype))
    args: list[Arg] = [
        SlotArg(ctx.slot(a)),
        SlotArg(ctx.slot(b)),
        SlotArg(ctx.slot(node.result), writes=True),
    ]
    args += [SlotArg(ctx.slot(x)) for x in extras]
    args += [DimArg(d) for d in (m, dim_max(1, blocks), groups, k, op.columns)]
    kernel = _matmul_kernel(isa, _Spec(how, quantized=quantized))
    ctx.launch(kernel, args, chunks=blocks * groups)
    return None


@cache
def _pack_kernel(isa: Isa, dtype: DType) -> Emitted:
    """Arguments: source [batch, k, n], target [batch, panels, k, width], k, n. A chunk is one panel of one matrix."""
    module = Module(isa)
    lanes = isa.lanes(dtype)
    width = panel_width(isa, dtype)
    vector = vec(scalar_type(dtype), lanes)
    with module.kernel("pack", 4) as k:
        source, target, depth, n = k.slot(0), k.slot(1), k.dim(2), k.dim(3)
        panels = _udiv(k, n + (width - 1), k.i64(width))
        with k.loop(k.begin, k.end) as chunk:
            matrix = _udiv(k, chunk.index, k.smax(panels, 1))
            panel = chunk.index - matrix * panels
            col = panel * width
            masks = [k.tail_mask(n - col - j * lanes, vector) for j in range(width // lanes)]
            out = k.offset(target, chunk.index * depth * width, vector)
            start = k.offset(source, matrix * depth * n + col, vector)
            with k.loop(0, depth) as loop:
                row = k.offset(start, loop.index * n, vector)
                to = k.offset(out, loop.index * width, vector)
                for j, mask in enumerate(masks):
                    k.store(k.load_masked(vector, row, mask, j * lanes), to, j * lanes)
                loop.next()
            chunk.next()
    return finish(module)


@lowering(MatMul)
def lower_matmul(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Both operands at run time: pack b into panels, then multiply. Batch axes broadcast."""
    _, operands, body, extras = split_epilogue(node)
    a, b = operands
    assert a is not None
    assert b is not None
    dtype = a.type.dtype
    if dtype not in PRODUCT_DTYPES or b.type.rank < 2 or a.type.rank < 2:
        return False
    result = node.result.type
    how = plan_finish(dtype, result.shape, result.dtype, body, extras)
    batch = _batch_axes(
        a.type.shape[:-2], b.type.shape[:-2], a.type.shape, b.type.shape, isa, dtype
    )
    if how is None or batch is None:
        return False
    k, n, m = a.type.shape[-1], b.type.shape[-1], a.type.shape[-2]
    width = panel_width(isa, dtype)
    panels = ceildiv(n, width)
    matrices = product(b.type.shape[:-2])
    packed = ctx.temporary(matrices * panels * k * width * dtype.itemsize)
    ctx.launch(
        _pack_kernel(isa, dtype),
        [SlotArg(ctx.slot(b)), SlotArg(packed, writes=True), DimArg(k), DimArg(n)],
        chunks=matrices * panels,
    )
    if not batch and not b.type.shape[:-2]:
        m = product(a.type.shape[:-1])
    spec = _Spec(how, len(batch))
    blocks = dim_max(1, ceildiv(m, tile_shape(isa).rows * _ROW_TILES_PER_CHUNK))
    groups = _groups(m, n, k, width)
    args: list[Arg] = [
        SlotArg(ctx.slot(a)),
        SlotArg(packed),
        SlotArg(ctx.slot(node.result), writes=True),
    ]
    args += [SlotArg(ctx.slot(x)) for x in extras]
    args += [DimArg(d) for d in (m, blocks, groups, k, n)]
    args += [DimArg(d) for axis in batch for d in axis]
    total = product(axis[0] for axis in batch)
    ctx.launch(_matmul_kernel(isa, spec), args, chunks=total * blocks * groups)
    return None


def _batch_axes(
    a_batch: Shape, b_batch: Shape, a: Shape, b: Shape, isa: Isa, dtype: DType
) -> list[tuple[Dim, Dim, Dim]] | None:
    """Return (extent, stride in a, stride in packed b) per collapsed batch axis, or None if it does not collapse."""
    facts = current_facts()
    if all(d == 1 for d in b_batch) and not b_batch:
        return []
    rank = max(len(a_batch), len(b_batch))
    left = (1,) * (rank - len(a_batch)) + a_batch
    right = (1,) * (rank - len(b_batch)) + b_batch
    width = panel_width(isa, dtype)
    a_matrix = a[-2] * a[-1]
    b_matrix = ceildiv(b[-1], width) * width * b[-2]
    axes: list[tuple[Dim, Dim, Dim]] = []
    a_stride, b_stride = a_matrix, b_matrix
    for x, y in zip(reversed(left), reversed(right), strict=True):
        same = facts.equal(x, y) is True
        if not same and x != 1 and y != 1:
            return None
        extent = x if y == 1 else y
        if extent != 1:
            item = (extent, a_stride if x != 1 else 0, b_stride if y != 1 else 0)
            previous = axes[0] if axes else None
            if previous is not None and _continues(previous, item):
                axes[0] = (previous[0] * extent, previous[1], previous[2])
            else:
                axes.insert(0, item)
        a_stride, b_stride = a_stride * x, b_stride * y
    return axes or [(1, 0, 0)]


def _continues(inner: tuple[Dim, Dim, Dim], outer: tuple[Dim, Dim, Dim]) -> bool:
    """Whether an outer axis walks on where the inner one ends, in both operands."""
    for i, o in zip(inner[1:], outer[1:], strict=True):
        if (i == 0) != (o == 0) or (i != 0 and o != inner[0] * i):
            return False
    return True
