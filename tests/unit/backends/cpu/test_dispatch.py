# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.backends.cpu.abi import CTX, Failure
from rlx.backends.cpu.context import DONE, Context, Outcome
from rlx.backends.cpu.dispatch import Status, entry, native, runtime_ir
from rlx.backends.cpu.isa import Isa, generic_isa, host_isa
from rlx.backends.cpu.jit import compile_text, undefined_symbols
from rlx.backends.cpu.pool import Pool
from rlx.backends.cpu.thunks import DimOp, DimProgram, Flag, Kind, ThunkTable
from rlx.backends.cpu.watch import Watch
from rlx.base.errors import BuildError, DeviceError, UsageError

_MAX, _MIN = 2**63 - 1, -(2**63)


def context(
    table: ThunkTable, *, slots: int = 1, dims: list[int] | None = None, **kwargs: Any
) -> Context:
    return Context(table.build(), slots=slots, dims=[0] if dims is None else dims, **kwargs)


def cells(ctx: Context, slot: int = 0, count: int = 64) -> npt.NDArray[np.int64]:
    array = np.zeros(count, np.int64)
    ctx.set_slot(slot, array)
    return array


# -- thunks ----------------------------------------------------------------------------------------


def test_an_empty_program_is_done() -> None:
    table = ThunkTable()
    table.end()
    assert context(table).run() == DONE


@pytest.mark.parametrize("chunks", [0, 1, 2, 50])
def test_call_runs_every_chunk(native_kernels: Mapping[str, int], chunks: int) -> None:
    table = ThunkTable()
    table.call("t_count", [1, 0], 0, node=7)
    table.end()
    ctx = Context(table.build(native_kernels), slots=2, dims=[chunks])
    counted, untouched = cells(ctx, 1), cells(ctx, 0)
    assert ctx.run() is DONE
    assert (counted[:chunks] == 1).all()
    assert not counted[chunks:].any()
    assert not untouched.any()
    assert ctx.thunks.node(0) == 7
    assert ctx.thunks.kind(0) is Kind.CALL


def test_a_negative_chunk_count_runs_nothing(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.end()
    ctx = context(table, dims=[-3])
    assert ctx.run() is DONE


def test_set_add_and_jumps_make_nested_loops(native_kernels: Mapping[str, int]) -> None:
    # for i in range(5): for j in range(i): count
    i, j, n, one = range(4)
    table = ThunkTable()
    table.set_dim(i, 0)
    outer = table.jump_ge(i, n)
    table.set_dim(j, 0)
    inner = table.jump_ge(j, i)
    table.call(native_kernels["t_count"], [0, 0], one)
    table.add_dim(j, 1)
    table.jump(inner)
    table.patch(inner, len(table))
    table.add_dim(i, 1)
    table.jump(outer)
    table.patch(outer, len(table))
    table.end()
    ctx = context(table, dims=[9, 9, 5, 1])
    counted = cells(ctx)
    for _ in range(2):
        assert ctx.run() is DONE
    assert counted[0] == 2 * (0 + 1 + 2 + 3 + 4)
    assert ctx.dims.tolist() == [5, 4, 5, 1]


@pytest.mark.parametrize("byte", [0, 1, 255])
def test_jump_unless(byte: int) -> None:
    table = ThunkTable()
    branch = table.jump_unless(0)
    table.set_dim(0, 1)
    table.end()
    table.patch(branch, len(table))
    table.set_dim(0, 2)
    table.end()
    ctx = context(table)
    condition = np.array([byte, 1 - min(byte, 1)], np.uint8)  # the byte after it must not matter
    ctx.set_slot(0, condition)
    assert ctx.run() is DONE
    assert ctx.dims[0] == (1 if byte else 2)


def test_bind_and_copy_slot_make_views_per_iteration(native_kernels: Mapping[str, int]) -> None:
    i, n, one, stride = range(4)
    table = ThunkTable()
    table.copy_slot(1, 0)
    head = table.jump_ge(i, n)
    table.bind(2, 1, i, stride)
    table.call(native_kernels["t_count"], [2, 0], one)
    table.add_dim(i, 2)
    table.jump(head)
    table.patch(head, len(table))
    table.end()
    ctx = context(table, slots=3, dims=[0, 6, 1, 8])
    counted = cells(ctx, 0, 8)
    assert ctx.run() is DONE
    assert counted.tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    assert ctx.slots[1] == ctx.slots[0]


@pytest.mark.parametrize(
    ("value", "bound", "good"),
    [(0, 5, True), (5, 5, True), (6, 5, False), (-1, 5, False), (_MAX, _MAX, True)],
)
def test_read_dim(value: int, bound: int, good: bool) -> None:
    table = ThunkTable()
    table.read_dim(0, 0, 1)
    table.end()
    ctx = context(table, dims=[0, bound])
    data = np.zeros(9, np.uint8)[1:]  # a slot may be unaligned
    data[:] = np.frombuffer(np.int64(value).tobytes(), np.uint8)
    ctx.set_slot(0, data)
    expected = DONE if good else Outcome(Status.ERROR, 0, 0, Failure.OVER_BOUND)
    assert ctx.run() == expected
    assert ctx.dims[0] == value
    assert ctx.run() == expected


def test_host_thunks_run_in_python_between_native_parts(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.set_dim(0, 1)
    table.host(node=4)
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.host(node=5)
    table.end()
    ctx = context(table)
    counted = cells(ctx)
    seen: list[tuple[int, int, int]] = []

    def host(pc: int) -> None:
        seen.append((pc, ctx.thunks.node(pc), int(counted.sum())))
        ctx.dims[0] = 3

    assert ctx.run(host) is DONE
    assert seen == [(1, 4, 0), (3, 5, 3)]


def test_without_a_host_callback_the_caller_resumes() -> None:
    table = ThunkTable()
    table.host()
    table.set_dim(0, 8)
    table.end()
    ctx = context(table)
    assert ctx.run() == Outcome(Status.HOST, 0)
    assert ctx.dims[0] == 0
    assert ctx.run(pc=1) is DONE
    assert ctx.dims[0] == 8


def test_what_the_host_raises_passes_through() -> None:
    table = ThunkTable()
    table.host()
    table.end()

    def host(pc: int) -> None:
        raise ZeroDivisionError(pc)

    with pytest.raises(ZeroDivisionError):
        context(table).run(host)


# -- watching --------------------------------------------------------------------------------------


def test_a_hook_comes_after_its_kernel(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.call(native_kernels["t_count"], [0, 0], 0, flags=Flag.MAY_FAIL)
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.host()
    table.end()
    ctx = context(table, dims=[2])
    counted = cells(ctx)
    seen: list[tuple[str, int, int]] = []

    def note(what: str) -> Callable[[int], None]:
        return lambda pc: seen.append((what, pc, int(counted[1])))

    with ctx.watched(Watch(note("hook"), [1, 2, 3])):
        assert ctx.run(note("host")) is DONE
    assert seen == [("hook", 1, 2), ("hook", 2, 3), ("host", 3, 3), ("hook", 3, 3)]
    assert ctx.run(note("host")) is DONE  # the watch is over
    assert seen[4:] == [("host", 3, 6)]


def test_a_flag_without_a_watch_ends_the_run(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_count"], [0, 0], 0, flags=Flag.HOOK)
    table.set_dim(0, 8)
    table.end()
    ctx = context(table, dims=[1])
    cells(ctx)
    assert ctx.run() == Outcome(Status.HOOK, 0)
    assert ctx.dims[0] == 1
    assert ctx.run(pc=1) is DONE
    assert ctx.dims[0] == 8


def test_a_failed_thunk_is_not_shown_to_a_hook(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_fail"], [0, 1], 0, flags=Flag.MAY_FAIL)
    table.end()
    ctx = context(table, dims=[1, 0])
    cells(ctx)
    with ctx.watched(Watch(lambda pc: pytest.fail(f"saw {pc}"), [0], timed=True)):
        assert ctx.run().status is Status.ERROR


def test_what_a_hook_raises_ends_the_run_and_the_watch(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.end()
    ctx = context(table, dims=[1])
    counted = cells(ctx)

    def stop(pc: int) -> None:
        raise ZeroDivisionError(pc)

    with pytest.raises(ZeroDivisionError), ctx.watched(Watch(stop, [0])):
        ctx.run()
    assert ctx.run() is DONE
    assert counted[0] == 2


def test_one_watch_at_a_time() -> None:
    table = ThunkTable()
    table.end()
    ctx = context(table)
    with ctx.watched(Watch()), pytest.raises(UsageError, match="watched already"):
        ctx.watched(Watch()).__enter__()


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 4096])
@pytest.mark.parametrize("budget", [0, 1])
def test_times_of_kernels_are_whole_and_in_order(
    native_kernels: Mapping[str, int], capacity: int, budget: int
) -> None:
    # for i in range(20): busy; count; then the host sleeps
    i, n, one, pauses = range(4)
    table = ThunkTable()
    head = table.jump_ge(i, n)
    table.call(native_kernels["t_busy"], [0, pauses], one)
    table.call(native_kernels["t_count"], [0, 0], one)
    table.add_dim(i, 1)
    table.jump(head)
    table.patch(head, len(table))
    table.host()
    table.end()
    ctx = context(table, dims=[0, 20, 1, 2000], budget=budget)
    counted = cells(ctx)
    watch = Watch(timed=True, capacity=capacity)
    before = time.perf_counter_ns()
    with ctx.watched(watch):
        assert ctx.run(lambda _: time.sleep(0.002)) is DONE
    after = time.perf_counter_ns()
    spans = watch.spans()
    assert counted[0] == 40
    assert [pc for pc, _, _ in spans] == [1, 2] * 20 + [5]
    borders = [before, *(t for _, began, ended in spans for t in (began, ended)), after]
    assert borders == sorted(borders)
    _, began, ended = spans[-1]
    assert ended - began >= 2_000_000
    assert sum(e - b for pc, b, e in spans if pc == 1) > sum(e - b for pc, b, e in spans if pc == 2)


def test_hooks_lie_between_times(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.end()
    ctx = context(table, dims=[1])
    cells(ctx)
    watch = Watch(lambda _: time.sleep(0.002), [0, 1], timed=True)
    with ctx.watched(watch):
        ctx.run()
    (first, _, end), (second, begin, _) = watch.spans()
    assert (first, second) == (0, 1)
    assert begin - end >= 2_000_000


def test_a_malformed_thunk_is_an_error() -> None:
    table = ThunkTable()
    table.end()
    ctx = context(table)
    ctx.thunks.records[0, 3] = 77
    outcome = ctx.run()
    assert (outcome.status, outcome.kind, outcome.failure) == (Status.ERROR, 255, None)


# -- errors ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Pool]]:
    made: dict[int, Pool] = {}

    def pool(participants: int) -> Pool:
        if participants not in made:
            made[participants] = Pool(native().pool_code, participants)
        return made[participants]

    yield pool
    for each in made.values():
        each.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_least_failing_element_is_reported_for_any_thread_count(
    native_kernels: Mapping[str, int], pools: Callable[[int], Pool], threads: int
) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_fail"], [0, 1], 0, flags=Flag.MAY_FAIL, node=3)
    table.set_dim(2, 1)
    table.end()
    ctx = context(table, dims=[64, 0, 0], threads=threads, pool=pools(threads))
    cells(ctx)
    for first in [*range(0, 64, 3)] * 10:
        ctx.dims[1] = first
        assert ctx.run() == Outcome(Status.ERROR, 0, 10 * first + 3, Failure.INDEX_OUT_OF_RANGE)
    assert ctx.dims[2] == 0
    ctx.dims[1] = 64
    assert ctx.run() is DONE  # the error of the run before is gone
    assert ctx.dims[2] == 1


def test_only_thunks_that_may_fail_are_tested(native_kernels: Mapping[str, int]) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_fail"], [0, 1], 0)
    table.call(native_kernels["t_count"], [0, 1], 0, flags=Flag.MAY_FAIL)
    table.end()
    ctx = context(table, dims=[4, 2])
    cells(ctx)
    assert ctx.run() == Outcome(Status.ERROR, 1, 23, Failure.INDEX_OUT_OF_RANGE)


def test_add_dim_overflow() -> None:
    table = ThunkTable()
    table.add_dim(0, 1)
    table.end()
    ctx = context(table, dims=[_MAX - 1])
    assert ctx.run() is DONE
    assert ctx.run() == Outcome(Status.ERROR, 0, 0, Failure.DIM_OVERFLOW)


# -- the dim program -------------------------------------------------------------------------------

_MEANING: dict[DimOp, Callable[[int, int], int | None]] = {
    DimOp.ADD: lambda a, b: a + b,
    DimOp.SUB: lambda a, b: a - b,
    DimOp.MUL: lambda a, b: a * b,
    DimOp.FLOORDIV: lambda a, b: a // b if b > 0 else None,
    DimOp.CEILDIV: lambda a, b: -(-a // b) if b > 0 else None,
    DimOp.MOD: lambda a, b: a % b if b > 0 else None,
    DimOp.MIN: min,
    DimOp.MAX: max,
}


class OneOp:
    """One operation after a harmless record, evaluated natively."""

    def __init__(self, op: DimOp) -> None:
        program = DimProgram()
        program.const(3, 11)
        self.record = program.append(op, 2, 0, 1)
        table = ThunkTable()
        table.dims(0, len(program))
        table.end()
        self.context = context(table, dims=[0, 0, 0, 0], dim_program=program)

    def __call__(self, a: int, b: int) -> int | Outcome:
        self.context.dims[:2] = a, b
        outcome = self.context.run()
        return int(self.context.dims[2]) if outcome is DONE else outcome


_OPS = {op: OneOp(op) for op in _MEANING}
_EDGES = st.sampled_from(
    [0, 1, -1, 2, 3, -3, 7, -7, _MAX, _MIN, _MAX - 1, _MIN + 1, 2**32, -(2**31)]
)
_EXTENTS = _EDGES | st.integers(_MIN, _MAX) | st.integers(-20, 20)


@pytest.mark.parametrize("op", list(_MEANING))
@given(a=_EXTENTS, b=_EXTENTS)
def test_dim_operations_agree_with_exact_integers(op: DimOp, a: int, b: int) -> None:
    exact = _MEANING[op](a, b)
    if exact is None or not _MIN <= exact <= _MAX:
        assert _OPS[op](a, b) == Outcome(Status.ERROR, 0, _OPS[op].record, Failure.DIM_OVERFLOW)
    else:
        assert _OPS[op](a, b) == exact


def test_const_copy_and_ranges_of_records() -> None:
    program = DimProgram()
    for target, value in enumerate((_MIN, 5)):
        program.const(target, value)
    start = program.copy(2, 1)
    program.append(DimOp.MUL, 2, 2, 2)
    table = ThunkTable()
    table.dims(0, start)
    table.host()
    table.dims(start, len(program))
    table.dims(1, 1)
    table.end()
    ctx = context(table, dims=[1, 1, 1], dim_program=program)
    assert ctx.run().status is Status.HOST
    assert ctx.dims.tolist() == [_MIN, 5, 1]
    assert ctx.run(pc=2) is DONE
    assert ctx.dims.tolist() == [_MIN, 5, 25]


# -- yielding and signals --------------------------------------------------------------------------


def endless(busy: int | None, native_kernels: Mapping[str, int]) -> Context:
    table = ThunkTable()
    if busy is not None:
        table.call(native_kernels["t_busy"], [0, 1], 0)
    table.jump(0)
    ctx = context(table, dims=[1, busy or 0], budget=1_000_000)
    cells(ctx)
    return ctx


@pytest.mark.parametrize("busy", [None, 10, 100_000])
def test_a_long_program_yields_at_a_thunk_border(
    native_kernels: Mapping[str, int], busy: int | None
) -> None:
    ctx = endless(busy, native_kernels)
    for _ in range(3):
        status = native().run(ctx.address, 0)
        assert status & 255 == Status.YIELD
        assert status >> 8 in range(len(ctx.thunks))


def test_a_yield_resumes_where_it_left(native_kernels: Mapping[str, int]) -> None:
    i, n = 0, 1
    table = ThunkTable()
    head = table.jump_ge(i, n)
    table.call(native_kernels["t_count"], [0, 0], 2)
    table.add_dim(i, 1)
    table.jump(head)
    table.patch(head, len(table))
    table.end()
    ctx = context(table, dims=[0, 2_000_000, 1], budget=1)
    counted = cells(ctx)
    status, yields = native().run(ctx.address, 0), 0
    while status & 255 == Status.YIELD:
        yields += 1
        status = native().run(ctx.address, status >> 8)
    assert status == 0
    assert yields > 0
    assert counted[0] == 2_000_000


@pytest.mark.parametrize("busy", [None, 1000])
def test_control_c_ends_a_long_run(native_kernels: Mapping[str, int], busy: int | None) -> None:
    ctx = endless(busy, native_kernels)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ctx.run()
    timer.join()
    table = ThunkTable()
    table.end()
    assert context(table).run() is DONE


_KILLED = """
from rlx.backends.cpu.context import Context
from rlx.backends.cpu.thunks import ThunkTable
table = ThunkTable()
table.jump(0)
ctx = Context(table.build(), slots=1, dims=[0], threads=2)
try:
    print("ready", flush=True)
    ctx.run()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_control_c_with_the_shared_pool_alive() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "src")}
    command = [sys.executable, "-c", _KILLED]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
    assert process.returncode == 0


# -- threads, floating point, scratch --------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_calls_spread_over_the_pool(
    native_kernels: Mapping[str, int], pools: Callable[[int], Pool], threads: int
) -> None:
    table = ThunkTable()
    for _ in range(500):
        table.call(native_kernels["t_count"], [0, 0], 0)
    table.call(native_kernels["t_tid"], [1, 0], 0, flags=Flag.SERIAL)
    table.end()
    ctx = context(table, slots=2, dims=[37], threads=threads, pool=pools(5))
    counted, tids = cells(ctx, 0), cells(ctx, 1)
    tids[:] = 9
    before = generation(pools(5))
    assert ctx.run() is DONE
    assert (counted[:37] == 500).all()
    assert not tids[:37].any()
    assert generation(pools(5)) - before == (0 if threads == 1 else 500)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_different_kernels_in_quick_succession_do_not_mix(
    native_kernels: Mapping[str, int], pools: Callable[[int], Pool], threads: int
) -> None:
    i, n, many, few = range(4)
    table = ThunkTable()
    head = table.jump_ge(i, n)
    table.call(native_kernels["t_count"], [0, i], many)
    table.call(native_kernels["t_tid"], [1, i], few)
    table.call(native_kernels["t_count"], [2, i], few)
    table.add_dim(i, 1)
    table.jump(head)
    table.patch(head, len(table))
    table.end()
    ctx = context(table, slots=3, dims=[0, 5_000, 41, 3], threads=threads, pool=pools(threads))
    first, tids, last = (cells(ctx, slot) for slot in range(3))
    assert ctx.run() is DONE
    assert first.tolist() == [5_000] * 41 + [0] * 23
    assert last.tolist() == [5_000] * 3 + [0] * 61
    assert set(tids[:3].tolist()) <= set(range(threads))
    assert not tids[3:].any()


def test_a_context_survives_a_fork(
    native_kernels: Mapping[str, int], pools: Callable[[int], Pool]
) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_count"], [0, 0], 0)
    table.end()
    ctx = context(table, dims=[33], threads=3, pool=pools(3))
    counted = cells(ctx)

    def runs(times: int) -> bool:
        good = ctx.run() is DONE and pools(3).running and pools(3).participants == 3
        return good and bool((counted[:33] == times).all())

    assert runs(1)
    child = os.fork()
    if child == 0:
        os._exit(0 if runs(2) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert runs(2)


def generation(pool: Pool) -> int:
    return ctypes.c_int64.from_address(pool.address).value


def test_threads_resize_the_scratch_memory(
    native_kernels: Mapping[str, int], pools: Callable[[int], Pool]
) -> None:
    table = ThunkTable()
    table.call(native_kernels["t_scratch"], [0, 0], 0)
    table.end()
    ctx = context(table, dims=[60], scratch=100, pool=pools(5))
    cells(ctx)
    for threads in (1, 5, 2):
        ctx.threads = threads
        assert ctx.run() is DONE
        base = ctypes.c_int64.from_address(ctx.address + 8 * CTX.SCRATCH).value
        stride = ctypes.c_int64.from_address(ctx.address + 8 * CTX.SCRATCH_STRIDE).value
        counts = [ctypes.c_int64.from_address(base + tid * stride).value for tid in range(threads)]
        assert (sum(counts), stride, base % 128) == (60, 128, 0)
    with pytest.raises(UsageError, match="at least 1"):
        ctx.threads = 0


@pytest.mark.skipif(not host_isa().is_x86, reason="sets MXCSR")
def test_the_callers_float_environment_is_set_aside_and_restored(
    native_kernels: Mapping[str, int],
) -> None:
    text = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
; Run with another environment; returns the status register afterwards.
define i32 @t_around(ptr %run, ptr %ctx, i32 %mode) {
  %old = alloca i32
  %new = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %old)
  store i32 %mode, ptr %new
  call void @llvm.x86.sse.ldmxcsr(ptr %new)
  %s = call i64 %run(ptr %ctx, i64 0)
  call void @llvm.x86.sse.stmxcsr(ptr %new)
  call void @llvm.x86.sse.ldmxcsr(ptr %old)
  %r = load i32, ptr %new
  ret i32 %r
}
"""
    from rlx.backends.cpu.jit import Library

    library = Library([compile_text(text, host_isa())], ["t_around"], host_isa())
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
    table = ThunkTable()
    table.call(native_kernels["t_denormal"], [0, 0], 0)
    table.end()
    ctx = context(table, dims=[3])
    bits = cells(ctx)
    mode = 0x1F80 | 0x8040 | 0x6000  # flush to zero, denormals are zero, round toward zero
    assert kind(library.address("t_around"))(entry(), ctx.address, mode) == mode
    assert bits[:3].tolist() == [1, 1, 1]


# -- building --------------------------------------------------------------------------------------


def test_tables_are_checked_when_built() -> None:
    table = ThunkTable()
    with pytest.raises(BuildError, match="runs off"):
        table.build()
    table.set_dim(0, 1)
    with pytest.raises(BuildError, match="runs off"):
        table.build()
    jump = table.jump()
    with pytest.raises(BuildError, match="jumps to -1"):
        table.build()
    table.patch(jump, 2)
    with pytest.raises(BuildError, match="has 2 thunks"):
        table.build()
    with pytest.raises(BuildError, match="no target"):
        table.patch(0, 0)
    table.call("missing", [], 0)
    table.end()
    with pytest.raises(BuildError, match="'missing'"):
        table.build({})
    for wrong in (
        lambda: table.copy_slot(0, -1),
        lambda: table.call(1, [-1], 0),
        lambda: table.dims(-1, 0),
    ):
        with pytest.raises(BuildError, match="index"):
            wrong()
    with pytest.raises(BuildError, match="64-bit"):
        table.set_dim(0, 2**63)


def test_indices_beyond_the_tables_are_refused() -> None:
    table = ThunkTable()
    table.copy_slot(1, 3)
    table.jump_ge(0, 5)
    table.patch(1, 0)
    table.dims(0, 1)
    table.end()
    program = DimProgram()
    program.const(6, 1)
    thunks = table.build()
    with pytest.raises(BuildError, match="4 slots"):
        Context(thunks, slots=3, dims=[0] * 7, dim_program=program)
    with pytest.raises(BuildError, match="7 extents"):
        Context(thunks, slots=4, dims=[0] * 6, dim_program=program)
    with pytest.raises(BuildError, match="1 dim program records"):
        Context(thunks, slots=4, dims=[0] * 7)


def test_a_dim_program_is_checked() -> None:
    program = DimProgram()
    with pytest.raises(BuildError, match="use `const`"):
        program.append(DimOp.CONST, 0, 0, 0)
    with pytest.raises(BuildError, match="index"):
        program.append(DimOp.ADD, 0, -1, 0)
    with pytest.raises(BuildError, match="64-bit"):
        program.const(0, 2**63)
    assert len(program) == 0


@pytest.mark.parametrize("level", ["v3", "v4", "neon"])
def test_the_runtime_compiles_for_every_level_and_needs_three_symbols(level: str) -> None:
    isa = generic_isa(level)
    found = undefined_symbols(compile_text(runtime_ir(isa), isa))
    assert found == {"clock_gettime", "sched_yield", "syscall"}


def test_the_runtime_is_linked_once_per_instruction_set() -> None:
    assert native() is native(host_isa())
    assert entry() == native().run_address


@pytest.mark.parametrize(
    "triple", ["arm64-apple-darwin23", "x86_64-pc-windows-msvc", "riscv64-unknown-linux-gnu"]
)
def test_other_systems_are_refused_by_name(triple: str) -> None:
    with pytest.raises(DeviceError, match=triple):
        runtime_ir(Isa("neon", triple, frozenset()))
