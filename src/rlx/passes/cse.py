# SPDX-License-Identifier: Apache-2.0
"""Common sub-expressions: equal operators over equal operands are computed once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ir.op import Op
from rlx.ir.rewrite import GraphRewriter
from rlx.passes.manager import PassContext

__all__ = ["Cse"]

_Key: TypeAlias = tuple[Op, tuple[Value | None, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Cse:
    """f(x), f(x) -> one f(x), within one block; constants included.

    Exact: operators have no effects. Operators that are not `foldable` (they draw random numbers or
        define an
    extent) and operators with regions stay.
    """

    name = "cse"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Return whether a node was merged into an earlier one."""
        del ctx
        rewriter = GraphRewriter(graph)
        _merge(graph.block, rewriter)
        return rewriter.changed


def _merge(block: Block, rewriter: GraphRewriter) -> None:
    known: dict[_Key, Node] = {}
    for node in block:
        for region in node.regions:
            _merge(region, rewriter)
        if node.regions or not node.op.foldable:
            continue
        first = known.setdefault((node.op, node.operands, tuple(_signs(node.op))), node)
        if first is not node and all(
            a.type == b.type for a, b in zip(first.results, node.results, strict=True)
        ):
            rewriter.replace_node(node, first.results)


def _signs(item: Any) -> Iterator[float]:
    """Yield the signs of float zeros: 0.0 == -0.0, but operators tell them apart."""
    if isinstance(item, float):
        if item == 0.0:
            yield math.copysign(1.0, item)
    elif isinstance(item, tuple):
        for part in cast("tuple[Any, ...]", item):
            yield from _signs(part)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for name in _field_names(type(item)):
            yield from _signs(getattr(item, name))


_NAMES: dict[type[Any], tuple[str, ...]] = {}


def _field_names(cls: type[Any]) -> tuple[str, ...]:
    names = _NAMES.get(cls)
    if names is None:
        names = _NAMES[cls] = tuple(f.name for f in dataclasses.fields(cls))
    return names
