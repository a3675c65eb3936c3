# SPDX-License-Identifier: Apache-2.0
"""A bounded reader of the protobuf wire format, driven by a table of ONNX's messages.

`SCHEMA` says which fields exist. `Reader` walks a buffer and hands the fields of each finished
message, as a dict, to a builder of the caller; a message without a builder stays a dict. A field
that is absent from the file is absent from the dict.

- Byte fields are views of the input. Nodes and other messages of up to 4 KiB are copied first,
  because indexing `bytes` is what makes reading tens of thousands of them fast.
- Every length is checked against the range of its parent. Nesting, fields and messages are counted
  and bounded, so time and memory are bounded whatever the bytes say.
- A scalar field that occurs twice keeps the later value. Unknown fields, and known numbers with
  another wire type, are skipped. Groups are refused, and so is a singular message in two pieces.

Source: the protobuf encoding guide; onnx.proto of ONNX 1.23.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from rlx.base.errors import ModelError, ParseError

__all__ = [
    "MAX_DEPTH",
    "MAX_STEPS",
    "SCHEMA",
    "Builder",
    "Data",
    "Field",
    "Kind",
    "Reader",
    "Record",
    "Spec",
    "compile_schema",
    "count_varints",
    "decode_varints",
]

MAX_DEPTH = 64
"""Messages inside messages. A subgraph costs three levels, so about 20 nested subgraphs fit."""
MAX_STEPS = 2_500_000
"""Work on one file: a step per field, plus those of `_MESSAGE_STEPS`. A packed array is one field
whatever its size, a node takes about 20 steps, and all steps together about two seconds."""

_MESSAGE_STEPS = {"GraphProto": 30, "NodeProto": 5, "TensorProto": 10}  # others: 2
_COPY_LIMIT = 4096
_KEEP_VIEW = ("GraphProto", "TensorProto", "SparseTensorProto")  # these hold the weights
_BLOCK = 1 << 20
_DECODE_BLOCK = 1 << 16  # the temporaries of a block take about 40 times as much
_MASK64 = (1 << 64) - 1

Data = bytes | memoryview
Record = dict[str, Any]
Builder = Callable[[Record, Any, int], Any]
"""Makes a value of a finished message: ``(fields, context, byte offset)``."""


class Kind(Enum):
    """How a field is encoded."""

    INT64 = auto()
    INT32 = auto()  # enums too
    FLOAT = auto()
    STRING = auto()  # UTF-8, checked
    BYTES = auto()
    MESSAGE = auto()
    FLOATS = auto()  # repeated, values left encoded: a list of payloads, packed or of one element
    DOUBLES = auto()
    VARINTS = auto()


class Field(NamedTuple):
    """One row of the schema. Setting the field also sets the key ``oneof`` to its name."""

    number: int
    name: str
    kind: Kind
    repeated: bool = False
    message: str = ""
    oneof: str = ""


def _many(number: int, name: str, kind: Kind) -> Field:
    return Field(number, name, kind, repeated=True)


def _one_message(number: int, name: str, message: str, oneof: str = "") -> Field:
    return Field(number, name, Kind.MESSAGE, message=message, oneof=oneof)


def _messages(number: int, name: str, message: str) -> Field:
    return Field(number, name, Kind.MESSAGE, repeated=True, message=message)


# Left out, so skipped: documentation and metadata of anything under the graph, device
# configurations (placement hints), training_info and quantization_annotation (the graph is complete
# without them). GraphProto.value_info stays encoded: only its reader pays for it.
SCHEMA: Mapping[str, tuple[Field, ...]] = {
    "ModelProto": (
        Field(1, "ir_version", Kind.INT64),
        Field(2, "producer_name", Kind.STRING),
        Field(3, "producer_version", Kind.STRING),
        Field(4, "domain", Kind.STRING),
        Field(5, "model_version", Kind.INT64),
        Field(6, "doc_string", Kind.STRING),
        _one_message(7, "graph", "GraphProto"),
        _messages(8, "opset_import", "OperatorSetIdProto"),
        _messages(14, "metadata_props", "StringStringEntryProto"),
        _messages(25, "functions", "FunctionProto"),
    ),
    "OperatorSetIdProto": (Field(1, "domain", Kind.STRING), Field(2, "version", Kind.INT64)),
    "StringStringEntryProto": (Field(1, "key", Kind.STRING), Field(2, "value", Kind.STRING)),
    "GraphProto": (
        _messages(1, "node", "NodeProto"),
        Field(2, "name", Kind.STRING),
        _messages(5, "initializer", "TensorProto"),
        Field(10, "doc_string", Kind.STRING),
        _messages(11, "input", "ValueInfoProto"),
        _messages(12, "output", "ValueInfoProto"),
        _many(13, "value_info", Kind.BYTES),
        _messages(15, "sparse_initializer", "SparseTensorProto"),
        _messages(16, "metadata_props", "StringStringEntryProto"),
    ),
    "NodeProto": (
        _many(1, "input", Kind.STRING),
        _many(2, "output", Kind.STRING),
        Field(3, "name", Kind.STRING),
        Field(4, "op_type", Kind.STRING),
        _messages(5, "attribute", "AttributeProto"),
        Field(7, "domain", Kind.STRING),
        Field(8, "overload", Kind.STRING),
    ),
    "AttributeProto": (
        Field(1, "name", Kind.STRING),
        Field(2, "f", Kind.FLOAT),
        Field(3, "i", Kind.INT64),
        Field(4, "s", Kind.BYTES),
        _one_message(5, "t", "TensorProto"),
        _one_message(6, "g", "GraphProto"),
        _many(7, "floats", Kind.FLOAT),
        _many(8, "ints", Kind.INT64),
        _many(9, "strings", Kind.BYTES),
        _messages(10, "tensors", "TensorProto"),
        _messages(11, "graphs", "GraphProto"),
        _one_message(14, "tp", "TypeProto"),
        _messages(15, "type_protos", "TypeProto"),
        Field(20, "type", Kind.INT32),
        Field(21, "ref_attr_name", Kind.STRING),
        _one_message(22, "sparse_tensor", "SparseTensorProto"),
        _messages(23, "sparse_tensors", "SparseTensorProto"),
    ),
    "TensorProto": (
        _many(1, "dims", Kind.INT64),
        Field(2, "data_type", Kind.INT32),
        _one_message(3, "segment", "Segment"),
        _many(4, "float_data", Kind.FLOATS),
        _many(5, "int32_data", Kind.VARINTS),
        _many(6, "string_data", Kind.BYTES),
        _many(7, "int64_data", Kind.VARINTS),
        Field(8, "name", Kind.STRING),
        Field(9, "raw_data", Kind.BYTES),
        _many(10, "double_data", Kind.DOUBLES),
        _many(11, "uint64_data", Kind.VARINTS),
        _messages(13, "external_data", "StringStringEntryProto"),
        Field(14, "data_location", Kind.INT32),
    ),
    "Segment": (Field(1, "begin", Kind.INT64), Field(2, "end", Kind.INT64)),
    "SparseTensorProto": (
        _one_message(1, "values", "TensorProto"),
        _one_message(2, "indices", "TensorProto"),
        _many(3, "dims", Kind.INT64),
    ),
    "ValueInfoProto": (Field(1, "name", Kind.STRING), _one_message(2, "type", "TypeProto")),
    "TypeProto": (
        _one_message(1, "tensor_type", "TensorType", "value"),
        _one_message(4, "sequence_type", "ElementOf", "value"),
        _one_message(5, "map_type", "MapType", "value"),
        _one_message(7, "opaque_type", "OpaqueType", "value"),
        _one_message(8, "sparse_tensor_type", "TensorType", "value"),
        _one_message(9, "optional_type", "ElementOf", "value"),
    ),
    "TensorType": (
        Field(1, "elem_type", Kind.INT32),
        _one_message(2, "shape", "TensorShapeProto"),
    ),
    "ElementOf": (_one_message(1, "elem_type", "TypeProto"),),
    "MapType": (
        Field(1, "key_type", Kind.INT32),
        _one_message(2, "value_type", "TypeProto"),
    ),
    "OpaqueType": (Field(1, "domain", Kind.STRING), Field(2, "name", Kind.STRING)),
    "TensorShapeProto": (_messages(1, "dim", "Dimension"),),
    "Dimension": (
        Field(1, "dim_value", Kind.INT64, oneof="value"),
        Field(2, "dim_param", Kind.STRING, oneof="value"),
    ),
    "FunctionProto": (
        Field(1, "name", Kind.STRING),
        _many(4, "input", Kind.STRING),
        _many(5, "output", Kind.STRING),
        _many(6, "attribute", Kind.STRING),
        _messages(7, "node", "NodeProto"),
        Field(8, "doc_string", Kind.STRING),
        _messages(9, "opset_import", "OperatorSetIdProto"),
        Field(10, "domain", Kind.STRING),
        _messages(11, "attribute_proto", "AttributeProto"),
        Field(13, "overload", Kind.STRING),
    ),
}

# What to do with a tag (field number and wire type together). The order is used: the common ones,
# handled inline, come first, then the other length-delimited ones, then the other numbers.
(
    _STRING_MANY,
    _STRING,
    _MESSAGE_MANY,
    _MESSAGE,
    _BYTES,
    _BYTES_MANY,
    _PACKED_INTS,
    _PACKED_FLOATS,
    _CHUNK_VARINT,
    _CHUNK_4,
    _CHUNK_8,
    _INT,
    _INT_MANY,
    _FLOAT,
    _FLOAT_MANY,
    _ONE_VARINT,
    _ONE_4,
    _ONE_8,
) = range(18)
_LAST_DELIMITED = _CHUNK_8

_WIRE_VARINT, _WIRE_8, _WIRE_BYTES, _WIRE_4 = 0, 1, 2, 5

_ACTIONS: Mapping[tuple[Kind, bool], tuple[tuple[int, int], ...]] = {
    (Kind.INT64, False): ((_WIRE_VARINT, _INT),),
    (Kind.INT64, True): ((_WIRE_VARINT, _INT_MANY), (_WIRE_BYTES, _PACKED_INTS)),
    (Kind.INT32, False): ((_WIRE_VARINT, _INT),),
    (Kind.FLOAT, False): ((_WIRE_4, _FLOAT),),
    (Kind.FLOAT, True): ((_WIRE_4, _FLOAT_MANY), (_WIRE_BYTES, _PACKED_FLOATS)),
    (Kind.STRING, False): ((_WIRE_BYTES, _STRING),),
    (Kind.STRING, True): ((_WIRE_BYTES, _STRING_MANY),),
    (Kind.BYTES, False): ((_WIRE_BYTES, _BYTES),),
    (Kind.BYTES, True): ((_WIRE_BYTES, _BYTES_MANY),),
    (Kind.MESSAGE, False): ((_WIRE_BYTES, _MESSAGE),),
    (Kind.MESSAGE, True): ((_WIRE_BYTES, _MESSAGE_MANY),),
    (Kind.FLOATS, True): ((_WIRE_4, _ONE_4), (_WIRE_BYTES, _CHUNK_4)),
    (Kind.DOUBLES, True): ((_WIRE_8, _ONE_8), (_WIRE_BYTES, _CHUNK_8)),
    (Kind.VARINTS, True): ((_WIRE_VARINT, _ONE_VARINT), (_WIRE_BYTES, _CHUNK_VARINT)),
}


@dataclass(slots=True, eq=False)
class Spec:
    """A message of the schema, ready for the reader.

    ``table`` maps a tag to (action, field name, message, oneof, bits of an integer). ``keep_view``:
    never copy the message, because its byte fields become views of the input. ``steps``: what it
    takes of the budget, apart from its fields.
    """

    name: str
    build: Builder | None
    keep_view: bool
    steps: int
    table: dict[int, tuple[int, str, Spec | None, str, int]] = field(
        default_factory=dict[int, "tuple[int, str, Spec | None, str, int]"]
    )


def compile_schema(builders: Mapping[str, Builder]) -> Mapping[str, Spec]:
    """Return the lookup tables of `SCHEMA`, with the builder of each message name.

    Raises:
        KeyError: a builder names a message that is not in the schema.
    """
    specs = {
        name: Spec(name, None, name in _KEEP_VIEW, _MESSAGE_STEPS.get(name, 2)) for name in SCHEMA
    }
    for name, build in builders.items():
        specs[name].build = build
    for name, fields in SCHEMA.items():
        for row in fields:
            bits = 32 if row.kind is Kind.INT32 else 64
            for wire, action in _ACTIONS[row.kind, row.repeated]:
                specs[name].table[row.number << 3 | wire] = (
                    action,
                    row.name,
                    specs.get(row.message),
                    row.oneof,
                    bits,
                )
    return specs


def _signed(value: int, bits: int) -> int:
    """The two's complement meaning of the low ``bits`` of a varint."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class Reader:
    r"""Reads one buffer. Counts what it reads, so use a fresh one per file.

    Args:
        specs: from `compile_schema`.
        context: handed to every builder.
        source: the name of the input, for error messages.

    Example:
        >>> Reader(compile_schema({}), None, "x").read("OperatorSetIdProto", b"\x10\x11")
        {'version': 17}
    """

    __slots__ = ("_context", "_source", "_specs", "_steps_left", "_trail")

    def __init__(self, specs: Mapping[str, Spec], context: object, source: str) -> None:
        self._specs = specs
        self._context = context
        self._source = source
        self._steps_left = MAX_STEPS
        self._trail: list[str] = []

    def read(self, message: str, data: Data) -> Any:
        """Return what the builder of ``message`` makes of the whole of ``data``.

        Raises:
            ParseError: the bytes are no such message, or exceed a bound.
        """
        self._trail.clear()
        try:
            return self._message(self._specs[message], data, 0, len(data), 0, MAX_DEPTH)
        except ModelError as error:
            raise type(error)(self._located(str(error))) from error.__cause__
        except (IndexError, struct.error):
            raise ParseError(self._located("the message is cut off")) from None
        except UnicodeDecodeError as error:
            raise ParseError(self._located(f"a text is not UTF-8 ({error.reason})")) from None

    # The common kinds are inline: a call for each of their fields would double the time of a file.
    def _message(  # noqa: PLR0912, PLR0915, C901
        self, spec: Spec, data: Data, pos: int, end: int, origin: int, depth: int
    ) -> Any:
        """Decode ``data[pos:end]``; ``origin`` is the offset of ``data[0]`` in the file."""
        start = pos
        table = spec.table
        record: Record = {}
        name = ""
        steps = 0
        try:
            self._steps_left -= spec.steps
            if depth == 0 or self._steps_left < 0:
                self._refuse_size(depth)
            # The range is what is left of the budget of fields; `else` runs when it is used up.
            for steps in range(self._steps_left + 1):  # noqa: B007
                if pos >= end:
                    break
                name = ""
                tag = data[pos]
                pos += 1
                if tag > 0x7F:
                    tag, pos = _varint(data, pos - 1)
                entry = table.get(tag)
                if entry is None:
                    pos = _skip(tag, data, pos, end)
                    continue
                action, name, sub, oneof, bits = entry
                if action <= _LAST_DELIMITED:
                    size = data[pos]
                    pos += 1
                    if size > 0x7F:
                        size, pos = _varint(data, pos - 1)
                    stop = pos + size
                    if stop > end:
                        _refuse_length(size, end - pos)
                    if action == _STRING_MANY:
                        items = record.get(name)
                        if items is None:
                            record[name] = [str(data[pos:stop], "utf-8")]
                        else:
                            items.append(str(data[pos:stop], "utf-8"))
                    elif action == _STRING:
                        record[name] = str(data[pos:stop], "utf-8")
                    elif sub is None:
                        self._payload(record, name, action, data[pos:stop])
                    else:
                        if size > _COPY_LIMIT or type(data) is bytes or sub.keep_view:
                            value = self._message(sub, data, pos, stop, origin, depth - 1)
                        else:
                            part = bytes(data[pos:stop])
                            value = self._message(sub, part, 0, size, origin + pos, depth - 1)
                        if action == _MESSAGE_MANY:
                            items = record.get(name)
                            if items is None:
                                record[name] = [value]
                            else:
                                items.append(value)
                        elif name in record:
                            raise ParseError("the message occurs twice; pieces are not merged")
                        else:
                            record[name] = value
                    pos = stop
                elif action <= _INT_MANY:
                    value = data[pos]
                    pos += 1
                    if value > 0x7F:
                        value, pos = _varint(data, pos - 1)
                        if value > 0x7FFFFFFF:
                            value = _signed(value, bits)
                    if action == _INT:
                        record[name] = value
                    else:
                        record.setdefault(name, []).append(value)
                else:
                    pos = _number(record, name, action, data, pos)
                if oneof:
                    record[oneof] = name
            else:
                self._refuse_size(depth)
            if pos > end:
                _refuse_length(pos - start, end - start)
            self._steps_left -= steps
            if spec.build is None:
                return record
            return spec.build(record, self._context, origin + start)
        except (ModelError, IndexError, struct.error, UnicodeDecodeError):
            self._note(spec, name, record, origin + pos)
            raise

    def _payload(self, record: Record, name: str, action: int, payload: Data) -> None:
        """Store a length-delimited field that is neither text nor a message."""
        if action == _BYTES:
            record[name] = payload
            return
        items = record.setdefault(name, [])
        if action == _BYTES_MANY:
            # A view takes 200 bytes, so millions of tiny ones would outgrow the file many times.
            items.append(payload if len(payload) > _COPY_LIMIT else bytes(payload))
        elif action == _PACKED_FLOATS:
            self._spend(len(payload) // 4)
            items.extend(struct.unpack(f"<{len(payload) // 4}f", payload))
        elif action == _PACKED_INTS:
            pos = 0
            while pos < len(payload):
                self._spend(1)
                value, pos = _varint(payload, pos)
                items.append(value if value < 1 << 63 else value - (1 << 64))
        else:
            ragged = action != _CHUNK_VARINT and len(payload) % (4 if action == _CHUNK_4 else 8)
            if ragged or (action == _CHUNK_VARINT and len(payload) and payload[-1] > 0x7F):
                raise ParseError(f"the last number of the {len(payload)} bytes is cut off")
            items.append(payload)

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            self._refuse_size(1)

    def _refuse_size(self, depth: int) -> NoReturn:
        if depth == 0:
            raise ParseError(f"messages are nested more than {MAX_DEPTH} deep")
        raise ParseError(
            f"the file has too many parts: reading it takes more than {MAX_STEPS} steps; "
            "store large arrays as raw_data of tensors"
        )

    def _note(self, spec: Spec, name: str, record: Record, at: int) -> None:
        """Remember where an error passed on its way out; the innermost place has the offset."""
        if not self._trail:
            self._trail.append(f"byte {at} of {self._source}")
        label = record.get("name") or next(iter(record.get("output", ())), None)
        label = f" {label[:100]!r}" if isinstance(label, str) else ""
        self._trail.append(f"{spec.name}{label}.{name}" if name else f"{spec.name}{label}")

    def _located(self, problem: str) -> str:
        place, *trail = self._trail or [self._source]
        if len(trail) > 6:
            trail[4:-1] = ["..."]
        return f"{problem} ({place}, in {' of '.join(trail)})" if trail else f"{problem} ({place})"


def _varint(data: Data, pos: int) -> tuple[int, int]:
    """Return the varint at ``pos``, modulo 2^64, and the position after it."""
    value = data[pos]
    pos += 1
    if value < 0x80:
        return value, pos
    value &= 0x7F
    shift = 7
    while shift < 70:
        byte = data[pos]
        pos += 1
        if byte < 0x80:
            return (value | byte << shift) & _MASK64, pos
        value |= (byte & 0x7F) << shift
        shift += 7
    raise ParseError("a number has more than ten bytes")


def _skip(tag: int, data: Data, pos: int, end: int) -> int:
    """Return the position after the value of an unknown field."""
    wire = tag & 7
    if not 0 < tag >> 3 < 1 << 29:
        raise ParseError(f"{tag >> 3} is not a field number")
    if wire == _WIRE_VARINT:
        return _varint(data, pos)[1]
    if wire == _WIRE_BYTES:
        size, pos = _varint(data, pos)
        if size > end - pos:
            _refuse_length(size, end - pos)
        return pos + size
    if wire == _WIRE_8:
        return pos + 8
    if wire == _WIRE_4:
        return pos + 4
    meaning = "a group, which ONNX never uses" if wire in (3, 4) else "unknown"
    raise ParseError(f"wire type {wire} of field {tag >> 3} is {meaning}")


def _refuse_length(size: int, room: int) -> NoReturn:
    raise ParseError(
        f"a length of {size} bytes, but only {max(room, 0)} are left in its message: the file is cut off or damaged"
    )


def _number(record: Record, name: str, action: int, data: Data, pos: int) -> int:
    """Store a float, or one unpacked element of a repeated number; return the position after it."""
    if action <= _FLOAT_MANY:
        value = struct.unpack_from("<f", data, pos)[0]
        if action == _FLOAT:
            record[name] = value
        else:
            record.setdefault(name, []).append(value)
        return pos + 4
    stop = _varint(data, pos)[1] if action == _ONE_VARINT else pos + (4 if action == _ONE_4 else 8)
    chunks = record.setdefault(name, [])
    if not chunks or type(chunks[-1]) is not bytearray:
        chunks.append(bytearray())
    chunks[-1] += data[pos:stop]
    return stop


def count_varints(payload: Data | bytearray) -> int:
    """Return how many varints a packed payload holds."""
    data = np.frombuffer(payload, np.uint8)
    return sum(
        int(np.count_nonzero(data[at : at + _BLOCK] < 0x80)) for at in range(0, len(data), _BLOCK)
    )


def decode_varints(payload: Data | bytearray) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the varints of a packed payload, modulo 2^64, in blocks of bounded size.

    Raises:
        ParseError: a number has more than ten bytes, or the last one is cut off.
    """
    data = np.frombuffer(payload, np.uint8)
    at = 0
    while at < len(data):
        block = data[at : at + _DECODE_BLOCK]
        ends = np.flatnonzero(block < 0x80)
        if not len(ends):
            raise ParseError("a number has more than ten bytes, or the last one is cut off")
        block = block[: ends[-1] + 1]
        at += len(block)
        if len(ends) == len(block):
            yield block.astype(np.uint64)
            continue
        starts = np.concatenate(([0], ends[:-1] + 1))
        lengths = ends - starts + 1
        longest = int(lengths.max())
        if longest > 10:
            raise ParseError("a number has more than ten bytes")
        values = np.zeros(len(ends), np.uint64)
        for place in range(longest):
            here = np.flatnonzero(lengths > place)
            digits = (block[starts[here] + place] & 0x7F).astype(np.uint64)
            values[here] |= digits << np.uint64(7 * place)
        yield values
