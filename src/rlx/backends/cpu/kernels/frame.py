# SPDX-License-Identifier: Apache-2.0
"""Lowering of `Frame`: a copy whose source walks overlapping pieces."""

from __future__ import annotations

from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.move import launch_move
from rlx.backends.cpu.kernels.space import Access, dense, dense_access
from rlx.backends.cpu.lowering import lowering
from rlx.ir.graph import Node
from rlx.kernel.schedule import LoweringContext
from rlx.ops.signal import Frame

__all__ = ["lower_frame"]


@lowering(Frame)
def lower_frame(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Emit the copy."""
    op, x = node.op, node.operands[0]
    assert isinstance(op, Frame)
    assert x is not None
    shape, dtype = node.result.type.shape, x.type.dtype
    lead = dense(x.type.shape)[:-1]
    source = Access(ctx.slot(x), dtype, (*lead, op.step, 1))
    launch_move(ctx, isa, shape, source, dense_access(ctx.slot(node.result), dtype, shape))
