# SPDX-License-Identifier: Apache-2.0
"""Graph rewrites private to the CPU backend: weights go into the layouts its kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx.backends.cpu.conv_passes import PackConvolutions
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.gemm_tiles import panel_width
from rlx.backends.cpu.ops import (
    PackedMatMul,
    PackedQuantizedMatMul,
    PackPanels,
    PackQuads,
    QuadOffsets,
)
from rlx.backends.cpu.rnn_passes import SplitRecurrent
from rlx.base.dtypes import DType
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Op
from rlx.ops.elementwise import mul
from rlx.ops.matmul import MatMul
from rlx.ops.movement import expand
from rlx.ops.qmatmul import QuantizedMatMul
from rlx.ops.region import Region, WithEpilogue
from rlx.ops.spec import building
from rlx.passes.captures import weight_values
from rlx.passes.fuse import FormRegions
from rlx.passes.hoist import Hoist
from rlx.passes.lift import LiftParamWork
from rlx.passes.manager import Entry, PassContext

__all__ = ["PackMatMul", "cpu_passes"]


def _anchor(node: Node) -> type[Op]:
    return type(node.op.anchor if isinstance(node.op, WithEpilogue) else node.op)


@dataclass(frozen=True)
class PackMatMul:
    """matmul(x, w) -> packed_matmul(x, pack_panels(w)) for a weight matrix w, also inside an epilogue. Exact."""

    isa: Isa
    name = "cpu-pack-matmul"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        del ctx
        rewriter = Rewriter(graph.facts)
        weights = weight_values(graph)
        for node in list(graph.block.walk()):
            if _anchor(node) is MatMul and node.operands[1] in weights:
                self._pack(rewriter, node)
        return rewriter.changed

    def _pack(self, rewriter: Rewriter, node: Node) -> None:
        a, b = node.operands[:2]
        assert a is not None
        assert b is not None
        if (
            b.type.rank != 2
            or not b.type.is_static
            or b.type.dtype not in (DType.F32, DType.F64)
            or a.type.rank < 2
        ):
            return
        builder = rewriter.before(node)
        panels = builder.emit_one(PackPanels(panel_width(self.isa, b.type.dtype)), b)
        columns = b.type.shape[1]
        assert isinstance(columns, int)
        packed = PackedMatMul(columns)
        op: Op = packed
        if isinstance(node.op, WithEpilogue):
            op = WithEpilogue(packed, 2, node.op.body)
        new = builder.emit_typed(
            op, [a, panels, *node.operands[2:]], [r.type for r in node.results]
        )
        rewriter.replace_node(node, new.results)


@dataclass(frozen=True)
class PackQuantizedMatMul:
    """quantized_matmul(a, w) -> packed_quantized_matmul(a, pack_quads(w), offsets, scales). Exact."""

    isa: Isa
    name = "cpu-pack-quantized-matmul"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        del ctx
        rewriter = Rewriter(graph.facts)
        for node in list(graph.block.walk()):
            if _anchor(node) is QuantizedMatMul:
                self._pack(rewriter, node)
        return rewriter.changed

    def _pack(self, rewriter: Rewriter, node: Node) -> None:
        a, a_scale, a_zero, w, w_scale = node.operands[:5]
        assert a is not None
        assert a_scale is not None
        assert w is not None
        assert w_scale is not None
        depth, columns = w.type.shape
        builder = rewriter.before(node)
        with building(builder):
            if not isinstance(depth, int) or not isinstance(columns, int) or depth % 4:
                base = QuantizedMatMul().decompose(a, a_scale, a_zero, w, w_scale)
                operands, op = [base], None
            else:
                shift = 128 if a.type.dtype is DType.I8 else 0
                quads = builder.emit_one(PackQuads(panel_width(self.isa, DType.I32)), w)
                offsets = builder.emit_one(QuadOffsets(shift), w, a_zero)
                scales = expand(mul(w_scale, a_scale), (columns,))
                op = PackedQuantizedMatMul(columns)
                operands = [a, quads, offsets, scales]
        if op is None:
            self._finish_decomposed(rewriter, node, operands[0])
            return
        wrapped: Op = WithEpilogue(op, 4, node.op.body) if isinstance(node.op, WithEpilogue) else op
        new = builder.emit_typed(
            wrapped, [*operands, *node.operands[5:]], [r.type for r in node.results]
        )
        rewriter.replace_node(node, new.results)

    @staticmethod
    def _finish_decomposed(rewriter: Rewriter, node: Node, product: Value) -> None:
        """Put the f32 product in place; its epilogue becomes a region of its own."""
        if not isinstance(node.op, WithEpilogue):
            rewriter.replace_node(node, [product])
            return
        region = Region(node.op.body, product.type.shape)
        operands = [product, *node.operands[5:]]
        new = rewriter.before(node).emit_typed(region, operands, [r.type for r in node.results])
        rewriter.replace_node(node, new.results)


def cpu_passes(isa: Isa) -> Sequence[Any]:
    """Return the backend's own passes in order."""
    return (
        Entry(
            PackQuantizedMatMul(isa),
            "first, for what its kernel cannot take becomes f32 products, whose weights are packed below",
        ),
        Entry(SplitRecurrent(isa), "input products of all steps are one matrix product"),
        Entry(LiftParamWork(), "also of layers inside branches, whose weights are captures"),
        Entry(
            Hoist(),
            "the weights of those are dequantised, and of recurrent layers rearranged, once per version",
        ),
        Entry(FormRegions(), "so are weights that come at run time, per call"),
        Entry(PackMatMul(isa), "weights are packed once per version instead of per call"),
        Entry(
            PackConvolutions(isa), "likewise, and each convolution takes the form that has a kernel"
        ),
    )
