# SPDX-License-Identifier: Apache-2.0
"""Runs that wait for their turn, in LLVM IR: one thread does them back to back without Python in between.

A lane is a ring of jobs with one producer at a time and one server. A job says what `rlx_run` is called with and where
the addresses of inputs and outputs go; it is waiting until the server takes it, or somebody withdraws it, whichever is
first (compare-and-swap). Who waits for a job sleeps on its word, as a worker of the pool does (`pool_ir`): the sleeper
sets the word, then looks at the state; the server sets the state, then looks at the word.

The server comes back to Python when a run did not end by itself, when somebody wants to be told of a job (`WANTED`) or
calls it, and when nothing came for a while.
"""

from __future__ import annotations

from enum import IntEnum
from string import Template

from rlx.backends.cpu.words import CTX
from rlx.backends.lanes import JobState

__all__ = ["LANE_IR", "RING", "JobWord", "LaneOffset"]

RING = 64
"""Jobs that a lane holds at the most; a power of two."""
_LINGER_NANOSECONDS = 500_000
"""After its last job a server waits so long before it tells Python; whoever waits for that job is told at once."""


class LaneOffset(IntEnum):
    """Byte offsets in a lane; what different threads write lies 128 bytes apart."""

    PUSHED = 0  # i64: jobs so far
    PASSED = 128  # i64: jobs the server is done with; it does not touch them any more
    ASLEEP = 256  # i32: 1 = the server sleeps
    CALLED = 260  # i32: 1 = the server comes back to Python
    JOBS = 384  # RING addresses
    BYTES = 384 + 8 * RING


class JobWord(IntEnum):
    """Words of a job (8 bytes each)."""

    STATE = 0  # i32: a JobState; then i32 ASLEEP: 1 = somebody sleeps until it has ended
    WANTED = 1  # i32: 1 = the server tells Python when it has ended
    STATUS = 2  # what rlx_run returned
    CTX = 3  # ptr
    PC = 4  # where the run begins
    SLOTS = 5  # ptr: i64 per array, the slot it belongs to
    ARRAYS = 6  # how many arrays there are
    ADDRESSES = 7  # of every array


_TEXT = Template(
    """
; If somebody sleeps on a word, wake them.
define internal void @rlx_alert(ptr %word) #0 {
entry:
  %old = atomicrmw xchg ptr %word, i32 0 seq_cst
  %sleeps = icmp ne i32 %old, 0
  br i1 %sleeps, label %wake, label %out
wake:
  call void @rlx_wake(ptr %word)
  br label %out
out:
  ret void
}

; Append a job. One thread at a time; the caller knows that there is room.
define void @rlx_lane_push(ptr %lane, ptr %job) #0 {
  %n = load i64, ptr %lane, align 8
  %i = and i64 %n, $MASK
  %jobs = getelementptr i8, ptr %lane, i64 $LANE_JOBS
  %at = getelementptr ptr, ptr %jobs, i64 %i
  store ptr %job, ptr %at, align 8
  %n1 = add i64 %n, 1
  store atomic i64 %n1, ptr %lane seq_cst, align 8
  %asleep = getelementptr i8, ptr %lane, i64 $LANE_ASLEEP
  call void @rlx_alert(ptr %asleep)
  ret void
}

; Make the server come back to Python after the job it is at.
define void @rlx_lane_call(ptr %lane) #0 {
  %called = getelementptr i8, ptr %lane, i64 $LANE_CALLED
  store atomic i32 1, ptr %called seq_cst, align 4
  %asleep = getelementptr i8, ptr %lane, i64 $LANE_ASLEEP
  call void @rlx_alert(ptr %asleep)
  ret void
}

; Whether there is something to do: jobs, or Python calls.
define internal i1 @rlx_lane_stirs(ptr %lane) #0 {
  %passed.p = getelementptr i8, ptr %lane, i64 $LANE_PASSED
  %called.p = getelementptr i8, ptr %lane, i64 $LANE_CALLED
  %pushed = load atomic i64, ptr %lane seq_cst, align 8
  %passed = load atomic i64, ptr %passed.p monotonic, align 8
  %called = load atomic i32, ptr %called.p seq_cst, align 4
  %some = icmp ne i64 %pushed, %passed
  %calls = icmp ne i32 %called, 0
  %stirs = or i1 %some, %calls
  ret i1 %stirs
}

; Do jobs until Python has something to do; returns 0 then, and 1 if there was nothing to do for %idle nanoseconds, or
; for a shorter while after the last job.
define i64 @rlx_lane_serve(ptr %lane, i64 %idle) #0 {
entry:
  %passed.p = getelementptr i8, ptr %lane, i64 $LANE_PASSED
  %asleep.p = getelementptr i8, ptr %lane, i64 $LANE_ASLEEP
  %called.p = getelementptr i8, ptr %lane, i64 $LANE_CALLED
  %jobs = getelementptr i8, ptr %lane, i64 $LANE_JOBS
  br label %look
look:
  %limit = phi i64 [ %idle, %entry ], [ %limit, %awake ], [ %limit, %skip ], [ $LINGER, %run ]
  %called = atomicrmw xchg ptr %called.p, i32 0 seq_cst
  %calls = icmp ne i32 %called, 0
  br i1 %calls, label %python, label %next
next:
  %pushed = load atomic i64, ptr %lane seq_cst, align 8
  %passed = load atomic i64, ptr %passed.p monotonic, align 8
  %some = icmp ne i64 %pushed, %passed
  br i1 %some, label %take, label %rest

take:
  %i = and i64 %passed, $MASK
  %at = getelementptr ptr, ptr %jobs, i64 %i
  %job = load ptr, ptr %at, align 8
  %swap = cmpxchg ptr %job, i32 $WAITING, i32 $RUNNING seq_cst seq_cst
  %won = extractvalue { i32, i1 } %swap, 1
  %passed1 = add i64 %passed, 1
  br i1 %won, label %begin, label %skip
skip:
  store atomic i64 %passed1, ptr %passed.p seq_cst, align 8
  br label %look
begin:
  %ctx.p = getelementptr i8, ptr %job, i64 $JOB_CTX
  %ctx = load ptr, ptr %ctx.p, align 8
  %pc.p = getelementptr i8, ptr %job, i64 $JOB_PC
  %pc = load i64, ptr %pc.p, align 8
  %which.p = getelementptr i8, ptr %job, i64 $JOB_SLOTS
  %which = load ptr, ptr %which.p, align 8
  %arrays.p = getelementptr i8, ptr %job, i64 $JOB_ARRAYS
  %arrays = load i64, ptr %arrays.p, align 8
  %addresses = getelementptr i8, ptr %job, i64 $JOB_ADDRESSES
  %slots.p = getelementptr i64, ptr %ctx, i64 $CTX_SLOTS
  %slots = load ptr, ptr %slots.p, align 8
  br label %bind
bind:
  %a = phi i64 [ 0, %begin ], [ %a1, %point ]
  %more = icmp slt i64 %a, %arrays
  br i1 %more, label %point, label %run
point:
  %from = getelementptr i64, ptr %addresses, i64 %a
  %address = load i64, ptr %from, align 8
  %index.p = getelementptr i64, ptr %which, i64 %a
  %index = load i64, ptr %index.p, align 8
  %to = getelementptr i64, ptr %slots, i64 %index
  store i64 %address, ptr %to, align 8
  %a1 = add i64 %a, 1
  br label %bind
run:
  %status = call i64 @rlx_run(ptr %ctx, i64 %pc)
  %status.p = getelementptr i8, ptr %job, i64 $JOB_STATUS
  store i64 %status, ptr %status.p, align 8
  %good = icmp eq i64 %status, 0
  %state = select i1 %good, i32 $DONE, i32 $STOPPED
  %old = atomicrmw xchg ptr %job, i32 %state seq_cst
  %waits.p = getelementptr i8, ptr %job, i64 $JOB_ASLEEP
  call void @rlx_alert(ptr %waits.p)
  %wanted.p = getelementptr i8, ptr %job, i64 $JOB_WANTED
  %wanted = load atomic i32, ptr %wanted.p seq_cst, align 4
  %wants = icmp ne i32 %wanted, 0
  store atomic i64 %passed1, ptr %passed.p seq_cst, align 8
  %bad = xor i1 %good, true
  %leaves = or i1 %bad, %wants
  br i1 %leaves, label %python, label %look

rest:
  store atomic i32 1, ptr %asleep.p seq_cst, align 4
  %early = call i1 @rlx_lane_stirs(ptr %lane)
  br i1 %early, label %awake, label %sleep
sleep:
  call void @rlx_wait(ptr %asleep.p, i64 %limit)
  %still = load atomic i32, ptr %asleep.p seq_cst, align 4
  %nobody = icmp ne i32 %still, 0
  store atomic i32 0, ptr %asleep.p seq_cst, align 4
  br i1 %nobody, label %quiet, label %awake
awake:
  store atomic i32 0, ptr %asleep.p seq_cst, align 4
  br label %look
quiet:
  ret i64 1
python:
  ret i64 0
}

; Wait until a job has ended or was withdrawn, for %limit nanoseconds or a signal at the most; returns its state.
define i64 @rlx_job_wait(ptr %job, i64 %limit) #0 {
entry:
  %s0 = load atomic i32, ptr %job seq_cst, align 4
  %ended = icmp sge i32 %s0, $DONE
  br i1 %ended, label %out, label %park
park:
  %asleep.p = getelementptr i8, ptr %job, i64 $JOB_ASLEEP
  store atomic i32 1, ptr %asleep.p seq_cst, align 4
  %s1 = load atomic i32, ptr %job seq_cst, align 4
  %over = icmp sge i32 %s1, $DONE
  br i1 %over, label %out, label %sleep
sleep:
  call void @rlx_wait(ptr %asleep.p, i64 %limit)
  %s2 = load atomic i32, ptr %job seq_cst, align 4
  br label %out
out:
  %s = phi i32 [ %s0, %entry ], [ %s1, %park ], [ %s2, %sleep ]
  %state = sext i32 %s to i64
  ret i64 %state
}

; Take a job back unless it has begun; returns the state it was in.
define i64 @rlx_job_withdraw(ptr %job) #0 {
entry:
  %swap = cmpxchg ptr %job, i32 $WAITING, i32 $WITHDRAWN seq_cst seq_cst
  %old = extractvalue { i32, i1 } %swap, 0
  %won = extractvalue { i32, i1 } %swap, 1
  br i1 %won, label %tell, label %out
tell:
  %asleep.p = getelementptr i8, ptr %job, i64 $JOB_ASLEEP
  call void @rlx_alert(ptr %asleep.p)
  br label %out
out:
  %state = sext i32 %old to i64
  ret i64 %state
}

; Let the server come back to Python when the job has ended; returns its state, which may be final already.
define i64 @rlx_job_want(ptr %job) #0 {
  %wanted.p = getelementptr i8, ptr %job, i64 $JOB_WANTED
  %old = atomicrmw xchg ptr %wanted.p, i32 1 seq_cst
  %s = load atomic i32, ptr %job seq_cst, align 4
  %state = sext i32 %s to i64
  ret i64 %state
}
"""
)

LANE_IR = _TEXT.substitute(
    {f"LANE_{o.name}": int(o) for o in LaneOffset},
    **{f"JOB_{w.name}": 8 * w for w in JobWord},
    JOB_ASLEEP=8 * JobWord.STATE + 4,
    **{s.name: int(s) for s in JobState},
    CTX_SLOTS=int(CTX.SLOTS),
    MASK=RING - 1,
    LINGER=_LINGER_NANOSECONDS,
)
"""Needs `system_ir` and `DISPATCH_IR`. Exports `rlx_lane_*` and `rlx_job_*`."""
