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
import itertools
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
from rlx.runtime.futures import GLANCE, Results, RunFuture, Series, Turn

__all__ = ["RunQueue", "Work"]

_IDLE_SECONDS = 1.0
"""How long a thread without work stays."""
_SOME_LANED = 16
"""Jobs that may lie about before whoever enqueues the next looks which have ended."""
_MOST_LANED = 128
"""And before no other run becomes a job until the queue's thread has told their futures."""


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


class _Run(NamedTuple):
    """A run that was enqueued; runs are numbered in their order."""

    number: int
    future: RunFuture
    work: Work
    series: Series | None


@dataclass(eq=False, slots=True)
class _Laned:
    """A run that is a job.

    Attributes:
        run: the run.
        job: the job.
        results: what it writes into.
        index: how many jobs the lane passes before this one.
        recalled: it waits for Python after all.
        finished: it stopped, and Python has gone on with it to its end.
        error: what it raised then.
        told: its future knows.
    """

    run: _Run
    job: Job
    results: Results
    index: int
    recalled: bool = False
    finished: bool = False
    error: BaseException | None = None
    told: bool = False

    def is_under_way(self) -> bool:
        """Whether it may begin, or has and not ended."""
        state = self.job.state
        return state < JobState.DONE or (state is JobState.STOPPED and not self.finished)

    def has_ended(self) -> bool:
        """Whether it has ended, and whoever wants to be told was; or is no job any more."""
        if self.told or self.recalled:
            return True
        future = self.run.future
        if self.is_under_way() or self.job.state is JobState.WITHDRAWN:
            return False
        return future.is_settled or not future.is_observed


class RunQueue:
    """The runs of one executable that wait.

    A signal may raise between any two lines of the main thread. So what counts follows from what lies where; a job that
    was withdrawn and lies nowhere is found by the thread of the queue.

    Args:
        name: of the executable, for messages and the thread.
        turn: of the executable.
        lock: of the executable; whoever is inside, and has called `leave_lane`, has it for itself.
        make_lane: makes its lane; None where the backend has none.

    Attributes:
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
        self._new_locks()
        self._waiting: deque[_Run] = deque()
        self._refused: deque[_Run] = deque()
        self.laned: deque[_Laned] = deque()
        self._numbers = itertools.count()
        self._latest = -1
        self._onlookers = 0
        self._thread: threading.Thread | None = None
        self._running: int | None = None
        self._telling = self._closed = self.was_torn = False
        _LIVE.add(self)
        watch_forks(self)

    def _new_locks(self) -> None:
        # Entered as it is, not by its condition, which is written in Python: a signal could leave it locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)

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
        self._check_outside()
        future = RunFuture(self._name, self._turn)
        if len(self.laned) > _SOME_LANED:
            self._teach()
        while True:
            with self._mutex:
                if not self._is_open():
                    raise UsageError(f"{self._name} is closed")
                # Callbacks of futures run in the queue's own thread, which would wait for itself.
                if self._is_own_thread() or self._has_room(bound):
                    self._start()
                    self._latest = next(self._numbers)
                    self._waiting.append(_Run(self._latest, future, work, series))
                    self._make_jobs()
                    if self._waiting:
                        self._summon()
                    return future
                ahead = self._job_ahead()
                if ahead is None:
                    self._wait()
            if ahead is not None:
                ahead.wait(GLANCE)

    def _check_outside(self) -> None:
        """Raise a UsageError in a signal handler or finalizer that came while this thread was at work in here."""
        if cast("Any", self._mutex)._is_owned():
            raise UsageError(
                f"{self._name} is just enqueuing a run in this thread: a signal handler or finalizer that comes then "
                "cannot use it"
            )

    def _is_open(self) -> bool:
        return not (self._closed or _EXITING.is_set())

    def _is_own_thread(self) -> bool:
        return self._turn.server == threading.get_ident()

    def _summon(self) -> None:
        """Make the thread look at what waits: now, or when it has done what fills the lane. The lock is held."""
        lane = self._lane
        if lane is None:
            self._changed.notify_all()
        elif self.laned and lane.pushed - lane.passed >= lane.capacity:
            self.laned[-1].job.want()
        else:
            lane.call()

    def _has_room(self, bound: int) -> bool:
        waiting = len(self._waiting)
        for entry in reversed(self.laned):
            state = entry.job.state
            if waiting >= bound or state in (JobState.RUNNING, JobState.DONE):
                break
            waiting += state is JobState.WAITING
        return waiting < bound

    def _job_ahead(self) -> Job | None:
        """Return the job that is done next, None if none is under way. The lock is held."""
        return next((e.job for e in self.laned if e.job.state < JobState.DONE), None)

    def _make_jobs(self) -> None:
        """Make jobs of the first runs that wait, as many as can be jobs now. The lock is held."""
        lane, lock = self._lane, cast("Any", self.lock)
        self._retire()
        serves = lane is not None and self._running is None and not self._telling
        # `_is_owned` is what `threading.Condition` asks a lock.
        if lane is None or not serves or not self._waiting or lock._is_owned():
            return
        held = False
        try:
            held = lock.acquire(blocking=False)
            while held and self._waiting and self._push(lane):
                pass
        except BaseException:  # a signal, perhaps before we know that the lock is ours
            if lock._is_owned():
                lock.release()
            raise
        if held:
            lock.release()

    def _push(self, lane: Lane) -> bool:
        """Make the first run that waits a job, if it can be one. Both locks are held."""
        if lane.pushed - lane.passed >= lane.capacity or len(self.laned) >= _MOST_LANED:
            return False
        run = self._waiting[0]
        if (run.series is not None and run.series.failed) or run.future.is_settled:
            return False
        made = run.work.job()
        if made is None:
            return False
        entry = _Laned(run, *made, lane.pushed)
        try:
            self.laned.append(entry)
            self._waiting.popleft()
            run.future.become(*made, lane.call)
            if run.future.is_settled:  # cancelled meanwhile
                entry.job.withdraw()
            lane.push(entry.job)
        except BaseException:  # a signal
            entry.job.withdraw()
            raise
        return True

    def _teach(self) -> None:
        """Let futures that nobody has looked at know how their jobs ended. Else they pile up until Python does it."""
        with self._mutex:
            entries = list(self.laned)
        for entry in entries:
            if entry.job.state is not JobState.DONE:
                break
            entry.run.future.done()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every run that is in the queue now has ended.

        Does nothing in the queue's own thread, where callbacks of futures run: they come between two runs.

        Raises:
            UsageError: this is the middle of a run.
        """
        if not (self._waiting or self.laned or self._running is not None):
            return
        self._turn.check(self._name)
        self._check_outside()
        ticket = self._latest
        if not self._is_own_thread():
            self._wait_until(lambda: self._is_past(ticket))

    def _is_past(self, ticket: int) -> bool:
        """Return whether all runs up to a number have ended. The lock is held."""
        if self._running is not None and self._running <= ticket:
            return False
        if self._waiting and self._waiting[0].number <= ticket:
            return False
        return all(e.has_ended() or e.run.number > ticket for e in self.laned)

    def leave_lane(self) -> None:
        """Wait until no job is under way. The lock of the executable is held, so that there will be no others."""
        self._check_outside()
        if self._is_own_thread():
            with self._mutex:
                self._recall()
        self._wait_until(lambda: not any(e.is_under_way() for e in self.laned))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        while True:
            with self._mutex:
                self._retire()
                if holds():
                    return
                last = next(
                    (e.job for e in reversed(self.laned) if e.job.state < JobState.DONE), None
                )
                if last is None:
                    self._wait()
            if last is not None:
                last.wait(GLANCE)

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
        self._check_outside()
        self._refuse_runs()
        self.settle()

    def _refuse_runs(self) -> None:
        """Cancel the runs that wait, and take no more."""
        with self._mutex:
            self._closed = True
            self._recall()
            for run in self._waiting:
                run.future.refused = True
            self._refused.extend(self._waiting)
            self._waiting.clear()
            if self._lane is not None:
                self._lane.call()
            self._changed.notify_all()
        # Callbacks may use the executable and the other futures: nothing here is held, or waits.
        raised: BaseException | None = None
        while self._refused:
            run = self._refused[0]
            try:
                run.future.refuse()
            except BaseException as error:  # noqa: BLE001  (what a callback raised; the others are cancelled too)
                raised = error
            with self._mutex:
                if self._refused and self._refused[0] is run:
                    self._refused.popleft()
        if raised is not None:
            raise raised

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Drop the first jobs that neither the lane nor a future needs. The lock is held."""
        lane = self._lane
        if lane is None or not self.laned:
            return
        passed, pushed = lane.passed, lane.pushed
        while self.laned:
            first = self.laned[0]
            known = first.told or first.recalled or first.run.future.is_finished
            if not known or passed <= first.index < pushed:
                break
            self.laned.popleft()

    def _recall(self) -> None:
        """Let Python do the jobs that have not begun, before all others that wait. The lock is held."""
        for entry in reversed(self.laned):
            if entry.recalled or entry.told:
                continue
            lost = entry.job.state is JobState.WITHDRAWN and not entry.run.future.is_cancelling
            if entry.job.withdraw() or (lost and all(r is not entry.run for r in self._waiting)):
                self._waiting.appendleft(entry.run)
            elif not lost:
                continue
            entry.recalled = True
            entry.run.future.leave_job()
        self._tell()

    def _attend(self) -> bool:
        """Do what jobs need Python for, in the queue's own thread; return whether there was anything.

        Callbacks of futures may use the executable, and wait for others that do. So no job is in the lane meanwhile,
        and a run that has stopped is ended before anybody is told of any.
        """
        with self._mutex:
            if all(e.told or e.recalled or e.job.state < JobState.DONE for e in self.laned):
                return False
            self._telling = True
            self._recall()
            entries = [e for e in self.laned if not (e.told or e.recalled)]
        for entry in entries:
            if entry.job.state is JobState.STOPPED and not entry.finished:
                self._go_on(entry)
        for entry in entries:
            if entry.job.state is JobState.WITHDRAWN or entry.run.future.is_cancelled:
                entry.run.future.refuse()
            else:
                entry.run.future.conclude(entry.results, entry.error)
            entry.told = True
        with self._mutex:
            self._telling = False
            self._retire()
            self._tell()
        return True

    def _go_on(self, stopped: _Laned) -> None:
        """Go on with a run that has stopped until it has ended."""
        self._running = stopped.run.number
        if _EXITING.is_set():
            stopped.error = _cut_short()
        else:
            _, stopped.error = _do(stopped.run, stopped.job.finish)
        with self._mutex:
            stopped.finished, self._running = True, None
            self._tell()

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
        with self._mutex:
            if self._thread is not None:
                return
            self._thread = me
            self._turn.server = me.ident
        try:
            while (run := self._next()) is not None:
                self._do(run)
                del run
        finally:
            with self._mutex:
                if self._thread is me:  # a callback has raised what ends threads
                    self._leave()
                    self._tell()
                    if (self._waiting or self.laned) and not _EXITING.is_set():
                        self._start()

    def _do(self, run: _Run) -> None:
        if run.series is not None and run.series.failed:
            run.future.cancel()
        if run.future.begin():
            results, error = _do(run, run.work.run)
            run.future.conclude(results or {}, error)
        with self._mutex:
            self._running = None
            self._tell()

    def _leave(self) -> None:
        self._thread = self._turn.server = self._running = None
        self._telling = False

    def _next(self) -> _Run | None:
        """Return a run for Python to begin, None if there is nothing for a while."""
        quiet = False
        while True:
            attended = self._attend()
            with self._mutex:
                self._make_jobs()
                self._tell()  # there may be room for another
                if self._waiting and not any(e.is_under_way() for e in self.laned):
                    self._running = self._waiting[0].number
                    return self._waiting.popleft()
                if not (self._waiting or self.laned) and (self._closed or (quiet and not attended)):
                    self._leave()  # in one step with the decision to leave
                    return None
            quiet = self._rest()

    def _rest(self) -> bool:
        """Wait for something to do, or do jobs; return whether nothing came for a while."""
        if self._lane is not None:
            return self._lane.serve(_IDLE_SECONDS)
        with self._mutex:
            return not (self._waiting or self._closed or self._changed.wait(_IDLE_SECONDS))

    # -- the process -------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Cancel what waits, raise in the run that is in flight, and wait for the thread to leave."""
        self._refuse_runs()
        with self._mutex:
            thread = self._thread
            if thread is not None and self._running is not None:
                _raise_exit(cast("int", thread.ident))
        while thread is not None and thread.is_alive():
            thread.join(_LOOK_SECONDS)
            with self._mutex:
                if _Exit.was_lost and self._running is not None:
                    _Exit.was_lost = False
                    _raise_exit(cast("int", thread.ident))

    def after_fork_in_child(self) -> None:
        """Forget the runs: their thread is the parent's."""
        self._new_locks()
        self.was_torn |= any(
            e.is_under_way() and e.job.state is not JobState.WAITING for e in self.laned
        )
        self._waiting.clear()
        self._refused.clear()
        self.laned.clear()
        if self._lane is not None:
            self._lane.after_fork_in_child()
        self._leave()


def _do(
    run: _Run, work: Callable[[], Results | None]
) -> tuple[Results | None, BaseException | None]:
    """Do the rest of a run; return what that returns, and what it raises."""
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001  (it is the caller's, who gets it from the future)
        if run.series is not None:
            run.series.failed = True
        return None, _cut_short() if isinstance(error, _Exit) else error


def _cut_short() -> CancelledError:
    return CancelledError("the interpreter exits")


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
