# SPDX-License-Identifier: Apache-2.0
"""Lowering of depthwise convolutions; the kernel is in `channelwise`."""

from __future__ import annotations

from rlx.backends.cpu.conv_ops import DepthwiseConv
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.channelwise import launch_channelwise
from rlx.backends.cpu.kernels.tile import plan_finish
from rlx.backends.cpu.kernels.window import Window
from rlx.backends.cpu.lowering import lowering, split_epilogue
from rlx.backends.cpu.ops import PRODUCT_DTYPES
from rlx.ir.graph import Node
from rlx.kernel.program import SlotArg
from rlx.kernel.schedule import LoweringContext


@lowering(DepthwiseConv)
def lower_depthwise(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """x channels-last, weights [taps, columns], any dtype of `PRODUCT_DTYPES`."""
    op, operands, body, extras = split_epilogue(node)
    assert isinstance(op, DepthwiseConv)
    x, w = operands
    assert x is not None
    assert w is not None
    result, dtype = node.result.type, x.type.dtype
    plan = plan_finish(dtype, result.shape, result.dtype, body, extras)
    channels, columns = x.type.shape[-1], result.shape[-1]
    if (
        plan is None
        or dtype not in PRODUCT_DTYPES
        or not (isinstance(channels, int) and isinstance(columns, int))
    ):
        return False
    shape, before = x.type.shape, tuple(b for b, _ in op.pads)
    g = Window(
        shape[0],
        shape[1:-1],
        result.shape[1:-1],
        channels,
        columns,
        op.kernel,
        op.strides,
        op.dilations,
        before,
    )
    slots = [
        SlotArg(ctx.slot(x)),
        SlotArg(ctx.slot(w)),
        SlotArg(ctx.slot(node.result), writes=True),
    ]
    slots += [SlotArg(ctx.slot(e)) for e in extras]
    launch_channelwise(ctx, isa, "conv", g, slots, plan)
    return None
