# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.ops.elementwise import exp


def test_names_are_unique() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [2])
        g.param("w", np.ones(2, np.float32))
        g.output("y", x)
        for again in (
            lambda: g.input("x", [3]),
            lambda: g.input("w", [3]),
            lambda: g.param("x", [1.0]),
        ):
            with pytest.raises(rlx.UsageError, match="already"):
                again()
        with pytest.raises(rlx.UsageError, match="output 'y' already"):
            g.output("y", x)


def test_operators_outside_of_a_graph_say_what_to_do() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [2])
    with pytest.raises(rlx.TypeRuleError, match=r"with rlx\.Graph"):
        exp(x)


def test_errors_name_the_line_that_called_the_operator() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [2])
        y = exp(x)
        with pytest.raises(rlx.TypeRuleError, match="extents 2 and 3"):
            _ = x + g.input("z", [3])
    assert y.producer is not None
    assert "test_graph.py" in str(y.producer.location)


def test_python_numbers_take_the_dtype_of_the_value_beside_them() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [2], "i32")
        g.output("y", 2 * x + 1)
    np.testing.assert_array_equal(rlx.compile(g, "reference")(np.array([1, 2], np.int32)), [3, 5])


@pytest.mark.parametrize(
    "shape",
    [[-1], [2.5], [None], [True], "ab", 5, [b"n"], [["a"]], ["n m"], [""], ["min"], ["lambda"]],
)
def test_shapes_that_are_none(shape: Any) -> None:
    with rlx.Graph() as g, pytest.raises(rlx.UsageError, match=r"extent"):
        g.input("x", shape)


def test_what_is_no_name_dtype_weight_or_output() -> None:
    odd: Any
    with rlx.Graph() as g:
        x = g.input("x", [2])
        for odd in ("", None, 5):
            with pytest.raises(rlx.UsageError, match="a name is a text"):
                g.input(odd, [2])
            with pytest.raises(rlx.UsageError, match="a name is a text"):
                g.param(odd, [1.0])
            with pytest.raises(rlx.UsageError, match="a name is a text"):
                g.output(odd, x)
        with pytest.raises(rlx.UsageError, match="'z' has no dtype"):
            g.input("z", [2], None)
        with pytest.raises(rlx.UsageError, match="'w' got a list that gives no array"):
            g.param("w", [[1], [1, 2]])
        with pytest.raises(rlx.UsageError, match="'w' got a masked array"):
            g.param("w", np.ma.masked_array([1.0, 2.0], mask=[False, True]))
        odd = ["n"]
        with pytest.raises(rlx.UsageError, match=r"'w' has a symbolic extent"):
            g.param("w", shape=odd)
        for odd in (3, np.ones(2, np.float32)):
            with pytest.raises(rlx.UsageError, match=r"output 'y' is a .*, not a value"):
                g.output("y", odd)
        with pytest.raises(rlx.UsageError, match="is being built already"), g:
            pass
        g.output("y", x + 1)
    np.testing.assert_array_equal(rlx.compile(g, "reference")(np.ones(2, np.float32)), [2, 2])


def test_values_of_another_graph_are_refused_where_they_are_used() -> None:
    with rlx.Graph() as other:
        strange = exp(other.input("x", [3]))
    with rlx.Graph() as g:
        x = g.input("x", [3])
        with pytest.raises(rlx.UsageError, match=r"operand 1 of add is f32.*of another graph"):
            _ = x + strange
        with pytest.raises(rlx.UsageError, match=r"output 'y' is f32.*of another graph"):
            g.output("y", strange)


def test_weights_in_another_byte_order_and_layout() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = np.ones((2, 3), np.float32)
    for weight in (data.astype(">f4"), np.asfortranarray(data), data[::-1][::-1]):
        with rlx.Graph() as g:
            g.output("y", g.input("x", [2, 3]) * g.param("w", weight))
        for device in ("reference", "cpu"):
            run = rlx.compile(g, device)
            np.testing.assert_array_equal(run(x), data)
            np.testing.assert_array_equal(run.get_param("w"), data)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("u8", -1),
        ("u8", 256),
        ("i32", 2**40),
        ("i64", 2**70),
        ("i32", 1.5),
        ("f32", 1e300),
        ("f16", 10**6),
        ("f32", 10**400),
        ("bool", 2),
    ],
)
def test_numbers_that_a_dtype_does_not_hold(dtype: str, number: Any) -> None:
    with rlx.Graph() as g:
        x = g.input("x", [2], dtype)
        with pytest.raises(rlx.TypeRuleError, match=r"is no .*; cast the tensor first"):
            _ = x * number


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("u8", 255), ("i32", 2.0), ("f32", 2**24 + 1), ("f32", 0.1), ("f16", 65504)],
)
def test_numbers_round_to_floats_only(dtype: str, number: Any) -> None:
    with rlx.Graph() as g:
        x = g.input("x", [1], dtype)
        g.output("y", x * number)
    one = np.ones(1, x.type.dtype.numpy)
    found = rlx.compile(g, "reference")(one)
    np.testing.assert_array_equal(found, np.asarray(number).astype(one.dtype) * one)


def test_indices_that_are_none() -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 3])
        for odd in (slice(None, None, 0), 1.5, [0, 1], (0, 0, 0)):
            with pytest.raises(rlx.TypeRuleError, match="does not index"):
                _ = x[odd]
