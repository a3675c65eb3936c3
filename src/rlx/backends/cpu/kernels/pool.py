# SPDX-License-Identifier: Apache-2.0
"""Lowering of pooling over windows; the kernel is in `channelwise`."""

from __future__ import annotations

from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.channelwise import launch_channelwise
from rlx.backends.cpu.kernels.tile import Finish
from rlx.backends.cpu.kernels.window import Window
from rlx.backends.cpu.lowering import lowering
from rlx.ir.graph import Node
from rlx.kernel.program import SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.pool import Pool


@lowering(Pool)
def lower_pool(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """x channels-last; maxima in every numeric dtype, averages in floats."""
    op, x = node.op, node.operands[0]
    if not isinstance(op, Pool) or x is None or op.layout != "nhwc":
        return False
    dtype, shape = x.type.dtype, x.type.shape
    channels = shape[-1]
    counted = None
    if op.kind == "avg" and op.count_include_pad:
        counted = tuple(
            extent + after for extent, (_, after) in zip(shape[1:-1], op.pads, strict=True)
        )
    before = tuple(b for b, _ in op.pads)
    g = Window(
        shape[0],
        shape[1:-1],
        op.out,
        channels,
        channels,
        op.kernel,
        op.strides,
        op.dilations,
        before,
    )
    slots = [
        SlotArg(ctx.slot(x)),
        SlotArg(ctx.slot(x)),
        SlotArg(ctx.slot(node.result), writes=True),
    ]
    launch_channelwise(ctx, isa, op.kind, g, slots, Finish(dtype.compute, dtype), counted=counted)
    return None
