# SPDX-License-Identifier: Apache-2.0
"""Copies of bytes between slots."""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.abi import Emitted, finish
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.isa import Isa
from rlx.base.dims import Dim, ceildiv
from rlx.kernel.program import DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext

__all__ = ["copy_bytes"]

_CHUNK = 256 << 10
"""Bytes per chunk: long enough that handing it to another thread pays."""


@cache
def _copy_kernel(isa: Isa) -> Emitted:
    module = Module(isa)
    with module.kernel("copy", 3) as k:
        source, target, size = k.slot(0), k.slot(1), k.dim(2)
        start = k.begin * _CHUNK
        count = k.smin(k.end * _CHUNK, size) - start
        # Chunks of one participant are neighbours, so its whole range is one copy.
        with k.if_((count > 0) & k.to_address(source).ne(k.to_address(target))):
            k.memcpy(k.offset(target, start), k.offset(source, start), count)
    return finish(module)


def copy_bytes(
    ctx: LoweringContext, isa: Isa, source: int, target: int, nbytes: Dim, *, inplace: bool = False
) -> None:
    """Emit a copy of `nbytes` bytes from one slot to another; they do not overlap.

    With `inplace` the plan may put the target where the source lies, if nobody else reads that; then nothing moves.
    """
    args = [SlotArg(source), SlotArg(target, writes=True), DimArg(nbytes)]
    pairs = [(source, target)] if inplace else []
    ctx.launch(_copy_kernel(isa), args, ceildiv(nbytes, _CHUNK), inplace=pairs, copies=inplace)
