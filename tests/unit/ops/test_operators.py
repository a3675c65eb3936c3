# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import rlx.ops
from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate
from rlx.ops.spec import building

X = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
N = symbol("N")
_IDS = itertools.count()

# Written once, run on an ndarray and on a Value: nothing but Any says both.
Function = Callable[[Any], Any]


def apply(function: Function, x: Any = X, shape: Any = None) -> Any:
    graph = Graph()
    value = graph.add_input("x", TensorType(DType.of(x.dtype), x.shape if shape is None else shape))
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": function(value)})
    return evaluate(graph, {"x": x})["y"]


_LIKE_NUMPY: list[Function] = [
    lambda x: x * 2 + 1,
    lambda x: 1 - x / 4,
    lambda x: 2 / x,
    lambda x: -x,
    abs,
    lambda x: x**2,
    lambda x: x % 2,
    lambda x: x < 1,
    lambda x: x >= np.float32(3),
    lambda x: np.float32(1) <= x.reshape(3, 2),
    lambda x: x + np.ones((2, 1), np.float32),
    lambda x: (x > 0) & ~(x > 3),
    lambda x: x[0],
    lambda x: x[:, 1:],
    lambda x: x[..., -1],
    lambda x: x[::-1, ::2],
    lambda x: x[None, 1, :-1],
    lambda x: x[5:],
    lambda x: x.reshape(3, 2),
    lambda x: x.transpose(1, 0),
]


@pytest.mark.parametrize("function", _LIKE_NUMPY, ids=lambda _: f"case{next(_IDS)}")
def test_the_same_as_numpy(function: Function) -> None:
    want = np.asarray(function(X))
    found = apply(function)
    np.testing.assert_array_equal(found, want)
    assert found.dtype == want.dtype
    assert found.shape == want.shape


def test_slices_of_symbolic_extents() -> None:
    functions: list[Function] = [
        lambda x: x[1:],
        lambda x: x[:-1],
        lambda x: x[::2],
        lambda x: x[::-1],
        lambda x: x[-1],
    ]
    for function in functions:
        np.testing.assert_array_equal(apply(function, X, (N, 3)), function(X))


def test_extents_as_operands() -> None:
    np.testing.assert_array_equal(apply(lambda x: x / x.shape[0], X, (N, 3)), X / 2)


def test_integer_tensors_refuse_fractions() -> None:
    whole = np.array([1, 2])
    assert apply(lambda x: x * 2, whole).tolist() == [2, 4]
    with pytest.raises(TypeRuleError, match=r"0.5 is no i64"):
        apply(lambda x: x * 0.5, whole)


def test_equality_is_identity_and_elements_compare_by_method() -> None:
    graph = Graph()
    x, y = (graph.add_input(n, TensorType(DType.F32, (2,))) for n in "xy")
    assert x == x  # noqa: PLR0124
    assert x != y
    assert len({x, y}) == 2
    assert apply(lambda v: v.equal(1)).tolist() == (X == 1).tolist()


def test_a_value_is_not_iterable() -> None:
    graph = Graph()
    value = graph.add_input("x", TensorType(DType.F32, (2,)))
    with pytest.raises(TypeError):
        iter(cast("Any", value))


def test_indices_are_checked() -> None:
    functions: list[Function] = [lambda x: x[2], lambda x: x[0, 0, 0], lambda x: x[[0, 1]]]
    for function in functions:
        with pytest.raises(TypeRuleError, match="index"):
            apply(function)


def test_exports() -> None:
    missing = [name for name in rlx.ops.__all__ if not hasattr(rlx.ops, name)]
    assert not missing
