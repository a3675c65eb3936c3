# SPDX-License-Identifier: Apache-2.0
"""The thread pool: daemon threads that live in JITted code and share the chunks of a kernel.

`pool_ir` says how the native half works. This half owns the state, starts the workers at the first
parallel run, stops them before `fork` (parent and child start their own again when they need them)
and at interpreter exit. The address of the state is fixed for the life of the pool, so contexts may
hold it across all of that; a pool whose workers are stopped has one participant, the caller.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Callable
from contextvars import Context
from logging import getLogger
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.buffers import aligned_bytes
from rlx.backends.cpu.pool_ir import Offset, state_bytes
from rlx.backends.cpu.quota import available_cpus
from rlx.base.errors import UsageError

__all__ = ["Pool", "PoolCode", "aligned_bytes", "available_cpus"]

_LOG = getLogger("rlx")
_SPIN_NANOSECONDS = 60_000
"""How long a worker looks for work: longer than the serial kernels between two parallel ones."""


class PoolCode(NamedTuple):
    """The pool's native functions.

    Attributes:
        worker: (state address, participant number) -> returns when the pool stops.
        stop: (state address) -> asks all workers to leave.
    """

    worker: Callable[[int, int], None]
    stop: Callable[[int], None]


class Pool:
    """Threads that share the chunks of a kernel with the thread that runs it.

    Args:
        code: the native functions.
        participants: threads of a job, the caller's included. None means the CPUs this process may
            use, counted at every start; then at most the machine's CPUs.

    Attributes:
        address: of the native state, for word 4 of a context.
        capacity: most participants there can ever be.
        running: whether the workers are there; `start` makes it true.
    """

    def __init__(self, code: PoolCode, participants: int | None = None) -> None:
        if participants is not None and participants < 1:
            raise UsageError(f"a pool has at least 1 participant (the caller), not {participants}")
        _refuse_subinterpreter()
        self._code = code
        self._fixed = participants
        self.capacity = participants or max(os.cpu_count() or 1, available_cpus())
        self._state = aligned_bytes(state_bytes(self.capacity), 128)
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self.address = int(self._state.ctypes.data)
        self.running = False
        self._reset()
        _REGISTRY.add(self)

    @property
    def participants(self) -> int:
        """Threads that may take part in a job now, the caller's included."""
        return int(self._word(Offset.SIZE)[0])

    def start(self) -> None:
        """Start the workers unless they run.

        Does nothing while they are being stopped, during a fork, and once the interpreter exits.
        """
        if self.running or self._stopping or _REGISTRY.paused:
            return
        # Signal handlers run in the main thread only: a KeyboardInterrupt cannot leave this half
        # done elsewhere.
        # The context is an empty one: threads may keep that of their starter for ever (from Python
        # 3.14 on).
        starter = threading.Thread(target=Context().run, args=(self._start,), name="rlx-start")
        starter.start()
        starter.join()

    def _start(self) -> None:
        with _REGISTRY.lock:
            if self.running or _REGISTRY.paused:
                return
            self._join()
            self._word(Offset.QUIT)[0] = 0
            wanted = self._fixed or min(available_cpus(), self.capacity)
            for tid in range(1, wanted):
                arguments = (self.address, tid)
                thread = threading.Thread(
                    target=self._code.worker, args=arguments, name=f"rlx-{tid}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the system's limit of threads
                    _LOG.warning("started %d of %d worker threads: %s", tid - 1, wanted - 1, error)
                    break
                self._threads.append(thread)
                self._word(Offset.SIZE)[0] = tid + 1
            self.running = True

    def stop(self) -> None:
        """Stop and join the workers; runs in other threads go on alone."""
        self._stopping = True
        try:
            with _REGISTRY.lock:
                self.running = False
                self._code.stop(self.address)
                self._join()
        finally:
            self._stopping = False

    def _join(self) -> None:
        """Wait for workers told to leave, also by a `stop` that a signal cut short."""
        while self._threads:
            self._threads[-1].join()
            self._threads.pop()
        self._word(Offset.SIZE)[0] = 1

    def close(self) -> None:
        """Stop the workers and forget the pool. Nothing may run with it afterwards."""
        self.stop()
        _REGISTRY.discard(self)

    def after_fork_in_child(self) -> None:
        """Forget what other threads of the parent were doing; they do not exist here."""
        self._threads.clear()
        self.running = self._stopping = False
        self._reset()

    def _reset(self) -> None:
        self._state[:] = 0
        self._word(Offset.SIZE)[0] = 1
        self._word(Offset.SPIN)[0] = _SPIN_NANOSECONDS

    def _word(self, offset: int) -> npt.NDArray[np.int64]:
        return self._state[offset : offset + 8].view(np.int64)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Registry:
    """All pools of the process, and the lock under which workers start and stop.

    The lock is held across a fork, so no thread starts workers between the moment they stop and the
    fork itself.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pools: set[Pool] = set()
        self._paused_before = False
        self.paused = False
        """During a fork and after interpreter exit began: runs go on without workers."""

    def add(self, pool: Pool) -> None:
        with self.lock:
            self.pools.add(pool)

    def discard(self, pool: Pool) -> None:
        with self.lock:
            self.pools.discard(pool)

    def before_fork(self) -> None:
        self.lock.acquire()
        self._paused_before = self.paused
        self.paused = True
        for pool in self.pools:
            pool.stop()

    def after_fork_in_parent(self) -> None:
        self.paused = self._paused_before
        self.lock.release()

    def after_fork_in_child(self) -> None:
        for pool in self.pools:
            pool.after_fork_in_child()
        self.after_fork_in_parent()

    def at_exit(self) -> None:
        with self.lock:
            self.paused = True
            for pool in self.pools:
                pool.stop()


_REGISTRY = _Registry()
atexit.register(_REGISTRY.at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_REGISTRY.before_fork,
        after_in_parent=_REGISTRY.after_fork_in_parent,
        after_in_child=_REGISTRY.after_fork_in_child,
    )


def _refuse_subinterpreter() -> None:
    for name in ("_interpreters", "_xxsubinterpreters"):  # 3.13 and later, 3.11 and 3.12
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if module.get_current() != module.get_main():
            raise UsageError(
                "rlx runs in the main interpreter only: its worker threads belong to that one, "
                "not to a sub-interpreter"
            )
        return
