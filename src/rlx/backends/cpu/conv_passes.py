# SPDX-License-Identifier: Apache-2.0
"""Channels-last convolutions over weights in the layouts the kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

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
from rlx.backends.cpu.kernels.gemm_tiles import panel_width
from rlx.backends.cpu.ops import PRODUCT_DTYPES, PackedMatMul, PackPanels
from rlx.base.dtypes import DType
from rlx.base.types import Shape, TensorType
from rlx.expr.body import Body, BodyBuilder, Scalar, trace
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.builder import Builder, Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Op
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.matmul import MatMul
from rlx.ops.movement import Reshape, Transpose
from rlx.ops.region import Region, WithEpilogue
from rlx.ops.spec import building
from rlx.passes.captures import is_known, weight_values
from rlx.passes.fuse import FormRegions
from rlx.passes.manager import PassContext

__all__ = ["PackConvolutions"]


@dataclass(frozen=True)
class PackConvolutions:
    """conv[nhwc](x, w, bias) -> with_epilogue{packed_conv, +bias, ...}(x, pack_conv(w), bias, ...).

    Where each output channel reads one input channel it becomes a depthwise convolution; a single
    pixel with a 1x1 kernel becomes a matrix product. A transposed convolution gets the weights of
    each of its phases, or, where windows do not overlap and it has few channels, becomes a
    pointwise convolution whose result is rearranged. The bias becomes the first step of the
    epilogue. Exact, but that a bias is added after rounding the sum of products.
    """

    isa: Isa
    name = "cpu-pack-convolutions"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        packer = _Packer(self.isa, rewriter, weight_values(graph))
        with graph.facts.active():
            for node in list(graph.block.walk()):
                anchor = node.op.anchor if isinstance(node.op, WithEpilogue) else node.op
                if isinstance(anchor, Conv | ConvTranspose) and anchor.layout == "nhwc":
                    packer.node(node, anchor)
        if packer.moves:
            FormRegions().run(graph, ctx)
        return rewriter.changed


class _Packer:
    """Rewrites convolutions one by one.

    Attributes:
        moves: weights of a run are rearranged by operators that are no regions yet.
    """

    def __init__(self, isa: Isa, rewriter: Rewriter, weights: set[Value]) -> None:
        self.isa = isa
        self.rewriter = rewriter
        self.weights = weights
        self.moves = False
        self._known = True

    def node(self, node: Node, op: Conv | ConvTranspose) -> None:
        """Rewrite one convolution, or leave it where the shape of its weights is not known."""
        x, w = node.operands[:2]
        assert x is not None
        assert w is not None
        if x.type.dtype not in PRODUCT_DTYPES or not w.type.is_static:
            return
        builder = self.rewriter.before(node)
        self._known = is_known(w, self.weights)
        self.moves |= not self._known
        channels = int(w.type.shape[0] if isinstance(op, ConvTranspose) else w.type.shape[1])
        if isinstance(op, Conv):
            channels *= op.groups
        if x.type.shape[-1] != channels:  # x calls them by a name
            x = builder.emit_one(Reshape((*x.type.shape[:-1], channels)), x)
        if isinstance(op, ConvTranspose) and self._is_shuffle(op, w):
            self._shuffled(node, op, x, w)
            return
        if isinstance(op, Conv):
            packed, weights = self._packed(builder, op, x, w)
        else:
            packed, weights = self._phases(builder, op, x, w)
        body, extras = _epilogue(node)
        operands = [x, *weights]
        new_op = packed if body is None else WithEpilogue(packed, len(operands), body)
        types = [r.type for r in node.results]
        new = builder.emit_typed(new_op, [*operands, *extras], types)
        self.rewriter.replace_node(node, new.results)

    def _pack(self, builder: Builder, op: PackConv | PackConvTranspose, w: Value) -> Value:
        """Return packed weights: by one operator where they are known before the run, else by moves."""
        if self._known:
            return builder.emit_one(op, w)
        with building(builder):
            return op.decompose(w)

    def _packed(self, builder: Builder, op: Conv, x: Value, w: Value) -> tuple[Op, list[Value]]:
        """Return the private operator and its weights."""
        shape = tuple(int(d) for d in w.type.shape)
        columns, per_group, kernel = shape[0], shape[1], shape[2:]
        dtype = x.type.dtype
        window = (kernel, op.strides, op.dilations, op.pads)
        if per_group == 1 and op.groups > 1:
            flat = builder.emit_one(Reshape((columns, prod(kernel))), w)
            return DepthwiseConv(*window), [builder.emit_one(Transpose((1, 0)), flat)]
        pixel = prod(kernel) == 1 and all(d == 1 for d in x.type.shape[1:-1]) and _is_plain(op)
        if pixel and op.groups == 1:
            matrix = builder.emit_one(Reshape((columns, per_group)), w)
            matrix = builder.emit_one(Transpose((1, 0)), matrix)
            if not self._known:
                return MatMul(), [matrix]
            panels = builder.emit_one(PackPanels(panel_width(self.isa, dtype)), matrix)
            return PackedMatMul(columns), [panels]
        layout = self._layout(dtype)
        weights = self._pack(builder, PackConv(op.groups, *layout), w)
        return PackedConv(*window, op.groups, columns, *layout), [weights]

    def _layout(self, dtype: DType) -> tuple[int, int]:
        """Return (lanes, columns of a panel)."""
        lanes = self.isa.lanes(dtype)
        return lanes, conv_width(self.isa) * lanes

    def _phases(
        self, builder: Builder, op: ConvTranspose, x: Value, w: Value
    ) -> tuple[Op, list[Value]]:
        """Return the private operator of a transposed convolution and the weights of its phases."""
        shape = tuple(int(d) for d in w.type.shape)
        layout = self._layout(x.type.dtype)
        strides, dilations = op.strides, op.dilations
        weights = [
            self._pack(builder, PackConvTranspose(op.groups, strides, dilations, phase, *layout), w)
            for phase in phases(strides)
        ]
        window = (shape[2:], strides, dilations, op.pads, op.output_padding)
        return PackedConvTranspose(*window, op.groups, shape[1] * op.groups, *layout), weights

    def _is_shuffle(self, op: ConvTranspose, w: Value) -> bool:
        """Whether windows do not overlap and the channels of one pixel do not fill a vector."""
        untouched = not any(op.output_padding) and all(p == 0 for pair in op.pads for p in pair)
        disjoint = w.type.shape[2:] == op.strides and set(op.dilations) == {1}
        few = int(w.type.shape[1]) < self.isa.lanes(w.type.dtype)
        return untouched and disjoint and few and op.groups == 1

    def _shuffled(self, node: Node, op: ConvTranspose, x: Value, w: Value) -> None:
        """Every pixel gives the channels of its window; a region puts them in their places."""
        builder, rank = self.rewriter.before(node), len(op.strides)
        channels, columns, *kernel = (int(d) for d in w.type.shape)
        order = (*range(2, 2 + rank), 1, 0)
        rows = builder.emit_one(Transpose(order), w)
        ones = (1,) * rank
        rows = builder.emit_one(Reshape((prod(kernel) * columns, channels, *ones)), rows)
        point = Conv(ones, ones, ((0, 0),) * rank, 1, "nhwc")
        packed, weights = self._packed(builder, point, x, rows)
        y = builder.emit_one(packed, x, *weights)
        space = x.type.shape[1:-1]
        split = builder.emit_one(Reshape((x.type.shape[0], *space, *kernel, columns)), y)
        pairs = [d for pair in zip(space, kernel, strict=True) for d in pair]
        full = (x.type.shape[0], *pairs, columns)
        # Operand axes (N, space, kernel, O) among those of the result (N, s1, k1, s2, k2, ..., O).
        axes = (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1)
        places = IndexMap(len(full), tuple(AxisMap(a) for a in axes))
        body, extras = _epilogue(node)
        if body is None:
            body = trace(_same, [x.type.dtype])
        others = [self._split_extra(builder, e, node.result.type, full) for e in extras]
        region = Region(body, full, (places, *(None for _ in others)))
        (moved,) = builder.emit(region, split, *others)
        result = builder.emit_one(Reshape(node.result.type.shape), moved)
        self.rewriter.replace_node(node, [result])

    @staticmethod
    def _split_extra(builder: Builder, extra: Value, result: TensorType, full: Shape) -> Value:
        """Return an operand of the epilogue as it broadcasts to the space of separate axes."""
        shape = extra.type.shape
        if len(shape) < result.rank or all(d == 1 for d in shape[:-1]):
            return extra
        return builder.emit_one(Reshape((*full[:-1], shape[-1])), extra)


def _is_plain(op: Conv) -> bool:
    """Whether a 1x1 convolution reads each pixel where it writes it."""
    return all(s == 1 for s in op.strides) and all(p == 0 for pair in op.pads for p in pair)


def _same(value: Scalar) -> Scalar:
    return value


def _epilogue(node: Node) -> tuple[Body | None, list[Value]]:
    """Return (accumulator, bias?, ...) -> what the node gives, with the operands it takes."""
    old = node.op if isinstance(node.op, WithEpilogue) else None
    anchors = old.anchor_operands if old is not None else len(node.operands)
    extras = [o for o in node.operands[anchors:] if o is not None]
    bias = node.operands[2] if anchors > 2 else None
    if bias is None:
        return (old.body if old is not None else None), extras
    builder = BodyBuilder([bias.type.dtype, bias.type.dtype, *(v.type.dtype for v in extras)])
    total = builder.input(0) + builder.input(1)
    if old is None:
        return builder.finish(total), [bias]
    rest = [builder.input(2 + i) for i in range(len(extras))]
    return builder.finish(*builder.inline(old.body, [total, *rest])), [bias, *extras]
