# SPDX-License-Identifier: Apache-2.0
"""Builders of the dispatcher's tables: thunks, and the program that computes extents.

::

    table = ThunkTable()
    table.call("rlx_add_1a2b3c4d", args=[0, 1, 2], chunks=0)
    table.end()
    thunks = table.build({"rlx_add_1a2b3c4d": address})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from rlx.base.errors import BuildError

__all__ = ["DimOp", "DimProgram", "Flag", "Kind", "ThunkTable", "Thunks"]

_I64 = np.iinfo(np.int64)


class Kind(IntEnum):
    """What a thunk does; low byte of its word 3."""

    CALL = 0
    JUMP = 1
    JUMP_UNLESS = 2
    JUMP_GE = 3
    SET_DIM = 4
    ADD_DIM = 5
    BIND = 6
    DIMS = 7
    HOST = 8
    END = 9
    READ_DIM = 10
    COPY_SLOT = 11


class Flag(IntFlag):
    """Properties of a CALL; bits from 8 upwards of its word 3."""

    NONE = 0
    MAY_FAIL = 1  # test the context's error word afterwards
    HOOK = 2  # return HOOK with this pc afterwards
    SERIAL = 4  # never split over threads
    TIMED = 8  # write the time into the context's log afterwards


class DimOp(IntEnum):
    """Operations of a dim program. FLOORDIV, CEILDIV and MOD need a divisor above 0."""

    ADD = 0
    SUB = 1
    MUL = 2
    FLOORDIV = 3
    CEILDIV = 4
    MOD = 5
    MIN = 6
    MAX = 7
    CONST = 8
    COPY = 9


def _require_index(what: str, *values: int) -> None:
    for value in values:
        if not 0 <= value <= _I64.max:
            raise BuildError(f"{what} needs an index into a table, found {value}")


def _require_i64(what: str, value: int) -> None:
    if not _I64.min <= value <= _I64.max:
        raise BuildError(f"{what} takes a 64-bit integer, found {value}")


class DimProgram:
    """Integer code over the dims table. Methods append a record and return its index."""

    def __init__(self) -> None:
        self._records: list[tuple[int, int, int, int]] = []
        self.extents = 0
        """Least size of the dims table that holds every index used here."""

    def __len__(self) -> int:
        return len(self._records)

    def append(self, op: DimOp, target: int, a: int, b: int) -> int:
        """dims[target] = dims[a] op dims[b], for the operations with two operands."""
        if op in (DimOp.CONST, DimOp.COPY):
            raise BuildError(f"{op.name} has one operand: use `{op.name.lower()}`")
        return self._append(op, target, a, b, (target, a, b))

    def const(self, target: int, value: int) -> int:
        """dims[target] = value."""
        _require_i64("a constant extent", value)
        return self._append(DimOp.CONST, target, value, 0, (target,))

    def copy(self, target: int, source: int) -> int:
        """dims[target] = dims[source]."""
        return self._append(DimOp.COPY, target, source, source, (target, source))

    def build(self) -> npt.NDArray[np.int64]:
        """Return the records: [n, 4] of (operation, target, a, b)."""
        return np.array(self._records, np.int64).reshape(-1, 4)

    def _append(self, op: DimOp, target: int, a: int, b: int, indices: tuple[int, ...]) -> int:
        _require_index(f"dim program record {len(self._records)} ({op.name})", *indices)
        self._records.append((int(op), target, a, b))
        self.extents = max(self.extents, 1 + max(indices))
        return len(self._records) - 1


@dataclass(frozen=True)
class Thunks:
    """A finished table.

    Attributes:
        records: [n, 8] i64, as the dispatcher reads them.
        args: the kernels' argument arrays, which `records` points into.
        slots: least size of the slot table that the control thunks need.
        extents: the same for the dims table.
        dim_records: least length of the dim program.
    """

    records: npt.NDArray[np.int64]
    args: npt.NDArray[np.int64]
    slots: int
    extents: int
    dim_records: int

    def __len__(self) -> int:
        return len(self.records)

    def node(self, pc: int) -> int:
        """Return the node id of a thunk."""
        return int(self.records[pc, 4])

    def kind(self, pc: int) -> Kind:
        """Return what a thunk does."""
        return Kind(int(self.records[pc, 3]) & 255)


@dataclass
class _Record:
    """One thunk; `target` names the operand (5, 6 or 7 in words) that is a pc."""

    kind: Kind
    node: int
    w2: int = 0
    flags: Flag = Flag.NONE
    abc: list[int] = field(default_factory=lambda: [0, 0, 0])
    kernel: int | str = 0
    args: tuple[int, ...] = ()
    target: int | None = None


class ThunkTable:
    """A table under construction. Methods append a thunk and return its pc.

    `node` is an id for reports (-1: none).

    Jumps may be appended before their target is known (`target=-1`) and completed with `patch`.
    """

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._slots = 0
        self._extents = 0
        self._dim_records = 0

    def __len__(self) -> int:
        return len(self._records)

    def call(
        self,
        kernel: int | str,
        args: Sequence[int],
        chunks: int,
        *,
        flags: Flag = Flag.NONE,
        node: int = -1,
    ) -> int:
        """Run a kernel (an address, or a symbol that `build` resolves) over dims[chunks] chunks."""
        _require_index("the arguments of a kernel", *args)
        record = _Record(Kind.CALL, node, w2=chunks, flags=flags, kernel=kernel, args=tuple(args))
        return self._append(record, dims=(chunks,))

    def jump(self, target: int = -1, *, node: int = -1) -> int:
        """Continue at target."""
        return self._append(_Record(Kind.JUMP, node, abc=[target, 0, 0], target=0))

    def jump_unless(self, slot: int, target: int = -1, *, node: int = -1) -> int:
        """Continue at target if the bool in the slot is false."""
        return self._append(
            _Record(Kind.JUMP_UNLESS, node, abc=[slot, target, 0], target=1), slots=(slot,)
        )

    def jump_ge(self, left: int, right: int, target: int = -1, *, node: int = -1) -> int:
        """Continue at target if dims[left] >= dims[right]."""
        return self._append(
            _Record(Kind.JUMP_GE, node, abc=[left, right, target], target=2), dims=(left, right)
        )

    def set_dim(self, extent: int, value: int, *, node: int = -1) -> int:
        """dims[extent] = value."""
        _require_i64("SET_DIM", value)
        return self._append(_Record(Kind.SET_DIM, node, abc=[extent, value, 0]), dims=(extent,))

    def add_dim(self, extent: int, value: int, *, node: int = -1) -> int:
        """dims[extent] += value; overflow is an error."""
        _require_i64("ADD_DIM", value)
        return self._append(_Record(Kind.ADD_DIM, node, abc=[extent, value, 0]), dims=(extent,))

    def bind(self, slot: int, base: int, index: int, stride: int, *, node: int = -1) -> int:
        """slots[slot] = slots[base] + dims[index] * dims[stride] bytes."""
        record = _Record(Kind.BIND, node, w2=stride, abc=[slot, base, index])
        return self._append(record, slots=(slot, base), dims=(index, stride))

    def dims(self, first: int, last: int, *, node: int = -1) -> int:
        """Evaluate records first to last - 1 of the dim program."""
        _require_index("DIMS", first, last)
        self._dim_records = max(self._dim_records, last)
        return self._append(_Record(Kind.DIMS, node, abc=[first, last, 0]))

    def host(self, *, node: int = -1) -> int:
        """Return to Python, which executes this thunk."""
        return self._append(_Record(Kind.HOST, node))

    def end(self, *, node: int = -1) -> int:
        """End the program."""
        return self._append(_Record(Kind.END, node))

    def read_dim(self, extent: int, slot: int, bound: int, *, node: int = -1) -> int:
        """dims[extent] = the i64 in the slot; below 0 or above dims[bound] is an error."""
        record = _Record(Kind.READ_DIM, node, abc=[extent, slot, bound])
        return self._append(record, slots=(slot,), dims=(extent, bound))

    def copy_slot(self, slot: int, source: int, *, node: int = -1) -> int:
        """slots[slot] = slots[source]."""
        return self._append(
            _Record(Kind.COPY_SLOT, node, abc=[slot, source, 0]), slots=(slot, source)
        )

    def patch(self, pc: int, target: int) -> None:
        """Set the target of a jump that was appended before."""
        record = self._records[pc]
        if record.target is None:
            raise BuildError(f"thunk {pc} is {record.kind.name}, which has no target")
        record.abc[record.target] = target

    def build(self, kernels: Mapping[str, int] | None = None) -> Thunks:
        """Return the finished table with kernel symbols replaced by their addresses.

        Raises:
            BuildError: the program can run off its end, a jump has no target in the table, a symbol
                has no address.
        """
        self._check()
        counts = np.array([len(r.args) for r in self._records], np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        args = np.array([i for r in self._records for i in r.args] or [0], np.int64)
        base = int(args.ctypes.data)
        rows: list[list[int]] = []
        for pc, r in enumerate(self._records):
            address = _resolve(r.kernel, kernels or {}, pc)
            where = base + 8 * int(starts[pc]) if r.args else 0
            rows.append([address, where, r.w2, int(r.kind) | int(r.flags) << 8, r.node, *r.abc])
        return Thunks(np.array(rows, np.int64), args, self._slots, self._extents, self._dim_records)

    def _append(
        self, record: _Record, slots: tuple[int, ...] = (), dims: tuple[int, ...] = ()
    ) -> int:
        pc = len(self._records)
        _require_index(f"thunk {pc} ({record.kind.name})", *slots, *dims)
        self._records.append(record)
        self._slots = max(self._slots, *(i + 1 for i in slots), 0)
        self._extents = max(self._extents, *(i + 1 for i in dims), 0)
        return pc

    def _check(self) -> None:
        if not self._records or self._records[-1].kind not in (Kind.END, Kind.JUMP):
            raise BuildError(
                "the last thunk must be END or JUMP, or the program runs off its table"
            )
        for pc, record in enumerate(self._records):
            if record.target is None:
                continue
            target = record.abc[record.target]
            if not 0 <= target < len(self._records):
                raise BuildError(
                    f"thunk {pc} ({record.kind.name}) jumps to {target}, "
                    f"the table has {len(self._records)} thunks"
                )


def _resolve(kernel: int | str, kernels: Mapping[str, int], pc: int) -> int:
    if isinstance(kernel, int):
        return kernel
    if kernel not in kernels:
        raise BuildError(f"thunk {pc} calls {kernel!r}, which has no address")
    return kernels[kernel]
