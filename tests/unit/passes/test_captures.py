# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.ir.parse import parse_graph
from rlx.ir.text import print_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.passes.canonicalize import Canonicalize
from rlx.passes.captures import Captures
from rlx.passes.cse import Cse
from rlx.passes.dce import Dce
from rlx.passes.manager import PassContext

BRANCHES = """graph {
  input %c: bool[]
  input %x: f32[2]
  input %z: f32[2]
  %one = constant() {data=literal dense<f32[]: 1.0>}
  %dead = exp(%z)
  %y = if(%c, %x, %one, %dead) {
    region(%a: f32[2], %b: f32[], %d: f32[2]) {
      %m = mul(%a, %b)
      %n = neg(%m)
      return %n
    }
    region(%a: f32[2], %b: f32[], %d: f32[2]) {
      %e = abs(%a)
      %f = abs(%a)
      %g = add(%e, %f)
      return %g
    }
  }
  return %y as "y"
}"""


def test_regions_round_trip_and_verify() -> None:
    graph = parse_graph(BRANCHES)
    verify(graph)
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text


def test_constants_move_in_and_unread_captures_vanish() -> None:
    graph = parse_graph(BRANCHES)
    ctx = PassContext()
    inputs = {"c": np.array(True), "x": np.array([1, -2], np.float32), "z": np.zeros(2, np.float32)}
    expected = [evaluate(graph, {**inputs, "c": np.array(c)})["y"] for c in (True, False)]
    for step in (Captures(), Canonicalize(), Cse(), Dce()):
        step.run(graph, ctx)
        verify(graph)
    (node,) = graph.block.nodes()
    assert [o.name for o in node.operands if o is not None] == ["c", "x"]
    assert [[n.op.name for n in r] for r in node.regions] == [["neg"], ["abs", "add"]]
    for condition, array in zip((True, False), expected, strict=True):
        found = evaluate(graph, {**inputs, "c": np.array(condition)})["y"]
        assert found.tobytes() == array.tobytes()
    assert not Captures().run(graph, ctx)


def test_a_known_condition_takes_the_branch() -> None:
    text = BRANCHES.replace(
        "input %c: bool[]", "%c = constant() {data=literal dense<bool[]: false>}"
    )
    graph = parse_graph(text)
    Canonicalize().run(graph, PassContext())
    verify(graph)
    assert [n.op.name for n in graph.block] == ["abs", "abs", "add"]


def test_a_loop_keeps_what_it_carries() -> None:
    text = """graph {
      input %x: f32[2]
      input %w: f32[2]
      %n = constant() {data=literal dense<i64[]: 3>}
      %two = constant() {data=literal dense<f32[]: 2.0>}
      %y = loop(%n, none, %x, %two, %w) {carried=1} : f32[2] {
        region(%i: i64[], %c: bool[], %v: f32[2], %k: f32[], %u: f32[2]) {
          %d = mul(%v, %k) : f32[2]
          return %c, %d
        }
      }
      return %y as "y"
    }"""
    graph = parse_graph(text)
    verify(graph)
    x = np.array([1.5, -1], np.float32)
    for step in (Captures(), Dce()):
        step.run(graph, PassContext())
        verify(graph)
    loop = graph.block.nodes()[-1]
    assert [o.name if o is not None else None for o in loop.operands] == ["n", None, "x"]
    found = evaluate(graph, {"x": x, "w": x})["y"]
    assert found.tolist() == [12.0, -8.0]
