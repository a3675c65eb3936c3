# SPDX-License-Identifier: Apache-2.0
"""Products and convolutions of bytes over weights in quads; their sums become results in an epilogue."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.conv import conv_width
from rlx.backends.cpu.kernels.gemm_tiles import panel_width
from rlx.backends.cpu.quantized_ops import (
    PackConvQuads,
    PackedQuantizedConv,
    PackedQuantizedMatMul,
    PackQuads,
    QuadOffsets,
    shift_of,
)
from rlx.base.dims import product
from rlx.base.dtypes import DType
from rlx.expr.body import Body, BodyBuilder
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Op
from rlx.ops.elementwise import mul
from rlx.ops.leaf import constant
from rlx.ops.movement import expand, pad, reshape, transpose
from rlx.ops.qconv import QuantizedConv
from rlx.ops.qmatmul import QuantizedMatMul
from rlx.ops.region import Region, WithEpilogue
from rlx.ops.spec import building, emit_one
from rlx.passes.captures import is_known, weight_values
from rlx.passes.decompose import Decompose
from rlx.passes.manager import PassContext

__all__ = ["PackQuantizedProducts"]

_ANCHOR_OPERANDS = 5


@dataclass(frozen=True)
class PackQuantizedProducts:
    """quantized_matmul(a, w) -> with_epilogue{packed_quantized_matmul, (sum + offset[n]) * scale[n]}; conv likewise.

    What has no kernel (weights of a run, a depth that is not a whole number of quads) becomes a product of dequantised
    operands. Exact.
    """

    isa: Isa
    name = "cpu-pack-quantized-products"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter, weights, rest = Rewriter(graph.facts), weight_values(graph), False
        with graph.facts.active():
            for node in list(graph.block.walk()):
                op = node.op.anchor if isinstance(node.op, WithEpilogue) else node.op
                if not isinstance(op, QuantizedMatMul | QuantizedConv):
                    continue
                if self._has_kernel(node, op, weights):
                    self._pack(rewriter, node, op)
                else:
                    _decompose(rewriter, node, op)
                    rest = True
        if rest:
            Decompose().run(graph, ctx)
        return rewriter.changed

    @staticmethod
    def _has_kernel(node: Node, op: QuantizedMatMul | QuantizedConv, weights: set[Value]) -> bool:
        _, _, zero, w, _ = node.operands[:_ANCHOR_OPERANDS]
        assert w is not None
        known = is_known(w, weights) and (zero is None or is_known(zero, weights))
        if not known or not w.type.is_static:
            return False
        if isinstance(op, QuantizedMatMul):
            return w.type.shape[0] % 4 == 0
        return op.layout == "nhwc" and (op.groups == 1 or w.type.shape[1] % 4 == 0)

    def _pack(self, rewriter: Rewriter, node: Node, op: QuantizedMatMul | QuantizedConv) -> None:
        a, a_scale, zero, w, w_scale = node.operands[:_ANCHOR_OPERANDS]
        assert a is not None
        assert a_scale is not None
        assert w is not None
        assert w_scale is not None
        builder = rewriter.before(node)
        with building(builder):
            if isinstance(op, QuantizedMatMul):
                matrix = w
                quads = emit_one(PackQuads(panel_width(self.isa, DType.I32)), w)
                columns = int(w.type.shape[1])
                packed, operands = PackedQuantizedMatMul(columns), [a, quads]
            else:
                columns = int(w.type.shape[0])
                matrix = transpose(reshape(w, (columns, product(w.type.shape[1:]))), (1, 0))
                packed, operands = self._conv(op, a, zero, w)
            offsets = emit_one(QuadOffsets(shift_of(a.type.dtype)), matrix, zero)
            scales = expand(mul(w_scale, a_scale), (columns,))
        rest = [v for v in node.operands[_ANCHOR_OPERANDS:] if v is not None]
        made = WithEpilogue(packed, len(operands), _scaled(node))
        new = builder.emit_typed(
            made, [*operands, offsets, scales, *rest], [r.type for r in node.results]
        )
        rewriter.replace_node(node, new.results)

    def _conv(
        self, op: QuantizedConv, x: Value, zero: Value | None, w: Value
    ) -> tuple[Op, list[Value]]:
        """Return the private operator and its operands; channels are padded to whole quads."""
        columns, per_group, *kernel = (int(d) for d in w.type.shape)
        channels = per_group * op.groups
        if x.type.shape[-1] != channels:  # x calls them by a name
            x = reshape(x, (*x.type.shape[:-1], channels))
        if per_group % 4:
            none = (0,) * (x.type.rank - 1)
            x = pad(x, (*none, 0), (*none, -per_group % 4))
        if zero is None:
            zero = constant(0, x.type.dtype)
        lanes = self.isa.lanes(DType.I32)
        layout = (lanes, conv_width(self.isa) * lanes)
        quads = emit_one(PackConvQuads(op.groups, *layout), w)
        window = (tuple(kernel), op.strides, op.dilations, op.pads)
        return PackedQuantizedConv(*window, op.groups, columns, *layout), [x, quads, zero]


def _scaled(node: Node) -> Body:
    """Return (sum, offset, scale, ...) -> what the node gives: (sum + offset) * scale, then its epilogue."""
    old = node.op.body if isinstance(node.op, WithEpilogue) else None
    others = () if old is None else old.inputs[1:]
    builder = BodyBuilder([DType.I32, DType.I32, DType.F32, *others])
    total = (builder.input(0) + builder.input(1)).cast(DType.F32) * builder.input(2)
    if old is None:
        return builder.finish(total)
    rest = [builder.input(3 + i) for i in range(len(others))]
    return builder.finish(*builder.inline(old, [total, *rest]))


def _decompose(rewriter: Rewriter, node: Node, op: QuantizedMatMul | QuantizedConv) -> None:
    """Put the product of dequantised operands in place; an epilogue becomes a region of its own."""
    a, a_scale, zero, w, w_scale = node.operands[:_ANCHOR_OPERANDS]
    assert a is not None
    assert a_scale is not None
    assert w is not None
    assert w_scale is not None
    builder = rewriter.before(node)
    with building(builder):
        whole = op.decompose(a, a_scale, zero, w, w_scale)
    if not isinstance(node.op, WithEpilogue):
        rewriter.replace_node(node, [whole])
        return
    region = Region(node.op.body, whole.type.shape)
    operands = [whole, *node.operands[_ANCHOR_OPERANDS:]]
    new = builder.emit_typed(region, operands, [r.type for r in node.results])
    rewriter.replace_node(node, new.results)
