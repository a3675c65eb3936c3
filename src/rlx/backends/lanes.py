# SPDX-License-Identifier: Apache-2.0
"""Runs that a backend does one after the other without Python in between: optional, for backends whose runs are short.

The queue of an executable (`rlx.runtime.queue`) has one lane. A job is a run made ready: its memory is there and its
shapes are known, so that whoever serves the lane only has to begin it. The rules:

- One thread serves a lane. Jobs are pushed by one thread at a time, and done in that order.
- A job lives, with all its arrays, until the lane has passed it.
- A run that needs Python in the end (it failed, or takes so long that signals have to be looked at) has STOPPED; the
  server returns, and Python goes on with it before the lane is served again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol, runtime_checkable

from rlx.base.numeric import Array
from rlx.base.target import Target

__all__ = ["Job", "JobState", "Lane", "LaneBackend", "LaneGraph"]


class JobState(IntEnum):
    """What has become of a job; states from DONE on are final."""

    WAITING = 0
    RUNNING = 1
    DONE = 2
    STOPPED = 3  # it did not end well, or not yet: `Job.finish` goes on
    WITHDRAWN = 4  # it did not begin, and will not


class Job(Protocol):
    """One run made ready."""

    @property
    def state(self) -> JobState:
        """What has become of it by now."""
        ...

    def wait(self, seconds: float) -> JobState:
        """Wait until its state is final, for so long or until a signal comes at the most, and return the state."""
        ...

    def withdraw(self) -> bool:
        """Take it back unless it has begun; return whether this call did so."""
        ...

    def want(self) -> JobState:
        """Make the server return when it has ended; return its state, which may be final already."""
        ...

    def finish(self) -> None:
        """Go on with a run that has STOPPED, in the thread that serves, until it has ended.

        Raises:
            ExecutionError: the data broke a rule of an operator.
        """
        ...


class Lane(Protocol):
    """Where the jobs of one executable wait."""

    capacity: int
    """How many jobs it holds at the most, those it has not passed yet included."""

    @property
    def pushed(self) -> int:
        """How many jobs were pushed so far."""
        ...

    @property
    def passed(self) -> int:
        """How many jobs it does not need any more, of those that were pushed."""
        ...

    def push(self, job: Job) -> None:
        """Append a job."""
        ...

    def serve(self, seconds: float) -> bool:
        """Do jobs until Python has something to do.

        Returns:
            Whether that is because nothing came for so long, or for a moment after the last job.
        """
        ...

    def call(self) -> None:
        """Make the server return when the job it is at has ended, at once if it has none."""
        ...

    def after_fork_in_child(self) -> None:
        """Forget all jobs: who served them is the parent's."""
        ...


@runtime_checkable
class LaneBackend(Protocol):
    """A backend with lanes."""

    def lane(self, target: Target) -> Lane:
        """Return a new one."""
        ...


@runtime_checkable
class LaneGraph(Protocol):
    """A compiled graph of a backend with lanes."""

    def job(
        self, inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
    ) -> Job | None:
        """Return a run as a job; None if it needs Python on the way, or has other extents than the run before.

        Nothing runs meanwhile, and all between this call and the push of the job.

        Args:
            inputs: as for `CompiledGraph.run`.
            outputs: likewise.
            env: likewise.
        """
        ...
