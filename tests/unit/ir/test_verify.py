# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.dtypes import DType
from rlx.base.errors import PassError
from rlx.base.types import TensorType
from rlx.ir.graph import Graph, Node
from rlx.ir.op import registered_ops
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify

TEXT = """graph {
  input %x: f32[N,3]
  %a = neg(%x)
  %b = add(%a, %x)
  return %b as "y"
}"""


def _nodes(graph: Graph) -> tuple[Node, Node]:
    a, b = graph.block.nodes()
    return a, b


def _swap_order(graph: Graph) -> None:
    a, _ = _nodes(graph)
    graph.block.unlink(a)
    graph.block.insert(a)


def _drop_use(graph: Graph) -> None:
    graph.inputs[0].uses.popitem()


def _stale_use(graph: Graph) -> None:
    a, b = _nodes(graph)
    a.result.uses[b, 1] = None


def _wrong_type(graph: Graph) -> None:
    _nodes(graph)[0].results[0].type = TensorType(DType.F32, (3,))


def _wrong_dtype(graph: Graph) -> None:
    graph.inputs[0].type = graph.inputs[0].type.with_dtype(DType.BOOL)


def _broken_list(graph: Graph) -> None:
    _nodes(graph)[1].prev = None


def _foreign_result(graph: Graph) -> None:
    graph.block.results = [Graph().add_input("z", TensorType(DType.F32, ()))]


def _too_many_operands(graph: Graph) -> None:
    x = graph.inputs[0]
    graph.block.insert(Node(registered_ops()["neg"](), (x, x), [x.type]))


def _missing_operand(graph: Graph) -> None:
    x = graph.inputs[0]
    graph.block.insert(Node(registered_ops()["add"](), (x, None), [x.type]))


def _double_output(graph: Graph) -> None:
    graph.block.results *= 2
    graph.output_names *= 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_swap_order, "not defined before it"),
        (_drop_use, "does not list it as a reader"),
        (_stale_use, "lists 2 reads, 1 are there"),
        (_wrong_type, "its type rule gives"),
        (_wrong_dtype, "does not accept"),
        (_broken_list, "linked wrongly"),
        (_foreign_result, "is not defined in it"),
        (_too_many_operands, "at most 1 are declared"),
        (_missing_operand, "lacks operand"),
        (_double_output, "not unique"),
    ],
)
def test_every_kind_of_damage_is_found(damage: Callable[[Graph], None], message: str) -> None:
    graph = parse_graph(TEXT)
    verify(graph)
    damage(graph)
    with pytest.raises(PassError, match=message):
        verify(graph)


def test_types_that_are_equal_under_a_guard_are_accepted() -> None:
    text = """graph {
      input %x: f32[N]
      input %y: f32[M]
      %z = add(%x, %y) : f32[N]
      return %z as "z"
      equal M = <N>
      guard <N> "==" <M>
    }"""
    verify(parse_graph(text))


def test_verifying_records_no_guard() -> None:
    graph = parse_graph(TEXT)
    verify(graph)
    assert graph.facts.guards == []
