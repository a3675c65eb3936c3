# SPDX-License-Identifier: Apache-2.0
"""Operators computed in wider dtypes, and limits of what a backend takes."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.base.target import Claims, Limit
from rlx.base.types import TensorType
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.passes.decompose import Decompose
from rlx.passes.manager import PassContext
from rlx.passes.widen import Widen

_LIMIT = Limit(frozenset({DType.F32}), ((DType.F16, DType.F32), (DType.I8, DType.I32)), rank=2)
_CLAIMS = Claims(
    ops=frozenset({"matmul", "cast", "reshape", "constant"}), limits=(("matmul", _LIMIT),)
)
_TEXT = """graph {{
  input %a: {0}[3,4]
  input %b: {0}[4,5]
  %y = matmul(%a, %b)
  return %y as "y"
}}"""


def _graph(dtype: str) -> Graph:
    return parse_graph(_TEXT.format(dtype))


def _names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.block]


@pytest.mark.parametrize(("dtype", "wide"), [("f16", DType.F32), ("i8", DType.I32)])
def test_narrow_operands_are_computed_in_the_wider_dtype(dtype: str, wide: DType) -> None:
    graph = _graph(dtype)
    assert Widen().run(graph, PassContext(claims=_CLAIMS))
    verify(graph)
    assert _names(graph) == ["cast", "cast", "matmul", "cast"]
    product = graph.block.nodes()[2]
    assert product.result.type.dtype is wide
    assert graph.outputs[0].type == TensorType(DType.of(dtype), (3, 5))
    rng = np.random.default_rng(0)
    given = {
        n: (rng.standard_normal(s) * 50).astype(DType.of(dtype).numpy)
        for n, s in (("a", (3, 4)), ("b", (4, 5)))
    }
    want = evaluate(_graph(dtype), given)["y"]
    assert evaluate(graph, given)["y"].tobytes() == want.tobytes()
    assert not Widen().run(graph, PassContext(claims=_CLAIMS))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_what_is_taken_or_has_no_wider_dtype_stays(dtype: str) -> None:
    graph = _graph(dtype)
    assert not Widen().run(graph, PassContext(claims=_CLAIMS))
    assert not Widen().run(graph, PassContext())
    assert _names(graph) == ["matmul"]


def test_a_limit_names_dtypes_and_ranks() -> None:
    matrix, row = TensorType(DType.F32, (2, 3)), TensorType(DType.F32, (3,))
    assert _LIMIT.takes([matrix, None, matrix])
    assert not _LIMIT.takes([matrix, row])
    assert not _LIMIT.takes([matrix.with_dtype(DType.F64), matrix])
    assert _LIMIT.wider_than(DType.I8) is DType.I32
    assert _LIMIT.wider_than(DType.F64) is None
    assert Claims().limit_of("matmul") is None


def test_operands_beyond_the_limit_are_decomposed() -> None:
    text = _TEXT.format("f32").replace("b: f32[4,5]", "b: f32[4]")
    graph = parse_graph(text)
    Decompose().run(graph, PassContext(claims=_CLAIMS))
    verify(graph)
    assert _names(graph) == ["reshape", "matmul", "reshape"]
