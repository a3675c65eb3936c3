# SPDX-License-Identifier: Apache-2.0
"""Names, weights, scopes, functions, control flow, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.errors import (
    ExecutionError,
    ModelError,
    RlxError,
    TypeRuleError,
    UnsupportedOpError,
)
from rlx.frontends.onnx.importer import ImportedModel, import_model
from rlx.frontends.onnx.model import load_model
from rlx.frontends.onnx.support import check_supported
from rlx.ops.evaluate import evaluate

onnx: Any = pytest.importorskip("onnx")
T: Any = onnx.TensorProto
helper: Any = onnx.helper
numpy_helper: Any = onnx.numpy_helper
NODE = helper.make_node


def info(name: str, kind: int = T.FLOAT, shape: Any = ()) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def tensor(name: str, array: Any) -> Any:
    return numpy_helper.from_array(np.asarray(array), name)


def proto(
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[str],
    initializers: list[Any] | None = None,
    **options: Any,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        initializers or [],
    )
    options.setdefault("opset_imports", [helper.make_opsetid("", options.pop("opset", 18))])
    options.setdefault("ir_version", 10)
    return helper.make_model(graph, **options)


def imported(*args: Any, hints: dict[str, int] | None = None, **options: Any) -> ImportedModel:
    return import_model(load_model(proto(*args, **options)), hints=hints)


def run(model: ImportedModel, **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    return evaluate(model.graph, {k: np.asarray(v) for k, v in inputs.items()})


def body(nodes: list[Any], inputs: list[Any], outputs: list[str], **options: Any) -> Any:
    return helper.make_graph(
        nodes,
        "body",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        options.get("initializers", []),
    )


# Weights.


def test_small_tensors_are_constants_and_large_ones_params() -> None:
    model = imported(
        [NODE("Add", ["x", "w"], ["a"]), NODE("Add", ["a", "c"], ["y"])],
        [info("x", shape=[65])],
        ["y"],
        [tensor("w", np.ones(65, np.float32)), tensor("c", np.float32(2))],
    )
    assert list(model.graph.params) == ["w"]
    assert [n.op.name for n in model.graph.block] == ["add", "constant", "add"]
    assert run(model, x=np.zeros(65, np.float32))["y"][0] == 3


def test_integers_are_constants_up_to_the_limit() -> None:
    model = imported(
        [NODE("Gather", ["x", "i"], ["y"]), NODE("Gather", ["x", "j"], ["z"])],
        [info("x", shape=[4])],
        ["y", "z"],
        [tensor("i", np.zeros(8192, np.int64)), tensor("j", np.zeros(8193, np.int64))],
    )
    assert list(model.graph.params) == ["j"]


def test_a_matrix_of_bytes_is_a_weight_and_a_vector_is_not() -> None:
    model = imported(
        [
            NODE("DequantizeLinear", ["w", "s", "z"], ["y"], axis=1),
            NODE("Add", ["x", "y"], ["a"]),
        ],
        [info("x", shape=[2, 65])],
        ["a"],
        [
            tensor("w", np.ones((2, 65), np.int8)),
            tensor("s", np.full(65, 0.5, np.float32)),
            tensor("z", np.zeros(65, np.int8)),
        ],
    )
    assert list(model.graph.params) == ["w", "s"]
    assert run(model, x=np.ones((2, 65), np.float32))["a"].tolist() == [[1.5] * 65] * 2


def test_an_initialiser_that_is_an_input_is_a_param_with_a_default() -> None:
    model = imported(
        [NODE("Mul", ["x", "w"], ["y"])],
        [info("x", shape=[2]), info("w", shape=[2])],
        ["y"],
        [tensor("w", np.array([2, 3], np.float32))],
    )
    assert [v.name for v in model.graph.inputs] == ["x"]
    assert list(model.graph.params) == ["w"]
    assert run(model, x=np.ones(2, np.float32))["y"].tolist() == [2, 3]


def test_a_tensor_used_twice_is_one_constant() -> None:
    model = imported(
        [NODE("Add", ["x", "c"], ["a"]), NODE("Mul", ["a", "c"], ["y"])],
        [info("x", shape=[2])],
        ["y"],
        [tensor("c", np.float32(2))],
    )
    assert [n.op.name for n in model.graph.block].count("constant") == 1


def test_outputs_may_be_inputs_initialisers_and_each_other() -> None:
    model = imported(
        [NODE("Identity", ["x"], ["y"])],
        [info("x", shape=[2])],
        ["x", "y", "w"],
        [tensor("w", np.arange(3, dtype=np.float32))],
    )
    got = run(model, x=np.ones(2, np.float32))
    assert list(got) == ["x", "y", "w"]
    assert got["w"].tolist() == [0, 1, 2]


# What is refused.


def test_everything_unsupported_is_listed_at_once() -> None:
    inner = body([NODE("NonZero", ["v"], ["o"], name="hidden")], [], ["o"])
    nodes = [
        NODE("NonZero", ["v"], ["a"], name="first"),
        NODE("Softmax", ["v"], ["b"], name="odd", temperature=2.0),
        NODE("If", ["c"], ["d"], then_branch=inner, else_branch=inner),
        NODE("Bogus", ["v"], ["e"], name="private", domain="my.ops"),
        NODE("Resize", ["v", "", "s"], ["f"], name="smooth", antialias=1, mode="linear"),
    ]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my.ops", 1)]
    model = proto(
        nodes,
        [info("v", shape=[2]), info("c", T.BOOL), info("s", shape=[1]), info("t", T.STRING)],
        ["a"],
        opset_imports=imports,
    )
    with pytest.raises(UnsupportedOpError) as caught:
        check_supported(load_model(model))
    text = str(caught.value)
    for part in (
        "NonZero node 'first'",
        "NonZero node 'hidden'",
        "attribute 'temperature'",
        "my.ops.Bogus",
        "'antialias' = 1",
        "STRING: input 't'",
    ):
        assert part in text


@pytest.mark.parametrize("opset", [6, 99])
def test_opsets_outside_the_range_are_refused(opset: int) -> None:
    model = proto([NODE("Relu", ["x"], ["y"])], [info("x", shape=[2])], ["y"], opset=opset)
    with pytest.raises(UnsupportedOpError, match=f"version {opset} of the default operator set"):
        check_supported(load_model(model))


def test_dtypes_are_never_converted_silently() -> None:
    with pytest.raises(TypeRuleError, match=r"(?s)'add'.*cast first"):
        imported(
            [NODE("Add", ["x", "z"], ["y"], name="add")],
            [info("x", shape=[2]), info("z", T.INT64, [2])],
            ["y"],
        )


def test_an_output_rlx_cannot_make_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="MaxPool with output 1 in use"):
        imported(
            [NODE("MaxPool", ["x"], ["y", "i"], kernel_shape=[2])],
            [info("x", shape=[1, 1, 4])],
            ["y"],
        )


def test_locations_name_the_node() -> None:
    model = imported([NODE("Relu", ["x"], ["y"])], [info("x", shape=[2])], ["y"])
    (node,) = model.graph.block
    assert node.location.name == "Relu -> y"


# Old forms.


def test_softmax_flattened_until_version_12() -> None:
    args: Any = ([NODE("Softmax", ["x"], ["y"], axis=1)], [info("x", shape=[1, 3, 2, 2])], ["y"])
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2) / 10
    old = run(imported(*args, opset=11), x=x)["y"]
    new = run(imported(*args, opset=13), x=x)["y"]
    np.testing.assert_allclose(old.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(new.sum(axis=1), 1, rtol=1e-6)


def test_clip_and_pad_took_attributes() -> None:
    model = imported(
        [
            NODE("Clip", ["x"], ["a"], min=0.0, max=2.0),
            NODE("Pad", ["a"], ["y"], pads=[1, 0], value=7.0),
        ],
        [info("x", shape=[3])],
        ["y"],
        opset=10,
    )
    got = run(model, x=np.array([-1, 1, 5], np.float32))["y"]
    assert got.tolist() == [7, 0, 1, 2]


def test_upsample_is_an_asymmetric_resize() -> None:
    model = imported(
        [NODE("Upsample", ["x", "s"], ["y"], mode="nearest")],
        [info("x", shape=[1, 1, 1, 2])],
        ["y"],
        [tensor("s", np.array([1, 1, 1, 2], np.float32))],
        opset=9,
    )
    got = run(model, x=np.array([[[[1, 2]]]], np.float32))["y"]
    assert got.reshape(-1).tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("opset", [11, 13])
def test_reduce_axes_as_attribute_or_operand(opset: int) -> None:
    node = (
        NODE("ReduceSum", ["x"], ["y"], axes=[-1], keepdims=0)
        if opset < 13
        else NODE("ReduceSum", ["x", "a"], ["y"], keepdims=0)
    )
    constants = [tensor("a", np.array([-1]))] if opset >= 13 else []
    model = imported([node], [info("x", shape=[2, 3])], ["y"], constants, opset=opset)
    assert run(model, x=np.ones((2, 3), np.float32))["y"].tolist() == [3, 3]


def test_no_axes_may_mean_no_reduction() -> None:
    model = imported(
        [NODE("ReduceSumSquare", ["x", "a"], ["y"], noop_with_empty_axes=1)],
        [info("x", shape=[2])],
        ["y"],
        [tensor("a", np.zeros(0, np.int64))],
    )
    assert run(model, x=np.array([2, 3], np.float32))["y"].tolist() == [4, 9]


# Functions.


def test_functions_are_expanded_with_their_attributes_and_opsets() -> None:
    function = helper.make_function(
        "my.ops",
        "Scaled",
        ["a", "b"],
        ["c"],
        [
            NODE("Constant", [], ["k"]),
            NODE("Mul", ["a", "k"], ["t"]),
            NODE("Clip", ["t", "", "b"], ["c"]),
        ],
        [helper.make_opsetid("", 13)],
        ["factor"],
    )
    reference: Any = onnx.AttributeProto(
        name="value_float", ref_attr_name="factor", type=onnx.AttributeProto.FLOAT
    )
    function.node[0].attribute.append(reference)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my.ops", 1)]
    model = imported(
        [
            NODE("Scaled", ["x", "top"], ["u"], domain="my.ops", factor=2.0),
            NODE("Scaled", ["u"], ["y"], domain="my.ops", factor=10.0),
        ],
        [info("x", shape=[3])],
        ["y"],
        [tensor("top", np.float32(3))],
        opset_imports=imports,
        functions=[function],
    )
    assert run(model, x=np.array([1, 2, 3], np.float32))["y"].tolist() == [20, 30, 30]


# Control flow.


def _branch(op: str, captured: str, constant: float) -> Any:
    return body(
        [NODE(op, [captured, "k"], ["r"])],
        [],
        ["r"],
        initializers=[tensor("k", np.float32(constant))],
    )


def test_if_on_data_runs_one_branch_with_explicit_captures() -> None:
    model = imported(
        [
            NODE("Relu", ["x"], ["h"]),
            NODE(
                "If",
                ["c"],
                ["y"],
                then_branch=_branch("Add", "h", 1),
                else_branch=_branch("Mul", "x", 10),
            ),
        ],
        [info("x", shape=["n"]), info("c", T.BOOL)],
        ["y"],
    )
    (node,) = (n for n in model.graph.block if n.op.name == "if")
    for region in node.regions:
        assert [v.type for v in region.parameters] == [v.type for v in node.operands[1:] if v]
        for inner in region:
            for value in inner.operands:
                owner = value.producer.block if value and value.producer else value and value.block
                assert owner is region
    x = np.array([-1, 2], np.float32)
    assert run(model, x=x, c=True)["y"].tolist() == [1, 3]
    assert run(model, x=x, c=False)["y"].tolist() == [-10, 20]


def test_if_on_an_extent_takes_one_branch_under_a_guard() -> None:
    args: Any = (
        [
            NODE("Shape", ["x"], ["s"]),
            NODE("Gather", ["s", "zero"], ["n"]),
            NODE("Equal", ["n", "one"], ["c"]),
            NODE(
                "If",
                ["c"],
                ["y"],
                then_branch=body([NODE("Squeeze", ["x", "axes"], ["r"])], [], ["r"]),
                else_branch=body([NODE("Identity", ["x"], ["r"])], [], ["r"]),
            ),
        ],
        [info("x", shape=["n", 2])],
        ["y"],
        [tensor("zero", np.int64(0)), tensor("one", np.int64(1)), tensor("axes", np.array([0]))],
    )
    one = imported(*args, hints={"n": 1})
    assert str(one.graph.outputs[0].type) == "f32[2]"
    many = imported(*args, hints={"n": 5})
    assert many.graph.outputs[0] is many.graph.inputs[0]
    assert str(many.graph.facts.guards[0]).startswith("n != 1")


def test_branches_of_different_rank_on_data_are_refused() -> None:
    with pytest.raises(UnsupportedOpError, match=r"then_branch.*else_branch"):
        imported(
            [
                NODE(
                    "If",
                    ["c"],
                    ["y"],
                    then_branch=body([NODE("Squeeze", ["x"], ["r"])], [], ["r"]),
                    else_branch=body([NODE("Identity", ["x"], ["r"])], [], ["r"]),
                )
            ],
            [info("x", shape=[1, 2]), info("c", T.BOOL)],
            ["y"],
        )


def test_nested_branches_capture_through_every_level() -> None:
    nested = _branch("Add", "h", 0.5)
    for _ in range(4):
        nested = body(
            [NODE("If", ["c"], ["r"], then_branch=nested, else_branch=_branch("Sub", "x", 1))],
            [],
            ["r"],
        )
    model = imported(
        [
            NODE("Relu", ["x"], ["h"]),
            NODE("If", ["c"], ["y"], then_branch=nested, else_branch=_branch("Mul", "x", 3)),
        ],
        [info("x", shape=[2]), info("c", T.BOOL)],
        ["y"],
    )
    x = np.array([-1, 2], np.float32)
    assert run(model, x=x, c=True)["y"].tolist() == [0.5, 2.5]
    assert run(model, x=x, c=False)["y"].tolist() == [-3, 6]


def test_a_body_may_define_a_name_again() -> None:
    branch = body([NODE("Neg", ["x"], ["h"]), NODE("Neg", ["h"], ["r"])], [], ["r"])
    model = imported(
        [
            NODE("Relu", ["x"], ["h"]),
            NODE("If", ["c"], ["t"], then_branch=branch, else_branch=branch),
            NODE("Add", ["h", "t"], ["y"]),
        ],
        [info("x", shape=[2]), info("c", T.BOOL)],
        ["y"],
    )
    assert run(model, x=np.array([-1, 2], np.float32), c=True)["y"].tolist() == [-1, 4]


def test_scan_along_another_axis_and_backward() -> None:
    step = body(
        [NODE("Add", ["sum", "slice"], ["next"]), NODE("Mul", ["next", "w"], ["out"])],
        [info("sum", shape=[2]), info("slice", shape=[2])],
        ["next", "out"],
    )
    model = imported(
        [
            NODE(
                "Scan",
                ["init", "x"],
                ["last", "all"],
                body=step,
                num_scan_inputs=1,
                scan_input_axes=[1],
                scan_input_directions=[1],
                scan_output_axes=[1],
            )
        ],
        [info("init", shape=[2]), info("x", shape=[2, "t"]), info("w", shape=[2])],
        ["last", "all"],
    )
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    got = run(model, init=np.zeros(2, np.float32), x=x, w=np.array([1, 10], np.float32))
    assert got["last"].tolist() == [6, 15]
    assert got["all"].tolist() == [[3, 5, 6], [60, 110, 150]]


def test_errors_of_bodies_name_the_inner_node() -> None:
    bad = body([NODE("Add", ["x", "c"], ["r"], name="inner")], [], ["r"])
    with pytest.raises(RlxError, match="'inner'"):
        imported(
            [NODE("If", ["c"], ["y"], then_branch=bad, else_branch=bad)],
            [info("x", shape=[2]), info("c", T.BOOL)],
            ["y"],
        )


def test_a_missing_operand_is_named() -> None:
    with pytest.raises(ModelError, match=r"'lonely'.*input 1 is missing"):
        imported([NODE("Add", ["x"], ["y"], name="lonely")], [info("x", shape=[2])], ["y"])


def _counting_body(condition: str) -> Any:
    """carried + iteration; stacks the sum."""
    return body(
        [
            NODE("Cast", ["i"], ["f"], to=T.FLOAT),
            NODE("Add", ["v", "f"], ["next"]),
            NODE("Identity", ["next"], ["out"]),
            NODE("Less", ["next", "limit"], ["small"]),
            NODE("Identity", [condition], ["again"]),
        ],
        [info("i", T.INT64), info("c", T.BOOL), info("v")],
        ["again", "next", "out"],
    )


def test_a_loop_of_known_length_stacks_its_results() -> None:
    model = imported(
        [NODE("Loop", ["m", "", "x"], ["last", "all"], body=_counting_body("c"))],
        [info("x"), info("limit")],
        ["last", "all"],
        [tensor("m", np.int64(4))],
    )
    got = run(model, x=np.float32(10), limit=np.float32(0))
    assert got["last"] == 16
    assert got["all"].tolist() == [10, 11, 13, 16]


def test_a_loop_that_ends_by_data_cannot_stack() -> None:
    with pytest.raises(UnsupportedOpError, match="number of iterations depends on data"):
        imported(
            [NODE("Loop", ["m", "", "x"], ["last", "all"], body=_counting_body("small"))],
            [info("x"), info("limit")],
            ["last", "all"],
            [tensor("m", np.int64(4))],
        )


def test_a_loop_that_ends_by_data_carries_values() -> None:
    step = body(
        [NODE("Mul", ["v", "two"], ["next"]), NODE("Less", ["next", "limit"], ["again"])],
        [info("i", T.INT64), info("c", T.BOOL), info("v")],
        ["again", "next"],
        initializers=[tensor("two", np.float32(2))],
    )
    model = imported(
        [NODE("Loop", ["", "", "x"], ["last"], body=step)], [info("x"), info("limit")], ["last"]
    )
    assert run(model, x=np.float32(3), limit=np.float32(40))["last"] == 48


def test_a_carried_value_keeps_its_type() -> None:
    step = body(
        [NODE("Concat", ["v", "v"], ["next"], axis=0), NODE("Identity", ["c"], ["again"])],
        [info("i", T.INT64), info("c", T.BOOL), info("v", shape=[None])],
        ["again", "next"],
    )
    with pytest.raises(UnsupportedOpError, match="carried value 0"):
        imported(
            [NODE("Loop", ["m", "", "x"], ["last"], body=step)],
            [info("x", shape=[2])],
            ["last"],
            [tensor("m", np.int64(2))],
        )


def test_a_branch_that_does_not_fit_the_extents_raises_when_it_is_taken() -> None:
    fits = body([NODE("Relu", ["x"], ["r"])], [], ["r"])
    does_not = body([NODE("Add", ["x", "five"], ["r"], name="inner")], [], ["r"])
    model = imported(
        [NODE("If", ["c"], ["y"], name="choice", then_branch=fits, else_branch=does_not)],
        [info("x", shape=[2]), info("five", shape=[5]), info("c", T.BOOL)],
        ["y"],
    )
    x, five = np.array([-1, 2], np.float32), np.zeros(5, np.float32)
    assert run(model, x=x, five=five, c=True)["y"].tolist() == [0, 2]
    with pytest.raises(ExecutionError, match=r"(?s)'choice'.*not valid for these extents.*'inner'"):
        run(model, x=x, five=five, c=False)
