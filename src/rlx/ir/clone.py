# SPDX-License-Identifier: Apache-2.0
"""Copying graphs, with symbols replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from rlx.base.dims import Dim, DimExpr, lone_symbol, substitute
from rlx.base.facts import Facts
from rlx.base.types import TensorType
from rlx.ir.graph import Block, Graph, Node, Param, Value
from rlx.ir.op import Op

__all__ = ["bind_dims", "clone_graph"]

T = TypeVar("T")


def bind_dims(attribute: T, env: Mapping[str, Dim]) -> T:
    """Return an operator (or any attribute) with symbols replaced, recursively; shared where nothing changes."""
    return cast("T", _bind(attribute, env))


def _bind(item: Any, env: Mapping[str, Dim]) -> Any:
    if isinstance(item, DimExpr):
        return substitute(item, env)
    if isinstance(item, tuple):
        items = cast("tuple[Any, ...]", item)
        bound = tuple(_bind(i, env) for i in items)
        return bound if any(a is not b for a, b in zip(bound, items, strict=True)) else items
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(item):
            old = getattr(item, field.name)
            new = _bind(old, env)
            if new is not old:
                changed[field.name] = new
        return dataclasses.replace(item, **changed) if changed else item
    return item


def clone_graph(graph: Graph, env: Mapping[str, Dim] | None = None) -> Graph:
    """Return an independent copy (param data is shared), with the symbols in `env` replaced."""
    env = env or {}
    facts = _bound_facts(graph.facts, env)
    copy = Graph(graph.name, output_names=list(graph.output_names), facts=facts)
    values: dict[Value, Value] = {}
    for name, param in graph.params.items():
        values[param.value] = copy.add_param(
            name, param.data, _bound_type(param.value.type, env), param.identity
        )
        copy.params[name] = Param(values[param.value], param.data, param.identity)
    for state in graph.states:
        type_ = _bound_type(state.value.type, env)
        values[state.value] = copy.add_state(state.name, type_, state.init).value
        values[state.value].name = state.value.name
    copy_block(graph.block, copy.block, values, env)  # its results are outputs and next values
    return copy


def _bound_facts(facts: Facts, env: Mapping[str, Dim]) -> Facts:
    return dataclasses.replace(
        facts,
        uppers={n: u for n, u in facts.uppers.items() if n not in env},
        hints=dict(facts.hints),
        guards=[
            dataclasses.replace(g, left=substitute(g.left, env), right=substitute(g.right, env))
            for g in facts.guards
        ],
        equalities={
            name: bound
            for name, dim in facts.equalities.items()
            if name not in env and lone_symbol(bound := substitute(dim, env)) != name
        },
    )


def _bound_type(type_: TensorType, env: Mapping[str, Dim]) -> TensorType:
    return TensorType(type_.dtype, tuple(substitute(d, env) for d in type_.shape)) if env else type_


def copy_block(
    source: Block, target: Block, values: dict[Value, Value], env: Mapping[str, Dim]
) -> None:
    """Copy parameters, nodes and results of a block; `values` maps old to new and is extended."""
    for parameter in source.parameters:
        values[parameter] = target.add_parameter(_bound_type(parameter.type, env), parameter.name)
    for node in source:
        regions: list[Block] = []
        for region in node.regions:
            regions.append(Block())
            copy_block(region, regions[-1], values, env)
        operands = tuple(values[o] if o is not None else None for o in node.operands)
        op: Op = bind_dims(node.op, env) if env else node.op
        types = [_bound_type(r.type, env) for r in node.results]
        copied = Node(op, operands, types, tuple(regions), node.location)
        for old, new in zip(node.results, copied.results, strict=True):
            new.name = old.name
        target.insert(copied)
        values.update(zip(node.results, copied.results, strict=True))
    target.results = [values[r] for r in source.results]
