# SPDX-License-Identifier: Apache-2.0
"""The recogniser fires on the ways exporters write attention, and says why where it does not."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.numeric import Array
from rlx.base.target import Claims
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.attention import Attention
from rlx.ops.evaluate import evaluate
from rlx.passes.attention import RecognizeAttention
from rlx.passes.dce import Dce
from rlx.passes.manager import PassContext

_CLAIMS = Claims(ops=frozenset({"attention", "matmul", "softmax"}))

# Three products of the same [batch, position, channel], heads split and moved, scores divided.
_MINILM = """graph {
  input %q: f32[2,5,12]
  input %k: f32[2,5,12]
  input %v: f32[2,5,12]
  input %mask: f32[2,1,1,5]
  %root = constant() {data=literal dense<f32[]: 2.0>}
  %q4 = reshape(%q) {shape=(2, 5, 3, 4)}
  %qt = transpose(%q4) {perm=(0, 2, 1, 3)}
  %k4 = reshape(%k) {shape=(2, 5, 3, 4)}
  %kt = transpose(%k4) {perm=(0, 2, 3, 1)}
  %v4 = reshape(%v) {shape=(2, 5, 3, 4)}
  %vt = transpose(%v4) {perm=(0, 2, 1, 3)}
  %s = matmul(%qt, %kt)
  %d = div(%s, %root)
  %m = add(%d, %mask)
  %p = softmax(%m) {axis=3}
  %y = matmul(%p, %vt)
  %t = transpose(%y) {perm=(0, 2, 1, 3)}
  %o = reshape(%t) {shape=(2, 5, 12)}
  return %o as "y"
}"""

# One product [batch, position, 3 * channel] holds q, k and v; q is scaled before the scores.
_PACKED = """graph {
  input %x: f32[2,5,36]
  %scale = constant() {data=literal dense<f32[]: 0.5>}
  %x5 = reshape(%x) {shape=(2, 5, 3, 3, 4)}
  %xt = transpose(%x5) {perm=(2, 0, 3, 1, 4)}
  %q1 = slice(%xt) {starts=(0, 0, 0, 0, 0), sizes=(1, 2, 3, 5, 4), steps=(1, 1, 1, 1, 1)}
  %k1 = slice(%xt) {starts=(1, 0, 0, 0, 0), sizes=(1, 2, 3, 5, 4), steps=(1, 1, 1, 1, 1)}
  %v1 = slice(%xt) {starts=(2, 0, 0, 0, 0), sizes=(1, 2, 3, 5, 4), steps=(1, 1, 1, 1, 1)}
  %q = reshape(%q1) {shape=(2, 3, 5, 4)}
  %k = reshape(%k1) {shape=(2, 3, 5, 4)}
  %v = reshape(%v1) {shape=(2, 3, 5, 4)}
  %qs = mul(%q, %scale)
  %kt = transpose(%k) {perm=(0, 1, 3, 2)}
  %s = matmul(%qs, %kt)
  %p = softmax(%s) {axis=3}
  %y = matmul(%p, %v)
  %t = transpose(%y) {perm=(0, 2, 1, 3)}
  return %t as "y"
}"""

_PLAIN = """graph {
  input %q: f32[1,2,5,4]
  input %k: f32[1,2,4,6]
  input %v: f32[1,2,6,3]
  input %other: f32[1,2,5,6]
  %c = constant() {data=literal dense<f32[]: 0.5>}
  %s = matmul(%q, %k)
  %d = mul(%s, %c)
  %p = softmax(%d) {axis=3}
  %y = matmul(%p, %v)
  return %y as "y"
}"""


def _run(text: str, claims: Claims = _CLAIMS) -> tuple[Graph, list[str]]:
    """Return the graph after the pass, with results within rounding of those before, and reasons."""
    plain, graph, context = parse_graph(text), parse_graph(text), PassContext(claims=claims)
    RecognizeAttention().run(graph, context)
    Dce().run(graph, context)
    verify(graph)
    chance = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for value in plain.inputs:
        shape = [int(str(d)) for d in value.type.shape]
        inputs[value.name] = chance.standard_normal(shape).astype(value.type.dtype.numpy)
    for name, want in evaluate(plain, inputs).items():
        got = evaluate(graph, inputs)[name]
        assert got.shape == want.shape
        assert np.abs(got - want).max() < 2e-6
    return graph, context.report


def _attention(graph: Graph) -> Attention:
    (op,) = [n.op for n in graph.block if isinstance(n.op, Attention)]
    return op


def test_split_heads_with_a_mask() -> None:
    graph, reasons = _run(_MINILM)
    op = _attention(graph)
    assert not reasons
    assert (op.scale, op.out_layout, op.masked_row) == (0.5, "bshd", "nan")
    assert op.shape == (2, 3, 5, 5, 4, 4)
    assert [n.op.name for n in graph.block if n.op.name not in ("constant", "reshape")] == [
        "attention"
    ]
    node = next(n for n in graph.block if isinstance(n.op, Attention))
    assert node.operands[3] is graph.inputs[3]


def test_one_packed_operand() -> None:
    graph, reasons = _run(_PACKED)
    op = _attention(graph)
    assert not reasons
    assert op.scale == 0.5
    node = next(n for n in graph.block if isinstance(n.op, Attention))
    assert node.operands[0] is node.operands[1] is node.operands[2]
    assert len({str(m) for m in op.maps}) == 3
    assert not [n for n in graph.block if n.op.name in ("transpose", "slice", "mul")]


def test_transposed_keys_are_read_where_depth_is_innermost() -> None:
    text = _PLAIN.replace("input %k: f32[1,2,4,6]", "input %kk: f32[1,2,6,4]").replace(
        "%s = matmul", "%k = transpose(%kk) {perm=(0, 1, 3, 2)}\n  %s = matmul"
    )
    graph, _ = _run(text)
    assert _attention(graph).scale == 0.5
    assert _attention(graph).out_layout == "bhsd"


_KEYS = _PLAIN.replace("input %k: f32[1,2,4,6]", "input %kk: f32[1,2,6,4]").replace(
    "%s = matmul", "%k = transpose(%kk) {perm=(0, 1, 3, 2)}\n  %s = matmul"
)


def test_probabilities_that_are_nan_become_zero() -> None:
    text = _KEYS.replace(
        "%y = matmul(%p, %v)",
        "%z = constant() {data=literal dense<f32[]: 0.0>}\n  %n = is_nan(%p)\n"
        "  %w = where(%n, %z, %p)\n  %y = matmul(%w, %v)",
    )
    graph, _ = _run(text)
    assert _attention(graph).masked_row == "nan_to_zeros"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("axis=3", "axis=2", "not over the last axis"),
        ('"y"', '"y", %p as "p"', "the probabilities are also read elsewhere"),
        ('"y"', '"y", %s as "s"', "are also read elsewhere"),
        ("mul(%s, %c)", "mul(%s, %other)", "not one constant"),
        ("mul(%s, %c)", "tanh(%s)", "tanh between the score matmul and the softmax"),
        ("matmul(%p, %v)", "mul(%p, %other)", "go to mul, not to a matmul"),
        ("softmax(%d)", "softmax(%other)", "the scores are an input"),
        ("input %v: f32[1,2,6,3]", "input %v: f32[1,1,6,3]", "v broadcasts over batch or heads"),
    ],
)
def test_what_is_no_attention_leaves_a_reason(old: str, new: str, reason: str) -> None:
    text = _KEYS.replace(old, new)
    assert text != _KEYS
    graph, reasons = _run(text)
    assert not [n for n in graph.block if isinstance(n.op, Attention)]
    assert any(reason in line for line in reasons), reasons


def test_keys_whose_depth_is_not_innermost_are_refused() -> None:
    graph, reasons = _run(_PLAIN)
    assert not [n for n in graph.block if isinstance(n.op, Attention)]
    assert any("depth axis of an operand is not its innermost one" in line for line in reasons)


def test_quantised_scores_are_refused() -> None:
    text = _KEYS.replace(
        "%d = mul(%s, %c)",
        "%qs = quantize_linear(%s, %c) {axis=none, block=0, to=i8, saturate=true}\n"
        "  %d = dequantize_linear(%qs, %c) {axis=none, block=0, to=f32}",
    )
    graph, reasons = _run(text)
    assert not [n for n in graph.block if isinstance(n.op, Attention)]
    assert any("quantised scores" in line for line in reasons), reasons


def test_a_factor_after_the_mask_is_refused() -> None:
    text = _KEYS.replace("%d = mul(%s, %c)", "%a = add(%s, %other)\n  %d = mul(%a, %c)")
    graph, reasons = _run(text)
    assert not [n for n in graph.block if isinstance(n.op, Attention)]
    assert any("a factor between the mask and the softmax" in line for line in reasons)


def test_a_target_without_attention_keeps_the_chain() -> None:
    graph, reasons = _run(_KEYS, Claims(ops=frozenset({"matmul"})))
    assert not [n for n in graph.block if isinstance(n.op, Attention)]
    assert not reasons


def test_the_node_names_what_it_replaces() -> None:
    lines = _MINILM.splitlines()
    named = [
        f'{line} @ "{line.split()[0]}"' if " = " in line and "constant" not in line else line
        for line in lines
    ]
    graph = parse_graph("\n".join(named))
    RecognizeAttention().run(graph, PassContext(claims=_CLAIMS))
    (node,) = [n for n in graph.block if isinstance(n.op, Attention)]
    assert node.location.name == "%y"
    assert set(node.location.parts) == {"%s", "%d", "%m", "%p", "%t"}
    assert node.result.name == "t"


def test_a_sum_of_an_input_and_a_constant_is_no_attention() -> None:
    graph = parse_graph("""graph {
  input %x: f32[2,3]
  %c = constant() {data=literal dense<f32[3]: 1.0, 2.0, 3.0>}
  %s = add(%x, %c)
  %p = softmax(%s) {axis=1}
  return %p as "y"
}""")
    context = PassContext(claims=_CLAIMS)
    assert not RecognizeAttention().run(graph, context)
    assert "constant between the score matmul and the softmax" in context.report[0]
