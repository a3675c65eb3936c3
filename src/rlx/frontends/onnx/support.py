# SPDX-License-Identifier: Apache-2.0
"""Everything about a model that rlx does not run, found before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import rlx.frontends.onnx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]
from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UnsupportedOpError
from rlx.frontends.onnx.graph import (
    AttributeRef,
    Function,
    FunctionKey,
    Graph,
    Model,
    Node,
    TensorSpec,
    ValueInfo,
)
from rlx.frontends.onnx.registry import MAX_OPSET, MIN_OPSET, OpMapping, dtype_of, find, mapped_ops
from rlx.frontends.onnx.tensor import SparseTensor, Tensor

__all__ = ["check_supported"]

_SHOWN_NODES = 5


def check_supported(model: Model) -> None:
    """Check that every operator, attribute, output and dtype of a model is one that rlx runs.

    Bodies of control flow and the functions of the model that are called are looked into.

    Raises:
        UnsupportedOpError: something is not; the message lists all of it, with node names.
    """
    survey = _Survey(model.functions)
    survey.opset(model.opsets, "the model")
    survey.inputs(model.graph.inputs)
    survey.graph(model.graph, model.opsets)
    if survey.found:
        lines = [f"  {what}: {_names(nodes)}" for what, nodes in survey.found.items()]
        raise UnsupportedOpError(
            f"{model.source}: the model uses what rlx does not run (rlx.op adds operators of your own):\n"
            + "\n".join(lines)
        )


def _names(nodes: Sequence[str]) -> str:
    more = len(nodes) - _SHOWN_NODES
    return ", ".join(nodes[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")


class _Survey:
    """A walk over all nodes that collects findings: what -> labels of nodes."""

    def __init__(self, functions: Mapping[FunctionKey, Function]) -> None:
        self.functions = functions
        self.found: dict[str, list[str]] = {}
        self._seen: set[FunctionKey] = set()

    def opset(self, opsets: Mapping[str, int], where: str) -> None:
        """Check the version of the default operator set."""
        version = opsets.get("")
        if version is not None and not MIN_OPSET <= version <= MAX_OPSET:
            fix = "convert it with onnx.version_converter" if version < MIN_OPSET else "update rlx"
            self._note(
                f"version {version} of the default operator set (versions {MIN_OPSET} to "
                f"{MAX_OPSET} are supported; {fix})",
                where,
            )

    def inputs(self, infos: Sequence[ValueInfo]) -> None:
        """Check the types of the model's inputs."""
        for info in infos:
            where = f"input {info.name!r}"
            if info.type is None:
                continue  # the importer asks for it
            if not isinstance(info.type, TensorSpec):
                self._note(
                    f"inputs of kind {type(info.type).__name__.removesuffix('Spec').lower()}", where
                )
            elif dtype_of(info.type.dtype) is None:
                self._note(f"element type {info.type.dtype.name}", where)

    def graph(self, graph: Graph, opsets: Mapping[str, int]) -> None:
        """Check a graph and everything in it."""
        for tensor in graph.initializers.values():
            self._tensor(tensor, f"initialiser {tensor.name!r}")
        for node in graph.nodes:
            self._node(node, opsets)

    def _node(self, node: Node, opsets: Mapping[str, int]) -> None:
        key = FunctionKey(node.domain, node.op_type, node.overload)
        function = self.functions.get(key)
        if function is None:
            self._operator(node, opsets)
        elif key not in self._seen:
            self._seen.add(key)
            self.opset(function.opsets, f"function {key.name!r}")
            for inner in function.nodes:
                self._node(inner, function.opsets)
        for value in node.attributes.values():
            if isinstance(value, Tensor | SparseTensor):
                self._tensor(value, node.label)
        for body in node.subgraphs():
            self.graph(body, opsets)

    def _operator(self, node: Node, opsets: Mapping[str, int]) -> None:
        full = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        version = opsets.get(node.domain)
        if version is None:
            self._note(f"operator {full} of an operator set that is not imported", node.label)
            return
        mapping = find(node.domain, node.op_type, version)
        if mapping is None:
            self._note(f"operator {full}{_hint(node, version)}", node.label)
            return
        for what in _refused(node, mapping):
            self._note(f"{full} with {what}", node.label)

    def _tensor(self, tensor: Tensor | SparseTensor, where: str) -> None:
        if dtype_of(tensor.dtype) is None:
            self._note(f"element type {tensor.dtype.name}", where)

    def _note(self, what: str, where: str) -> None:
        self.found.setdefault(what, []).append(where)


def _refused(node: Node, mapping: OpMapping) -> Iterator[str]:
    for name, value in node.attributes.items():
        if name not in mapping.attributes:
            yield f"attribute {name!r}"
        elif (
            name in mapping.only
            and value not in mapping.only[name]
            and not isinstance(value, AttributeRef)
        ):
            allowed = " or ".join(repr(v) for v in mapping.only[name])
            yield f"attribute {name!r} = {value!r} (only {allowed})"
    for index, name in enumerate(node.outputs):
        if name and index >= mapping.outputs:
            yield f"output {index} in use"


def _hint(node: Node, version: int) -> str:
    rows = mapped_ops().get((node.domain, node.op_type))
    if rows:
        return f" in version {version} (supported from {rows[0].since} on)"
    hint = did_you_mean(
        node.op_type, [name for domain, name in mapped_ops() if domain == node.domain]
    )
    return f" ({hint.strip()})" if hint else ""
