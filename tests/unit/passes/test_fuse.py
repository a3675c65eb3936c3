# SPDX-License-Identifier: Apache-2.0
"""Regions and epilogues: what merges, what stays and why, with equal results."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.numeric import Array
from rlx.base.target import Claims
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.ops.region import Region, WithEpilogue
from rlx.passes.fuse import FormRegions, FuseEpilogues, FuseRegions
from rlx.passes.manager import PassContext

_CLAIMS = Claims(ops=frozenset({"region", "matmul"}), epilogue_anchors=frozenset({"matmul"}))


def _fused(body: str, *, rows: bool = True, epilogues: bool = False) -> tuple[Graph, list[str]]:
    """Return the graph after fusion, whose results are those from before, and the report."""
    plain, graph = parse_graph(body), parse_graph(body)
    context = PassContext(claims=_CLAIMS)
    FormRegions().run(graph, context)
    FuseRegions(rows=False).run(graph, context)
    if epilogues:
        FuseEpilogues().run(graph, context)
    if rows:
        FuseRegions().run(graph, context)
    verify(graph)
    inputs = {v.name: _numbers([int(str(d)) for d in v.type.shape]) for v in plain.inputs}
    want, got = evaluate(plain, inputs), evaluate(graph, inputs)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)
    return graph, context.report


def _numbers(shape: list[int]) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _ops(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.block if n.op.name != "constant"]


def test_a_chain_becomes_one_region() -> None:
    graph, _ = _fused("""graph {
      input %x: f32[3,4]
      input %b: f32[4]
      %a = exp(%x)
      %c = add(%a, %b)
      %y = tanh(%c)
      return %y as "y"
    }""")
    (node,) = graph.block.nodes()
    assert isinstance(node.op, Region)
    assert [i.op for i in node.op.body.instrs] == ["exp", "add", "tanh"]
    assert [o.name for o in node.operands if o is not None] == ["x", "b"]


def test_a_value_that_is_also_a_result_becomes_a_second_result() -> None:
    graph, _ = _fused("""graph {
      input %x: f32[3,4]
      %a = exp(%x)
      %y = tanh(%a)
      return %y as "y", %a as "a"
    }""")
    (node,) = graph.block.nodes()
    assert len(node.results) == 2


def test_an_operand_is_read_once() -> None:
    graph, _ = _fused("""graph {
      input %x: f32[3,4]
      %a = exp(%x)
      %b = tanh(%x)
      %y = add(%a, %b)
      return %y as "y"
    }""")
    (node,) = graph.block.nodes()
    assert len(node.operands) == 1


def test_what_is_costly_is_not_computed_again_per_element() -> None:
    graph, report = _fused("""graph {
      input %x: f32[4]
      input %z: f32[3,4]
      %a = exp(%x)
      %y = add(%a, %z)
      return %y as "y"
    }""")
    assert _ops(graph) == ["region", "region"]
    assert any("costs too much" in line for line in report)
    cheap, _ = _fused("""graph {
      input %x: f32[4]
      input %z: f32[3,4]
      %a = neg(%x)
      %y = add(%a, %z)
      return %y as "y"
    }""")
    assert _ops(cheap) == ["region"]


def test_movement_becomes_an_index_map() -> None:
    graph, _ = _fused("""graph {
      input %x: f32[3,4]
      %s = slice(%x) {starts=(1, 0), sizes=(2, 4), steps=(1, 1)}
      %y = exp(%s)
      return %y as "y"
    }""")
    (node,) = graph.block.nodes()
    assert isinstance(node.op, Region)
    assert node.op.map_of(0) is not None


def test_softmax_and_its_neighbours_are_one_row_region() -> None:
    body = """graph {
      input %x: f32[3,8]
      input %m: f32[8]
      %a = add(%x, %m)
      %p = softmax(%a) {axis=1}
      %y = neg(%p)
      return %y as "y"
    }"""
    graph, _ = _fused(body)
    (node,) = graph.block.nodes()
    assert isinstance(node.op, Region)
    assert node.op.row_axes == 1
    apart, report = _fused(body, rows=False)
    assert len(_ops(apart)) > 1
    assert any("row regions merge after epilogues" in line for line in report)


def test_regions_are_bounded() -> None:
    steps = "\n".join(f"%v{i + 1} = tanh(%v{i})" for i in range(60))
    graph, report = _fused(f"""graph {{
      input %v0: f32[5]
      {steps}
      return %v60 as "y"
    }}""")
    sizes = [len(n.op.body.instrs) for n in graph.block if isinstance(n.op, Region)]
    assert sum(sizes) == 60
    assert 3 <= len(sizes) <= 4
    assert max(sizes) <= 24
    assert any("more than 24 instructions" in line for line in report)


_PRODUCT = """graph {{
  input %a: f32[5,4]
  input %b: f32[4,6]
  input %e: f32[{extra}]
  %p = matmul(%a, %b)
  %s = add(%p, %e)
  %y = relu(%s)
  return %y as "y"{more}
}}"""


@pytest.mark.parametrize("extra", ["6", "1,6", "5,6", "5,1", "", "1,1"])
def test_an_anchor_takes_its_chain(extra: str) -> None:
    graph, _ = _fused(_PRODUCT.format(extra=extra, more=""), epilogues=True)
    (node,) = graph.block.nodes()
    assert isinstance(node.op, WithEpilogue)
    assert node.op.anchor.name == "matmul"
    assert node.op.anchor_operands == 2


def test_an_anchor_with_other_readers_keeps_its_result() -> None:
    text = _PRODUCT.format(extra="6", more=', %p as "p"')
    graph, report = _fused(text, epilogues=True)
    assert _ops(graph) == ["matmul", "region"]
    assert any("has other readers" in line for line in report)


def test_a_broadcast_product_takes_no_epilogue() -> None:
    graph, report = _fused(
        """graph {
      input %a: f32[5,4]
      input %b: f32[4,6]
      input %e: f32[3,5,6]
      %p = matmul(%a, %b)
      %y = add(%p, %e)
      return %y as "y"
    }""",
        epilogues=True,
    )
    assert _ops(graph) == ["matmul", "region"]
    assert any("moved or broadcast" in line for line in report)


def test_what_may_fail_stays_a_node_of_its_own() -> None:
    graph = parse_graph("""graph {
      input %a: i32[3,4]
      input %b: i32[4,5]
      input %c: i32[5]
      %p = matmul(%a, %b)
      %y = div(%p, %c)
      return %y as "y"
    }""")
    context = PassContext(claims=_CLAIMS)
    FormRegions().run(graph, context)
    FuseEpilogues().run(graph, context)
    assert _ops(graph) == ["matmul", "region"]
    assert any("may fail" in line for line in context.report)


def test_a_square_takes_the_product_once() -> None:
    graph, _ = _fused(
        """graph {
      input %a: f32[5,4]
      input %b: f32[4,6]
      %p = matmul(%a, %b)
      %y = mul(%p, %p)
      return %y as "y"
    }""",
        epilogues=True,
    )
    assert _ops(graph) == ["with_epilogue"]


def test_an_operator_with_a_kernel_stays() -> None:
    graph = parse_graph("""graph {
      input %x: f32[3]
      %y = exp(%x)
      return %y as "y"
    }""")
    claims = Claims(ops=frozenset({"region", "exp"}), kernels=frozenset({"exp"}))
    assert not FormRegions().run(graph, PassContext(claims=claims))
    assert _ops(graph) == ["exp"]


def test_a_value_of_the_outer_block_is_not_merged_into_a_branch() -> None:
    text = """graph {
      input %c: bool[]
      input %x: f32[3]
      %e = exp(%x)
      %y = if(%c, %e) {
        region(%a: f32[3]) {
          %t = tanh(%a)
          %n = neg(%t)
          return %n
        }
        region(%a: f32[3]) {
          %n = neg(%a)
          return %n
        }
      }
      return %y as "y"
    }"""
    graph, context = parse_graph(text), PassContext(claims=_CLAIMS)
    FormRegions().run(graph, context)
    FuseRegions().run(graph, context)
    verify(graph)
    branch = next(n for n in graph.block if n.regions)
    assert [len(r.nodes()) for r in branch.regions] == [1, 1]
    x = np.array([1, -2, 0.5], np.float32)
    for taken in (True, False):
        inputs = {"c": np.array(taken), "x": x}
        want = evaluate(parse_graph(text), inputs)["y"]
        assert evaluate(graph, inputs)["y"].tobytes() == want.tobytes()


_NAMED = """graph {
  input %x: f32[3,4]
  input %w: f32[4,5]
  %p = matmul(%x, %w) @ "product"
  %a = exp(%p) @ "first"
  %c = tanh(%a) @ "" "model.py:7"
  %d = sigmoid(%c) @ "last"
  return %d as "y"
}"""


@pytest.mark.parametrize("epilogues", [False, True])
def test_a_fused_node_names_everything_it_does_and_keeps_the_name_of_its_value(
    epilogues: bool,
) -> None:
    graph, _ = _fused(_NAMED, epilogues=epilogues)
    node = graph.block.last
    assert node is not None
    own, rest = ("product", "last first") if epilogues else ("last", "first")
    assert node.location.name == own
    assert sorted(node.location.parts) == sorted(["model.py:7", *rest.split()])
    assert node.result.name == "d"
