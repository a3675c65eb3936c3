# SPDX-License-Identifier: Apache-2.0
"""Conditions on extents that are known only when a program runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from rlx.backends.cpu.abi import Emitted, Failure, finish
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.isa import Isa
from rlx.base.dims import Dim
from rlx.kernel.program import DimArg
from rlx.kernel.schedule import LoweringContext

__all__ = ["launch_check"]


@cache
def _check_kernel(isa: Isa, count: int) -> Emitted:
    module = Module(isa)
    with module.kernel("check", count) as k:
        for index in range(count):
            with k.if_(k.dim(index) < 0):
                k.fail(Failure.OVER_BOUND, index)
    return finish(module)


def launch_check(ctx: LoweringContext, isa: Isa, margins: Sequence[Dim]) -> None:
    """Emit a check that every margin is at least 0; the run fails at this node if one is not.

    What the node launches afterwards may rely on it.
    """
    kernel = _check_kernel(isa, len(margins))
    ctx.launch(kernel, [DimArg(d) for d in margins], may_fail=True)
