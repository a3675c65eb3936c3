# SPDX-License-Identifier: Apache-2.0
"""What the native runtime asks of the operating system and the processor, as LLVM IR functions.

This is the seam for other platforms. Two functions park and wake threads (`rlx_wait`, `rlx_wake`,
on a 32-bit word that is 1 while they sleep), one yields, one reads a clock; the rest is the
floating point environment. Linux has all of it here. macOS would give pthread_cond, Windows
WaitOnAddress and WakeByAddressSingle.
"""

from __future__ import annotations

from string import Template

from rlx.backends.cpu.isa import Isa
from rlx.base.errors import DeviceError

__all__ = ["CLOCK_COARSE", "CLOCK_PRECISE", "system_ir"]

CLOCK_PRECISE = 1
"""CLOCK_MONOTONIC of Linux."""
CLOCK_COARSE = 6
"""CLOCK_MONOTONIC_COARSE of Linux: the last timer tick (1 to 10 ms old), read in about 4 ns."""

_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}

_LINUX = Template(
    """
declare i64 @syscall(i64, ...)
declare i32 @sched_yield()
declare i32 @clock_gettime(i32, ptr)

; Sleep while the word is 1, for %limit nanoseconds at the most, or without a limit where that is negative. May return
; at any time: the caller looks again.
define internal void @rlx_wait(ptr %word, i64 %limit) #0 {
  %span = alloca { i64, i64 }, align 8
  %s = udiv i64 %limit, 1000000000
  %n = urem i64 %limit, 1000000000
  %np = getelementptr i8, ptr %span, i64 8
  store i64 %s, ptr %span, align 8
  store i64 %n, ptr %np, align 8
  %endless = icmp slt i64 %limit, 0
  %t = select i1 %endless, ptr null, ptr %span
  %r = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i64 128, i64 1, ptr %t)
  ret void
}

; Wake all threads that sleep on the word; the caller has set it to 0.
define internal void @rlx_wake(ptr %word) #0 {
  %r = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i64 129, i64 2147483647)
  ret void
}

define internal void @rlx_yield() #0 {
  %r = call i32 @sched_yield()
  ret void
}

; Nanoseconds of a clock.
define internal i64 @rlx_now(i32 %clock) #0 {
  %at = alloca { i64, i64 }, align 8
  %r = call i32 @clock_gettime(i32 %clock, ptr %at)
  %s = load i64, ptr %at, align 8
  %np = getelementptr i8, ptr %at, i64 8
  %n = load i64, ptr %np, align 8
  %sn = mul i64 %s, 1000000000
  %t = add i64 %sn, %n
  ret i64 %t
}
"""
)

_X86 = """
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define internal void @rlx_pause() #0 {
  call void @llvm.x86.sse2.pause()
  ret void
}

; Round to nearest even, denormals kept, no traps; returns what to restore.
define internal i64 @rlx_enter_float() #0 {
  %old = alloca i32, align 4
  %new = alloca i32, align 4
  call void @llvm.x86.sse.stmxcsr(ptr %old)
  store i32 8064, ptr %new, align 4
  call void @llvm.x86.sse.ldmxcsr(ptr %new)
  %o = load i32, ptr %old, align 4
  %o64 = zext i32 %o to i64
  ret i64 %o64
}

define internal void @rlx_leave_float(i64 %saved) #0 {
  %old = alloca i32, align 4
  %o = trunc i64 %saved to i32
  store i32 %o, ptr %old, align 4
  call void @llvm.x86.sse.ldmxcsr(ptr %old)
  ret void
}
"""

_AARCH64 = """
declare void @llvm.aarch64.hint(i32)
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)

define internal void @rlx_pause() #0 {
  call void @llvm.aarch64.hint(i32 1)
  ret void
}

; Round to nearest even, denormals kept, no traps; returns what to restore.
define internal i64 @rlx_enter_float() #0 {
  %old = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 0)
  ret i64 %old
}

define internal void @rlx_leave_float(i64 %saved) #0 {
  call void @llvm.aarch64.set.fpcr(i64 %saved)
  ret void
}
"""


def system_ir(isa: Isa) -> str:
    """Return the system functions of the runtime for a target; they refer to attribute group #0.

    They are `rlx_wait`, `rlx_wake`, `rlx_yield`, `rlx_now`, `rlx_pause`, `rlx_enter_float` and
    `rlx_leave_float`.

    Raises:
        DeviceError: the operating system is not Linux.
    """
    arch = isa.triple.split("-", maxsplit=1)[0]
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch)
    if "linux" not in isa.triple or arch not in _FUTEX_SYSCALL:
        raise DeviceError(
            f"the CPU backend's native runtime is written for Linux on x86-64 and AArch64, "
            f"this target is {isa.triple}; use the reference backend"
        )
    processor = _X86 if isa.is_x86 else _AARCH64
    return _LINUX.substitute(futex=_FUTEX_SYSCALL[arch]) + processor
