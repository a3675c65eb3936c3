# SPDX-License-Identifier: Apache-2.0
"""`Region`: a fused chain of elementwise, row-reduction and index-mapped operators, as one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from rlx.base.dims import Dim, product
from rlx.base.errors import TypeRuleError
from rlx.base.facts import current_facts
from rlx.base.numeric import Array
from rlx.base.types import Shape, TensorType, broadcast_shapes
from rlx.expr.body import Body, parse_body
from rlx.expr.evaluate import evaluate_body
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.op import Op
from rlx.ir.text import attribute_form
from rlx.ops.spec import ElementwiseOp, op

__all__ = ["Region", "WithEpilogue"]


attribute_form(Body, "body", str, parse_body)
attribute_form(AxisMap, "axis")
attribute_form(IndexMap, "index_map")


@op("region")
@dataclass(frozen=True)
class Region(Op):
    """For every point of `shape`: read one element of each operand through its map, compute `body`, write.

    Attributes:
        body: what is computed; one input per operand.
        shape: the iteration space.
        maps: per operand an index map, or None for NumPy broadcasting to `shape`.
        row_axes: number of trailing axes that row instructions reduce; 0 for a purely elementwise region.

    A result that is uniform along the row has extent 1 along the row axes, others have `shape`.
    """

    operands = ("x*",)
    body: Body
    shape: Shape
    maps: tuple[IndexMap | None, ...] = ()
    row_axes: int = 0

    def map_of(self, index: int) -> IndexMap | None:
        """Return the index map of an operand, None for broadcasting."""
        return self.maps[index] if self.maps else None

    def uniform_inputs(self, types: tuple[TensorType, ...]) -> list[bool]:
        """Return per operand whether it is the same for all elements of a row."""
        rank, first = len(self.shape), len(self.shape) - self.row_axes
        out: list[bool] = []
        for index, type_ in enumerate(types):
            mapped = self.map_of(index)
            if mapped is not None:
                out.append(all(a.axis is None or a.axis < first for a in mapped.axes))
            else:
                trailing = (
                    type_.shape[max(0, first - (rank - type_.rank)) :] if self.row_axes else ()
                )
                out.append(self.row_axes > 0 and all(d == 1 for d in trailing))
        return out

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:  # noqa: D102
        if tuple(t.dtype for t in types) != self.body.inputs:
            raise TypeRuleError(
                f"the body reads {self.body.inputs}, not {tuple(t.dtype for t in types)}"
            )
        for index, type_ in enumerate(types):
            self._check(type_, self.map_of(index))
        uniform = self.body.uniform(self.uniform_inputs(types))
        lead = self.shape[: len(self.shape) - self.row_axes]
        row = (*lead, *([1] * self.row_axes))
        return tuple(
            TensorType(self.body.dtype(r), row if self.row_axes and uniform[r] else self.shape)
            for r in self.body.results
        )

    def may_fail(self, *types: TensorType | None) -> bool:  # noqa: D102
        del types
        return _divides(self.body)

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        del operands, results
        return product(self.shape) * _steps(self.body)

    def _check(self, type_: TensorType, mapped: IndexMap | None) -> None:
        if mapped is not None:
            if len(mapped.axes) != type_.rank or mapped.rank != len(self.shape):
                raise TypeRuleError(f"an index map over rank {mapped.rank} does not fit {type_}")
            return
        lead = len(self.shape) - type_.rank
        if lead < 0:
            raise TypeRuleError(f"{type_} has more axes than the space {self.shape}")
        facts = current_facts()
        for have, want in zip(type_.shape, self.shape[lead:], strict=True):
            if have != 1 and facts.equal(have, want) is False:
                raise TypeRuleError(f"{type_} does not broadcast to the space {self.shape}")

    def reference(self, *arrays: Array) -> tuple[Array, ...]:  # noqa: D102
        shape = tuple(int(d) for d in self.shape)
        views = [
            np.broadcast_to(a, shape) if m is None and not self.row_axes else _view(a, m, shape)
            for a, m in zip(arrays, self.maps or (None,) * len(arrays), strict=True)
        ]
        types = tuple(TensorType(d, a.shape) for d, a in zip(self.body.inputs, arrays, strict=True))
        uniform = self.body.uniform(self.uniform_inputs(types))
        first = len(shape) - self.row_axes
        results = (
            evaluate_body(self.body, views or [np.empty(shape)], self.row_axes) if views else ()
        )
        row = (*shape[:first], *([1] * self.row_axes))
        return tuple(
            np.asarray(
                np.broadcast_to(value, row if self.row_axes and uniform[r] else shape), order="C"
            )
            for value, r in zip(results, self.body.results, strict=True)
        )


def _region_of(self: ElementwiseOp, *types: TensorType) -> Region:
    """Return an elementwise operator as a region over its broadcast shape."""
    shape = broadcast_shapes(*(t.shape for t in types))
    return Region(self.body(*(t.dtype for t in types)), shape)


# The declaration's module cannot name `Region`, whose own declaration needs that module.
ElementwiseOp.region = _region_of


def _divides(body: Body) -> bool:
    """Return whether the body divides integers, which fails for a divisor of 0."""
    return any(i.op in ("div", "mod", "fmod") and i.dtype.is_integer for i in body.instrs)


def _steps(body: Body) -> int:
    """Return how many operations the body does per element."""
    return sum(i.op not in {"const", "cast"} for i in body.instrs)


def _view(array: Array, mapped: IndexMap | None, shape: tuple[int, ...]) -> Array:
    """Return the operand as the iteration space sees it (extent 1 where it does not vary)."""
    rank = len(shape)
    if mapped is None:
        return array.reshape((1,) * (rank - array.ndim) + array.shape)
    indices: list[Array] = []
    for axis in mapped.axes:
        extent = shape[axis.axis] if axis.axis is not None else 1
        line = int(axis.start) + axis.step * np.arange(extent)
        where = [1] * rank
        if axis.axis is not None:
            where[axis.axis] = extent
        indices.append(line.reshape(where))
    return array[tuple(indices)] if indices else array.reshape((1,) * rank)


def _first(found: Any) -> Any:
    """Return the only result of an operator, which may come alone or in a tuple."""
    return cast("tuple[Any, ...]", found)[0] if isinstance(found, tuple) else found


@op("with_epilogue")
@dataclass(frozen=True)
class WithEpilogue(Op):
    """`anchor` (matmul, convolution, ...) followed by an elementwise body over its result.

    The first `anchor_operands` operands are the anchor's; the rest broadcast to the anchor's result. Body input 0 is
    the anchor's result, the others follow. The result is what the anchor, rounded to its dtype, and then the body
    would give one after the other.
    """

    operands = ("x*",)
    anchor: Op
    anchor_operands: int
    body: Body

    @property
    def label(self) -> str:  # noqa: D102
        return f"{self.anchor.name}+epilogue"

    def infer(self, *types: TensorType | None) -> tuple[TensorType, ...]:  # noqa: D102
        base = cast("TensorType", _first(self.anchor.infer(*types[: self.anchor_operands])))
        extra = [t for t in types[self.anchor_operands :] if t is not None]
        if (base.dtype, *(t.dtype for t in extra)) != self.body.inputs:
            raise TypeRuleError(
                f"the epilogue reads {self.body.inputs}, found {base.dtype} and {extra}"
            )
        return tuple(TensorType(self.body.dtype(r), base.shape) for r in self.body.results)

    def reference(self, *arrays: Array | None) -> tuple[Array, ...]:  # noqa: D102
        found = cast("Array", _first(self.anchor.reference(*arrays[: self.anchor_operands])))
        base = np.asarray(found).astype(self.body.inputs[0].numpy)
        extra = [a for a in arrays[self.anchor_operands :] if a is not None]
        results = evaluate_body(self.body, [base, *extra])
        return tuple(np.asarray(np.broadcast_to(r, base.shape), order="C") for r in results)

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim | None:
        anchor: Dim | None = self.anchor.flops(operands[: self.anchor_operands], results)
        return None if anchor is None else anchor + results[0].elements * _steps(self.body)

    def may_fail(self, *types: TensorType | None) -> bool:  # noqa: D102
        return _divides(self.body) or self.anchor.may_fail(*types[: self.anchor_operands])
