# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import ceildiv, dim_max, dim_min, evaluate, floordiv, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import UndecidedError
from rlx.base.facts import Facts
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ops import elementwise as ew
from rlx.ops import indexing as ix
from rlx.ops import movement as mv
from rlx.ops.dims import Ratio, fold
from rlx.ops.evaluate import run_op
from rlx.ops.leaf import DimTensor
from rlx.ops.reduce import Reduce

N, M = symbol("N"), symbol("M")


def objects(*elements: Any) -> Array:
    out = np.empty(len(elements), object)
    out[:] = elements
    return out


def folded(op: Any, *arrays: Array | Sequence[Any], dtype: DType = DType.I64) -> Any:
    given = [objects(*a) if isinstance(a, Sequence) else a for a in arrays]
    found = fold(op, [TensorType(dtype, a.shape) for a in given], given)
    return None if found is None else found[0].tolist()


def test_arithmetic() -> None:
    assert folded(ew.add.op(), [N, 2], [1, M]) == [N + 1, M + 2]
    assert folded(ew.sub.op(), [N], [N]) == [0]
    assert folded(ew.mul.op(), [N, 3], [M, 4]) == [N * M, 12]
    assert folded(ew.div.op(), [N * 4, N, 7], [4, 2, -2]) == [N, floordiv(N, 2), -3]
    assert folded(ew.div.op(), [-N], [2]) == [ceildiv(-N, 2)]
    assert folded(ew.div.op(), [2**62], [11]) == [419244183493398900]
    assert folded(ew.floor_mod.op(), [N, -7], [4, 4]) == [N % 4, 1]
    assert folded(ew.maximum.op(), [N, M], [1, N]) == [N, dim_max(M, N)]
    assert folded(ew.minimum.op(), [N], [M]) == [dim_min(N, M)]
    assert folded(ew.neg.op(), [N]) == [-N]
    assert folded(ew.abs.op(), [N, -N, -3]) == [N, N, 3]
    assert folded(ew.pow.op(), [N], [2]) == [N * N]


def test_what_is_no_extent_does_not_fold() -> None:
    assert folded(ew.sqrt.op(), [N], dtype=DType.F32) is None
    assert folded(ew.div.op(), [N], [0]) is None
    assert folded(ew.div.op(), [3], [0]) is None
    assert folded(ew.div.op(), [N - M], [2]) is None  # truncation depends on the sign
    assert folded(ew.mul.op(), [N], [0.1], dtype=DType.F32) is None
    assert folded(ix.Gather(0), [1, 2], [N]) is None
    assert folded(Reduce("l2", (0,)), [N, 2]) is None


def test_quotients_in_floats_until_they_are_rounded() -> None:
    f32 = DType.F32
    (half,) = folded(ew.mul.op(), [N], [0.5], dtype=f32)
    assert half == Ratio(N, 2)
    assert folded(ew.floor.op(), [half], dtype=f32) == [floordiv(N, 2)]
    assert folded(ew.ceil.op(), [half], dtype=f32) == [ceildiv(N, 2)]
    assert folded(ew.Cast(DType.I64), [half], dtype=f32) == [floordiv(N, 2)]
    assert folded(ew.mul.op(), [half], [4], dtype=f32) == [N * 2]
    assert folded(ew.add.op(), [half], [1], dtype=f32) == [Ratio(N + 2, 2)]
    assert folded(ew.div.op(), [N], [-3], dtype=f32) == [Ratio(-N, 3)]
    assert folded(ew.div.op(), [N * 6], [3], dtype=f32) == [N * 2]
    with pytest.raises(UndecidedError):
        int(half)


def test_movement() -> None:
    shape = objects(N, 3, M)
    assert folded(ix.Gather(0), shape, np.array([-1, 0], object)) == [M, N]
    assert folded(mv.Concat(0), shape, [-1]) == [N, 3, M, -1]
    assert folded(mv.Slice((2,), (2,), (-2,)), shape) == [M, N]
    assert folded(mv.Reshape((3, 1)), shape) == [[N], [3], [M]]
    assert folded(mv.Expand((2,)), [N]) == [N, N]
    assert folded(mv.Transpose((1, 0)), shape.reshape(1, 3)) == [[N], [3], [M]]
    assert folded(mv.Range(3), np.array(N, object), np.array(2, object)) == [N, N + 2, N + 4]
    assert folded(ix.ScatterElements(0), shape, np.array([1], object), [N]) == [N, N, M]
    assert folded(mv.Tile((2,)), [N, 1]) == [N, 1, N, 1]


def test_reductions() -> None:
    assert folded(Reduce("prod", (0,)), [N, 3, M]) == [N * M * 3]
    assert folded(Reduce("sum", (0,), keepdims=False), [N, 3]) == N + 3
    assert folded(Reduce("max", (0,)), [N, 1]) == [N]
    assert folded(Reduce("prod", (0,)), np.empty(0, object)) == [1]
    assert folded(Reduce("max", (0,)), np.empty(0, object)) is None


def test_comparisons_that_hold_for_all_values() -> None:
    assert folded(ew.equal.op(), [N, 2, N], [-1, 2, N]) == [False, True, True]
    assert folded(ew.less.op(), [0, N], [N, 1]) == [True, False]
    assert folded(ew.greater_equal.op(), [N], [1]) == [True]
    assert folded(ew.logical_not.op(), [True], dtype=DType.BOOL) == [False]


def test_comparisons_that_depend_are_guarded() -> None:
    with pytest.raises(UndecidedError):
        folded(ew.equal.op(), [N], [4])
    facts = Facts(hints={"N": 4, "M": 9})
    with facts.active():
        assert folded(ew.equal.op(), [N], [4]) == [True]
        assert folded(ew.less.op(), [M], [5]) == [False]
    assert [(str(g.left), g.relation, str(g.right)) for g in facts.guards] == [
        ("N", "==", "4"),
        ("5", "<=", "M"),
    ]


def test_where_and_casts() -> None:
    assert folded(ew.where.op(), [True, False], [N, 1], [2, M]) == [N, M]
    assert folded(ew.Cast(DType.F32), [N, 3]) == [N, 3]
    assert folded(ew.Cast(DType.BOOL), [N, 0]) == [True, False]
    assert folded(ew.Cast(DType.I64), [2.7, -2.7], dtype=DType.F32) == [2, -2]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "floor_mod", "maximum", "minimum"])
@pytest.mark.parametrize("n", [1, 5, 12])
def test_folding_then_evaluating_is_the_reference(name: str, n: int) -> None:
    op = getattr(ew, name).op()
    left, right = [N * 3 + 1, N, 7], [4, N + 2, N]
    found = folded(op, left, right)
    env = {"N": n}
    arrays = [np.array([evaluate(d, env) for d in side], np.int64) for side in (left, right)]
    assert [evaluate(d, env) for d in found] == run_op(op, arrays)[0].tolist()


def test_extents_as_data() -> None:
    (found,) = run_op(DimTensor((3, 4), (2, 1)), [])
    assert found.tolist() == [[3], [4]]
