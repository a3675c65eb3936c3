# SPDX-License-Identifier: Apache-2.0
"""Constant folding by the operators' own reference meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from rlx.base.errors import RlxError, UndecidedError
from rlx.base.numeric import Array
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import Match, Reject, Rule, apply_rules
from rlx.ops.dims import fold as fold_dims
from rlx.ops.evaluate import run_op
from rlx.ops.leaf import Constant, DimTensor, Literal
from rlx.passes.manager import PassContext

__all__ = ["Fold", "fold_rule"]

_MAX_DIMS = 64


@dataclass(frozen=True)
class Fold:
    """f(constants) -> constant, also where the constants are extents.

    Exact: the value is what the reference meaning gives, rounded once to the operator's dtype, as
        at run time. An
    operator that raises for its constants stays and raises when it runs.

    Attributes:
        max_elements: results with more elements stay computed, unless the operands are as large.
    """

    max_elements: int = 1 << 16
    name = "fold"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether something was folded."""
        return apply_rules(
            graph, [fold_rule(self.max_elements)], lambda text: ctx.note(self.name, text)
        )


def fold_rule(max_elements: int = 1 << 16) -> Rule:
    """Return the rule that folds one node; `max_elements` as in `Fold`."""

    def fold(node: Node, builder: Builder) -> Match:
        if node.regions or not node.op.foldable or isinstance(node.op, Constant):
            return None
        leaves = [o.producer.op if o is not None and o.producer else o for o in node.operands]
        if not all(o is None or isinstance(o, Constant | DimTensor) for o in leaves):
            return None
        if any(isinstance(o, DimTensor) for o in leaves):
            return _fold_extents(node, builder)
        if not all(r.type.is_static for r in node.results) or not _is_static(node.op):
            return None
        arrays = [o.data.array if isinstance(o, Constant) else None for o in leaves]
        elements = max([max_elements, *(a.size for a in arrays if a is not None)])
        if sum(cast("int", r.type.elements) for r in node.results) > elements:
            return Reject(f"its result has more than {elements} elements")
        return _fold_numbers(node, arrays, builder)

    return Rule("fold", (), fold)


def _is_static(op: object) -> bool:
    return not isinstance(op, DimTensor) or all(isinstance(d, int) for d in op.dims)


def _fold_numbers(node: Node, arrays: list[Array | None], builder: Builder) -> Match:
    try:
        results = run_op(node.op, arrays)
    except RlxError as error:  # it fails for this data: so it shall when it runs
        return Reject(f"it fails for its constant operands ({error})")
    return [builder.emit_one(Constant(Literal(array))) for array in results]


def _fold_extents(node: Node, builder: Builder) -> Match:
    """Fold an operator over tensors of extents."""
    if not all(
        r.type.is_static and cast("int", r.type.elements) <= _MAX_DIMS for r in node.results
    ):
        return None
    arrays: list[Array | None] = []
    for operand in node.operands:
        known = (
            None if operand is None or operand.producer is None else _extents(operand.producer.op)
        )
        if operand is not None and known is None:
            return None
        arrays.append(known)
    try:
        found = fold_dims(
            node.op, tuple(o.type if o is not None else None for o in node.operands), tuple(arrays)
        )
    except UndecidedError:  # a comparison whose answer depends on the call
        return None
    if found is None or not all(r.type.dtype.is_integer for r in node.results):
        return None
    return [
        builder.emit_one(DimTensor(tuple(array.reshape(-1).tolist()), r.type.shape, r.type.dtype))
        for array, r in zip(found, node.results, strict=True)
    ]


def _extents(op: object) -> Array | None:
    """Return the extents a small integer leaf stands for as an array of objects, else None."""
    if isinstance(op, DimTensor):
        out = np.empty(len(op.dims), object)
        out[:] = op.dims
        return out.reshape(tuple(cast("tuple[int, ...]", op.shape)))
    if (
        isinstance(op, Constant)
        and op.data.array.dtype.kind in "iu"
        and op.data.array.size <= _MAX_DIMS
    ):
        return op.data.array.astype(object)
    return None
