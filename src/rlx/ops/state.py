# SPDX-License-Identifier: Apache-2.0
"""Writing rows into a value that persists between runs: caches of keys and values, ring buffers of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlx.base.dims import less_equal
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType, normalize_axis, require_equal
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.leaf import constant
from rlx.ops.movement import reshape
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["WriteRows", "write_rows"]


def _position(limit: int, *shape: int, dtype: DType = DType.I64) -> Operand:
    return Operand(shape, dtype, "index", limit)


@op("write_rows")
@dataclass(frozen=True)
class WriteRows(Op):
    """x with x[:, position : position + n] replaced by rows (for axis 1), where n is their extent at the axis.

    The position is one number, or one for each entry of axis 0. It counts from the end where negative; rows that do
    not fit into the axis are an ExecutionError. With `ring` positions count modulo the extent of the axis, so that any
    position fits and rows beyond the end continue at the front; of more rows than fit the last ones stay.

    Where x is a state, the rows are written into its own memory. If that cannot be done because x is read later, the
    program is refused, unless `copy` allows to copy all of x.

    Attributes:
        axis: along which the rows are counted.
        ring: positions count modulo the extent of the axis.
        copy: x may be copied although it is a state.
    """

    operands = ("x", "rows", "position")
    axis: int = 0
    ring: bool = False
    copy: bool = False
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((7, 5)), Operand((1, 5)), _position(7)), {"axis": 0}),
        Sample((Operand((2, 9, 5)), Operand((2, 1, 5)), _position(9, 2)), {"axis": 1}),
        Sample(
            (Operand((3, 2, 11, 4)), Operand((3, 2, 2, 4)), _position(2, dtype=DType.I32)),
            {"axis": 2},
        ),
        Sample((Operand((3, 8)), Operand((3, 1)), _position(8, 3)), {"axis": 1}),
        Sample((Operand((3, 8)), Operand((3, 3)), _position(50, 3)), {"axis": 1, "ring": True}),
        Sample((Operand((5, 21)), Operand((7, 21)), _position(90)), {"axis": 0, "ring": True}),
        Sample((Operand((2, 40, 33)), Operand((2, 39, 33)), _position(1)), {"axis": 1}),
    )

    def infer(self, x: TensorType, rows: TensorType, position: TensorType) -> TensorType:  # noqa: D102
        if x.rank == 0:
            raise TypeRuleError(f"{x} has no axis of rows")
        axis = normalize_axis(self.axis, x.rank)
        if rows.dtype is not x.dtype or rows.rank != x.rank:
            raise TypeRuleError(f"the rows {rows} must have the dtype and the rank of {x}")
        for i, (have, want) in enumerate(zip(rows.shape, x.shape, strict=True)):
            if i != axis:
                require_equal(have, want, f"axis {i} of the rows {rows}")
        if not self.ring and less_equal(rows.shape[axis], x.shape[axis]) is False:
            raise TypeRuleError(f"the rows {rows} are more than axis {axis} of {x} holds")
        if position.dtype not in (DType.I32, DType.I64) or position.rank > 1:
            raise TypeRuleError(
                f"the position is i32 or i64, one number or one per entry of axis 0, not {position}"
            )
        if position.rank:
            if axis == 0:
                raise TypeRuleError(
                    f"positions {position} are per entry of axis 0, the axis of rows"
                )
            require_equal(position.shape[0], x.shape[0], "positions per entry of axis 0")
        return x

    def reference(self, x: Array, rows: Array, position: Array) -> Array:  # noqa: D102
        axis, out = normalize_axis(self.axis, x.ndim), x.copy()
        if position.ndim == 0:
            self._write(out, rows, axis, int(position), "")
        else:
            for entry, start in enumerate(position.tolist()):
                self._write(out[entry], rows[entry], axis - 1, start, f" of entry {entry}")
        return out

    def _write(self, target: Array, rows: Array, axis: int, position: int, entry: str) -> None:
        capacity, count = target.shape[axis], rows.shape[axis]
        if count == 0:
            return
        start = position + capacity if position < 0 and not self.ring else position
        if (capacity == 0) if self.ring else not 0 <= start <= capacity - count:
            raise ExecutionError(
                f"position {position}{entry} leaves no room for {count} rows in an axis of {capacity}"
            )
        first = max(0, count - capacity)
        places = [(start + i) % capacity for i in range(first, count)]
        np.moveaxis(target, axis, 0)[places] = np.moveaxis(rows, axis, 0)[first:]

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        capacity = types[0].shape[self.axis]
        return not (self.ring and isinstance(capacity, int) and capacity > 0)


def write_rows(
    x: Value,
    rows: Value,
    position: Value | int,
    axis: int = 0,
    *,
    ring: bool = False,
    copy: bool = False,
) -> Value:
    """Return x with rows replaced from a position on; see `WriteRows`. A single row may lack the axis."""
    axis = normalize_axis(axis, x.type.rank)
    if isinstance(position, int | np.integer):
        position = constant(position, DType.I64)
    if rows.type.rank == x.type.rank - 1:
        rows = reshape(rows, (*rows.type.shape[:axis], 1, *rows.type.shape[axis:]))
    return emit_one(WriteRows(axis, ring, copy), x, rows, position)
