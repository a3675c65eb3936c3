# SPDX-License-Identifier: Apache-2.0
"""Graphs built by hand, and operators that the host runs, in the cache of programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.base.store import default_store
from rlx.base.types import TensorType
from rlx.ir.graph import Value
from rlx.ir.op import Op, registered_ops
from rlx.ops.elementwise import minimum, relu
from rlx.ops.leaf import constant
from rlx.ops.reduce import cum_sum
from rlx.ops.spec import emit_one, op

_X = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)


def _same_type(x: TensorType) -> TensorType:
    return x


def _halved(x: Any) -> Any:
    """x / 2, on the host."""
    return x * np.float32(0.5)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    half = rlx.op("example.half", infer=_same_type, version="1")(_halved)
    with override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        yield tmp_path / "cache"
    half.unregister()


def _half(x: Value) -> Value:
    registered: Any = registered_ops()["example.half"]
    return registered.operator(x)


def _graph(factor: float = 1.0, bias: float = 0.5, name: str = "hidden") -> rlx.Graph:
    """A product with a weight that is packed, a constant, and an operator that the host runs."""
    weight = np.arange(64 * 80, dtype=np.float32).reshape(64, 80) % 7 - 3
    with rlx.Graph("dense") as g:
        x = g.input("x", ["N", 64])
        y = g.name(name, relu(x @ g.param("w", weight * np.float32(factor)) + bias))
        g.output("y", y)
        g.output("half", _half(y))
    return g


def _run(graph: rlx.Graph, **kwargs: Any) -> tuple[dict[str, Array], bool]:
    with rlx.compile(graph, threads=1, **kwargs) as run:
        found = run.run({"x": _X})
        return found, "cache" in run.program.seconds


def _check(found: dict[str, Array], graph: rlx.Graph) -> None:
    want = rlx.compile(graph, "reference").run({"x": _X})
    np.testing.assert_allclose(found["y"], want["y"], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(found["half"], found["y"] / 2)


def test_an_equal_graph_is_not_compiled_again() -> None:
    first, cached = _run(_graph())
    assert not cached
    second, cached = _run(_graph())
    assert cached
    for name in first:
        assert first[name].tobytes() == second[name].tobytes()
    _check(second, _graph())


def test_weights_are_those_of_the_graph_and_not_of_the_cache() -> None:
    _run(_graph())
    found, cached = _run(_graph(factor=-2))
    assert cached
    _check(found, _graph(factor=-2))
    store = default_store()
    assert store is not None
    assert {e.kind for e in store.entries()} == {"object", "program"}


def test_weights_of_a_cached_program_can_be_set() -> None:
    for expected in (False, True):
        with rlx.compile(_graph(), threads=1) as run:
            run.set_param("w", np.ones((64, 80)))
            found = run.run({"x": _X})["y"]
            want = np.maximum(_X.sum(1, keepdims=True) + 0.5, 0)
            np.testing.assert_allclose(found, np.repeat(want, 80, 1), rtol=1e-4, atol=1e-5)
            run.set_param("w", np.zeros((64, 80)))
            assert np.all(run.run({"x": _X})["y"] == 0.5)
            assert ("cache" in run.program.seconds) is expected
        _run(_graph())


def test_what_the_graph_says_is_part_of_it() -> None:
    _run(_graph())
    assert not _run(_graph(bias=0.25))[1]
    assert not _run(_graph(name="other"))[1]
    assert not _run(_graph(), host_ops="allow", precision="f16")[1]
    assert _run(_graph(), dims={"N": 9})[1]
    with override(RLX_CACHE="off"):
        assert not _run(_graph())[1]


def _detail(
    *, axis: int = 1, dtype: str = "f32", zero: float = 0.0, rows: int | str = "N", name: str = "w"
) -> rlx.Graph:
    with rlx.Graph("detail") as g:
        x = g.input("x", [rows, 4], dtype)
        zeros = constant(np.full(4, zero, x.type.dtype.numpy))
        weight = g.param(name, np.ones(4, x.type.dtype.numpy))
        g.output("y", cum_sum(x, axis) * weight)
        g.output("zero", minimum(x * x, zeros))
    return g


def test_programs_that_differ_in_one_detail_are_told_apart() -> None:
    """An attribute, a dtype, the sign of a zero, an extent, a name: each is another program with other results."""
    details: list[dict[str, Any]] = [
        {},
        {"axis": 0},
        {"dtype": "f16"},
        {"zero": -0.0},
        {"zero": float("nan")},
        {"rows": 3},
        {"name": "v"},
    ]
    for known in (False, True):
        for detail in details:
            dtype = np.float16 if "dtype" in detail else np.float32
            x = np.arange(1, 13).reshape(3, 4).astype(dtype)
            with rlx.compile(_detail(**detail), threads=1) as run:
                found = run.run([x])
                assert ("cache" in run.program.seconds) is known, detail
                assert list(run.params) == [detail.get("name", "w")]
            assert found["y"].dtype == dtype
            np.testing.assert_array_equal(found["y"], np.cumsum(x, detail.get("axis", 1)))
            zero = np.float64(detail.get("zero", 0.0))
            np.testing.assert_array_equal(found["zero"], np.full((3, 4), zero))
            assert np.isnan(zero) or np.all(np.signbit(found["zero"]) == np.signbit(zero))


def test_bounds_and_extents_of_a_cached_graph() -> None:
    _run(_graph())
    with rlx.compile(_graph(), threads=1) as run:
        for rows in (1, 5, 40):
            x = np.repeat(_X[:1], rows, 0)
            found = run.run({"x": x})["y"]
            assert found.shape == (rows, 80)
            np.testing.assert_array_equal(found, np.repeat(found[:1], rows, 0))
        assert "cache" in run.program.seconds
        assert ("example.half", "host", 1) in [tuple(d) for d in run.program.compiled.dispatch]


@op("tests.twice")
@dataclass(frozen=True)
class _Twice(Op):
    """2 x, of a user's own module."""

    operands = ("x",)

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array:
        return x * np.float32(2)


def test_operators_of_others_are_not_cached() -> None:
    with rlx.Graph() as g:
        g.output("y", emit_one(_Twice(), g.input("x", [3, 64])))
    for _ in range(2):
        found, cached = _run(g)
        assert not cached
        np.testing.assert_array_equal(found["y"], _X * 2)


@pytest.mark.parametrize(("version", "kept"), [("", False), ("1", True)])
def test_registered_operators_are_kept_with_their_version(version: str, kept: bool) -> None:
    def doubled(x: Any) -> Any:
        return x * np.float32(2)

    twice = rlx.op("example.double", infer=_same_type, version=version)(doubled)
    try:
        with rlx.Graph() as g:
            g.output("y", twice(g.input("x", [3, 64])))
        assert not _run(g)[1]
        found, cached = _run(g)
        assert cached is kept
        np.testing.assert_array_equal(found["y"], _X * 2)
    finally:
        twice.unregister()


def test_another_process_finds_the_program(tmp_path: Path, folder: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import numpy as np, rlx, sys\n"
        "@rlx.op('example.half', infer=lambda x: x, version='1')\n"
        "def half(x): return x * np.float32(0.5)\n"
        "with rlx.Graph('g') as g:\n"
        "    x = g.input('x', ['N', 4])\n"
        "    y = x @ g.param('w', np.eye(4, dtype=np.float32) * float(sys.argv[1]))\n"
        "    g.output('half', half(y))\n"
        "m = rlx.compile(g, threads=1)\n"
        "half = m(np.ones((2, 4), np.float32))\n"
        "print('cache' in m.program.seconds, half.sum())\n"
    )
    environment = {**os.environ, "RLX_CACHE_DIR": str(folder)}
    printed = [
        subprocess.run(
            [sys.executable, str(script), factor],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for factor in ("1", "1", "3")
    ]
    assert printed == [["False", "4.0"], ["True", "4.0"], ["True", "12.0"]]


def test_failures_name_their_node_from_the_cache_too() -> None:
    messages: list[str] = []
    for expected in (False, True):
        with rlx.Graph() as g:
            x, divisor = g.input("x", ["N"], "i32"), g.input("d", ["N"], "i32")
            g.output("y", x / divisor)
        run = rlx.compile(g, threads=1)
        with pytest.raises(rlx.ExecutionError) as caught:
            run.run({"x": np.ones(2, np.int32), "d": np.zeros(2, np.int32)})
        assert ("cache" in run.program.seconds) is expected
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "test_graph_cache.py" in messages[0]


def test_the_memory_of_a_cached_program_is_known_before_its_first_run() -> None:
    with rlx.compile(_graph(), dims={"N": 3}) as made:
        want = made.memory()
        made.run({"x": _X})
        assert made.memory() == want
    with rlx.compile(_graph(), dims={"N": 3}) as found:
        assert found.program.graph is None, "it was compiled again"
        assert found.memory() == want
        found.run({"x": _X})
        assert found.memory() == want
    assert want.weights >= 64 * 80 * 4
