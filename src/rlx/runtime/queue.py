# SPDX-License-Identifier: Apache-2.0
"""Runs that wait for their turn: one thread per executable does them in the order they came in.

The thread exists while there is something to do, and a moment longer. When the interpreter exits, runs that wait are
cancelled, and the one in flight is interrupted as by Ctrl-C.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeAlias, cast
from weakref import WeakSet

from rlx.base.errors import DeviceError, UsageError
from rlx.runtime.forks import watch_forks

__all__ = ["RunFuture", "RunQueue", "Series", "Turn"]

_IDLE_SECONDS = 1.0
"""How long a thread without work stays."""

Results: TypeAlias = dict[str, Any]


class Turn:
    """Which threads an executable occupies: what waits for its runs there would wait for ever.

    Attributes:
        thread: the one that is in the middle of a run. An operator on the host may try to use the executable there.
        server: the one that does the runs that were enqueued. Callbacks of futures are called there.
    """

    __slots__ = ("server", "thread")

    def __init__(self) -> None:
        self.thread: int | None = None
        self.server: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is in the middle of a run."""
        return self.thread == threading.get_ident()

    def check(self, name: str) -> None:
        """Raise a UsageError if the calling thread is in the middle of a run.

        Args:
            name: of the executable.
        """
        if self.is_mine:
            raise UsageError(f"{name} is running: a run cannot use it again from its middle")

    def check_wait(self, name: str) -> None:
        """Raise a UsageError if the calling thread cannot wait for a run that has not ended.

        Args:
            name: of the executable.
        """
        self.check(name)
        if self.server == threading.get_ident():
            raise UsageError(
                f"{name} does its enqueued runs in this thread: a callback cannot wait for a later one"
            )


class RunFuture(Future[Results]):
    """The outputs of a run by name, when it has ended. Only a run that has not begun can be cancelled.

    Args:
        name: of the executable.
        turn: of the executable.

    Attributes:
        refused: it will be cancelled, since its queue takes no runs any more.
    """

    def __init__(self, name: str, turn: Turn) -> None:
        super().__init__()
        self._process = os.getpid()
        self._name, self._turn = name, turn
        self.refused = False

    def result(self, timeout: float | None = None) -> Results:
        """Return the outputs, or raise what the run raised; wait for that at most `timeout` seconds.

        Raises:
            CancelledError: it was cancelled, or its executable closed, before it began.
            TimeoutError: it has not ended yet.
            UsageError: this is a fork of the process whose run it is, or a thread that the run waits for: an
                operator of a run before it, or a callback.
        """
        self._check_here(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the run raised, if anything; see `result`."""
        self._check_here(timeout)
        return super().exception(timeout)

    def _check_here(self, timeout: float | None) -> None:
        if not self.done():
            if self.refused:
                raise CancelledError
            if timeout is None:
                self._turn.check_wait(self._name)
        if os.getpid() != self._process:
            raise UsageError(
                "this run belongs to the process this one was forked from; run it here"
            )


class Series:
    """Runs of which none begins once one before it has failed."""

    def __init__(self) -> None:
        self._futures: list[RunFuture] = []
        self.failed = False

    def add(self, future: RunFuture) -> None:
        """Append a run."""
        self._futures.append(future)

    def results(self) -> list[Results]:
        """Wait for all runs and return their results, or raise what the first one that failed raised."""
        if self._futures:
            # The last one first: then this thread is not woken by every run, which it would slow down.
            with suppress(CancelledError):
                self._futures[-1].exception()
        return [future.result() for future in self._futures]

    def cancel(self) -> None:
        """Cancel what has not begun."""
        self.failed = True
        for future in self._futures:
            future.cancel()


_Job: TypeAlias = tuple[RunFuture, Callable[[], Results], Series | None]


class RunQueue:
    """The runs of one executable that wait.

    Args:
        name: of the executable, for messages and the thread.
        turn: of the executable.

    Attributes:
        busy: whether a run waits or is in flight.
    """

    def __init__(self, name: str, turn: Turn) -> None:
        self._name, self._turn = name, turn
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._submitted = self._ended = self._onlookers = 0
        self.busy = False
        self._thread: threading.Thread | None = None
        self._running = self._closed = False
        _LIVE.add(self)
        watch_forks(self)

    def submit(
        self, work: Callable[[], Results], bound: int, series: Series | None = None
    ) -> RunFuture:
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
        with self._changed:
            # Callbacks of futures run in the queue's own thread, which would wait for itself.
            while len(self._waiting) >= bound and self._is_open() and not self._is_own_thread():
                self._wait()
            if not self._is_open():
                raise UsageError(f"{self._name} is closed")
            self._start()
            self._waiting.append((future, work, series))
            self._submitted += 1
            self.busy = True
            self._changed.notify_all()
        return future

    def _is_open(self) -> bool:
        return not (self._closed or _EXITING.is_set())

    def _is_own_thread(self) -> bool:
        return self._turn.server == threading.get_ident()

    def settle(self) -> None:
        """Wait until every run that is in the queue now has ended.

        Does nothing in the queue's own thread, where callbacks of futures run: they come between two runs.

        Raises:
            UsageError: this is the middle of a run.
        """
        self._turn.check(self._name)
        with self._changed:
            if self._is_own_thread():
                return
            ticket = self._submitted
            while self._ended < ticket:
                self._wait()

    def _wait(self) -> None:
        """Wait until a run begins or ends, or the queue closes. The lock is held."""
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
            waiting = [future for future, *_ in self._waiting]
            self._waiting.clear()
            for future in waiting:
                future.refused = True
            self._end(len(waiting))
            self._changed.notify_all()
        # Callbacks may use the executable and the other futures: nothing here is held or counted any more.
        for future in waiting:
            future.cancel()
            future.set_running_or_notify_cancel()

    def _end(self, runs: int = 1) -> None:
        self._ended += runs
        self.busy = self._ended < self._submitted

    # -- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread unless it is there. The lock is held."""
        if self._thread is not None:
            return
        # Two may start when a signal cuts `start` short; the second finds the first, and leaves.
        thread = threading.Thread(target=self._work, name=f"rlx-queue-{self._name}", daemon=True)
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
            while (job := self._next()) is not None:
                _do(*job)
                del job
        finally:
            with self._changed:
                if self._thread is me:
                    self._leave()

    def _leave(self) -> None:
        self._thread = self._turn.server = None

    def _next(self) -> _Job | None:
        """Return a run to begin, None if there is none for a while; the one before has ended."""
        with self._changed:
            if self._running:
                self._running = False
                self._end()
                self._tell()
            while not self._waiting:
                if self._closed or not (self._changed.wait(_IDLE_SECONDS) or self._waiting):
                    self._leave()  # in one step with the decision to leave
                    return None
            self._running = True
            self._tell()  # there is room for another
            return self._waiting.popleft()

    # -- the process -------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Cancel what waits, raise in the run that is in flight, and wait for the thread to leave."""
        self._refuse_runs()
        with self._changed:
            thread = self._thread
            if thread is not None and self._running:
                _raise_exit(cast("int", thread.ident))
        if thread is not None:
            thread.join()

    def after_fork_in_child(self) -> None:
        """Forget the runs: their thread is the parent's."""
        self._changed = threading.Condition()
        self._waiting.clear()
        self._submitted = self._ended = 0
        self._leave()
        self._running = self.busy = False


def _do(future: RunFuture, work: Callable[[], Results], series: Series | None) -> None:
    if series is not None and series.failed:
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    try:
        results = work()
    except BaseException as error:  # noqa: BLE001  (it is the caller's, who gets it from the future)
        if series is not None:
            series.failed = True
        future.set_exception(
            CancelledError("the interpreter exits") if isinstance(error, _Exit) else error
        )
    else:
        future.set_result(results)


class _Exit(SystemExit):
    """Raised in a queue's thread when the interpreter exits. Threads end by it without a message."""


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


_UNDISTURBED = 60.0
"""Seconds for which a thread keeps the interpreter unless it waits."""
_LIVE: WeakSet[RunQueue] = WeakSet()
_EXITING = threading.Event()
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes, _raise_in.restype = (ctypes.c_ulong, ctypes.py_object), ctypes.c_int


def _at_exit() -> None:
    _EXITING.set()
    for queue in list(_LIVE):
        queue.interrupt()


atexit.register(_at_exit)
