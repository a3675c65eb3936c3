# SPDX-License-Identifier: Apache-2.0
"""One program ready to run: the context block of the native ABI, its tables, the run loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.buffers import aligned_bytes
from rlx.backends.cpu.dispatch import Native, Status, native, shared_pool
from rlx.backends.cpu.pool import Pool
from rlx.backends.cpu.thunks import DimProgram, Thunks
from rlx.backends.cpu.watch import Watch
from rlx.backends.cpu.words import CTX, Failure
from rlx.base.errors import BuildError, UsageError

__all__ = ["BUDGET_NANOSECONDS", "DONE", "Context", "Outcome"]

BUDGET_NANOSECONDS = 50_000_000
"""After so long a run comes back for a moment, so that Python can handle signals."""

_NO_ERROR = np.iinfo(np.int64).max
_WORDS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run came back.

    Attributes:
        status: DONE, HOST or HOOK (there was no callback for it), ERROR or GROW.
        pc: the thunk, for everything but DONE.
        flat_index: for ERROR, the first element that failed; in DIMS thunks, the record of the dim
            program.
        kind: for ERROR, a value of `Failure` (255: the thunk is malformed).
    """

    status: Status
    pc: int = 0
    flat_index: int = 0
    kind: int = 0

    @property
    def failure(self) -> Failure | None:
        """The kind of failure, None when there was none that kernels report."""
        return Failure(self.kind) if self.kind in Failure.__members__.values() else None


DONE = Outcome(Status.DONE)
"""The outcome of every run that ends well."""


class Context:
    """The native context of one program; not safe to run from two threads at once.

    Args:
        thunks: the program.
        slots: number of operand buffers.
        dims: initial values of the dims table; copied.
        dim_program: what DIMS thunks evaluate.
        threads: most participants of a kernel, the caller included.
        scratch: bytes of working memory per participant.
        budget: nanoseconds after which a run returns to Python for a moment; 0 means never.
        code: the runtime to use, of the host by default.
        pool: another pool than the process's, for tests.

    Attributes:
        slots: [slots] i64, addresses; write them with `set_slot`, or directly and keep the memory
            alive.
        dims: [extents] i64; written before a run, and by the dispatcher.
        address: of the context block.

    Raises:
        BuildError: the thunks use slots, extents or dim records beyond the tables.
    """

    def __init__(  # noqa: PLR0913  (the tables of the ABI, by keyword)
        self,
        thunks: Thunks,
        *,
        slots: int,
        dims: Sequence[int] | npt.NDArray[np.int64],
        dim_program: DimProgram | None = None,
        threads: int = 1,
        scratch: int = 0,
        budget: int = BUDGET_NANOSECONDS,
        code: Native | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.thunks = thunks
        self.slots = np.zeros(max(slots, 1), np.int64)
        self.dims = np.array(dims, np.int64)
        self._program = DimProgram() if dim_program is None else dim_program
        self._records = self._program.build()
        self._check()
        self._code = native() if code is None else code
        self._enter = self._code.run
        self._kept: dict[int, Any] = {}
        self._chosen_pool = pool
        self._pool: Pool | None = None
        self._watch: Watch | None = None
        self._words = aligned_bytes(8 * _WORDS).view(np.int64)
        self.address = int(self._words.ctypes.data)
        self._argument = ctypes.c_void_p(self.address)
        self._scratch_stride = -(-scratch // 128) * 128
        self._point()
        self._words[CTX.ERROR] = _NO_ERROR
        self._words[CTX.BUDGET] = budget
        self.threads = threads

    @property
    def threads(self) -> int:
        """Most participants of a kernel, the caller included; assigning it resizes the scratch.

        Raises:
            UsageError: less than 1 is assigned.
        """
        return int(self._words[CTX.THREADS])

    @threads.setter
    def threads(self, threads: int) -> None:
        if threads < 1:
            raise UsageError(f"threads must be at least 1 (the caller), not {threads}")
        self._pool = (self._chosen_pool or shared_pool()) if threads > 1 else None
        participants = 1 if self._pool is None else min(threads, self._pool.capacity)
        self._scratch = aligned_bytes(participants * self._scratch_stride, 128)
        self._words[CTX.SCRATCH] = self._scratch.ctypes.data
        self._words[CTX.SCRATCH_STRIDE] = self._scratch_stride
        self._words[CTX.POOL] = 0 if self._pool is None else self._pool.address
        self._words[CTX.THREADS] = threads

    def set_slot(self, index: int, array: npt.NDArray[Any]) -> None:
        """Point a slot at an array and keep the array alive until the slot is set again."""
        self._kept[index] = array
        self.slots[index] = array.__array_interface__["data"][0]

    def run(self, host: Callable[[int], None] | None = None, pc: int = 0) -> Outcome:
        """Run the program from a thunk until it ends, fails, or needs what this method cannot give.

        Args:
            host: executes the HOST thunk at a pc. Without it, such a thunk ends the run with status
                HOST.
            pc: where to begin.

        Raises:
            KeyboardInterrupt: (or what a signal handler raises) within 0.1 s and one thunk of the
                signal; the buffers are undefined then. What `host` raises passes through likewise.
        """
        self.start_pool()
        status = self._enter(self._argument, pc)
        return self.resume(status, host) if status else DONE

    def start_pool(self) -> None:
        """Start the workers that a run shares its kernels with, unless they run."""
        pool = self._pool
        if pool is not None and not pool.running:
            pool.start()

    def resume(self, status: int, host: Callable[[int], None] | None = None) -> Outcome:
        """Go on with a run that has come back with a status other than 0; see `run`."""
        watch = self._watch
        while status:
            kind, pc = status & 255, status >> 8
            if kind == Status.HOST and host is not None:
                if watch is None:
                    host(pc)
                else:
                    watch.host(host, pc)
                pc += 1
            elif kind == Status.HOOK and watch is not None:
                watch.hook(pc)
                pc += 1
            elif kind != Status.YIELD:
                return self._outcome(kind, pc)
            if watch is not None:
                watch.drain()
            status = self._enter(self._argument, pc)  # signal handlers have run on the way here
        return DONE

    @property
    def is_watched(self) -> bool:
        """Whether a watch is on."""
        return self._watch is not None

    @contextmanager
    def watched(self, watch: Watch) -> Generator[None]:
        """Watch the runs inside the block.

        Raises:
            UsageError: another watch is on.
        """
        if self._watch is not None:
            raise UsageError("the program is being watched already")
        records = watch.records(self.thunks)
        self._watch = watch
        self._words[CTX.THUNKS] = records.ctypes.data
        self._words[CTX.LOG] = watch.address
        try:
            yield
        finally:
            self._watch = None
            self._words[CTX.THUNKS] = self.thunks.records.ctypes.data
            self._words[CTX.LOG] = 0

    def _outcome(self, kind: int, pc: int) -> Outcome:
        if kind != Status.ERROR:
            return Outcome(Status(kind), pc)
        word = int(self._words[CTX.ERROR])
        self._words[CTX.ERROR] = _NO_ERROR
        return Outcome(Status.ERROR, pc, word >> 8, word & 255)

    def _point(self) -> None:
        words = self._words
        words[CTX.SLOTS] = self.slots.ctypes.data
        words[CTX.DIMS] = self.dims.ctypes.data
        words[CTX.THUNKS] = self.thunks.records.ctypes.data
        words[CTX.DIM_PROGRAM] = self._records.ctypes.data

    def _check(self) -> None:
        extents = max(self.thunks.extents, self._program.extents)
        for what, need, have in (
            ("slots", self.thunks.slots, len(self.slots)),
            ("extents", extents, len(self.dims)),
            ("dim program records", self.thunks.dim_records, len(self._program)),
        ):
            if need > have:
                raise BuildError(f"the thunks use {need} {what}, the tables hold {have}")
