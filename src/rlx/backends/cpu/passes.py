# SPDX-License-Identifier: Apache-2.0
"""Graph rewrites private to the CPU backend: weights go into the layouts its kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlx.backends.cpu.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.backends.cpu.conv_passes import PackConvolutions
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.gemm_tiles import panel_width
from rlx.backends.cpu.ops import (
    PRODUCT_DTYPES,
    PackedMatMul,
    PackPanels,
)
from rlx.backends.cpu.quantized_passes import PackQuantizedProducts
from rlx.backends.cpu.rnn_passes import SplitRecurrent
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Op
from rlx.ops.attention import Attention
from rlx.ops.matmul import MatMul
from rlx.ops.region import WithEpilogue
from rlx.ops.spec import building
from rlx.passes.captures import is_known, weight_values
from rlx.passes.decompose import Decompose
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
            if _anchor(node) is MatMul:
                b = node.operands[1]
                assert b is not None
                if is_known(b, weights):
                    self._pack(rewriter, node)
        return rewriter.changed

    def _pack(self, rewriter: Rewriter, node: Node) -> None:
        a, b = node.operands[:2]
        assert a is not None
        assert b is not None
        if (
            b.type.rank != 2
            or not b.type.is_static
            or b.type.dtype not in PRODUCT_DTYPES
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
class DecomposeUnknownDepth:
    """attention(q, k, v) -> its decomposition where the depth of a head is known only at run time.

    The kernel is made for the depth; numerical effect: that of the operator's own decomposition.
    """

    name = "cpu-decompose-unknown-depth"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        with graph.facts.active():
            for node in list(graph.block.walk()):
                if isinstance(node.op, Attention):
                    self._node(rewriter, node, node.op)
        if rewriter.changed:
            Decompose().run(graph, ctx)
        return rewriter.changed

    @staticmethod
    def _node(rewriter: Rewriter, node: Node, op: Attention) -> None:
        q, k, v, mask = (*node.operands, None)[:4]
        assert q is not None
        assert k is not None
        assert v is not None
        if all(isinstance(d, int) for d in op.extents(q.type, k.type, v.type)[-2:]):
            return
        with building(rewriter.before(node)):
            rewriter.replace_node(node, [op.decompose(q, k, v, mask)])


def cpu_passes(isa: Isa) -> Sequence[Any]:
    """Return the backend's own passes in order."""
    return (
        Entry(
            PackQuantizedProducts(isa),
            "first, for what its kernels cannot take becomes f32 products, whose weights are packed below",
        ),
        Entry(DecomposeUnknownDepth(), "the attention kernel is made for the depth of a head"),
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
