# SPDX-License-Identifier: Apache-2.0
"""Attention in f32: softmax(scale * q k^T + mask) v, one query tile at a time.

    q [batch, heads, queries, depth], k and v [batch, kv_heads, keys, depth], any strides with unit depth stride

Keys are first transposed into panels [ceil(keys / width)][depth][width]. Then, for a tile of up to 6 queries: scores
are computed 6 x width at a time in registers, scaled, masked and stored in scratch with a running maximum; one pass
over the scratch row exponentiates and sums; at last the tile of results accumulates over all keys in registers and is
multiplied by 1 / sum. Scores stay in L1 for up to about 1,300 keys and in L2 beyond. A row's result does not depend on
the other rows, on chunks or on threads.

A row whose scores are all -inf is NaN (softmax's meaning) or zero (`masked_row=zeros`), NaN scores make their row NaN.
Where there are no keys at all every row is zero.

LLVM's time for a kernel of depth 32, at equal speed: 130 ms when every tile height had its own exponentials, 78 ms with
one function of a row for all of them, 72 ms with one call through a pointer for all heights. The kernel of the keys: 33
ms for a block of every 16 columns, 19 ms with a loop over the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from rlx.backends.cpu import vmath
from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.emit import load_value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.gemm_tiles import tile_shape
from rlx.backends.cpu.kernels.shuffles import transposed
from rlx.backends.cpu.lltypes import F32, I64, PTR, Type, storage_type, vec
from rlx.backends.cpu.lowering import lowering
from rlx.backends.cpu.vconvert import cast
from rlx.base.dims import Dim, ceildiv
from rlx.base.dtypes import DType
from rlx.ir.graph import Node
from rlx.ir.graph import Value as GraphValue
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.attention import Attention

_QUERIES_PER_CHUNK = 48


@dataclass(frozen=True)
class _Spec:
    """What the kernel is specialised on."""

    depth: int
    value_depth: int
    scale: float
    mask: str  # none, add, keep
    mask_dtype: DType
    mask_moves: bool  # the mask varies along the keys
    mask_rows: bool  # and along the queries
    causal: bool
    masked_row: str
    softcap: float


class _Tile:
    """Emits the function for one tile of `rows` queries."""

    def __init__(self, module: Module, spec: _Spec) -> None:
        self.module = module
        self.spec = spec
        self.lanes = module.isa.lanes(DType.F32)
        self.vectors = tile_shape(module.isa).vectors
        self.width = self.lanes * self.vectors
        self.vector: Type = vec(F32, self.lanes)

    PARAMS = (
        *((name, PTR) for name in ("q", "keys", "v", "out", "mask", "p")),
        *(
            (name, I64)
            for name in (
                "q_stride",
                "v_stride",
                "out_stride",
                "mask_stride",
                "limit",
                "total",
                "pitch",
            )
        ),
    )

    def emit(self, rows: int) -> Function:
        """Return the function. `limit` is how many keys the first query sees when causal, else `total`."""
        exponentials = self.exponentials
        with self.module.function(f"queries{rows}", self.PARAMS) as f:
            (
                q,
                keys,
                v,
                out,
                mask,
                p,
                q_stride,
                v_stride,
                out_stride,
                mask_stride,
                limit,
                total,
                pitch,
            ) = f.args
            seen = f.smin(limit + (rows - 1), total) if self.spec.causal else total
            tops = self._scores(
                f, rows, (q, keys, mask, p), (q_stride, mask_stride, limit, total, pitch, seen)
            )
            sums = [
                f.call(exponentials, f.offset(p, pitch * i, F32), top, seen)
                for i, top in enumerate(tops)
            ]
            factors = self._factors(f, sums, total)
            self._values(f, rows, (p, v, out), (v_stride, out_stride, seen, pitch), factors)
        return f

    def _scores(
        self,
        f: Function,
        rows: int,
        pointers: tuple[Value, Value, Value, Value],
        numbers: tuple[Value, ...],
    ) -> list[Value]:
        """Emit the scores of all keys into scratch; return the maximum of each row (scalars)."""
        q, keys, mask, p = pointers
        q_stride, mask_stride, limit, total, pitch, seen = numbers
        low = f.const(float("-inf"), self.vector)
        with f.loop(0, seen, self.width, carry=[low] * rows) as loop:
            panel = f.offset(keys, loop.index * self.spec.depth, F32)
            scores = self._products(f, rows, q, q_stride, panel)
            tops = list(loop.carry)
            for j in range(self.vectors):
                at = loop.index + j * self.lanes
                inside = f.tail_mask(total - at, self.vector)
                shared = None if self.spec.mask_rows else self._mask(f, mask, f.i64(0), at, inside)
                for i in range(rows):
                    hidden = shared
                    if hidden is None:
                        hidden = self._mask(f, mask, mask_stride * i, at, inside)
                    score = self._masked(f, scores[i][j], hidden)
                    if self.spec.causal:
                        visible = f.tail_mask(f.smin(limit + i, total) - at, self.vector)
                        score = f.select(visible, score, low)
                    f.store(score, f.offset(p, pitch * i + at, F32))
                    tops[i] = f.fmax_fast(score, tops[i])
            loop.next(*tops)
        return [f.reduce(t, f.fmax_fast) for t in loop.out]

    def _products(
        self, f: Function, rows: int, q: Value, q_stride: Value, panel: Value
    ) -> list[list[Value]]:
        zero = f.const(0.0, self.vector)
        unroll = 2 if self.spec.depth % 2 == 0 else 1
        with f.loop(0, self.spec.depth, unroll, carry=[zero] * (rows * self.vectors)) as loop:
            current = list(loop.carry)
            line, left = f.offset(panel, loop.index * self.width, F32), f.offset(q, loop.index, F32)
            for u in range(unroll):
                columns = [
                    f.load(self.vector, line, u * self.width + j * self.lanes)
                    for j in range(self.vectors)
                ]
                for i in range(rows):
                    factor = f.splat(f.load(F32, f.offset(left, q_stride * i, F32), u), self.lanes)
                    for j in range(self.vectors):
                        at = i * self.vectors + j
                        current[at] = f.fma(factor, columns[j], current[at])
            loop.next(*current)
        return [loop.out[i * self.vectors : (i + 1) * self.vectors] for i in range(rows)]

    def _mask(self, f: Function, mask: Value, row: Value, at: Value, inside: Value) -> Value:
        """Return what hides keys of a vector: numbers to add, -inf past the last key, or whether each is kept.

        Args:
            f: where to emit.
            mask: pointer to the operand.
            row: offset of the query's row in it.
            at: the first key.
            inside: which keys of the vector exist.
        """
        spec = self.spec
        low = f.const(float("-inf"), self.vector)
        if spec.mask == "none":
            return f.select(inside, f.const(0.0, self.vector), low)
        dtype = spec.mask_dtype
        if spec.mask_moves:
            value = load_value(f, dtype, mask, row + at, self.lanes, inside)
        else:
            value = f.splat(load_value(f, dtype, mask, row, 0), self.lanes)
        if spec.mask == "keep":
            return value & inside
        return f.select(inside, cast(f, value, dtype.compute, DType.F32), low)

    def _masked(self, f: Function, score: Value, mask: Value) -> Value:
        """Scale, cap and mask a vector of scores."""
        spec = self.spec
        low = f.const(float("-inf"), self.vector)
        scale = spec.scale
        if spec.softcap:
            score = vmath.tanh(f, score * (scale / spec.softcap))
            scale = spec.softcap
        if spec.mask == "keep":  # also what is no number
            return f.select(mask, score * scale, low)
        return f.fma(score, f.const(scale, self.vector), mask)

    @cached_property
    def exponentials(self) -> Function:
        """(scores of a row, their maximum, keys) -> the sum of exp(score - maximum), which replace the scores."""
        params = [("line", PTR), ("top", F32), ("seen", I64)]
        with self.module.function("exponentials", params, F32) as f:
            line, top, seen = f.args
            zero = f.const(0.0, self.vector)
            if (
                self.spec.masked_row == "zeros"
            ):  # exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
                top = f.select(top.eq(float("-inf")), f.f32(0.0), top)
            top = f.splat(top, self.lanes)
            with f.loop(0, seen, self.width, carry=[zero] * self.vectors) as loop:
                current: list[Value] = []
                for j in range(self.vectors):
                    place = f.offset(line, loop.index + j * self.lanes, F32)
                    value = vmath.softmax_exp(f, f.load(self.vector, place) - top)
                    f.store(value, place)
                    current.append(loop.carry[j] + value)
                loop.next(*current)
            total = f.reduce_add(f.combine_all(loop.out, lambda a, b: a + b))
            if self.spec.masked_row == "nan_to_zeros":
                with f.if_(total.is_nan()), f.loop(0, seen, self.lanes) as loop:
                    f.store(zero, f.offset(line, loop.index, F32))
                    loop.next()
                total = f.select(total.is_nan(), f.f32(0.0), total)
            f.ret(total)
        return f

    def _factors(self, f: Function, sums: list[Value], keys: Value) -> list[Value]:
        """Return what the sums over the values are multiplied by, per row: 1 / sum of the exponentials.

        A sum is 0 where no key is seen. Without any keys the result is a sum of nothing, 0; where all are hidden it is
        NaN, or 0 where `masked_row` says so.
        """
        factors: list[Value] = []
        for total in sums:
            nothing = keys.eq(0) if self.spec.masked_row == "nan" else total.eq(0.0)
            factor = f.select(nothing, f.f32(0.0), f.f32(1.0) / total)
            factors.append(f.splat(factor, self.lanes))
        return factors

    def _values(
        self,
        f: Function,
        rows: int,
        pointers: tuple[Value, Value, Value],
        numbers: tuple[Value, Value, Value, Value],
        factors: list[Value],
    ) -> None:
        """Emit the products with the values, in column groups that fit the registers."""
        p, v, out = pointers
        v_stride, out_stride, seen, pitch = numbers
        depth = self.spec.value_depth
        starts = list(range(0, depth, self.lanes))
        for first in range(0, len(starts), self.vectors):
            group = starts[first : first + self.vectors]
            masks = [
                f.tail_mask(f.i64(depth - s), self.vector) if depth - s < self.lanes else None
                for s in group
            ]
            acc = self._weighted(f, rows, (p, v), (v_stride, seen, pitch), group, masks)
            for i in range(rows):
                for j, start in enumerate(group):
                    place = f.offset(out, out_stride * i + start, F32)
                    result = acc[i][j] * factors[i]
                    mask = masks[j]
                    if mask is None:
                        f.store(result, place)
                    else:
                        f.store_masked(result, place, mask)

    def _weighted(
        self,
        f: Function,
        rows: int,
        pointers: tuple[Value, Value],
        numbers: tuple[Value, Value, Value],
        group: list[int],
        masks: list[Value | None],
    ) -> list[list[Value]]:
        p, v = pointers
        v_stride, seen, pitch = numbers
        count = len(group)
        with f.loop(0, seen, carry=[f.const(0.0, self.vector)] * (rows * count)) as loop:
            current = list(loop.carry)
            line = f.offset(v, loop.index * v_stride, F32)
            columns: list[Value] = []
            for start, mask in zip(group, masks, strict=True):
                if mask is None:
                    columns.append(f.load(self.vector, line, start))
                else:
                    columns.append(f.load_masked(self.vector, line, mask, start))
            for i in range(rows):
                factor = f.splat(f.load(F32, f.offset(p, pitch * i + loop.index, F32)), self.lanes)
                for j in range(count):
                    current[i * count + j] = f.fma(factor, columns[j], current[i * count + j])
            loop.next(*current)
        return [loop.out[i * count : (i + 1) * count] for i in range(rows)]


@cache
def _attention_kernel(isa: Isa, spec: _Spec) -> Emitted:
    """Arguments: q, keys (panels), v, out, mask; then the numbers of `_numbers`."""
    module = Module(isa)
    tile = _Tile(module, spec)
    functions = {rows: tile.emit(rows) for rows in range(1, 7)}
    with module.kernel("attention", 5 + len(_NUMBERS)) as k, k.loop(k.begin, k.end) as chunk:
        _attention_chunk(k, tile, functions, chunk.index)
        chunk.next()
    return finish(module)


_NUMBERS = (
    *("heads", "group", "queries", "keys", "blocks", "shift", "pitch"),
    *("q_batch", "q_head", "q_row", "q_offset", "v_batch", "v_head", "v_row", "v_offset"),
    *("o_batch", "o_head", "o_row", "m_batch", "m_head", "m_row"),
)


def _attention_chunk(k: Kernel, tile: _Tile, functions: dict[int, Function], index: Value) -> None:
    n = {name: k.dim(5 + i) for i, name in enumerate(_NUMBERS)}
    q, keys, v, out, mask = (k.slot(i) for i in range(5))
    pair = _udiv(k, index, n["blocks"])
    block = index - pair * n["blocks"]
    batch = _udiv(k, pair, n["heads"])
    head = pair - batch * n["heads"]
    kv_head = _udiv(k, head, n["group"])
    kv_heads = _udiv(k, n["heads"], n["group"])
    panel = n["pitch"] * tile.spec.depth
    keys = k.offset(keys, (batch * kv_heads + kv_head) * panel, F32)
    v = k.offset(v, n["v_offset"] + batch * n["v_batch"] + kv_head * n["v_head"], F32)
    first = _udiv(k, n["queries"] * block, n["blocks"])
    last = _udiv(k, n["queries"] * (block + 1), n["blocks"])
    rows = last - first
    tiles = _udiv(k, rows + 5, k.i64(6))
    short = _udiv(k, rows, k.smax(tiles, 1))
    longer = rows - short * tiles
    mask_kind = storage_type(tile.spec.mask_dtype)
    with k.loop(0, tiles) as loop:
        row = first + loop.index * short + k.smin(loop.index, longer)
        size = short + k.zext(loop.index < longer, I64)
        left = k.offset(
            q, n["q_offset"] + batch * n["q_batch"] + head * n["q_head"] + row * n["q_row"], F32
        )
        to = k.offset(out, batch * n["o_batch"] + head * n["o_head"] + row * n["o_row"], F32)
        over = k.offset(
            mask, batch * n["m_batch"] + head * n["m_head"] + row * n["m_row"], mask_kind
        )
        limit = row + n["shift"] + 1
        k.call_pointer(
            k.choose(size, functions, functions[1].params),
            *(left, keys, v, to, over, k.scratch()),
            *(n["q_row"], n["v_row"], n["o_row"], n["m_row"], limit, n["keys"], n["pitch"]),
        )
        loop.next()


@cache
def _panel_kernel(isa: Isa, depth: int) -> Emitted:
    """Arguments: k, panels, heads, keys, blocks, then batch, head, row strides and offset of k.

    A chunk transposes `width` keys of one (batch, head) into [depth][width]; keys past the last one are zeros.
    """
    module = Module(isa)
    lanes = isa.lanes(DType.F32)
    width = tile_shape(isa).vectors * lanes
    vector = vec(F32, lanes)
    with module.kernel("keys", 9) as k:
        source, target = k.slot(0), k.slot(1)
        heads, keys, blocks, by_batch, by_head, by_row, offset = (k.dim(i) for i in range(2, 9))
        with k.loop(k.begin, k.end) as chunk:
            pair = _udiv(k, chunk.index, blocks)
            block = chunk.index - pair * blocks
            batch = _udiv(k, pair, heads)
            head = pair - batch * heads
            start = offset + batch * by_batch + head * by_head
            out = k.offset(target, chunk.index * (depth * width), F32)
            with k.loop(0, width, lanes) as part:
                key = block * width + part.index

                def block_at(first: Value, size: int) -> None:
                    columns = k.tail_mask(k.i64(size), vector)
                    lines: list[Value] = []
                    for i in range(lanes):
                        present = (key + i) < keys
                        mask = k.select(present, columns, k.const(0, columns.type))
                        line = k.offset(source, start + (key + i) * by_row + first, F32)
                        lines.append(k.load_masked(vector, line, mask))
                    to = k.offset(out, part.index + first * width, F32)
                    for d, value in enumerate(transposed(k, lines)[:size]):
                        k.store(value, k.offset(to, d * width, F32))

                whole = depth // lanes * lanes
                if whole:
                    with k.loop(0, whole, lanes) as loop:
                        block_at(loop.index, lanes)
                        loop.next()
                if depth > whole:
                    block_at(k.i64(whole), depth - whole)
                part.next()
            chunk.next()
    return finish(module)


def _udiv(f: Function, a: Value, b: Value) -> Value:
    """Divide extents: never negative, and the divisor is at least 1 by construction."""
    return f.emit(I64, f"udiv i64 {a.text}, {b.text}")


@lowering(Attention)
def lower_attention(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """One kernel transposes the keys, one does the rest."""
    op = node.op
    assert isinstance(op, Attention)
    q, k, v = node.operands[:3]
    assert q is not None
    assert k is not None
    assert v is not None
    batch, _, _, keys, depth, value_depth = op.extents(q.type, k.type, v.type)
    kv_heads = _kv_heads(op, k)
    known = isinstance(depth, int) and isinstance(value_depth, int)
    if q.type.dtype is not DType.F32 or not known:
        return False
    width = tile_shape(isa).vectors * isa.lanes(DType.F32)
    blocks = ceildiv(keys, width)
    pitch = blocks * width
    (k_batch, k_head, k_row), k_offset = _strides(op, 1, k)
    panels = ctx.temporary(batch * kv_heads * pitch * depth * 4)
    args: list[Arg] = [SlotArg(ctx.slot(k)), SlotArg(panels, writes=True)]
    args += [DimArg(d) for d in (kv_heads, keys, blocks, k_batch, k_head, k_row, k_offset)]
    ctx.launch(_panel_kernel(isa, depth), args, chunks=batch * kv_heads * blocks)
    _launch_attention(node, ctx, isa, panels, pitch)
    return None


def _launch_attention(node: Node, ctx: LoweringContext, isa: Isa, panels: int, pitch: Dim) -> None:
    op = node.op
    assert isinstance(op, Attention)
    q, k, v, mask = (*node.operands, None)[:4]
    assert q is not None
    assert k is not None
    assert v is not None
    batch, heads, queries, keys, depth, value_depth = op.extents(q.type, k.type, v.type)
    assert isinstance(depth, int)
    assert isinstance(value_depth, int)
    (q_batch, q_head, q_row), q_offset = _strides(op, 0, q)
    (v_batch, v_head, v_row), v_offset = _strides(op, 2, v)
    if op.out_layout == "bhsd":
        out = (heads * queries * value_depth, queries * value_depth, value_depth)
    else:
        out = (heads * queries * value_depth, value_depth, heads * value_depth)
    over, moves = _mask_strides(mask)
    rows = over[2] != 0
    kind = "none" if mask is None else "keep" if mask.type.dtype is DType.BOOL else "add"
    spec = _Spec(
        depth,
        value_depth,
        op.scale,
        kind,
        DType.F32 if mask is None else mask.type.dtype,
        moves,
        rows,
        op.causal != "none",
        op.masked_row,
        op.softcap,
    )
    shift = keys - queries if op.causal == "bottom_right" else 0
    blocks = ceildiv(queries, _QUERIES_PER_CHUNK)
    numbers: tuple[Dim, ...] = (
        *(heads, _group(heads, _kv_heads(op, k)), queries, keys, blocks, shift, pitch),
        *(q_batch, q_head, q_row, q_offset, v_batch, v_head, v_row, v_offset),
        *(*out, *over),
    )
    args: list[Arg] = [SlotArg(ctx.slot(q)), SlotArg(panels), SlotArg(ctx.slot(v))]
    args += [SlotArg(ctx.slot(node.result), writes=True)]
    args += [SlotArg(ctx.slot(mask if mask is not None else q))]
    args += [DimArg(d) for d in numbers]
    ctx.launch(
        _attention_kernel(isa, spec), args, chunks=batch * heads * blocks, scratch=pitch * 6 * 4
    )


def _group(heads: Dim, kv_heads: Dim) -> Dim:
    return heads // kv_heads if heads != kv_heads else 1


def _kv_heads(op: Attention, k: GraphValue) -> Dim:
    return op.shape[1] if op.maps else k.type.shape[1]


def _strides(op: Attention, index: int, value: GraphValue) -> tuple[tuple[Dim, Dim, Dim], Dim]:
    """Return ((batch, head, position) strides in elements, offset) of q (0), k (1) or v (2)."""
    if op.maps:
        (batch, head, row, _), offset = op.maps[index].strides(value.type.shape)
        return (batch, head, row), offset
    _, heads, rows, depth = value.type.shape
    return (heads * rows * depth, rows * depth, depth), 0


def _mask_strides(mask: GraphValue | None) -> tuple[tuple[Dim, Dim, Dim], bool]:
    """Return (batch, head, query) strides of a mask that broadcasts to [batch, heads, queries, keys]; keys vary?"""
    if mask is None:
        return (0, 0, 0), False
    shape = (1,) * (4 - mask.type.rank) + mask.type.shape
    strides: list[Dim] = []
    stride: Dim = 1
    for extent in reversed(shape):
        strides.insert(0, stride if extent != 1 else 0)
        stride = stride * extent
    return (strides[0], strides[1], strides[2]), strides[3] != 0
