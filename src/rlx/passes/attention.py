# SPDX-License-Identifier: Apache-2.0
"""Attention is recognised once, on the graph, before regions form.

matmul(softmax(matmul(q, k^T) * scale + mask), v) -> attention(q, k, v, mask). Anchored on a last-axis softmax, up
through additions, selects and constant factors to the score matmul, down through `where(is_nan(p), 0, p)` to the
value matmul. Constant factors on q, k or the scores multiply into `scale` (reassociates); the mask stays an operand;
transposes, reshapes and slices that only move heads become index maps of the operands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlx.base.facts import Facts
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.attention import Attention
from rlx.ops.elementwise import add, div, is_nan, mul, where
from rlx.ops.matmul import MatMul
from rlx.ops.movement import Transpose
from rlx.ops.norm import Softmax
from rlx.ops.quant import DequantizeLinear
from rlx.passes.manager import PassContext
from rlx.passes.movement import Access, scalar_constant, trace_access

__all__ = ["RecognizeAttention"]


class _Reject(Exception):  # noqa: N818  (a reason, not an error)
    """Why a softmax is no attention."""


@dataclass
class _Match:
    """What is known about one candidate so far."""

    softmax: Node
    scale: float = 1.0
    mask: Value | None = None
    zeros: bool = False
    consumed: list[Node] = field(default_factory=list[Node])
    """The nodes in front of the value matmul whose work the new node does."""


@dataclass(frozen=True)
class RecognizeAttention:
    """Replace every recognised chain by one `Attention` node; every softmax that is none leaves a reason."""

    name = "recognize-attention"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        if not ctx.claims.supports(Attention.name):
            return False
        rewriter = Rewriter(graph.facts)
        with graph.facts.active():
            for node in list(graph.block.walk()):
                if isinstance(node.op, Softmax):
                    try:
                        _rewrite(rewriter, node, graph.facts)
                    except _Reject as reason:
                        ctx.note(self.name, f"softmax at {node.location}: {reason}")
        return rewriter.changed


def _rewrite(rewriter: Rewriter, softmax: Node, facts: Facts) -> None:
    match = _Match(softmax, consumed=[softmax])
    operand = softmax.operands[0]
    assert operand is not None
    assert isinstance(softmax.op, Softmax)
    if softmax.op.axis not in (-1, operand.type.rank - 1):
        raise _Reject("not over the last axis")
    scores = _climb(match, operand)
    probabilities = _probabilities(match)
    product = _single_reader(probabilities, "the probabilities")
    if not isinstance(product.op, MatMul) or product.operands[0] is not probabilities:
        raise _Reject(f"the probabilities go to {product.op.name}, not to a matmul with the values")
    _emit(rewriter, match, scores, product, facts)


def _climb(match: _Match, value: Value) -> Node:
    """Walk from the softmax up to the score matmul, collecting the mask and constant factors."""
    while True:
        node = value.producer
        if node is None:
            raise _Reject("the scores are an input")
        if value is not match.softmax.operands[0] or node.op is not match.softmax.op:
            _require_single(value, node)
        match.consumed.append(node)
        if isinstance(node.op, MatMul):
            return node
        a, b = (*node.operands, None, None)[:2]
        if isinstance(node.op, add.op) and match.mask is None and a is not None and b is not None:
            if match.scale != 1.0:
                raise _Reject("a factor between the mask and the softmax")
            value, match.mask = (a, b) if _leads_to_matmul(a) else (b, a)
        elif isinstance(node.op, mul.op | div.op) and a is not None and b is not None:
            factor, value = _factor(node, a, b)
            match.scale *= factor
        elif isinstance(node.op, DequantizeLinear):
            raise _Reject("quantised scores")
        else:
            raise _Reject(f"{node.op.name} between the score matmul and the softmax")


def _require_single(value: Value, node: Node) -> None:
    block = node.block
    assert block is not None
    if len(value.users) != 1 or any(r is value for r in block.results):
        raise _Reject(f"the scores at {node.location} are also read elsewhere")


def _leads_to_matmul(value: Value) -> bool:
    while value.producer is not None:
        node = value.producer
        if isinstance(node.op, MatMul):
            return True
        if not isinstance(node.op, mul.op | div.op):
            return False
        source = (
            node.operands[0] if scalar_constant(node.operands[1]) is not None else node.operands[1]
        )
        if source is None or source is value:
            return False
        value = source
    return False


def _factor(node: Node, a: Value, b: Value) -> tuple[float, Value]:
    """Return (constant factor, the other operand) of a mul or div."""
    constant = scalar_constant(b)
    if constant is not None:
        return (1.0 / constant if isinstance(node.op, div.op) else constant), a
    constant = scalar_constant(a)
    if constant is not None and isinstance(node.op, mul.op):
        return constant, b
    raise _Reject(f"a factor at {node.location} that is not one constant")


def _probabilities(match: _Match) -> Value:
    """Return the softmax's result, or that of `where(is_nan(p), 0, p)` around it."""
    result = match.softmax.result
    users = result.users
    if len(users) == 2:
        check = next((u for u in users if isinstance(u.op, is_nan.op)), None)
        select = next((u for u in users if isinstance(u.op, where.op)), None)
        if check is not None and select is not None and check.result.users == [select]:
            condition, on_true, on_false = select.operands
            if condition is check.result and on_false is result and scalar_constant(on_true) == 0.0:
                match.zeros = True
                match.consumed += [check, select]
                return select.result
    return result


def _single_reader(value: Value, what: str) -> Node:
    node = value.producer
    assert node is not None
    assert node.block is not None
    users = value.users
    if len(users) != 1 or any(r is value for r in node.block.results):
        raise _Reject(f"{what} are also read elsewhere")
    return users[0]


def _emit(rewriter: Rewriter, match: _Match, scores: Node, product: Node, facts: Facts) -> None:
    q, k_t, v = scores.operands[0], scores.operands[1], product.operands[1]
    assert q is not None
    assert k_t is not None
    assert v is not None
    if q.type.rank != 4 or k_t.type.rank != 4 or v.type.rank != 4:
        raise _Reject(
            f"operands of rank {q.type.rank}, {k_t.type.rank} and {v.type.rank} instead of 4"
        )
    if not q.type.dtype.is_float:
        raise _Reject(f"operands of {q.type.dtype}")
    batch, heads, length, depth = q.type.shape
    keys = k_t.type.shape[3]
    wanted = {"k": (batch, heads, depth, keys), "v": (batch, heads, keys, v.type.shape[3])}
    for name, value in (("k", k_t), ("v", v)):
        if any(
            facts.equal(a, b) is not True
            for a, b in zip(value.type.shape, wanted[name], strict=True)
        ):
            raise _Reject(f"{name} broadcasts over batch or heads")
    q_base, q_map, q_factor = _operand(q, facts, swap=False)
    k_base, k_map, k_factor = _operand(k_t, facts, swap=True)
    v_base, v_map, v_factor = _operand(v, facts, swap=False)
    if v_factor != 1.0:
        raise _Reject("a factor on the values")
    op = Attention(
        scale=match.scale * q_factor * k_factor,
        masked_row="nan_to_zeros" if match.zeros else "nan",
        shape=(batch, heads, length, keys, depth, v.type.shape[3]),
        maps=(q_map, k_map, v_map),
        out_layout="bhsd",
    )
    _replace(rewriter, op, [q_base, k_base, v_base, match.mask], match, product)


def _operand(value: Value, facts: Facts, *, swap: bool) -> tuple[Value, IndexMap, float]:
    """Return (base, map over batch, head, position, depth; constant factor) of q, k or v."""
    factor = 1.0
    access = trace_access(value, facts)
    while (scaled := _scaled(access.base)) is not None:
        rest = trace_access(scaled[1], facts)
        factor *= scaled[0]
        access = Access(rest.base, _compose(access.map, rest.map), access.nodes)
    mapped = access.map
    if swap:  # k^T is [batch, head, depth, position]
        order = {None: None, 0: 0, 1: 1, 2: 3, 3: 2}
        mapped = IndexMap(4, tuple(AxisMap(order[a.axis], a.start, a.step) for a in mapped.axes))
    if not _unit_depth(mapped):
        raise _Reject("the depth axis of an operand is not its innermost one")
    return access.base, mapped, factor


def _scaled(value: Value) -> tuple[float, Value] | None:
    """Return (factor, operand) if the value is an operand of its own shape times one constant."""
    node = value.producer
    if node is None or not isinstance(node.op, mul.op | div.op):
        return None
    a, b = node.operands
    assert a is not None
    assert b is not None
    try:
        factor, rest = _factor(node, a, b)
    except _Reject:
        return None
    return (factor, rest) if rest.type.shape == value.type.shape else None


def _compose(outer: IndexMap, inner: IndexMap) -> IndexMap:
    """Return the map of an outer read of a value that itself reads its base through `inner`."""
    axes: list[AxisMap] = []
    for axis in inner.axes:
        if axis.axis is None:
            axes.append(axis)
            continue
        via = outer.axes[axis.axis]
        axes.append(AxisMap(via.axis, axis.start + via.start * axis.step, axis.step * via.step))
    return IndexMap(outer.rank, tuple(axes))


def _unit_depth(mapped: IndexMap) -> bool:
    """True if consecutive depth elements are consecutive in memory."""
    last = mapped.axes[-1] if mapped.axes else None
    return last is not None and last.axis == 3 and last.step == 1


def _replace(
    rewriter: Rewriter,
    op: Attention,
    operands: list[Value | None],
    match: _Match,
    product: Node,
) -> None:
    """Emit the node in place of the value matmul, absorbing a transpose to [batch, position, head, depth]."""
    users = product.result.users
    block = product.block
    assert block is not None
    transposed = (
        users[0]
        if len(users) == 1
        and isinstance(users[0].op, Transpose)
        and users[0].op.perm == (0, 2, 1, 3)
        and not any(r is product.result for r in block.results)
        else None
    )
    last = product if transposed is None else transposed
    builder = rewriter.before(last)
    builder.location = product.location.joined(*(n.location for n in match.consumed), last.location)
    if transposed is not None:
        op = replace(op, out_layout="bshd")
    (result,) = builder.emit(op, *operands)
    rewriter.replace_node(last, [result])
