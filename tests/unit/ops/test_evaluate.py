# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlx.base.diagnostics import Location
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, PassError, TypeRuleError, UsageError
from rlx.base.facts import Facts
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Block, Graph, Value
from rlx.ir.op import Op
from rlx.ops import elementwise as ew
from rlx.ops import movement as mv
from rlx.ops.control import If, Loop, Scan
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.leaf import constant
from rlx.ops.spec import building

N = symbol("N")
F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL


def f32(*shape: Dim) -> TensorType:
    return TensorType(F32, shape)


def region(types: list[TensorType], function: Callable[..., Sequence[Value]]) -> Block:
    block = Block()
    values = [block.add_parameter(t) for t in types]
    with building(Builder(block, Facts())):
        block.results = list(function(*values))
    return block


def graph_of(types: dict[str, TensorType], function: Callable[..., Sequence[Value]]) -> Graph:
    graph = Graph()
    values = [graph.add_input(n, t) for n, t in types.items()]
    builder = Builder(graph.block, graph.facts)
    with building(builder):
        found = function(builder, *values)
    graph.set_outputs({f"y{i}": v for i, v in enumerate(found)})
    return graph


def test_extents_come_from_the_inputs() -> None:
    def tiled(_: Builder, x: Value) -> list[Value]:
        return [mv.tile(x, (N, 1))]

    graph = graph_of({"x": f32(N, 3)}, tiled)
    assert evaluate(graph, {"x": np.ones((2, 3), np.float32)})["y0"].shape == (4, 3)
    assert evaluate(graph, {"x": np.ones((3, 3), np.float32)})["y0"].shape == (9, 3)


def test_inputs_are_checked() -> None:
    def both(_: Builder, x: Value, w: Value) -> list[Value]:
        return [x, w]

    graph = graph_of({"x": f32(N, 3), "w": f32(N)}, both)
    good = {"x": np.ones((2, 3), np.float32), "w": np.ones(2, np.float32)}
    assert list(evaluate(graph, good)) == ["y0", "y1"]
    for change, text in (
        ({"x": np.ones((2, 4), np.float32)}, "input 'x'"),
        ({"x": np.ones((2, 3), np.float64)}, "f64"),
        ({"w": np.ones(3, np.float32)}, "N is 2"),
    ):
        with pytest.raises(UsageError, match=text):
            evaluate(graph, {**good, **change})
    with pytest.raises(UsageError, match="'w' is missing"):
        evaluate(graph, {"x": good["x"]})


def test_guards_are_checked() -> None:
    graph = Graph()
    graph.facts.hints = {"N": 2, "M": 2}
    x, y = graph.add_input("x", f32(N)), graph.add_input("y", f32(symbol("M")))
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"z": ew.add(x, y)})
    two, one = np.ones(2, np.float32), np.ones(1, np.float32)
    assert evaluate(graph, {"x": two, "y": two})["z"].tolist() == [2, 2]
    with pytest.raises(UsageError, match="assumption"):
        evaluate(graph, {"x": two, "y": one})


def test_params_and_observer() -> None:
    graph = Graph()
    x = graph.add_input("x", f32(2))
    w = graph.add_param("w", np.array([1, 2], np.float32), f32(2))
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": ew.neg(ew.mul(x, w))})
    seen: list[str] = []
    one = np.ones(2, np.float32)
    found = evaluate(graph, {"x": one}, observe=lambda node, _: seen.append(node.op.name))
    assert found["y"].tolist() == [-1, -2]
    assert seen == ["mul", "neg"]
    assert evaluate(graph, {"x": one}, {"w": one})["y"].tolist() == [-1, -1]


def test_every_result_is_rounded_to_its_dtype() -> None:
    def plus_one_minus_x(_: Builder, x: Value) -> list[Value]:
        return [ew.sub(ew.add(x, constant(1.0, DType.F16)), x)]

    graph = graph_of({"x": TensorType(DType.F16, (1,))}, plus_one_minus_x)
    x = np.array([2048], np.float16)
    assert evaluate(graph, {"x": x})["y0"][0] == 0  # 2049 rounds to 2048
    assert evaluate(graph, {"x": x})["y0"].dtype == np.float16


def test_exact_computes_each_operator_in_f64() -> None:
    x = np.array([0.1, 0.7], np.float32)
    (exact,) = run_op(ew.silu.op(), [x], exact=True)
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(exact, (wide / (1 + np.exp(-wide))).astype(np.float32))


def test_errors_name_the_node() -> None:
    def function(builder: Builder, a: Any, b: Any) -> list[Any]:
        with builder.at(Location("/model/Div_3")):
            return [ew.div(a, b)]

    graph = graph_of({"a": TensorType(I64, (2,)), "b": TensorType(I64, (2,))}, function)
    with pytest.raises(
        ExecutionError, match="div at node '/model/Div_3': integer division by zero"
    ):
        evaluate(graph, {"a": np.array([1, 2]), "b": np.array([1, 0])})


@dataclass(frozen=True)
class _Lies(Op):
    """Says one shape and gives another."""

    name = "lies"
    operands = ("x",)

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Any) -> Any:
        return x[:1]


def test_results_are_checked_against_the_type_rule() -> None:
    with pytest.raises(PassError, match=r"lies gave f32\[1\], its type rule says f32\[2\]"):
        run_op(_Lies(), [np.ones(2, np.float32)])


def _itself(x: Value) -> list[Value]:
    return [x]


def _whole(x: Value) -> list[Value]:
    return [ew.cast(x, I64)]


def _six_over(x: Value) -> list[Value]:
    return [ew.div(constant(np.array([6])), x)]


def test_if_runs_one_branch() -> None:
    whole = TensorType(I64, (1,))
    branches = (
        region([whole], _six_over),
        region([whole], _itself),
    )

    def function(builder: Builder, flag: Any, x: Any) -> Any:
        return builder.emit(If(), flag, x, regions=branches)

    graph = graph_of({"flag": TensorType(BOOL, ()), "x": whole}, function)
    assert evaluate(graph, {"flag": np.array(True), "x": np.array([3])})["y0"].tolist() == [2]
    assert evaluate(graph, {"flag": np.array(False), "x": np.array([0])})["y0"].tolist() == [0]


def test_if_needs_equal_branches() -> None:
    branches = (region([f32(2)], _itself), region([f32(2)], _whole))
    with pytest.raises(TypeRuleError, match="result 0"):
        If().infer(TensorType(BOOL, ()), f32(2), regions=branches)


def _counting(iteration: Any, condition: Any, c: Any) -> list[Any]:
    return [condition, ew.add(c, constant(np.array(1))), c, iteration]


def test_loop_stacks_what_each_iteration_gives() -> None:
    scalar = TensorType(I64, ())
    body = region([scalar, TensorType(BOOL, ()), scalar], _counting)

    def function(builder: Builder, trip: Any, c: Any) -> Any:
        return builder.emit(Loop(1, 3), trip, None, c, regions=(body,))

    graph = graph_of({"trip": scalar, "c": scalar}, function)
    found = evaluate(graph, {"trip": np.array(3), "c": np.array(10)})
    assert [found[f"y{i}"].tolist() for i in range(3)] == [13, [10, 11, 12], [0, 1, 2]]
    with pytest.raises(ExecutionError, match="after 2 iterations, 3 were expected"):
        evaluate(graph, {"trip": np.array(2), "c": np.array(10)})
    with pytest.raises(TypeRuleError, match="stacked"):
        Loop(1).infer(scalar, None, scalar, regions=(body,))


def test_loop_ends_by_its_condition() -> None:
    scalar = TensorType(I64, ())

    def body(_: Any, __: Any, c: Any, limit: Any) -> list[Any]:
        following = ew.mul(c, constant(np.array(2)))
        return [ew.less(following, limit), following]

    block = region([scalar, TensorType(BOOL, ()), scalar, scalar], body)

    def function(builder: Builder, c: Any, limit: Any) -> Any:
        return builder.emit(Loop(1), None, None, c, limit, regions=(block,))

    graph = graph_of({"c": scalar, "limit": scalar}, function)
    assert evaluate(graph, {"c": np.array(1), "limit": np.array(100)})["y0"] == 128


def test_scan_carries_and_stacks() -> None:
    def body(total: Any, x: Any, scale: Any) -> list[Any]:
        following = ew.add(total, ew.mul(x, scale))
        return [following, following]

    block = region([f32(2), f32(2), f32()], body)

    def function(builder: Builder, start: Any, x: Any, scale: Any) -> Any:
        return builder.emit(Scan(N, 1, 1), start, x, scale, regions=(block,))

    graph = graph_of({"start": f32(2), "x": f32(N, 2), "scale": f32()}, function)
    assert graph.outputs[1].type == f32(N, 2)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    feed = {"start": np.zeros(2, np.float32), "scale": np.array(2, np.float32)}
    found = evaluate(graph, {**feed, "x": x})
    np.testing.assert_array_equal(found["y1"], np.cumsum(2 * x, 0))
    np.testing.assert_array_equal(found["y0"], 2 * x.sum(0))
    empty = evaluate(graph, {**feed, "x": x[:0]})
    assert empty["y1"].shape == (0, 2)
    assert empty["y0"].tolist() == [0, 0]
