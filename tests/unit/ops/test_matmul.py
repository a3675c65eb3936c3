# SPDX-License-Identifier: Apache-2.0
"""Matrix products and Einsum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.facts import Facts
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.matmul import MatMul, einsum, matmul
from rlx.ops.spec import building


def _f32(*shape: Any) -> TensorType:
    return TensorType(DType.F32, shape)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4", "u4", "i8", "u8"])
def test_integers_wrap(dtype: str) -> None:
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, (5, 19), dtype=dtype)
    b = rng.integers(info.min, info.max, (19, 3), dtype=dtype)
    exact = a.astype(object) @ b.astype(object)
    want: Any = exact % 2**info.bits
    (got,) = run_op(MatMul(), [a, b])
    assert got.dtype == a.dtype
    assert (got.astype(object) % 2**info.bits == want).all()


def test_nan_and_infinity_propagate() -> None:
    a = np.array([[np.inf, 1.0], [0.0, 1.0]], np.float32)
    b = np.array([[0.0, 1.0], [1.0, np.nan]], np.float32)
    (got,) = run_op(MatMul(), [a, b])
    np.testing.assert_array_equal(got, [[np.nan, np.nan], [1.0, np.nan]])


def test_half_accumulates_in_f32() -> None:
    a = np.full((1, 4096), 0.1, np.float16)
    b = np.ones((4096, 1), np.float16)
    (got,) = run_op(MatMul(), [a, b])
    assert got[0, 0] == np.float16(np.float32(np.float16(0.1)) * 4096)


def test_empty_sum_is_zero() -> None:
    (got,) = run_op(MatMul(), [np.ones((2, 0), "f4"), np.ones((0, 3), "f4")])
    np.testing.assert_array_equal(got, np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ((7,), (7,), ()),
        ((7,), (2, 7, 3), (2, 3)),
        ((2, 5, 7), (7,), (2, 5)),
        ((2, 1, 4, 6), (3, 6, 5), (2, 3, 4, 5)),
    ],
)
def test_shapes_follow_numpy(a: Any, b: Any, want: Any) -> None:
    assert MatMul().infer(_f32(*a), _f32(*b)).shape == want
    assert np.matmul(np.ones(a), np.ones(b)).shape == want
    graph = Graph("g")
    with building(Builder(graph.block, graph.facts)):
        y = matmul(graph.add_input("a", _f32(*a)), graph.add_input("b", _f32(*b)))
    assert y.type.shape == want
    assert all(
        o is None or o.type.rank >= 2
        for n in graph.block
        if isinstance(n.op, MatMul)
        for o in n.operands
    )


def test_symbolic_batch_and_contraction() -> None:
    n, k = symbol("N"), symbol("K")
    assert MatMul().infer(_f32(n, 4, k), _f32(k, 5)).shape == (n, 4, 5)
    facts = Facts(hints={"N": 3, "K": 4})
    with facts.active():
        assert MatMul().infer(_f32(2, n), _f32(k - 1, 5)).shape == (2, 5)
    assert len(facts.guards) == 1
    with pytest.raises(TypeRuleError, match="contracted"):
        MatMul().infer(_f32(2, k), _f32(k + 1, 5))


def test_rejects_mixed_and_unsuited_operands() -> None:
    with pytest.raises(TypeRuleError, match="cast first"):
        MatMul().infer(_f32(2, 2), TensorType(DType.F64, (2, 2)))
    with pytest.raises(TypeRuleError, match="rank 1"):
        MatMul().infer(_f32(), _f32(2))


EQUATIONS = [
    ("ij,jk->ik", ((3, 4), (4, 5))),
    ("ij,jk", ((3, 4), (4, 5))),
    ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5))),
    ("...ij,...jk->...ik", ((2, 1, 3, 4), (6, 4, 5))),
    ("bhid,bhjd->bhij", ((2, 3, 4, 5), (2, 3, 6, 5))),
    ("i,j->ij", ((3,), (4,))),
    ("i,i", ((3,), (3,))),
    ("i,i->i", ((3,), (3,))),
    ("ij->ji", ((3, 4),)),
    ("ij->", ((3, 4),)),
    ("ii->i", ((4, 4),)),
    ("ii", ((4, 4),)),
    ("bii,ic->bc", ((2, 4, 4), (4, 3))),
    ("...ii->...i", ((2, 3, 3),)),
    ("abc,cd,def->abd", ((2, 2, 2), (2, 2), (2, 2, 2))),
    ("ijk,jil->kl", ((3, 4, 5), (4, 3, 2))),
    ("ij,ij->", ((3, 4), (3, 4))),
    ("ijm,jk->ik", ((3, 4, 2), (4, 5))),
    ("ab,cd->dbca", ((2, 3), (4, 5))),
    ("bij,jk->bik", ((0, 3, 4), (4, 5))),
    ("ij,jk->ik", ((3, 1), (4, 5))),
    ("B a , a B -> a B", ((3, 4), (4, 3))),
]


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_einsum(equation: str, shapes: Any) -> None:
    rng = np.random.default_rng(1)
    arrays: list[Any] = [rng.standard_normal(s) for s in shapes]
    graph = Graph("einsum")
    values = [
        graph.add_input(f"x{i}", TensorType(DType.F64, a.shape)) for i, a in enumerate(arrays)
    ]
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": einsum(equation, *values)})
    found = evaluate(graph, {f"x{i}": a for i, a in enumerate(arrays)})["y"]
    want = np.einsum(equation.replace(" ", ""), *arrays)
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("equation", "ranks", "message"),
    [
        ("ij,jk->ik", (2,), "names 2 operands"),
        ("ij->ik", (2,), "repeats or invents"),
        ("ij->ii", (2,), "repeats or invents"),
        ("i->i", (2,), "does not fit"),
        ("i;j->i", (2,), "no list of axis letters"),
    ],
)
def test_einsum_rejects(equation: str, ranks: Any, message: str) -> None:
    graph = Graph("einsum")
    values = [graph.add_input(f"x{i}", _f32(*[2] * r)) for i, r in enumerate(ranks)]
    with building(Builder(graph.block, graph.facts)), pytest.raises(TypeRuleError, match=message):
        einsum(equation, *values)


def test_einsum_with_symbols() -> None:
    n, t = symbol("N"), symbol("T")
    graph = Graph("einsum")
    with building(Builder(graph.block, graph.facts)):
        y = einsum(
            "bthd,bshd->bhts",
            graph.add_input("q", _f32(n, t, 2, 3)),
            graph.add_input("k", _f32(n, 5, 2, 3)),
        )
    graph.set_outputs({"y": y})
    assert y.type.shape == (n, 2, t, 5)
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 4, 2, 3)), rng.standard_normal((2, 5, 2, 3))
    found = evaluate(graph, {"q": q.astype("f4"), "k": k.astype("f4")})["y"]
    np.testing.assert_allclose(found, np.einsum("bthd,bshd->bhts", q, k), rtol=1e-4, atol=1e-5)
