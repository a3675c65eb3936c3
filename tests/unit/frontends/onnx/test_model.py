# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""What `load_model` returns is what the `onnx` package reads from the same bytes."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as node_cases

from rlx.base.errors import ModelError, ParseError, UsageError
from rlx.frontends.onnx.model import (
    AttributeRef,
    ElementType,
    FunctionKey,
    Graph,
    MapSpec,
    OptionalSpec,
    SequenceSpec,
    SparseSpec,
    SparseTensor,
    Tensor,
    TensorSpec,
    ValueInfo,
    load_model,
)

F32 = TensorSpec(ElementType.FLOAT, (2, "n", None))


def dims_of(shape):
    def one(dim):
        value = getattr(dim, dim.WhichOneof("value") or "", None)
        return None if value == "" or (isinstance(value, int) and value < 0) else value

    return tuple(map(one, shape.dim))


def type_of(proto):
    kind = proto.WhichOneof("value")
    if kind is None:
        return None
    held = getattr(proto, kind)
    if kind in ("tensor_type", "sparse_tensor_type"):
        spec = TensorSpec if kind == "tensor_type" else SparseSpec
        shape = dims_of(held.shape) if held.HasField("shape") else None
        return spec(ElementType(held.elem_type), shape)
    if kind == "map_type":
        return MapSpec(ElementType(held.key_type), type_of(held.value_type))
    return {"sequence_type": SequenceSpec, "optional_type": OptionalSpec}[kind](
        type_of(held.elem_type)
    )


def assert_tensor(ours, proto):
    assert ours.name == proto.name
    expected = numpy_helper.to_array(proto)
    actual = ours.array()
    assert actual.shape == expected.shape
    if expected.dtype == object or proto.data_type == TensorProto.STRING:
        assert actual.tolist() == expected.tolist()
    else:
        assert actual.dtype == expected.dtype
        assert actual.tobytes() == expected.tobytes()


def as_onnx(value):
    """What `onnx.helper.get_attribute_value` gives for a plain value or a type."""
    if isinstance(value, str):
        return value.encode()
    return value


def assert_value(ours, expected):
    """One value of an attribute, or one element of a list."""
    if isinstance(ours, Tensor):
        assert_tensor(ours, expected)
    elif isinstance(ours, Graph):
        assert_graph(ours, expected)
    elif isinstance(ours, SparseTensor):
        assert_tensor(ours.values, expected.values)
        assert_tensor(ours.indices, expected.indices)
        assert ours.shape == tuple(expected.dims)
    elif isinstance(ours, (int, float, bytes, str)):
        assert type(as_onnx(ours)) is type(expected)
        assert np.array_equal(as_onnx(ours), expected, equal_nan=isinstance(ours, float))
    else:
        assert ours == type_of(expected)


def assert_attribute(ours, proto):
    if proto.ref_attr_name:
        assert ours == AttributeRef(proto.ref_attr_name)
        return
    expected = helper.get_attribute_value(proto)
    if isinstance(ours, tuple):
        for one, other in zip(ours, expected, strict=True):
            assert_value(one, other)
    else:
        assert_value(ours, expected)


def assert_node(ours, proto):
    assert ours.op_type == proto.op_type
    assert ours.domain == ("" if proto.domain == "ai.onnx" else proto.domain)
    assert (ours.name, ours.overload) == (proto.name, proto.overload)
    assert (ours.inputs, ours.outputs) == (tuple(proto.input), tuple(proto.output))
    assert list(ours.attributes) == [attribute.name for attribute in proto.attribute]
    for attribute in proto.attribute:
        assert_attribute(ours.attributes[attribute.name], attribute)


def assert_graph(ours, proto):
    assert (ours.name, ours.doc) == (proto.name, proto.doc_string)
    for infos, protos in [(ours.inputs, proto.input), (ours.outputs, proto.output)]:
        assert infos == tuple(ValueInfo(info.name, type_of(info.type)) for info in protos)
    assert ours.value_info() == {info.name: type_of(info.type) for info in proto.value_info}
    assert list(ours.initializers) == [t.name for t in proto.initializer]
    for tensor in proto.initializer:
        assert_tensor(ours.initializers[tensor.name], tensor)
    for node, expected in zip(ours.nodes, proto.node, strict=True):
        assert_node(node, expected)


def assert_model(data, proto):
    ours = load_model(data)
    assert (ours.ir_version, ours.version) == (proto.ir_version, proto.model_version)
    assert ours.opsets == {
        "" if i.domain == "ai.onnx" else i.domain: i.version for i in proto.opset_import
    }
    assert ours.metadata == {entry.key: entry.value for entry in proto.metadata_props}
    assert_graph(ours.graph, proto.graph)
    for function in proto.functions:
        mine = ours.functions[FunctionKey(function.domain, function.name, function.overload)]
        assert (mine.inputs, mine.outputs) == (tuple(function.input), tuple(function.output))
        assert mine.attributes == tuple(function.attribute)
        assert list(mine.defaults) == [a.name for a in function.attribute_proto]
        assert mine.opsets == {i.domain: i.version for i in function.opset_import}
        for node, expected in zip(mine.nodes, function.node, strict=True):
            assert_node(node, expected)
    return ours


SHIPPED = sorted(Path(onnx.__file__).parent.glob("backend/test/data/*/*/model.onnx"))


def test_shipped_models():
    assert len(SHIPPED) > 100
    for path in SHIPPED:
        assert_model(path, onnx.load(path))


@pytest.mark.slow
def test_node_cases():
    with warnings.catch_warnings():  # the cases compute expected values, and warn of overflows
        warnings.simplefilter("ignore")
        cases = node_cases.collect_testcases(None)
    assert len(cases) > 1500
    for case in cases:
        assert case.model is not None
        assert_model(case.model.SerializeToString(), case.model)


def rich_model() -> onnx.ModelProto:
    """Every kind of attribute and type, a body, functions, metadata."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, "n", None])
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "t")
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([1, 2], np.float32)),
        numpy_helper.from_array(np.array([0, 3], np.int64)),
        [5],
    )
    node = helper.make_node(
        "Everything", ["x", "", "w"], ["y", "", "z"], name="all", domain="test", overload="o",
        f=0.1, i=-7, s="text", b=b"\xff\xfe", t=tensor, floats=[1.5, -2.0], ints=[1, -1, 1 << 40],
        strings=["a", "ü"], tensors=[tensor, tensor], sparse=sparse, tp=x.type,
        tps=[x.type, x.type],
    )  # fmt: skip
    node.attribute.append(helper.make_attribute("none", [], attr_type=onnx.AttributeProto.INTS))
    body = helper.make_graph(
        [helper.make_node("Add", ["x", "k"], ["r"])], "body", [],
        [helper.make_tensor_value_info("r", 1, None)],
        [numpy_helper.from_array(np.array(3, np.float32), "k")],
    )  # fmt: skip
    chosen = helper.make_node("If", ["c"], ["v"], name="if", then_branch=body, else_branch=body)
    call = helper.make_node("Twice", ["x"], ["q"], domain="local", alpha=2.0)
    inner = helper.make_node("Elu", ["a"], ["b"])
    reference = onnx.AttributeProto(
        name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT
    )
    inner.attribute.append(reference)
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [inner], [helper.make_opsetid("", 17)], ["alpha"],
        [helper.make_attribute("beta", 1)],
    )  # fmt: skip
    float_type = helper.make_tensor_type_proto(1, ["m", 4])
    inputs = [
        x,
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_value_info("seq", helper.make_sequence_type_proto(float_type)),
        helper.make_value_info("opt", helper.make_optional_type_proto(float_type)),
        helper.make_value_info("map", helper.make_map_type_proto(TensorProto.INT64, float_type)),
        helper.make_sparse_tensor_value_info("sp", TensorProto.DOUBLE, [3, 4]),
        helper.make_tensor_value_info("rankless", TensorProto.FLOAT, None),
        onnx.ValueInfoProto(name="untyped"),
    ]
    weight = numpy_helper.from_array(np.ones((2, 2), np.float16), "w")
    graph = helper.make_graph(
        [node, chosen, call], "main", inputs,
        [onnx.ValueInfoProto(name=n) for n in "yzvq"], [weight],
        "documented", value_info=[helper.make_tensor_value_info("q", 1, [2, "n", None])],
    )  # fmt: skip
    domains = [("", 17), ("test", 1), ("local", 1)]
    model = helper.make_model(
        graph, functions=[function], opset_imports=[helper.make_opsetid(*pair) for pair in domains]
    )
    helper.set_model_props(model, {"author": "me", "note": "ü"})
    return model


def test_every_kind_of_content():
    proto = rich_model()
    model = assert_model(proto.SerializeToString(), proto)
    everything = model.graph.nodes[0]
    assert everything.attributes["none"] == ()
    assert everything.attributes["b"] == b"\xff\xfe"
    assert everything.label == "test.Everything node 'all'"
    assert model.graph.inputs[0] == ValueInfo("x", F32)
    body = model.graph.nodes[1].attributes["then_branch"]
    assert isinstance(body, Graph)
    assert next(iter(model.graph.nodes[1].subgraphs())).nodes[0].inputs == ("x", "k")
    function = model.functions[FunctionKey("local", "Twice", "")]
    assert function.nodes[0].attributes == {"alpha": AttributeRef("alpha")}


def test_all_sources_give_the_same(tmp_path):
    proto = rich_model()
    data = proto.SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with path.open("rb") as stream:
        for source in [
            data, bytearray(data), memoryview(data), memoryview(bytearray(data)), str(path), path,
            proto, stream, io.BytesIO(data),
        ]:  # fmt: skip
            assert_graph(load_model(source).graph, proto.graph)


def test_mutable_buffer_is_copied():
    data = bytearray(rich_model().SerializeToString())
    tensor = load_model(data).graph.initializers["w"]
    before = tensor.array().tolist()
    data[:] = bytes(len(data))
    assert tensor.array().tolist() == before


def test_sources_of_the_wrong_kind(tmp_path):
    number: Any = 3
    text: Any = io.StringIO("x")
    with pytest.raises(UsageError, match="not from int"):
        load_model(number)
    with pytest.raises(UsageError, match="binary mode"):
        load_model(text)
    with pytest.raises(UsageError, match="cannot open"):
        load_model(tmp_path / "absent.onnx")
    with pytest.raises(UsageError, match="not a regular file"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("data", "meaning"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"PK\x03\x04rest", "zip"),
        (b"\x1f\x8brest", "gzip"),
        (b"GGUF\x03", "GGUF"),
        (b"\x00\x00\x00\x00ORTM", "export to .onnx"),
    ],
)
def test_other_formats_are_named(data, meaning):
    with pytest.raises(ParseError, match=meaning):
        load_model(data)


def test_model_level_rules(wire):
    fine = wire.input("x") + wire.output("x")
    opset = wire.text(8, wire.number(2, 17))
    assert load_model(wire.model(fine, extra=opset)).opsets == {"": 17}  # twice the same is legal
    named = wire.text(8, wire.text(1, "ai.onnx") + wire.number(2, 17))
    assert load_model(wire.model(fine, extra=named)).opsets == {"": 17}
    for data, reason in [
        (wire.model(fine, ir=0), "IR version is 0"),
        (wire.model(fine, ir=-1), "IR version is -1"),
        (wire.model(fine, ir=1 << 40), "IR version"),
        (wire.text(7, fine) + opset, "no ir_version"),
        (wire.number(1, 10) + opset, "no graph"),
        (wire.number(1, 10) + wire.text(7, fine), "no opset_import"),
        (wire.model(fine, extra=wire.text(8, wire.number(2, 18))), "two versions, 17 and 18"),
        (wire.model(fine, extra=wire.text(8, wire.number(2, 0))), "impossible version 0"),
    ]:
        with pytest.raises(ModelError, match=reason):
            load_model(data)
    assert load_model(wire.number(1, 2) + wire.text(7, fine)).opsets == {"": 1}


def test_value_info_is_checked_when_asked_for(wire):
    graph = load_model(wire.model(wire.text(13, b"\x0a\x05x"))).graph
    with pytest.raises(ParseError, match="ValueInfoProto"):
        graph.value_info()


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        (b"\xa0\x01\x02", "no name"),
        (b"\x0a\x01a", "unknown type 0"),
        (b"\x0a\x01a\xa0\x01\x63", "unknown type 99"),
        (b"\x0a\x01a\xa0\x01\x02\x15\x00\x00\x00\x00", "must use field 'i'"),
        (b"\x0a\x01a\xa0\x01\x04", "no value in field 't'"),
        (b"\x0a\x01a\xa0\x01\x05", "no value in field 'g'"),
        (b"\x0a\x01a\xa0\x01\x02\x18\x01\xaa\x01\x01r", "both a reference and a value"),
    ],
)
def test_malformed_attribute(wire, attribute, reason):
    node = wire.node("Op", [], ["y"], wire.text(5, attribute))
    with pytest.raises(ParseError, match=reason) as caught:
        load_model(wire.model(node, wire.output("y")))
    assert "n_y" in str(caught.value)


def test_attribute_zero_left_out_and_type_left_out(wire):
    node = wire.node(
        "Op", [], ["y"], wire.text(5, b"\x0a\x01a\xa0\x01\x02") + wire.text(5, b"\x0a\x01b\x18\x05")
    )
    loaded = load_model(wire.model(node, wire.output("y"))).graph.nodes[0]
    assert loaded.attributes == {"a": 0, "b": 5}


def test_attribute_twice(wire):
    node = wire.node("Op", [], ["y"], wire.text(5, b"\x0a\x01a\x18\x05") * 2)
    with pytest.raises(ParseError, match="attribute twice"):
        load_model(wire.model(node, wire.output("y")))


def test_import_brings_no_protobuf():
    code = "import sys, rlx.frontends.onnx.model as m"
    code += "; print('onnx' in sys.modules, 'google.protobuf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
