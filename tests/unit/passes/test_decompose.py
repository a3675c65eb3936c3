# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlx.backends.cpu.claims import cpu_claims
from rlx.backends.cpu.isa import host_isa
from rlx.backends.cpu.passes import cpu_passes
from rlx.base.dtypes import DType
from rlx.base.target import Claims
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ir.op import Op
from rlx.ir.verify import verify
from rlx.ops.elementwise import exp, mul
from rlx.ops.reduce import Reduce
from rlx.ops.spec import emit_one
from rlx.passes.decompose import Decompose
from rlx.passes.manager import PassContext, Pipeline


@dataclass(frozen=True)
class _Outer(Op):
    name = "test_outer"  # not registered: other tests look at all registered operators
    operands = ("x",)

    def infer(self, x: TensorType) -> TensorType:
        return x

    def decompose(self, x: Value) -> Value:
        return emit_one(_Inner(), exp(x))


@dataclass(frozen=True)
class _Inner(Op):
    name = "test_inner"
    operands = ("x",)

    def infer(self, x: TensorType) -> TensorType:
        return x

    def decompose(self, x: Value) -> Value:
        return mul(x, x)


def _graph() -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.F32, (2,)))
    graph.set_outputs({"y": Builder(graph.block, graph.facts).emit_one(_Outer(), x)})
    return graph


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ({"exp", "mul"}, ["exp", "mul"]),
        ({"exp", "test_inner"}, ["exp", "test_inner"]),
        ({"test_outer"}, ["test_outer"]),
        ((), ["test_outer"]),
    ],
)
def test_what_the_target_does_not_claim_is_expanded_repeatedly(
    ops: set[str], expected: list[str]
) -> None:
    graph = _graph()
    Decompose().run(graph, PassContext(claims=Claims(ops=frozenset(ops))))
    verify(graph)
    assert [n.op.name for n in graph.block] == expected


def test_the_cpus_own_passes_leave_reductions_the_axes_that_layouts_gave_them() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.F32, (2, 3, 50)))
    graph.set_outputs({"y": Builder(graph.block, graph.facts).emit_one(Reduce("sum", (1,)), x)})
    Pipeline(tuple(cpu_passes(host_isa()))).run(graph, PassContext(claims=cpu_claims(host_isa())))
    assert [n.op.name for n in graph.block] == ["reduce"]
