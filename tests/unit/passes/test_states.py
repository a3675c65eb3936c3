# SPDX-License-Identifier: Apache-2.0
"""Writes into states move behind the reads of the old value, and no pass loses a state."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.backends.cpu.claims import cpu_claims
from rlx.backends.cpu.isa import host_isa
from rlx.ir.clone import clone_graph
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.passes.manager import PassContext
from rlx.passes.pipelines import PASSES, default_pipeline
from rlx.passes.states import LateStateWrites


def _graph(body: str) -> Graph:
    graph = parse_graph(f"""graph {{
      input %r: f32[1,4]
      input %p: i64[]
      state "kv" %kv: f32[6,4] = dense<f32[]: 0.0>
      {body}
    }}""")
    verify(graph)
    return graph


def _moved(body: str) -> list[str]:
    graph, context = _graph(body), PassContext(verify=True)
    changed = LateStateWrites().run(graph, context)
    verify(graph)
    assert changed is not bool(context.report)
    return [n.op.name for n in graph.block]


def test_a_write_moves_behind_the_reads_with_what_depends_on_it() -> None:
    assert _moved("""%a = write_rows(%kv, %r, %p) : f32[6,4]
      %b = neg(%a) : f32[6,4]
      %c = reshape(%kv) {shape=(24)} : f32[24]
      %d = exp(%c) : f32[24]
      %e = abs(%b) : f32[6,4]
      next "kv" = %a
      return %d as "d", %e as "e\"""") == ["reshape", "exp", "write_rows", "neg", "abs"]


def test_a_read_that_needs_the_written_value_keeps_the_write_where_it_is() -> None:
    assert _moved("""%a = write_rows(%kv, %r, %p) : f32[6,4]
      %b = add(%a, %kv) : f32[6,4]
      next "kv" = %a
      return %b as "b\"""") == ["write_rows", "add"]


_STATEFUL = """%a = write_rows(%kv, %r, %p) : f32[6,4]
      %b = exp(%kv) : f32[6,4]
      %c = softmax(%a) {axis=1} : f32[6,4]
      %d = write_rows(%a, %r, %p) : f32[6,4]
      %e = mul(%b, %c) : f32[6,4]
      next "kv" = %d
      return %e as "e\""""


@pytest.mark.parametrize("name", sorted(PASSES))
def test_a_pass_keeps_the_states(name: str) -> None:
    graph = _graph(_STATEFUL)
    again = clone_graph(graph)
    PASSES[name]().run(again, PassContext(claims=cpu_claims(host_isa()), verify=True))
    verify(again)
    _agree(graph, again)


def test_the_pipeline_keeps_the_states() -> None:
    graph = _graph(_STATEFUL)
    again = clone_graph(graph)
    default_pipeline(cpu_claims(host_isa())).run(
        again, PassContext(claims=cpu_claims(host_isa()), verify=True)
    )
    _agree(graph, again)


def _agree(one: Graph, other: Graph) -> None:
    rows = np.arange(4, dtype=np.float32).reshape(1, 4)
    states: list[dict[str, np.ndarray]] = [{}, {}]
    for step in range(4):
        inputs = {"r": rows - step, "p": np.array(step)}
        first, second = (
            evaluate(g, inputs, states=s) for g, s in zip((one, other), states, strict=True)
        )
        np.testing.assert_allclose(second["e"], first["e"], rtol=1e-6)
        np.testing.assert_array_equal(states[1]["kv"], states[0]["kv"])
