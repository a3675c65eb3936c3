# SPDX-License-Identifier: Apache-2.0
"""Futures of runs that wait for their turn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from logging import getLogger
from typing import Any, TypeAlias, cast

from rlx.backends.lanes import Job, JobState
from rlx.base.errors import UsageError

__all__ = ["GLANCE", "Results", "RunFuture", "Series", "Turn"]

_LOG = getLogger("rlx")
Results: TypeAlias = dict[str, Any]
GLANCE = 0.05
"""Seconds after which a wait in native code looks around: a signal may have come."""
_PATIENCE = 1.0
"""Seconds after which the lock of a future, which is held for microseconds, is taken to be lost."""
_PENDING, _RUNNING, _CANCELLED, _TOLD, _FINISHED = (
    "PENDING",
    "RUNNING",
    "CANCELLED",
    "CANCELLED_AND_NOTIFIED",
    "FINISHED",
)
"""What `concurrent.futures` calls the states of a future."""


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

    A run that is a job of a lane (`rlx.backends.lanes`) ends without Python. Who asks first, a thread that waits for
    the result or the one that serves the lane, makes the future know; callbacks are called by the latter.

    Args:
        name: of the executable.
        turn: of the executable.

    Attributes:
        refused: it will be cancelled, since its queue takes no runs any more.
        is_observed: somebody wants to be told when it is done.
        is_cancelling: somebody has tried to cancel it.
    """

    def __init__(self, name: str, turn: Turn) -> None:
        super().__init__()
        self._process = os.getpid()
        self._name, self._turn = name, turn
        self._job: Job | None = None
        self._results: Results = {}
        self._call: Callable[[], None] = _nothing
        self._waiters = cast("list[Any]", _Waiters(self._observe))
        self.refused = self.is_observed = self.is_cancelling = False

    # Without the lock: a signal that left that locked would stop all runs of the executable.

    @property
    def is_finished(self) -> bool:
        """Whether it knows how the run ended."""
        return self._state == _FINISHED

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._state in (_CANCELLED, _TOLD)

    @property
    def is_settled(self) -> bool:
        """Whether it is one of the two."""
        return self._state in (_FINISHED, _CANCELLED, _TOLD)

    # -- for users ---------------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Results:
        """Return the outputs, or raise what the run raised; wait for that at most `timeout` seconds.

        Raises:
            CancelledError: it was cancelled, or its executable closed, before it began.
            TimeoutError: it has not ended yet.
            UsageError: this is a fork of the process whose run it is, or a thread that the run waits for: an
                operator of a run before it, or a callback.
        """
        return super().result(self._wait_for_job(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the run raised, if anything; see `result`."""
        return super().exception(self._wait_for_job(timeout))

    def done(self) -> bool:
        """Return whether the run has ended, or was cancelled."""
        if not self.is_settled:
            self._learn()
        return self.is_settled

    def running(self) -> bool:
        """Return whether the run has begun and not ended yet."""
        job = self._job
        if job is None or self.done():
            return self._state == _RUNNING
        return job.state not in (JobState.WAITING, JobState.WITHDRAWN)

    def cancel(self) -> bool:
        """Cancel the run if it has not begun; return whether it is cancelled."""
        self.is_cancelling = True
        job = None if self.is_settled else self._job
        if job is not None and not job.withdraw() and job.state is not JobState.WITHDRAWN:
            return False
        if not super().cancel():
            return False
        job = self._job  # it may have become one just now
        if job is not None:
            job.withdraw()
            self._call()  # the thread that serves the lane tells `wait` and `as_completed`
        return True

    def add_done_callback(self, fn: Callable[[Future[Results]], object]) -> None:
        """Call a function with this future once the run has ended, in the thread that does the enqueued runs."""
        self.is_observed = True
        super().add_done_callback(fn)
        self._observe()

    # -- for the queue -----------------------------------------------------------------------------------------------

    def become(self, job: Job, results: Results, call: Callable[[], None]) -> None:
        """Be the future of a job.

        Args:
            job: the run.
            results: what it writes its outputs into.
            call: makes the thread that serves the lane look at its jobs.
        """
        self._job, self._results, self._call = job, results, call
        if self.is_observed:
            job.want()

    def leave_job(self) -> None:
        """Be the future of a run that Python does."""
        self._job = None

    def begin(self) -> bool:
        """Say that the run begins; return False if it was cancelled, and tell `wait` and `as_completed`."""
        if self._state not in (_PENDING, _CANCELLED) or self._is_stuck():
            return False
        return self.set_running_or_notify_cancel()

    def refuse(self) -> None:
        """Be cancelled, since nobody will begin the run."""
        self.refused = True
        if not self._is_stuck():
            super().cancel()
            self.begin()

    def conclude(self, results: Results, error: BaseException | None = None) -> None:
        """Take over how the run ended, unless that is known."""
        if self._is_stuck():
            _LOG.warning(
                "%s: Ctrl-C left the lock of a future locked; other threads cannot have its result",
                self._name,
            )
            self.refused = error is not None or self._job is None
            self.is_observed = False  # so the main thread takes a job's results over by itself
            return
        with suppress(InvalidStateError):
            if error is None:
                self.set_result(results)
            else:
                self.set_exception(error)
        self._job = None  # and so its inputs

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_stuck(self) -> bool:
        """Return whether its lock is never released, since a signal came when the main thread had just taken it.

        So it is in `concurrent.futures`, and then only the main thread can use the future.
        """
        if threading.current_thread() is threading.main_thread():
            return False
        if not self._condition.acquire(timeout=_PATIENCE):
            return True
        self._condition.release()
        return False

    def _learn(self) -> None:
        """Take over the results of a job that is done, if nobody is to be told of it."""
        job = self._job
        if job is not None and job.state is JobState.DONE and not self.is_observed:
            self.conclude(self._results)

    def _observe(self) -> None:
        """From now on the thread that serves the lane makes this future know, as soon as the run has ended."""
        self.is_observed = True
        job = self._job
        if job is not None and job.want() is JobState.DONE:
            self._call()

    def _wait_for_job(self, timeout: float | None) -> float | None:
        """Wait until the job, if there is one, has ended; return what is left of the seconds."""
        self._check_here(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        left = GLANCE if timeout is None else timeout
        while left >= 0 and not self.is_settled and not self.is_observed:
            job = self._job
            if job is None or job.wait(min(left, GLANCE)) > JobState.DONE:
                self._observe()  # Python does it, or will make it a job
            self._learn()
            left = GLANCE if end is None else end - time.monotonic()
        return None if end is None else max(end - time.monotonic(), 0)

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


class _Waiters(list[Any]):
    """Where `concurrent.futures.wait` and `as_completed` put what they want to be told through."""

    def __init__(self, added: Callable[[], None]) -> None:
        super().__init__()
        self._added = added

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        self._added()


def _nothing() -> None:
    """Call nobody: the run is no job."""


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
        return [future.result() for future in self._futures]

    def cancel(self) -> None:
        """Cancel what has not begun."""
        self.failed = True
        for future in self._futures:
            future.cancel()
