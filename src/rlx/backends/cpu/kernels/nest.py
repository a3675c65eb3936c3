# SPDX-License-Identifier: Apache-2.0
"""Walking buffers inside kernels: operand streams, and loops over rows of several axes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlx.backends.cpu.abi import Kernel
from rlx.backends.cpu.builder import Value
from rlx.backends.cpu.emit import load_storage, memory_type
from rlx.backends.cpu.kernels.space import Access, Step
from rlx.backends.cpu.lltypes import I64, vec
from rlx.base.dims import product
from rlx.base.dtypes import DType
from rlx.base.types import Shape
from rlx.kernel.program import Arg, DimArg

__all__ = ["Arguments", "Rows", "Stream", "Walk", "argument_count", "rows_args", "stream_args"]


@dataclass(frozen=True)
class Walk:
    """What of an `Access` is part of the kernel's text."""

    dtype: DType
    step: Step
    has_offset: bool

    @classmethod
    def of(cls, access: Access) -> Walk:
        """Return the static part of an access."""
        return cls(access.dtype, access.step, access.offset != 0)


class Arguments:
    """Hands out a kernel's arguments in the order in which the launch lists them."""

    def __init__(self, k: Kernel) -> None:
        self._k = k
        self._next = 0

    def slot(self) -> Value:
        """Return the next argument, a buffer."""
        self._next += 1
        return self._k.slot(self._next - 1)

    def dim(self) -> Value:
        """Return the next argument, an extent."""
        self._next += 1
        return self._k.dim(self._next - 1)


def argument_count(rank: int, walks: Sequence[Walk]) -> int:
    """Return how many arguments the slots and `stream_args` of these walks take."""
    return sum(1 + w.has_offset + rank + (w.step is Step.ANY) for w in walks)


def stream_args(access: Access) -> list[Arg]:
    """Return the extents of a walk: offset if not 0, outer strides, step if the text lacks it."""
    offset = [DimArg(access.offset)] if access.offset != 0 else []
    step = [DimArg(access.strides[-1])] if access.step is Step.ANY else []
    return [*offset, *map(DimArg, access.strides[:-1]), *step]


@dataclass
class Stream:
    """One access inside a kernel.

    Attributes:
        walk: the static part.
        base: pointer to the first point.
        outer: strides of all axes but the innermost.
        step: stride of the innermost axis, where the text does not fix it.
    """

    walk: Walk
    base: Value
    outer: list[Value]
    step: Value | None

    @classmethod
    def take(cls, k: Kernel, args: Arguments, walk: Walk, slot: Value, rank: int) -> Stream:
        """Take the arguments of `stream_args`."""
        base = k.offset(slot, args.dim(), memory_type(walk.dtype)) if walk.has_offset else slot
        outer = [args.dim() for _ in range(rank)]
        return cls(walk, base, outer, args.dim() if walk.step is Step.ANY else None)

    def at(self, k: Kernel, position: Sequence[Value]) -> Value:
        """Return the pointer to the row at these indices of the leading axes."""
        return self.moved(k, self.base, position, self.outer)

    def moved(
        self, k: Kernel, pointer: Value, position: Sequence[Value], strides: Sequence[Value]
    ) -> Value:
        """Return a pointer moved by the indices times the strides."""
        at: Value | None = None
        for index, stride in zip(position, strides, strict=False):
            term = index * stride
            at = term if at is None else at + term
        return pointer if at is None else k.offset(pointer, at, memory_type(self.walk.dtype))

    def load(
        self, k: Kernel, pointer: Value, index: Value, lanes: int, mask: Value | None
    ) -> Value:
        """Load the points `index`, `index + 1`, ... of a row, in storage form."""
        kind = memory_type(self.walk.dtype)
        if self.walk.step is Step.FIXED:
            return k.splat(k.load(kind, pointer), lanes)
        if self.step is None:
            return load_storage(k, vec(kind, lanes), pointer, index, mask)
        return k.gather(vec(kind, lanes), pointer, self.lanes(k, index, lanes), mask)

    def lanes(self, k: Kernel, index: Value, lanes: int) -> Value:
        """Return the element of each of these points, relative to the row's pointer."""
        assert self.step is not None
        points = k.iota(vec(I64, lanes)) + k.splat(index, lanes)
        return points * k.splat(self.step, lanes)


def rows_args(outer: Shape) -> list[Arg]:
    """Return the arguments of `Rows`: the number of rows, and all outer extents but the first."""
    return [DimArg(product(outer)), *map(DimArg, outer[1:])]


class Rows:
    """A flat range of rows of `rank` >= 1 outer axes.

    Attributes:
        count: number of rows.
    """

    def __init__(self, k: Kernel, args: Arguments, rank: int) -> None:
        self._k = k
        self._rank = rank
        self.count = args.dim()
        self._extents = [args.dim() for _ in range(rank - 1)]

    @contextmanager
    def range(self, first: Value, last: Value) -> Generator[tuple[Value, Sequence[Value]]]:
        """Loop over the rows first..last; gives the row number and its index along each axis."""
        with self._k.loop(first, last, carry=self._digits(first)) as loop:
            yield loop.index, (loop.carry if self._rank > 1 else [loop.index])
            loop.next(*self._advance(loop.carry))

    def _digits(self, row: Value) -> list[Value]:
        """Split a row number into one index per axis; nothing to split with one axis."""
        if self._rank == 1:
            return []
        k, rest = self._k, row
        digits: list[Value] = []
        for extent in reversed(self._extents):
            quotient, _ = k.divide_nonzero("udiv", rest, extent)
            digits.append(rest - quotient * extent)
            rest = quotient
        return [rest, *reversed(digits)]

    def _advance(self, digits: Sequence[Value]) -> list[Value]:
        """Return the indices of the next row: count up, with a carry into the axis before."""
        if not digits:
            return []
        k = self._k
        out: list[Value] = []
        carry: Value = k.i64(1)
        for digit, extent in zip(reversed(digits[1:]), reversed(self._extents), strict=True):
            moved = digit + carry
            full = moved.eq(extent)
            out.append(k.select(full, 0, moved))
            carry = k.zext(full, I64)
        return [digits[0] + carry, *reversed(out)]
