# SPDX-License-Identifier: Apache-2.0
"""Products and convolutions of bytes over weights in quads; their sums become results in an epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.conv import conv_width
from rlx.backends.cpu.kernels.gemm_tiles import panel_width
from rlx.backends.cpu.quantized_ops import (
    MAX_TAPS,
    DepthwiseBytes,
    PackConvQuads,
    PackedQuantizedConv,
    PackedQuantizedMatMul,
    PackQuads,
    shift_of,
)
from rlx.base.dims import product
from rlx.base.dtypes import DType
from rlx.expr.body import Body, BodyBuilder
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Op
from rlx.ops.elementwise import add, cast, mul, neg
from rlx.ops.integer import IntegerConv, IntegerMatMul
from rlx.ops.leaf import constant
from rlx.ops.movement import expand, pad, reshape, transpose
from rlx.ops.qconv import QuantizedConv
from rlx.ops.qmatmul import QuantizedMatMul
from rlx.ops.reduce import reduce_sum
from rlx.ops.region import Region, WithEpilogue
from rlx.ops.spec import building, emit_one
from rlx.passes.captures import is_known, weight_values
from rlx.passes.decompose import Decompose
from rlx.passes.manager import PassContext

__all__ = ["PackQuantizedProducts"]

_Product: TypeAlias = QuantizedMatMul | QuantizedConv | IntegerMatMul | IntegerConv


@dataclass(frozen=True)
class _Operands:
    """Of a product of bytes.

    Attributes:
        a: activations.
        zero: their zero point.
        w: weights.
        w_zero: their zero points.
        scales: of a and w, where the result is f32.
        rest: further operands of an epilogue.
    """

    a: Value
    zero: Value | None
    w: Value
    w_zero: Value | None
    scales: tuple[Value, Value] | None
    rest: tuple[Value | None, ...]

    @property
    def outside(self) -> Value:
        """What a convolution reads outside of its operand."""
        return constant(0, self.a.type.dtype) if self.zero is None else self.zero

    @staticmethod
    def of(node: Node, op: _Product) -> _Operands:
        if isinstance(op, QuantizedMatMul | QuantizedConv):
            a, a_scale, zero, w, w_scale = node.operands[:5]
            assert a_scale is not None
            assert w_scale is not None
            w_zero, scales, rest = None, (a_scale, w_scale), node.operands[5:]
        else:
            count = node.op.anchor_operands if isinstance(node.op, WithEpilogue) else None
            a, zero, w, w_zero = (*node.operands[:count], None)[:4]
            scales, rest = None, node.operands[4 if count is None else count :]
        assert a is not None
        assert w is not None
        return _Operands(a, zero, w, w_zero, scales, rest)


@dataclass(frozen=True)
class PackQuantizedProducts:
    """quantized_matmul(a, w) -> with_epilogue{packed_quantized_matmul, (sum + offset[n]) * scale[n]}.

    So are quantized_conv, and without the scale integer_matmul and integer_conv. The offset takes off what the zero
    point of a adds to the sums. What has no kernel (weights of a run, weights with zero points, groups that are
    neither whole quads of channels nor single ones) becomes a product of wider operands. Exact.
    """

    isa: Isa
    name = "cpu-pack-quantized-products"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter, weights, rest = Rewriter(graph.facts), weight_values(graph), False
        with graph.facts.active():
            for node in list(graph.block.walk()):
                op = node.op.anchor if isinstance(node.op, WithEpilogue) else node.op
                if not isinstance(op, _Product):
                    continue
                operands = _Operands.of(node, op)
                if _has_kernel(op, operands, weights):
                    self._pack(rewriter, node, op, operands)
                else:
                    _decompose(rewriter, node, op, operands)
                    rest = True
        if rest:
            Decompose().run(graph, ctx)
        return rewriter.changed

    def _pack(self, rewriter: Rewriter, node: Node, op: _Product, given: _Operands) -> None:
        builder = rewriter.before(node)
        with building(builder):
            shift = shift_of(given.a.type.dtype)
            depth = tuple(range(1, given.w.type.rank))
            packed: Op
            if isinstance(op, QuantizedMatMul | IntegerMatMul):
                packed, operands = self._matmul(given.a, given.w)
                depth = (0,)
            elif _is_depthwise(op, given.w):
                (packed, operands), shift = _depthwise(op, given), 0
            else:
                packed, operands = self._conv(op, given)
            anchors = len(operands)
            operands.append(_offsets(given, depth, shift))
            if given.scales is not None:
                a_scale, w_scale = given.scales
                operands.append(expand(mul(w_scale, a_scale), operands[-1].type.shape))
        made = WithEpilogue(packed, anchors, _scaled(node, given))
        new = builder.emit_typed(made, [*operands, *given.rest], [r.type for r in node.results])
        rewriter.replace_node(node, new.results)

    def _matmul(self, a: Value, w: Value) -> tuple[PackedQuantizedMatMul, list[Value]]:
        """Return the private operator and its operands; rows are padded to whole quads."""
        depth, columns = (int(d) for d in w.type.shape)
        a = _padded(_named(a, depth), -depth % 4)
        quads = emit_one(PackQuads(panel_width(self.isa, DType.I32)), w)
        return PackedQuantizedMatMul(columns), [a, quads]

    def _conv(
        self, op: QuantizedConv | IntegerConv, given: _Operands
    ) -> tuple[PackedQuantizedConv, list[Value]]:
        """Return the private operator and its operands; channels are padded to whole quads."""
        columns, per_group, *kernel = (int(d) for d in given.w.type.shape)
        x = _padded(_named(given.a, per_group * op.groups), -per_group % 4)
        lanes = self.isa.lanes(DType.I32)
        layout = (lanes, conv_width(self.isa) * lanes)
        quads = emit_one(PackConvQuads(op.groups, *layout), given.w)
        window = (tuple(kernel), op.strides, op.dilations, op.pads)
        return PackedQuantizedConv(*window, op.groups, columns, *layout), [x, quads, given.outside]


def _has_kernel(op: _Product, given: _Operands, weights: set[Value]) -> bool:
    w = given.w
    if not is_known(w, weights) or not w.type.is_static or w.type.dtype is not DType.I8:
        return False
    if given.w_zero is not None:
        return False
    if isinstance(op, QuantizedMatMul | IntegerMatMul):
        return True
    whole = op.groups == 1 or w.type.shape[1] % 4 == 0
    return op.layout == "nhwc" and (whole or _is_depthwise(op, w))


def _is_depthwise(op: QuantizedConv | IntegerConv, w: Value) -> bool:
    """Whether every channel is convolved alone, with sums that f32 holds."""
    filters, depth, *kernel = w.type.shape
    return op.groups > 1 and filters == op.groups and depth == 1 and product(kernel) <= MAX_TAPS


def _depthwise(op: QuantizedConv | IntegerConv, given: _Operands) -> tuple[Op, list[Value]]:
    """Return the private operator and its operands; bytes are widened as they are read."""
    filters, _, *kernel = (int(d) for d in given.w.type.shape)
    flat = transpose(reshape(given.w, (filters, prod(kernel))), (1, 0))
    window = (tuple(kernel), op.strides, op.dilations, op.pads)
    operands = [_named(given.a, filters), cast(flat, DType.F32), given.outside]
    return DepthwiseBytes(*window), operands


def _named(a: Value, last: int) -> Value:
    """Return `a` with a number for its last extent, which it may call by a name."""
    return a if a.type.shape[-1] == last else reshape(a, (*a.type.shape[:-1], last))


def _padded(a: Value, count: int) -> Value:
    """Return `a` with so many more elements along its last axis; zero weights make them count for nothing."""
    none = (0,) * (a.type.rank - 1)
    return pad(a, (*none, 0), (*none, count)) if count else a


def _offsets(given: _Operands, depth: tuple[int, ...], shift: int) -> Value:
    """Return -(zero + shift) * (sums of the weights over `depth`), [N]."""
    sums = reduce_sum(cast(given.w, DType.I32), depth, keepdims=False)
    added = constant(shift, DType.I32)
    if given.zero is not None:
        added = add(cast(given.zero, DType.I32), added)
    return mul(sums, neg(added))


def _scaled(node: Node, given: _Operands) -> Body:
    """Return (sum, offset, scale?, ...) -> what the node gives: (sum + offset) * scale, then its epilogue."""
    old = node.op.body if isinstance(node.op, WithEpilogue) else None
    scale = () if given.scales is None else (DType.F32,)
    others = () if old is None else old.inputs[1:]
    builder = BodyBuilder([DType.I32, DType.I32, *scale, *others])
    total = builder.input(0) + builder.input(1)
    if scale:
        total = total.cast(DType.F32) * builder.input(2)
    if old is None:
        return builder.finish(total)
    rest = [builder.input(2 + len(scale) + i) for i in range(len(others))]
    return builder.finish(*builder.inline(old, [total, *rest]))


def _decompose(rewriter: Rewriter, node: Node, op: _Product, given: _Operands) -> None:
    """Put the product of wider operands in place; an epilogue becomes a region of its own."""
    builder = rewriter.before(node)
    with building(builder):
        if isinstance(op, QuantizedMatMul | QuantizedConv):
            assert given.scales is not None
            a_scale, w_scale = given.scales
            whole = op.decompose(given.a, a_scale, given.zero, given.w, w_scale)
        else:
            whole = op.decompose(given.a, given.zero, given.w, given.w_zero)
    if not isinstance(node.op, WithEpilogue):
        rewriter.replace_node(node, [whole])
        return
    region = Region(node.op.body, whole.type.shape)
    new = builder.emit_typed(region, [whole, *given.rest], [r.type for r in node.results])
    rewriter.replace_node(node, new.results)
