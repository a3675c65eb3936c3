# SPDX-License-Identifier: Apache-2.0
"""If, Loop and Scan: operators that own regions.

A region reads only its own parameters, so what it takes from outside is an operand of the node (a
capture). The type rule is given the regions as a keyword, because the types of their results decide
those of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType, require_equal
from rlx.ir.graph import Block
from rlx.ir.op import Op
from rlx.ops.spec import Sample, op

__all__ = ["If", "Loop", "RunRegion", "Scan"]


class RunRegion(Protocol):
    """Runs regions of the node that is evaluated."""

    def __call__(self, index: int, *arguments: Array) -> tuple[Array, ...]:
        """Return the results of a region for arguments."""
        ...

    def results(self, index: int) -> int:
        """Return how many results a region has."""
        ...


def _types(block: Block) -> list[TensorType]:
    return [v.type for v in block.results]


def _join(a: TensorType, b: TensorType, what: str) -> TensorType:
    """Return the type that both have, under a guard where extents are symbolic.

    Raises:
        TypeRuleError: they differ.
    """
    if a.dtype is not b.dtype or a.rank != b.rank:
        raise TypeRuleError(f"{what} is {a} on one side and {b} on the other")
    return a.with_shape([require_equal(x, y, what) for x, y in zip(a.shape, b.shape, strict=True)])


def _check_parameters(block: Block, types: Sequence[TensorType], what: str) -> None:
    if len(block.parameters) != len(types):
        raise TypeRuleError(
            f"{what} has {len(block.parameters)} parameters for {len(types)} operands"
        )
    for index, (parameter, type_) in enumerate(zip(block.parameters, types, strict=True)):
        _join(parameter.type, type_, f"parameter {index} of {what}")


def _carried(types: Sequence[TensorType], results: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Return the types of carried values, which an iteration must keep."""
    if len(results) < len(types):
        raise TypeRuleError(
            f"the region has {len(results)} results for {len(types)} carried values"
        )
    return tuple(
        _join(a, b, f"carried value {i}")
        for i, (a, b) in enumerate(zip(types, results, strict=False))
    )


def _stacked(rows: Sequence[tuple[Array, ...]], count: int) -> list[list[Array]]:
    """Return per stacked result the list of its values; `count` empty lists after no iteration."""
    return (
        [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(count)]
    )


def _count_regions(regions: Sequence[Block], count: int) -> None:
    if len(regions) != count:
        raise TypeRuleError(f"needs {count} regions, found {len(regions)}")


@op("if")
@dataclass(frozen=True)
class If(Op):
    """The results of the first region where the condition (bool, rank 0) holds, else of the second.

    Both regions have the captures as parameters, and results of the same types. Only the taken one
    runs.
    """

    operands = ("condition", "captures*")
    foldable = False
    samples: ClassVar[tuple[Sample, ...]] = ()

    def infer(  # noqa: D102
        self, condition: TensorType, *captures: TensorType, regions: tuple[Block, ...] = ()
    ) -> tuple[TensorType, ...]:
        _count_regions(regions, 2)
        if condition.dtype is not DType.BOOL or condition.rank:
            raise TypeRuleError(f"the condition must be bool[], not {condition}")
        for name, region in zip(("then", "else"), regions, strict=True):
            _check_parameters(region, captures, f"the {name} region")
        yes, no = map(_types, regions)
        if len(yes) != len(no):
            raise TypeRuleError(f"the regions have {len(yes)} and {len(no)} results")
        return tuple(
            _join(a, b, f"result {i}") for i, (a, b) in enumerate(zip(yes, no, strict=True))
        )

    def reference_regions(
        self, run: RunRegion, condition: Array, *captures: Array
    ) -> tuple[Array, ...]:
        """Return the results of the region that the condition chooses."""
        return run(0 if bool(condition) else 1, *captures)

    def may_fail(self, *types: TensorType | None) -> bool:  # noqa: D102
        return True  # a region may


@op("loop")
@dataclass(frozen=True)
class Loop(Op):
    """Run the region again and again, feeding what it carries back to it.

    Region: (iteration i64[], condition bool[], *carried, *captures) -> (condition, *carried,
        *stacked). It runs while
    the condition (true where absent) holds and the iteration is below the trip count (unlimited
    where absent). The results are the last carried values and, for every further result of the
    region, all its values along a new first axis of extent `trip`.

    Attributes:
        carried: number of carried values.
        trip: the number of iterations where it is known before the run; stacked results need it,
            and a run that ends after another number of iterations is then an ExecutionError.
    """

    operands = ("trip?", "condition?", "x*")
    foldable = False
    carried: int
    trip: Dim | None = None
    samples: ClassVar[tuple[Sample, ...]] = ()

    def infer(  # noqa: D102
        self,
        trip: TensorType | None,
        condition: TensorType | None,
        *rest: TensorType,
        regions: tuple[Block, ...] = (),
    ) -> tuple[TensorType, ...]:
        _count_regions(regions, 1)
        for name, type_, dtype in (
            ("trip count", trip, DType.I64),
            ("condition", condition, DType.BOOL),
        ):
            if type_ is not None and (type_.dtype is not dtype or type_.rank):
                raise TypeRuleError(f"the {name} must be {dtype}[], not {type_}")
        own = [TensorType(DType.I64, ()), TensorType(DType.BOOL, ()), *rest]
        _check_parameters(regions[0], own, "the region")
        first, *results = _types(regions[0])
        _join(first, TensorType(DType.BOOL, ()), "the condition of the region")
        carried = _carried(rest[: self.carried], results)
        stacked = results[self.carried :]
        if stacked and self.trip is None:
            raise TypeRuleError(
                f"{len(stacked)} results are stacked over the iterations, "
                "whose number depends on the data of a run"
            )
        count: Dim = 0 if self.trip is None else self.trip
        return (*carried, *(t.with_shape((count, *t.shape)) for t in stacked))

    def reference_regions(
        self, run: RunRegion, trip: Array | None, condition: Array | None, *rest: Array
    ) -> tuple[Array | list[Array], ...]:
        """Return the last carried values and lists of the stacked ones."""
        state, captures = rest[: self.carried], rest[self.carried :]
        limit = None if trip is None else int(trip)
        going = True if condition is None else bool(condition)
        rows: list[tuple[Array, ...]] = []
        count = 0
        while going and (limit is None or count < limit):
            again, *results = run(
                0, np.asarray(count, np.int64), np.asarray(going), *state, *captures
            )
            state, going = tuple(results[: self.carried]), bool(again)
            rows.append(tuple(results[self.carried :]))
            count += 1
        if self.trip is not None and count != int(self.trip):
            raise ExecutionError(
                f"the loop ended after {count} iterations, {self.trip} were expected"
            )
        return (*state, *_stacked(rows, run.results(0) - 1 - self.carried))

    def may_fail(self, *types: TensorType | None) -> bool:  # noqa: D102
        return True  # the region may


@op("scan")
@dataclass(frozen=True)
class Scan(Op):
    """Run the region for every slice of the scanned operands along their first axis, in order.

    Region: (*carried, *slices, *captures) -> (*carried, *stacked). The results are the last carried
        values and all
    stacked ones along a new first axis of extent `trip`.

    Attributes:
        trip: number of slices.
        carried: number of carried values.
        scan_inputs: number of scanned operands.
    """

    operands = ("x*",)
    foldable = False
    trip: Dim
    carried: int
    scan_inputs: int
    samples: ClassVar[tuple[Sample, ...]] = ()

    def infer(self, *types: TensorType, regions: tuple[Block, ...] = ()) -> tuple[TensorType, ...]:  # noqa: D102
        _count_regions(regions, 1)
        carried, scanned = (
            types[: self.carried],
            types[self.carried : self.carried + self.scan_inputs],
        )
        slices: list[TensorType] = []
        for index, type_ in enumerate(scanned):
            if not type_.rank:
                raise TypeRuleError(f"scanned operand {index} has no axis to scan")
            require_equal(type_.shape[0], self.trip, f"first extent of scanned operand {index}")
            slices.append(type_.with_shape(type_.shape[1:]))
        captures = types[self.carried + self.scan_inputs :]
        _check_parameters(regions[0], [*carried, *slices, *captures], "the region")
        results = _types(regions[0])
        stacked = results[self.carried :]
        return (
            *_carried(carried, results),
            *(t.with_shape((self.trip, *t.shape)) for t in stacked),
        )

    def reference_regions(self, run: RunRegion, *arrays: Array) -> tuple[Array | list[Array], ...]:
        """Return the last carried values and lists of the stacked ones."""
        first = self.carried + self.scan_inputs
        state, scanned, captures = (
            arrays[: self.carried],
            arrays[self.carried : first],
            arrays[first:],
        )
        rows: list[tuple[Array, ...]] = []
        for index in range(int(self.trip)):
            results = run(0, *state, *(np.asarray(x[index]) for x in scanned), *captures)
            state = results[: self.carried]
            rows.append(results[self.carried :])
        return (*state, *_stacked(rows, run.results(0) - self.carried))

    def may_fail(self, *types: TensorType | None) -> bool:  # noqa: D102
        return True  # the region may
