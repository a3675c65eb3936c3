# SPDX-License-Identifier: Apache-2.0
"""Small native kernels that the tests of the pool and the dispatcher run."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlx.backends.cpu.isa import host_isa
from rlx.backends.cpu.jit import Library, compile_text

# Each does `body` for every chunk %i; %cell is the i64 of that chunk in the buffer of argument 0.
_LOOP = """
define void @{name}(ptr %ctx, ptr %args, i64 %begin, i64 %end, i64 %tid) #0 {{
entry:
  %slots = load ptr, ptr %ctx
  %dims.p = getelementptr i64, ptr %ctx, i64 1
  %dims = load ptr, ptr %dims.p
  %a0 = load i64, ptr %args
  %slot.p = getelementptr ptr, ptr %slots, i64 %a0
  %slot = load ptr, ptr %slot.p
  %args1 = getelementptr i64, ptr %args, i64 1
  %a1 = load i64, ptr %args1
  %dim.p = getelementptr i64, ptr %dims, i64 %a1
  %dim = load i64, ptr %dim.p
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %i.next, %tail ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %body, label %out
body:
  %cell = getelementptr i64, ptr %slot, i64 %i
{body}
  br label %tail
tail:
  %i.next = add i64 %i, 1
  br label %head
out:
  ret void
}}
"""
_BODIES = {
    "t_count": """
  %v = load i64, ptr %cell
  %v1 = add i64 %v, 1
  store i64 %v1, ptr %cell""",
    "t_tid": """
  store i64 %tid, ptr %cell""",
    # Fails in every chunk from the dim of argument 1 on, at element 10 * chunk + 3.
    "t_fail": """
  %v = load i64, ptr %cell
  %v1 = add i64 %v, 1
  store i64 %v1, ptr %cell
  %bad = icmp sge i64 %i, %dim
  br i1 %bad, label %fail, label %tail
fail:
  %e = mul i64 %i, 10
  %e3 = add i64 %e, 3
  %eh = mul i64 %e3, 256
  %code = add i64 %eh, 2
  %err = getelementptr i64, ptr %ctx, i64 8
  %old = atomicrmw min ptr %err, i64 %code monotonic""",
    # Busy for the dim of argument 1 pauses, then counts.
    "t_busy": """
  br label %busy
busy:
  %k = phi i64 [ 0, %body ], [ %k1, %busy ]
  call void @llvm.donothing()
  %spin = load volatile i64, ptr %cell
  %k1 = add i64 %k, 1
  %again = icmp slt i64 %k1, %dim
  br i1 %again, label %busy, label %count
count:
  %v = load i64, ptr %cell
  %v1 = add i64 %v, 1
  store i64 %v1, ptr %cell""",
    # The smallest f32 denormal times 1: zero under FTZ or DAZ. Its bits are stored.
    "t_denormal": """
  %f = bitcast i32 1 to float
  %at = alloca float
  store volatile float %f, ptr %at
  %d = load volatile float, ptr %at
  %p = fmul float %d, 1.0
  %b = bitcast float %p to i32
  %b64 = zext i32 %b to i64
  store i64 %b64, ptr %cell""",
    # Counts in the participant's own scratch memory.
    "t_scratch": """
  %scratch.p = getelementptr i64, ptr %ctx, i64 6
  %stride.p = getelementptr i64, ptr %ctx, i64 7
  %scratch = load ptr, ptr %scratch.p
  %stride = load i64, ptr %stride.p
  %o = mul i64 %tid, %stride
  %own = getelementptr i8, ptr %scratch, i64 %o
  %v = load i64, ptr %own
  %v1 = add i64 %v, 1
  store i64 %v1, ptr %own
  store i64 %tid, ptr %cell""",
}
_NATIVE_LOOP = """
; %times jobs from native code, as the dispatcher publishes them.
define void @t_repeat(ptr %spread, ptr %pool, ptr %ctx, ptr %kernel, ptr %args, i64 %n,
                      i64 %times) #0 {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i1, %head ]
  call void %spread(ptr %pool, ptr %ctx, ptr %kernel, ptr %args, i64 %n, i64 1000)
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %times
  br i1 %more, label %head, label %out
out:
  ret void
}
declare void @llvm.donothing()
attributes #0 = { nounwind "frame-pointer"="all" }
"""


@pytest.fixture(scope="session")
def native_kernels() -> Mapping[str, int]:
    """Addresses of the test kernels by name."""
    isa = host_isa()
    text = "".join(_LOOP.format(name=n, body=b) for n, b in _BODIES.items()) + _NATIVE_LOOP
    library = Library([compile_text(text, isa)], [*_BODIES, "t_repeat"], isa)
    _KEPT.append(library)
    return library.addresses


_KEPT: list[Library] = []
