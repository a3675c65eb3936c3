# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.diagnostics import Location
from rlx.base.dims import dim_max, floordiv, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ParseError, UsageError
from rlx.base.types import TensorType
from rlx.expr.body import Scalar, trace
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op, registered_ops
from rlx.ir.parse import parse_array, parse_graph
from rlx.ir.text import content_hash, format_array, print_graph
from rlx.ir.verify import verify
from rlx.ops.elementwise import Cast
from rlx.ops.leaf import Constant, DimTensor, Literal
from rlx.ops.region import Region, WithEpilogue

SMALL = """graph "small" {
  symbol N >= 0 <= 512 hint 7
  input %x: f32[N,3]
  input %"odd name/x:0": i64[]
  param %w: f32[3] = dense<f32[3]: 0.1, -0.0, nan> identity ("file", 12)
  %3 = add(%x, %w) : f32[N,3] @ "/add" "model.py:3"
  %kept = neg(%3) : f32[N,3]
  %5 = reshape(%kept) {shape=(<3*N>,)} : f32[3*N]
  return %5 as "y", %kept as "z"
  guard <N> ">" <1> because "broadcast"
}
"""


def test_printing_what_was_parsed_gives_the_same_text() -> None:
    graph = parse_graph(SMALL)
    verify(graph)
    assert print_graph(graph) == SMALL
    assert graph.facts.uppers == {"N": 512}
    assert graph.facts.hints == {"N": 7}
    assert graph.params["w"].identity == ("file", 12)
    assert str(graph.facts.guards[0]) == "N > 1 (broadcast)"
    assert [n.location.source for n in graph.block] == ["model.py:3", "", ""]


def test_the_nodes_whose_work_another_does_are_part_of_its_location() -> None:
    text = """graph "g" {
  input %x: f32[3]
  %1 = exp(%x) : f32[3] @ "/exp" "model.py:3" with "/a", "b, c"
  %2 = neg(%1) : f32[3] @ "" with "d"
  return %2 as "y"
}
"""
    graph = parse_graph(text)
    assert [n.location for n in graph.block] == [
        Location("/exp", "model.py:3", ("/a", "b, c")),
        Location("", "", ("d",)),
    ]
    assert print_graph(graph) == text


def test_locations_can_be_left_out() -> None:
    assert "model.py" not in print_graph(parse_graph(SMALL), locations=False)


def test_types_are_inferred_where_they_are_left_out() -> None:
    graph = parse_graph("graph { input %x: f32[N,3] %y = neg(%x) return %y }")
    assert str(graph.outputs[0].type) == "f32[N,3]"
    assert graph.output_names == ["y"]


def test_symbols_keep_their_lower_bound() -> None:
    graph = Graph("g")
    n = symbol("N", 4)
    graph.set_outputs(
        {"x": graph.add_input("x", TensorType(DType.F32, (n, floordiv(n, 2), dim_max(n * n, 7))))}
    )
    again = parse_graph(print_graph(graph))
    assert again.inputs[0].type == graph.inputs[0].type


def _scaled(a: Scalar) -> Scalar:
    return (a * float("-inf") + 0.1).cast(DType.F16)


def _plus_one(a: Scalar) -> Scalar:
    return a + 1


def _attributes_graph() -> Graph:
    graph = Graph("attributes")
    n = symbol("N")
    x = graph.add_input("x", TensorType(DType.F32, (n, 4)))
    builder = Builder(graph.block, graph.facts)
    body = trace(_scaled, [DType.F32])
    maps = (IndexMap(2, (AxisMap(1, n - 1, -1), AxisMap(None, 2))),)
    region = builder.emit_typed(Region(body, (4, n), maps), [x], [TensorType(DType.F16, (4, n))])
    epilogue = WithEpilogue(registered_ops()["neg"](), 1, trace(_plus_one, [DType.F32]))
    fused = builder.emit_typed(epilogue, [x], [TensorType(DType.F32, (n, 4))])
    dims = builder.emit_one(DimTensor((n * 2 + 1, 3), (2,), DType.I32))
    data = builder.emit_one(Constant(Literal(np.array([[1.5, -0.0]], np.float16))))
    graph.set_outputs({"a": region.result, "b": fused.result, "c": dims, "d": data})
    return graph


def test_bodies_maps_nested_operators_and_literals_round_trip() -> None:
    graph = _attributes_graph()
    text = print_graph(graph)
    again = parse_graph(text)
    assert print_graph(again) == text
    assert [n.op for n in again.block] == [n.op for n in graph.block]


def test_states_round_trip() -> None:
    graph = Graph("stateful")
    x = graph.add_input("x", TensorType(DType.F32, (2,)))
    cache = graph.add_state("cache", TensorType(DType.F32, (2,)), np.array([1, 2], np.float32))
    new = Builder(graph.block, graph.facts).emit_one(registered_ops()["add"](), x, cache.value)
    cache.next = new
    graph.set_outputs({"y": new})
    verify(graph)
    again = parse_graph(print_graph(graph))
    verify(again)
    assert print_graph(again) == print_graph(graph)
    assert again.states[0].next is again.outputs[0]


@pytest.mark.parametrize("dtype", [d for d in DType if d not in (DType.I4, DType.U4)], ids=str)
@pytest.mark.parametrize("count", [0, 3, 40])
def test_arrays_round_trip_to_the_bit(dtype: DType, count: int) -> None:
    bits = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype is DType.BOOL:
        bits &= 1
    array = bits.view(dtype.numpy)
    again = parse_array(format_array(array))
    assert again is not None
    assert again.dtype == array.dtype
    assert again.tobytes() == array.tobytes()


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=8))
def test_short_float_arrays_round_trip_to_the_bit(values: list[float]) -> None:
    array = np.array(values, np.float32)
    again = parse_array(format_array(array))
    assert again is not None
    assert again.tobytes() == array.tobytes()


def test_elided_data_parses_for_params_only() -> None:
    text = print_graph(parse_graph(SMALL), elide_above=2)
    assert "dense<f32[3]: elided>" in text
    assert parse_graph(text).params["w"].data is None
    constant = (
        'graph { %c = constant() {data=literal dense<f32[9]: elided>} : f32[9] return %c as "y" }'
    )
    with pytest.raises(ParseError, match="left out"):
        parse_graph(constant)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph {\n  %y = nag(%x)\n}", r"line 2, column 12: %x is not defined"),
        (
            "graph {\n input %x: f32[2] %y = nag(%x)\n}",
            r"unknown operator 'nag'. Did you mean 'neg'",
        ),
        ("graph { input %x: f33[2] }", r"unknown dtype 'f33'"),
        ("graph { input %x: f32[2] input %x: f32[2] }", "defined twice"),
        ("graph { input %x: f32[2] %y = neg(%x) {axis=1} : f32[2] }", "neg: .*axis"),
        ("graph { input %x: f32[2", "unexpected character"),
        ("graph { input %x: f32[2]", "expected a node, symbol"),
        ("graph { input %x: f32[2] %a, %b = neg(%x) : f32[2] }", "has 1 results, 2 are named"),
        ("graph { input %x: f32[N+] }", "not an extent expression"),
        ('graph { input %x: f32[2] return %x as "a", %x as "a" }', "two outputs called 'a'"),
        ("graph { param %w: f32[2] = dense<f32[3]: 1.0, 2.0> }", "reshape"),
        ("graph { } more", "expected a end"),
    ],
)
def test_malformed_texts_say_where_and_what(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_graph(text)


def test_an_attribute_without_a_text_form_is_refused() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.F32, (2,)))
    cast = Cast(DType.F16, saturate=frozenset({1}))  # pyright: ignore[reportArgumentType]
    node = Builder(graph.block, graph.facts).emit_typed(cast, [x], [TensorType(DType.F16, (2,))])
    graph.set_outputs({"y": node.result})
    with pytest.raises(UsageError, match="no text form"):
        print_graph(graph)


def test_the_hash_ignores_names_and_bounds_but_not_constants() -> None:
    base = """graph "a" {
      symbol N <= 8
      input %x: f32[N]
      %c = constant() {data=literal dense<f32[]: 1.0>}
      %y = add(%x, %c)
      return %y as "y"
    }"""
    renamed = base.replace("%c", "%d").replace('"a"', '"b"').replace("<= 8", "<= 9")
    assert content_hash(parse_graph(base)) == content_hash(parse_graph(renamed))
    for old, new in (("1.0", "2.0"), ('"y"', '"z"'), ("f32[N]", "f32[M]")):
        assert content_hash(parse_graph(base)) != content_hash(parse_graph(base.replace(old, new)))


def test_the_hash_takes_params_by_type() -> None:
    text = 'graph { param %w: f32[1] = dense<f32[1]: 1.0> return %w as "y" }'
    assert content_hash(parse_graph(text)) == content_hash(parse_graph(text.replace("1.0", "2.0")))


def _sampled() -> list[Op]:
    found: dict[Op, None] = {}
    for cls in registered_ops().values():
        for sample in getattr(cls, "samples", ()):
            if not sample.error:
                found[cls(**sample.attributes)] = None
    return list(found)


@pytest.mark.parametrize("op", _sampled(), ids=repr)
def test_the_attributes_of_every_operator_round_trip(op: Op) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.F32, (2,)))
    node = Builder(graph.block, graph.facts).emit_typed(op, [x], [x.type])
    graph.set_outputs({"y": node.result})
    again = parse_graph(print_graph(graph)).block.nodes()[0].op
    assert again == op
    assert repr(again) == repr(op)
