# SPDX-License-Identifier: Apache-2.0
"""Interpolation along neighbouring axes.

    out[n, o_1, ..., o_R, c] = sum_{t_R} w_R[t_R, o_R] * (... sum_{t_1} w_1[t_1, o_1] * x[n, i_1,
    ..., i_R, c])

with i_a = index_a[t_a, o_a]: 1 tap per axis for `nearest`, 2 for `linear`, 4 for `cubic`. A small
kernel fills a table of indices and weights per resized axis; extents may be known only at run time,
so coordinates are exact rationals of 64-bit integers there as well. Then vectors run over the
channels c, or, where nothing lies behind the last resized axis, over its positions with gathers.
Axes that do not stand together are resized one group after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product as cartesian

from rlx.backends.cpu import vconvert
from rlx.backends.cpu.abi import Emitted, Failure, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.emit import decode, encode
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.copy import copy_bytes
from rlx.backends.cpu.kernels.window import divide
from rlx.backends.cpu.lltypes import F64, I64, Type, scalar_type, storage_type, vec
from rlx.backends.cpu.lowering import lowering
from rlx.base.dims import Dim, ceildiv, dim_min, less_equal, product
from rlx.base.dtypes import DType
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.resize import Resize, scale_ratio

_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
_MOST_AXES = 3
_ENTRIES_PER_CHUNK = 512
_ELEMENTS_PER_CHUNK = 32_768
_UNKNOWN_EXTENT = 64


# Tables


@dataclass(frozen=True)
class _TableSpec:
    """What a table kernel is specialised on; see `Resize` for the attributes."""

    mode: str
    coordinate: str
    nearest: str
    cubic_a: float
    exclude_outside: bool
    weights: DType


def _floor_divide(f: Function, a: Value, b: Value) -> Value:
    """Divide toward -inf; b > 0."""
    quotient, _ = f.divide_nonzero("sdiv", a, b)
    return f.select(quotient * b > a, quotient - 1, quotient)


def _fraction(
    f: Function, spec: _TableSpec, i: Value, dims: Sequence[Value]
) -> tuple[Value, Value]:
    """Return the coordinate of i as (numerator, denominator > 0); dims: in, out, scale p / q."""
    extent, out, p, q = dims
    match spec.coordinate:
        case "asymmetric":
            return i * q, p
        case "align_corners":
            last = p * extent - q
            top = i * (extent - 1) * q
            top = f.select(last < 0, 0 - top, top)
            return f.select(last.eq(0), 0, top), f.select(last.eq(0), 1, f.abs(last))
        case "half_pixel_symmetric":
            return (i * 2 + 1) * q - p + (extent * p - out * q), p * 2
        case _:
            top = (i * 2 + 1) * q - p
            if spec.coordinate == "pytorch_half_pixel":
                top = f.select(out.eq(1), 0, top)
            return top, p * 2


def _rounded(f: Function, spec: _TableSpec, top: Value, bottom: Value) -> Value:
    match spec.nearest:
        case "floor":
            return _floor_divide(f, top, bottom)
        case "ceil":
            return 0 - _floor_divide(f, 0 - top, bottom)
        case "round_prefer_floor":
            return 0 - _floor_divide(f, bottom - top * 2, bottom * 2)
        case _:
            return _floor_divide(f, top * 2 + bottom, bottom * 2)


def _weights(f: Function, spec: _TableSpec, rest: Value) -> list[Value]:
    """Return the taps' weights for a coordinate minus its floor. Source: Keys 1981 (cubic)."""
    left = 1.0 - rest
    if spec.mode == "linear":
        return [left, rest]
    a = spec.cubic_a

    def near(d: Value) -> Value:
        return (d * (a + 2) - (a + 3)) * d * d + 1.0

    def far(d: Value) -> Value:
        return ((d * a - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(rest + 1.0), near(rest), near(left), far(left + 1.0)]


@cache
def _table_kernel(isa: Isa, spec: _TableSpec) -> Emitted:
    """Arguments: indices (i64 [taps, out]), weights ([taps, out], or none), in, out, p, q."""
    module = Module(isa)
    nearest = spec.mode == "nearest"
    first = 1 if nearest else 2
    with module.kernel("resize_table", first + 4) as k:
        dims = [k.dim(first + i) for i in range(4)]
        extent, out = dims[0], dims[1]
        last = k.smax(extent - 1, 0)
        end = k.smin(k.end * _ENTRIES_PER_CHUNK, out)
        with k.if_(extent.eq(0)):
            k.fail(Failure.INDEX_OUT_OF_RANGE, 0)
        with k.loop(k.begin * _ENTRIES_PER_CHUNK, end) as loop:
            i = loop.index
            top, bottom = _fraction(k, spec, i, dims)
            if nearest:
                index = _rounded(k, spec, top, bottom)
                k.store(k.smin(k.smax(index, 0), last), k.slot(0), i)
            else:
                _store_taps(k, spec, (top, bottom), i, (extent, out, last))
            loop.next()
    return finish(module)


def _store_taps(
    k: Kernel,
    spec: _TableSpec,
    fraction: tuple[Value, Value],
    i: Value,
    extents: tuple[Value, Value, Value],
) -> None:
    top, bottom = fraction
    extent, out, last = extents
    floor = _floor_divide(k, top, bottom)
    rest = k.int_to_float(top - floor * bottom, F64, signed=True) / k.int_to_float(
        bottom, F64, signed=True
    )
    weights = _weights(k, spec, rest)
    start = -1 if spec.mode == "cubic" else 0
    indices = [floor + (start + t) for t in range(len(weights))]
    if spec.exclude_outside:
        inside = [(index >= 0) & (index < extent) for index in indices]
        weights = [k.select(ok, w, 0.0) for ok, w in zip(inside, weights, strict=True)]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        weights = [w / total for w in weights]
    for t, (index, weight) in enumerate(zip(indices, weights, strict=True)):
        at = out * t + i
        k.store(k.smin(k.smax(index, 0), last), k.slot(0), at)
        k.store(weight if spec.weights is DType.F64 else k.f64_to_f32(weight), k.slot(1), at)


# Interpolation


@dataclass(frozen=True)
class _Spec:
    """What a resize kernel is specialised on.

    Attributes:
        taps: per axis.
        axes: resized together.
        dtype: of what is read.
        result: of what is written.
        compute: what weights and sums are.
        inner: vectors run over the channels; else over positions of the last axis.
    """

    taps: int
    axes: int
    dtype: DType
    result: DType
    compute: DType
    inner: bool


_Read = Callable[[tuple[int, ...]], Value]


class _Emitter:
    """Emits one line: all positions of the last axis for fixed ones of the others."""

    def __init__(self, k: Kernel, spec: _Spec) -> None:
        self.k = k
        self.spec = spec
        self.moves = spec.taps == 1
        self.lanes = k.isa.lanes(spec.dtype if self.moves else spec.compute)
        self.stored: Type = vec(storage_type(spec.dtype), self.lanes)
        self.written: Type = vec(storage_type(spec.result), self.lanes)
        self.vector: Type = vec(scalar_type(spec.compute), self.lanes)
        per_axis = 1 if self.moves else 2
        self.tables = [k.slot(2 + per_axis * a) for a in range(spec.axes)]
        self.weights = [] if self.moves else [k.slot(3 + 2 * a) for a in range(spec.axes)]
        first = 2 + per_axis * spec.axes
        self.ins = [k.dim(first + a) for a in range(spec.axes)]
        self.outs = [k.dim(first + spec.axes + a) for a in range(spec.axes)]
        self.channels, self.lines, self.block = (k.dim(first + 2 * spec.axes + i) for i in range(3))

    def line(self, index: Value) -> None:
        """Emit a line."""
        k, spec = self.k, self.spec
        places: list[Value] = []
        rest = index
        for a in range(spec.axes - 2, -1, -1):
            rest, place = divide(k, rest, self.outs[a])
            places.insert(0, place)
        strides = [self.channels]
        for extent in reversed(self.ins[1:]):
            strides.insert(0, strides[0] * extent)
        base = rest * (strides[0] * self.ins[0])
        # Offset and weights of every combination of taps of the leading axes.
        offsets: dict[tuple[int, ...], Value] = {}
        for combination in cartesian(range(spec.taps), repeat=spec.axes - 1):
            offset = base
            for a, t in enumerate(combination):
                offset = offset + self._index(a, t, places[a]) * strides[a]
            offsets[combination] = offset
        factors = [
            [self._splat(self.weights[a], a, t, place) for t in range(spec.taps)]
            if self.weights
            else []
            for a, place in enumerate(places)
        ]
        out = k.offset(k.slot(1), index * (self.outs[-1] * self.channels), self.written)
        if spec.inner:
            self._over_channels(offsets, factors, out)
        else:
            self._over_positions(offsets, factors, out)

    def _index(self, axis: int, tap: int, place: Value) -> Value:
        return self.k.load(I64, self.tables[axis], self.outs[axis] * tap + place)

    def _splat(self, weights: Value, axis: int, tap: int, place: Value) -> Value:
        scalar = self.k.load(self.vector.scalar, weights, self.outs[axis] * tap + place)
        return self.k.splat(scalar, self.lanes)

    def _over_channels(
        self, offsets: dict[tuple[int, ...], Value], factors: list[list[Value]], out: Value
    ) -> None:
        k, spec, last = self.k, self.spec, self.spec.axes - 1
        whole = self.channels & -self.lanes
        mask = k.tail_mask(self.channels - whole, self.stored)
        with k.loop(0, self.outs[-1]) as loop:
            place = loop.index
            steps = [self._index(last, t, place) * self.channels for t in range(spec.taps)]
            rows: dict[tuple[int, ...], Value] = {
                (*lead, t): k.offset(k.slot(0), offset + steps[t], self.stored)
                for lead, offset in offsets.items()
                for t in range(spec.taps)
            }
            mine = (
                [self._splat(self.weights[last], last, t, place) for t in range(spec.taps)]
                if self.weights
                else []
            )
            target = k.offset(out, place * self.channels, self.written)

            def vector(at: Value, tail: Value | None) -> None:
                def read(taps: tuple[int, ...]) -> Value:
                    if tail is None:
                        return k.load(self.stored, rows[taps], at)
                    return k.load_masked(self.stored, rows[taps], tail, at)

                self._store(self._sum(read, [*factors, mine]), target, at, tail)

            with k.loop(0, whole, self.lanes) as inner:
                vector(inner.index, None)
                inner.next()
            with k.if_(whole < self.channels):
                vector(whole, mask)
            loop.next()

    def _over_positions(
        self, offsets: dict[tuple[int, ...], Value], factors: list[list[Value]], out: Value
    ) -> None:
        k, spec, last = self.k, self.spec, self.spec.axes - 1
        positions = self.outs[-1]
        rows = {lead: k.offset(k.slot(0), offset, self.stored) for lead, offset in offsets.items()}
        with k.loop(0, positions, self.lanes) as loop:
            at = loop.index
            mask = k.tail_mask(positions - at, self.stored)
            kind = vec(I64, self.lanes)
            steps = [
                k.load_masked(kind, self.tables[last], mask, positions * t + at)
                for t in range(spec.taps)
            ]
            mine = [
                k.load_masked(self.vector, self.weights[last], mask, positions * t + at)
                if self.weights
                else None
                for t in range(spec.taps)
            ]

            def read(taps: tuple[int, ...]) -> Value:
                return k.gather(self.stored, rows[taps[:-1]], steps[taps[-1]], mask)

            self._store(
                self._sum(read, [*factors, [m for m in mine if m is not None]]), out, at, mask
            )
            loop.next()

    def _sum(self, read: _Read, factors: Sequence[Sequence[Value]]) -> Value:
        """Return the weighted sum, the first axis innermost; one tap is moved as stored."""
        if self.moves:
            return read((0,) * self.spec.axes)

        def along(axis: int, taps: tuple[int, ...]) -> Value:
            if axis < 0:
                return self._convert(decode(self.k, self.spec.dtype, read(taps)))
            total: Value | None = None
            for t, factor in enumerate(factors[axis]):
                term = along(axis - 1, (t, *taps)) * factor
                total = term if total is None else total + term
            assert total is not None
            return total

        return along(self.spec.axes - 1, ())

    def _convert(self, value: Value) -> Value:
        dtype = self.spec.dtype
        return vconvert.cast(self.k, value, dtype, self.spec.compute) if dtype.is_integer else value

    def _store(self, value: Value, target: Value, at: Value, mask: Value | None) -> None:
        k, dtype = self.k, self.spec.result
        if not self.moves:
            if dtype.is_integer:
                value = vconvert.cast(k, k.round_even(value), self.spec.compute, dtype)
            value = encode(k, dtype, value)
        if mask is None:
            k.store(value, target, at)
        else:
            k.store_masked(value, target, mask, at)


@cache
def _resize_kernel(isa: Isa, spec: _Spec) -> Emitted:
    """Arguments: x, out, tables per axis, extents of x, of the result, channels, lines, block."""
    module = Module(isa)
    per_axis = 1 if spec.taps == 1 else 2
    with module.kernel("resize", 2 + (per_axis + 2) * spec.axes + 3) as k:
        emitter = _Emitter(k, spec)
        end = k.smin(k.end * emitter.block, emitter.lines)
        with k.loop(k.begin * emitter.block, end) as loop:
            emitter.line(loop.index)
            loop.next()
    return finish(module)


# Lowering


@lowering(Resize)
def lower_resize(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Groups of up to three neighbouring resized axes, one kernel each."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, Resize)
    assert x is not None
    dtype, shape = x.type.dtype, list(x.type.shape)
    groups = _groups([a for a in range(len(shape)) if not op.is_copied(a, shape[a])])
    source = ctx.slot(x)
    if not groups:
        copy_bytes(ctx, isa, source, ctx.slot(node.result), x.type.nbytes)
    # Between groups sums are kept as they are, so that the result is rounded once.
    between = dtype if op.mode == "nearest" else _compute(dtype)
    have = dtype
    for number, group in enumerate(groups):
        result = [op.sizes[a] if a in group else d for a, d in enumerate(shape)]
        last = number == len(groups) - 1
        want = dtype if last else between
        target = ctx.slot(node.result) if last else ctx.temporary(product(result) * want.itemsize)
        _launch(ctx, isa, op, (have, want, _compute(dtype)), shape, group, (source, target))
        source, shape, have = target, result, want


def _compute(dtype: DType) -> DType:
    """Return what sums of a dtype are computed in."""
    return DType.F64 if dtype.is_integer else dtype.compute


def _groups(axes: Sequence[int]) -> list[list[int]]:
    out: list[list[int]] = []
    for axis in axes:
        if out and out[-1][-1] == axis - 1 and len(out[-1]) < _MOST_AXES:
            out[-1].append(axis)
        else:
            out.append([axis])
    return out


def _launch(
    ctx: LoweringContext,
    isa: Isa,
    op: Resize,
    dtypes: tuple[DType, DType, DType],
    shape: Sequence[Dim],
    group: Sequence[int],
    slots: tuple[int, int],
) -> None:
    """Emit the launch for neighbouring axes; `dtypes` are what is read, written, and computed in."""
    compute = dtypes[-1]
    taps = _TAPS[op.mode]
    tables: list[Arg] = []
    for axis in group:
        tables += _launch_table(ctx, isa, op, axis, shape[axis], compute)
    channels = product(shape[group[-1] + 1 :])
    ins, outs = [shape[a] for a in group], [op.sizes[a] for a in group]
    # An empty axis has nothing to read (its table failed), so no line is computed.
    lines = product((*shape[: group[0]], *outs[:-1], *(dim_min(d, 1) for d in ins)))
    work = _known(outs[-1]) * _known(channels) * taps ** len(group)
    block = max(1, _ELEMENTS_PER_CHUNK // max(1, work))
    spec = _Spec(taps, len(group), *dtypes, channels != 1)
    args: list[Arg] = [SlotArg(slots[0]), SlotArg(slots[1], writes=True), *tables]
    args += [DimArg(d) for d in (*ins, *outs, channels, lines, block)]
    ctx.launch(_resize_kernel(isa, spec), args, ceildiv(lines, block))


def _known(extent: Dim) -> int:
    return extent if isinstance(extent, int) else _UNKNOWN_EXTENT


def _launch_table(
    ctx: LoweringContext, isa: Isa, op: Resize, axis: int, extent: Dim, compute: DType
) -> list[Arg]:
    """Emit the launch that fills the table of an axis; return it as arguments."""
    taps, out, given = _TAPS[op.mode], op.sizes[axis], op.scales[axis]
    spec = _TableSpec(op.mode, op.coordinate, op.nearest, op.cubic_a, op.exclude_outside, compute)
    slots = [ctx.temporary(out * (taps * 8))]
    if taps > 1:
        slots.append(ctx.temporary(out * (taps * compute.itemsize)))
    p, q = (
        (out, extent)
        if given is None
        else (scale_ratio(given).numerator, scale_ratio(given).denominator)
    )
    args: list[Arg] = [
        *(SlotArg(s, writes=True) for s in slots),
        *(DimArg(d) for d in (extent, out, p, q)),
    ]
    may_fail = less_equal(1, extent) is not True
    ctx.launch(_table_kernel(isa, spec), args, ceildiv(out, _ENTRIES_PER_CHUNK), may_fail=may_fail)
    return [SlotArg(s) for s in slots]
