# SPDX-License-Identifier: Apache-2.0
"""Rows are written where the position says, and nowhere else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.spec import building
from rlx.ops.state import WriteRows, write_rows


def _expected(x: Any, rows: Any, position: Any, axis: int, *, ring: bool) -> Any:
    """One row after the other, as a user would write it by hand."""
    out = x.copy()
    capacity, count = x.shape[axis], rows.shape[axis]
    for place in np.ndindex(*x.shape[:axis]):
        start = int(position if np.ndim(position) == 0 else position[place[0]])
        for i in range(count):
            at = (start + i) % capacity if ring or start < 0 else start + i
            out[(*place, at)] = rows[(*place, i)]
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.bool_])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis", "count", "position"),
    [
        ((5,), 0, 2, 3),
        ((5, 3), 0, 1, -1),
        ((2, 6, 4), 1, 1, [0, 5]),
        ((2, 6, 4), 1, 2, [-2, 4]),
        ((2, 3, 7, 2), 2, 3, [4, 1]),
        ((2, 3, 4), 2, 4, 0),
        ((2, 3, 4), 1, 0, 99),
    ],
)
def test_rows_land_at_their_positions(
    shape: tuple[int, ...], axis: int, count: int, position: Any, ring: bool, dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, shape).astype(dtype)
    rows = rng.integers(-9, 9, (*shape[:axis], count, *shape[axis + 1 :])).astype(dtype)
    at = np.array(position)
    (found,) = run_op(WriteRows(axis, ring), [x, rows, at])
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, _expected(x, rows, at, axis, ring=ring))


@pytest.mark.parametrize("position", [0, 4, 5, 12, 1_000_000_007, -1, -13])
@pytest.mark.parametrize("count", [1, 4, 5, 13])
def test_a_ring_takes_any_position_and_keeps_the_last_rows(position: int, count: int) -> None:
    x, rows = np.full((5, 2), -1.0, np.float32), np.arange(2.0 * count, dtype=np.float32)
    rows = rows.reshape(count, 2)
    (found,) = run_op(WriteRows(0, ring=True), [x, rows, np.array(position)])
    np.testing.assert_array_equal(found, _expected(x, rows, position, 0, ring=True))


@pytest.mark.parametrize("position", [4, 5, -1, -6, 1 << 62, -(1 << 62)])
def test_rows_that_do_not_fit_are_an_error(position: int) -> None:
    x, rows = np.zeros((2, 5, 3), np.float32), np.ones((2, 2, 3), np.float32)
    with pytest.raises(ExecutionError, match=rf"position {position} of entry 1 .* 2 rows .* 5"):
        run_op(WriteRows(1), [x, rows, np.array([0, position])])


def test_a_ring_of_no_rows_takes_none() -> None:
    x, rows = np.zeros((0, 3), np.float32), np.ones((1, 3), np.float32)
    with pytest.raises(ExecutionError, match="no room"):
        run_op(WriteRows(0, ring=True), [x, rows, np.array(0)])


@pytest.mark.parametrize(
    ("rows", "position", "axis", "message"),
    [
        ("f16[2,1,4]", "i64[]", 1, "dtype and the rank"),
        ("f32[2,4]", "i64[]", 1, "dtype and the rank"),
        ("f32[2,1,3]", "i64[]", 1, "axis 2 of the rows"),
        ("f32[2,7,4]", "i64[]", 1, "more than axis 1"),
        ("f32[2,1,4]", "i16[]", 1, "i32 or i64"),
        ("f32[2,1,4]", "i64[2,1]", 1, "i32 or i64"),
        ("f32[2,1,4]", "i64[3]", 1, "positions per entry"),
        ("f32[1,6,4]", "i64[2]", 0, "the axis of rows"),
        ("f32[2,1,4]", "i64[]", 3, "axis 3 is out of range"),
    ],
)
def test_types_that_do_not_fit_are_refused(
    rows: str, position: str, axis: int, message: str
) -> None:
    with pytest.raises(TypeRuleError, match=message):
        WriteRows(axis).infer(TensorType(DType.F32, (2, 6, 4)), _type(rows), _type(position))


def _type(text: str) -> TensorType:
    dtype, _, shape = text.rstrip("]").partition("[")
    return TensorType(DType.of(dtype), tuple(int(d) for d in shape.split(",") if d))


def test_positions_are_whole_numbers() -> None:
    builder = Builder((graph := Graph()).block, graph.facts)
    with building(builder):
        x = graph.add_input("x", TensorType(DType.F32, (4, 2)))
        row = graph.add_input("row", TensorType(DType.F32, (1, 2)))
        write_rows(x, row, np.int64(1))  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            TypeRuleError, match=r"write_rows takes values of a graph, found float 1\.5"
        ):
            write_rows(x, row, 1.5)  # pyright: ignore[reportArgumentType]


def test_a_single_row_may_lack_its_axis() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.F32, (2, 3, 4)))
    row = graph.add_input("row", TensorType(DType.F32, (2, 4)))
    at = graph.add_input("at", TensorType(DType.I32, (2,)))
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": write_rows(x, row, at, 1)})
    data = np.zeros((2, 3, 4), np.float32)
    new = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = evaluate(graph, {"x": data, "row": new, "at": np.array([2, 0], np.int32)})["y"]
    data[0, 2], data[1, 0] = new
    np.testing.assert_array_equal(found, data)


def test_the_evaluator_carries_states_from_run_to_run_and_only_from_good_ones() -> None:
    graph = Graph("g")
    row = graph.add_input("row", TensorType(DType.F32, (1,)))
    at = graph.add_input("at", TensorType(DType.I64, ()))
    state = graph.add_state("buffer", TensorType(DType.F32, (3,)), np.array(7, np.float32))
    with building(Builder(graph.block, graph.facts)):
        state.next = write_rows(state.value, row, at)
    graph.set_outputs({"old": state.value})
    kept: dict[str, Any] = {}
    one = np.ones(1, np.float32)
    assert evaluate(graph, {"row": one, "at": np.array(1)}, states=kept)["old"].tolist() == [7] * 3
    assert evaluate(graph, {"row": one, "at": np.array(0)}, states=kept)["old"].tolist() == [
        7,
        1,
        7,
    ]
    with pytest.raises(ExecutionError):
        evaluate(graph, {"row": one, "at": np.array(3)}, states=kept)
    assert kept["buffer"].tolist() == [1, 1, 7]
    assert evaluate(graph, {"row": one, "at": np.array(0)})["old"].tolist() == [7] * 3
