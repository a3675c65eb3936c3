# SPDX-License-Identifier: Apache-2.0
"""Lanes of the CPU backend: jobs that native code does back to back; `lane_ir` says how."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.buffers import address_of, aligned_bytes
from rlx.backends.cpu.lane_ir import RING, JobWord, LaneOffset
from rlx.backends.lanes import Job, JobState
from rlx.base.numeric import Array

if TYPE_CHECKING:
    from rlx.backends.cpu.jit import Library

__all__ = ["CpuJob", "CpuLane", "LaneCode"]

_STATES = tuple(JobState)
_pointer, _word = ctypes.c_void_p, ctypes.c_int64


class LaneCode:
    """The native functions of lanes and jobs. Those that may wait let other threads have Python meanwhile.

    Args:
        library: holds them; it is kept.
    """

    SYMBOLS: ClassVar = (
        "rlx_lane_push",
        "rlx_lane_call",
        "rlx_lane_serve",
        "rlx_job_wait",
        "rlx_job_withdraw",
        "rlx_job_want",
    )

    def __init__(self, library: Library) -> None:
        self._library = library
        at = library.address
        brief, waiting = ctypes.PYFUNCTYPE, ctypes.CFUNCTYPE
        self.push = cast(
            "Callable[[int, int], None]",
            brief(None, _pointer, _pointer)(at("rlx_lane_push")),
        )
        self.call = cast("Callable[[int], None]", brief(None, _pointer)(at("rlx_lane_call")))
        self.serve = cast(
            "Callable[[int, int], int]", waiting(_word, _pointer, _word)(at("rlx_lane_serve"))
        )
        self.wait = cast(
            "Callable[[int, int], int]", waiting(_word, _pointer, _word)(at("rlx_job_wait"))
        )
        self.withdraw = cast("Callable[[int], int]", brief(_word, _pointer)(at("rlx_job_withdraw")))
        self.want = cast("Callable[[int], int]", brief(_word, _pointer)(at("rlx_job_want")))


class CpuJob:
    """One run made ready: implements `rlx.backends.lanes.Job`.

    Args:
        code: the native functions.
        context: address of the context it runs in.
        pc: where it begins.
        slots: i64 per array, the slot that is pointed at it.
        arrays: inputs and outputs; they are kept.
        resume: goes on from a status that `rlx_run` returned.
    """

    __slots__ = ("_arrays", "_code", "_resume", "_slots", "_words", "address")

    def __init__(
        self,
        code: LaneCode,
        context: int,
        pc: int,
        slots: npt.NDArray[np.int64],
        arrays: Sequence[Array],
        resume: Callable[[int], None],
    ) -> None:
        self._code, self._slots, self._arrays, self._resume = code, slots, arrays, resume
        words = (0, 0, 0, context, pc, address_of(slots), len(arrays), *map(address_of, arrays))
        self._words = (_word * len(words))(*words)
        self.address = addressof(self._words)

    @property
    def state(self) -> JobState:
        """What has become of it by now."""
        return _STATES[int(self._words[JobWord.STATE]) & 0xFFFFFFFF]

    def wait(self, seconds: float) -> JobState:
        """Wait until its state is final; see the protocol."""
        return _STATES[self._code.wait(self.address, int(seconds * 1e9))]

    def withdraw(self) -> bool:
        """Take it back unless it has begun; see the protocol."""
        return self._code.withdraw(self.address) == JobState.WAITING

    def want(self) -> JobState:
        """Make the server return when it has ended; see the protocol."""
        return _STATES[self._code.want(self.address)]

    def finish(self) -> None:
        """Go on with a run that has stopped; see the protocol."""
        self._resume(self._words[JobWord.STATUS])


class CpuLane:
    """Where jobs wait: implements `rlx.backends.lanes.Lane`.

    Args:
        code: the native functions.
    """

    capacity = RING

    def __init__(self, code: LaneCode) -> None:
        self._code = code
        self._bytes = aligned_bytes(LaneOffset.BYTES, 128)
        self._address = address_of(self._bytes)
        self._pushed = _word.from_address(self._address + LaneOffset.PUSHED)
        self._passed = _word.from_address(self._address + LaneOffset.PASSED)

    @property
    def pushed(self) -> int:
        """How many jobs were pushed so far."""
        return self._pushed.value

    @property
    def passed(self) -> int:
        """How many jobs it does not need any more."""
        return self._passed.value

    def push(self, job: Job) -> None:
        """Append a job."""
        assert isinstance(job, CpuJob)
        self._code.push(self._address, job.address)

    def serve(self, seconds: float) -> bool:
        """Do jobs until Python has something to do; see the protocol."""
        return bool(self._code.serve(self._address, int(seconds * 1e9)))

    def call(self) -> None:
        """Make the server return; see the protocol."""
        self._code.call(self._address)

    def after_fork_in_child(self) -> None:
        """Forget all jobs."""
        self._bytes[:] = 0
