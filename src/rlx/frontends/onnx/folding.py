# SPDX-License-Identifier: Apache-2.0
"""A builder that knows small tensors of extents, so that shape arithmetic becomes attributes.

Every emitted operator whose operands are known is folded on the spot: numbers by the operator's
reference meaning, extents symbolically (`rlx.ops.dims.fold`). The result is a `Constant` or a
`DimTensor`; what nothing reads in the end is removed by `drop_unused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from rlx.base import numeric
from rlx.base.dims import DimExpr
from rlx.base.dtypes import DType
from rlx.base.errors import RlxError, UndecidedError
from rlx.base.facts import Facts
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.frontends.onnx.registry import ObjectArray
from rlx.ir.builder import Builder, Rewriter, infer_types
from rlx.ir.graph import Block, Node, Value
from rlx.ir.op import Op
from rlx.ops.dims import Ratio, fold
from rlx.ops.elementwise import Cast, add, div
from rlx.ops.leaf import Constant, DimTensor, Literal

__all__ = ["MAX_KNOWN", "FoldingBuilder", "drop_unused"]

MAX_KNOWN = 64
"""Elements of the largest tensor that is followed symbolically."""


class FoldingBuilder(Builder):
    """A `Builder` that folds what is known.

    Args:
        block: where nodes go.
        facts: of the graph.
        known: what is known of each Value, shared by all builders of one import.
    """

    def __init__(self, block: Block, facts: Facts, known: dict[Value, ObjectArray]) -> None:
        super().__init__(block, facts)
        self.known = known

    def emit(
        self, op: Op, *operands: Value | None, regions: tuple[Block, ...] = ()
    ) -> tuple[Value, ...]:
        """Append a node, or the constants it folds to; return the results.

        Raises:
            TypeRuleError: the operator does not accept the operands.
        """
        present = [v.type if v is not None else None for v in operands]
        with self.facts.active():
            if regions:
                types: Sequence[TensorType] = op.infer(*present, regions=regions)
            else:
                types = infer_types(op, present, self.location)
                folded = self._folded(op, operands, types)
                if folded is not None:
                    return folded
        values = self.emit_typed(op, operands, types, regions).results
        if isinstance(op, Constant | DimTensor):
            self._remember(values[0], op)
        return values

    def literal(self, array: Array) -> Value:
        """Append a constant."""
        return self.emit(Constant(Literal(array)))[0]

    def knowledge(self, array: ObjectArray, dtype: DType) -> Value:
        """Append a tensor of known numbers and extents."""
        flat = array.reshape(-1).tolist()
        if not any(isinstance(x, DimExpr | Ratio) for x in flat):
            numbers = [_number(x, dtype) for x in flat]
            return self.literal(np.array(numbers, dtype.numpy).reshape(array.shape))
        tops = [x.top if isinstance(x, Ratio) else x for x in flat]
        value = self._extents(tops, array.shape, dtype)
        if any(isinstance(x, Ratio) for x in flat):
            bottoms = [x.bottom if isinstance(x, Ratio) else 1 for x in flat]
            divisor = self._extents(bottoms, array.shape, dtype)
            value = self.emit_typed(div.op(), [value, divisor], [value.type]).results[0]
        self.known[value] = array
        return value

    def _extents(self, dims: Sequence[Any], shape: tuple[int, ...], dtype: DType) -> Value:
        """Append whole numbers, some symbolic, as a tensor of any numeric dtype."""
        whole = dtype if dtype.is_integer else DType.I64
        if any(int(d) != d for d in dims if not isinstance(d, DimExpr)):
            return self._mixed(dims, shape, dtype)
        exact = tuple(d if isinstance(d, DimExpr) else int(d) for d in dims)
        value = self.emit(DimTensor(exact, shape, whole))[0]
        if whole is dtype:
            return value
        return self.emit_typed(Cast(dtype), [value], [TensorType(dtype, shape)]).results[0]

    def _mixed(self, dims: Sequence[Any], shape: tuple[int, ...], dtype: DType) -> Value:
        """Append extents and broken numbers: a sum of two tensors, one of which is always 0."""
        extents = [d if isinstance(d, DimExpr) else 0 for d in dims]
        numbers = [0.0 if isinstance(d, DimExpr) else float(d) for d in dims]
        both = [
            self._extents(extents, shape, dtype),
            self.literal(np.array(numbers, dtype.numpy).reshape(shape)),
        ]
        return self.emit_typed(add.op(), both, [both[0].type]).results[0]

    def _remember(self, value: Value, op: Constant | DimTensor) -> None:
        if isinstance(op, DimTensor):
            array = np.empty(len(op.dims), object)
            array[:] = op.dims
            self.known[value] = array.reshape(value.type.shape)
        elif op.data.array.size <= MAX_KNOWN:
            self.known[value] = known_numbers(op.data.array)

    def _folded(
        self, op: Op, operands: Sequence[Value | None], types: Sequence[TensorType]
    ) -> tuple[Value, ...] | None:
        arrays = [None if v is None else self.known.get(v) for v in operands]
        unknown = any(a is None and v is not None for a, v in zip(arrays, operands, strict=True))
        small = all(t.is_static and cast("int", t.elements) <= MAX_KNOWN for t in types)
        if unknown or not small or not operands or not op.foldable:
            return None
        numbers = self._numbers(op, operands, types)
        if numbers is not None:
            return tuple(self.literal(array) for array in numbers)
        try:
            extents = fold(op, tuple(v.type if v else None for v in operands), tuple(arrays))
        except UndecidedError:  # the answer depends on the call: a node like any other
            return None
        if extents is None:
            return None
        return tuple(self.knowledge(a, t.dtype) for a, t in zip(extents, types, strict=True))

    def _numbers(
        self, op: Op, operands: Sequence[Value | None], types: Sequence[TensorType]
    ) -> list[Array] | None:
        """Return the results over operands that are all constants, or None."""
        arrays: list[Array | None] = []
        for value in operands:
            producer = value.producer if value is not None else None
            if value is not None and (producer is None or not isinstance(producer.op, Constant)):
                return None
            arrays.append(
                numeric.widen(cast("Constant", producer.op).data.array) if producer else None
            )
        try:
            found = op.reference(*arrays)
        except RlxError:  # it fails for this data: so it shall when it is run
            return None
        results = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
        return [
            numeric.cast(np.asarray(r), t.dtype).reshape(t.shape)
            for r, t in zip(results, types, strict=True)
        ]


def known_numbers(array: Array) -> ObjectArray:
    """Return the elements as Python numbers; whole floats as integers, to meet extents."""
    out: ObjectArray = np.empty(array.size, object)
    wide: Array = array.astype(np.float64) if array.dtype.kind not in "iub" else array
    for index, number in enumerate(wide.reshape(-1).tolist()):
        whole = isinstance(number, float) and number.is_integer() and abs(number) < 2**53
        out[index] = int(number) if whole else number
    return out.reshape(array.shape)


def _number(value: Any, dtype: DType) -> Any:
    if dtype is DType.BOOL:
        return bool(value)
    return float(value) if dtype.is_float else int(value)


def drop_unused(block: Block, facts: Facts) -> None:
    """Remove constants and shape arithmetic that nothing reads, in nested blocks too."""
    rewriter = Rewriter(facts)
    kept = {id(value) for value in block.results}
    for node in reversed(block.nodes()):
        for region in node.regions:
            drop_unused(region, facts)
        used = any(r.uses or id(r) in kept for r in node.results)
        if not used and (isinstance(node.op, _LEAVES) or _is_part(node)):
            rewriter.erase(node)


_LEAVES = (Constant, DimTensor)


def _is_part(node: Node) -> bool:
    """Return whether a node only brings known extents into another form."""
    makers = [o.producer for o in node.operands if o is not None]
    return bool(makers) and all(m is not None and _is_exact(m) for m in makers)


def _is_exact(node: Node) -> bool:
    return isinstance(node.op, _LEAVES) or (isinstance(node.op, Cast) and _is_part(node))
