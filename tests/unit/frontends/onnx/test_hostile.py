# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Files that no exporter writes: whatever the bytes, the answer is a `ModelError`."""

from __future__ import annotations

import functools
import os
import tracemalloc

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from rlx.base.errors import ModelError, ParseError
from rlx.frontends.onnx import model as subject
from rlx.frontends.onnx import structure
from rlx.frontends.onnx import wire as wire_module
from rlx.frontends.onnx.model import Tensor, load_model

# --- names and order -----------------------------------------------------------------------------


def body(wire, *content: bytes, name: str = "body", attribute: str = "then_branch") -> bytes:
    """An attribute of kind GRAPH."""
    graph = b"".join(content) + wire.text(2, name)
    return wire.text(5, wire.text(1, attribute) + wire.number(20, 5) + wire.text(6, graph))


def refuse(data, *reasons):
    with pytest.raises(ModelError) as caught:
        load_model(data)
    for reason in reasons:
        assert reason in str(caught.value)


def test_cycles(wire):
    two = wire.node("A", ["b"], ["a"]) + wire.node("B", ["a"], ["b"]) + wire.output("a")
    refuse(wire.model(two), "a cycle", "'n_a'", "'n_b'")
    refuse(wire.model(wire.node("A", ["a"], ["a"]) + wire.output("a")), "a cycle", "'n_a'")


def test_cycle_through_a_body(wire):
    inner = body(wire, wire.node("Neg", ["later"], ["r"]), wire.output("r"))
    graph = wire.input("c") + wire.node("If", ["c", "later"], ["y"], inner)
    graph += wire.node("Neg", ["y"], ["later"]) + wire.output("y")
    refuse(wire.model(graph), "a cycle", "'n_later'", "'n_y'")


def test_long_cycle_is_reported_shortly(wire):
    nodes = [wire.node("A", [f"v{i + 1}"], [f"v{i}"]) for i in range(5000)]
    nodes.append(wire.node("A", ["v0"], ["v5000"]))
    with pytest.raises(ModelError, match=r"5001 nodes|5002 nodes") as caught:
        load_model(wire.model(*nodes))
    assert len(str(caught.value)) < 2000


def test_wrong_order_is_not_called_a_cycle(wire):
    graph = wire.node("B", ["a"], ["b"]) + wire.node("A", [], ["a"]) + wire.output("b")
    refuse(wire.model(graph), "made later", "'n_a'")


def test_missing_values(wire):
    graph = wire.input("image") + wire.node("A", ["imag"], ["y"])
    refuse(wire.model(graph), "'imag'", "'n_y'", "Did you mean 'image'?")
    refuse(wire.model(wire.output("nothing")), "output 'nothing'")
    inside = body(wire, wire.output("nothing"))
    refuse(wire.model(wire.node("If", [], ["y"], inside)), "output 'nothing'", "'n_y'")


def test_empty_names_are_absent_operands(wire):
    graph = wire.input("x") + wire.node("Clip", ["x", "", ""], ["y", ""]) + wire.output("y")
    assert load_model(wire.model(graph)).graph.nodes[0].inputs == ("x", "", "")


@pytest.mark.parametrize("second", ["input", "initialiser", "node", "same node", "sparse"])
def test_two_definitions(wire, second):
    first = wire.input("x")
    scalar = functools.partial(wire.tensor, dtype=2, dims=[], data=wire.text(9, b"a"))
    if second == "input":
        refuse(wire.model(first, wire.input("x")), "'x'", "defined twice")
    elif second == "initialiser":
        refuse(wire.model(scalar("w"), scalar("w")), "'w'", "defined twice")
    elif second == "node":
        refuse(wire.model(first, wire.node("A", [], ["x"])), "'x'", "defined twice", "'n_x'")
    elif second == "same node":
        refuse(wire.model(wire.node("A", [], ["y", "y"])), "'y'", "defined twice")
    else:
        refuse(wire.model(scalar("w"), wire.node("A", [], ["w"])), "'w'", "defined twice")


def test_nameless(wire):
    refuse(wire.model(wire.text(11, b"")), "an input of graph", "no name")
    refuse(wire.model(wire.tensor("", 2, [0], b"")), "no name")
    refuse(wire.model(wire.text(1, wire.text(3, "odd"))), "'odd'", "no op_type")


def test_a_body_may_shadow_and_the_outer_meaning_returns(wire):
    inner = body(
        wire, wire.node("Neg", ["x"], ["x2"]), wire.node("Abs", ["x2"], ["y"]), wire.output("y")
    )
    graph = wire.input("x") + wire.node("A", ["x"], ["y"]) + wire.node("If", ["x"], ["z"], inner)
    graph += wire.node("B", ["y"], ["w"]) + wire.output("w")
    assert load_model(wire.model(graph)).shadowed == (("body", "y"),)
    # What the body defines is not visible after it.
    leaked = graph + wire.node("C", ["x2"], ["v"])
    refuse(wire.model(leaked), "'x2'", "'n_v'")


def test_default_domain_has_to_be_imported(wire):
    graph = wire.input("x") + wire.node("Neg", ["x"], ["y"]) + wire.output("y")
    opset = wire.text(8, wire.text(1, "other") + wire.number(2, 1))
    refuse(wire.number(1, 10) + opset + wire.text(7, graph), "default operator set", "'n_y'")


@pytest.mark.parametrize(
    ("declared", "fits"),
    [
        ((1, [2]), True),
        ((1, ["n"]), True),
        ((1, None), True),
        ((1, [3]), False),
        ((1, [2, 1]), False),
        ((7, [2]), False),
    ],
)
def test_initializer_of_an_input(declared, fits):
    info = helper.make_tensor_value_info("x", *declared)
    tensor = numpy_helper.from_array(np.zeros(2, np.float32), "x")
    graph = helper.make_graph([], "g", [info], [info], [tensor])
    model = helper.make_model(graph, ir_version=10)
    if fits:
        load_model(model)
    else:
        refuse(model, "'x'", "FLOAT[2]", "declared")


# --- nesting and expansion -----------------------------------------------------------------------


def nested(wire, levels):
    graph = wire.output("x")
    for level in range(levels):
        graph = wire.node("If", ["x"], [f"v{level}"], body(wire, graph)) + wire.output(f"v{level}")
    return wire.model(wire.input("x") + graph)


def test_nested_bodies(wire):
    load_model(nested(wire, 18))
    refuse(nested(wire, 30), "nested more than 64")
    refuse(nested(wire, 2000), "nested more than 64")


def function(wire, name, *calls):
    nodes = [
        wire.text(
            7,
            wire.text(1, "x") + wire.text(2, f"v{i}") + wire.text(4, call) + wire.text(7, "local"),
        )
        for i, call in enumerate(calls)
    ]
    content = wire.text(1, name) + wire.text(4, "x") + wire.text(10, "local") + b"".join(nodes)
    return wire.text(25, content + wire.text(9, wire.number(2, 17)))


def test_functions_that_call_themselves(wire):
    refuse(wire.model(extra=function(wire, "f", "f")), "cycle", "'f' -> 'f'")
    mutual = function(wire, "f", "g") + function(wire, "g", "h") + function(wire, "h", "g")
    refuse(wire.model(extra=mutual), "cycle", "'g' -> 'h' -> 'g'")


def test_functions_that_multiply(wire):
    chain = b"".join(function(wire, f"f{i}", *[f"f{i + 1}"] * 10) for i in range(40))
    call = wire.text(
        1, wire.text(1, "x") + wire.text(2, "y") + wire.text(4, "f0") + wire.text(7, "local")
    )
    data = wire.model(wire.input("x") + call, extra=chain)
    refuse(data, str(structure.MAX_INLINED_NODES))


def test_deep_chain_of_functions_is_fine(wire):
    chain = b"".join(function(wire, f"f{i}", f"f{i + 1}") for i in range(3000))
    assert len(load_model(wire.model(extra=chain)).functions) == 3000


def test_function_bodies_are_checked(wire):
    node = wire.text(7, wire.text(1, "absent") + wire.text(2, "y") + wire.text(4, "f"))
    content = wire.text(1, "f") + wire.text(10, "local") + node + wire.text(9, wire.number(2, 17))
    refuse(wire.model(extra=wire.text(25, content)), "'absent'", "function 'f'")
    refuse(wire.model(extra=function(wire, "f") * 2), "defined twice")


# --- external data -------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    """A folder with a weight file, and a secret beside the folder."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    values = np.arange(8, dtype=np.float32)
    (folder / "w.bin").write_bytes(values.tobytes())
    (folder / "sub" / "w.bin").write_bytes(values.tobytes())
    (tmp_path / "secret").write_bytes(bytes(64))
    return folder


def load_in(folder, data):
    path = folder / "m.onnx"
    path.write_bytes(data)
    return load_model(path).graph.initializers["w"].array()


def test_external_data(place, external):
    assert load_in(place, external(location="w.bin", length="16")).tolist() == [0, 1, 2, 3]
    assert load_in(place, external(location="w.bin", offset="16")).tolist() == [4, 5, 6, 7]
    assert load_in(place, external(location="./sub/w.bin", offset="4")).tolist() == [1, 2, 3, 4]


def test_external_data_is_mapped_once_and_not_copied(place, wire):
    def tensor(name, location, offset):
        entries = [("location", location), ("offset", offset)]
        pairs = [wire.text(13, wire.text(1, k) + wire.text(2, v)) for k, v in entries]
        return wire.tensor(name, 1, [4], wire.number(14, 1) + b"".join(pairs))

    data = wire.model(tensor("a", "w.bin", "0"), tensor("b", "./w.bin", "16"))
    (place / "m.onnx").write_bytes(data)
    tensors = load_model(place / "m.onnx").graph.initializers
    views = [tensor.payload for tensor in tensors.values() if isinstance(tensor, Tensor)]
    first, second = (view for view in views if isinstance(view, memoryview))
    assert first.obj is second.obj
    assert np.shares_memory(tensors["a"].array(), np.frombuffer(first, np.uint8))


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "sub/../../secret",
        "sub\\..\\..\\secret",
        "..",
        "/etc/passwd",
        "\\\\server\\share",
        "C:/secret",
        "C:secret",
        "",
        "w.bin\0",
    ],
)
def test_external_location_outside_the_folder(place, external, location):
    with pytest.raises(ModelError, match="refused") as caught:
        load_in(place, external(location=location))
    assert "'w'" in str(caught.value)


def test_external_symlinks(place, external):
    (place / "inside").symlink_to("w.bin")
    assert load_in(place, external(location="inside")).tolist() == [0, 1, 2, 3]
    (place / "outside").symlink_to("../secret")
    (place / "up").symlink_to("..")
    (place / "loop").symlink_to("loop")
    for location in ["outside", "up/secret"]:
        with pytest.raises(ModelError, match="leads out of"):
            load_in(place, external(location=location))
    with pytest.raises(ModelError, match="cannot be opened"):
        load_in(place, external(location="loop"))


def test_external_file_of_another_kind(place, external):
    os.mkfifo(place / "pipe")
    for location in ["pipe", "sub"]:
        with pytest.raises(ModelError, match="not a regular file"):
            load_in(place, external(location=location))
    for location in ["absent", "w.bin/x", "x" * 5000]:
        with pytest.raises(ModelError, match="cannot be opened"):
            load_in(place, external(location=location))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"offset": "20"}, "truncated"),
        ({"offset": "9223372036854775807"}, "truncated"),
        ({"offset": "99999999999999999999"}, "not a whole number"),
        ({"offset": "-4"}, "not a whole number"),
        ({"offset": "1_0"}, "not a whole number"),
        ({"offset": "٣"}, "not a whole number"),
        ({"offset": "9" * 100_000}, "not a whole number"),
        ({"length": ""}, "not a whole number"),
        ({"length": "15"}, "needs 16 bytes, but its external data has length 15"),
        ({"length": "17"}, "needs 16 bytes"),
    ],
)
def test_external_ranges(place, external, entries, reason):
    with pytest.raises(ModelError, match=reason):
        load_in(place, external(location="w.bin", **entries))


def test_external_entries(place, external, wire):
    with pytest.raises(ParseError, match="no location"):
        load_in(place, external(offset="0"))
    twice = [
        wire.text(13, wire.text(1, "location") + wire.text(2, v)) for v in ("w.bin", "sub/w.bin")
    ]
    data = wire.model(wire.tensor("w", 1, [4], wire.number(14, 1) + b"".join(twice)))
    with pytest.raises(ParseError, match="two different values"):
        load_in(place, data)
    with pytest.raises(ParseError, match="unknown data location 7"):
        load_model(wire.model(wire.tensor("w", 1, [4], wire.number(14, 7))))


def test_external_data_of_a_model_in_memory(place, external):
    data = external(location="w.bin")
    with pytest.raises(ModelError, match="pass folder="):
        load_model(data)
    assert load_model(data, folder=place).graph.initializers["w"].array().tolist() == [0, 1, 2, 3]


# --- size and time -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        lambda wire: wire.node("A", [], ["y"]) * 5_000,
        lambda wire: wire.text(1, wire.text(4, "A")) * 100_000,
        lambda wire: wire.text(1, wire.text(4, "A") + wire.text(1, "ab") * 200_000),
        lambda wire: wire.text(13, b"abc") * 200_000,
        lambda wire: wire.tensor("w", 1, [0], b"") * 50_000,
        lambda wire: wire.tensor("w", 6, [5], b"\x28\x05" * 200_000),
        lambda wire: wire.tensor("w", 6, [5], wire.text(5, b"\x05" * 30_000_000)),
        lambda wire: wire.tensor("w", 1, [1 << 40], wire.text(9, b"abcd")),
    ],
    ids=["name", "nodes", "operands", "value_info", "tensors", "unpacked", "packed", "claim"],
)
def test_memory_stays_bounded(monkeypatch, wire, content):
    # Memory follows the steps taken: a twentieth of them may take a twentieth of 200 MB.
    monkeypatch.setattr(wire_module, "MAX_STEPS", wire_module.MAX_STEPS // 20)
    data = wire.model(content(wire))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            load_model(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20


def seeds() -> list[bytes]:
    """Small models with bodies, functions, typed and raw tensors, strings and many attributes."""
    branch = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["r"])],
        "b",
        [],
        [helper.make_tensor_value_info("r", 1, ["n"])],
    )
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        helper.make_node("Conv", ["y", "w"], ["z"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Cast", ["z"], ["q"], to=10, name="cast"),
    ]
    tensors = [
        helper.make_tensor("w", 7, [3], [1, -1, 1 << 40]),
        onnx.TensorProto(name="s", data_type=8, dims=[2], string_data=[b"a", b"bc"]),
        numpy_helper.from_array(np.arange(4, dtype=np.float16), "h"),
    ]
    infos = [
        helper.make_tensor_value_info("x", 1, [2, "n"]),
        helper.make_tensor_value_info("c", 9, []),
    ]
    graph = helper.make_graph(
        nodes, "g", infos, [helper.make_tensor_value_info("q", 10, None)], tensors
    )
    inner = helper.make_node("Relu", ["a"], ["b"])
    local = helper.make_function("l", "F", ["a"], ["b"], [inner], [helper.make_opsetid("", 17)])
    whole = helper.make_model(graph, functions=[local], ir_version=10)
    small = helper.make_model(helper.make_graph(nodes[2:], "g", infos[:1], [], []), ir_version=8)
    small.graph.node[0].input[0] = "x"
    return [whole.SerializeToString(), small.SerializeToString()]


SEEDS = seeds()


@st.composite
def mutated(draw) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "byte", "insert", "delete", "cut", "copy"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and at < len(data):
            data[at] = draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF, 0x0A, 0x12]))
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=12))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 20))]
        elif kind == "cut":
            del data[at:]
        else:
            size = draw(st.integers(1, 40))
            data[at:at] = data[at : at + size]
    return bytes(data)


def read_everything(graph):
    """Decode all that a loaded graph leaves for later."""
    graph.value_info()
    for tensor in graph.initializers.values():
        if tensor.nbytes < 1 << 20:
            tensor.array()
    for node in graph.nodes:
        for inner in node.subgraphs():
            read_everything(inner)


def only_model_errors(data: bytes) -> None:
    try:
        read_everything(load_model(data).graph)
    except ModelError as error:
        assert len(str(error)) < 5000  # noqa: PT017


def test_seeds_load():
    for data in SEEDS:
        read_everything(load_model(data).graph)
        onnx.load_model_from_string(data)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_mutations_raise_only_model_errors(data):
    only_model_errors(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_model_errors(data):
    only_model_errors(data)


def test_every_truncation_raises_only_model_errors():
    for data in SEEDS:
        for size in range(len(data)):
            only_model_errors(data[:size])


def test_every_builder_has_a_message():
    assert set(subject._BUILDERS) <= set(subject._SPECS)
