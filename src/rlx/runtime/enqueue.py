# SPDX-License-Identifier: Apache-2.0
"""What a user can do with runs that wait for their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlx.backends.lanes import Job
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.base.pages import bring_pages
from rlx.runtime.futures import Results, RunFuture, Series
from rlx.runtime.inputs import Inputs, Matched
from rlx.runtime.queue import RunQueue

__all__ = ["Enqueuing"]

_Made: TypeAlias = "tuple[Job, Results] | None"


class Enqueuing:
    """The part of an executable that is about runs that are enqueued."""

    _inputs: Inputs
    _queue: RunQueue

    def _named(
        self,
        arrays: Matched,
        outputs: Sequence[str] | None,
        out: Mapping[str, Any] | Sequence[Any] | None,
    ) -> dict[str, Any]:
        """Run once, when it is its turn, and return outputs by name."""
        raise NotImplementedError

    def _job(self, arrays: Matched) -> _Made:
        """Return `_named` of all outputs as a job, and what it returns; None if it cannot be one. The lock is held."""
        raise NotImplementedError

    def run_async(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        outputs: Sequence[str] | None = None,
        out: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        queue: int = 8,
    ) -> RunFuture:
        """Enqueue a run and return a future of what `run` would return.

        The runs of an executable, `run` itself included, take place in the order in which they were called for, one at
        a time. Inputs are copied before this returns, so the caller may write over them; buffers in `out` are the run's
        until it has ended.

        Args:
            inputs: as for `run`.
            outputs: as for `run`.
            out: as for `run`.
            queue: how many runs may wait; when so many do, this waits until one of them begins.

        Raises:
            UsageError: an input is unknown, missing, or of another dtype. All else is raised by the future.
        """
        return self._submit(inputs, outputs, out, queue)

    def run_pipelined(
        self,
        inputs: Iterable[Mapping[str, Any] | Sequence[Any]],
        outputs: Sequence[str] | None = None,
        *,
        queue: int = 2,
    ) -> list[dict[str, Any]]:
        """Run once for each of several inputs and return the outputs of each, as `run` one after the other would.

        Inputs in a list or tuple are there already: the calling thread runs them. Those of any other iterable are taken
        from it and copied while a run is in flight, in another thread.

        Args:
            inputs: each as for `run`; an iterable may give the same arrays again, with other content.
            outputs: as for `run`.
            queue: how many runs of an iterable may wait beside the one in flight; each holds copies of its inputs, and
                its outputs.

        Raises:
            UsageError, ExecutionError: what the first run that failed raised. Those behind it do not begin.
        """
        if isinstance(inputs, (list, tuple)):
            _check_queue(queue)
            self._settle()
            given = [self._inputs.match(each) for each in inputs]
            return [self._named(arrays, outputs, None) for arrays in given]
        _check_queue(queue)
        series = Series()
        try:
            for given in inputs:
                series.add(self._submit(given, outputs, None, queue, series))
            return series.results()
        finally:
            series.cancel()

    def _submit(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        outputs: Sequence[str] | None,
        out: Mapping[str, Any] | Sequence[Any] | None,
        bound: int,
        series: Series | None = None,
    ) -> RunFuture:
        _check_queue(bound)
        matched = self._inputs.match(inputs)
        arrays = Matched(matched.inputs, [np.array(a) for a in matched])
        # What the caller does to lists and dicts later changes nothing.
        if isinstance(outputs, list):
            outputs = list(outputs)
        if isinstance(out, (list, dict)):
            out = out.copy()
        whole = outputs is None and out is None
        work = _Enqueued(
            lambda: self._named(arrays, outputs, out),
            (lambda: self._job(arrays)) if whole else None,
        )
        future = self._queue.submit(work, bound, series)
        # While it runs, or waits: outputs are written at the end.
        for array in work.results:
            bring_pages(array)
        return future

    def _settle(self) -> None:
        """Wait for the runs that were enqueued before."""
        self._queue.settle()


class _Enqueued:
    """A run that is enqueued: implements `rlx.runtime.queue.Work`.

    Args:
        run: does it in Python.
        job: returns it as a job, if it can be one; None if it never can.

    Attributes:
        results: the outputs, if they are there before the run.
    """

    __slots__ = ("_job", "_run", "results")

    def __init__(self, run: Callable[[], Results], job: Callable[[], _Made] | None) -> None:
        self._run, self._job = run, job
        self.results: Sequence[Array] = ()

    def run(self) -> Results:
        """Do it in Python."""
        return self._run()

    def job(self) -> _Made:
        """Return the run as a job, and its results; None if it cannot be one."""
        made = None if self._job is None else self._job()
        self.results = () if made is None else tuple(made[1].values())
        return made


def _check_queue(bound: int) -> None:
    if bound < 1:
        raise UsageError(f"queue is at least 1, not {bound}")
