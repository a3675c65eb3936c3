# SPDX-License-Identifier: Apache-2.0
"""What an ONNX file says, as plain immutable records. Names are those of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rlx.frontends.onnx.tensor import ElementType, SparseTensor, Tensor

__all__ = [
    "AttributeRef",
    "AttributeValue",
    "Dim",
    "Function",
    "FunctionKey",
    "Graph",
    "MapSpec",
    "Model",
    "Node",
    "OpaqueSpec",
    "OptionalSpec",
    "SequenceSpec",
    "SparseSpec",
    "TensorSpec",
    "TypeSpec",
    "ValueInfo",
]

Dim = int | str | None
"""An extent: a number >= 0, a symbol, or unknown (also written -1 or '' in files)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The type of a tensor. ``shape`` is None when even the rank is unknown."""

    dtype: ElementType
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """The type of a sparse tensor."""

    dtype: ElementType
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """The type of a sequence; ``element`` is None when the file does not say it."""

    element: TypeSpec | None


@dataclass(frozen=True, slots=True)
class OptionalSpec:
    """The type of an optional value."""

    element: TypeSpec | None


@dataclass(frozen=True, slots=True)
class MapSpec:
    """The type of a map from integers or strings."""

    key: ElementType
    value: TypeSpec | None


@dataclass(frozen=True, slots=True)
class OpaqueSpec:
    """A type that only its own domain understands."""

    domain: str
    name: str


TypeSpec = TensorSpec | SparseSpec | SequenceSpec | OptionalSpec | MapSpec | OpaqueSpec


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """A named input or output; ``type`` is None when the file does not say it."""

    name: str
    type: TypeSpec | None


@dataclass(frozen=True, slots=True)
class AttributeRef:
    """In a function body: the value of the attribute ``name`` of the calling node."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One application of an operator.

    Attributes:
        op_type: name of the operator.
        domain: its operator set; ``""`` for the default one (``ai.onnx`` in files means the same).
        name: for messages; often unique, may be empty.
        inputs: value names; ``""`` is an optional operand left out.
        outputs: value names; ``""`` is an output nobody wants.
        attributes: by name.
        overload: selects among functions of one name.
    """

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, AttributeValue]
    overload: str

    @property
    def label(self) -> str:
        """The operator and the node's name, or its first output when it has no name."""
        kind = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        if self.name:
            return f"{kind} node {self.name[:200]!r}"
        made = next((name for name in self.outputs if name), "")
        return f"{kind} node that makes {made[:200]!r}"

    def subgraphs(self) -> Iterator[Graph]:
        """Yield the graphs among the attributes, in their order."""
        for value in self.attributes.values():
            if isinstance(value, Graph):
                yield value
            elif isinstance(value, tuple) and value and isinstance(value[0], Graph):
                yield from (item for item in value if isinstance(item, Graph))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A graph, or the body of a control-flow node.

    Attributes:
        name: may be empty.
        nodes: in an order in which every operand is made before it is used.
        inputs: including those with a default value in ``initializers``.
        outputs: names of values of this graph (in a body, also of enclosing graphs).
        initializers: constants by name.
        doc: documentation.
        metadata: key to value.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    initializers: Mapping[str, Tensor | SparseTensor]
    doc: str
    metadata: Mapping[str, str]
    _encoded_info: tuple[bytes, ...]
    _decode_info: Callable[[bytes], ValueInfo]

    def value_info(self) -> dict[str, TypeSpec | None]:
        """Return the types that the file claims for inner values, decoded on each call.

        Nothing checks these claims, and exporters get them wrong: take them as hints.

        Raises:
            ModelError: an entry is malformed.
        """
        decoded = map(self._decode_info, self._encoded_info)
        return {info.name: info.type for info in decoded}


AttributeValue = (
    int
    | float
    | str
    | bytes
    | Tensor
    | Graph
    | SparseTensor
    | TypeSpec
    | tuple[int, ...]
    | tuple[float, ...]
    | tuple[str | bytes, ...]
    | tuple[Tensor, ...]
    | tuple[Graph, ...]
    | tuple[SparseTensor, ...]
    | tuple[TypeSpec, ...]
    | AttributeRef
)
"""A STRING is `str` when it is valid UTF-8, else `bytes`. INT is `int`, FLOAT `float`."""


class FunctionKey(NamedTuple):
    """What a node names to call a function of the model."""

    domain: str
    name: str
    overload: str


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """An operator that the model defines by a list of nodes.

    Attributes:
        key: domain, name and overload.
        inputs: parameter names; a call may give fewer operands.
        outputs: result names.
        attributes: names of attributes that a call may give.
        defaults: attributes with a default value, by name.
        nodes: the body, ordered as in a graph.
        opsets: the body's own operator sets, domain to version.
        doc: documentation.
    """

    key: FunctionKey
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    defaults: Mapping[str, AttributeValue]
    nodes: tuple[Node, ...]
    opsets: Mapping[str, int]
    doc: str


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A whole, structurally valid ONNX file.

    Attributes:
        ir_version: version of the file format.
        opsets: operator set versions by domain; ``""`` is the default domain.
        graph: the main graph.
        functions: by key.
        producer: name and version of the program that wrote the file.
        domain: reverse-DNS name the model belongs to.
        version: the model's own version number.
        doc: documentation.
        metadata: key to value.
        shadowed: (body name, value name) where a body defines a name of an enclosing graph again.
            ONNX forbids it, exporters do it; the inner meaning holds inside the body.
        source: where the bytes came from, for messages.
        files: every file that was mapped: None for the model itself, the location for external data.
        changed: whether external data was replaced since.
    """

    ir_version: int
    opsets: Mapping[str, int]
    graph: Graph
    functions: Mapping[FunctionKey, Function]
    producer: str
    domain: str
    version: int
    doc: str
    metadata: Mapping[str, str]
    shadowed: tuple[tuple[str, str], ...]
    source: str
    files: Mapping[str | None, memoryview] = field(default_factory=dict[str | None, memoryview])
    changed: Callable[[], bool] = bool
