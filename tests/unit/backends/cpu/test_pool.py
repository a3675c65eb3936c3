# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx.backends.cpu.context import Context
from rlx.backends.cpu.dispatch import native
from rlx.backends.cpu.pool import Pool
from rlx.backends.cpu.pool_ir import Offset
from rlx.backends.cpu.thunks import ThunkTable
from rlx.base.errors import UsageError

Words = npt.NDArray[np.int64]
_NO_ARGS = np.zeros(2, np.int64)


class Jobs:
    """A context with one buffer, and jobs published on a pool."""

    def __init__(
        self, kernels: Mapping[str, int], pool: Pool, cells: int = 64, scratch: int = 0
    ) -> None:
        table = ThunkTable()
        table.end()
        self.pool, self.kernels = pool, kernels
        self.context = Context(
            table.build(), slots=1, dims=[0, 0], threads=8, pool=pool, scratch=scratch
        )
        self.cells: Words = np.zeros(cells, np.int64)
        self.context.set_slot(0, self.cells)

    def run(self, kernel: str, chunks: int, threads: int = 1000) -> None:
        native().parallel_for(
            self.pool.address,
            self.context.address,
            self.kernels[kernel],
            int(_NO_ARGS.ctypes.data),
            chunks,
            threads,
        )

    def repeat(self, kernel: str, chunks: int, times: int) -> None:
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int64)
        spread = native().library.address("rlx_parallel_for")
        args = (
            self.pool.address,
            self.context.address,
            self.kernels[kernel],
            int(_NO_ARGS.ctypes.data),
        )
        kind(self.kernels["t_repeat"])(spread, *args, chunks, times)


def state_word(pool: Pool, offset: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(pool.address + offset)


@pytest.fixture
def make_pool() -> Iterator[Callable[[int], Pool]]:
    made: list[Pool] = []

    def make(participants: int) -> Pool:
        pool = Pool(native().pool_code, participants)
        pool.start()
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()


@pytest.mark.parametrize("participants", [1, 2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 2, 17])
def test_every_chunk_runs_exactly_once(
    native_kernels: Mapping[str, int],
    make_pool: Callable[[int], Pool],
    participants: int,
    chunks: int,
) -> None:
    jobs = Jobs(native_kernels, make_pool(participants))
    times = 100_000 if participants == 2 else 3_000
    jobs.repeat("t_count", chunks, times)
    assert (jobs.cells[:chunks] == times).all()
    assert not jobs.cells[chunks:].any()


def test_workers_that_sleep_after_every_job_lose_none(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    pool = make_pool(4)
    state_word(pool, Offset.SPIN).value = 0
    jobs = Jobs(native_kernels, pool)
    jobs.repeat("t_count", 7, 20_000)
    assert (jobs.cells[:7] == 20_000).all()


def test_jobs_of_changing_kernel_and_length_do_not_mix(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    jobs = Jobs(native_kernels, make_pool(3))
    other = Jobs(native_kernels, jobs.pool)
    expected = np.zeros(64, np.int64)
    for step in range(4_000):
        chunks = 2 + step % 30
        jobs.run("t_count", chunks)
        other.run("t_tid", 64 - chunks)
        expected[:chunks] += 1
    assert (jobs.cells == expected).all()
    assert ((other.cells >= 0) & (other.cells < 3)).all()


def test_the_generation_wraps(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    pool = make_pool(3)
    jobs = Jobs(native_kernels, pool)
    state_word(pool, Offset.GENERATION).value = 2**32 - 500
    jobs.repeat("t_count", 9, 1_000)
    assert (jobs.cells[:9] == 1_000).all()
    assert state_word(pool, Offset.GENERATION).value == 501


def test_participants_beyond_the_cap_stay_out(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    jobs = Jobs(native_kernels, make_pool(6))
    jobs.context.dims[0] = 200
    seen: set[int] = set()
    for _ in range(300):
        jobs.run("t_tid", 48, threads=2)
        seen |= set(jobs.cells[:48].tolist())
        jobs.run("t_busy", 48, threads=6)
    assert seen <= {0, 1}


def test_a_worker_does_take_part(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    jobs = Jobs(native_kernels, make_pool(2), cells=4096)
    jobs.context.dims[0] = 20_000
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        jobs.cells[:] = 0
        jobs.run("t_busy", 64)  # milliseconds: time enough for the worker to wake up
        jobs.run("t_tid", 4096)
        if jobs.cells.any():
            return
    pytest.fail("the worker ran no chunk in 30 s")


def test_scratch_memory_belongs_to_one_participant(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    jobs = Jobs(native_kernels, make_pool(4), scratch=8)
    jobs.repeat("t_scratch", 64, 2_000)
    base, stride = state_words(jobs.context, 6), state_words(jobs.context, 7)
    counts = [ctypes.c_int64.from_address(base + tid * stride).value for tid in range(4)]
    assert stride == 128
    assert sum(counts) == 64 * 2_000


def state_words(context: Context, word: int) -> int:
    return ctypes.c_int64.from_address(context.address + 8 * word).value


def test_eight_threads_run_at_once_and_nobody_waits_for_the_slot(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    pool = make_pool(3)
    runs = [Jobs(native_kernels, pool) for _ in range(8)]
    threads = [threading.Thread(target=r.repeat, args=("t_count", 5, 5_000)) for r in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs:
        assert (run.cells[:5] == 5_000).all()


def test_a_taken_slot_means_working_alone(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    pool = make_pool(3)
    jobs = Jobs(native_kernels, pool)
    state_word(pool, Offset.LOCK).value = 1
    before = state_word(pool, Offset.GENERATION).value
    jobs.cells[:] = 9
    jobs.run("t_tid", 40)
    assert not jobs.cells[:40].any()
    assert state_word(pool, Offset.GENERATION).value == before
    state_word(pool, Offset.LOCK).value = 0


@pytest.mark.parametrize(("chunks", "threads"), [(1, 8), (40, 1), (0, 8)])
def test_one_chunk_or_one_thread_skips_the_pool(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool], chunks: int, threads: int
) -> None:
    jobs = Jobs(native_kernels, make_pool(3))
    jobs.run("t_count", chunks, threads)
    assert state_word(jobs.pool, Offset.GENERATION).value == 0
    assert jobs.cells.sum() == chunks


def test_stop_and_start_again(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    pool = make_pool(3)
    jobs = Jobs(native_kernels, pool)
    for step in range(1, 21):
        jobs.run("t_count", 11)
        pool.stop()
        assert pool.participants == 1
        jobs.run("t_count", 11)
        pool.start()
        assert pool.participants == 3
        assert (jobs.cells[:11] == 2 * step).all()


def test_stopping_while_another_thread_runs_jobs(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    pool = make_pool(3)
    jobs = Jobs(native_kernels, pool)
    thread = threading.Thread(target=jobs.repeat, args=("t_count", 13, 200_000))
    thread.start()
    for _ in range(10):
        pool.stop()
        pool.start()
    thread.join()
    assert (jobs.cells[:13] == 200_000).all()


def test_workers_keep_nothing_that_the_context_of_their_starter_holds(
    make_pool: Callable[[int], Pool],
) -> None:
    class Held: ...

    variable: ContextVar[Held | None] = ContextVar("held", default=None)
    held = Held()
    alive = weakref.ref(held)
    pool = make_pool(2)
    pool.stop()
    token = variable.set(held)
    pool.start()
    variable.reset(token)
    del held, token
    gc.collect()
    assert alive() is None


def test_workers_flush_no_denormals(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    jobs = Jobs(native_kernels, make_pool(3))
    for _ in range(500):
        jobs.cells[:] = 0
        jobs.run("t_denormal", 64)
        assert (jobs.cells == 1).all()


def test_an_idle_pool_uses_no_processor_time(make_pool: Callable[[int], Pool]) -> None:
    pool = make_pool(4)
    asleep = [Offset.PARTICIPANTS + 128 * tid + 8 for tid in (1, 2, 3)]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if all(ctypes.c_int32.from_address(pool.address + at).value == 1 for at in asleep):
            return
        time.sleep(0.001)
    pytest.fail("the workers of an idle pool are not asleep after 30 s")


def test_threads_the_system_refuses_are_done_without(
    native_kernels: Mapping[str, int],
    make_pool: Callable[[int], Pool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "rlx-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    pool = make_pool(4)
    assert (pool.running, pool.participants) == (True, 2)
    assert "started 1 of 3 worker threads: can't start new thread" in caplog.text
    jobs = Jobs(native_kernels, pool)
    jobs.repeat("t_count", 9, 100)
    assert (jobs.cells[:9] == 100).all()


def test_a_pool_needs_a_participant() -> None:
    with pytest.raises(UsageError, match="at least 1 participant"):
        Pool(native().pool_code, 0)


def child_of(body: Callable[[], bool]) -> int:
    """Fork; return the child's exit code, 0 if the body returned true in it."""
    child = os.fork()
    if child == 0:
        try:
            good = body()
        except BaseException:  # noqa: BLE001  (whatever it is, it must not run the parent's tests)
            good = False
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("before", [False, True])
def test_fork(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool], before: bool
) -> None:
    pool = make_pool(3)
    jobs = Jobs(native_kernels, pool)
    if before:
        jobs.run("t_count", 20)
        jobs.cells[:] = 0

    def works() -> bool:
        alone = pool.participants == 1 and not pool.running and threading.active_count() == 1
        single = len(list(Path("/proc/self/task").iterdir())) == 1
        jobs.run("t_count", 20)
        pool.start()
        jobs.repeat("t_count", 20, 500)
        return alone and single and pool.participants == 3 and bool((jobs.cells[:20] == 501).all())

    assert child_of(works) == 0
    assert not pool.running
    pool.start()
    jobs.repeat("t_count", 20, 500)
    assert (jobs.cells[:20] == 500).all()


def test_fork_while_another_thread_holds_the_slot(
    native_kernels: Mapping[str, int], make_pool: Callable[[int], Pool]
) -> None:
    pool = make_pool(3)
    jobs, mine = Jobs(native_kernels, pool), Jobs(native_kernels, pool)
    thread = threading.Thread(target=jobs.repeat, args=("t_count", 13, 300_000))
    thread.start()

    def works() -> bool:
        pool.start()
        mine.repeat("t_count", 13, 200)
        published = state_word(pool, Offset.GENERATION).value
        return published == 200 and bool((mine.cells[:13] == 200).all())

    codes = [child_of(works) for _ in range(3)]
    thread.join()
    assert codes == [0, 0, 0]
    assert (jobs.cells[:13] == 300_000).all()


_HOOK = """
import os
os.register_at_fork(before=lambda: run("before"))     # runs after rlx's own hook
from rlx.backends.cpu.dispatch import native
from rlx.backends.cpu.pool import Pool

def run(when):
    pool.start()
    print(when, pool.running, pool.participants, flush=True)

pool = Pool(native().pool_code, 3)
run("first")
child = os.fork()
if child == 0:
    run("child")
    os._exit(0)
os.waitpid(child, 0)
run("parent")
"""


def test_a_model_run_by_a_fork_hook_runs_alone() -> None:
    done = run_python(_HOOK)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "first True 3",
        "before False 1",
        "child True 3",
        "parent True 3",
    ]


_PROGRAM = """
import atexit, sys, threading
from rlx.backends.cpu.dispatch import shared_pool
from rlx.backends.cpu.pool import available_cpus
import rlx.backends.cpu.pool as module

def late():
    pool.start()    # an earlier handler still runs models: alone
    print("late", pool.running, pool.participants)

registry = module._REGISTRY
atexit.unregister(registry.at_exit)
atexit.register(late)
atexit.register(registry.at_exit)
pool = shared_pool()
assert pool is shared_pool()
pool._fixed = 1 if pool.capacity == 1 else 2
pool.start()
print("early", pool.running, pool.participants, {extra})
"""


@pytest.mark.parametrize("extra", ["'-'", "sys.exit(3)"])
def test_the_interpreter_exits_with_the_pool_alive(extra: str) -> None:
    done = run_python(_PROGRAM.replace("{extra}", extra))
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "late False 1"
    assert done.returncode == (0 if extra == "'-'" else 3)


_SPAWN = """
import multiprocessing, sys
from rlx.backends.cpu.dispatch import shared_pool

def work(_):
    pool = shared_pool()
    pool.start()
    return pool.running

if __name__ == "__main__":
    shared_pool().start()
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(2) as processes:
            print(method, processes.map(work, range(2)))
"""


def test_multiprocessing(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(_SPAWN)
    done = run_python(str(script), script=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["spawn [True, True]", "fork [True, True]"]


_SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import rlx.backends.cpu.pool as module

class Other:
    get_current = staticmethod(lambda: 1)
    get_main = staticmethod(lambda: 0)

module._refuse_subinterpreter()     # the main interpreter passes
sys.modules["_interpreters"] = Other
try:
    module.Pool(None, 2)
except module.UsageError as error:
    print(error)
"""


def test_subinterpreters_are_refused() -> None:
    assert "main interpreter only" in run_python(_SUBINTERPRETER).stdout


def run_python(code: str, *, script: bool = False) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [sys.executable, code] if script else [sys.executable, "-c", code]
    source = str(Path(__file__).parents[4] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
