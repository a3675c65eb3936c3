# SPDX-License-Identifier: Apache-2.0
"""States are part of a graph: copies have them, the verifier looks at them, whoever keeps results right keeps them."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import PassError
from rlx.base.types import TensorType
from rlx.ir.builder import Builder, Rewriter
from rlx.ir.clone import clone_graph
from rlx.ir.graph import Graph
from rlx.ir.op import registered_ops
from rlx.ir.text import content_hash, print_graph
from rlx.ir.verify import verify


def _counter() -> Graph:
    graph = Graph("counter")
    x = graph.add_input("x", TensorType(DType.F32, (symbol("N"), 2)))
    state = graph.add_state("sum", x.type, np.zeros((1, 2), np.float32))
    builder = Builder(graph.block, graph.facts)
    total = builder.emit_one(registered_ops()["add"](), state.value, x)
    state.next = total
    graph.set_outputs({"y": builder.emit_one(registered_ops()["neg"](), total)})
    verify(graph)
    return graph


def test_outputs_and_next_values_stay_apart() -> None:
    graph = _counter()
    (state,) = graph.states
    assert [v.name or "y" for v in graph.outputs] == ["y"]
    following = state.next
    graph.set_outputs({"a": following, "b": graph.inputs[0]})
    assert state.next is following
    assert graph.outputs == [following, graph.inputs[0]]
    graph.set_outputs({})
    assert (state.next, graph.outputs) == (following, [])
    verify(graph)


def test_a_rewriter_of_any_kind_keeps_the_next_value() -> None:
    graph = _counter()
    (state,) = graph.states
    add = graph.block.nodes()[0]
    rewriter = Rewriter(graph.facts)
    new = rewriter.before(add).emit_one(registered_ops()["sub"](), *add.operands)
    rewriter.replace_node(add, [new])
    assert state.next is new
    verify(graph)


def test_a_copy_has_states_of_its_own() -> None:
    graph = _counter()
    copy = clone_graph(graph, {"N": 3})
    verify(copy)
    (state,) = copy.states
    assert state.value.type.shape == (3, 2)
    assert state.next.producer in copy.block.nodes()
    assert print_graph(clone_graph(graph)) == print_graph(graph)
    state.next = state.value
    assert graph.states[0].next.producer is graph.block.first


def test_the_next_value_is_part_of_what_a_graph_computes() -> None:
    graph = _counter()
    before = content_hash(graph)
    graph.states[0].next = graph.states[0].value
    assert content_hash(graph) != before


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (np.zeros((3, 2), np.float32), r"float32\[3, 2\] does not broadcast"),
        (np.zeros(2, np.float64), r"float64\[2\] does not broadcast"),
        (np.zeros((1, 1, 2), np.float32), "does not broadcast"),
    ],
)
def test_initial_values_fit_the_type(init: np.ndarray, message: str) -> None:
    graph = _counter()
    graph.states[0].init = init
    with pytest.raises(PassError, match=message):
        verify(graph)


def test_a_next_value_of_another_type_or_graph_is_found() -> None:
    graph = _counter()
    row = graph.add_input("row", TensorType(DType.F32, (2,)))
    graph.states[0].next = row
    with pytest.raises(PassError, match=r"state 'sum' is f32\[N,2\], its next value f32\[2\]"):
        verify(graph)
    graph.states[0].next = _counter().states[0].next
    with pytest.raises(PassError, match="is not defined in it"):
        verify(graph)


def test_two_states_of_one_name_are_found() -> None:
    graph = _counter()
    graph.add_state("sum", TensorType(DType.F32, ()), np.zeros((), np.float32))
    with pytest.raises(PassError, match="not unique"):
        verify(graph)
