# SPDX-License-Identifier: Apache-2.0
"""Watching a run: Python is called after chosen thunks, or the time of every kernel is logged by native code.

The dispatcher walks a copy of the thunk table in which flag bits are set, so a program that is not watched pays nothing
and needs no other executor. Both may be on at once; calls of Python lie between the measured intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.buffers import aligned_bytes
from rlx.backends.cpu.thunks import Flag, Kind, Thunks

__all__ = ["Watch"]

_ENTERED = -1
_SLACK = 3  # the header, and two stamps behind the capacity


class Watch:
    """What a run is watched for.

    Args:
        after: called with the pc of every watched thunk when it is done.
        pcs: which thunks; kernels and host operators can be watched.
        timed: log when every kernel and host operator began and ended.
        capacity: entries of the native log; when it is full the run comes back to empty it.
    """

    def __init__(
        self,
        after: Callable[[int], None] | None = None,
        pcs: Collection[int] = (),
        *,
        timed: bool = False,
        capacity: int = 4096,
    ) -> None:
        self._after = after
        self._pcs = frozenset(pcs)
        self._timed = timed
        self._log = aligned_bytes(16 * (capacity + _SLACK) if timed else 0).view(np.int64)
        self._spans: list[tuple[int, int, int]] = []
        if timed:
            self._log[:2] = 0, capacity

    @property
    def address(self) -> int:
        """Of the native log; 0 if nothing is timed."""
        return int(self._log.ctypes.data) if self._timed else 0

    def records(self, thunks: Thunks) -> npt.NDArray[np.int64]:
        """Return the table with the flags of this watch; it must live as long as it is on."""
        self._records = thunks.records.copy()
        words = self._records[:, 3]
        if self._timed:
            words[(words & 255) == Kind.CALL] |= int(Flag.TIMED) << 8
        words[sorted(self._pcs)] |= int(Flag.HOOK) << 8
        return self._records

    def host(self, execute: Callable[[int], None], pc: int) -> None:
        """Execute a host thunk, with everything that is wanted of it."""
        self.drain()
        began = perf_counter_ns()  # CLOCK_MONOTONIC, as the native log
        execute(pc)
        if self._timed:
            self._spans.append((pc, began, perf_counter_ns()))
        if pc in self._pcs:
            self.hook(pc)

    def hook(self, pc: int) -> None:
        """Tell Python that a watched thunk is done."""
        if self._after is not None:
            self._after(pc)

    def drain(self) -> None:
        """Empty the native log, so that the next entry begins behind what Python did meanwhile."""
        if not self._timed:
            return
        used = int(self._log[0])
        began = 0
        for pc, now in self._log[2 : 2 + 2 * used].reshape(-1, 2).tolist():
            if pc != _ENTERED:
                self._spans.append((pc, began, now))
            began = now
        self._log[0] = 0

    def spans(self) -> list[tuple[int, int, int]]:
        """Return (pc, began, ended) of everything that ran, in order, in nanoseconds of the monotonic clock."""
        self.drain()
        return self._spans
