# SPDX-License-Identifier: Apache-2.0
"""Sizes that no machine has: an error with the numbers, and an executable that is still usable."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.backends.cpu.buffers import WeightBuffer, aligned_bytes
from rlx.backends.cpu.program import CpuProgram
from rlx.base.errors import OutOfMemoryError
from rlx.base.numeric import Array

_MANY = 1 << 25  # its square in f32 is 4 PiB


def _outer(*, reduced: bool) -> rlx.Graph:
    """A graph whose values have N * N elements, and with `reduced` an output that has not."""
    with rlx.Graph("outer") as g:
        x = g.input("x", ["N", 1])
        y = ops.softmax(x * ops.transpose(x, (1, 0)))
        g.output("y", y @ x if reduced else y)
    return g


def _column(rows: int) -> Array:
    return np.ones((rows, 1), np.float32)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_call_that_is_too_large_says_so_and_smaller_ones_go_on(
    device: str, reduced: bool
) -> None:
    run = rlx.compile(_outer(reduced=reduced), device)
    with pytest.raises(OutOfMemoryError) as caught:
        run(_column(_MANY))
    assert device == "reference" or "N = 33554432" in str(caught.value)
    for rows in (3, 5):
        want = np.full((rows, 1), 1.0) if reduced else np.full((rows, rows), 1 / rows)
        np.testing.assert_allclose(run(_column(rows)), want, rtol=1e-6)
    with pytest.raises(OutOfMemoryError):
        run.run([_column(_MANY)], ["y"])
    with pytest.raises(OutOfMemoryError, match=r"\d+ bytes \([48]\.0 PiB\)|4\.0[0 ]*PiB"):
        run(_column(_MANY))
    np.testing.assert_allclose(run(_column(1)), [[1.0]])


def test_bounds_that_are_too_large_are_refused_with_their_names() -> None:
    with pytest.raises(OutOfMemoryError, match=r"intermediate values: \d+ bytes .*N = 2147483647"):
        rlx.compile(_outer(reduced=True), dims={"N": 2**31 - 1})


def test_growth_is_given_up_before_the_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run = rlx.compile(_outer(reduced=False), threads=1)
    run(_column(8))
    planned: list[int] = []
    plan = CpuProgram.plan

    def small(self: CpuProgram, uppers: Mapping[str, int]) -> None:
        planned.append(uppers["N"])
        if uppers["N"] > 12:
            raise OutOfMemoryError("none left")
        plan(self, uppers)

    monkeypatch.setattr(CpuProgram, "plan", small)
    assert run(_column(10)).shape == (10, 10)
    with pytest.raises(OutOfMemoryError, match="none left"):
        run(_column(13))
    assert run(_column(10)).shape == (10, 10)
    assert planned == [16, 10, 20, 13]


def test_a_plan_that_does_not_fit_leaves_the_one_before() -> None:
    run = rlx.compile(_outer(reduced=False), dims={"N": 4}, threads=1)
    before = run.memory()
    with pytest.raises(OutOfMemoryError):
        run.program.compiled.plan({"N": _MANY})
    assert run.memory() == before
    np.testing.assert_allclose(run(_column(4)), np.full((4, 4), 0.25))


def test_warmup_for_shapes_that_do_not_exist() -> None:
    run = rlx.compile(_outer(reduced=False))
    with pytest.raises(OutOfMemoryError, match=r"input x: f32\[N,1\]: 4611686018427387904 bytes"):
        run.warmup({"x": (1 << 60, 1)})
    with pytest.raises(OutOfMemoryError, match="input x"):
        run.warmup({"x": (1 << 62, 1)})
    with pytest.raises(rlx.UsageError, match="no shape of input x"):
        run.warmup({"x": (-1, 1)})
    with pytest.raises(rlx.UsageError, match="outer has no input 'X'"):
        run.warmup({"X": (1, 1)})


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 63, 1 << 70])
def test_blocks_that_no_machine_has(nbytes: int) -> None:
    with pytest.raises(MemoryError):
        aligned_bytes(nbytes)
    with pytest.raises(OutOfMemoryError, match=f"packed weights: {nbytes} bytes"):
        WeightBuffer({0: nbytes})
