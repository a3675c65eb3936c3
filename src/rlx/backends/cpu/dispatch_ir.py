# SPDX-License-Identifier: Apache-2.0
"""The dispatcher in LLVM IR: `i64 rlx_run(ptr ctx, i64 pc)` walks a table of thunks.

It returns `pc << 8 | status`. The clock is read after every kernel and after every 64 other
thunks; a run that is over its budget returns YIELD at the next thunk, so that Python can handle
signals. Integer overflow in the dim program and in ADD_DIM is an error, never a wrapped extent.

Thunks may be watched (`rlx.backends.cpu.watch`): flag HOOK returns to Python after the thunk, flag
TIMED writes the time when it ended into a log. Thunks without flags take the path they always took.

Measured on a virtual EPYC: 1.5 ns for a control thunk, 2.8 ns for a CALL, 4.7 ns for its clock.
"""

from __future__ import annotations

from string import Template

from rlx.backends.cpu.system import CLOCK_COARSE, CLOCK_PRECISE
from rlx.backends.cpu.words import CTX, Failure

__all__ = ["DISPATCH_IR"]

_OVERFLOWING = "\n".join(
    f"declare {{ i64, i1 }} @llvm.{op}.with.overflow.i64(i64, i64)"
    for op in ("sadd", "ssub", "smul")
)

_DIMS = """
; Evaluate records %first to %last - 1; returns -1, or the record that overflowed or has a divisor
; below 1.
define internal i64 @rlx_dims(ptr %dims, ptr %program, i64 %first, i64 %last) #0 {
entry:
  br label %head
head:
  %i = phi i64 [ %first, %entry ], [ %i.next, %store ]
  %more = icmp slt i64 %i, %last
  br i1 %more, label %fetch, label %good
fetch:
  %rec = getelementptr { i64, i64, i64, i64 }, ptr %program, i64 %i
  %dst.p = getelementptr i8, ptr %rec, i64 8
  %a.p = getelementptr i8, ptr %rec, i64 16
  %b.p = getelementptr i8, ptr %rec, i64 24
  %op = load i64, ptr %rec, align 8
  %dst = load i64, ptr %dst.p, align 8
  %a = load i64, ptr %a.p, align 8
  %b = load i64, ptr %b.p, align 8
  %const = icmp eq i64 %op, 8
  br i1 %const, label %store, label %operands
operands:                                     ; b is a valid index also where it is not used
  %x.p = getelementptr i64, ptr %dims, i64 %a
  %y.p = getelementptr i64, ptr %dims, i64 %b
  %x = load i64, ptr %x.p, align 8
  %y = load i64, ptr %y.p, align 8
  switch i64 %op, label %bad [ i64 0, label %add
                               i64 1, label %sub
                               i64 2, label %mul
                               i64 3, label %divide
                               i64 4, label %divide
                               i64 5, label %divide
                               i64 6, label %min
                               i64 7, label %max
                               i64 9, label %store ]
add:
  %sum = call { i64, i1 } @llvm.sadd.with.overflow.i64(i64 %x, i64 %y)
  br label %checked
sub:
  %difference = call { i64, i1 } @llvm.ssub.with.overflow.i64(i64 %x, i64 %y)
  br label %checked
mul:
  %product = call { i64, i1 } @llvm.smul.with.overflow.i64(i64 %x, i64 %y)
  br label %checked
checked:
  %pair = phi { i64, i1 } [ %sum, %add ], [ %difference, %sub ], [ %product, %mul ]
  %value = extractvalue { i64, i1 } %pair, 0
  %over = extractvalue { i64, i1 } %pair, 1
  br i1 %over, label %bad, label %store
divide:
  %positive = icmp sgt i64 %y, 0
  br i1 %positive, label %quotient, label %bad
quotient:                                     ; y > 0: sdiv cannot trap
  %q = sdiv i64 %x, %y
  %qy = mul i64 %q, %y
  %r = sub i64 %x, %qy
  %below = icmp slt i64 %r, 0
  %above = icmp sgt i64 %r, 0
  %below64 = zext i1 %below to i64
  %above64 = zext i1 %above to i64
  %floor = sub i64 %q, %below64
  %ceil = add i64 %q, %above64
  %r.up = add i64 %r, %y
  %mod = select i1 %below, i64 %r.up, i64 %r
  %isfloor = icmp eq i64 %op, 3
  %isceil = icmp eq i64 %op, 4
  %ceil.mod = select i1 %isceil, i64 %ceil, i64 %mod
  %divided = select i1 %isfloor, i64 %floor, i64 %ceil.mod
  br label %store
min:
  %less = icmp slt i64 %x, %y
  %least = select i1 %less, i64 %x, i64 %y
  br label %store
max:
  %greater = icmp sgt i64 %x, %y
  %most = select i1 %greater, i64 %x, i64 %y
  br label %store
store:
  %result = phi i64 [ %a, %fetch ], [ %x, %operands ], [ %value, %checked ],
          [ %divided, %quotient ], \
[ %least, %min ], [ %most, %max ]
  %to = getelementptr i64, ptr %dims, i64 %dst
  store i64 %result, ptr %to, align 8
  %i.next = add i64 %i, 1
  br label %head
bad:
  ret i64 %i
good:
  ret i64 -1
}
"""

_STAMP = Template(
    """
; Append (pc, now) to a log: { entries, capacity } and then the entries. Returns whether it is full; behind its capacity
; there is room for the two stamps that one thunk and the next entry may still write.
define internal i1 @rlx_stamp(ptr %log, i64 %pc) #0 {
  %now = call i64 @rlx_now(i32 $CLOCK)
  %size.p = getelementptr i64, ptr %log, i64 1
  %size = load i64, ptr %size.p, align 8
  %used = load i64, ptr %log, align 8
  %used1 = add i64 %used, 1
  %pc.p = getelementptr { i64, i64 }, ptr %log, i64 %used1
  %now.p = getelementptr i8, ptr %pc.p, i64 8
  store i64 %pc, ptr %pc.p, align 8
  store i64 %now, ptr %now.p, align 8
  store i64 %used1, ptr %log, align 8
  %full = icmp sge i64 %used1, %size
  ret i1 %full
}
"""
)

_RUN = Template(
    """
define i64 @rlx_run(ptr %ctx, i64 %start) #0 {
entry:
  %saved = call i64 @rlx_enter_float()
  %slots.p = getelementptr i64, ptr %ctx, i64 $SLOTS
  %slots = load ptr, ptr %slots.p, align 8
  %dims.p = getelementptr i64, ptr %ctx, i64 $DIMS
  %dims = load ptr, ptr %dims.p, align 8
  %thunks.p = getelementptr i64, ptr %ctx, i64 $THUNKS
  %thunks = load ptr, ptr %thunks.p, align 8
  %pool.p = getelementptr i64, ptr %ctx, i64 $POOL
  %pool = load ptr, ptr %pool.p, align 8
  %program.p = getelementptr i64, ptr %ctx, i64 $DIM_PROGRAM
  %program = load ptr, ptr %program.p, align 8
  %threads.p = getelementptr i64, ptr %ctx, i64 $THREADS
  %threads = load i64, ptr %threads.p, align 8
  %error.p = getelementptr i64, ptr %ctx, i64 $ERROR
  %budget.p = getelementptr i64, ptr %ctx, i64 $BUDGET
  %budget = load i64, ptr %budget.p, align 8
  %timed = icmp ne i64 %budget, 0
  %haspool = icmp ne ptr %pool, null
  %many = icmp sgt i64 %threads, 1
  %parallel = and i1 %haspool, %many
  %log.p = getelementptr i64, ptr %ctx, i64 $LOG
  %log = load ptr, ptr %log.p, align 8
  %unlogged = icmp eq ptr %log, null
  br i1 %unlogged, label %ready, label %entered
entered:
  %full.entered = call i1 @rlx_stamp(ptr %log, i64 -1)
  br label %ready
ready:
  br i1 %timed, label %clock, label %loop
clock:
  %began = call i64 @rlx_now(i32 $CLOCK)
  br label %loop

loop:                                         ; fuel = cheap thunks until the clock is read
  %pc = phi i64 [ %start, %ready ], [ %start, %clock ], [ %to, %border ]
  %fuel = phi i64 [ 64, %ready ], [ 64, %clock ], [ %fuel.left, %border ]
  %t0 = phi i64 [ 0, %ready ], [ %began, %clock ], [ %t0, %border ]
  %pc1 = add i64 %pc, 1
  %rec.at = shl i64 %pc, 6
  %rec = getelementptr i8, ptr %thunks, i64 %rec.at
  %w2.p = getelementptr i8, ptr %rec, i64 16
  %w3.p = getelementptr i8, ptr %rec, i64 24
  %a.p = getelementptr i8, ptr %rec, i64 40
  %b.p = getelementptr i8, ptr %rec, i64 48
  %c.p = getelementptr i8, ptr %rec, i64 56
  %w2 = load i64, ptr %w2.p, align 8
  %w3 = load i64, ptr %w3.p, align 8
  %kind = and i64 %w3, 255
  %iscall = icmp eq i64 %kind, 0
  br i1 %iscall, label %call, label %other
other:
  %a = load i64, ptr %a.p, align 8
  %b = load i64, ptr %b.p, align 8
  %c = load i64, ptr %c.p, align 8
  switch i64 %kind, label %malformed [ i64 1, label %jump
                                       i64 2, label %jump_unless
                                       i64 3, label %jump_ge
                                       i64 4, label %set_dim
                                       i64 5, label %add_dim
                                       i64 6, label %bind
                                       i64 7, label %eval
                                       i64 8, label %host
                                       i64 9, label %end
                                       i64 10, label %read_dim
                                       i64 11, label %copy_slot ]

call:
  %n.p = getelementptr i64, ptr %dims, i64 %w2
  %n = load i64, ptr %n.p, align 8
  %nothing = icmp slt i64 %n, 1
  br i1 %nothing, label %called, label %work
work:
  %args.p = getelementptr i8, ptr %rec, i64 8
  %kernel = load ptr, ptr %rec, align 8
  %args = load ptr, ptr %args.p, align 8
  %several = icmp sgt i64 %n, 1
  %serial = and i64 %w3, 1024
  %free = icmp eq i64 %serial, 0
  %split0 = and i1 %several, %free
  %split = and i1 %split0, %parallel
  br i1 %split, label %spread, label %alone
spread:
  call void @rlx_parallel_for(ptr %pool, ptr %ctx, ptr %kernel, ptr %args, i64 %n, i64 %threads)
  br label %called
alone:
  call void %kernel(ptr %ctx, ptr %args, i64 0, i64 %n, i64 0)
  br label %called
called:
  %flags = and i64 %w3, $WATCHED
  %plain = icmp eq i64 %flags, 0
  br i1 %plain, label %read_clock, label %flagged
flagged:
  %mayfail = and i64 %w3, 256
  %fails = icmp ne i64 %mayfail, 0
  %error = load atomic i64, ptr %error.p monotonic, align 8
  %raised = icmp ne i64 %error, 9223372036854775807
  %stop = and i1 %fails, %raised
  br i1 %stop, label %failed, label %watched
watched:
  %timing = and i64 %w3, 2048
  %stamps = icmp ne i64 %timing, 0
  br i1 %stamps, label %stamp, label %hooked
stamp:
  %full.stamp = call i1 @rlx_stamp(ptr %log, i64 %pc)
  br label %hooked
hooked:
  %full = phi i1 [ false, %watched ], [ %full.stamp, %stamp ]
  %hook = and i64 %w3, 512
  %hooks = icmp ne i64 %hook, 0
  br i1 %hooks, label %hook_at, label %logged
logged:
  br i1 %full, label %empty_log, label %read_clock

jump:
  br label %cheap
jump_unless:
  %cond.pp = getelementptr ptr, ptr %slots, i64 %a
  %cond.p = load ptr, ptr %cond.pp, align 8
  %cond = load i8, ptr %cond.p, align 1
  %no = icmp eq i8 %cond, 0
  %to.unless = select i1 %no, i64 %b, i64 %pc1
  br label %cheap
jump_ge:
  %l.p = getelementptr i64, ptr %dims, i64 %a
  %r.p = getelementptr i64, ptr %dims, i64 %b
  %l = load i64, ptr %l.p, align 8
  %r = load i64, ptr %r.p, align 8
  %ge = icmp sge i64 %l, %r
  %to.ge = select i1 %ge, i64 %c, i64 %pc1
  br label %cheap
set_dim:
  %set.p = getelementptr i64, ptr %dims, i64 %a
  store i64 %b, ptr %set.p, align 8
  br label %cheap
add_dim:
  %acc.p = getelementptr i64, ptr %dims, i64 %a
  %acc = load i64, ptr %acc.p, align 8
  %sum = call { i64, i1 } @llvm.sadd.with.overflow.i64(i64 %acc, i64 %b)
  %sum.v = extractvalue { i64, i1 } %sum, 0
  %sum.o = extractvalue { i64, i1 } %sum, 1
  store i64 %sum.v, ptr %acc.p, align 8
  br i1 %sum.o, label %overflow, label %cheap
bind:
  %base.pp = getelementptr ptr, ptr %slots, i64 %b
  %base = load ptr, ptr %base.pp, align 8
  %index.p = getelementptr i64, ptr %dims, i64 %c
  %index = load i64, ptr %index.p, align 8
  %stride.p = getelementptr i64, ptr %dims, i64 %w2
  %stride = load i64, ptr %stride.p, align 8
  %offset = mul i64 %index, %stride
  %view = getelementptr i8, ptr %base, i64 %offset
  %view.pp = getelementptr ptr, ptr %slots, i64 %a
  store ptr %view, ptr %view.pp, align 8
  br label %cheap
eval:
  %bad = call i64 @rlx_dims(ptr %dims, ptr %program, i64 %a, i64 %b)
  %good = icmp slt i64 %bad, 0
  br i1 %good, label %cheap, label %overflow
read_dim:
  %from.pp = getelementptr ptr, ptr %slots, i64 %b
  %from.p = load ptr, ptr %from.pp, align 8
  %read = load i64, ptr %from.p, align 1
  %read.p = getelementptr i64, ptr %dims, i64 %a
  store i64 %read, ptr %read.p, align 8
  %bound.p = getelementptr i64, ptr %dims, i64 %c
  %bound = load i64, ptr %bound.p, align 8
  %negative = icmp slt i64 %read, 0
  %large = icmp sgt i64 %read, %bound
  %outside = or i1 %negative, %large
  br i1 %outside, label %over_bound, label %cheap
copy_slot:
  %src.pp = getelementptr ptr, ptr %slots, i64 %b
  %src = load ptr, ptr %src.pp, align 8
  %dst.pp = getelementptr ptr, ptr %slots, i64 %a
  store ptr %src, ptr %dst.pp, align 8
  br label %cheap

cheap:
  %to.cheap = phi i64 [ %a, %jump ], [ %to.unless, %jump_unless ], [ %to.ge, %jump_ge ],
          [ %pc1, %set_dim ], \
[ %pc1, %add_dim ], [ %pc1, %bind ], [ %pc1, %eval ], [ %pc1, %read_dim ], [ %pc1, %copy_slot ]
  %fuel.less = sub i64 %fuel, 1
  %empty = icmp eq i64 %fuel.less, 0
  br i1 %empty, label %read_clock, label %border
read_clock:
  %to.timed = phi i64 [ %to.cheap, %cheap ], [ %pc1, %called ], [ %pc1, %logged ]
  br i1 %timed, label %compare, label %border
border:
  %to = phi i64 [ %to.cheap, %cheap ], [ %to.timed, %read_clock ], [ %to.timed, %compare ]
  %fuel.left = phi i64 [ %fuel.less, %cheap ], [ 64, %read_clock ], [ 64, %compare ]
  br label %loop
compare:
  %now = call i64 @rlx_now(i32 $CLOCK)
  %spent = sub i64 %now, %t0
  %late = icmp sge i64 %spent, %budget
  br i1 %late, label %leave, label %border

overflow:                                     ; the element is the dim record, 0 for ADD_DIM
  %record = phi i64 [ 0, %add_dim ], [ %bad, %eval ]
  %record.high = shl i64 %record, 8
  %code.overflow = or i64 %record.high, $DIM_OVERFLOW
  br label %raise
over_bound:
  br label %raise
malformed:
  br label %raise
raise:
  %code = phi i64 [ %code.overflow, %overflow ], [ $OVER_BOUND, %over_bound ], [ 255, %malformed ]
  store atomic i64 %code, ptr %error.p monotonic, align 8
  br label %failed
failed:
  br label %leave
host:
  br label %leave
hook_at:
  br label %leave
empty_log:
  br label %leave
end:
  br label %leave
leave:
  %status = phi i64 [ 1, %compare ], [ 3, %failed ], [ 2, %host ], [ 5, %hook_at ], \
[ 1, %empty_log ], [ 0, %end ]
  %at = phi i64 [ %to.timed, %compare ], [ %pc, %failed ], [ %pc, %host ], [ %pc, %hook_at ], \
[ %pc1, %empty_log ], [ 0, %end ]
  %high = shl i64 %at, 8
  %result = or i64 %high, %status
  call void @rlx_leave_float(i64 %saved)
  ret i64 %result
}
"""
)

_CONSTANTS = {w.name: int(w) for w in CTX} | {f.name: int(f) for f in Failure}

_WATCHED = 256 | 512 | 2048
"""Flags of a CALL that are looked at when it is over: MAY_FAIL, HOOK and TIMED."""

DISPATCH_IR = (
    _OVERFLOWING
    + _DIMS
    + _STAMP.substitute(CLOCK=CLOCK_PRECISE)
    + _RUN.substitute(_CONSTANTS, CLOCK=CLOCK_COARSE, WATCHED=_WATCHED)
)
"""Needs the functions of `system_ir` and `POOL_IR`. Exports `rlx_run`."""
