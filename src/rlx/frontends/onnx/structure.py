# SPDX-License-Identifier: Apache-2.0
"""Structural rules of an ONNX model: one definition per name, defined before use, no cycles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import ModelError
from rlx.frontends.onnx.graph import (
    Function,
    FunctionKey,
    Graph,
    Model,
    Node,
    TensorSpec,
    ValueInfo,
)
from rlx.frontends.onnx.tensor import SparseTensor, Tensor

__all__ = ["MAX_INLINED_NODES", "check_functions", "check_structure"]

MAX_INLINED_NODES = 1_000_000
"""Nodes after expanding all function calls, which can double them at each level of a chain."""

_HINT_NAMES = 1000  # comparing a name with every name of a large graph takes seconds


def check_structure(model: Model) -> tuple[tuple[str, str], ...]:
    """Check names and order in the graph and the functions of a model.

    Returns:
        (body name, value name) of names that a body defines again: see `Model.shadowed`.

    Raises:
        ModelError: a name is defined twice or never, a node uses a value made later, nodes form a
            cycle, an initialiser contradicts its input, a node needs a domain that is not imported.
    """
    scope = _Scope(model.source, model.opsets, model.functions)
    scope.graph(model.graph, f"graph {model.graph.name!r}", outermost=True)
    for function in model.functions.values():
        inner = _Scope(model.source, function.opsets, model.functions)
        inner.function(function)
        scope.shadowed.extend(inner.shadowed)
    return tuple(scope.shadowed)


class _Scope:
    """The names that are visible at one point of a walk over nested graphs."""

    def __init__(
        self, source: str, opsets: Mapping[str, int], functions: Mapping[FunctionKey, Function]
    ) -> None:
        self.source = source
        self.opsets = opsets
        self.functions = functions
        self.visible: dict[str, int] = {}  # name -> nesting level of its definition
        self.level = 0
        self.shadowed: list[tuple[str, str]] = []

    def graph(self, graph: Graph, where: str, *, outermost: bool = False) -> None:
        """Check a graph; on return the visible names are those from before."""
        before: dict[str, int] = {}
        self.level += 1
        made: list[str] = []
        self._define_inputs(graph.inputs, where, made, before)
        _check_initializers(graph, where, self.source)
        inputs = {info.name for info in graph.inputs}
        for name in graph.initializers:
            if name not in inputs:
                self._define(name, "an initialiser", where, made, before)
        self._nodes(graph.nodes, where, made, before)
        for info in graph.outputs:
            if info.name not in self.visible:
                known = islice(reversed(self.visible), _HINT_NAMES)
                raise ModelError(
                    f"{self.source}: output {info.name[:200]!r} of {where} is made by no node, "
                    f"input or initialiser.{did_you_mean(info.name[:200], known)}"
                )
        if outermost:
            _check_listed_once(graph, where, self.source)
        self.level -= 1
        if not outermost:
            self.shadowed.extend((graph.name, name) for name in before)
            for name in made:
                del self.visible[name]
            self.visible.update(before)

    def function(self, function: Function) -> None:
        """Check the body of a function, which sees nothing but its inputs."""
        where = f"function {function.key.name!r}"
        self.level += 1
        infos = [ValueInfo(name, None) for name in function.inputs]
        made: list[str] = []
        self._define_inputs(infos, where, made, {})
        self._nodes(function.nodes, where, made, {})
        for name in function.outputs:
            if name not in self.visible:
                raise ModelError(
                    f"{self.source}: output {name[:200]!r} of {where} is made by no node"
                )

    def _define_inputs(
        self, infos: Iterable[ValueInfo], where: str, made: list[str], before: dict[str, int]
    ) -> None:
        for info in infos:
            if not info.name:
                raise ModelError(f"{self.source}: an input of {where} has no name")
            self._define(info.name, "an input", where, made, before)

    def _define(
        self, name: str, what: str, where: str, made: list[str], before: dict[str, int]
    ) -> None:
        level = self.visible.get(name)
        if level is not None:
            if level == self.level:
                raise ModelError(
                    f"{self.source}: the value {name[:200]!r} of {where} is defined twice, "
                    f"the second time by {what}; every name may be defined once"
                )
            before[name] = level
        self.visible[name] = self.level
        made.append(name)

    def _nodes(
        self, nodes: Sequence[Node], where: str, made: list[str], before: dict[str, int]
    ) -> None:
        visible = self.visible
        opsets = self.opsets
        for position, node in enumerate(nodes):
            for name in node.inputs:
                if name not in visible and name:
                    self._refuse_operand(name, nodes, position, where)
            if node.domain not in opsets:
                self._check_domain(node)
            for body in node.subgraphs():
                self.graph(body, f"body {body.name[:200]!r} of {node.label}")
            for name in node.outputs:
                if name in visible:
                    self._define(name, node.label, where, made, before)
                elif name:
                    visible[name] = self.level
                    made.append(name)

    def _check_domain(self, node: Node) -> None:
        # Other domains are the importer's to refuse: it lists all unsupported operators at once.
        if node.domain == "" and FunctionKey("", node.op_type, node.overload) not in self.functions:
            raise ModelError(
                f"{self.source}: {node.label} is of the default operator set, but opset_import has "
                "no version for it"
            )

    def _refuse_operand(self, name: str, nodes: Sequence[Node], position: int, where: str) -> None:
        """Say why an operand is not defined yet: a cycle, a wrong order, or nothing makes it."""
        node = nodes[position]
        makers = {
            made: index for index, other in enumerate(nodes) for made in other.outputs if made
        }
        what = f"{self.source}: input {name[:200]!r} of {node.label} in {where}"
        if name not in makers:
            known = islice(reversed(self.visible), _HINT_NAMES)
            raise ModelError(
                f"{what} is made by no node, input or initialiser.{did_you_mean(name[:200], known)}"
            )
        path = _path(nodes, makers, makers[name], position)
        if path:
            steps = " -> ".join(nodes[index].label for index in path[:8])
            more = f" -> ... ({len(path)} nodes)" if len(path) > 8 else ""
            raise ModelError(f"{what} depends on the node's own result, a cycle: {steps}{more}")
        raise ModelError(
            f"{what} is made later, by {nodes[makers[name]].label}; "
            "nodes must stand in an order in which operands are made before they are used"
        )


def _path(nodes: Sequence[Node], makers: Mapping[str, int], start: int, goal: int) -> list[int]:
    """Return a path of operands from ``goal`` through ``start`` back to ``goal``, or []."""
    came_from = {start: goal}
    stack = [start]
    while stack:
        index = stack.pop()
        if index == goal:
            path = [goal]
            step = came_from[goal]
            while step != goal:
                path.append(step)
                step = came_from[step]
            return [*path, goal]
        for name in _needed(nodes[index]):
            maker = makers.get(name)
            if maker is not None and maker not in came_from:
                came_from[maker] = index
                stack.append(maker)
    return []


def _needed(node: Node) -> Iterator[str]:
    """Yield the operands of a node and everything its bodies mention."""
    yield from node.inputs
    for body in node.subgraphs():
        yield from (info.name for info in body.outputs)
        for inner in body.nodes:
            yield from _needed(inner)


def _check_listed_once(graph: Graph, where: str, source: str) -> None:
    """Callers know outputs by name. Bodies may give a value twice: theirs are known by position."""
    seen: set[str] = set()
    for info in graph.outputs:
        if info.name in seen:
            raise ModelError(
                f"{source}: output {info.name[:200]!r} of {where} is listed twice; "
                "give the second a name of its own, with an Identity node"
            )
        seen.add(info.name)


def _check_initializers(graph: Graph, where: str, source: str) -> None:
    """An initialiser with the name of an input is its default value: the types must agree."""
    if not graph.initializers:
        return
    for info in graph.inputs:
        default = graph.initializers.get(info.name)
        if default is None or not isinstance(info.type, TensorSpec):
            continue
        if not _fits(default, info.type):
            raise ModelError(
                f"{source}: the initialiser of input {info.name[:200]!r} of {where} is "
                f"{default.dtype.name}{list(default.shape)}, but the input is declared "
                f"{info.type.dtype.name}{list(info.type.shape or ())}"
            )


def _fits(default: Tensor | SparseTensor, declared: TensorSpec) -> bool:
    if default.dtype is not declared.dtype:
        return False
    if declared.shape is None:
        return True
    return len(default.shape) == len(declared.shape) and all(
        not isinstance(want, int) or want == have
        for have, want in zip(default.shape, declared.shape, strict=True)
    )


def check_functions(functions: Mapping[FunctionKey, Function], graph: Graph, source: str) -> None:
    """Check that functions do not call themselves and that calls expand to a bounded size.

    Raises:
        ModelError: a function is recursive, or more than `MAX_INLINED_NODES` nodes would result.
    """
    if not functions:
        return
    sizes: dict[FunctionKey, int] = {}
    calls = {key: list(_calls(function.nodes, functions)) for key, function in functions.items()}
    own = {key: len(function.nodes) for key, function in functions.items()}
    active: dict[FunctionKey, Iterator[FunctionKey]] = {}
    for root in functions:
        stack = [] if root in sizes else [root]
        while stack:
            key = stack[-1]
            todo = active.setdefault(key, iter(calls[key]))
            callee = next((found for found in todo if found not in sizes), None)
            if callee is not None and callee in active:
                names = " -> ".join(
                    repr(found.name) for found in [*stack[stack.index(callee) :], callee][:8]
                )
                raise ModelError(f"{source}: functions call each other in a cycle: {names}")
            if callee is not None:
                stack.append(callee)
                continue
            stack.pop()
            del active[key]
            sizes[key] = min(
                own[key] + sum(sizes[found] for found in calls[key]), MAX_INLINED_NODES + 1
            )
    total = len(graph.nodes) + sum(sizes[key] for key in _calls(graph.nodes, functions))
    if total > MAX_INLINED_NODES:
        raise ModelError(
            f"{source}: expanding its function calls gives more than {MAX_INLINED_NODES} nodes"
        )


def _calls(
    nodes: Sequence[Node], functions: Mapping[FunctionKey, Function]
) -> Iterator[FunctionKey]:
    """Yield the function that each node calls, bodies included."""
    for node in nodes:
        key = FunctionKey(node.domain, node.op_type, node.overload)
        if key in functions:
            yield key
        for body in node.subgraphs():
            yield from _calls(body.nodes, functions)
