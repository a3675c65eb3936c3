# SPDX-License-Identifier: Apache-2.0
"""What an executable remembers: read, set, saved, put back, reset; and what it refuses to remember."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ops.elementwise import tanh
from rlx.ops.indexing import gather
from rlx.ops.matmul import matmul
from rlx.ops.movement import transpose
from rlx.ops.norm import softmax
from rlx.ops.reduce import reduce_sum
from rlx.ops.rnn import LSTM
from rlx.ops.spec import emit
from rlx.ops.state import write_rows

_DEVICES = ("reference", "cpu")
_DTYPES = ["f32", "f64", "f16", "bf16", "i8", "u8", "i16", "i32", "i64", "bool", "c64"]


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _checked() -> Any:
    with override(RLX_CHECK=True, RLX_VERIFY=True):
        yield


def _sum(shape: tuple[int | str, ...] = ("B", 3), init: Any = 0, dtype: str = "f32") -> rlx.Graph:
    """y = s + x; s = y."""
    with rlx.Graph("sum") as g:
        x = g.input("x", shape, dtype)
        s = g.state("s", shape, dtype, init)
        y = s + x
        g.set_next(s, y)
        g.output("y", y)
    return g


def _cache(dtype: str = "f32", *, ring: bool = False) -> rlx.Graph:
    with rlx.Graph("cache") as g:
        row = g.input("row", ["B", 1, 4], dtype)
        at = g.input("at", ["B"], "i64")
        kv = g.state("kv", ["B", 6, 4], dtype)
        g.set_next(kv, write_rows(kv, row, at, 1, ring=ring))
    return g


def _ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


# -- values from run to run --------------------------------------------------------------------------------------------


def test_a_state_carries_its_value_from_run_to_run(device: str) -> None:
    run = rlx.compile(_sum(init=[1, 2, 3]), device)
    for step in range(1, 4):
        np.testing.assert_array_equal(run(_ones(2, 3)), [[1 + step, 2 + step, 3 + step]] * 2)
    state = run.state["s"]
    assert (state.name, state.shape, str(state.dtype), state.nbytes) == ("s", (2, 3), "f32", 24)
    np.testing.assert_array_equal(state.get(), [[4, 5, 6]] * 2)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("device", "isa"), [("reference", ""), ("cpu", ""), ("cpu", "v3")])
def test_rows_of_every_dtype_are_written_and_kept_to_the_bit(
    device: str, isa: str, dtype: str
) -> None:
    with override(RLX_CPU_ISA=isa):
        run = rlx.compile(_cache(dtype), device)
    kind = run.inputs[0].dtype.numpy
    rng, expected = np.random.default_rng(0), np.zeros((2, 6, 4), kind)
    for at in ([0, 5], [3, 3], [-1, 0], [5, 1]):
        row = rng.integers(0, 2, (2, 1, 4)).astype(kind)
        run.run({"row": row, "at": np.array(at)})
        for entry in range(2):
            expected[entry, at[entry]] = row[entry, 0]
    found = run.state["kv"].get()
    assert found.dtype == kind
    assert found.tobytes() == expected.tobytes()
    assert run.state["kv"].nbytes == expected.nbytes == run.memory().state


def test_narrow_floats_are_rounded_once_a_run(device: str) -> None:
    run = rlx.compile(_sum((1,), dtype="bf16"), device)
    total, tenth = ml_dtypes.bfloat16(0), np.array([0.1], ml_dtypes.bfloat16)
    for _ in range(50):
        run(tenth)
        total = ml_dtypes.bfloat16(np.float32(total) + np.float32(tenth[0]))
    assert run.state["s"].get()[0] == total


@pytest.mark.parametrize("precision", ["f16", "bf16", "mixed-f16", "mixed-bf16"])
def test_narrow_arithmetic_leaves_the_rows_of_a_cache_alone(device: str, precision: str) -> None:
    """New rows are computed in the narrow dtype; old ones pass through no cast, and are not copied."""
    with rlx.Graph("decoder") as g:
        x = g.input("x", ["B", 1, 8])
        at = g.input("at", [], "i64")
        cache = g.state("cache", ["B", 6, 8])
        new = write_rows(cache, x @ g.param("w", np.eye(8, dtype=np.float32)), at, axis=1)
        g.set_next(cache, new)
        g.output("scores", softmax(x @ transpose(new, (0, 2, 1))))
    run = rlx.compile(g, device, precision=precision)
    narrow = ml_dtypes.bfloat16 if precision.endswith("bf16") else np.float16
    want = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    want[:, 5] *= 1e30  # beyond f16
    run.state["cache"].set(want)
    for step in range(3):
        row = np.random.default_rng(step).standard_normal((2, 1, 8)).astype(np.float32)
        run.run({"x": row, "at": np.array(step)})
        want[:, step] = row[:, 0].astype(narrow)
        assert run.state["cache"].get().tobytes() == want.tobytes()
    if device == "cpu":
        compiled: Any = run.program.compiled
        (slots,) = compiled.program.states
        assert slots.aliases, "the cache is written in place"


def test_a_ring_holds_the_last_rows(device: str) -> None:
    run = rlx.compile(_cache(ring=True), device)
    for step in range(20):
        run.run({"row": np.full((1, 1, 4), step, np.float32), "at": np.array([step])})
    assert sorted(run.state["kv"].get()[0, :, 0].tolist()) == [14, 15, 16, 17, 18, 19]


def test_states_may_take_each_others_value(device: str) -> None:
    with rlx.Graph("swap") as g:
        a, b = g.state("a", [2], init=[1, 2]), g.state("b", [2], init=[3, 4])
        g.set_next(a, b)
        g.set_next(b, a)
        g.output("old", a)
    run = rlx.compile(g, device)
    for expected in ([1, 2], [3, 4], [1, 2]):
        np.testing.assert_array_equal(run(), expected)
    np.testing.assert_array_equal(run.state["a"].get(), [3, 4])
    np.testing.assert_array_equal(run.state["b"].get(), [1, 2])


def test_a_state_at_the_beginning_of_memory_is_a_state_like_any_other(device: str) -> None:
    """No offset means "none": the only buffer of a program may be its state."""
    with rlx.Graph("count") as g:
        n = g.state("n", [], "i64")
        g.set_next(n, n + 1)
    run = rlx.compile(g, device)
    for _ in range(3):
        run.run({})
    assert run.state["n"].get() == 3
    assert run.state["n"].get().shape == ()


def test_positions_beyond_four_gibibytes_are_positions() -> None:
    """The memory of a state that was never written takes no pages, so this needs a few of them."""
    rows, width = (5 << 30) // 64, 64
    with rlx.Graph("large") as g:
        row = g.input("row", [1, width], "i8")
        at = g.input("at", [], "i64")
        probe = g.input("probe", [3], "i64")
        kv = g.state("kv", [rows, width], "i8")
        new = write_rows(kv, row, at)
        g.set_next(kv, new)
        g.output("found", gather(new, probe))
    with rlx.compile(g) as run:
        last, wrapped = rows - 1, rows - 1 - (4 << 30) // width
        for value, at in ((3, last), (5, 0)):
            inputs = {"row": np.full((1, width), value, np.int8), "at": np.array(at)}
            found = run.run({**inputs, "probe": np.array([last, wrapped, 0])})["found"]
        assert found[:, 0].tolist() == [3, 0, 5]
        assert run.memory().state == 5 << 30
        assert run.memory().arena < 1 << 20


def test_a_state_that_finds_no_room_says_which(device: str) -> None:
    run = rlx.compile(_huge(), device)
    with pytest.raises(rlx.OutOfMemoryError, match=r"state 's' of huge: .* could not be allocated"):
        run.run({})


def _huge() -> rlx.Graph:
    with rlx.Graph("huge") as g:
        s = g.state("s", [1 << 30, 1 << 27], "i8")
        g.set_next(s, s)
    return g


def test_negative_zero_and_other_initial_values_are_not_zero(device: str) -> None:
    for init in (-0.0, 1e-45, np.nan):
        run = rlx.compile(_sum((2,), init=np.float32(init)), device)
        (value,) = set(run.state["s"].get().view(np.uint32).tolist())
        with rlx.Graph("keep") as g:
            s = g.state("s", [2], init=np.float32(init))
            g.output("y", s)
        found = rlx.compile(g, device).run({})["y"]
        assert (
            set(found.view(np.uint32).tolist())
            == {value}
            == {int(np.float32(init).view(np.uint32))}
        )


@pytest.mark.parametrize("bound", [3, 16])
def test_a_recurrent_layer_is_advanced_by_the_steps_there_are(device: str, bound: int) -> None:
    """Its last hidden state is that of step T, whatever the bound of T is."""
    rng = np.random.default_rng(0)
    w, r = (rng.uniform(-1, 1, (1, 4 * 5, k)).astype(np.float32) for k in (3, 5))

    def layer(steps: int | str) -> rlx.Graph:
        with rlx.Graph("layer") as g:
            x = g.input("x", [steps, 1, 3])
            h, c = g.state("h", [1, 1, 5]), g.state("c", [1, 1, 5])
            lstm = LSTM(hidden=5)
            y, h2, c2 = emit(lstm, x, g.param("w", w), g.param("r", r), None, None, h, c)
            g.set_next(h, h2)
            g.set_next(c, c2)
            g.output("y", y)
        return g

    run = rlx.compile(layer("T"), device, dims={"T": bound})
    whole = rlx.compile(layer(14), "reference")
    x = rng.uniform(-1, 1, (14, 1, 3)).astype(np.float32)
    pieces = [run(x[a:b]) for a, b in ((0, 3), (3, 4), (4, 9), (9, 14))]
    np.testing.assert_allclose(np.concatenate(pieces), whole(x), atol=1e-5)
    np.testing.assert_allclose(run.state["c"].get(), whole.state["c"].get(), atol=1e-5)
    assert run.variants == 1


# -- reading and setting -----------------------------------------------------------------------------------------------


def test_a_value_can_be_set_and_is_copied_both_ways(device: str) -> None:
    run = rlx.compile(_sum(), device)
    mine = np.full((2, 3), 10, np.float32)
    run.state["s"].set(mine)
    mine[:] = 0
    run.state["s"].get()[:] = 99
    np.testing.assert_array_equal(run(_ones(2, 3)), np.full((2, 3), 11))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 3)), r"s: f32\[B,3\] .* float64; convert it with .astype\('float32'\)"),
        (np.zeros((2, 3), np.int32), "int32"),
        (np.zeros((2, 4), np.float32), r"shape \[2, 4\]"),
        (np.zeros(3, np.float32), r"shape \[3\]"),
        (np.zeros((2, 3), np.float16), "float16"),  # half of the bytes
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    device: str, value: Any, message: str
) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    with pytest.raises(rlx.UsageError, match=message):
        run.state["s"].set(value)
    np.testing.assert_array_equal(run.state["s"].get(), _ones(2, 3))


def test_names_of_states_are_checked(device: str) -> None:
    run = rlx.compile(_sum(), device)
    assert list(run.state) == ["s"]
    assert "s" in run.state
    assert "t" not in run.state
    with pytest.raises(rlx.UsageError, match=r"no state 'ss'; it has s.*'s'"):
        _ = run.state["ss"]
    assert run.state.get("s") is run.state["s"]
    assert run.state.get("t") is None
    assert dict(rlx.compile(_plain(), device).state) == {}


def _plain() -> rlx.Graph:
    with rlx.Graph("plain") as g:
        g.output("y", g.input("x", [2]) * 2)
    return g


def test_before_the_first_run_a_value_is_the_initial_one_where_its_extents_are_known(
    device: str,
) -> None:
    run = rlx.compile(_sum((2, 3), init=5), device)
    np.testing.assert_array_equal(run.state["s"].get(), np.full((2, 3), 5))
    run = rlx.compile(_sum(), device)
    assert run.state["s"].shape == ("B", 3)
    with pytest.raises(rlx.UsageError, match=r"s: f32\[B,3\] .* holds nothing .* gives B"):
        run.state["s"].get()


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_puts_everything_back(device: str) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    snapshot = run.state.snapshot()
    assert snapshot.nbytes == 24
    run(_ones(2, 3))
    run.state.restore(snapshot)
    np.testing.assert_array_equal(run(_ones(2, 3)), np.full((2, 3), 2))
    run.state.restore(snapshot)  # it did not change with the runs
    np.testing.assert_array_equal(run(_ones(2, 3)), np.full((2, 3), 2))


def test_a_snapshot_of_nothing_is_the_beginning(device: str) -> None:
    run = rlx.compile(_sum(init=4), device)
    empty = run.state.snapshot()
    run(_ones(2, 3))
    run.state.restore(empty)
    np.testing.assert_array_equal(run(_ones(5, 3)), np.full((5, 3), 5))


def test_a_snapshot_moves_to_another_executable(device: str) -> None:
    one, other = rlx.compile(_sum(), device), rlx.compile(_sum(), "reference")
    one(_ones(2, 3))
    other.state.restore(one.state.snapshot())
    np.testing.assert_array_equal(other(_ones(2, 3)), one(_ones(2, 3)))


def test_a_snapshot_of_another_model_is_refused_and_changes_nothing(device: str) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    wide = rlx.compile(_sum(("B", 4)), device)
    wide(_ones(2, 4))
    with pytest.raises(rlx.UsageError, match=r"shape \[2, 4\]"):
        run.state.restore(wide.state.snapshot())
    cache = rlx.compile(_cache(), device)
    cache.run({"row": _ones(2, 1, 4), "at": np.array([0, 0])})
    with pytest.raises(rlx.UsageError, match="kv"):
        run.state.restore(cache.state.snapshot())
    nothing: Any = None
    with pytest.raises(rlx.UsageError, match="not from a NoneType"):
        run.state.restore(nothing)
    np.testing.assert_array_equal(run.state["s"].get(), _ones(2, 3))


# -- runs that fail ----------------------------------------------------------------------------------------------------


def test_a_run_that_failed_leaves_states_undefined_until_they_are_put_back(device: str) -> None:
    run = rlx.compile(_cache(), device)
    good = {"row": _ones(2, 1, 4), "at": np.array([0, 0])}
    run.run(good)
    snapshot = run.state.snapshot()
    with pytest.raises(rlx.ExecutionError):
        run.run({**good, "at": np.array([0, 6])})
    for attempt in (lambda: run.run(good), run.state["kv"].get, run.state.snapshot):
        with pytest.raises(rlx.UsageError, match=r"failed .* 'kv' undefined.*reset\(\).*restore"):
            attempt()
    run.state.restore(snapshot)
    run.run({**good, "at": np.array([1, 1])})
    np.testing.assert_array_equal(run.state["kv"].get()[:, :, 0], [[1, 1, 0, 0, 0, 0]] * 2)


@pytest.mark.parametrize("how", ["all", "one", "set"])
def test_reset_and_set_end_the_undefined_time(device: str, how: str) -> None:
    run = rlx.compile(_cache(), device)
    good = {"row": _ones(2, 1, 4), "at": np.array([0, 0])}
    with pytest.raises(rlx.ExecutionError):
        run.run({**good, "at": np.array([0, 6])})
    match how:
        case "all":
            run.state.reset()
        case "one":
            run.state["kv"].reset()
        case _:
            run.state["kv"].set(np.zeros((2, 6, 4), np.float32))
    run.run(good)
    assert run.state["kv"].get().sum() == 8


def test_a_call_that_is_refused_leaves_states_as_they_are(device: str) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    for wrong in (np.ones((2, 4), np.float32), np.ones((2, 3), np.float64)):
        with pytest.raises(rlx.UsageError):
            run(wrong)
    np.testing.assert_array_equal(run(_ones(2, 3)), np.full((2, 3), 2))


# -- extents -----------------------------------------------------------------------------------------------------------


def test_another_batch_is_refused_with_what_to_do(device: str) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    with pytest.raises(
        rlx.UsageError, match=r"'s' of sum holds f32\[2, 3\].*it is f32\[4, 3\].*reset\(\).*set\("
    ):
        run(_ones(4, 3))
    np.testing.assert_array_equal(run(_ones(2, 3)), np.full((2, 3), 2))
    run.state.reset()
    np.testing.assert_array_equal(run(_ones(4, 3)), _ones(4, 3))
    run.state["s"].set(np.full((1, 3), 7, np.float32))
    np.testing.assert_array_equal(run(_ones(1, 3)), np.full((1, 3), 8))
    assert run.variants == 1


def _recurrent(time: int | str) -> rlx.Graph:
    """h' = tanh(sum over t of x[t] @ w + h): a run over T steps changes h by the steps there are."""
    rng = np.random.default_rng(1)
    with rlx.Graph("recurrent") as g:
        x = g.input("x", [time, 4])
        w = g.param("w", rng.uniform(-1, 1, (4, 4)).astype(np.float32))
        h = g.state("h", [4])
        n = g.state("n", [4], "i32")
        new = tanh(reduce_sum(matmul(x, w), (0,), keepdims=False) + h)
        g.set_next(h, new)
        g.set_next(n, n + 1)
        g.output("y", new)
    return g


def test_a_bound_that_grows_keeps_the_states(device: str) -> None:
    """A recurrence is never advanced by padding: a symbolic program computes what the static ones do."""
    run = rlx.compile(_recurrent("T"), device, dims={"T": 4})
    statics: dict[int, Any] = {}
    snapshot = run.state.snapshot()
    for length in (3, 4, 1, 9, 40, 2, 200):
        x = np.random.default_rng(length).uniform(-1, 1, (length, 4)).astype(np.float32)
        static = statics.setdefault(length, rlx.compile(_recurrent(length), "reference"))
        static.state.restore(snapshot)
        np.testing.assert_allclose(run(x), static(x), atol=1e-5)
        snapshot = run.state.snapshot()
    assert run.state["n"].get().tolist() == [7] * 4
    assert run.variants == 1


def test_a_bound_of_a_state_that_grows(device: str) -> None:
    run = rlx.compile(_sum(), device, dims={"B": 2})
    assert run.memory().state == 24
    run(_ones(1, 3))
    assert run.memory().state == 12
    run.state.reset()
    np.testing.assert_array_equal(run(_ones(9, 3)), _ones(9, 3))
    np.testing.assert_array_equal(run(_ones(9, 3)), _ones(9, 3) * 2)
    assert run.memory().state == 9 * 12


def _capacity() -> rlx.Graph:
    with rlx.Graph("capacity") as g:
        row = g.input("row", [1, 2])
        at = g.input("at", [], "i64")
        kv = g.state("kv", ["C", 2])
        new = write_rows(kv, row, at)
        g.set_next(kv, new)
        g.output("sum", reduce_sum(new, (0,), keepdims=False))
    return g


def test_an_extent_that_only_states_have_is_a_capacity(device: str) -> None:
    run = rlx.compile(_capacity(), device)
    with pytest.raises(rlx.UsageError, match="no input of capacity gives the extent C"):
        run(_ones(1, 2), np.array(0))
    run = rlx.compile(_capacity(), device, dims={"C": 3})
    for step in range(3):
        run(_ones(1, 2), np.array(step))
    with pytest.raises(rlx.ExecutionError):
        run(_ones(1, 2), np.array(3))
    run.state.reset()
    run(_ones(1, 2), np.array(2))
    larger = np.zeros((8, 2), np.float32)
    larger[:3] = run.state["kv"].get()
    run.state["kv"].set(larger)  # beyond the bound
    np.testing.assert_array_equal(run(_ones(1, 2), np.array(7)), [2, 2])
    assert run.memory().state == 64
    assert run.variants == 1


# -- around it ---------------------------------------------------------------------------------------------------------


def test_warming_up_changes_no_state(device: str) -> None:
    run = rlx.compile(_sum(init=1), device)
    run.warmup({"x": (2, 3)})
    assert run.state["s"].nbytes == 0
    np.testing.assert_array_equal(run(_ones(4, 3)), np.full((4, 3), 2))
    run.warmup({"x": (4, 3)})
    np.testing.assert_array_equal(run(_ones(4, 3)), np.full((4, 3), 3))


def test_a_profile_changes_no_state_a_tap_is_a_run() -> None:
    run = rlx.compile(_sum(), "cpu")
    run(_ones(2, 3))
    run.profile({"x": _ones(2, 3)}, runs=2)
    np.testing.assert_array_equal(run.state["s"].get(), _ones(2, 3))
    assert run.check_finite({"x": _ones(2, 3)})["y"][0, 0] == 2
    np.testing.assert_array_equal(run.state["s"].get(), np.full((2, 3), 2))


def test_outputs_are_not_the_memory_of_a_state(device: str) -> None:
    run = rlx.compile(_sum(), device)
    first = run(_ones(2, 3))
    run(_ones(2, 3))
    np.testing.assert_array_equal(first, _ones(2, 3))
    first[:] = 50
    np.testing.assert_array_equal(run(_ones(2, 3)), np.full((2, 3), 3))


def test_runs_from_many_threads_are_one_after_the_other(device: str) -> None:
    run = rlx.compile(_sum((3,)), device)

    def work() -> None:
        for _ in range(50):
            run(_ones(3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(run.state["s"].get(), np.full(3, 200))


def test_runs_in_a_queue_carry_the_state_and_reading_waits_for_them(device: str) -> None:
    run = rlx.compile(_sum(), device)
    futures = [run.run_async({"x": _ones(2, 3)}) for _ in range(20)]
    np.testing.assert_array_equal(run.state["s"].get(), np.full((2, 3), 20))
    assert [f.result()["y"][0, 0] for f in futures] == list(range(1, 21))
    results = run.run_pipelined([{"x": _ones(2, 3)}] * 5)
    assert [r["y"][0, 0] for r in results] == list(range(21, 26))
    snapshot = run.state.snapshot()
    one_by_one = rlx.compile(_sum(), device)
    for _ in range(25):
        one_by_one(_ones(2, 3))
    np.testing.assert_array_equal(snapshot.values["s"], one_by_one.state["s"].get())


def test_a_run_in_a_queue_that_fails_makes_those_behind_it_fail(device: str) -> None:
    run = rlx.compile(_cache(), device)
    good = {"row": _ones(2, 1, 4), "at": np.array([0, 0])}
    bad = {**good, "at": np.array([0, 6])}
    first, second, third = (run.run_async(i) for i in (good, bad, good))
    assert first.result() == {}
    with pytest.raises(rlx.ExecutionError):
        second.result()
    with pytest.raises(rlx.UsageError, match="undefined"):
        third.result()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_clone_has_the_state_to_the_bit(device: str, dtype: str) -> None:
    run = rlx.compile(_cache(dtype), device)
    kind = run.inputs[0].dtype.numpy
    bits = np.random.default_rng(1).integers(0, 2, 2 * 6 * 4 * kind.itemsize, np.uint8)
    run.state["kv"].set(bits.view(kind).reshape(2, 6, 4))
    twin = run.clone()
    run.run({"row": np.ones((2, 1, 4), kind), "at": np.array([0, 0])})
    assert twin.state["kv"].get().tobytes() == bits.tobytes()


def test_a_clone_begins_with_the_state_or_without(device: str) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    twin, fresh = run.clone(), run.clone(with_state=False)
    run(_ones(2, 3))
    np.testing.assert_array_equal(twin(_ones(2, 3)), np.full((2, 3), 2))
    np.testing.assert_array_equal(fresh(_ones(4, 3)), _ones(4, 3))
    np.testing.assert_array_equal(run.state["s"].get(), np.full((2, 3), 2))


def test_trimming_keeps_the_states(device: str) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    run.trim()
    np.testing.assert_array_equal(run.state["s"].get(), _ones(2, 3))
    np.testing.assert_array_equal(run(_ones(2, 3)), np.full((2, 3), 2))


def test_closing_gives_the_states_back(device: str) -> None:
    run = rlx.compile(_sum(), device)
    run(_ones(2, 3))
    run.close()
    for attempt in (run.state["s"].get, run.state.snapshot, run.state.reset):
        with pytest.raises(rlx.UsageError, match="sum is closed"):
            attempt()


@pytest.mark.parametrize("device", ["null", "cpu"])
def test_memory_reports_states_by_name(device: str) -> None:
    run = rlx.compile(_sum((4, 3)), device)
    assert run.memory().state == 48
    (state,) = [t for t in run.memory().tensors if t.kind == "state"]
    assert (state.name, state.type, state.nbytes) == ("s", "f32[4,3]", 48)
    assert [(s.type, s.nbytes) for s in run.memory().top(kind="state")] == [("f32[4,3]", 48)]


# -- building ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "init", "message"),
    [
        ([2, 3], "f32", np.zeros((2, 3)), "float64; pass an array"),
        ([2, 3], "i8", 300, "int64; pass an array"),
        ([2, 3], "i32", 0.5, "float64; pass an array"),
        ([2, 3], "f32", 1e39, "outside the range of f32"),
        ([2, 3], "f16", [1, 2, 70_000], "outside the range of f16"),
        ([2, 3], "f8e4m3", 1000, "outside the range of f8e4m3"),
        ([2, 3], "f8e5m2", 1e6, "outside the range of f8e5m2"),
        ([2, 3], "f32", [1, 2], r"shape \[2\] does not broadcast"),
        (["N", 3], "f32", np.zeros((4, 3), np.float32), r"shape \[4, 3\] does not broadcast"),
        ([3], "f32", 1j, "complex128; pass an array"),
    ],
)
def test_initial_values_are_checked(shape: Any, dtype: str, init: Any, message: str) -> None:
    with rlx.Graph() as g, pytest.raises(rlx.UsageError, match=message):
        g.state("s", shape, dtype, init)


def test_next_values_are_checked() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [3])
        s = g.state("s", [2])
        with pytest.raises(
            rlx.UsageError, match=r"state 's' is f32\[2\], it cannot become f32\[3\]"
        ):
            g.set_next(s, x)
        with pytest.raises(rlx.UsageError, match="not a state of this graph"):
            g.set_next(x, s)
        with pytest.raises(rlx.UsageError, match="already"):
            g.state("x", [3])
        with pytest.raises(rlx.UsageError, match="already"):
            g.input("s", [3])
