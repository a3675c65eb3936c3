# SPDX-License-Identifier: Apache-2.0
"""Runs that wait for their turn: one thread per executable does them in the order they came in.

Where the backend has lanes (`rlx.backends.lanes`), a run that needs no Python on its way is a job there, and follows
the one before at once. All others are done by the thread in Python, when the lane is empty; runs that come after them
wait behind them. So the order is always that of the calls.

The thread exists while there is something to do, and a moment longer. When the interpreter exits, runs that wait are
cancelled, and the one in flight is interrupted as by Ctrl-C.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextvars import Context
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakSet

from rlx.backends.lanes import Job, JobState, Lane
from rlx.base.errors import DeviceError, UsageError
from rlx.runtime.forks import watch_forks
from rlx.runtime.futures import Results, RunFuture, Series, Turn

__all__ = ["RunQueue", "Work"]

_IDLE_SECONDS = 1.0
"""How long a thread without work stays."""
_GLANCE = 0.05
"""Seconds after which a wait in native code looks around."""


class Work(Protocol):
    """A run that is enqueued."""

    def run(self) -> Results:
        """Run, now that it is its turn."""
        ...

    def job(self) -> tuple[Job, Results] | None:
        """Return the run as a job, and what it writes its outputs into; None if Python has to do it.

        The lock of the executable is held.
        """
        ...


class _Waiting(NamedTuple):
    """A run that waits for Python to do it."""

    future: RunFuture
    work: Work
    series: Series | None


@dataclass(eq=False, slots=True)
class _Laned:
    """A run that is a job.

    Attributes:
        waiting: what it is if Python does it after all.
        job: the job.
        results: what it writes into.
        index: how many jobs the lane passes before this one.
        ended: it counts as a run that has ended, or waits for Python now.
        told: its future needs nothing from this entry any more.
    """

    waiting: _Waiting
    job: Job
    results: Results
    index: int
    ended: bool = False
    told: bool = False

    def is_under_way(self) -> bool:
        """Whether it may begin, or has and not ended."""
        state = self.job.state
        return state < JobState.DONE or (state is JobState.STOPPED and not self.ended)

    def has_ended(self) -> bool:
        """Whether it has ended well or was cancelled, and callbacks have been called."""
        state = self.job.state
        return state is JobState.WITHDRAWN or (
            state is JobState.DONE and not self.waiting.future.owes_callbacks
        )


class RunQueue:
    """The runs of one executable that wait.

    Args:
        name: of the executable, for messages and the thread.
        turn: of the executable.
        lock: of the executable; whoever is inside, and has called `leave_lane`, has it for itself.
        make_lane: makes its lane; None where the backend has none.

    Attributes:
        busy: whether a run waits or is in flight.
        laned: the runs that are jobs, and what was a job until a moment ago.
        lock: as given.
        was_torn: in a forked child, whether a job of the parent was in the middle.
    """

    def __init__(
        self,
        name: str,
        turn: Turn,
        lock: threading.RLock,
        make_lane: Callable[[], Lane] | None = None,
    ) -> None:
        self._name, self._turn, self.lock = name, turn, lock
        self._make_lane, self._lane = make_lane, cast("Lane | None", None)
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self.laned: deque[_Laned] = deque()
        self._submitted = self._ended = self._onlookers = 0
        self.busy = self.was_torn = False
        self._thread: threading.Thread | None = None
        self._running = self._closed = False
        _LIVE.add(self)
        watch_forks(self)

    def submit(self, work: Work, bound: int, series: Series | None = None) -> RunFuture:
        """Enqueue a run; while `bound` or more wait already, wait for one of them to begin.

        Args:
            work: the run.
            bound: at least 1.
            series: what it is one of.

        Raises:
            UsageError: the queue is closed, the interpreter exits, or this is the middle of a run.
            DeviceError: the system gives no thread.
        """
        self._turn.check(self._name)
        future = RunFuture(self._name, self._turn)
        while True:
            with self._changed:
                if not self._is_open():
                    raise UsageError(f"{self._name} is closed")
                # Callbacks of futures run in the queue's own thread, which would wait for itself.
                if self._is_own_thread() or self._has_room(bound):
                    self._start()
                    self._append(_Waiting(future, work, series))
                    return future
                ahead = self._job_ahead()
                if ahead is None:
                    self._wait()
            if ahead is not None:
                ahead.wait(_GLANCE)

    def _is_open(self) -> bool:
        return not (self._closed or _EXITING.is_set())

    def _is_own_thread(self) -> bool:
        return self._turn.server == threading.get_ident()

    def _has_room(self, bound: int) -> bool:
        waiting = len(self._waiting)
        if self.laned and waiting < bound:
            waiting += sum(e.job.state is JobState.WAITING for e in self.laned)
        return waiting < bound

    def _job_ahead(self) -> Job | None:
        """Return the job that is done next, None if none is under way. The lock is held."""
        return next((e.job for e in self.laned if e.job.state < JobState.DONE), None)

    def _append(self, waiting: _Waiting) -> None:
        """Enqueue a run. The lock is held."""
        self._waiting.append(waiting)
        self._submitted += 1
        self.busy = True
        self._make_jobs()
        if self._waiting:
            if self._lane is not None:
                self._lane.call()
            self._changed.notify_all()

    def _make_jobs(self) -> None:
        """Make jobs of the first runs that wait, as many as can be jobs now. The lock is held."""
        lane, lock = self._lane, self.lock
        if lane is None or self._running or _is_mine(lock):
            return
        self._retire()
        try:
            if lock.acquire(blocking=False):
                while self._waiting and len(self.laned) < lane.capacity and self._push(lane):
                    pass
        finally:
            if _is_mine(lock):
                lock.release()

    def _push(self, lane: Lane) -> bool:
        """Make the first run that waits a job, if it can be one. Both locks are held."""
        first = self._waiting[0]
        future, _, series = first
        if series is not None and series.failed:
            return False
        made = None if future.cancelled() else first.work.job()
        if made is None:
            return False
        entry = _Laned(first, *made, lane.pushed)
        future.become(*made, lane.call)
        if future.cancelled():
            future.become(None, {}, _nothing)
            return False
        try:
            self._waiting.popleft()
            self.laned.append(entry)
            lane.push(entry.job)
        except BaseException:  # a signal
            if entry.job.withdraw():
                entry.ended = entry.told = True
                if not self._waiting or self._waiting[0] is not first:
                    self._waiting.appendleft(first)
            raise
        return True

    # -- waiting -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every run that is in the queue now has ended.

        Does nothing in the queue's own thread, where callbacks of futures run: they come between two runs.

        Raises:
            UsageError: this is the middle of a run.
        """
        self._turn.check(self._name)
        ticket = self._submitted
        if not self._is_own_thread():
            self._wait_until(lambda: self._ended >= ticket)

    def leave_lane(self) -> None:
        """Wait until no job is under way. The lock of the executable is held, so that there will be no others."""
        if self._is_own_thread():
            with self._changed:
                self._recall()
        self._wait_until(lambda: not any(e.is_under_way() for e in self.laned))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                self._retire()
                if holds():
                    return
                last = next(
                    (e.job for e in reversed(self.laned) if e.job.state < JobState.DONE), None
                )
                if last is None:
                    self._wait()
            if last is not None:
                last.wait(_GLANCE)

    def _wait(self) -> None:
        """Wait until a run begins or ends in Python, or the queue closes. The lock is held."""
        self._onlookers += 1
        try:
            self._changed.wait()
        finally:
            self._onlookers -= 1

    def _tell(self) -> None:
        """Wake those who wait; most often there are none. The lock is held."""
        if self._onlookers:
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel the runs that wait, wait for the one that runs, and take no more."""
        self._refuse_runs()
        self.settle()

    def _refuse_runs(self) -> None:
        """Cancel the runs that wait, and take no more."""
        with self._changed:
            self._closed = True
            self._recall()
            waiting = [future for future, *_ in self._waiting]
            self._waiting.clear()
            for future in waiting:
                future.refused = True
            self._end(len(waiting))
            if self._lane is not None:
                self._lane.call()
            self._changed.notify_all()
        # Callbacks may use the executable and the other futures: nothing here is held or counted any more.
        for future in waiting:
            future.cancel()
            future.set_running_or_notify_cancel()

    def _end(self, runs: int = 1) -> None:
        self._ended += runs
        self.busy = self._ended < self._submitted

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Count the jobs that have ended, and drop those that neither lane nor future needs. The lock is held."""
        lane = self._lane
        if lane is None or not self.laned:
            return
        for entry in self.laned:
            if not entry.ended and entry.has_ended():
                entry.ended = True
                self._end()
        passed, pushed = lane.passed, lane.pushed
        while self.laned:
            first = self.laned[0]
            needed = passed <= first.index < pushed or not (
                first.told or first.waiting.future.knows
            )
            if needed or not first.ended:
                break
            self.laned.popleft()

    def _recall(self) -> None:
        """Let Python do the jobs that have not begun, before all others that wait. The lock is held."""
        back = [e for e in self.laned if e.job.withdraw()]
        for entry in back:
            entry.ended = entry.told = True  # as a job; as a run it has not
            entry.waiting.future.become(None, {}, _nothing)
        self._waiting.extendleft(e.waiting for e in reversed(back))
        self._tell()

    def _attend(self) -> bool:
        """Do what jobs need Python for, in the queue's own thread; return whether there was anything.

        Callbacks of futures may use the executable, and wait for others that do. So no job is in the lane meanwhile.
        """
        with self._changed:
            if all(e.told or e.job.state < JobState.DONE for e in self.laned):
                return False
            self._running = True
            self._recall()
            entries = [e for e in self.laned if not e.told]
        for entry in entries:
            self._tell_of(entry)
        with self._changed:
            self._running = False
            self._retire()
            self._tell()
        return True

    def _tell_of(self, entry: _Laned) -> None:
        """Let a future know how its job ended."""
        future, state = entry.waiting.future, entry.job.state
        if state is JobState.STOPPED:
            self._go_on(entry)
        elif state is JobState.DONE and not future.cancelled():
            future.learn()
        else:
            future.cancel()  # who withdrew the job may be at it, or a signal ended that
            future.set_running_or_notify_cancel()
        entry.told = True

    def _go_on(self, stopped: _Laned) -> None:
        """Go on with a run that has stopped until it has ended."""

        def run() -> Results:
            try:
                if _EXITING.is_set():
                    raise _Exit
                stopped.job.finish()
            finally:
                with self._changed:
                    stopped.ended = True
                    self._end()
                    self._tell()
            return stopped.results

        _conclude(stopped.waiting.future, run, stopped.waiting.series)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread unless it is there. The lock is held."""
        if self._thread is not None:
            return
        if self._lane is None and self._make_lane is not None:
            self._lane = self._make_lane()
        # Two may start when a signal cuts `start` short; the second finds the first, and leaves.
        # The context is an empty one: from Python 3.14 on it could be that of whoever came first.
        thread = threading.Thread(
            target=Context().run,
            args=(self._work,),
            name=f"rlx-queue-{self._name}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise DeviceError(f"{self._name} has no thread for its queue: {error}") from error

    def _work(self) -> None:
        me = threading.current_thread()
        with self._changed:
            if self._thread is not None:
                return
            self._thread = me
            self._turn.server = me.ident
        try:
            while (waiting := self._next()) is not None:
                _do(waiting)
                del waiting
                with self._changed:
                    self._running = False
                    self._end()
                    self._tell()
        finally:
            with self._changed:
                if self._thread is me:
                    self._leave()

    def _leave(self) -> None:
        self._thread = self._turn.server = None

    def _next(self) -> _Waiting | None:
        """Return a run for Python to begin, None if there is nothing for a while."""
        quiet = False
        while True:
            attended = self._attend()
            with self._changed:
                self._make_jobs()
                if self._waiting and all(e.ended for e in self.laned):
                    self._running = True
                    self._tell()  # there is room for another
                    return self._waiting.popleft()
                if (
                    not self._waiting
                    and not self.laned
                    and (self._closed or (quiet and not attended))
                ):
                    self._leave()  # in one step with the decision to leave
                    return None
            quiet = self._rest()

    def _rest(self) -> bool:
        """Wait for something to do, or do jobs; return whether nothing came for a while."""
        if self._lane is not None:
            return self._lane.serve(_IDLE_SECONDS)
        with self._changed:
            return not (self._waiting or self._closed or self._changed.wait(_IDLE_SECONDS))

    # -- the process -------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Cancel what waits, raise in the run that is in flight, and wait for the thread to leave."""
        self._refuse_runs()
        with self._changed:
            thread = self._thread
            if thread is not None and self._running:
                _raise_exit(cast("int", thread.ident))
        while thread is not None and thread.is_alive():
            thread.join(_LOOK_SECONDS)
            with self._changed:
                if _Exit.was_lost and self._running:
                    _Exit.was_lost = False
                    _raise_exit(cast("int", thread.ident))

    def after_fork_in_child(self) -> None:
        """Forget the runs: their thread is the parent's."""
        self._changed = threading.Condition()
        halfway = (JobState.RUNNING, JobState.STOPPED)
        self.was_torn |= any(e.job.state in halfway for e in self.laned)
        self._waiting.clear()
        self.laned.clear()
        if self._lane is not None:
            self._lane.after_fork_in_child()
        self._submitted = self._ended = 0
        self._leave()
        self._running = self.busy = False


def _do(waiting: _Waiting) -> None:
    future, work, series = waiting
    if series is not None and series.failed:
        future.cancel()
    if future.set_running_or_notify_cancel():
        _conclude(future, work.run, series)


def _conclude(future: RunFuture, run: Callable[[], Results], series: Series | None) -> None:
    """Let a future know how a run ends."""
    try:
        results = run()
    except BaseException as error:  # noqa: BLE001  (it is the caller's, who gets it from the future)
        if series is not None:
            series.failed = True
        future.set_exception(
            CancelledError("the interpreter exits") if isinstance(error, _Exit) else error
        )
    else:
        future.set_result(results)


def _is_mine(lock: threading.RLock) -> bool:
    """Return whether the calling thread is inside."""
    return cast("Any", lock)._is_owned()  # what `threading.Condition` asks a lock


def _nothing() -> None:
    """Call nobody."""


class _Exit(SystemExit):
    """Raised in a queue's thread when the interpreter exits. Threads end by it without a message.

    Attributes:
        was_lost: Python has dropped it, since it came up in a finalizer or in the callback of a weak reference.
    """

    was_lost = False


def _raise_exit(ident: int) -> None:
    """Raise `_Exit` in a thread that is not just starting another.

    Until it runs, a thread that is being started has the identity of the one that starts it: the exception would end it
    before it says that it runs, and its parent would wait for that for ever.
    """
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(_UNDISTURBED)  # no thread runs between the look and the deed
        while _starts_a_thread(ident):
            sys.setswitchinterval(interval)
            time.sleep(0.001)
            sys.setswitchinterval(_UNDISTURBED)
        _raise_in(ident, _Exit)
    finally:
        sys.setswitchinterval(interval)


def _starts_a_thread(ident: int) -> bool:
    frame = sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage]  (documented)
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back
    return False


_LOOK_SECONDS = 0.1
"""How often who waits for a thread to leave looks whether `_Exit` was lost."""
_UNDISTURBED = 60.0
"""Seconds for which a thread keeps the interpreter unless it waits."""
_LIVE: WeakSet[RunQueue] = WeakSet()
_EXITING = threading.Event()
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes, _raise_in.restype = (ctypes.c_ulong, ctypes.py_object), ctypes.c_int


def _at_exit() -> None:
    _EXITING.set()
    report = sys.unraisablehook

    def notice(unraisable: Any) -> None:
        if unraisable.exc_type is _Exit:
            _Exit.was_lost = True
        else:
            report(unraisable)

    sys.unraisablehook = notice
    try:
        for queue in list(_LIVE):
            queue.interrupt()
    finally:
        sys.unraisablehook = report


atexit.register(_at_exit)
