# SPDX-License-Identifier: Apache-2.0
"""Programs for single extents give what the one for all gives, and stay only where they are asked for or faster."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array
from rlx.ops.elementwise import tanh
from rlx.ops.norm import softmax
from rlx.ops.random import random_normal
from rlx.runtime.executable import Executable
from rlx.runtime.program import Binding

_W = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)


def _graph() -> rlx.Graph:
    with rlx.Graph("net") as g:
        x = g.input("x", ["B", "S", 8])
        g.output("y", softmax(tanh(x @ g.param("w", _W)), 1))
    return g


def _numbers(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("extents", [{"S": 6}, {"B": 2, "S": 6}])
def test_runs_with_its_extents_use_it(device: str, extents: dict[str, int]) -> None:
    inputs = [_numbers(2, 6, 8), _numbers(3, 6, 8), _numbers(2, 9, 8)]
    with (
        rlx.compile(_graph(), device) as plain,
        rlx.compile(_graph(), device, dims={"B": 2, "S": 4}) as m,
    ):
        found = m.specialize(extents, at_least=0)
        assert found.kept
        assert found.extents == extents
        assert found.speedup == pytest.approx(found.general / found.special)
        assert m.variants == 2
        for x in inputs:
            np.testing.assert_allclose(m(x), plain(x), rtol=1e-5, atol=1e-6)
            shape = dict(zip("BS", x.shape, strict=False))
            fits = all(shape[n] == v for n, v in extents.items())
            assert m.program.signature.fixed == (extents if fits else {})
        assert m.variants == 2
        m.set_param("w", 2 * _W)
        plain.set_param("w", 2 * _W)
        np.testing.assert_allclose(m(inputs[0]), plain(inputs[0]), rtol=1e-5, atol=1e-6)


def test_what_is_not_faster_is_dropped() -> None:
    with rlx.compile(_graph(), dims={"B": 2, "S": 4}) as m:
        found = m.specialize({"B": 2, "S": 6}, at_least=math.inf)
        assert not found.kept
        assert m.variants == 1
        m(_numbers(2, 6, 8))
        assert m.program.signature.fixed == {}


@pytest.mark.parametrize("special_last", [True, False])
@pytest.mark.parametrize("special_first", [True, False])
def test_clones_and_packages_have_it_too(
    special_last: bool, special_first: bool, tmp_path: Path
) -> None:
    x, other = _numbers(1, 3, 8), _numbers(2, 5, 8)
    with rlx.compile(_graph(), dims={"B": 1, "S": 4}) as m:
        m.specialize({"B": 1, "S": 3}, at_least=0)
        want, rest = m(x), m(other)
        m(x if special_last else other)
        m.save(tmp_path / "m.rlxp")
        with m.clone() as twin:
            np.testing.assert_array_equal(twin(x), want)
            assert twin.program.signature.fixed == {"B": 1, "S": 3}
    with rlx.open(tmp_path / "m.rlxp") as opened:
        if not special_first:
            np.testing.assert_array_equal(opened(other), rest)
        np.testing.assert_array_equal(opened(x), want)
        assert opened.program.signature.fixed == {"B": 1, "S": 3}
        np.testing.assert_array_equal(opened(other), rest)
        assert opened.program.signature.fixed == {}
        with pytest.raises(rlx.UsageError, match="before it is saved"):
            opened.specialize({"B": 1, "S": 2})


def test_special_programs_take_no_place_of_others() -> None:
    with rlx.compile(_graph(), dims={"B": 2, "S": 4}) as m:
        for length in range(1, 9):
            m.specialize({"S": length}, at_least=0)
        with pytest.raises(rlx.UsageError, match="which is the most"):
            m.specialize({"S": 9})
        assert m(_numbers(0, 6, 8)).shape == (0, 6, 5)
        assert m(_numbers(3, 30, 8)).shape == (3, 30, 5)


def test_a_wider_one_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    with rlx.compile(_graph(), dims={"B": 2, "S": 4}) as m:
        m.specialize({"B": 2, "S": 4}, at_least=0)
        execute = Executable._execute  # pyright: ignore[reportPrivateUsage]

        def noted(self: Executable, binding: Binding, *rest: Any) -> None:
            ran.append(binding.compiled)
            execute(self, binding, *rest)

        monkeypatch.setattr(Executable, "_execute", noted)
        m.specialize({"S": 4}, at_least=0)
        by_fixed = {
            len(v.program.signature.fixed): v.program.compiled
            for v in m._variants  # pyright: ignore[reportPrivateUsage]
        }
        assert set(map(id, ran)) == {id(by_fixed[0]), id(by_fixed[1])}
        m(_numbers(2, 4, 8))
        assert m.program.signature.fixed == {"B": 2, "S": 4}


def test_random_numbers_of_other_threads_do_not_repeat() -> None:
    with rlx.Graph("noise") as g:
        x = g.input("x", ["N", 4])
        g.output("y", x + random_normal(g.rng("noise"), (4,)))
    seen: list[bytes] = []
    stop = threading.Event()
    with rlx.compile(g, dims={"N": 4}) as m:

        def draw() -> None:
            while not stop.is_set():
                seen.append(m(np.zeros((2, 4), np.float32)).tobytes())

        thread = threading.Thread(target=draw)
        thread.start()
        try:
            m.specialize({"N": 4}, at_least=0)
        finally:
            stop.set()
            thread.join()
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("at_least", [None, "x", math.nan, True])
def test_thresholds_are_numbers(at_least: Any) -> None:
    with (
        rlx.compile(_graph(), dims={"B": 1, "S": 4}) as m,
        pytest.raises(rlx.UsageError, match="at_least is a number"),
    ):
        m.specialize({"S": 4}, at_least=at_least)


def test_extents_may_be_integers_of_numpy_and_not_those_of_states() -> None:
    with rlx.Graph("walk") as g:
        x = g.input("x", ["N", 3])
        at = g.state("at", ["M", 3])
        g.set_next(at, at + at)
        g.output("y", x)
    with rlx.compile(g, dims={"N": 2, "M": 4}) as m:
        assert m.specialize({"N": cast("int", np.int64(3))}, at_least=0).extents == {"N": 3}
        with pytest.raises(rlx.UsageError, match="no symbol 'M'"):
            m.specialize({"M": 7})
    with pytest.raises(rlx.UsageError, match="is closed"):
        m.specialize({"N": 3})


def test_states_and_random_numbers_are_as_before() -> None:
    with rlx.Graph("walk") as g:
        x = g.input("x", ["N", 3])
        at = g.state("at", ["N", 3])
        total = at + x + random_normal(g.rng("steps"), (3,))
        g.set_next(at, total)
        g.output("y", total)
    ones = np.ones((3, 3), np.float32)
    with rlx.compile(g, dims={"N": 3}) as plain, rlx.compile(g, dims={"N": 3}) as m:
        np.testing.assert_array_equal(m(ones), plain(ones))
        m.specialize({"N": 3}, at_least=0)
        for _ in range(3):
            np.testing.assert_array_equal(m(ones), plain(ones))


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ({}, "a dict with values of B, S"),
        (5, "a dict with values of B, S, not 5"),
        ([("S", 4)], "a dict with values of B, S"),
        ({"b": 2}, r"have no symbol 'b'\. They have B, S"),
        ({"B": 0}, "at least 1, not B=0"),
        ({"B": 2.0}, "at least 1, not B=2.0"),
        ({"B": True}, "at least 1, not B=True"),
        ({"B": 2}, "needs a value of S too, or bounds with dims="),
    ],
)
def test_extents_that_are_none_are_refused(extents: Any, message: str) -> None:
    with rlx.compile(_graph()) as m, pytest.raises(rlx.UsageError, match=message):
        m.specialize(extents)


def test_a_second_one_for_the_same_is_refused() -> None:
    with rlx.compile(_graph(), dims={"B": 1, "S": 4}) as m:
        m.specialize({"S": 4}, at_least=0)
        with pytest.raises(rlx.UsageError, match="already"):
            m.specialize({"S": 4})
