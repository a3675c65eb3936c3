# SPDX-License-Identifier: Apache-2.0
"""Channels-last convolutions over weights in the layouts the kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from rlx.backends.cpu.conv_ops import (
    DepthwiseConv,
    PackConv,
    PackConvTranspose,
    PackedConv,
    PackedConvTranspose,
    phases,
)
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.conv import conv_width
from rlx.backends.cpu.kernels.matmul import panel_width
from rlx.backends.cpu.ops import PackedMatMul, PackPanels
from rlx.base.dtypes import DType
from rlx.expr.body import Body, BodyBuilder
from rlx.ir.builder import Builder, Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Op
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.movement import Reshape, Transpose
from rlx.ops.region import WithEpilogue
from rlx.passes.manager import PassContext

__all__ = ["PackConvolutions"]


@dataclass(frozen=True)
class PackConvolutions:
    """conv[nhwc](x, w, bias) -> with_epilogue{packed_conv, +bias, ...}(x, pack_conv(w), bias, ...). Exact.

    Where each output channel reads one input channel it becomes a depthwise convolution; a single pixel with a 1x1
    kernel becomes a matrix product. A transposed convolution gets the weights of each of its phases. The bias becomes
    the first step of the epilogue.
    """

    isa: Isa
    name: ClassVar[str] = "cpu-pack-convolutions"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        del ctx
        rewriter = Rewriter(graph.facts)
        for node in list(graph.block.walk()):
            anchor = node.op.anchor if isinstance(node.op, WithEpilogue) else node.op
            if isinstance(anchor, Conv | ConvTranspose) and anchor.layout == "nhwc":
                self._conv(rewriter, node, anchor)
        return rewriter.changed

    def _conv(self, rewriter: Rewriter, node: Node, op: Conv | ConvTranspose) -> None:
        x, w = node.operands[:2]
        assert x is not None
        assert w is not None
        channels = x.type.shape[-1]
        if x.type.dtype not in (DType.F32, DType.F64) or not w.type.is_static or not isinstance(channels, int):
            return
        builder = rewriter.before(node)
        if isinstance(op, Conv):
            packed, weights = self._packed(builder, op, x, w)
            operands = (x, weights)
        else:
            packed, parts = self._phases(builder, op, x, w)
            operands = (x, *parts)
        _replace(rewriter, node, packed, operands, node.operands[2] if len(node.operands) > 2 else None)

    def _packed(self, builder: Builder, op: Conv, x: Value, w: Value) -> tuple[Op, Value]:
        """Return the private operator and its weights."""
        shape = tuple(int(d) for d in w.type.shape)
        columns, per_group, kernel = shape[0], shape[1], shape[2:]
        window = (kernel, op.strides, op.dilations, op.pads)
        lanes = self.isa.lanes(x.type.dtype)
        if per_group == 1 and op.groups > 1:
            flat = builder.emit_one(Reshape((columns, prod(kernel))), w)
            return DepthwiseConv(*window), builder.emit_one(Transpose((1, 0)), flat)
        if op.groups == 1 and prod(kernel) == 1 and all(d == 1 for d in x.type.shape[1:-1]) and _is_plain(op):
            matrix = builder.emit_one(Transpose((1, 0)), builder.emit_one(Reshape((columns, per_group)), w))
            panels = builder.emit_one(PackPanels(panel_width(self.isa, x.type.dtype)), matrix)
            return PackedMatMul(columns), panels
        width = conv_width(self.isa) * lanes
        weights = builder.emit_one(PackConv(op.groups, lanes, width), w)
        return PackedConv(*window, op.groups, columns, lanes, width), weights

    def _phases(self, builder: Builder, op: ConvTranspose, x: Value, w: Value) -> tuple[Op, list[Value]]:
        """Return the private operator of a transposed convolution and the weights of its phases."""
        shape = tuple(int(d) for d in w.type.shape)
        lanes = self.isa.lanes(x.type.dtype)
        layout = (lanes, conv_width(self.isa) * lanes)
        weights = [
            builder.emit_one(PackConvTranspose(op.groups, op.strides, op.dilations, phase, *layout), w)
            for phase in phases(op.strides)
        ]
        window = (shape[2:], op.strides, op.dilations, op.pads, op.output_padding)
        return PackedConvTranspose(*window, op.groups, shape[1] * op.groups, *layout), weights


def _is_plain(op: Conv) -> bool:
    """Whether a 1x1 convolution reads each pixel where it writes it."""
    return all(s == 1 for s in op.strides) and all(p == 0 for pair in op.pads for p in pair)


def _replace(rewriter: Rewriter, node: Node, packed: Op, operands: tuple[Value, ...], bias: Value | None) -> None:
    """Put a private operator in the place of a convolution, with the bias and the old epilogue as its epilogue."""
    body = node.op.body if isinstance(node.op, WithEpilogue) else None
    extras = list(node.operands[node.op.anchor_operands :]) if isinstance(node.op, WithEpilogue) else []
    if isinstance(node.op, WithEpilogue) and node.op.anchor_operands < 3:
        bias = None
    if bias is not None:
        dtype = operands[0].type.dtype
        body = _biased(dtype, body)
        extras.insert(0, bias)
    op = packed if body is None else WithEpilogue(packed, len(operands), body)
    new = rewriter.before(node).emit_typed(op, [*operands, *extras], [r.type for r in node.results])
    rewriter.replace_node(node, new.results)


def _biased(dtype: DType, body: Body | None) -> Body:
    """Return (x, bias, ...) -> body(x + bias, ...)."""
    builder = BodyBuilder([dtype, dtype, *(body.inputs[1:] if body is not None else ())])
    total = builder.input(0) + builder.input(1)
    if body is None:
        return builder.finish(total)
    rest = [builder.input(2 + i) for i in range(len(body.inputs) - 1)]
    return builder.finish(*builder.inline(body, [total, *rest]))
