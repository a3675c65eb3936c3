# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.leaf import Constant, DimTensor
from rlx.passes.fold import Fold
from rlx.passes.manager import PassContext


def _fold(text: str, step: Fold | None = None) -> tuple[Graph, PassContext]:
    graph, ctx = parse_graph(text), PassContext()
    (step or Fold()).run(graph, ctx)
    verify(graph)
    return graph, ctx


CHAIN = """graph {
  %a = constant() {data=literal dense<f16[2]: 1.0, 3.0>}
  %b = constant() {data=literal dense<f16[2]: 3.0, 7.0>}
  %c = div(%a, %b)
  %d = neg(%c)
  %e = reshape(%d) {shape=(2, 1)}
  return %e as "y"
}"""


def test_a_chain_of_constants_becomes_one_with_a_rounding_per_operator() -> None:
    graph, _ = _fold(CHAIN)
    (node,) = graph.block.nodes()
    assert isinstance(node.op, Constant)
    expected = -(np.array([[1], [3]], np.float32) / np.array([[3], [7]], np.float32)).astype(
        np.float16
    )
    assert node.op.data.array.tobytes() == expected.tobytes()


def test_integer_division_by_zero_stays_and_says_so() -> None:
    text = """graph {
      %a = constant() {data=literal dense<i32[]: 1>}
      %b = constant() {data=literal dense<i32[]: 0>}
      %c = div(%a, %b)
      return %c as "y"
    }"""
    graph, ctx = _fold(text)
    assert [n.op.name for n in graph.block] == ["constant", "constant", "div"]
    assert "division by zero" in ctx.report[0]


def test_a_large_result_stays_unless_its_operands_are_as_large() -> None:
    text = """graph {
      %a = constant() {data=literal dense<f32[4]: 1.0, 2.0, 3.0, 4.0>}
      %n = neg(%a)
      %e = expand(%n) {shape=(3, 4)}
      return %e as "y"
    }"""
    graph, ctx = _fold(text, Fold(max_elements=3))
    assert [n.op.name for n in graph.block] == ["constant", "expand"]
    assert "more than 4 elements" in ctx.report[0]


def test_params_and_inputs_are_not_constants() -> None:
    text = """graph {
      input %x: f32[1]
      param %w: f32[1] = dense<f32[1]: 1.0>
      %a = neg(%w)
      %b = neg(%x)
      return %a as "a", %b as "b"
    }"""
    assert len(_fold(text)[0].block.nodes()) == 2


def test_extents_fold_to_extents() -> None:
    text = """graph {
      input %x: f32[N]
      %d = dim_tensor() {dims=(<N>, 3), shape=(2,)}
      %c = constant() {data=literal dense<i64[]: 2>}
      %m = mul(%d, %c)
      return %m as "y"
    }"""
    graph, _ = _fold(text)
    (node,) = graph.block.nodes()
    assert isinstance(node.op, DimTensor)
    assert [str(d) for d in node.op.dims] == ["2*N", "6"]


def test_static_extents_become_a_constant() -> None:
    graph, _ = _fold('graph { %d = dim_tensor() {dims=(4, 3), shape=(2,)} return %d as "y" }')
    (node,) = graph.block.nodes()
    assert isinstance(node.op, Constant)
    assert node.op.data.array.tolist() == [4, 3]
