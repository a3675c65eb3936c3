# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.errors import PassError
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Node
from rlx.ir.op import registered_ops
from rlx.ir.parse import parse_graph
from rlx.ir.rewrite import GraphRewriter, Match, Reject, apply_rules, rule
from rlx.ir.text import print_graph
from rlx.ir.verify import verify


@rule("neg")
def neg_to_abs(node: Node, builder: Builder) -> Match:
    return builder.emit_one(registered_ops()["abs"](), node.operands[0])


@rule("abs")
def abs_to_neg(node: Node, builder: Builder) -> Match:
    return builder.emit_one(registered_ops()["neg"](), node.operands[0])


@rule("abs")
def merge_abs(node: Node, builder: Builder) -> Match:
    del builder
    x = node.operands[0]
    assert x is not None
    return (
        x
        if x.producer is not None and x.producer.op.name == "abs"
        else Reject("its operand is no abs")
    )


def _chain(count: int) -> Graph:
    lines = [f"%v{i + 1} = neg(%v{i})" for i in range(count)]
    return parse_graph(f'graph {{ input %v0: f32[2] {" ".join(lines)} return %v{count} as "y" }}')


def test_users_are_looked_at_again_until_nothing_changes() -> None:
    graph = _chain(20)
    assert apply_rules(graph, [neg_to_abs, merge_abs])
    verify(graph)
    assert [n.op.name for n in graph.block] == ["abs"]
    assert not apply_rules(graph, [neg_to_abs, merge_abs])


def test_a_cycle_of_rules_is_an_error_that_names_them() -> None:
    with pytest.raises(
        PassError, match=r"cycling rules are: (neg-to-abs, abs-to-neg|abs-to-neg, neg-to-abs)"
    ):
        apply_rules(_chain(2), [neg_to_abs, abs_to_neg])


def test_reasons_for_not_matching_are_noted() -> None:
    notes: list[str] = []
    graph = parse_graph('graph { input %x: f32[2] %y = abs(%x) @ "n" return %y as "y" }')
    assert not apply_rules(graph, [merge_abs], notes.append)
    assert notes == ["merge-abs: abs at 'n' stays: its operand is no abs"]


def test_a_rule_that_changes_a_type_is_an_error() -> None:
    @rule("less")
    def wrong(node: Node, builder: Builder) -> Match:
        del builder
        return node.operands[0]

    graph = parse_graph('graph { input %x: f32[2] %y = less(%x, %x) return %y as "y" }')
    with pytest.raises(PassError, match="must keep types"):
        apply_rules(graph, [wrong])


def test_extents_that_a_guard_makes_equal_are_the_same_type() -> None:
    @rule("add")
    def swap(node: Node, builder: Builder) -> Match:
        x, z = node.operands
        assert x is not None
        if x.name == "z":
            return None
        return builder.emit_typed(node.op, (z, x), [z.type if z is not None else x.type]).results

    graph = parse_graph("""graph {
      input %x: f32[N]
      input %z: f32[M]
      %y = add(%x, %z) : f32[N]
      %a = abs(%y) : f32[N]
      return %a as "y"
      equal M = <N>
    }""")
    assert apply_rules(graph, [swap])
    verify(graph)
    assert [str(n.result.type) for n in graph.block] == ["f32[N]", "f32[N]"]


def test_replacing_keeps_states_outputs_and_readers() -> None:
    graph = _chain(2)
    first, second = graph.block.nodes()
    state = graph.add_state("s", first.result.type, np.zeros((), np.float32))
    state.next = first.result
    graph.set_outputs({"y": second.result, "z": first.result})
    rewriter = GraphRewriter(graph)
    rewriter.replace_value(first.result, graph.inputs[0])
    assert state.next is graph.inputs[0]
    assert graph.outputs[1] is graph.inputs[0]
    assert rewriter.is_dead(first)
    assert not rewriter.is_dead(second)


def test_a_replaced_output_keeps_its_name() -> None:
    graph = _chain(1)
    apply_rules(graph, [neg_to_abs])
    assert "%v1 = abs(%v0)" in print_graph(graph)
