# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, as_completed, wait
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest

import rlx
from rlx.base.config import NAN_CHECK, override
from rlx.base.errors import DeviceError
from rlx.base.numeric import Array
from rlx.ops.elementwise import div
from rlx.runtime import queue as queue_module
from rlx.runtime.executable import Executable
from rlx.runtime.futures import RunFuture

_SECONDS = 30
Gated: TypeAlias = Callable[[rlx.Graph], tuple[Executable, Any]]


@pytest.fixture(params=("reference", "cpu"))
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _twice() -> rlx.Graph:
    with rlx.Graph("twice") as g:
        x = g.input("x", ["N"])
        g.output("y", x * 2)
        g.output("z", x + 1)
    return g


def _quotient() -> rlx.Graph:
    with rlx.Graph("quotient") as g:
        a, b = g.input("a", [2], "i32"), g.input("b", [2], "i32")
        g.output("y", div(a, b))
    return g


def _x(value: float, n: int = 3) -> Array:
    return np.full(n, value, np.float32)


def _y(future: RunFuture) -> Array:
    return future.result(_SECONDS)["y"]


# -- run_async ------------------------------------------------------------------------------------------------------


def test_an_enqueued_run_gives_what_run_gives(device: str) -> None:
    m = rlx.compile(_twice(), device)
    futures = [m.run_async({"x": _x(i, i + 1)}) for i in range(20)]
    for i, future in enumerate(futures):
        want = m.run({"x": _x(i, i + 1)})
        assert list(future.result(_SECONDS)) == ["y", "z"]
        np.testing.assert_array_equal(_y(future), want["y"])


def test_inputs_may_be_overwritten_at_once(gated: Gated) -> None:
    m, gate = gated(_twice())
    x = _x(1)
    futures: list[RunFuture] = []
    for value in range(4):
        x[:] = value
        futures.append(m.run_async([x]))
    x[:] = -1
    gate.open()
    for value, future in enumerate(futures):
        np.testing.assert_array_equal(_y(future), _x(2 * value))


def test_some_outputs_go_into_the_callers_buffers(device: str) -> None:
    m = rlx.compile(_twice(), device)
    buffers = [_x(0) for _ in range(5)]
    futures = [m.run_async([_x(i)], ["y"], [b]) for i, b in enumerate(buffers)]
    for i, (future, buffer) in enumerate(zip(futures, buffers, strict=True)):
        assert future.result(_SECONDS) == {"y": buffer}
        np.testing.assert_array_equal(buffer, _x(2 * i))


def test_lists_and_dicts_of_the_caller_may_change_at_once(gated: Gated) -> None:
    m, gate = gated(_twice())
    outputs, out, buffer = ["y"], {"y": _x(0)}, _x(0)
    first = m.run_async([_x(1)], outputs)
    outputs.append("nothing")
    listed = m.run_async([_x(1)], ["y"], held := [buffer])
    held[0] = _x(9)
    named = m.run_async([_x(1)], None, out)
    kept = out.pop("y")
    gate.open()
    assert list(first.result(_SECONDS)) == ["y"]
    assert _y(listed) is buffer
    assert _y(named) is kept


def test_names_are_checked_at_once_and_the_rest_by_the_future(device: str) -> None:
    m = rlx.compile(_twice(), device)
    with pytest.raises(rlx.UsageError, match="unknown input"):
        m.run_async({"w": _x(1)})
    with pytest.raises(rlx.UsageError, match="queue is at least 1, not -1"):
        m.run_pipelined([], queue=-1)
    with pytest.raises(rlx.UsageError, match="queue is at least 1, not 0"):
        m.run_async([_x(1)], queue=0)
    with pytest.raises(rlx.UsageError, match="array of rank 2"):
        m.run_async([np.ones((1, 3), np.float32)]).result(_SECONDS)
    with pytest.raises(rlx.UsageError, match="unknown output"):
        m.run_async([_x(1)], ["x"]).result(_SECONDS)


def test_an_error_comes_out_of_the_future_of_its_run(device: str) -> None:
    m = rlx.compile(_quotient(), device)
    one = np.ones(2, np.int32)
    futures = [m.run_async([one * 6, one * i]) for i in (1, 0, 2, 0, 3)]
    for divisor, future in zip((1, 0, 2, 0, 3), futures, strict=True):
        if divisor:
            np.testing.assert_array_equal(_y(future), one * (6 // divisor))
        else:
            assert isinstance(future.exception(_SECONDS), rlx.ExecutionError)


def test_runs_take_place_in_the_order_they_were_called_for(gated: Gated) -> None:
    m, gate = gated(_twice())
    ended: list[str] = []
    for name in "abc":
        m.run_async([_x(1)]).add_done_callback(lambda _, name=name: ended.append(name))
    sync = threading.Thread(target=lambda: (m.run([_x(1)]), ended.append("run")))
    sync.start()
    gate.wait_for(1)
    gate.open()
    sync.join(_SECONDS)
    assert ended == ["a", "b", "c", "run"]


def test_no_more_runs_wait_than_the_bound(gated: Gated) -> None:
    m, gate = gated(_twice())
    futures = [m.run_async([_x(0)])]
    gate.wait_for(1)
    futures += [m.run_async([_x(i)], queue=2) for i in (1, 2)]
    entered = threading.Event()

    def submit() -> None:
        futures.append(m.run_async([_x(3)], queue=2))
        entered.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert not entered.wait(0.2)
    gate.open(1)
    assert entered.wait(_SECONDS)
    gate.open()
    thread.join(_SECONDS)
    assert [float(_y(f)[0]) for f in futures] == [0, 2, 4, 6]


def test_a_run_that_has_not_begun_can_be_cancelled(gated: Gated) -> None:
    m, gate = gated(_twice())
    first, second, third = (m.run_async([_x(i)]) for i in range(3))
    gate.wait_for(1)
    assert not first.cancel()
    assert second.cancel()
    gate.open()
    np.testing.assert_array_equal(_y(third), _x(4))
    with pytest.raises(CancelledError):
        second.result(_SECONDS)
    assert not wait([first, second, third], _SECONDS).not_done
    assert gate.began == 2


def test_close_cancels_what_waits_and_lets_the_run_in_flight_end(gated: Gated) -> None:
    m, gate = gated(_twice())
    first, second = m.run_async([_x(1)]), m.run_async([_x(2)])
    gate.wait_for(1)
    closing = threading.Thread(target=m.close)
    closing.start()
    with pytest.raises(CancelledError):
        second.result(_SECONDS)
    assert not first.done()
    gate.open()
    closing.join(_SECONDS)
    np.testing.assert_array_equal(_y(first), _x(2))
    for call in (m.run, m.run_async):
        with pytest.raises(rlx.UsageError, match="twice is closed"):
            call([_x(1)])


def test_close_wakes_who_waits_for_room(gated: Gated) -> None:
    m, gate = gated(_twice())
    m.run_async([_x(0)])
    gate.wait_for(1)
    m.run_async([_x(1)], queue=1)
    errors: list[Exception] = []

    def submit() -> None:
        try:
            m.run_async([_x(2)], queue=1)
        except rlx.UsageError as error:
            errors.append(error)

    waiting = threading.Thread(target=submit)
    waiting.start()
    closing = threading.Thread(target=m.close)
    closing.start()
    waiting.join(_SECONDS)
    gate.open()
    closing.join(_SECONDS)
    assert [str(e) for e in errors] == ["twice is closed"]


def test_a_callback_may_run_enqueue_and_close(device: str) -> None:
    m = rlx.compile(_twice(), device)
    found: list[Any] = []
    done = threading.Event()

    def callback(future: Future[dict[str, Any]]) -> None:
        found.append(future.result()["y"][0])
        found.append(m.run([_x(5)])["y"][0])
        m.run_async([_x(7)])
        m.close()
        done.set()

    m.run_async([_x(1)]).add_done_callback(callback)
    assert done.wait(_SECONDS)
    assert found == [2, 10]
    with pytest.raises(rlx.UsageError, match="closed"):
        m.run([_x(1)])


def test_a_callback_does_not_wait_for_room(gated: Gated) -> None:
    m, gate = gated(_twice())
    made: list[RunFuture] = []
    first = m.run_async([_x(0)])
    gate.wait_for(1)
    first.add_done_callback(lambda _: made.append(m.run_async([_x(2)], queue=1)))
    m.run_async([_x(1)], queue=1)
    gate.open()
    first.result(_SECONDS)
    m.run([_x(3)])
    np.testing.assert_array_equal(_y(made[0]), _x(4))


def test_a_callback_cannot_wait_for_a_later_run(gated: Gated) -> None:
    m, gate = gated(_twice())
    first, later = m.run_async([_x(0)]), m.run_async([_x(1)])
    told: list[str] = []
    done = threading.Event()

    def callback(_: Future[dict[str, Any]]) -> None:
        try:
            later.result()
        except rlx.UsageError as error:
            told.append(str(error))
        with pytest.raises(TimeoutError):
            later.result(0)
        done.set()

    first.add_done_callback(callback)
    gate.open()
    assert done.wait(_SECONDS)
    assert told == [
        "twice does its enqueued runs in this thread: a callback cannot wait for a later one"
    ]
    np.testing.assert_array_equal(_y(later), _x(2))


@pytest.mark.parametrize("use", ["run", "rng", "close", "snapshot", "result", "run_async"])
def test_callbacks_of_runs_that_close_cancels_hang_nothing(gated: Gated, use: str) -> None:
    m, gate = gated(_twice())
    futures = [m.run_async([_x(i)]) for i in range(4)]
    gate.wait_for(1)
    ended: list[str] = []
    ways: dict[str, Callable[[], Any]] = {
        "run": lambda: m.run([_x(1)]),
        "rng": lambda: m.rng,
        "close": m.close,
        "snapshot": m.state.snapshot,
        "result": futures[3].result,
        "run_async": lambda: m.run_async([_x(1)]).result(),
    }

    def callback(_: Future[dict[str, Any]]) -> None:
        try:
            ways[use]()
        except (rlx.UsageError, CancelledError) as error:
            ended.append(type(error).__name__)
        else:
            ended.append("done")

    futures[1].add_done_callback(callback)
    closing = threading.Thread(target=m.close)
    closing.start()
    threading.Timer(0.1, gate.open).start()
    closing.join(_SECONDS)
    assert not closing.is_alive()
    assert len(ended) == 1
    np.testing.assert_array_equal(_y(futures[0]), _x(0))
    assert all(f.cancelled() for f in futures[1:])


def test_clones_and_special_programs_are_made_while_others_enqueue() -> None:
    m = rlx.compile(_twice(), "cpu", dims={"N": 8}, threads=1)
    stop = threading.Event()

    def enqueue() -> None:
        while not stop.is_set():
            m.run_async([_x(1, 8)])

    def make() -> None:
        for _ in range(200):
            m.clone().close()
        m.specialize({"N": 8}, at_least=0)

    threads = [threading.Thread(target=t, daemon=True) for t in (enqueue, make)]
    for thread in threads:
        thread.start()
    threads[1].join(_SECONDS)
    stop.set()
    assert not threads[1].is_alive()
    threads[0].join(_SECONDS)
    assert m.variants == 2


def test_runs_that_wait_while_states_are_bound_say_so() -> None:
    with rlx.Graph("step") as g:
        x, h = g.input("x", [3]), g.input("h", [3])
        g.output("y", x + h)
        g.output("z", x * 2)
    m = rlx.compile(g)
    m.warmup()
    bound = threading.Event()

    def bind(_: Future[dict[str, Any]]) -> None:
        m.bind_state({"y": "h"})
        bound.set()

    with m._lock:  # pyright: ignore[reportPrivateUsage]
        first = m.run_async([_x(1), _x(1)])
        first.add_done_callback(bind)
        late = [m.run_async([_x(1), _x(1)]), m.run_async([_x(1), _x(1)], out={"z": _x(0)})]
    assert bound.wait(_SECONDS)
    for future in late:
        with pytest.raises(rlx.UsageError, match=r"states of step were bound .* now, x$"):
            future.result(_SECONDS)
    np.testing.assert_array_equal(m.run([_x(1)])["z"], _x(2))


def test_callbacks_of_cancelled_runs_may_use_the_executable(gated: Gated) -> None:
    m, gate = gated(_twice())
    m.run_async([_x(0)])
    gate.wait_for(1)
    told: list[Any] = []

    def callback(future: Future[dict[str, Any]]) -> None:
        told.append(future.cancelled())
        try:
            m.run_async([_x(1)])
        except rlx.UsageError as error:
            told.append(str(error))

    m.run_async([_x(1)]).add_done_callback(callback)
    closing = threading.Thread(target=m.close)
    closing.start()
    gate.open()
    closing.join(_SECONDS)
    assert told == [True, "twice is closed"]


def test_without_a_thread_nothing_waits_for_ever(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = rlx.compile(_twice(), device)
    m.run([_x(1)])

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(DeviceError, match="twice has no thread for its queue: can't start"):
        m.run_async([_x(1)])
    monkeypatch.undo()
    np.testing.assert_array_equal(m.run([_x(1)])["y"], _x(2))
    np.testing.assert_array_equal(_y(m.run_async([_x(1)])), _x(2))


def test_enqueued_runs_do_not_see_the_context_of_who_came_first() -> None:
    seen: list[str] = []

    def same(x: rlx.TensorType) -> rlx.TensorType:
        return x

    @rlx.op("test.context", infer=same)
    def context(x: Array) -> Array:
        seen.append(NAN_CHECK.get())
        return x + 0

    with rlx.Graph() as g:
        g.output("y", context(g.input("x", [3])))
    context.unregister()
    m = rlx.compile(g)
    with override(RLX_NAN_CHECK="nan"):
        m.run_async([_x(1)]).result(_SECONDS)
    m.run_async([_x(1)]).result(_SECONDS)
    assert seen == ["", ""]


def test_an_executable_is_collected_when_its_runs_have_ended(device: str) -> None:
    m = rlx.compile(_twice(), device)
    m.run_async([_x(1)]).result(_SECONDS)
    watched = weakref.ref(m)
    del m
    for _ in range(100):  # the thread lets go just after the result is there
        gc.collect()
        if watched() is None:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the executable is still there")


def test_a_weight_changes_after_the_runs_that_were_enqueued_before(gated: Gated) -> None:
    with rlx.Graph("scaled") as g:
        x = g.input("x", [100])
        g.output("y", x * g.param("w", np.full(100, 2, np.float32)))
    m, gate = gated(g)
    futures = [m.run_async([_x(1, 100)]) for _ in range(3)]
    setting = threading.Thread(target=lambda: m.set_param("w", np.full(100, 5, np.float32)))
    setting.start()
    gate.open()
    setting.join(_SECONDS)
    assert [float(_y(f)[0]) for f in futures] == [2, 2, 2]
    assert m.run([_x(1, 100)])["y"][0] == 5


def _total() -> rlx.Graph:
    with rlx.Graph("total") as g:
        x = g.input("x", [100])
        total = g.state("total", [100])
        new = total + x * g.param("w", np.full(100, 2, np.float32))
        g.set_next(total, new)
        g.output("y", new)
    return g


def _tenfold() -> Executable:
    m = rlx.compile(_total(), "reference")
    m.set_param("w", np.full(100, 10, np.float32))
    return m


_AFTER: dict[str, tuple[Callable[[Executable], object], float]] = {
    "clone": (lambda m: m.clone(with_state=True).state["total"].get(), 8),
    "snapshot": (lambda m: m.state.snapshot(), 8),
    "reset": (lambda m: m.state.reset(), 2),
    "set a state": (lambda m: m.state["total"].set(_x(50, 100)), 52),
    "share weights": (lambda m: m.share_weights_from(_tenfold()), 16),
    "copy params": (lambda m: m.copy_params_from(_tenfold()), 16),
    "load params": (lambda m: m.load_params({"w": _x(10, 100)}), 16),
    "trim": (lambda m: m.trim(), 8),
    "set rows": (lambda m: m.set_param_range("w", 0, _x(10, 100)), 16),
}
"""name -> (what is called while three runs wait, what the next run gives)"""


@pytest.mark.parametrize("what", _AFTER)
def test_what_is_called_later_takes_place_later(gated: Gated, what: str) -> None:
    m, gate = gated(_total())
    call, after = _AFTER[what]
    futures = [m.run_async([_x(1, 100)]) for _ in range(3)]
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call(m)))
    thread.start()
    thread.join(0.05)
    assert not found, "it waits for the runs"
    gate.open()
    thread.join(_SECONDS)
    assert [float(_y(f)[0]) for f in futures] == [2, 4, 6]
    assert m.run([_x(1, 100)])["y"][99] == after
    if what == "clone":
        np.testing.assert_array_equal(np.asarray(found[0]), _x(6, 100))


# -- runs that native code does back to back --------------------------------------------------------------------------


def _pairs(*values: int) -> list[Array]:
    return [np.full(2, v, np.int32) for v in values]


def test_a_failing_job_ends_no_other() -> None:
    m = rlx.compile(_quotient(), "cpu")
    m.run(_pairs(1, 1))
    for _ in range(20):
        futures = [m.run_async(_pairs(6, b)) for b in (1, 0, 2, 0, 3)]
        found: list[int | str] = []
        for future in futures:
            try:
                found.append(int(_y(future)[0]))
            except rlx.ExecutionError as error:
                found.append(str(error).partition(" in ")[0])
        zero = "integer division by zero"
        assert found == [6, zero, 3, zero, 2]


def _laned(products: int = 1, rows: int = 64) -> Executable:
    """Return a program of so many products whose runs are jobs: its shapes are known."""
    with rlx.Graph("powers") as g:
        y, w = g.input("x", [rows, 64]), g.param("w", np.eye(64, dtype=np.float32))
        for _ in range(products):
            y = y @ w
        g.output("y", y)
    m = rlx.compile(g, "cpu", threads=1)
    m.run([_square(0, rows)])
    return m


def _square(value: float, rows: int = 64) -> Array:
    return np.full((rows, 64), value, np.float32)


def _by_callbacks(futures: list[RunFuture]) -> list[int]:
    told: list[int] = []
    done = threading.Event()
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: told.append(i))
    futures[-1].add_done_callback(lambda _: done.set())
    assert done.wait(_SECONDS)
    return told


def _by_wait(futures: list[RunFuture]) -> list[int]:
    told: list[int] = []
    numbers: dict[Future[dict[str, Any]], int] = {f: i for i, f in enumerate(futures)}
    rest = set(numbers)
    while rest:
        ended, rest = wait(rest, _SECONDS, FIRST_COMPLETED)
        assert ended
        told += sorted(numbers[f] for f in ended)
    return told


def _by_asyncio(futures: list[RunFuture]) -> list[int]:
    async def gather() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    return [int(r["y"][0, 0]) for r in asyncio.run(gather())]


@pytest.mark.parametrize("how", [_by_callbacks, _by_wait, _by_asyncio])
def test_who_is_told_of_jobs_is_told_in_order(how: Callable[[list[RunFuture]], list[int]]) -> None:
    m = _laned(400)
    for _ in range(5):
        futures = [m.run_async([_square(i)]) for i in range(8)]
        assert how(futures) == list(range(8))
        assert [float(_y(f)[0, 0]) for f in futures] == list(range(8))


def test_the_first_of_several_jobs_is_told_of_before_the_others_end() -> None:
    m = _laned(400, 2048)
    futures = [m.run_async([_square(i, 2048)]) for i in range(6)]
    assert next(as_completed(futures, _SECONDS)) is futures[0]
    assert not futures[5].done()


def test_a_job_that_waits_can_be_cancelled() -> None:
    m = _laned(2000)
    futures = [m.run_async([_square(i)]) for i in range(6)]
    assert futures[4].cancel()
    assert futures[4].cancel()
    assert futures[4].done()
    assert futures[4].cancelled()
    assert not futures[4].running()
    assert not wait(futures, _SECONDS).not_done
    assert [float(_y(f)[0, 0]) for f in futures if not f.cancelled()] == [0, 1, 2, 3, 5]
    assert not futures[5].cancel()


def test_a_job_says_whether_it_runs() -> None:
    m = _laned(400, 2048)
    first, second = (m.run_async([_square(i, 2048)]) for i in (1, 2))
    until = time.monotonic() + _SECONDS
    while not first.running() and time.monotonic() < until:
        time.sleep(0.0005)
    assert first.running()
    assert not first.done()
    assert not second.running()
    assert not first.cancel()
    with pytest.raises(TimeoutError):
        second.result(0.001)
    assert second.exception(_SECONDS) is None
    assert not second.running()


def test_jobs_keep_nothing_alive_when_they_have_ended() -> None:
    m = _laned()
    future = m.run_async([_square(1)])
    result = weakref.ref(future.result(_SECONDS)["y"])
    watched = weakref.ref(m)
    del m, future
    for _ in range(100):  # the thread lets go just after the result is there
        gc.collect()
        if watched() is None and result() is None:
            return
        threading.Event().wait(0.05)
    raise AssertionError("something is still there")


def test_many_threads_enqueue_run_cancel_and_wait() -> None:
    m = _laned(3)
    wrong: list[object] = []

    def use(number: int) -> None:
        random = np.random.default_rng(number)
        held: list[tuple[float, RunFuture]] = []
        for i in range(150):
            value = float(1000 * number + i)
            match int(random.integers(6)):
                case 0:
                    wrong.extend(v for v in [m.run([_square(value)])["y"][0, 0]] if v != value)
                case 1 if held:
                    wait([held[0][1]], _SECONDS)
                case 2 if held:
                    held[-1][1].add_done_callback(lambda _: m.run([_square(1)]))
                case 3 if held and held[-1][1].cancel():
                    held.pop()
                case _:
                    held.append((value, m.run_async([_square(value)], queue=4)))
        wrong.extend(v for v, f in held if _y(f)[63, 63] != v)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize("gated", ["lane"], indirect=True)
@pytest.mark.parametrize("use", ["run", "close"])
def test_a_callback_comes_after_a_run_that_stopped_meanwhile(gated: Gated, use: str) -> None:
    m, gate = gated(_quotient())
    first, second = m.run_async(_pairs(6, 2)), m.run_async(_pairs(1, 0))
    gate.open(1)
    gate.wait_for(2)
    found: list[object] = []
    done = threading.Event()

    def callback(_: Future[dict[str, Any]]) -> None:
        try:
            found.append(int(m.run(_pairs(8, 2))["y"][0]) if use == "run" else m.close())
        finally:
            done.set()

    first.add_done_callback(callback)
    gate.open()
    assert done.wait(_SECONDS)
    assert found == [4 if use == "run" else None]
    error = second.exception(_SECONDS)
    assert isinstance(error, rlx.ExecutionError)
    assert "division by zero" in str(error)
    assert int(_y(first)[0]) == 3


@pytest.mark.parametrize("divisor", [0, 2])
def test_a_run_that_is_cancelled_while_it_begins_stops_nothing(gated: Gated, divisor: int) -> None:
    m, gate = gated(_quotient())
    future = m.run_async(_pairs(4, divisor))
    gate.wait_for(1)
    # As if `cancel` had been preempted after it saw that the run waits.
    super(RunFuture, future).cancel()
    gate.open()
    assert int(_y(m.run_async(_pairs(6, 2)))[0]) == 3
    assert int(m.run(_pairs(6, 3))["y"][0]) == 2
    assert not wait([future], _SECONDS).not_done


def test_who_waits_for_a_run_that_becomes_a_job_is_told_when_that_ends(gated: Gated) -> None:
    m, gate = gated(_twice())
    m.run_async([_x(0)], outputs=["y"])  # Python does it
    gate.wait_for(1)
    second, _ = m.run_async([_x(1)]), m.run_async([_x(2)])
    found: list[float] = []
    waiting = threading.Thread(target=lambda: found.append(float(second.result(_SECONDS)["y"][0])))
    waiting.start()
    time.sleep(0.05)
    gate.open(2)
    waiting.join(_SECONDS)
    assert found == [2]
    assert gate.began <= 3
    gate.open()


def test_looking_for_a_result_does_not_wait(gated: Gated) -> None:
    m, gate = gated(_twice())
    future = m.run_async([_x(1)])
    gate.wait_for(1)
    began = time.monotonic()
    for _ in range(40):
        with pytest.raises(TimeoutError):
            future.result(0)
        with pytest.raises(TimeoutError):
            future.exception(0.0001)
    assert time.monotonic() - began < 2
    gate.open()
    np.testing.assert_array_equal(_y(future), _x(2))


@pytest.mark.parametrize("outputs", [None, ["y"]], ids=["jobs", "python"])
def test_more_runs_wait_than_a_lane_holds(outputs: list[str] | None) -> None:
    m = _laned()
    for _ in range(3):
        futures = [m.run_async([_square(i)], outputs=outputs, queue=500) for i in range(300)]
        assert [float(_y(f)[0, 0]) for f in futures] == list(range(300))


def test_a_future_whose_lock_a_signal_left_locked_stops_no_other(
    gated: Gated, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    m, gate = gated(_twice())
    future = m.run_async([_x(1)])
    gate.wait_for(1)
    future._condition.acquire()
    gate.open()
    found: list[float] = []
    other = threading.Thread(
        target=lambda: found.extend(
            float(y[0]) for y in (m.run([_x(2)])["y"], _y(m.run_async([_x(3)])))
        )
    )
    other.start()
    other.join(_SECONDS)
    assert found == [4, 6]
    until = time.monotonic() + _SECONDS
    while "other threads cannot have its result" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.01)
    if "lane" in request.node.name:
        np.testing.assert_array_equal(_y(future), _x(2))
    else:
        with pytest.raises(CancelledError):
            future.result(_SECONDS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("closes", [False, True], ids=["run", "close"])
def test_a_callback_that_ends_its_thread_stops_nothing(gated: Gated, *, closes: bool) -> None:
    m, gate = gated(_twice())

    servers: list[threading.Thread] = []

    def callback(_: Future[dict[str, Any]]) -> None:
        servers.append(threading.current_thread())
        if closes:
            m.close()
        raise SystemExit

    first, second = m.run_async([_x(1)], outputs=["y"]), m.run_async([_x(2)])
    gate.wait_for(1)
    first.add_done_callback(callback)
    third = m.run_async([_x(3)])
    ended: list[object] = []
    calls = [second.exception, third.exception, m.close if closes else lambda: m.run([_x(4)])]

    def call(what: Callable[[], object]) -> None:
        with suppress(CancelledError):
            what()
        ended.append(what)

    threads = [threading.Thread(target=call, args=(c,), daemon=True) for c in calls]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(_SECONDS)
    assert len(ended) == len(calls)
    np.testing.assert_array_equal(_y(first), _x(2))
    servers[0].join(_SECONDS)


def test_a_handler_that_comes_while_a_run_is_enqueued_cannot_use_the_executable(
    gated: Gated,
) -> None:
    m, gate = gated(_twice())
    future = m.run_async([_x(1)])
    gate.wait_for(1)
    uses: list[Callable[[], object]] = [
        lambda: m.run([_x(1)]),
        lambda: m.run_async([_x(1)]),
        m.close,
    ]
    with m._queue._mutex:  # pyright: ignore[reportPrivateUsage]  (as a signal would find it)
        for use in uses:
            with pytest.raises(
                rlx.UsageError, match="twice is just enqueuing a run in this thread"
            ):
                use()
    gate.open()
    np.testing.assert_array_equal(_y(future), _x(2))
    np.testing.assert_array_equal(m.run([_x(2)])["y"], _x(4))


_OURS = ("queue.py", "futures.py", "enqueue.py", "lane.py")


def _interrupted(work: Callable[[], object], at: int) -> bool:
    """Do something with a KeyboardInterrupt at the at-th place where Python looks for signals in our code."""
    left = at

    def look(frame: FrameType, event: str, called: object) -> None:
        nonlocal left
        if getattr(called, "__name__", "") == "__enter__":
            return  # nothing can be done about a signal between that and the body of `with`
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(_OURS):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("closes", [False, True], ids=["run", "close"])
def test_ctrl_c_anywhere_leaves_an_executable_that_works(*, closes: bool) -> None:
    source, twin = _laned(40), None
    futures: list[RunFuture] = []

    def work() -> None:
        assert twin is not None
        futures.extend(twin.run_async([_square(i)]) for i in range(3))
        futures[1].cancel()
        if closes:
            twin.close()
        else:
            twin.run([_square(4)])
            _ = [f.result() for f in futures if not f.cancelled()]

    at = 1
    found: list[float] = []

    def use() -> None:
        assert twin is not None
        if closes:
            twin.close()
        else:
            found.append(float(twin.run([_square(at)])["y"][0, 0]))

    while True:
        if twin is None or closes:
            twin = source.clone()
            twin.run([_square(0)])
        futures.clear()
        if not _interrupted(work, at):
            break
        other = threading.Thread(target=use, daemon=True)
        other.start()
        other.join(_SECONDS)
        assert not other.is_alive(), f"interrupted at {at}"
        for i, future in enumerate(futures):
            with suppress(CancelledError):
                assert float(_y(future)[0, 0]) == i
        at += 1
    assert at > 100
    assert found == ([] if closes else list(range(1, at)))


# -- run_pipelined ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, iter])
def test_pipelined_runs_equal_runs_one_after_the_other(device: str, form: Any) -> None:
    m = rlx.compile(_twice(), device)
    inputs = [
        {"x": np.random.default_rng(i).standard_normal(i % 5 + 1, np.float32)} for i in range(16)
    ]
    found = m.run_pipelined(form(inputs))
    assert len(found) == 16
    for given, results in zip(inputs, found, strict=True):
        want = m.run(given)
        assert list(results) == list(want)
        for name, value in results.items():
            assert value.tobytes() == want[name].tobytes()
    assert m.run_pipelined(form([])) == []
    assert list(m.run_pipelined(form(inputs[:2]), ["z"])[1]) == ["z"]


@pytest.mark.parametrize("form", [list, iter])
def test_pipelined_runs_pass_their_state_on(device: str, form: Any) -> None:
    with rlx.Graph("sum") as g:
        x = g.input("x", [3])
        total = g.state("total", [3])
        g.set_next(total, total + x)
        g.output("y", total * 2 + x)
    inputs = [[_x(i)] for i in range(20)]
    m, one_by_one = rlx.compile(g, device), rlx.compile(g, device)
    found = m.run_pipelined(form(inputs[:10])) + [f.result() for f in map(m.run_async, inputs[10:])]
    for given, results in zip(inputs, found, strict=True):
        assert results["y"].tobytes() == one_by_one.run(given)["y"].tobytes()
    np.testing.assert_array_equal(m.state["total"].get(), _x(190))


def test_one_buffer_may_bring_all_inputs(device: str) -> None:
    m = rlx.compile(_twice(), device)
    x = _x(0)

    def inputs() -> Iterator[list[Array]]:
        for value in range(20):
            x[:] = value
            yield [x]

    for value, results in enumerate(m.run_pipelined(inputs(), queue=3)):
        np.testing.assert_array_equal(results["y"], _x(2 * value))


def test_inputs_are_not_taken_far_ahead(gated: Gated) -> None:
    m, gate = gated(_twice())
    taken: list[int] = []

    def inputs() -> Iterator[list[Array]]:
        for value in range(10):
            taken.append(value)
            yield [_x(value)]

    thread = threading.Thread(target=lambda: m.run_pipelined(inputs(), queue=2))
    thread.start()
    gate.wait_for(1)
    threading.Event().wait(0.2)
    assert len(taken) <= 4, "one in flight, two wait, one at the door"
    gate.open()
    thread.join(_SECONDS)
    assert len(taken) == 10


def test_the_first_failure_is_raised_and_what_waits_does_not_begin(gated: Gated) -> None:
    m, gate = gated(_quotient())
    one = np.ones(2, np.int32)
    gate.open(2)
    with pytest.raises(rlx.ExecutionError, match="division by zero"):
        m.run_pipelined(([one, one * (i != 1)] for i in range(8)), queue=8)
    gate.open()
    np.testing.assert_array_equal(m.run([one, one])["y"], one)
    assert gate.began == 3, "two of the series, and the one after it"


def test_a_failing_iterable_leaves_nothing_behind(device: str) -> None:
    m = rlx.compile(_twice(), device)

    def inputs() -> Iterator[list[Array]]:
        yield [_x(1)]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        m.run_pipelined(inputs())
    np.testing.assert_array_equal(m.run([_x(3)])["y"], _x(6))


def test_a_thread_that_is_starting_another_is_seen() -> None:
    gate, inside = threading.Event(), threading.Event()

    class Started:
        def is_set(self) -> bool:
            return False

        def set(self) -> None: ...

        def wait(self) -> None:
            inside.set()
            gate.wait(10)

    def start_another() -> None:
        other = threading.Thread(target=gate.wait, args=(10,), daemon=True)
        other._started = Started()  # pyright: ignore[reportAttributeAccessIssue]
        other.start()

    starter = threading.Thread(target=start_another)
    starter.start()
    assert inside.wait(10)
    assert starter.ident is not None
    assert queue_module._starts_a_thread(starter.ident)  # pyright: ignore[reportPrivateUsage]
    gate.set()
    starter.join()
    assert not queue_module._starts_a_thread(starter.ident)  # pyright: ignore[reportPrivateUsage]
