# SPDX-License-Identifier: Apache-2.0
"""Choosing and launching a row kernel: along the row, or with a row per lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlx.backends.cpu.abi import Emitted
from rlx.backends.cpu.emit import may_fail
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.columns import column_kernel
from rlx.backends.cpu.kernels.elementwise import body_lanes, cost, unroll
from rlx.backends.cpu.kernels.nest import Walk, rows_args, stream_args
from rlx.backends.cpu.kernels.rowplan import RowPlan
from rlx.backends.cpu.kernels.rows import RowForm, row_kernel
from rlx.backends.cpu.kernels.space import Access, collapse
from rlx.base.dims import Dim, DimExpr, ceildiv, dim_max, floordiv, less_equal, product
from rlx.base.types import Shape
from rlx.expr.body import Body
from rlx.kernel.program import Arg, DimArg, SlotArg, Thunk, ThunkKind
from rlx.kernel.schedule import LoweringContext
from rlx.ops.region import Region

__all__ = ["launch_rows"]

_SHORT = 8
"""Rows up to this length get a lane each."""


def _with_axis(extents: Shape, accesses: Sequence[Access], at: int) -> tuple[Shape, list[Access]]:
    """Insert an axis of extent 1."""
    shape = (*extents[:at], 1, *extents[at:])
    return shape, [replace(a, strides=(*a.strides[:at], 0, *a.strides[at:])) for a in accesses]


def _normal_form(
    shape: Shape, accesses: Sequence[Access], row_axes: int
) -> tuple[Shape, list[Access], int]:
    """Collapse to at least one axis of rows and one along them; return the number of the former."""
    extents, walks, outer = collapse(shape, accesses, len(shape) - row_axes)
    if outer == len(extents):
        extents, walks = _with_axis(extents, walks, outer)
    if outer == 0:
        extents, walks = _with_axis(extents, walks, 0)
        outer = 1
    return extents, walks, outer


def _unit(access: Access, is_full: bool) -> Access:
    """Give a full result a step of 1 along an axis that was inserted."""
    inserted = is_full and access.strides[-1] == 0
    return replace(access, strides=(*access.strides[:-1], 1)) if inserted else access


@dataclass(frozen=True)
class _Space:
    """A row region in normal form.

    Attributes:
        extents: of the axes over which rows are spread, then of those along a row; at least one
            each.
        outer: number of the former.
        accesses: of the operands, then of the results.
        reads: number of operands.
        fixed: per operand, whether it is the same along the row.
        full: per result, whether it has an element for every point.
    """

    extents: Shape
    outer: int
    accesses: list[Access]
    reads: int
    fixed: tuple[bool, ...]
    full: tuple[bool, ...]

    @property
    def row(self) -> Dim:
        """Elements of a row."""
        return product(self.extents[self.outer :])

    def form(self, body: Body, accesses: Sequence[Access]) -> RowForm:
        """Return the static part, for walks over the axes in some order."""
        walks = tuple(Walk.of(a) for a in accesses)
        return RowForm(
            body, self.outer, len(self.extents) - self.outer, walks, self.fixed, self.full
        )


@dataclass(frozen=True)
class _Launch:
    """A kernel with its arguments."""

    kernel: Emitted
    args: list[Arg]
    chunks: Dim
    scratch: Dim
    plan: RowPlan


def launch_rows(
    ctx: LoweringContext,
    isa: Isa,
    op: Region,
    operands: Sequence[Access],
    results: Sequence[Access],
    full: Sequence[bool],
    inplace: Sequence[tuple[int, int]] = (),
) -> None:
    """Emit the launch of a row region.

    Args:
        ctx: where the launch goes.
        isa: the target.
        op: the region.
        operands: how the space walks each operand.
        results: how it walks each result: with stride 0 along the row, dense, or like an operand
            whose neighbours in memory are of neighbouring rows.
        full: per result, whether it has an element for every point (else one per row).
        inplace: (operand slot, result slot) pairs with equal walks; those that the passes allow may
            be the same bytes.
    """
    body, reads = op.body, len(operands)
    extents, accesses, outer = _normal_form(op.shape, [*operands, *results], op.row_axes)
    accesses = accesses[:reads] + [_unit(a, f) for a, f in zip(accesses[reads:], full, strict=True)]
    fixed = tuple(all(s == 0 for s in a.strides[outer:]) for a in accesses[:reads])
    space = _Space(extents, outer, accesses, reads, fixed, tuple(full))
    lanes = body_lanes(isa, body)

    def emit(launch: _Launch) -> None:
        ctx.launch(
            launch.kernel,
            launch.args,
            launch.chunks,
            inplace=_allowed(launch.plan, inplace, operands, results),
            scratch=launch.scratch,
            may_fail=may_fail(body),
        )

    columns = _lane_per_row(space, body)
    if columns is not None:
        emit(_columns(isa, body, space, lanes) if columns else _rows(isa, body, space))
        return
    # Both, for the run to choose as it would be chosen here: sums in another order would come out differently.
    skip = ctx.append(Thunk(ThunkKind.JUMP_GE, (DimArg(space.row), DimArg(_SHORT + 1))))
    emit(_columns(isa, body, space, lanes))
    leave = ctx.append(Thunk(ThunkKind.JUMP))
    skip.target = ctx.position
    emit(_rows(isa, body, space))
    leave.target = ctx.position


def _slots(space: _Space) -> list[Arg]:
    return [SlotArg(a.slot, writes=i >= space.reads) for i, a in enumerate(space.accesses)]


def _rows(isa: Isa, body: Body, space: _Space) -> _Launch:
    """Return the launch of the kernel along the row."""
    form = space.form(body, space.accesses)
    outer, row = space.extents[: space.outer], space.extents[space.outer :]
    rows, size = product(outer), space.row
    per_chunk = dim_max(1, floordiv(form.chunk_elements, dim_max(1, size)))
    args = [
        *_slots(space),
        DimArg(row[-1]),
        *map(DimArg, row[:-1]),
        DimArg(per_chunk),
        *rows_args(outer),
    ]
    for access in space.accesses:
        args += stream_args(access)
    offsets, scratch = _scratch_layout(form, form.plan.scratch, size)
    args += map(DimArg, offsets[1:])
    return _Launch(row_kernel(isa, form), args, ceildiv(rows, per_chunk), scratch, form.plan)


def _lies_across(space: _Space) -> bool:
    """Return whether neighbours in memory are of neighbouring rows, or results one per row."""
    still = (*space.fixed, *(not is_full for is_full in space.full))
    varying = [a for a, f in zip(space.accesses, still, strict=True) if not f]
    across = any(a.strides[space.outer - 1] == 1 and a.strides[-1] != 1 for a in varying)
    return across and all(a.strides[-1] != 1 for a in varying)


def _lane_per_row(space: _Space, body: Body) -> bool | None:
    """Return whether rows lie across memory or are too short for vectors along them; None where a run has to tell.

    Neither how many rows there are nor what else is fused matters: sums would come out differently where more is known.
    Measured on 3 and 8 elements, a row per lane is the faster from 4 rows on, five times so for many, also where narrow
    elements are gathered one by one.
    """
    if may_fail(body):
        return False
    if _lies_across(space):
        return True
    if not body.has_sums and isinstance(space.row, DimExpr):
        return False  # the order does not matter
    return less_equal(space.row, _SHORT)


def _columns(isa: Isa, body: Body, space: _Space, lanes: int) -> _Launch:
    """Return the launch with a row per lane: the last outer axis becomes the innermost."""
    at = space.outer - 1

    def reordered(items: Sequence[Dim]) -> tuple[Dim, ...]:
        return (*items[:at], *items[at + 1 :], items[at])

    accesses = [replace(a, strides=reordered(a.strides)) for a in space.accesses]
    form = space.form(body, accesses)
    row, across = space.extents[space.outer :], space.extents[at]
    vectors = unroll(cost(body)) if _lies_across(space) else 1
    while vectors > 1 and isinstance(across, int) and across <= (vectors // 2) * lanes:
        vectors //= 2
    width = vectors * lanes
    blocks = (*space.extents[:at], ceildiv(across, width))
    per_chunk = dim_max(1, floordiv(max(form.chunk_elements // width, 1), dim_max(1, space.row)))
    args = [
        *_slots(space),
        *map(DimArg, row),
        DimArg(across),
        DimArg(per_chunk),
        *rows_args(blocks),
    ]
    for access in accesses:
        args += stream_args(access)
    offsets, scratch = _scratch_layout(form, list(form.plan.kept), space.row * width)
    args += map(DimArg, offsets[1:])
    kernel = column_kernel(isa, form, vectors)
    return _Launch(kernel, args, ceildiv(product(blocks), per_chunk), scratch, form.plan)


def _scratch_layout(form: RowForm, values: Sequence[int], size: Dim) -> tuple[list[Dim], Dim]:
    """Return the byte offset of `size` elements of each value, and their total."""
    offsets: list[Dim] = []
    total: Dim = 0
    for value in values:
        offsets.append(total)
        total = total + ceildiv(size * form.body.dtype(value).itemsize, 64) * 64
    return offsets, total


def _allowed(
    plan: RowPlan,
    pairs: Sequence[tuple[int, int]],
    operands: Sequence[Access],
    results: Sequence[Access],
) -> list[tuple[int, int]]:
    """Keep the pairs whose operand is not read after a pass that overwrites its bytes."""
    out: list[tuple[int, int]] = []
    for read, write in pairs:
        last = max(plan.last_read(i) for i, a in enumerate(operands) if a.slot == read)
        targets = [i for i, a in enumerate(results) if a.slot == write]
        if all(last <= plan.first_write(i) for i in targets):
            out.append((read, write))
    return out
