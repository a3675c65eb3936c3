# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

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
