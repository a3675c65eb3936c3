# SPDX-License-Identifier: Apache-2.0
"""The native runtime, compiled and linked once per instruction set: `rlx_run`, the thread pool, and lanes of runs.

::

    code = native(host_isa())
    status = code.run(context_address, 0)   # releases the GIL; pc << 8 | Status
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, cast

from rlx.backends.cpu.dispatch_ir import DISPATCH_IR
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.jit import Library, ObjectCache, compile_text
from rlx.backends.cpu.lane import LaneCode
from rlx.backends.cpu.lane_ir import LANE_IR
from rlx.backends.cpu.pool import Pool, PoolCode
from rlx.backends.cpu.pool_ir import POOL_IR
from rlx.backends.cpu.system import system_ir

__all__ = ["Native", "Status", "entry", "native", "runtime_ir", "shared_pool"]

_ATTRIBUTES = '\nattributes #0 = { nounwind "frame-pointer"="all" }\n'
_SYMBOLS = (
    "rlx_run",
    "rlx_parallel_for",
    "rlx_pool_worker",
    "rlx_pool_stop",
    *LaneCode.SYMBOLS,
)


class Status(IntEnum):
    """Low byte of what `rlx_run` returns; the upper bits are the program counter."""

    DONE = 0  # the program ended
    YIELD = 1  # over budget: let signal handlers run, re-enter at pc
    HOST = 2  # Python executes the thunk at pc, then re-enters at pc + 1
    ERROR = 3  # the thunk at pc failed; the context's error word says how
    GROW = 4  # a data-dependent buffer needs more room
    HOOK = 5  # the thunk at pc is done and Python wants to look; re-enter at pc + 1


@dataclass(frozen=True)
class Native:
    """The linked runtime of one instruction set.

    Attributes:
        run: (context address, pc) -> status, without the GIL. A `c_void_p` kept by the caller saves
            0.1 us a call.
        run_address: of `rlx_run`.
        parallel_for: (pool, ctx, kernel, args, chunks, threads), all addresses or integers, without
            the GIL.
        pool_code: the functions a `Pool` needs.
        lane_code: the functions of lanes and their jobs.
        library: keeps the code in memory.
    """

    run: Callable[[int | ctypes.c_void_p, int], int]
    run_address: int
    parallel_for: Callable[[int, int, int, int, int, int], None]
    pool_code: PoolCode
    lane_code: LaneCode
    library: Library


class _Shared:
    """What the process has one of."""

    lock = threading.RLock()
    native: ClassVar[dict[Isa, Native]] = {}
    pool: ClassVar[Pool | None] = None


def runtime_ir(isa: Isa) -> str:
    """Return the text of the runtime for a target.

    Raises:
        DeviceError: rlx has no thread pool for the target's operating system.
    """
    return "\n".join((system_ir(isa), POOL_IR, DISPATCH_IR, LANE_IR, _ATTRIBUTES))


def native(isa: Isa | None = None, cache: ObjectCache | None = None) -> Native:
    """Return the runtime of an instruction set, compiled and linked at the first call.

    Args:
        isa: a target this process can execute; the host by default.
        cache: where its object is looked up and kept.

    Raises:
        DeviceError: rlx has no thread pool for this operating system.
    """
    target = host_isa() if isa is None else isa
    found = _Shared.native.get(target)
    if found is None:
        with _Shared.lock:
            found = _Shared.native.get(target)
            if found is None:
                found = _Shared.native[target] = _link(target, cache)
    return found


def entry(isa: Isa | None = None) -> int:
    """Return the address of `i64 rlx_run(ptr ctx, i64 pc)`."""
    return native(isa).run_address


def shared_pool(isa: Isa | None = None) -> Pool:
    """Return the one pool of this process; its workers start at the first `Pool.start`.

    Raises:
        UsageError: called in a sub-interpreter.
    """
    with _Shared.lock:
        if _Shared.pool is None:
            _Shared.pool = Pool(native(isa).pool_code)
        return _Shared.pool


def _link(isa: Isa, cache: ObjectCache | None) -> Native:
    library = Library([compile_text(runtime_ir(isa), isa, cache)], _SYMBOLS, isa)
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    run = ctypes.CFUNCTYPE(word, pointer, word)
    worker = ctypes.CFUNCTYPE(None, pointer, word)
    stop = ctypes.CFUNCTYPE(None, pointer)
    spread = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, pointer, word, word)
    at = library.address
    return Native(
        run=cast("Callable[[int | ctypes.c_void_p, int], int]", run(at("rlx_run"))),
        run_address=at("rlx_run"),
        parallel_for=cast(
            "Callable[[int, int, int, int, int, int], None]", spread(at("rlx_parallel_for"))
        ),
        pool_code=PoolCode(
            cast("Callable[[int, int], None]", worker(at("rlx_pool_worker"))),
            cast("Callable[[int], None]", stop(at("rlx_pool_stop"))),
        ),
        lane_code=LaneCode(library),
        library=library,
    )
