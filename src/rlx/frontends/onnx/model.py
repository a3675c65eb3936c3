# SPDX-License-Identifier: Apache-2.0
"""Load an ONNX model: bytes to checked records.

`load_model` accepts a path, bytes, a binary stream, or an object with ``SerializeToString`` (such
as ``onnx.ModelProto``). What it returns is structurally sound; whether rlx runs its operators is
the importer's question.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from rlx.base.errors import ModelError, ParseError
from rlx.frontends.checked import SideFiles, window
from rlx.frontends.onnx.graph import (
    AttributeRef,
    AttributeValue,
    Dim,
    Function,
    FunctionKey,
    Graph,
    MapSpec,
    Model,
    Node,
    OpaqueSpec,
    OptionalSpec,
    SequenceSpec,
    SparseSpec,
    TensorSpec,
    TypeSpec,
    ValueInfo,
)
from rlx.frontends.onnx.source import ModelSource, OpenModel, open_model
from rlx.frontends.onnx.structure import check_functions, check_structure
from rlx.frontends.onnx.tensor import (
    ElementType,
    Encoding,
    SparseTensor,
    Tensor,
    make_sparse,
    make_tensor,
)
from rlx.frontends.onnx.wire import Builder, Reader, Record, compile_schema

__all__ = [
    "MAX_IR_VERSION",
    "AttributeRef",
    "AttributeValue",
    "Dim",
    "ElementType",
    "Encoding",
    "Function",
    "FunctionKey",
    "Graph",
    "MapSpec",
    "Model",
    "ModelSource",
    "Node",
    "OpaqueSpec",
    "OptionalSpec",
    "SequenceSpec",
    "SparseSpec",
    "SparseTensor",
    "Tensor",
    "TensorSpec",
    "TypeSpec",
    "ValueInfo",
    "load_model",
]

MAX_IR_VERSION = 14
"""The newest file format this reader was written against (ONNX 1.23)."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_model(
    source: ModelSource | OpenModel, *, folder: str | os.PathLike[str] | None = None
) -> Model:
    """Read and check an ONNX model.

    Weights are not copied: tensors of a model loaded by path are views of the mapped file, which
    must not be changed while they are in use. A mutable buffer is copied once.

    Args:
        source: a path, the bytes of a file, a binary stream (read to its end), a message object, or what `open_model`
            made of one.
        folder: where external data is looked up; by default the folder of the path. A model given
            as bytes has none.

    Returns:
        The model, with every name resolved, every tensor's size checked, and all external files
        mapped.

    Raises:
        UsageError: the path cannot be opened, or the source is of another type.
        ParseError: the bytes are not an ONNX file, or are damaged.
        ModelError: the file breaks a rule of ONNX, or refers to external data it may not have.
    """
    opened = open_model(source, folder)
    data, name = opened.data, opened.name
    context = _Context(SideFiles(opened.home), name)
    hint = _other_format(data)
    if hint:
        raise ParseError(f"{name}: not an ONNX model, it looks like {hint}")
    model: Model = Reader(_SPECS, context, name).read("ModelProto", data)
    check_functions(model.functions, model.graph, name)
    files = {None: data, **context.files.opened()}
    shadowed = check_structure(model)
    return replace(model, shadowed=shadowed, files=files, changed=context.files.changed)


_MAGIC = (
    (b"version https://git-lfs", "a Git LFS pointer; fetch the real file with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"GGUF", "a GGUF file"),
    (b"<!DOCTYPE", "an HTML page, probably a failed download"),
    (b"<html", "an HTML page, probably a failed download"),
    (b"\x93NUMPY", "a NumPy array"),
)

_TEXT = frozenset(map(ord, string.printable)) - {0x0B, 0x0C}
"""Bytes of text; no ONNX file has only such among its first, since it begins with a version."""


def _other_format(data: memoryview) -> str:
    start = bytes(data[:32])
    if not start:
        return "an empty file"
    if start[4:8] == b"ORTM":
        return "an ONNX Runtime .ort file; export to .onnx"
    known = next((meaning for magic, meaning in _MAGIC if start.startswith(magic)), "")
    return known or ("a text file" if _TEXT.issuperset(start) else "")


@dataclass(slots=True)
class _Context:
    """What the builders share for one file."""

    files: SideFiles
    source: str

    def external(self, name: str, entries: Mapping[str, str], nbytes: int) -> memoryview:
        """Return the bytes of a tensor that live in another file."""
        what = f"tensor {name[:100]!r}"
        if "location" not in entries:
            raise ParseError(f"{what}: its external data has no location")
        offset = _number(entries, "offset", what, 0)
        length = _number(entries, "length", what, nbytes)
        if length != nbytes:
            raise ParseError(
                f"{what} needs {nbytes} bytes, but its external data has length {length}"
            )
        return window(self.files.read(entries["location"], what), offset, length, what)

    def value_info(self, encoded: bytes) -> ValueInfo:
        """Decode an entry of GraphProto.value_info."""
        return Reader(_SPECS, self, self.source).read("ValueInfoProto", encoded)


def _number(entries: Mapping[str, str], key: str, what: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    # int() would also take signs, spaces and underscores, and be slow on a long text.
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ParseError(f"{what}: external data {key} is {text[:50]!r}, not a whole number")
    return int(text)


# Builders, innermost messages first. Each takes (fields, context, byte offset).


def _entry(record: Record, context: _Context, at: int) -> tuple[str, str]:
    return record.get("key", ""), record.get("value", "")


def _opset(record: Record, context: _Context, at: int) -> tuple[str, int]:
    return _domain(record.get("domain", "")), record.get("version", 0)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _dimension(record: Record, context: _Context, at: int) -> Dim:
    value = record.get(record.get("value", ""))
    # Exporters write -1 and empty symbols for "unknown".
    if isinstance(value, int):
        return value if value >= 0 else None
    return value or None


def _shape(record: Record, context: _Context, at: int) -> tuple[Dim, ...]:
    return tuple(record.get("dim", ()))


def _tensor_type(record: Record, context: _Context, at: int) -> TensorSpec:
    return TensorSpec(_known_type(record.get("elem_type", 0)), record.get("shape"))


def _known_type(number: int) -> ElementType:
    try:
        return ElementType(number)
    except ValueError:
        raise ModelError(
            f"element type {number} is unknown; the highest known is {max(ElementType)}"
        ) from None


def _element_of(record: Record, context: _Context, at: int) -> TypeSpec | None:
    return record.get("elem_type")


def _map_type(record: Record, context: _Context, at: int) -> MapSpec:
    return MapSpec(_known_type(record.get("key_type", 0)), record.get("value_type"))


def _opaque(record: Record, context: _Context, at: int) -> OpaqueSpec:
    return OpaqueSpec(record.get("domain", ""), record.get("name", ""))


def _type(record: Record, context: _Context, at: int) -> TypeSpec | None:
    which = record.get("value")
    if which is None:
        return None
    value = record[which]
    if which == "sequence_type":
        return SequenceSpec(value)
    if which == "optional_type":
        return OptionalSpec(value)
    if which == "sparse_tensor_type":
        return SparseSpec(value.dtype, value.shape)
    return value


def _value(record: Record, context: _Context, at: int) -> ValueInfo:
    return ValueInfo(record.get("name", ""), record.get("type"))


def _tensor(record: Record, context: _Context, at: int) -> Tensor:
    name = record.get("name", "")
    if "segment" in record:
        raise ParseError(
            f"tensor {name[:100]!r} is one segment of a larger one, which is not supported"
        )
    fields = {
        encoding: pieces
        for encoding in _DATA_FIELDS
        if (pieces := record.get(encoding.value)) and any(map(len, pieces))
    }
    if len(raw := record.get("raw_data", b"")):
        fields[Encoding.RAW] = [raw]
    if "string_data" in record:  # strings may all be empty
        fields[Encoding.STRINGS] = record["string_data"]
    external = None
    location = record.get("data_location", 0)
    if location == 1:
        entries = _distinct(
            record.get("external_data", ()), f"external data of tensor {name[:100]!r}"
        )
        external = partial(context.external, name, entries)
    elif location:
        raise ParseError(f"tensor {name[:100]!r} has the unknown data location {location}")
    return make_tensor(name, record.get("data_type", 0), record.get("dims", ()), fields, external)


_DATA_FIELDS = (
    Encoding.FLOATS,
    Encoding.DOUBLES,
    Encoding.INT32S,
    Encoding.INT64S,
    Encoding.UINT64S,
)


def _distinct(entries: Iterable[tuple[str, str]], what: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for key, value in entries:
        if result.setdefault(key, value) != value:
            raise ParseError(f"{what} has two different values of {key[:100]!r}")
    return result


def _sparse(record: Record, context: _Context, at: int) -> SparseTensor:
    values = record.get("values")
    indices = record.get("indices")
    if values is None or indices is None:
        raise ParseError("a sparse tensor has no values or no indices")
    return make_sparse(values, indices, record.get("dims", ()))


# AttributeProto.type -> the field that holds the value, and the value when the field is absent.
# Writers of proto3 leave out zeros; messages have no such default.
_ATTRIBUTE_FIELDS: Mapping[int, tuple[str, object]] = {
    1: ("f", 0.0),
    2: ("i", 0),
    3: ("s", b""),
    4: ("t", None),
    5: ("g", None),
    6: ("floats", ()),
    7: ("ints", ()),
    8: ("strings", ()),
    9: ("tensors", ()),
    10: ("graphs", ()),
    11: ("sparse_tensor", None),
    12: ("sparse_tensors", ()),
    13: ("tp", None),
    14: ("type_protos", ()),
}
_REPEATED = frozenset(name for name, absent in _ATTRIBUTE_FIELDS.values() if absent == ())
_VALUE_FIELDS = {name: number for number, (name, _) in _ATTRIBUTE_FIELDS.items()}


def _attribute(record: Record, context: _Context, at: int) -> tuple[str, AttributeValue]:
    name = record.get("name", "")
    if not name:
        raise ParseError("an attribute has no name")
    held = [field for field in record if field in _VALUE_FIELDS]
    if record.get("ref_attr_name"):
        if held:
            raise ParseError(f"attribute {name[:100]!r} has both a reference and a value")
        return name, AttributeRef(record["ref_attr_name"])
    number = record.get("type", 0)
    if number == 0 and len(held) == 1:  # files of IR version 1 do not state the type
        number = _VALUE_FIELDS[held[0]]
    if number not in _ATTRIBUTE_FIELDS:
        raise ParseError(f"attribute {name[:100]!r} has the unknown type {number}")
    field, absent = _ATTRIBUTE_FIELDS[number]
    if held and held != [field]:
        raise ParseError(f"attribute {name[:100]!r} must use field {field!r} alone, but has {held}")
    value = record.get(field, absent)
    if value is None:
        raise ParseError(f"attribute {name[:100]!r} has no value in field {field!r}")
    if field == "s":
        return name, _text(value)
    if field == "strings":
        return name, tuple(map(_text, value))
    return name, tuple(value) if field in _REPEATED else value


def _text(value: bytes | memoryview) -> str | bytes:
    data = bytes(value)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _node(record: Record, context: _Context, at: int) -> Node:
    op_type = record.get("op_type", "")
    if not op_type:
        raise ParseError(f"node {record.get('name', '')[:100]!r} has no op_type")
    pairs = record.get("attribute")
    attributes = _NOTHING if pairs is None else dict(pairs)
    if pairs is not None and len(attributes) != len(pairs):
        raise ParseError(f"{op_type} node {record.get('name', '')[:100]!r} has an attribute twice")
    domain = record.get("domain", "")
    return Node(
        op_type,
        "" if domain == "ai.onnx" else domain,
        record.get("name", ""),
        tuple(record.get("input", ())),
        tuple(record.get("output", ())),
        attributes,
        record.get("overload", ""),
    )


def _graph(record: Record, context: _Context, at: int) -> Graph:
    tensors: list[Tensor | SparseTensor] = record.get("initializer", [])
    tensors = [*tensors, *record.get("sparse_initializer", ())]
    initializers = {tensor.name: tensor for tensor in tensors}
    if "" in initializers:
        raise ParseError("an initialiser has no name")
    if len(initializers) != len(tensors):
        seen: set[str] = set()
        twice = next(t.name for t in tensors if t.name in seen or seen.add(t.name))
        raise ModelError(f"the initialiser {twice[:100]!r} is defined twice")
    return Graph(
        record.get("name", ""),
        tuple(record.get("node", ())),
        tuple(record.get("input", ())),
        tuple(record.get("output", ())),
        initializers or _NOTHING,
        record.get("doc_string", ""),
        dict(record["metadata_props"]) if "metadata_props" in record else _NOTHING,
        tuple(record.get("value_info", ())),
        context.value_info,
    )


def _function(record: Record, context: _Context, at: int) -> Function:
    name = record.get("name", "")
    if not name:
        raise ParseError("a function has no name")
    what = f"function {name[:100]!r}"
    pairs: list[tuple[str, AttributeValue]] = record.get("attribute_proto", [])
    return Function(
        FunctionKey(_domain(record.get("domain", "")), name, record.get("overload", "")),
        tuple(record.get("input", ())),
        tuple(record.get("output", ())),
        tuple(record.get("attribute", ())),
        dict(pairs),
        tuple(record.get("node", ())),
        _opsets(record.get("opset_import", ()), what),
        record.get("doc_string", ""),
    )


def _opsets(pairs: Iterable[tuple[str, int]], what: str) -> dict[str, int]:
    result: dict[str, int] = {}
    for domain, version in pairs:
        shown = domain[:100] or "ai.onnx"
        if version < 1:
            raise ModelError(
                f"{what} imports operator set {shown!r} in the impossible version {version}"
            )
        if result.setdefault(domain, version) != version:
            raise ModelError(
                f"{what} imports operator set {shown!r} in two versions, "
                f"{result[domain]} and {version}"
            )
    return result


def _model(record: Record, context: _Context, at: int) -> Model:
    version = record.get("ir_version")
    if version is None:
        raise ParseError("there is no ir_version; this is not an ONNX model")
    if not 1 <= version <= MAX_IR_VERSION:
        raise ModelError(
            f"the IR version is {version}; versions 1 to {MAX_IR_VERSION} are supported, "
            "so export for an older ONNX or update rlx"
        )
    if "graph" not in record:
        raise ParseError("the model has no graph")
    opsets = _opsets(record.get("opset_import", ()), "the model")
    if not opsets:
        if version >= 3:
            raise ModelError("the model has no opset_import, which IR versions from 3 on need")
        opsets[""] = 1
    functions: dict[FunctionKey, Function] = {}
    for function in record.get("functions", ()):
        if functions.setdefault(function.key, function) is not function:
            raise ModelError(f"the function {function.key} is defined twice")
    producer = f"{record.get('producer_name', '')} {record.get('producer_version', '')}".strip()
    return Model(
        version,
        opsets,
        record["graph"],
        functions,
        producer,
        record.get("domain", ""),
        record.get("model_version", 0),
        record.get("doc_string", ""),
        dict(record.get("metadata_props", ())),
        (),
        context.source,
    )


_BUILDERS: Mapping[str, Builder] = {
    "ModelProto": _model,
    "OperatorSetIdProto": _opset,
    "StringStringEntryProto": _entry,
    "GraphProto": _graph,
    "NodeProto": _node,
    "AttributeProto": _attribute,
    "TensorProto": _tensor,
    "SparseTensorProto": _sparse,
    "ValueInfoProto": _value,
    "TypeProto": _type,
    "TensorType": _tensor_type,
    "ElementOf": _element_of,
    "MapType": _map_type,
    "OpaqueType": _opaque,
    "TensorShapeProto": _shape,
    "Dimension": _dimension,
    "FunctionProto": _function,
}
_SPECS = compile_schema(_BUILDERS)
