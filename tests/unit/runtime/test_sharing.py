# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array
from rlx.base.rng import RngPolicy
from rlx.ops.matmul import matmul
from rlx.ops.movement import transpose

_DEVICES = ("reference", "cpu")


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _graph(seed: int = 0, width: int = 80, dtype: str = "f32", name: str = "layers") -> rlx.Graph:
    """y = relu(x @ w + b): the matrix is packed on the CPU, the bias is read as it is."""
    kind = np.dtype(np.float64 if dtype == "f64" else np.float32)
    with rlx.Graph(name) as g:
        x = g.input("x", ["N", 32], dtype)
        w = g.param("w", _array(32, width, seed=seed, dtype=kind))
        b = g.param("b", _array(width, seed=seed + 1, dtype=kind))
        g.output("y", matmul(x, w) + b)
    return g


_X = _array(3, 32, seed=9)


def _addresses(run: rlx.Executable) -> dict[str, int]:
    """Return where the kernels of an executable read its weights."""
    compiled: Any = run.program.compiled
    return {n: int(compiled._context.slots[slot]) for n, slot in compiled._names.items()}


# -- clones -----------------------------------------------------------------------------------------------------------


def test_a_clone_gives_the_same_bits_run_after_run(device: str) -> None:
    run = rlx.compile(_graph(), device)
    expected = run(_X)
    twin = run.clone()
    for _ in range(2):
        np.testing.assert_array_equal(twin(_X), expected)
    np.testing.assert_array_equal(run(_X), expected)
    assert [str(s) for s in twin.outputs] == [str(s) for s in run.outputs]


def test_a_clone_made_before_the_first_run_compiles_for_itself(device: str) -> None:
    run = rlx.compile(_graph(), device)
    twin = run.clone()
    assert twin.variants == 0
    np.testing.assert_array_equal(twin(_X), run(_X))


def test_a_clone_has_params_that_were_set(device: str) -> None:
    run = rlx.compile(_graph(), device)
    run(_X)
    run.set_param("w", np.ones((32, 80)))
    twin = run.clone()  # before a run computed anything from the new value
    np.testing.assert_array_equal(twin.get_param("w"), np.ones((32, 80)))
    np.testing.assert_array_equal(twin(_X), run(_X))
    assert twin.params == run.params


def test_a_clone_keeps_variants_bounds_options_and_random_numbers() -> None:
    run = rlx.compile(_graph(), "cpu", threads=1, rng=RngPolicy(5, 3))
    run(_X)
    run(_X[:0])
    twin = run.clone()
    assert twin.variants == 2
    assert twin.rng == run.rng
    assert twin.program.compiled.dispatch == run.program.compiled.dispatch
    assert twin(_X[:0]).shape == (0, 80)
    np.testing.assert_array_equal(twin(_array(50, 32)), run(_array(50, 32)))
    assert twin.variants == 2
    assert twin._maker == run._maker  # pyright: ignore[reportPrivateUsage]


def test_a_clone_compiles_nothing_and_links_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = rlx.compile(_graph(), "cpu")
    expected = run(_X)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr("rlx.runtime.compile.compile_graph", fail)
    monkeypatch.setattr("rlx.backends.cpu.jit.Library.__init__", fail)
    np.testing.assert_array_equal(run.clone()(_X), expected)


def test_weights_of_clones_are_the_same_memory_and_are_computed_once() -> None:
    run = rlx.compile(_graph(), "cpu")
    run(_X)
    twins = [run.clone() for _ in range(3)]
    for twin in twins:
        twin(_X)
        assert _addresses(twin) == _addresses(run)
        assert twin._weights.computed == 0  # pyright: ignore[reportPrivateUsage]


def test_setting_a_param_of_one_clone_is_never_seen_by_another(device: str) -> None:
    run = rlx.compile(_graph(), device)
    expected = run(_X)
    twin, third = run.clone(), run.clone()
    twin.set_param("w", np.zeros((32, 80)))
    twin.set_param_range("b", 0, np.zeros(80))
    np.testing.assert_array_equal(twin(_X), np.zeros((3, 80), np.float32))
    for other in (run, third):
        np.testing.assert_array_equal(other(_X), expected)
        np.testing.assert_array_equal(other.get_param("w"), _array(32, 80))
        np.testing.assert_array_equal(other.get_param("b"), _array(80, seed=1))
    run.set_param("b", np.zeros(80))
    twin.set_param("b", np.ones(80))
    np.testing.assert_array_equal(twin(_X), np.ones((3, 80), np.float32))
    np.testing.assert_allclose(run(_X), _X @ _array(32, 80), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(third(_X), expected)


def test_clones_outlive_the_original_and_one_another(device: str) -> None:
    run = rlx.compile(_graph(), device)
    expected = run(_X)
    twin = run.clone()
    third = twin.clone()
    run.close()
    np.testing.assert_array_equal(twin(_X), expected)
    twin.close()
    del run, twin
    gc.collect()
    np.testing.assert_array_equal(third(_X), expected)
    np.testing.assert_array_equal(third.get_param("w"), _array(32, 80))
    third.set_param("w", np.zeros((32, 80)))  # alone now: overwritten in place
    np.testing.assert_array_equal(third(_X), np.repeat(_array(1, 80, seed=1), 3, 0))


def test_clones_run_in_parallel_without_mixing_up_their_values() -> None:
    run = rlx.compile(_graph(), "cpu", threads=1)
    data = [_array(40, 32, seed=i) for i in range(4)]
    expected = [run(d) for d in data]
    twins = [run.clone() for _ in data]
    wrong: list[int] = []

    def work(index: int) -> None:
        wrong.extend(
            index
            for _ in range(200)
            if not np.array_equal(twins[index](data[index]), expected[index])
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_clones_can_compile_set_and_read_at_the_same_time() -> None:
    """They hold the same cells, which one drops, reads back or overwrites while another looks at them."""
    run = rlx.compile(_graph(), "cpu", threads=1)
    twins = [run.clone() for _ in range(4)]  # before anything was packed
    w, b = _array(32, 80), _array(80, seed=1)
    wrong: list[str] = []

    def work(index: int) -> None:
        mine = twins[index]
        for turn in range(40):
            if not np.array_equal(mine.get_param("w"), w):
                wrong.append(f"w of {index} in turn {turn}")
            if not np.allclose(mine(_X), _X @ w + b, rtol=1e-4, atol=1e-4):
                wrong.append(f"run of {index} in turn {turn}")
            other = mine.clone()
            other.set_param("w", w * (index + 2))
            if not np.allclose(other(_X), _X @ w * (index + 2) + b, rtol=1e-4, atol=1e-3):
                wrong.append(f"clone of {index} in turn {turn}")
            if turn % 10 == 5:
                mine.share_weights_from(twins[(index + 1) % len(twins)])
            other.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(twins))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- sharing between executables --------------------------------------------------------------------------------------


def test_weights_are_shared_without_a_copy_also_the_packed_ones() -> None:
    first, second = rlx.compile(_graph(0), "cpu"), rlx.compile(_graph(5, name="other"), "cpu")
    expected = first(_X)
    assert not np.array_equal(second(_X), expected)
    second.share_weights_from(first)
    np.testing.assert_array_equal(second(_X), expected)
    assert _addresses(second) == _addresses(first)
    assert [s.version for s in second.params.values()] == [1, 1]
    first.close()
    np.testing.assert_array_equal(second(_X), expected)


def test_what_is_shared_is_copied_on_write(device: str) -> None:
    first, second = rlx.compile(_graph(0), device), rlx.compile(_graph(5), device)
    expected = first(_X)
    second.share_weights_from(first)
    second.set_param_range("w", 0, np.zeros((32, 80)))
    np.testing.assert_array_equal(second(_X), np.repeat(_array(1, 80, seed=1), 3, 0))
    np.testing.assert_array_equal(first(_X), expected)
    first.set_param("b", np.zeros(80))
    np.testing.assert_array_equal(second.get_param("b"), _array(80, seed=1))


@pytest.mark.parametrize("method", ["share_weights_from", "copy_params_from"])
def test_executables_that_compute_in_different_dtypes_share_originals_only(method: str) -> None:
    """What was packed, or narrowed, of a weight belongs to the program that asked for it."""
    wide, narrow = rlx.compile(_graph(0)), rlx.compile(_graph(0), precision="f16")
    expected = {m: rlx.compile(_graph(5), precision=m)(_X) for m in ("f32", "f16")}
    assert not np.array_equal(expected["f32"], expected["f16"])
    source = rlx.compile(_graph(5))
    for run in (source, wide, narrow):
        run(_X)
    getattr(narrow, method)(source)
    getattr(wide, method)(narrow)
    np.testing.assert_array_equal(narrow(_X), expected["f16"])
    np.testing.assert_array_equal(wide(_X), expected["f32"])
    np.testing.assert_array_equal(source(_X), expected["f32"])
    np.testing.assert_array_equal(narrow.get_param("w"), _array(32, 80, seed=5))


def test_copied_weights_are_memory_of_their_own() -> None:
    first, second = rlx.compile(_graph(0), "cpu"), rlx.compile(_graph(5), "cpu")
    expected = first(_X)
    second.copy_params_from(first)
    np.testing.assert_array_equal(second(_X), expected)
    assert not set(_addresses(second).values()) & set(_addresses(first).values())
    first.set_param("b", np.zeros(80))
    np.testing.assert_array_equal(second(_X), expected)


@pytest.mark.parametrize("method", ["share_weights_from", "copy_params_from"])
def test_nothing_is_taken_over_unless_everything_fits(device: str, method: str) -> None:
    run = rlx.compile(_graph(), device)
    expected = run(_X)
    with rlx.Graph("more") as more:
        x = more.input("x", ["N", 32])
        w, b = more.param("w", _array(32, 80, seed=3)), more.param("b", _array(80, seed=4))
        more.output("y", (matmul(x, w) + b) * more.param("c", _array(80)))
    with rlx.Graph("empty") as empty:
        x = empty.input("x", ["N", 32])
        w, b = empty.param("w", _array(32, 80, seed=3)), empty.param("b", shape=[80])
        empty.output("y", matmul(x, w) + b)
    with rlx.Graph("flat") as flat:  # as many elements, and so many bytes
        x = flat.input("x", ["N", 32])
        w = flat.param("w", _array(80, 32, seed=3))
        b = flat.param("b", _array(80, seed=4))
        flat.output("y", matmul(x, transpose(w)) + b)
    cases = [
        (flat, r"is w: f32\[80,32\] in flat"),
        (_graph(width=81), r"'?w: f32\[32,80\]'? is w: f32\[32,81\]"),
        (_graph(dtype="f64"), r"is w: f64\[32,80\]"),
        (more, "'c' is only in more"),
        (empty, "'b' has no value in empty"),
    ]
    for graph, message in cases:
        other = rlx.compile(graph, device)
        with pytest.raises(rlx.UsageError, match=message):
            getattr(run, method)(other)
        np.testing.assert_array_equal(run(_X), expected)
        assert [s.version for s in run.params.values()] == [0, 0]
    closed = rlx.compile(_graph(3), device)
    closed.close()
    with pytest.raises(rlx.UsageError, match="closed"):
        getattr(run, method)(closed)
    getattr(run, method)(run)
    np.testing.assert_array_equal(run(_X), expected)


def test_two_that_share_with_each_other_at_the_same_time_do_not_wait_for_ever() -> None:
    first, second = rlx.compile(_graph(0)), rlx.compile(_graph(5))

    def work(a: rlx.Executable, b: rlx.Executable) -> None:
        for _ in range(100):
            a.share_weights_from(b)

    threads = [
        threading.Thread(target=work, args=pair) for pair in ((first, second), (second, first))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    np.testing.assert_array_equal(first.get_param("w"), second.get_param("w"))


# -- giving memory back -----------------------------------------------------------------------------------------------


def test_trim_gives_the_arena_back_and_changes_no_result(device: str) -> None:
    run = rlx.compile(_graph(), device)
    run(_array(500, 32))
    expected = run(_X)
    run.trim()
    assert run.memory().arena == 0
    np.testing.assert_array_equal(run(_X), expected)
    np.testing.assert_array_equal(run(_array(500, 32))[:3], run(_array(500, 32)[:3]))
    run.trim()
    run.trim()
    run.close()
    with pytest.raises(rlx.UsageError, match="closed"):
        run.trim()


def test_a_closed_executable_holds_neither_graph_nor_weights(device: str) -> None:
    graph = _graph()
    run = rlx.compile(graph, device)
    run(_X)
    program: Any = run.program
    held = [weakref.ref(program), weakref.ref(program.compiled), weakref.ref(run._source)]  # pyright: ignore[reportPrivateUsage]
    del program, graph
    run.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    with pytest.raises(rlx.UsageError, match="closed"):
        run(_X)
    with pytest.raises(rlx.UsageError, match="closed"):
        _ = run.program
