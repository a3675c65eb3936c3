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
from rlx.backends.cpu.quantized_ops import DepthwiseBytes
from rlx.base.dtypes import DType
from rlx.ir.graph import Node
from rlx.kernel.program import SlotArg
from rlx.kernel.schedule import LoweringContext


@lowering(DepthwiseConv)
def lower_depthwise(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """x channels-last, weights [taps, columns], any dtype of `PRODUCT_DTYPES`."""
    x = node.operands[0]
    assert x is not None
    dtype = x.type.dtype
    return dtype in PRODUCT_DTYPES and _lower(node, ctx, isa, dtype)


@lowering(DepthwiseBytes)
def lower_depthwise_bytes(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Bytes channels-last, weights f32 [taps, columns]; sums in i32."""
    return _lower(node, ctx, isa, DType.I32)


def _lower(node: Node, ctx: LoweringContext, isa: Isa, sums: DType) -> bool | None:
    op, operands, body, extras = split_epilogue(node)
    assert isinstance(op, DepthwiseConv | DepthwiseBytes)
    x, w, *zero = operands
    assert x is not None
    assert w is not None
    result = node.result.type
    plan = plan_finish(sums, result.shape, result.dtype, body, extras)
    channels, columns = x.type.shape[-1], result.shape[-1]
    if plan is None or not (isinstance(channels, int) and isinstance(columns, int)):
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
        x.type.dtype if zero else None,
    )
    slots = [
        SlotArg(ctx.slot(x)),
        SlotArg(ctx.slot(w)),
        SlotArg(ctx.slot(node.result), writes=True),
    ]
    slots += [SlotArg(ctx.slot(e)) for e in (*extras, *zero) if e is not None]
    launch_channelwise(ctx, isa, "conv", g, slots, plan)
    return None
