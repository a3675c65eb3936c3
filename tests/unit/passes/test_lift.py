# SPDX-License-Identifier: Apache-2.0
"""Work on captured weights moves out of branches and loops."""

from __future__ import annotations

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.ir.graph import Block, Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.passes.lift import LiftParamWork
from rlx.passes.manager import PassContext

_BRANCH = """graph {
  input %c: bool[]
  input %x: f32[2]
  param %w: f32[2] = dense<f32[2]: 3.0, -4.0>
  %y = if(%c, %x, %w) {
    region(%a: f32[2], %b: f32[2]) {
      %two = constant() {data=literal dense<f32[]: 2.0>}
      %d = mul(%b, %two)
      %e = abs(%d)
      %f = add(%a, %e)
      return %f
    }
    region(%a: f32[2], %b: f32[2]) {
      %n = neg(%b)
      return %n
    }
  }
  return %y as "y"
}"""


def _lifted(text: str) -> Graph:
    graph = parse_graph(text)
    assert LiftParamWork().run(graph, PassContext())
    verify(graph)
    assert not LiftParamWork().run(graph, PassContext())
    return graph


def _names(block: Block) -> list[str]:
    return [n.op.name for n in block if n.op.name != "constant"]


def test_chains_move_out_of_both_arms() -> None:
    graph = _lifted(_BRANCH)
    branch = next(n for n in graph.block if n.regions)
    assert sorted(_names(graph.block)) == ["abs", "if", "mul", "neg"]
    assert [_names(r) for r in branch.regions] == [["add"], []]
    x = np.array([1, -2], np.float32)
    for condition in (True, False):
        inputs = {"c": np.array(condition), "x": x}
        want = evaluate(parse_graph(_BRANCH), inputs)["y"]
        assert evaluate(graph, inputs)["y"].tobytes() == want.tobytes()


def test_inputs_and_work_that_may_fail_stay() -> None:
    text = """graph {
      input %c: bool[]
      input %x: f32[3]
      param %w: f32[3] = dense<f32[3]: 1.0, 2.0, 3.0>
      param %i: i64[1] = dense<i64[1]: 9>
      %y = if(%c, %x, %w, %i) {
        region(%a: f32[3], %b: f32[3], %j: i64[1]) {
          %g = gather(%b, %j) {axis=0}
          return %g
        }
        region(%a: f32[3], %b: f32[3], %j: i64[1]) {
          %n = neg(%a)
          %s = slice(%n) {starts=(0,), sizes=(1,), steps=(1,)}
          return %s
        }
      }
      return %y as "y"
    }"""
    graph = parse_graph(text)
    assert not LiftParamWork().run(graph, PassContext())
    inputs = {"c": np.array(False), "x": np.ones(3, np.float32)}
    assert evaluate(graph, inputs)["y"].tolist() == [-1]


def test_work_leaves_loops_but_what_is_carried_stays() -> None:
    text = """graph {
      input %x: f32[2]
      param %w: f32[2] = dense<f32[2]: 3.0, -4.0>
      %y = scan(%w, %w) {carried=1, scan_inputs=0, trip=3} {
        region(%s: f32[2], %b: f32[2]) {
          %e = exp(%b)
          %m = neg(%s)
          %t = add(%m, %e)
          return %t
        }
      }
      %z = add(%x, %y)
      return %z as "z"
    }"""
    graph = _lifted(text)
    assert sorted(_names(graph.block)) == ["add", "exp", "scan"]
    inputs = {"x": np.zeros(2, np.float32)}
    want = evaluate(parse_graph(text), inputs)["z"]
    assert evaluate(graph, inputs)["z"].tobytes() == want.tobytes()


def test_work_leaves_nested_regions() -> None:
    inner = _BRANCH.split("%y = if", 1)[1].split("return %y", 1)[0]
    text = f"""graph {{
      input %k: bool[]
      input %c: bool[]
      input %x: f32[2]
      param %w: f32[2] = dense<f32[2]: 3.0, -4.0>
      %y = if(%k, %c, %x, %w) {{
        region(%c: bool[], %x: f32[2], %w: f32[2]) {{
          %y = if{inner}
          return %y
        }}
        region(%c: bool[], %x: f32[2], %w: f32[2]) {{
          return %x
        }}
      }}
      return %y as "y"
    }}"""
    graph = _lifted(text)
    assert sorted(_names(graph.block)) == ["abs", "if", "mul", "neg"]
    for outer in (True, False):
        for condition in (True, False):
            inputs = {"k": np.array(outer), "c": np.array(condition), "x": np.ones(2, np.float32)}
            want = evaluate(parse_graph(text), inputs)["y"]
            assert evaluate(graph, inputs)["y"].tobytes() == want.tobytes()
