# SPDX-License-Identifier: Apache-2.0
"""Common sub-expressions and dead code."""

from __future__ import annotations

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.passes.cse import Cse
from rlx.passes.dce import Dce
from rlx.passes.manager import Pass, PassContext


def _run(step: Pass, text: str) -> Graph:
    graph = parse_graph(text)
    step.run(graph, PassContext())
    verify(graph)
    return graph


def test_equal_nodes_over_equal_operands_merge() -> None:
    text = """graph {
      input %x: f32[2]
      %a = neg(%x)
      %b = neg(%x)
      %c = exp(%a)
      %d = exp(%b)
      %e = add(%c, %d)
      return %e as "y", %b as "z"
    }"""
    graph = _run(Cse(), text)
    assert [n.op.name for n in graph.block] == ["neg", "exp", "add"]
    assert graph.outputs[1].producer is graph.block.first


def test_zeros_of_both_signs_stay_apart() -> None:
    text = """graph {
      %a = constant() {data=literal dense<f32[]: 0.0>}
      %b = constant() {data=literal dense<f32[]: -0.0>}
      %c = constant() {data=literal dense<f32[]: 0.0>}
      return %a as "a", %b as "b", %c as "c"
    }"""
    graph = _run(Cse(), text)
    assert len(graph.block.nodes()) == 2
    assert graph.outputs[0] is graph.outputs[2]


def test_attributes_that_are_zeros_of_both_signs_stay_apart() -> None:
    text = """graph {
      input %x: f32[2]
      %a = leaky_relu(%x) {alpha=0.0}
      %b = leaky_relu(%x) {alpha=-0.0}
      %c = leaky_relu(%x) {alpha=-0.0}
      return %a as "a", %b as "b", %c as "c"
    }"""
    assert len(_run(Cse(), text).block.nodes()) == 2


def test_different_attributes_or_operands_stay_apart() -> None:
    text = """graph {
      input %x: f32[2]
      input %z: f32[2]
      %a = cast(%x) {to=f16}
      %b = cast(%x) {to=f64}
      %c = cast(%z) {to=f16}
      return %a as "a", %b as "b", %c as "c"
    }"""
    assert len(_run(Cse(), text).block.nodes()) == 3


def test_dead_chains_go_in_one_sweep() -> None:
    text = """graph {
      input %x: f32[2]
      %a = neg(%x)
      %b = exp(%a)
      %c = abs(%x)
      return %c as "y"
    }"""
    graph = _run(Dce(), text)
    assert [n.op.name for n in graph.block] == ["abs"]
    assert not Dce().run(graph, PassContext())


def test_what_a_state_takes_is_alive() -> None:
    text = """graph {
      input %x: f32[2]
      state "s" %s: f32[2] = dense<f32[2]: 0.0, 0.0>
      %a = add(%x, %s)
      return %x as "y"
      next "s" = %a
    }"""
    assert len(_run(Dce(), text).block.nodes()) == 1
