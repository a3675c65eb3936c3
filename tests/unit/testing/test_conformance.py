# SPDX-License-Identifier: Apache-2.0
"""The suite itself: it meets all pairs, and it notices mistakes."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.ir.op import registered_ops
from rlx.ops.elementwise import add, exp
from rlx.ops.evaluate import evaluate
from rlx.ops.matmul import MatMul
from rlx.ops.norm import Softmax
from rlx.ops.spec import Operand
from rlx.testing import Case, conformance
from rlx.testing.samples import make_array, samples_of
from rlx.testing.tolerances import allowed_error, family_of, mismatch, roundoff, ulp


def _cases(op: str, selection: str = "pairwise") -> list[Case]:
    chosen = "full" if selection == "full" else "pairwise"
    return [c for c in conformance("reference", selection=chosen) if c.op == op]


@pytest.mark.parametrize("op", ["add", "softmax", "matmul", "gather", "cast"])
def test_the_subset_meets_every_pair_of_the_product(op: str) -> None:
    def pairs(cases: list[Case]) -> set[object]:
        rows = [(("sample", c.sample), ("dtype", c.dtype), ("variant", c.variant)) for c in cases]
        return {pair for row in rows for pair in combinations(row, 2)}

    assert pairs(_cases(op)) == pairs(_cases(op, "full"))
    assert len(_cases(op)) < len(_cases(op, "full"))


def test_every_way_of_running_occurs() -> None:
    assert {c.variant for c in _cases("softmax")} == {
        "static",
        "symbolic",
        "fused",
        "guarded",
        "empty",
    }
    assert {c.variant for c in _cases("matmul")} >= {"error"}
    assert {c.dtype for c in _cases("add")} >= {
        DType.F16,
        DType.BF16,
        DType.F32,
        DType.F64,
        DType.I8,
        DType.U64,
    }


@pytest.mark.parametrize("variant", ["static", "symbolic", "fused", "guarded", "empty"])
@pytest.mark.parametrize("name", ["exp", "matmul", "transpose", "reduce"])
def test_a_wrong_result_is_noticed(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend adds an error of 64 ULP (1 to integers); the expected value is evaluated elsewhere."""
    module = import_module("rlx.backends.reference.backend")

    def wrong(*args: Any, **kwargs: Any) -> dict[str, Array]:
        results = evaluate(*args, **kwargs)
        return {
            n: (a * (1 + 64 * 2 * roundoff(DType.of(a.dtype)))).astype(a.dtype)
            for n, a in results.items()
        }

    cases = [c for c in _cases(name, "full") if c.variant == variant and c.dtype is DType.F32]
    assert not any(c.run().problems for c in cases[:2])
    monkeypatch.setattr(module, "evaluate", wrong)
    found = [problem for c in cases for problem in c.run().problems]
    if variant == "empty":
        assert len(found) < len(cases), "most of these have no elements at all"
    else:
        assert found


def test_an_error_that_is_not_raised_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = [c for c in _cases("matmul") if c.variant == "error"]
    assert case.run().problems == []

    def first(_: object, a: Any, b: Any) -> Any:
        del b
        return a

    monkeypatch.setattr(MatMul, "infer", first)
    monkeypatch.setattr(MatMul, "reference", first)
    assert "did not raise" in case.run().problems[0]


_READS_BEYOND = """
import ctypes
import numpy as np
from rlx.testing.conformance import _Guarded

guarded = _Guarded(np.arange({n}, dtype=np.uint8), {at_end})
address = guarded.array.ctypes.data
assert guarded.array.tolist() == list(range({n}))
print("inside", flush=True)
ctypes.string_at(address + {offset}, 1)
print("beyond", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize(("at_end", "offset"), [(True, 100), (False, -1)])
def test_guarded_memory_ends_the_process_that_leaves_it(at_end: bool, offset: int) -> None:
    program = _READS_BEYOND.format(n=100, at_end=at_end, offset=offset)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "inside\n", done.stderr
    assert done.returncode < 0


def test_samples_are_the_same_in_every_process() -> None:
    operand = Operand((3, 4), fill="special")
    first = make_array(operand, DType.F32, (3, 4), 7)
    np.testing.assert_array_equal(first, make_array(operand, DType.F32, (3, 4), 7))
    index = make_array(Operand((500,), fill="index", limit=5), DType.I64, (500,), 1)
    assert set(index.tolist()) == set(range(-5, 5))
    assert (make_array(Operand((99,), fill="nonzero"), DType.I8, (99,), 1) != 0).all()
    assert np.isnan(make_array(operand, DType.F16, (4, 9), 1)).any()
    assert len(samples_of(registered_ops()["add"])) > 4


def test_families() -> None:
    f32 = [DType.F32]
    names = {
        name: family_of(registered_ops()[name](), f32)
        for name in ("relu", "sqrt", "exp", "gelu", "leaky_relu")
    }
    assert names == {
        "relu": "exact",
        "sqrt": "exact",
        "exp": "primitive",
        "gelu": "composite",
        "leaky_relu": "composite",
    }
    assert family_of(add.op(), f32 * 2) == "exact"
    assert family_of(MatMul(), f32 * 2) == "matmul"


def test_ulp_is_the_distance_of_neighbours() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        values = np.array([0, 1e-8, 0.75, 1, 1.5, 2, 1000], dtype)
        np.testing.assert_array_equal(
            ulp(values, DType.of(dtype)), np.spacing(values).astype(np.float64)
        )


def test_bounds_are_small_and_grow_with_the_number_of_terms() -> None:
    x = np.ones((1, 64), np.float32)
    (bound,) = allowed_error(MatMul(), [x, x.T], [np.full((1, 1), 64, np.float32)])
    assert 64 * 2**-24 < bound[0, 0] < 64 * 64 * 2**-22
    y = np.full((1, 64), 1 / 64, np.float32)
    (bound,) = allowed_error(Softmax(1), [x], [y])
    assert bound.max() < 1e-5 * y.max()
    (bound,) = allowed_error(exp.op(), [x], [np.exp(x)])
    np.testing.assert_array_equal(bound, 4 * np.spacing(np.exp(x)).astype(np.float64))


def test_mismatch_says_where() -> None:
    want = np.array([[1, np.nan], [np.inf, 2]], np.float32)
    zero = np.zeros((2, 2))
    assert mismatch(want.copy(), want, zero) == ""
    off = np.array([[1, np.nan], [-np.inf, 2]], np.float32)
    assert "1 of 4 elements off, first at [1, 0]" in mismatch(off, want, zero + 1e30)
    assert mismatch(np.array([[1, 0], [np.inf, 2]], np.float32), want, zero + 1e30)
    assert mismatch(np.array([[1, np.nan], [np.inf, np.nan]], np.float32), want, zero + 1e30)
    assert mismatch(want + np.float32(0.5), want, zero + 0.5) == ""
    assert "expected float32[2, 2]" in mismatch(want[0], want, zero)
    assert "float64" in mismatch(want.astype(np.float64), want, zero)
