# SPDX-License-Identifier: Apache-2.0
"""Transposed convolution: one convolution per phase, written into its places of the result.

Output position p takes tap t from input i where p + before = i * stride + t * dilation. So all p
with the same remainder r = (p + before) % stride use the same taps, those with t * dilation %
stride == r, and as p advances by one stride, i advances by one: the phase is a convolution with
stride 1. A result of stride s is s of them per axis, none reads a zero that was put in, none writes
where another does.
"""

from __future__ import annotations

from math import gcd

from rlx.backends.cpu.conv_ops import PackedConvTranspose, phase_taps, phases
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.conv import launch_conv
from rlx.backends.cpu.kernels.tile import plan_finish
from rlx.backends.cpu.kernels.window import Spread, Window
from rlx.backends.cpu.lowering import lowering, split_epilogue
from rlx.backends.cpu.ops import PRODUCT_DTYPES
from rlx.base.dims import Dim, ceildiv
from rlx.base.types import Shape
from rlx.ir.graph import Node
from rlx.kernel.program import SlotArg
from rlx.kernel.schedule import LoweringContext

__all__ = ["phase_windows"]


def phase_windows(
    op: PackedConvTranspose, shape: Shape, result: Shape, phase: tuple[int, ...]
) -> tuple[Window, Spread]:
    """Return the convolution of a phase over x [N, *spatial, C], and its place in the result."""
    kernel: list[int] = []
    dilations: list[int] = []
    before: list[Dim] = []
    out: list[Dim] = []
    first: list[Dim] = []
    for axis, r in enumerate(phase):
        stride, dilation, cut = op.strides[axis], op.dilations[axis], op.pads[axis][0]
        taps = phase_taps(op.kernel[axis], stride, dilation, r)
        lowest = (r - taps[0] * dilation) // stride if taps else 0
        start = ceildiv(cut - r, stride)
        kernel.append(len(taps))
        dilations.append(dilation // gcd(stride, dilation))
        before.append(-(start + lowest))
        out.append(ceildiv(result[axis + 1] + cut - r, stride) - start)
        first.append(start * stride + r - cut)
    channels = shape[-1]
    assert isinstance(channels, int)
    ones = (1,) * len(phase)
    window = Window(
        shape[0],
        shape[1:-1],
        tuple(out),
        channels,
        op.columns,
        tuple(kernel),
        ones,
        tuple(dilations),
        tuple(before),
    )
    return window, Spread(result[1:-1], op.strides, tuple(first))


@lowering(PackedConvTranspose)
def lower_packed_conv_transpose(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Weights of every phase in panels, x channels-last, any dtype of `PRODUCT_DTYPES`."""
    op, operands, body, extras = split_epilogue(node)
    assert isinstance(op, PackedConvTranspose)
    x, *weights = operands
    assert x is not None
    result, dtype = node.result.type, x.type.dtype
    plan = plan_finish(dtype, result.shape, result.dtype, body, extras)
    if plan is None or dtype not in PRODUCT_DTYPES or not isinstance(x.type.shape[-1], int):
        return False
    for phase, w in zip(phases(op.strides), weights, strict=True):
        assert w is not None
        window, spread = phase_windows(op, x.type.shape, result.shape, phase)
        slots = [
            SlotArg(ctx.slot(x)),
            SlotArg(ctx.slot(w)),
            SlotArg(ctx.slot(node.result), writes=True),
        ]
        slots += [SlotArg(ctx.slot(e)) for e in extras]
        launch_conv(ctx, isa, window, op.groups, slots, plan, spread)
    return None
