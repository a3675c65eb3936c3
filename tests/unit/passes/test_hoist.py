# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.passes.hoist import Hoist, split_params
from rlx.passes.manager import PassContext

TEXT = """graph {
  input %x: f32[N,2]
  param %w: f32[3,2] = dense<f32[3,2]: 1.0, 2.0, 3.0, 4.0, 5.0, 6.0>
  param %s: f32[3,1] = dense<f32[3,1]: 0.5, 0.25, 2.0>
  param %b: f32[2] = dense<f32[2]: 1.0, -1.0>
  %c = constant() {data=literal dense<f32[]: 3.0>}
  %sc = mul(%s, %c)
  %ws = mul(%w, %sc) @ "scale"
  %wt = slice(%ws) {starts=(1, 0), sizes=(1, 2), steps=(1, 1)}
  %y = mul(%x, %wt)
  %z = add(%y, %b)
  %k = mul(%z, %c)
  return %k as "y", %ws as "scaled"
}"""


def _split(text: str) -> Graph:
    return parse_graph(text)


def test_the_largest_param_only_part_moves() -> None:
    graph = _split(TEXT)
    program = split_params(graph)
    verify(graph)
    verify(program.graph)
    assert [n.op.name for n in graph.block] == ["constant", "mul", "add", "mul"]
    assert [n.op.name for n in program.graph.block if n.op.name != "constant"] == [
        "mul",
        "mul",
        "slice",
    ]
    assert list(program.results) == ["scale:0", "slice:0"]
    assert all(sources == {"w", "s"} for sources in program.results.values())
    assert sorted(graph.params) == ["b", "scale:0", "slice:0"]
    assert program.affected("s") == ["scale:0", "slice:0"]
    assert program.affected("b") == []


def test_results_are_the_same_and_follow_new_weights() -> None:
    whole, graph = parse_graph(TEXT), parse_graph(TEXT)
    program = split_params(graph)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for factor in (1.0, -2.5):
        params = {n: np.asarray(p.data) * np.float32(factor) for n, p in whole.params.items()}
        derived = evaluate(program.graph, {}, {n: params[n] for n in program.graph.params})
        expected = evaluate(whole, {"x": x}, params)
        given = {**params, **derived}
        found = evaluate(graph, {"x": x}, {n: given[n] for n in graph.params})
        for name, array in expected.items():
            assert found[name].tobytes() == array.tobytes()


def test_hoisting_again_extends_the_program() -> None:
    graph, ctx = parse_graph(TEXT), PassContext()
    assert Hoist().run(graph, ctx)
    assert not Hoist().run(graph, ctx)
    scaled = graph.params["scale:0"].value
    follow = parse_graph(TEXT).block.nodes()[1].op
    from rlx.ir.builder import Builder

    graph.set_outputs(
        {
            "y": graph.outputs[0],
            "more": Builder(graph.block, graph.facts).emit_one(follow, scaled, scaled),
        }
    )
    assert Hoist().run(graph, ctx) or "mul:0" in ctx.params.results
    verify(graph)
    verify(ctx.params.graph)
    assert ctx.params.results["mul:0"] == {"w", "s"}
    assert "scale:0" not in graph.params


def test_what_may_fail_or_grows_too_much_stays() -> None:
    text = """graph {
      param %a: i32[2] = dense<i32[2]: 1, 2>
      param %b: i32[2] = dense<i32[2]: 1, 0>
      param %t: f32[1] = dense<f32[1]: 1.0>
      %q = div(%a, %b)
      %e = expand(%t) {shape=(100000,)}
      return %q as "q", %e as "e"
    }"""
    graph = parse_graph(text)
    program = split_params(graph)
    assert program.results == {}
    assert len(graph.block.nodes()) == 2


def test_gathers_and_divisions_by_good_constants_move() -> None:
    text = """graph {
      param %a: i32[3] = dense<i32[3]: 1, 2, 7>
      %i = constant() {data=literal dense<i64[2]: -3, 2>}
      %out = constant() {data=literal dense<i64[1]: 3>}
      %two = constant() {data=literal dense<i32[]: 2>}
      %zero = constant() {data=literal dense<i32[]: 0>}
      %g = gather(%a, %i) {axis=0}
      %h = div(%g, %two)
      %bad = gather(%a, %out) {axis=0}
      %worse = div(%a, %zero)
      return %h as "h", %bad as "bad", %worse as "worse"
    }"""
    graph = parse_graph(text)
    program = split_params(graph)
    verify(graph)
    assert evaluate(program.graph, {})["div:0"].tolist() == [0, 3]
    assert [n.op.name for n in graph.block if n.op.name != "constant"] == ["gather", "div"]


def test_names_that_are_taken_get_a_number() -> None:
    text = """graph {
      param %a: f32[2] = dense<f32[2]: 1.0, 2.0>
      param %"neg:0": f32[2] = dense<f32[2]: 1.0, 2.0>
      %p = neg(%a)
      %q = neg(%"neg:0")
      return %p as "p", %q as "q"
    }"""
    assert sorted(split_params(parse_graph(text)).results) == ["neg:0.2", "neg:0.3"]
