# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.dispatch import native
from rlx.backends.cpu.lane import CpuJob, CpuLane
from rlx.backends.cpu.program import CpuProgram
from rlx.backends.cpu.words import CTX
from rlx.backends.lanes import Job, JobState, Lane, LaneBackend, LaneGraph
from rlx.backends.registry import get_backend
from rlx.base.errors import ExecutionError
from rlx.base.numeric import Array
from rlx.ops.elementwise import div
from rlx.runtime.executable import Executable

_SECONDS = 30


@pytest.fixture
def lane() -> CpuLane:
    return CpuLane(native().lane_code)


@pytest.fixture
def quotient() -> Iterator[Callable[[int, int], tuple[CpuJob, Array]]]:
    """Make jobs that divide [2] i32 numbers."""
    with rlx.Graph("quotient") as g:
        a, b = g.input("a", [2], "i32"), g.input("b", [2], "i32")
        g.output("y", div(a, b))
    m = rlx.compile(g, threads=1)
    m.run([_pair(1), _pair(1)])

    def make(a: int, b: int) -> tuple[CpuJob, Array]:
        out = _pair(-1)
        job = _program(m).job([_pair(a), _pair(b)], [out], {})
        assert job is not None
        return job, out

    yield make
    m.close()


def _pair(value: int) -> Array:
    return np.full(2, value, np.int32)


def _program(m: Executable) -> CpuProgram:
    compiled = m.program.compiled
    assert isinstance(compiled, CpuProgram)
    return compiled


def test_the_cpu_keeps_to_the_protocol(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]]
) -> None:
    jobs: list[Job] = [quotient(1, 1)[0]]
    lanes: list[Lane] = [lane]
    assert jobs
    assert lanes
    assert isinstance(get_backend("cpu"), LaneBackend)
    with rlx.Graph("one") as g:
        g.output("y", g.input("x", [1]) + 1)
    assert isinstance(rlx.compile(g).program.compiled, LaneGraph)


def test_jobs_are_done_in_order(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]]
) -> None:
    made = [quotient(12, b) for b in (1, 2, 3, 4, 6)]
    for job, _ in made:
        assert job.state is JobState.WAITING
        lane.push(job)
    assert (lane.pushed, lane.passed) == (5, 0)
    assert lane.serve(0.01)
    assert (lane.pushed, lane.passed) == (5, 5)
    assert [job.state for job, _ in made] == [JobState.DONE] * 5
    assert [int(out[1]) for _, out in made] == [12, 6, 4, 3, 2]


def test_more_jobs_go_through_a_lane_than_it_holds(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]]
) -> None:
    for start in range(0, 4 * lane.capacity, lane.capacity // 2):
        made = [quotient(start + i, 1) for i in range(lane.capacity // 2)]
        for job, _ in made:
            lane.push(job)
        assert lane.serve(0.001)
        assert [int(out[0]) for _, out in made] == [start + i for i in range(len(made))]


def test_a_job_that_was_withdrawn_does_not_begin(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]]
) -> None:
    (first, one), (second, two), (third, three) = (quotient(i, 1) for i in (1, 2, 3))
    for job in (first, second, third):
        lane.push(job)
    assert second.withdraw()
    assert not second.withdraw()
    assert lane.serve(0.001)
    assert not first.withdraw()
    assert second.state is second.wait(_SECONDS) is JobState.WITHDRAWN
    assert [int(a[0]) for a in (one, two, three)] == [1, -1, 3]
    assert lane.passed == 3


def test_python_goes_on_with_a_run_that_failed(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]]
) -> None:
    (bad, _), (after, out) = quotient(1, 0), quotient(6, 2)
    lane.push(bad)
    lane.push(after)
    assert not lane.serve(_SECONDS)
    assert (bad.state, after.state) == (JobState.STOPPED, JobState.WAITING)
    with pytest.raises(ExecutionError, match="integer division by zero"):
        bad.finish()
    assert lane.serve(0.001)
    assert after.state is JobState.DONE
    np.testing.assert_array_equal(out, _pair(3))


def test_python_goes_on_with_a_run_that_takes_long(lane: CpuLane) -> None:
    with rlx.Graph("long") as g:
        y, w = g.input("x", [2048, 64]), g.param("w", np.eye(64, dtype=np.float32))
        for _ in range(200):
            y = y @ w
        g.output("y", y)
    m = rlx.compile(g, threads=1)
    x, out = np.ones((2048, 64), np.float32), np.zeros((2048, 64), np.float32)
    m.run([x])
    program = _program(m)
    program._context._words[CTX.BUDGET] = 1  # pyright: ignore[reportPrivateUsage]  (in ns; the clock ticks 100 times a second)
    job = program.job([x], [out], {})
    assert job is not None
    lane.push(job)
    assert not lane.serve(_SECONDS)
    assert job.state is JobState.STOPPED
    assert not out.any()
    job.finish()
    np.testing.assert_array_equal(out, x)


def test_the_server_returns_when_it_is_told_to(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]]
) -> None:
    (first, _), (second, _) = quotient(1, 1), quotient(2, 1)
    assert first.want() is JobState.WAITING
    lane.push(first)
    lane.push(second)
    assert not lane.serve(_SECONDS)
    assert (first.state, second.state) == (JobState.DONE, JobState.WAITING)
    assert first.want() is JobState.DONE
    lane.call()
    assert not lane.serve(_SECONDS)
    assert second.state is JobState.WAITING
    assert lane.serve(0.001)
    assert second.state is JobState.DONE


@pytest.mark.parametrize("with_job", [True, False], ids=["a job", "a call"])
def test_a_server_that_sleeps_wakes(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]], *, with_job: bool
) -> None:
    job, _ = quotient(1, 1)
    job.want()
    returned: list[bool] = []
    thread = threading.Thread(target=lambda: returned.append(lane.serve(_SECONDS)))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    if with_job:
        lane.push(job)
    else:
        lane.call()
    thread.join(_SECONDS)
    assert returned == [False]
    assert (job.state is JobState.DONE) == with_job


def test_who_waits_for_a_job_wakes_when_it_has_ended(
    lane: CpuLane, quotient: Callable[[int, int], tuple[CpuJob, Array]]
) -> None:
    job, _ = quotient(1, 1)
    before = time.monotonic()
    assert job.wait(0.05) is JobState.WAITING
    assert time.monotonic() - before >= 0.05
    states: list[JobState] = []
    threads = [threading.Thread(target=lambda: states.append(job.wait(_SECONDS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    lane.push(job)
    assert lane.serve(0.001)
    for thread in threads:
        thread.join(_SECONDS)
    assert states == [JobState.DONE] * 3


def test_what_needs_python_on_its_way_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with rlx.Graph("twice") as g:
        g.output("y", g.input("x", ["N"]) * 2)
    m = rlx.compile(g, dims={"N": 4})
    x, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    m.run([x])
    program = _program(m)
    assert program.job([x], [out], {"N": 3}) is not None
    assert program.job([x], [out], {"N": 4}) is None  # extents would have to be evaluated
    with program.watched(lambda _: None, [0]):
        assert program.job([x], [out], {"N": 3}) is None
    monkeypatch.setenv("RLX_CHECK", "1")
    m.trim()
    m.run([x])
    assert program.job([x], [out], {"N": 3}) is None  # dead bytes are poisoned by Python
