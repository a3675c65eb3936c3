# SPDX-License-Identifier: Apache-2.0
# pyright: basic
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base.errors import ParseError
from rlx.frontends.onnx import wire as subject
from rlx.frontends.onnx.wire import Reader, compile_schema, count_varints, decode_varints

SPECS = compile_schema({})


def read(message, data):
    return Reader(SPECS, None, "x").read(message, data)


def encode(value):
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_later_scalar_wins_and_unknown_fields_are_skipped():
    unknown = b"\xf8\x01\x05" + b"\xf9\x01" + bytes(8) + b"\xfa\x01\x02ab" + b"\xfd\x01" + bytes(4)
    assert read("OperatorSetIdProto", b"\x10\x11" + unknown + b"\x10\x12") == {"version": 18}


def test_known_number_with_other_wire_type_is_skipped():
    assert read("OperatorSetIdProto", b"\x12\x01a\x10\x07") == {"version": 7}


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_int64_two_complement(value):
    assert read("OperatorSetIdProto", b"\x10" + encode(value)) == {"version": value}


def test_int32_takes_the_low_half():
    assert read("TensorProto", b"\x10" + encode(-1)) == {"data_type": -1}
    assert read("TensorProto", b"\x10" + encode((1 << 32) + 7)) == {"data_type": 7}


def test_packed_and_unpacked_numbers_mix():
    data = b"\x40\x01" + b"\x42\x03\x02\x80\x01" + b"\x40" + encode(-3)
    assert read("AttributeProto", data)["ints"] == [1, 2, 128, -3]
    floats = b"\x3d\x00\x00\x80\x3f" + b"\x3a\x04\x00\x00\x00\x40"
    assert read("AttributeProto", floats)["floats"] == [1.0, 2.0]


def test_bulk_chunks_stay_encoded():
    chunks = read("TensorProto", b"\x28\x01\x28\x96\x01\x2a\x02\x05\x06")["int32_data"]
    assert [bytes(chunk) for chunk in chunks] == [b"\x01\x96\x01", b"\x05\x06"]


def test_oneof_remembers_the_last_member():
    assert read("Dimension", b"\x08\x03\x12\x01n")["value"] == "dim_param"
    assert read("Dimension", b"\x12\x01n\x08\x03")["value"] == "dim_value"


def test_payload_is_a_view_of_the_input():
    data = b"\x4a\x04abcd"
    raw = read("TensorProto", memoryview(data))["raw_data"]
    assert isinstance(raw, memoryview)
    assert raw.obj is data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x08", "cut off"),
        (b"\x10", "cut off"),
        (b"\x0a", "cut off"),
        (b"\x0a\x05ab", "a length of 5 bytes, but only 2"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a length of"),
        (b"\x10" + b"\xff" * 11, "more than ten bytes"),
        (b"\xff" * 12, "more than ten bytes"),
        (b"\x13\x14", "a group"),
        (b"\x14", "a group"),
        (b"\x16\x00", "unknown"),
        (b"\x00\x00", "not a field number"),
        (b"\x80\x80\x80\x80\x20\x00", "not a field number"),
        (b"\x0a\x02\xff\xfe", "not UTF-8"),
        (b"\xf9\x01abc", "a length of"),
    ],
)
def test_malformed_bytes(data, reason):
    with pytest.raises(ParseError, match=reason):
        read("OperatorSetIdProto", data)


@pytest.mark.parametrize(
    "data",
    [b"\x22\x03abc", b"\x52\x09abcdefghi", b"\x2a\x01\x80", b"\x3a\x02\x80\x80"],
    ids=["float", "double", "int32", "int64"],
)
def test_packed_array_with_a_ragged_end(data):
    with pytest.raises(ParseError, match="cut off"):
        read("TensorProto", data)


def test_child_may_not_outgrow_its_parent():
    # The type's message claims five bytes: they exist in the file, but not in its parent.
    with pytest.raises(ParseError, match="a length of 5 bytes, but only 1"):
        read("GraphProto", b"\x5a\x03\x12\x05\x0a" + b"\x12\x02ab")


def test_last_number_may_not_run_into_the_parent():
    with pytest.raises(ParseError, match="a length of"):
        read("ModelProto", b"\x42\x02\x10\x80\x01")


def test_message_in_two_pieces_is_refused():
    with pytest.raises(ParseError, match="occurs twice"):
        read("ValueInfoProto", b"\x12\x00\x12\x00")


def test_nesting_is_bounded():
    data = b""
    for _ in range(subject.MAX_DEPTH):
        inner = b"\x0a" + encode(len(data)) + data
        data = b"\x22" + encode(len(inner)) + inner
    with pytest.raises(ParseError, match="nested more than 64"):
        read("TypeProto", data)


@pytest.mark.parametrize(
    ("message", "part"),
    [
        ("ModelProto", b"\x08\x0a"),
        ("ModelProto", b"\xf8\x01\x00"),
        ("GraphProto", b"\x0a\x00"),
        ("AttributeProto", b"\x42\x04\x01\x01\x01\x01"),
        ("AttributeProto", b"\x3a\x08" + bytes(8)),
    ],
    ids=["repeated scalar", "unknown", "messages", "packed ints", "packed floats"],
)
def test_work_is_bounded(monkeypatch, message, part):
    monkeypatch.setattr(subject, "MAX_STEPS", 1000)
    read(message, part * 10)
    with pytest.raises(ParseError, match="more than 1000 steps"):
        read(message, part * 1100)


def test_error_names_place_and_node():
    node = b"\x12\x01y\x1a\x04conv" + b"\x2a\x06" + b"\x0a\x01k\x10\x80\x80"
    with pytest.raises(ParseError, match=r"byte \d+ of x, in AttributeProto 'k'.*NodeProto 'conv'"):
        read("GraphProto", b"\x0a" + encode(len(node)) + node)


@given(st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 300), max_size=50))
def test_varint_arrays(values):
    data = b"".join(map(encode, values))
    assert count_varints(data) == len(values)
    decoded = [int(value) for block in decode_varints(data) for value in block]
    assert decoded == values


def test_varint_array_over_several_blocks():
    values = np.arange(70_000) * 977
    data = b"".join(encode(int(value)) for value in values)
    blocks = list(decode_varints(data))
    assert len(blocks) > 2
    assert np.array_equal(np.concatenate(blocks), values.astype(np.uint64))


@pytest.mark.parametrize("data", [b"\x80" * 10 + b"\x01", b"\x80" * 100_000, b"\x01\x80"])
def test_varint_array_malformed(data):
    with pytest.raises(ParseError, match="ten bytes"):
        list(decode_varints(data))
