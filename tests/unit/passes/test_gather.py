# SPDX-License-Identifier: Apache-2.0
"""Rows are gathered from the stored table: equal bits, and only where that saves memory."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.target import Claims
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.passes.dce import Dce
from rlx.passes.gather import GatherStored
from rlx.passes.manager import PassContext

_ROWS, _COLUMNS = 1100, 256
_CLAIMS = Claims(ops=frozenset({"gather"}))


def _text(body: str, indices: str = "[2,N]", returned: str = "") -> str:
    return f"""graph {{
  input %i: i64{indices}
  param %w: i8[{_ROWS},{_COLUMNS}]
  param %s: f32[] = dense<f32[]: 0.3>
  param %z: i8[] = dense<i8[]: 5>
  param %c: f32[{_COLUMNS}]
  param %r: f32[{_ROWS},1]
  {body}
  return %y as "y"{returned}
}}"""


def _run(text: str) -> tuple[Graph, list[str]]:
    """Return the graph after the pass, which gives the same bits, and reasons."""
    plain, graph = parse_graph(text), parse_graph(text)
    context = PassContext(claims=_CLAIMS)
    GatherStored().run(graph, context)
    Dce().run(graph, context)
    verify(graph)
    chance = np.random.default_rng(0)
    inputs = {
        "i": chance.integers(-100, 100, (2, 7)[: len(plain.inputs[0].type.shape)]),
        "w": chance.integers(-128, 128, (_ROWS, _COLUMNS)).astype(np.int8),
        "c": chance.standard_normal(_COLUMNS).astype(np.float32),
        "r": chance.standard_normal((_ROWS, 1)).astype(np.float32),
    }
    want, got = evaluate(plain, inputs), evaluate(graph, inputs)
    for name, array in want.items():
        assert got[name].tobytes() == array.tobytes()
    return graph, context.report


def _gathered(graph: Graph) -> list[str]:
    """Return the dtypes of the large tables that are gathered from."""
    return [
        str(n.operands[0].type.dtype)
        for n in graph.block
        if n.op.name == "gather" and n.operands[0] is not None and n.operands[0].name != "r"
    ]


_MOVED = {
    "dequantize": """%v = dequantize_linear(%w, %s, %z) {axis=none, block=0, to=f32}
  %y = gather(%v, %i) {axis=0}""",
    "cast, mul": """%f = cast(%w) {saturate=true, to=f32}
  %v = mul(%f, %s)
  %y = gather(%v, %i) {axis=0}""",
    "per column": """%f = cast(%w) {saturate=true, to=f32}
  %v = mul(%c, %f)
  %y = gather(%v, %i) {axis=0}""",
    "columns gathered, per row": """%f = cast(%w) {saturate=true, to=f32}
  %v = mul(%f, %r)
  %y = gather(%v, %i) {axis=1}""",
    "per row": """%f = cast(%w) {saturate=true, to=f32}
  %v = mul(%f, %r)
  %y = gather(%v, %i) {axis=0}""",
    "two lookups": """%f = cast(%w) {saturate=true, to=f32}
  %v = mul(%f, %s)
  %a = gather(%v, %i) {axis=0}
  %b = gather(%v, %i) {axis=0}
  %y = add(%a, %b)""",
}


@pytest.mark.parametrize("body", _MOVED.values(), ids=_MOVED)
@pytest.mark.parametrize("indices", ["[]", "[N]", "[2,N]"])
def test_moved(body: str, indices: str) -> None:
    graph, reasons = _run(_text(body, indices))
    assert set(_gathered(graph)) == {"i8"}
    assert not reasons


_LEFT = {
    "not narrower": """%f = add(%r, %c)
  %y = gather(%f, %i) {axis=0}""",
    "the weight itself": "%y = gather(%w, %i) {axis=0}",
    "reads itself twice": """%f = cast(%w) {saturate=true, to=f32}
  %v = mul(%f, %f)
  %y = gather(%v, %i) {axis=0}""",
}


@pytest.mark.parametrize("body", _LEFT.values(), ids=_LEFT)
def test_left(body: str) -> None:
    graph = parse_graph(_text(body))
    assert not GatherStored().run(graph, PassContext(claims=_CLAIMS))


def test_a_table_that_is_read_whole_stays_wide() -> None:
    body = """%f = cast(%w) {saturate=true, to=f32}
  %v = mul(%f, %s)
  %y = gather(%v, %i) {axis=0}"""
    graph, reasons = _run(_text(body, returned=', %v as "v"'))
    assert _gathered(graph) == ["f32"]
    assert any("read whole" in reason for reason in reasons)


def test_small_tables_and_other_devices_stay_as_they_are() -> None:
    small = _text(_MOVED["cast, mul"]).replace(f"i8[{_ROWS},", "i8[9,")
    for text, claims in ((small, _CLAIMS), (_text(_MOVED["cast, mul"]), Claims())):
        graph = parse_graph(text)
        assert not GatherStored().run(graph, PassContext(claims=claims))
