# SPDX-License-Identifier: Apache-2.0
"""Intermediate values of compiled runs: the right array, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array
from rlx.ir.parse import parse_graph
from rlx.ops.evaluate import evaluate

_F32 = np.float32


def executable(text: str, device: str = "cpu", **options: Any) -> rlx.Executable:
    graph = rlx.Graph()
    graph.ir = parse_graph(text)
    return rlx.compile(graph, device, **options)


def numbers(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(_F32)


# Softmax over rows keeps the three products apart: each is stored.
_STORED = """graph {
  input %x: f32[N,6]
  input %w: f32[6,6]
  %a = matmul(%x, %w) @ "first"
  %r = reshape(%a) {shape=(<6*N>,)}
  %s = slice(%r) {starts=(6,), sizes=(<6*N - 6>,), steps=(1,)}
  %v, %i = top_k(%a) {k=3, axis=1} @ "best"
  %b = matmul(%a, %w)
  return %b as "y", %v as "values", %s as "tail", %i as "places"
}"""


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_what_the_program_stores(rows: int) -> None:
    x, w = numbers(rows, 6), numbers(6, 6)
    inputs = {"x": x, "w": w}
    run = executable(_STORED, dims={"N": 8})
    plain = run.run(inputs)
    names = ("a", "first", "r", "s", "v", "best", "i", "b", "y", "places", "tail", "x")
    found = run.tap(names, inputs)
    np.testing.assert_allclose(found["a"], x @ w, rtol=1e-5, atol=1e-6)
    assert found["a"].dtype == _F32
    np.testing.assert_array_equal(found["first"], found["a"])
    np.testing.assert_array_equal(found["r"], found["a"].reshape(-1))
    np.testing.assert_array_equal(found["s"], found["r"][6:])
    np.testing.assert_array_equal(found["v"], np.sort(found["a"], 1)[:, :-4:-1])
    np.testing.assert_array_equal(found["best"], found["v"])
    np.testing.assert_array_equal(found["i"], np.argsort(found["a"], 1)[:, :-4:-1])
    np.testing.assert_array_equal(found["x"], x)
    for value, output in (("b", "y"), ("y", "y"), ("tail", "tail"), ("places", "places")):
        np.testing.assert_array_equal(found[value], plain[output])
    np.testing.assert_array_equal(run.tap("a", inputs), found["a"])
    np.testing.assert_array_equal(run.run(inputs)["y"], plain["y"])  # the program is as it was


def test_a_tap_is_a_copy() -> None:
    run = executable(_STORED, dims={"N": 2})
    first = run.tap("a", {"x": numbers(2, 6), "w": numbers(6, 6)})
    kept = first.copy()
    run.run({"x": 2 * numbers(2, 6), "w": numbers(6, 6)})
    np.testing.assert_array_equal(first, kept)


_IN_PLACE = """graph {
  input %x: f32[64,64]
  %a = matmul(%x, %x)
  %b = softmax(%a) {axis=1}
  %c = matmul(%b, %x)
  return %c as "y"
}"""


def test_a_value_that_is_overwritten_in_place_is_read_before() -> None:
    x = numbers(64, 64)
    found = executable(_IN_PLACE, threads=2).tap(["a", "b"], {"x": x})
    want: dict[str, Array] = {}
    evaluate(
        parse_graph(_IN_PLACE),
        {"x": x},
        observe=lambda node, arrays: want.update({node.result.name: arrays[0]}),
    )
    for name in ("a", "b"):
        np.testing.assert_allclose(found[name], want[name], rtol=1e-4, atol=1e-4)


_SCAN = """graph {
  input %start: f32[4,4]
  input %xs: f32[5,4,4]
  %last, %all = scan(%start, %xs) {carried=1, scan_inputs=1, trip=5} {
    region(%u: f32[4,4], %x: f32[4,4]) {
      %t = matmul(%u, %x) @ "product"
      return %t, %x
    }
  }
  return %last as "last", %all as "all"
}"""


def test_in_a_loop_the_last_iteration_counts() -> None:
    inputs = {"start": np.eye(4, dtype=_F32), "xs": numbers(5, 4, 4)}
    run = executable(_SCAN)
    found = run.tap(["t", "product", "last", "all"], inputs)
    np.testing.assert_array_equal(found["t"], run.run(inputs)["last"])
    np.testing.assert_array_equal(found["product"], found["t"])
    np.testing.assert_array_equal(found["last"], found["t"])
    np.testing.assert_array_equal(found["all"], inputs["xs"])


_IF = """graph {
  input %c: bool[]
  input %x: f32[4,4]
  %y = if(%c, %x) {
    region(%a: f32[4,4]) {
      %p = matmul(%a, %a)
      %q = matmul(%p, %a)
      return %q
    }
    region(%b: f32[4,4]) {
      %r = matmul(%b, %b)
      %s = matmul(%r, %r)
      return %s
    }
  }
  return %y as "y"
}"""


def test_values_of_the_branch_that_was_taken_and_of_the_other() -> None:
    run = executable(_IF)
    x = numbers(4, 4)
    yes, no = {"c": np.array(True), "x": x}, {"c": np.array(False), "x": x}
    np.testing.assert_allclose(run.tap("p", yes), x @ x, rtol=1e-5)
    np.testing.assert_allclose(run.tap("r", no), x @ x, rtol=1e-5)
    np.testing.assert_array_equal(run.tap("y", yes), run.run(yes)["y"])
    np.testing.assert_array_equal(run.tap("y", no), run.run(no)["y"])
    with pytest.raises(rlx.UsageError, match=r"'p' was not computed.*branch"):
        run.tap("p", no)
    np.testing.assert_array_equal(run.tap("r", no), run.tap("r", no))


_FUSED = """graph {
  input %x: f32[N,8]
  input %w: f32[8,8]
  param %bias: f32[8] = dense<f32[8]: 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0>
  %five = constant() {data=literal dense<f32[]: 5.0>}
  %ten = add(%five, %five) @ "sum of constants"
  %a = matmul(%x, %w) @ "product"
  %b = add(%a, %bias) @ "/layer/add"
  %c = tanh(%b) @ "/layer/tanh"
  %d = mul(%c, %ten) @ "scale"
  %e = exp(%x) @ "1st"
  %again = exp(%x) @ "2nd"
  return %d as "y", %again as "z", %e as "e"
}"""


@pytest.mark.parametrize("name", ["b", "/layer/add", "c", "/layer/tanh", "a", "product"])
def test_what_was_fused_away_is_refused_with_the_kernel_that_does_it(name: str) -> None:
    run = executable(_FUSED, dims={"N": 4})
    inputs = {"x": numbers(3, 8), "w": numbers(8, 8)}
    with pytest.raises(rlx.UsageError) as error:
        run.tap(name, inputs)
    text = str(error.value)
    assert f"value {name!r} of graph is not stored" in text
    assert "kernel rlx_" in text
    assert all(repr(n) in text for n in ("product", "/layer/add", "/layer/tanh", "scale"))
    assert f"expose({name!r})" in text
    exposed = run.expose(name, "product")
    got = exposed.run(inputs)
    np.testing.assert_array_equal(exposed.tap("product", inputs), got["product"])
    product = inputs["x"] @ inputs["w"]
    shifted = product + np.arange(1, 9, dtype=_F32)
    want = {"a": product, "product": product, "b": shifted, "/layer/add": shifted}
    np.testing.assert_allclose(got[name], want.get(name, np.tanh(shifted)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["product"], product, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["y"], run.run(inputs)["y"])


def test_what_the_passes_compute_and_what_there_never_was() -> None:
    run = executable(_FUSED, dims={"N": 4})
    inputs = {"x": numbers(3, 8), "w": numbers(8, 8)}
    np.testing.assert_array_equal(run.tap("sum of constants", inputs), _F32(10))
    np.testing.assert_array_equal(run.tap("w", inputs), inputs["w"])
    with pytest.raises(rlx.UsageError, match=r"'again' .*folded or rewrote node '2nd'.*expose"):
        run.tap("again", inputs)
    np.testing.assert_array_equal(run.expose("again").run(inputs)["again"], run.run(inputs)["z"])
    with pytest.raises(
        rlx.UsageError, match=r"no value or node '/layer/adds'. Close.*'/layer/add'"
    ):
        run.tap("/layer/adds", inputs)
    with pytest.raises(rlx.UsageError, match=r"no value or node '/layer/adds'.*'/layer/add'"):
        run.expose("/layer/adds")
    assert run.run(inputs)["y"].shape == (3, 8)


def test_names_of_an_onnx_model_are_those_of_its_tensors_and_nodes() -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["hidden"], name="/in/MatMul"),
        helper.make_node("Softmax", ["hidden"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "w"], ["y"], name="/out/MatMul"),
    ]
    types = [helper.make_tensor_value_info(n, 1, ["batch", 9]) for n in ("x", "y")]
    weight = onnx.numpy_helper.from_array(numbers(9, 9), "w")
    graph = helper.make_graph(nodes, "g", types[:1], types[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = numbers(3, 9)
    for _ in range(2):  # compiled, and from the cache
        run = rlx.load(model.SerializeToString())
        found = run.tap(["hidden", "/in/MatMul", "weights", "Softmax -> weights", "y"], {"x": x})
        np.testing.assert_allclose(found["hidden"], x @ numbers(9, 9), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found["/in/MatMul"], found["hidden"])
        np.testing.assert_array_equal(found["Softmax -> weights"], found["weights"])
        np.testing.assert_array_equal(found["y"], run.run({"x": x})["y"])
        run.set_param("w", 2 * numbers(9, 9))
        got = run.expose("hidden").run({"x": x})
        np.testing.assert_allclose(got["hidden"], 2 * found["hidden"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got["y"], run.run({"x": x})["y"])


def test_a_node_stands_for_its_result_and_not_for_a_small_tensor_that_it_reads() -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    types = [helper.make_tensor_value_info(n, 1, ["N", c, "L"]) for n, c in (("x", 2), ("y", 3))]
    weights = {"w": numbers(3, 2, 1), "b": numbers(3), "m": np.zeros(3, np.float32)}
    weights["v"] = np.ones(3, np.float32)
    weights |= {"low": np.array(-0.5, np.float32), "high": np.array(0.5, np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        helper.make_node("BatchNormalization", ["c", "v", "b", "m", "v"], ["n"], name="norm"),
        helper.make_node("Clip", ["n", "low", "high"], ["k"], name="clip"),
        helper.make_node("Constant", [], ["two"], name="number", value_float=2.0),
        helper.make_node("Mul", ["k", "two"], ["y"], name="twice"),
    ]
    tensors = [onnx.numpy_helper.from_array(v, n) for n, v in weights.items()]
    graph = helper.make_graph(nodes, "g", types[:1], types[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    run = rlx.load(model.SerializeToString())
    x = numbers(2, 2, 5)
    by_node = run.expose("conv", "norm", "clip", "number", "twice").run([x])
    by_tensor = run.expose("c", "n", "k", "two").run([x])
    for node, tensor in (("conv", "c"), ("norm", "n"), ("clip", "k"), ("number", "two")):
        np.testing.assert_array_equal(by_node[node], by_tensor[tensor])
    np.testing.assert_array_equal(by_node["twice"], by_node["y"])
    assert by_node["number"] == 2
    expected = numbers(3, 2, 1)[:, :, 0] @ x[0, :, 0] + numbers(3)
    np.testing.assert_allclose(by_tensor["c"][0, :, 0], expected, rtol=1e-6)


def test_small_tensors_that_two_branches_call_by_one_name_have_none() -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    types = {n: helper.make_tensor_value_info(n, 1, [2]) for n in ("x", "y", "t", "e")}

    def branch(output: str, value: float) -> Any:
        small = onnx.numpy_helper.from_array(np.full(2, value, np.float32), "k")
        node = helper.make_node("Add", ["x", "k"], [output])
        return helper.make_graph([node], output, [], [types[output]], [small])

    condition = helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("t", 1), else_branch=branch("e", 2)
    )
    graph = helper.make_graph([node], "g", [condition, types["x"]], [types["y"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    run = rlx.load(model.SerializeToString())
    inputs = [np.array(False), np.zeros(2, np.float32)]
    np.testing.assert_array_equal(run.run(inputs)["y"], [2, 2])
    with pytest.raises(rlx.UsageError, match="no value or node 'k'"):
        run.tap("k", inputs)


def test_small_tensors_of_an_onnx_model_and_states_have_names() -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    types = [helper.make_tensor_value_info(n, 1, [3]) for n in ("x", "y")]
    small = onnx.numpy_helper.from_array(np.arange(1, 4, dtype=np.float32), "small")
    node = helper.make_node("Mul", ["x", "small"], ["y"])
    graph = helper.make_graph([node], "g", types[:1], types[1:], [small])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    run = rlx.load(model.SerializeToString())
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(run.tap("small", [x]), [1, 2, 3])
    np.testing.assert_array_equal(run.expose("small").run([x])["small"], [1, 2, 3])
    again = onnx.numpy_helper.from_array(np.arange(1, 4, dtype=np.float32), "again")
    both = [node, helper.make_node("Add", ["y", "again"], ["z"])]
    types.append(helper.make_tensor_value_info("z", 1, [3]))
    graph = helper.make_graph(both, "g", types[:1], types[2:], [small, again])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(rlx.UsageError, match=r"is a constant, which was folded or is one with"):
        rlx.load(model.SerializeToString()).tap(["small", "again"], [x])
    with rlx.Graph("count") as g:
        total = g.state("total", [3])
        after = total + g.input("x", [3])
        g.set_next(total, after)
        g.output("y", after)
    counting = rlx.compile(g)
    with pytest.raises(rlx.UsageError, match=r"'total' is a state of count: state\['total'\]"):
        counting.tap("total", [x])
    assert "state   total: f32[3]" in str(counting.report())


@pytest.mark.parametrize("device", ["reference", "null"])
def test_a_device_that_cannot_be_watched_says_so(device: str) -> None:
    run = executable(_STORED, device, dims={"N": 2})
    with pytest.raises(rlx.UsageError, match="tap looks between kernels"):
        run.tap("a", {"x": numbers(2, 6), "w": numbers(6, 6)})


def test_a_value_without_a_name() -> None:
    with rlx.Graph("nameless") as g:
        x = g.input("x", [4, 4])
        g.output("y", (x @ x) @ x)
    run = rlx.compile(g)
    node = g.ir.block.first
    assert node is not None
    x2 = np.full((4, 4), 2, _F32)
    with pytest.raises(rlx.UsageError, match=r"test_taps.py:\d+ gives its result no name; name it"):
        run.tap(node.location.source, {"x": x2})
    g.name("square", node.result)
    np.testing.assert_array_equal(rlx.compile(g).tap("square", {"x": x2}), x2 @ x2)
    with pytest.raises(rlx.UsageError, match=r"'x' already"):
        g.name("x", node.result)


def test_exposed_values_use_the_weights_of_the_original() -> None:
    run = executable(_FUSED, "reference", dims={"N": 4})
    inputs = {"x": numbers(3, 8), "w": numbers(8, 8)}
    assert [s.name for s in run.expose("b").outputs] == ["y", "z", "e", "b"]
    np.testing.assert_array_equal(run.expose("b").run(inputs)["y"], run.run(inputs)["y"])


def test_a_package_shows_what_its_programs_store(tmp_path: Path) -> None:
    run = executable(_FUSED, dims={"N": 4})
    inputs = {"x": numbers(3, 8), "w": numbers(8, 8)}
    run.run(inputs)
    run.save(tmp_path / "m.rlxp")
    opened = rlx.open(tmp_path / "m.rlxp")
    np.testing.assert_array_equal(opened.tap("d", inputs), run.tap("d", inputs))
    assert [s.thunk for s in opened.profile(inputs, runs=1).spans[0]]
    with pytest.raises(rlx.UsageError, match=r"no value 'tenn'. Close names: 'ten'. .*package"):
        opened.tap("tenn", inputs)
    with pytest.raises(rlx.UsageError, match=r"comes from a package.*load the model"):
        opened.expose("b")
