# SPDX-License-Identifier: Apache-2.0
"""Outputs that feed inputs: the same as feeding by hand, without the values travelling."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ops.elementwise import tanh
from rlx.ops.matmul import matmul
from rlx.ops.movement import concat
from rlx.ops.reduce import reduce_sum


@pytest.fixture(params=("reference", "cpu"))
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _checked() -> Generator[None]:
    with override(RLX_CHECK=True, RLX_VERIFY=True):
        yield


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def _recurrent() -> rlx.Graph:
    """y, h' = f(x, h) as a model without state."""
    with rlx.Graph("recurrent") as g:
        x = g.input("x", ["B", 4])
        h = g.input("h", ["B", 4])
        w = g.param("w", _random(4, 4, seed=9))
        new = tanh(matmul(x, w) + h)
        g.output("y", reduce_sum(new, (1,), keepdims=False))
        g.output("h_next", new)
    return g


@pytest.mark.parametrize("guarded", [False, True])
def test_feeding_equals_feeding_by_hand(device: str, guarded: bool) -> None:
    """Also where only a guard relates the extent of the state to those of the inputs that are left."""
    graph = _guarded() if guarded else _recurrent()
    by_hand = rlx.compile(graph, device)
    bound = rlx.compile(graph, device).bind_state({"h_next": "h"})
    assert [i.name for i in bound.inputs] == ["x"]
    for batch in (3, 1, 5):
        bound.state.reset()
        h = np.zeros((batch, 4), np.float32)
        for step in range(6):
            x = _random(batch, 4, seed=step)
            expected = by_hand.run({"x": x, "h": h})
            h = expected["h_next"]
            assert bound.run({"x": x})["y"].tobytes() == expected["y"].tobytes()
        assert bound.state["h"].get().tobytes() == h.tobytes()
    assert [o.name for o in bound.outputs] == ["y"]


def _guarded() -> rlx.Graph:
    """Return a graph whose state has a batch of its own name, equal to the inputs' by an assumption."""
    g = rlx.Graph("guarded")
    g.ir.facts.hints = {"B": 3, "M": 3}
    with g:
        x = g.input("x", ["B", 4])
        h = g.input("h", ["M", 4])
        new = tanh(x + h)
        g.output("y", reduce_sum(new, (1,), keepdims=False))
        g.output("h_next", new)
    assert g.ir.facts.equalities
    return g


def _attention_step() -> rlx.Graph:
    """What a decoder exports: the caches are inputs, the new rows outputs."""
    with rlx.Graph("step") as g:
        x = g.input("x", ["B", 1, 4])
        cache = g.input("cache", ["B", 6, 4])
        g.output("scores", reduce_sum(cache * x, (2,), keepdims=False))
        g.output("row", tanh(x))
    return g


@pytest.mark.parametrize("per_entry", [False, True])
def test_rows_are_fed_into_a_cache(device: str, per_entry: bool) -> None:
    run = rlx.compile(_attention_step(), device)
    run.bind_state({"row": rlx.RowFeed("cache", position="at", per_entry=per_entry)})
    assert [str(i) for i in run.inputs] == ["x: f32[B,1,4]", f"at: i64[{'B' if per_entry else ''}]"]
    cache = np.zeros((2, 6, 4), np.float32)
    for step in range(6):
        x = _random(2, 1, 4, seed=step)
        at = np.array([step, 5 - step]) if per_entry else np.array(step)
        scores = run.run({"x": x, "at": at})["scores"]
        np.testing.assert_allclose(scores, (cache * x).sum(2), rtol=1e-6)
        for entry in range(2):
            cache[entry, at[entry] if per_entry else at] = np.tanh(x[entry, 0])
    np.testing.assert_allclose(run.state["cache"].get(), cache, rtol=1e-5)
    if device == "cpu":
        compiled: Any = run.program.compiled
        (slots,) = compiled.program.states
        assert slots.aliases, "the cache is written in place"
    with pytest.raises(rlx.ExecutionError):
        run.run({"x": _random(2, 1, 4), "at": np.array([6, 6]) if per_entry else np.array(6)})


def test_one_row_of_an_output_is_fed_into_a_ring_at_a_position_that_the_model_has(
    device: str,
) -> None:
    with rlx.Graph("window") as g:
        x = g.input("x", ["B", 3])
        at = g.input("at", [], "i32")
        window = g.input("window", [4, 3], "f32")
        g.output("next", at + 1)
        g.output("old", reduce_sum(window, (1,), keepdims=False))
        g.output("rows", concat([x, x * 2], 0))
    run = rlx.compile(g, device)
    run.bind_state({"rows": rlx.RowFeed("window", "at", axis=0, ring=True, row=-1)})
    for step in range(9):
        run.run({"x": np.full((2, 3), step, np.float32), "at": np.array(step, np.int32)})
    np.testing.assert_array_equal(run.state["window"].get()[:, 0], [16, 10, 12, 14])


def test_states_bound_one_after_the_other_and_with_those_of_the_graph(device: str) -> None:
    with rlx.Graph("both") as g:
        a, b = g.input("a", [2]), g.input("b", [2])
        n = g.state("n", [2])
        g.set_next(n, n + 1)
        g.output("a2", a + b + n)
        g.output("b2", b + 1)
        g.output("y", a)
    run = rlx.compile(g, device)
    assert [o.name for o in run.outputs] == ["a2", "b2", "y"]
    run.bind_state({"a2": "a"}).bind_state({"b2": "b"})
    assert list(run.state) == ["n", "a", "b"]
    found = [run.run({})["y"][0] for _ in range(4)]
    a = b = n = 0
    for value in found:
        assert value == a
        a, b, n = a + b + n, b + 1, n + 1


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"h_next": "hh"}, "no input 'hh' to be fed; it has x, h.*'h'"),
        ({"h_nex": "h"}, "no output 'h_nex'; it has y, h_next.*'h_next'"),
        ({"y": "h"}, r"output y: f32\[B\] cannot feed input h: f32\[B,4\]: dtype and rank"),
        ({"h_next": "h", "y": "h"}, "fed by two outputs"),
        ({}, "mapping of outputs"),
        ({"h_next": 3}, "by name, or a RowFeed"),
    ],
)
def test_what_cannot_be_bound_is_refused_and_changes_nothing(
    device: str, feeds: Any, message: str
) -> None:
    run = rlx.compile(_recurrent(), device, dims={"B": 4})
    with pytest.raises(rlx.UsageError, match=message):
        run.bind_state(feeds)
    result = run.run({"x": _random(2, 4), "h": np.zeros((2, 4), np.float32)})
    assert list(result) == ["y", "h_next"]


def test_an_output_of_another_extent_says_how_to_feed_rows(device: str) -> None:
    with rlx.Graph("grows") as g:
        past = g.input("past", ["B", "P", 4])
        new = g.input("new", ["B", 1, 4])
        g.output("present", concat([past, new], 1))
    run = rlx.compile(g, device).bind_state({"present": "past"})
    with pytest.raises(rlx.UsageError, match=r"present: f32\[B,P\+1,4\].*past: f32\[B,P,4\]"):
        run.run({"new": _random(2, 1, 4)})
    run = rlx.compile(g, device, dims={"P": 5, "B": 2})
    with pytest.raises(rlx.UsageError, match=r"extents P\+1 and P of axis 1 differ.*RowFeed"):
        run.bind_state({"present": "past"})
    run.bind_state({"present": rlx.RowFeed("past", "at", row=-1)})
    for step in range(5):
        run.run({"new": np.full((2, 1, 4), step, np.float32), "at": np.array(step)})
    np.testing.assert_array_equal(run.state["past"].get()[:, :, 0], [[0, 1, 2, 3, 4]] * 2)


def test_an_extent_that_nothing_gives_is_named(device: str) -> None:
    with rlx.Graph("echo") as g:
        x = g.input("x", [2])
        s = g.input("s", ["M", 2])
        g.output("y", x)
        g.output("s2", s + 1)
    with pytest.raises(rlx.UsageError, match="nothing gives the extent M"):
        rlx.compile(g, device).bind_state({"s2": "s"})
    run = rlx.compile(g, device, dims={"M": 3}).bind_state({"s2": "s"})
    run.run({"x": _random(2)})
    np.testing.assert_array_equal(run.state["s"].get(), np.ones((3, 2)))


def test_weights_that_were_set_stay(device: str) -> None:
    run = rlx.compile(_recurrent(), device)
    run.set_param("w", np.eye(4, dtype=np.float32))
    run.bind_state({"h_next": "h"})
    x = _random(2, 4)
    np.testing.assert_allclose(run.run({"x": x})["y"], np.tanh(x).sum(1), rtol=1e-5)


def test_clones_and_pickles_keep_what_is_bound_and_the_values(device: str) -> None:
    run = rlx.compile(_recurrent(), device).bind_state({"h_next": "h"})
    x = _random(2, 4)
    run.run({"x": x})
    clone, pickled = run.clone(), pickle.loads(pickle.dumps(run))
    expected = run.run({"x": x})["y"]
    for other in (clone, pickled):
        assert other.run({"x": x})["y"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("guarded", [False, True])
def test_packages_keep_what_is_bound_and_begin_anew(tmp_path: Path, guarded: bool) -> None:
    graph = _guarded() if guarded else _recurrent()
    run = rlx.compile(graph, "cpu").bind_state({"h_next": "h"})
    xs = [_random(2, 4, seed=step) for step in range(3)]
    expected = [run.run({"x": x})["y"].tobytes() for x in xs]
    run.save(tmp_path / "m.rlxp")
    with rlx.open(tmp_path / "m.rlxp") as opened:
        assert [opened.run({"x": x})["y"].tobytes() for x in xs] == expected
        assert opened.state["h"].get().tobytes() == run.state["h"].get().tobytes()
        with pytest.raises(rlx.UsageError, match="before it is saved"):
            opened.bind_state({"y": "x"})
