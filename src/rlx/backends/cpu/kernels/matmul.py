# SPDX-License-Identifier: Apache-2.0
"""Matrix multiplication with a fused epilogue.

    c[m, n] = epilogue(sum_k a[m, k] * b[k, n])

`a` is dense row-major. `b` lies in panels of `width` columns, [ceil(n / width)][k][width]: weights are packed once per
version, a run-time operand is packed by a kernel just before. The micro-kernel keeps rows x width accumulators in
registers (6 x 4 vectors with 32 registers) and walks k once: per k, 4 loads of b, 6 broadcasts of a, 24 FMAs; `a` is
never packed. Two rows walk 2 panels and one row walks 4 panels at once, which gives enough independent FMAs and as
many memory streams. Each element is one chain of FMAs over k in order, so a row's result does not depend on how many
rows there are, on chunks or on threads.

The epilogue runs on a finished tile: inline when it is cheap, else through a small function over the tile so that its
code exists once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.emit import emit_body, load_value, store_value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.lltypes import I64, PTR, Type, scalar_type, storage_type, vec
from rlx.backends.cpu.lowering import lowering, split_epilogue
from rlx.backends.cpu.ops import PackedMatMul
from rlx.base.dims import Dim, ceildiv, dim_max, dim_min, product
from rlx.base.dtypes import DType
from rlx.base.facts import current_facts
from rlx.base.types import Shape
from rlx.expr.body import Body
from rlx.ir.graph import Node, Value as GraphValue
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.matmul import MatMul

__all__ = ["Extra", "Tile", "extra_kinds", "panel_width", "tile_shape"]

_ROW_TILES_PER_CHUNK = 16
_FLOPS_PER_CHUNK = 6_000_000
_CHEAP_BODY = 6
_PREFETCH_BYTES = 1024


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


@dataclass(frozen=True)
class Extra:
    """A further operand of an epilogue.

    Attributes:
        kind: `full` (the shape of the result), `column` (one per column), `row` (one per row), or `one`.
        dtype: of its elements.
    """

    kind: str
    dtype: DType


def extra_kinds(result: Shape, extras: Sequence[GraphValue]) -> tuple[Extra, ...] | None:
    """Classify epilogue operands against the result's shape; None if one is of no kind."""
    facts = current_facts()
    out: list[Extra] = []
    for value in extras:
        shape = value.type.shape
        if all(d == 1 for d in shape):
            kind = "one"
        elif len(shape) == len(result) and all(facts.equal(a, b) is True for a, b in zip(shape, result, strict=True)):
            kind = "full"
        elif all(d == 1 for d in shape[:-1]) and facts.equal(shape[-1], result[-1]) is True:
            kind = "column"
        elif (
            len(shape) == len(result)
            and shape[-1] == 1
            and all(facts.equal(a, b) is True for a, b in zip(shape[:-1], result[:-1], strict=True))
        ):
            kind = "row"
        else:
            return None
        out.append(Extra(kind, value.type.dtype))
    return tuple(out)


@dataclass(frozen=True)
class _Spec:
    """What a matmul kernel is specialised on; None extents come from the dims table."""

    dtype: DType
    k: int | None
    n: int | None
    body: Body | None
    extras: tuple[Extra, ...]
    result: DType
    batch_axes: int = 0

    @property
    def expensive(self) -> bool:
        """Whether the epilogue should exist once as a function instead of inline per accumulator."""
        return self.body is not None and len(self.body.instrs) > _CHEAP_BODY


class _Emitter:
    """Emits the functions of one kernel."""

    def __init__(self, module: Module, spec: _Spec) -> None:
        self.module = module
        self.spec = spec
        isa = module.isa
        self.tile = tile_shape(isa)
        self.lanes = isa.lanes(spec.dtype)
        self.width = self.tile.vectors * self.lanes
        self.vector: Type = vec(scalar_type(spec.dtype), self.lanes)
        self.scalar: Type = scalar_type(spec.dtype)
        self.epilogues: dict[bool, Function] = {}
        self.micros: dict[tuple[int, int, bool], Function] = {}

    # Every function takes: a, b, c, extras..., row, column, k, n (the last two ignored where static).

    def params(self, *names: str) -> list[tuple[str, Type]]:
        pointers = [*names, *(f"x{i}" for i in range(len(self.spec.extras)))]
        return [*((p, PTR) for p in pointers), ("row", I64), ("col", I64), ("k", I64), ("n", I64)]

    def panels_for(self, rows: int) -> int:
        """How many panels a micro-kernel of that many rows walks at once."""
        limit = {1: 4, 2: 2}.get(rows, 1)
        return limit

    def micro(self, rows: int, panels: int, tail: bool) -> Function:
        """Return the function that computes `rows` x (`panels` * width) results; `tail` masks the columns."""
        key = (rows, panels, tail)
        if key not in self.micros:
            epilogue = self.epilogue(tail) if self.spec.expensive else None
            with self.module.function(f"tile{rows}x{panels}{'t' if tail else ''}", self.params("a", "b", "c")) as f:
                self._micro(f, rows, panels, tail, epilogue)
            self.micros[key] = f
        return self.micros[key]

    def _micro(self, f: Function, rows: int, panels: int, tail: bool, epilogue: Function | None) -> None:
        a, b, c, *rest = f.args
        extras, (row, col, k_dyn, n_dyn) = rest[: len(self.spec.extras)], rest[len(self.spec.extras) :]
        k = f.i64(self.spec.k) if self.spec.k is not None else k_dyn
        acc = self._accumulate(f, a, b, k, rows, panels)
        n = f.i64(self.spec.n) if self.spec.n is not None else n_dyn
        for p in range(panels):
            part = [acc[i][p * self.tile.vectors : (p + 1) * self.tile.vectors] for i in range(rows)]
            at = col + p * self.width
            if epilogue is None:
                finisher = _Finisher(self, f, extras, n, tail, at)
                for i in range(rows):
                    finisher.row(part[i], c, row + i)
            else:
                buffer = f.alloca(self.scalar, rows * self.width)
                for i in range(rows):
                    for j, value in enumerate(part[i]):
                        f.store(value, buffer, i * self.width + j * self.lanes)
                count = f.i64(rows)
                f.call(epilogue, buffer, c, *extras, row, at, count, n)

    def _accumulate(
        self, f: Function, a: Value, b: Value, k: Value, rows: int, panels: int
    ) -> list[list[Value]]:
        count = panels * self.tile.vectors
        zero = f.const(0.0, self.vector)
        flat = [zero] * (rows * count)
        panel_stride = k * self.width  # elements from one panel to the next
        static = self.spec.k
        unroll = 4 if rows * count >= 12 else 8
        if static is not None:
            unroll = next(u for u in (unroll, 4, 2, 1) if static % u == 0) if static else 1
        else:
            unroll = 1
        bases = [b if p == 0 else f.offset(b, panel_stride * p, self.scalar) for p in range(panels)]
        with f.loop(0, k, unroll, carry=flat) as loop:
            current = list(loop.carry)
            streams = [f.offset(base, loop.index * self.width, self.scalar) for base in bases]
            left = f.offset(a, loop.index, self.scalar)
            for u in range(unroll):
                columns = [
                    f.load(self.vector, streams[p], u * self.width + j * self.lanes)
                    for p in range(panels)
                    for j in range(self.tile.vectors)
                ]
                if rows <= 4:
                    for p in range(panels):
                        self._prefetch(f, streams[p], u)
                for i in range(rows):
                    stride = i * static if static is not None else k * i
                    factor = f.splat(f.load(self.scalar, f.offset(left, stride, self.scalar), u), self.lanes)
                    for j in range(count):
                        current[i * count + j] = f.fma(factor, columns[j], current[i * count + j])
            loop.next(*current)
        return [loop.out[i * count : (i + 1) * count] for i in range(rows)]

    def _prefetch(self, f: Function, stream: Value, step: int) -> None:
        line = self.vector.itemsize * self.width
        for start in range(0, line, 64):
            f.prefetch(f.offset(stream, step * line + start + _PREFETCH_BYTES))

    def epilogue(self, tail: bool) -> Function:
        """Return the function that finishes a tile stored in a buffer, row by row."""
        if tail not in self.epilogues:
            params = self.params("tile", "c")
            params[-2] = ("rows", I64)
            with self.module.function(f"finish{'t' if tail else ''}", params) as f:
                tile, c, *rest = f.args
                extras, (row, col, rows, n_dyn) = rest[: len(self.spec.extras)], rest[len(self.spec.extras) :]
                n = f.i64(self.spec.n) if self.spec.n is not None else n_dyn
                finisher = _Finisher(self, f, extras, n, tail, col)
                with f.loop(0, rows) as loop:
                    base = f.offset(tile, loop.index * self.width, self.scalar)
                    values = [f.load(self.vector, base, j * self.lanes) for j in range(self.tile.vectors)]
                    finisher.row(values, c, row + loop.index)
                    loop.next()
            self.epilogues[tail] = f
        return self.epilogues[tail]


class _Finisher:
    """Applies the epilogue to one row of a panel and stores it."""

    def __init__(
        self, emitter: _Emitter, f: Function, extras: Sequence[Value], n: Value, tail: bool, col: Value
    ) -> None:
        self.emitter = emitter
        self.f = f
        self.extras = extras
        self.n = n
        self.col = col
        lanes = emitter.lanes
        count = emitter.tile.vectors
        self.masks: list[Value | None] = [None] * count
        if tail:
            self.masks = [f.tail_mask(n - col - j * lanes, vec(emitter.vector, lanes)) for j in range(count)]
        self.shared: list[list[Value] | None] = []
        for extra, pointer in zip(emitter.spec.extras, extras, strict=True):
            if extra.kind == "column":
                self.shared.append(
                    [load_value(f, extra.dtype, pointer, col + j * lanes, lanes, self.masks[j]) for j in range(count)]
                )
            elif extra.kind == "one":
                one = load_value(f, extra.dtype, pointer, f.i64(0), 0, None)
                self.shared.append([f.splat(one, lanes)] * count)
            else:
                self.shared.append(None)

    def row(self, values: Sequence[Value], c: Value, row: Value) -> None:
        """Finish one row: `values` are its accumulators, stored from c[row, col]."""
        f, spec, lanes = self.f, self.emitter.spec, self.emitter.lanes
        start = row * self.n + self.col
        row_values: dict[int, Value] = {}
        for index, extra in enumerate(spec.extras):
            if extra.kind == "row":
                one = load_value(f, extra.dtype, self.extras[index], row, 0, None)
                row_values[index] = f.splat(one, lanes)
        for j, value in enumerate(values):
            mask = self.masks[j]
            at = start + j * lanes
            result = value
            if spec.body is not None:
                inputs = [value]
                for index, extra in enumerate(spec.extras):
                    shared = self.shared[index]
                    if shared is not None:
                        inputs.append(shared[j])
                    elif index in row_values:
                        inputs.append(row_values[index])
                    else:
                        inputs.append(load_value(f, extra.dtype, self.extras[index], at, lanes, mask))
                (result,) = emit_body(f, spec.body, inputs, lanes)
            store_value(f, spec.result, result, c, at, mask)


def _row_tiles(f: Function, m: Value, tile: int) -> tuple[Value, Value, Value]:
    """Return (number of row tiles, rows of a short tile, how many tiles have one row more)."""
    count = _udiv(f, m + (tile - 1), f.i64(tile))
    short = _udiv(f, m, f.smax(count, 1))
    return count, short, m - short * count


def _tile_rows(
    f: Function, emitter: _Emitter, call: Callable[[Value, int], None], first: Value, last: Value, m: Value
) -> None:
    """Emit: for every row tile in [first, last), `call(first row, rows)` with the tile's row count static."""
    _, short, longer = _row_tiles(f, m, emitter.tile.rows)
    with f.loop(first, last) as loop:
        index = loop.index
        row = index * short + f.smin(index, longer)
        rows = short + f.zext(index < longer, I64)
        for count in range(1, emitter.tile.rows + 1):
            with f.if_(rows.eq(count)):
                call(row, count)
        loop.next()


@cache
def _matmul_kernel(isa: Isa, spec: _Spec) -> Emitted:
    """Arguments: a, b, c, extras..., m, row blocks, column groups, k, n, then per batch axis (extent, a, b) strides."""
    module = Module(isa)
    emitter = _Emitter(module, spec)
    count = len(spec.extras)
    nargs = 3 + count + 5 + 3 * spec.batch_axes
    for rows in range(1, emitter.tile.rows + 1):
        for panels in {1, emitter.panels_for(rows)}:
            emitter.micro(rows, panels, tail=False)
        if spec.n is None or spec.n % emitter.width:
            emitter.micro(rows, 1, tail=True)
    form = "gemm" if spec.k is not None else "matmul"
    with module.kernel(form, nargs) as k:
        with k.loop(k.begin, k.end) as chunk:
            _chunk(k, emitter, chunk.index, count)
            chunk.next()
    return finish(module)


def _chunk(k: Kernel, emitter: _Emitter, index: Value, count: int) -> None:
    spec = emitter.spec
    m, blocks, groups = k.dim(3 + count), k.dim(4 + count), k.dim(5 + count)
    depth = k.i64(spec.k) if spec.k is not None else k.dim(6 + count)
    n = k.i64(spec.n) if spec.n is not None else k.dim(7 + count)
    a, b, c = k.slot(0), k.slot(1), k.slot(2)
    extras = [k.slot(3 + i) for i in range(count)]
    per_batch = blocks * groups
    batch = _udiv(k, index, per_batch)
    rest = index - batch * per_batch
    if spec.batch_axes:
        a, b = _batch_pointers(k, emitter, batch, a, b, 8 + count)
        c = k.offset(c, batch * m * n, storage_type(spec.result))
        extras = [
            k.offset(x, batch * (m * n if e.kind == "full" else m), storage_type(e.dtype))
            if e.kind in ("full", "row")
            else x
            for x, e in zip(extras, spec.extras, strict=True)
        ]
    group = _udiv(k, rest, blocks)
    block = rest - group * blocks
    tiles, _, _ = _row_tiles(k, m, emitter.tile.rows)
    first, last = _share(k, tiles, block, blocks)
    whole = _udiv(k, n, k.i64(emitter.width))
    panels = _udiv(k, n + (emitter.width - 1), k.i64(emitter.width))
    low, high = _share(k, panels, group, groups)
    full_end = k.smin(high, whole)

    def run(micro: Function, row: Value, panel: Value) -> None:
        left = k.offset(a, row * depth, emitter.scalar)
        right = k.offset(b, panel * depth * emitter.width, emitter.scalar)
        k.call(micro, left, right, c, *extras, row, panel * emitter.width, depth, n)

    _panels(k, emitter, run, (first, last, m), (low, full_end, high))


def _panels(
    k: Kernel,
    emitter: _Emitter,
    run: Callable[[Function, Value, Value], None],
    rows: tuple[Value, Value, Value],
    columns: tuple[Value, Value, Value],
) -> None:
    """Emit the loops over panels and row tiles of a chunk: full panels, then the last partial one."""
    first, last, m = rows
    low, full_end, high = columns
    _, short, longer = _row_tiles(k, m, emitter.tile.rows)
    # One or two rows walk several panels at once, so panels are the inner loop there.
    few = (short + k.zext(longer > 0, I64)) <= 2
    with k.if_else(few) as branch:
        with branch.then():
            _tile_rows(k, emitter, lambda row, r: _many_panels(k, emitter, run, row, r, low, full_end), first, last, m)
        with branch.otherwise():
            with k.loop(low, full_end) as loop:
                panel = loop.index
                _tile_rows(
                    k, emitter, lambda row, r: run(emitter.micro(r, 1, tail=False), row, panel), first, last, m
                )
                loop.next()
    if emitter.spec.n is None or emitter.spec.n % emitter.width:
        with k.loop(k.smax(low, full_end), high) as loop:
            panel = loop.index
            _tile_rows(k, emitter, lambda row, r: run(emitter.micro(r, 1, tail=True), row, panel), first, last, m)
            loop.next()


def _many_panels(
    k: Kernel,
    emitter: _Emitter,
    run: Callable[[Function, Value, Value], None],
    row: Value,
    rows: int,
    low: Value,
    high: Value,
) -> None:
    step = emitter.panels_for(rows)
    start = low
    if step > 1:
        start = low + _udiv(k, k.smax(high - low, 0), k.i64(step)) * step
        with k.loop(low, start, step) as loop:
            run(emitter.micro(rows, step, tail=False), row, loop.index)
            loop.next()
    with k.loop(start, high) as loop:
        run(emitter.micro(rows, 1, tail=False), row, loop.index)
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
    op, operands, body, extras = split_epilogue(node)
    assert isinstance(op, PackedMatMul)
    a, b = operands
    assert a is not None
    assert b is not None
    result = node.result.type
    kinds = extra_kinds(result.shape, extras)
    k = a.type.shape[-1]
    if kinds is None or a.type.dtype not in (DType.F32, DType.F64) or not isinstance(k, int):
        return False
    spec = _Spec(a.type.dtype, k, op.columns, body, kinds, result.dtype)
    m = product(a.type.shape[:-1])
    blocks = ceildiv(m, tile_shape(isa).rows * _ROW_TILES_PER_CHUNK)
    groups = _groups(m, op.columns, k, panel_width(isa, a.type.dtype))
    args: list[Arg] = [SlotArg(ctx.slot(a)), SlotArg(ctx.slot(b)), SlotArg(ctx.slot(node.result), writes=True)]
    args += [SlotArg(ctx.slot(x)) for x in extras]
    args += [DimArg(d) for d in (m, dim_max(1, blocks), groups, k, op.columns)]
    ctx.launch(_matmul_kernel(isa, spec), args, chunks=blocks * groups)
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
    if dtype not in (DType.F32, DType.F64) or b.type.rank < 2 or a.type.rank < 2:
        return False
    result = node.result.type
    kinds = extra_kinds(result.shape, extras)
    batch = _batch_axes(a.type.shape[:-2], b.type.shape[:-2], a.type.shape, b.type.shape, isa, dtype)
    if kinds is None or batch is None:
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
    spec = _Spec(dtype, None, None, body, kinds, result.dtype, len(batch))
    blocks = dim_max(1, ceildiv(m, tile_shape(isa).rows * _ROW_TILES_PER_CHUNK))
    groups = _groups(m, n, k, width)
    args: list[Arg] = [SlotArg(ctx.slot(a)), SlotArg(packed), SlotArg(ctx.slot(node.result), writes=True)]
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
    return all((o == 0 and i == 0) or (o != 0 and i != 0 and o == inner[0] * i) for i, o in zip(inner[1:], outer[1:], strict=True))
