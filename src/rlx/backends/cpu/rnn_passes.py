# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: the products of all inputs become one matrix product, the steps one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.rnn_ops import Layer, Recurrence, gate_parts
from rlx.base.dims import ceildiv
from rlx.base.dtypes import DType
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ops import elementwise as ew
from rlx.ops.matmul import MatMul
from rlx.ops.movement import pad, reshape, slice_axis, transpose
from rlx.ops.region import WithEpilogue
from rlx.ops.rnn import GRU, LSTM, RNN
from rlx.ops.spec import building, emit, emit_one
from rlx.passes.manager import PassContext

__all__ = ["SplitRecurrent"]


@dataclass(frozen=True)
class SplitRecurrent:
    """lstm(x, w, r, b, ...) -> recurrence(x @ w' + b, packed r, ...), likewise gru and rnn.

    Both biases are added to the input products, but for the one inside a GRU's reset. Narrow floats
    are computed in f32. Numerical effect: sums of a gate's terms are rounded in another order.
    """

    isa: Isa
    name = "cpu-split-recurrent"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        with graph.facts.active():
            for node in list(graph.block.walk()):
                if isinstance(node.op, (LSTM, GRU, RNN)):
                    self._split(rewriter, node, node.op)
                    ctx.note(self.name, f"{node.op.name} at {node.location}")
        return rewriter.changed

    def _split(self, rewriter: Rewriter, node: Node, layer: Layer) -> None:
        operands: list[Value | None] = [*node.operands, *[None] * (8 - len(node.operands))]
        narrow = node.results[0].type.dtype
        with building(rewriter.before(node)):
            x, w, r, b, lens, h0, c0, p = (_widened(v) for v in operands)
            assert x is not None
            assert w is not None
            assert r is not None
            gates, recurrent = _input_products(layer, x, w, b)
            first, second = self._recurrent_weights(layer, r)
            results = emit(Recurrence(layer), gates, first, second, recurrent, lens, h0, c0, p)
            rounded = [ew.cast(v, narrow) if v.type.dtype is not narrow else v for v in results]
        rewriter.replace_node(node, rounded)

    def _recurrent_weights(self, layer: Layer, r: Value) -> tuple[Value, Value | None]:
        """Return the weights of each product of a step."""
        lanes = self.isa.lanes(r.type.dtype)
        parts = gate_parts(layer)
        if len(parts) == 1:
            return _packed(r, parts[0], layer.hidden, lanes), None
        border = parts[0] * layer.hidden
        first = slice_axis(r, 1, 0, border)
        second = slice_axis(r, 1, border, parts[1] * layer.hidden)
        return _packed(first, parts[0], layer.hidden, lanes), _packed(
            second, parts[1], layer.hidden, lanes
        )


def _widened(value: Value | None) -> Value | None:
    if value is not None and value.type.dtype.is_narrow_float:
        return ew.cast(value, DType.F32)
    return value


def _input_products(
    layer: Layer, x: Value, w: Value, b: Value | None
) -> tuple[Value, Value | None]:
    """Return x @ w' + biases, all directions side by side, and the bias inside a GRU's reset."""
    width = layer.directions * layer.gates * layer.hidden
    weights = transpose(reshape(w, (width, w.type.shape[2])), (1, 0))
    if b is None:
        return emit_one(MatMul(), x, weights), None
    rows = layer.gates * layer.hidden
    added, inner = slice_axis(b, 1, rows, rows), None
    if isinstance(layer, GRU) and layer.linear_before_reset:
        border = 2 * layer.hidden
        inner = slice_axis(added, 1, border, layer.hidden)
        added = pad(slice_axis(added, 1, 0, border), (0, 0), (0, layer.hidden))
    bias = reshape(ew.add(slice_axis(b, 1, 0, rows), added), (width,))
    dtype = x.type.dtype
    body = ew.add.trace((dtype, dtype), {})
    (gates,) = emit(WithEpilogue(MatMul(), 2, body), x, weights, bias)
    return gates, inner


def _packed(r: Value, gates: int, hidden: int, lanes: int) -> Value:
    """Return [D, gates * H, H] as [D, ceil(H / lanes), H, gates, lanes], padded with zeros."""
    directions = r.type.shape[0]
    groups = ceildiv(hidden, lanes)
    assert isinstance(groups, int)
    parts = reshape(r, (directions, gates, hidden, hidden))
    missing = groups * lanes - hidden
    if missing:
        parts = pad(parts, (0, 0, 0, 0), (0, 0, missing, 0))
    return transpose(reshape(parts, (directions, gates, groups, lanes, hidden)), (0, 2, 4, 1, 3))
