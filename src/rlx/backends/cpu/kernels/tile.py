# SPDX-License-Identifier: Apache-2.0
"""Finishing a tile of accumulators: the epilogue's operands, its body, masked stores.

A tile is `rows` x `vectors` accumulators of a row-major result [rows, n]. A cheap epilogue is
emitted inline on the registers; a long one exists once as a function over a tile stored in a small
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.emit import emit_body, is_emittable, load_value, may_fail, store_value
from rlx.backends.cpu.lltypes import I64, PTR, Type, scalar_type, vec
from rlx.base.dtypes import DType
from rlx.base.facts import current_facts
from rlx.base.types import Shape
from rlx.expr.body import Body
from rlx.ir.graph import Value as GraphValue

__all__ = ["Extra", "Finish", "Finisher", "Place", "TileFinisher", "extra_kinds", "plan_finish"]

_CHEAP_BODY = 6
"""An epilogue of more instructions is emitted once instead of once per accumulator."""


@dataclass(frozen=True)
class Extra:
    """A further operand of an epilogue.

    Attributes:
        kind: `full` (the shape of the result), `column` (one per column), `row` (one per row), or
            `one`.
        dtype: of its elements.
    """

    kind: str
    dtype: DType


def extra_kinds(result: Shape, extras: Sequence[GraphValue]) -> tuple[Extra, ...] | None:
    """Classify epilogue operands against the result's shape; None if one is of no kind."""
    out: list[Extra] = []
    for value in extras:
        kind = _kind(result, value.type.shape)
        if kind is None:
            return None
        out.append(Extra(kind, value.type.dtype))
    return tuple(out)


def _kind(result: Shape, shape: Shape) -> str | None:
    facts = current_facts()
    if all(d == 1 for d in shape):
        return "one"
    same = len(shape) == len(result) and all(
        facts.equal(a, b) is True for a, b in zip(shape[:-1], result[:-1], strict=True)
    )
    if same and shape[-1] == 1 and result[-1] != 1:
        return "row"
    last = facts.equal(shape[-1], result[-1]) is True
    if same and last:
        return "full"
    return "column" if last and all(d == 1 for d in shape[:-1]) else None


@dataclass(frozen=True)
class Finish:
    """What happens to accumulators of `dtype`: `body`(it, extras...), stored as `result`."""

    dtype: DType
    result: DType
    body: Body | None = None
    extras: tuple[Extra, ...] = ()

    @property
    def expensive(self) -> bool:
        """Whether the epilogue should exist once, as a function, and not per accumulator."""
        return self.body is not None and len(self.body.instrs) > _CHEAP_BODY


def plan_finish(
    dtype: DType, result: Shape, to: DType, body: Body | None, extras: Sequence[GraphValue]
) -> Finish | None:
    """Return how to finish, or None if the epilogue cannot be emitted in a tile."""
    kinds = extra_kinds(result, extras)
    if kinds is None or (body is not None and (may_fail(body) or not is_emittable(body))):
        return None
    return Finish(dtype, to, body, kinds)


class Finisher:
    """Applies an epilogue to rows of accumulators that start at one column, and stores them.

    Args:
        f: where to emit.
        finish: the epilogue.
        extras: pointers to its operands.
        n: columns of the result (the distance between rows in elements).
        col: first column.
        masks: per vector the mask of its valid lanes, None for all of them.
    """

    def __init__(
        self,
        f: Function,
        finish: Finish,
        extras: Sequence[Value],
        n: Value,
        col: Value,
        masks: Sequence[Value | None],
    ) -> None:
        self.f = f
        self.finish = finish
        self.extras = extras
        self.n = n
        self.col = col
        self.masks = masks
        self.lanes = f.isa.lanes(finish.dtype)
        self._shared = [self._common(e, p) for e, p in zip(finish.extras, extras, strict=True)]

    def _common(self, extra: Extra, pointer: Value) -> list[Value] | None:
        """Load what is the same for all rows."""
        f, lanes = self.f, self.lanes
        if extra.kind == "column":
            return [
                load_value(f, extra.dtype, pointer, self.col + j * lanes, lanes, mask)
                for j, mask in enumerate(self.masks)
            ]
        if extra.kind == "one":
            return [f.splat(load_value(f, extra.dtype, pointer, 0, 0), lanes)] * len(self.masks)
        return None

    def row(self, values: Sequence[Value], out: Value, row: Value) -> None:
        """Finish one row: `values` are its accumulators, stored from out[row, col] on."""
        f, lanes, finish = self.f, self.lanes, self.finish
        start = row * self.n + self.col
        per_row = {
            i: f.splat(load_value(f, e.dtype, self.extras[i], row, 0), lanes)
            for i, e in enumerate(finish.extras)
            if e.kind == "row"
        }
        for j, value in enumerate(values):
            at, mask, result = start + j * lanes, self.masks[j], value
            if finish.body is not None:
                inputs = [value]
                for i, extra in enumerate(finish.extras):
                    shared = self._shared[i]
                    if shared is not None:
                        inputs.append(shared[j])
                    elif i in per_row:
                        inputs.append(per_row[i])
                    else:
                        inputs.append(load_value(f, extra.dtype, self.extras[i], at, lanes, mask))
                (result,) = emit_body(f, finish.body, inputs, lanes)
            store_value(f, finish.result, result, out, at, mask)


@dataclass(frozen=True)
class Place:
    """Where a tile lies in the result.

    Attributes:
        row: first row.
        count: number of valid rows.
        n: columns of the result.
        col: first column.
        limit: valid columns from there.
        numbers: pointer to the numbers of the rows (i64) when they do not follow one another.
    """

    row: Value
    count: Value
    n: Value
    col: Value
    limit: Value
    numbers: Value | None = None


class TileFinisher:
    """Finishes whole tiles; holds the functions of long epilogues, one per shape in use.

    Args:
        module: where functions go.
        finish: the epilogue.
        spread: the rows of a tile are anywhere in the result; else they follow one another.
    """

    def __init__(self, module: Module, finish: Finish, *, spread: bool = False) -> None:
        self.module = module
        self.finish = finish
        self.spread = spread
        self.lanes = module.isa.lanes(finish.dtype)
        self.vector: Type = vec(scalar_type(finish.dtype), self.lanes)
        self._functions: dict[tuple[int, bool], Function] = {}

    @property
    def pointers(self) -> list[tuple[str, Type]]:
        """Parameters for the epilogue's operands."""
        return [(f"x{i}", PTR) for i in range(len(self.finish.extras))]

    def masks(self, f: Function, vectors: int, masked: bool, limit: Value) -> list[Value | None]:
        """Return the masks of a tile with `limit` valid columns; its last vector is partial."""
        out: list[Value | None] = [None] * vectors
        if masked:
            out[-1] = f.tail_mask(limit - (vectors - 1) * self.lanes, self.vector)
        return out

    def prepare(self, vectors: int, masked: bool) -> None:
        """Emit what tiles of this shape call; before the calling function is begun."""
        key = (vectors, masked)
        if not self.finish.expensive or key in self._functions:
            return
        params = [("tile", PTR), ("rows", PTR), ("out", PTR), *self.pointers]
        params += [(name, I64) for name in ("row", "count", "n", "col", "limit")]
        with self.module.function(f"finish{vectors}{'t' if masked else ''}", params) as f:
            tile, rows, out, *rest = f.args
            extras, (row, count, n, col, limit) = rest[:-5], rest[-5:]
            finisher = Finisher(
                f, self.finish, extras, n, col, self.masks(f, vectors, masked, limit)
            )
            with f.loop(0, count) as loop:
                base = f.offset(tile, loop.index * (vectors * self.lanes), self.vector)
                values = [f.load(self.vector, base, j * self.lanes) for j in range(vectors)]
                at = f.load(I64, rows, loop.index) if self.spread else row + loop.index
                finisher.row(values, out, at)
                loop.next()
        self._functions[key] = f

    def tile(
        self,
        f: Function,
        rows: Sequence[Sequence[Value]],
        out: Value,
        extras: Sequence[Value],
        place: Place,
        *,
        masked: bool,
        certain: int,
    ) -> None:
        """Finish a tile.

        Args:
            f: where to emit.
            rows: the accumulators.
            out: start of the result.
            extras: pointers to the epilogue's operands.
            place: where it lies in the result.
            masked: the last vector may be partial.
            certain: how many rows are valid whatever the count says.
        """
        vectors = len(rows[0])
        if self.finish.expensive:
            buffer = f.alloca(self.vector, len(rows) * vectors)
            for i, values in enumerate(rows):
                for j, value in enumerate(values):
                    f.store(value, buffer, (i * vectors + j) * self.lanes)
            numbers = buffer if place.numbers is None else place.numbers
            integers = (place.row, place.count, place.n, place.col, place.limit)
            f.call(self._functions[vectors, masked], buffer, numbers, out, *extras, *integers)
            return
        masks = self.masks(f, vectors, masked, place.limit)
        finisher = Finisher(f, self.finish, extras, place.n, place.col, masks)
        for i, values in enumerate(rows):
            at = place.row + i if place.numbers is None else f.load(I64, place.numbers, i)
            if i < certain:
                finisher.row(values, out, at)
            else:
                with f.if_(place.count > i):
                    finisher.row(values, out, at)
