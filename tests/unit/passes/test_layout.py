# SPDX-License-Identifier: Apache-2.0
"""Channels-last convolutions, and transposes that sink and cancel, with equal results."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.target import Claims
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.conv import Conv
from rlx.ops.elementwise import add, relu
from rlx.ops.evaluate import evaluate
from rlx.ops.movement import concat
from rlx.ops.spec import building, emit_one
from rlx.passes.canonicalize import Canonicalize
from rlx.passes.dce import Dce
from rlx.passes.layout import ChannelsLast, SinkTransposes
from rlx.passes.manager import PassContext

_POINTWISE = Conv((1, 1), (1, 1), ((0, 0), (0, 0)))
_NHWC = Claims(ops=frozenset({"conv"}), layouts=(("conv", "nhwc"),))


def _inputs(graph: Graph) -> dict[str, Array]:
    chance = np.random.default_rng(0)
    shapes = {v.name: [int(str(d)) for d in v.type.shape] for v in graph.inputs}
    return {n: chance.integers(-4, 5, s).astype(np.float32) for n, s in shapes.items()}


def _same(graph: Graph, inputs: dict[str, Array], want: dict[str, Array]) -> None:
    verify(graph)
    for name, array in evaluate(graph, inputs).items():
        np.testing.assert_array_equal(array, want[name])


def _transposes(graph: Graph) -> int:
    return sum(n.op.name == "transpose" for n in graph.block)


def _network() -> Graph:
    """Return two convolutions around a bias, relu and a residual."""
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.F32, (1, 3, 6, 6)))
    weights: list[Value] = []
    for i in range(2):
        data = np.random.default_rng(i).integers(-2, 3, (3, 3, 1, 1)).astype(np.float32)
        weights.append(graph.add_param(f"w{i}", data, TensorType(DType.F32, data.shape)))
    bias = graph.add_param(
        "b", np.array([[[1]], [[2]], [[3]]], np.float32), TensorType(DType.F32, (3, 1, 1))
    )
    with building(Builder(graph.block, graph.facts)):
        first = emit_one(_POINTWISE, x, weights[0], None)
        middle = relu(add(first, bias))
        second = emit_one(_POINTWISE, middle, weights[1], None)
        graph.set_outputs({"y": concat([add(second, middle), first], 1)})
    return graph


def test_convolutions_become_channels_last_and_transposes_cancel() -> None:
    graph, context = _network(), PassContext(claims=_NHWC)
    inputs = _inputs(graph)
    want = evaluate(graph, inputs)
    assert ChannelsLast().run(graph, context)
    assert _transposes(graph) == 4
    assert not ChannelsLast().run(graph, context)
    _same(graph, inputs, want)
    SinkTransposes().run(graph, context)
    for step in (Canonicalize(), Dce()):
        step.run(graph, context)
    _same(graph, inputs, want)
    convolutions = [n for n in graph.block if isinstance(n.op, Conv)]
    assert all(isinstance(n.op, Conv) and n.op.layout == "nhwc" for n in convolutions)
    nodes = graph.block.nodes()
    moved = [
        n for n in nodes if n.op.name == "transpose" and n.operands[0] not in graph.param_values()
    ]
    large = [n for n in moved if n.result.type.elements != 3]
    assert len(large) == 2
    assert large[0].operands[0] is graph.inputs[0]
    assert large[-1].result is graph.outputs[0]


def test_a_target_that_wants_no_layout_keeps_the_graph() -> None:
    graph = _network()
    assert not ChannelsLast().run(graph, PassContext(claims=Claims(ops=frozenset({"conv"}))))


_SUNK = """graph {{
  input %x: f32[2,3,4,5]
  input %z: f32[2,3,4,5]
  param %w: f32[5,3,1] = dense<f32[5,3,1]: {numbers}>
  %t = transpose(%x) {{perm=(0, 3, 1, 2)}}
  %u = transpose(%z) {{perm=(0, 3, 1, 2)}}
  {body}
  return %y as "y"
}}"""


@pytest.mark.parametrize(
    "body",
    [
        "%y = exp(%t)",
        "%y = add(%t, %u)",
        "%y = add(%t, %w)",
        "%y = mul(%w, %t)",
        "%y = concat(%t, %u) {axis=1}",
        "%y = concat(%t, %u) {axis=3}",
        '%y = reduce(%t) {kind="sum", axes=(1, 3), keepdims=true}',
        "%y = softmax(%t) {axis=1}",
        "%y = slice(%t) {starts=(0, 1, 0, 2), sizes=(2, 3, 3, 1), steps=(1, 1, 1, 1)}",
    ],
)
def test_a_transpose_sinks_below_its_reader(body: str) -> None:
    numbers = ", ".join(f"{i}.0" for i in range(15))
    graph = parse_graph(_SUNK.format(numbers=numbers, body=body))
    inputs = _inputs(graph)
    want = evaluate(graph, inputs)
    assert SinkTransposes().run(graph, PassContext())
    Dce().run(graph, PassContext())
    verify(graph)
    last = graph.outputs[0].producer
    assert last is not None
    assert last.op.name == "transpose"
    assert last.result.type.rank == 4
    used = {v for n in graph.block if n is not last for v in n.operands if v is not None}
    assert {"x"} <= {v.name for v in used}
    got = evaluate(graph, inputs)
    for name, array in want.items():
        assert got[name].shape == array.shape
        # A sum over axes in another order rounds alike only for whole numbers; softmax does not.
        np.testing.assert_allclose(got[name], array, rtol=0 if "softmax" not in body else 1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "%y = concat(%t, %q) {axis=1}",  # the other operand would have to be transposed
        "%y = add(%t, %q)",
        '%y = reduce(%t) {kind="sum", axes=(1,), keepdims=false}',
    ],
)
def test_a_transpose_stays_where_sinking_costs(body: str) -> None:
    numbers = ", ".join(f"{i}.0" for i in range(15))
    text = _SUNK.format(numbers=numbers, body=body)
    graph = parse_graph(text.replace("input %z", "input %q: f32[2,5,3,4]\n  input %z"))
    SinkTransposes().run(graph, PassContext())
    last = graph.outputs[0].producer
    assert last is not None
    assert last.op.name != "transpose"


def test_two_transposes_become_one_or_none() -> None:
    text = """graph {
      input %x: f32[2,3,4]
      %a = transpose(%x) {perm=(1, 2, 0)}
      %b = transpose(%a) {perm=(1, 2, 0)}
      %c = transpose(%b) {perm=(1, 2, 0)}
      return %a as "a", %b as "b", %c as "c"
    }"""
    graph = parse_graph(text)
    inputs = _inputs(graph)
    want = evaluate(graph, inputs)
    SinkTransposes().run(graph, PassContext())
    Dce().run(graph, PassContext())
    _same(graph, inputs, want)
    assert graph.outputs[2] is graph.inputs[0]
    assert all(n.operands[0] is graph.inputs[0] for n in graph.block)


def test_transposes_sink_through_quantising() -> None:
    graph = parse_graph("""graph {
  input %x: f32[1,3,4,5]
  param %s: f32[] = dense<f32[]: 0.5>
  param %z: u8[] = dense<u8[]: 100>
  %t = transpose(%x) {perm=(0, 2, 3, 1)}
  %q = quantize_linear(%t, %s, %z) {axis=none, block=0, to=u8}
  %d = dequantize_linear(%q, %s, %z) {axis=none, block=0, to=f32}
  %y = transpose(%d) {perm=(0, 3, 1, 2)}
  return %y as "y"
}""")
    inputs = _inputs(graph)
    want = evaluate(graph, inputs)
    for step in (SinkTransposes(), Canonicalize(), Dce()):
        step.run(graph, PassContext(claims=_NHWC))
    assert _transposes(graph) == 0
    _same(graph, inputs, want)
