# SPDX-License-Identifier: Apache-2.0
"""Attention and rotary embedding of the default operator set (version 23 on)."""

from __future__ import annotations

import math
from functools import reduce

from rlx.base.dims import Dim, floordiv
from rlx.base.dtypes import DType
from rlx.base.facts import current_facts
from rlx.frontends.onnx.graph import AttributeValue
from rlx.frontends.onnx.ops.movement import pad
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.attention import Attention, Causal
from rlx.ops.indexing import Gather
from rlx.ops.leaf import constant, dim_tensor
from rlx.ops.movement import arange, concat, reshape, slice_axis, transpose, unsqueeze
from rlx.ops.spec import emit_one

_ATTENTION = "is_causal kv_num_heads q_num_heads scale softcap"
_ONLY: dict[str, tuple[AttributeValue, ...]] = {
    "qk_matmul_output_mode": (0, 1, 2, 3),  # what the fourth output is, which is refused when used
    "softmax_precision": (1, 10, 16),  # the softmax of narrower operands is computed in f32
}


@onnx_op("Attention", _ATTENTION, since=23, only=_ONLY, outputs=3)
@onnx_op(
    "Attention",
    f"{_ATTENTION} left_window_size right_window_size",
    since=25,
    only=_ONLY,
    outputs=3,
)
def _attention(call: Call) -> Mapped:
    """softmax(Q K' * scale + mask) V; operands of rank 3 are [B, S, heads * D]."""
    flat = call.type_of(0).rank == 3
    heads, kv_heads = call.get_int("q_num_heads", 0), call.get_int("kv_num_heads", 0)
    q, k, v = call.value(0), call.value(1), call.value(2)
    if flat:
        q, k, v = _split_heads(q, heads), _split_heads(k, kv_heads), _split_heads(v, kv_heads)
    past = call.maybe(4)
    causal = _causal(call, q.type.shape[2], k.type.shape[2])
    if past is not None:
        k, v = concat((past, k), 2), concat((call.value(5), v), 2)
    extent = q.type.shape[3]
    if not isinstance(extent, int) and not call.has("scale"):
        raise call.refuse(f"the head size {extent} is symbolic: there is no default scale")
    scale = call.get_float("scale") if call.has("scale") else 1.0 / math.sqrt(int(extent))
    op = Attention(
        scale=scale, masked_row="zeros", causal=causal, softcap=call.get_float("softcap", 0.0)
    )
    y = emit_one(op, q, k, v, _mask(call, q, k, explicit=causal == "none"))
    return (_join_heads(y) if flat else y), k, v


def _causal(call: Call, queries: Dim, keys: Dim) -> Causal:
    """Return the operator's own causal mask; "none" also where it has to be written out."""
    if not call.get_flag("is_causal") or call.maybe(6) is not None:
        return "none"
    if call.maybe(4) is None:
        return "upper_left"
    return "bottom_right" if current_facts().equal(queries, keys) else "none"


def _mask(call: Call, q: Value, k: Value, *, explicit: bool) -> Value | None:
    """Return the mask operand, joined with what positions allow (`explicit`: causality too)."""
    mask, total = call.maybe(3), k.type.shape[2]
    causal = explicit and call.get_flag("is_causal")
    allowed = _allowed(call, q.type.shape[2], total, causal=causal)
    if mask is not None:
        missing = total - mask.type.shape[-1]
        if missing != 0 and mask.type.shape[-1] != 1:  # a short mask hides the keys at the end
            hidden = constant(
                False if mask.type.dtype is DType.BOOL else -math.inf, mask.type.dtype
            )
            edges: list[Dim] = [0] * (mask.type.rank - 1)
            mask = pad(mask, [*edges, 0], [*edges, missing], "constant", hidden)
    if mask is None or allowed is None:
        return allowed if mask is None else mask
    if mask.type.dtype is DType.BOOL:
        return ew.logical_and(mask, allowed)
    return ew.where(allowed, mask, constant(-math.inf, mask.type.dtype))


def _allowed(call: Call, queries: Dim, keys: Dim, *, causal: bool) -> Value | None:
    """Return which keys each query may see by position, [S, T] or [B, 1, S, T]; None for all."""
    valid, past = call.maybe(6), call.maybe(4)
    left, right = call.get_int("left_window_size", -1), call.get_int("right_window_size", -1)
    if valid is None and not causal and left < 0 and right < 0:
        return None
    row = unsqueeze(arange(queries), (1,))
    column = arange(keys)
    offset = dim_tensor((past.type.shape[2] if past is not None else 0,), ())
    rules: list[Value] = []
    if valid is not None:
        count = reshape(valid, (valid.type.shape[0], 1, 1, 1))
        offset = ew.sub(count, dim_tensor((queries,), ()))
        rules.append(ew.less(column, count))
    position = ew.add(row, offset)
    if causal:
        rules.append(ew.less_equal(column, position))
    if left >= 0:
        rules.append(ew.less_equal(ew.sub(position, constant(left, DType.I64)), column))
    if right >= 0:
        rules.append(ew.less_equal(column, ew.add(position, constant(right, DType.I64))))
    return reduce(ew.logical_and, rules)


def _split_heads(x: Value, heads: int) -> Value:
    """[B, S, H * D] -> [B, H, S, D]."""
    b, s, width = x.type.shape
    return transpose(reshape(x, (b, s, heads, floordiv(width, heads))), (0, 2, 1, 3))


def _join_heads(x: Value) -> Value:
    b, h, s, d = x.type.shape
    return reshape(transpose(x, (0, 2, 1, 3)), (b, s, h * d))


@onnx_op("RotaryEmbedding", "interleaved num_heads rotary_embedding_dim", since=23)
def _rotary(call: Call) -> Mapped:
    """Rotate pairs of the first `rotary_embedding_dim` features by their positions' angles."""
    x, cos, sin, positions = call.value(0), call.value(1), call.value(2), call.maybe(3)
    flat = x.type.rank == 3
    heads = call.get_int("num_heads", 0)
    if flat and heads == 0:
        raise call.wrong("num_heads is needed for an input of rank 3")
    h = _split_heads(x, heads) if flat else x
    if positions is not None:
        cos, sin = (emit_one(Gather(0), table, positions) for table in (cos, sin))
    cos, sin = unsqueeze(cos, (1,)), unsqueeze(sin, (1,))  # [B, 1, S, D / 2]
    width = h.type.shape[3]
    if not isinstance(width, int):
        raise call.refuse(f"the head size {width} is symbolic")
    rotated = call.get_int("rotary_embedding_dim", 0) or width
    part = slice_axis(h, 3, 0, rotated)
    half = rotated // 2
    interleaved = call.get_flag("interleaved")
    first = slice_axis(part, 3, 0, half, 2) if interleaved else slice_axis(part, 3, 0, half)
    second = slice_axis(part, 3, 1, half, 2) if interleaved else slice_axis(part, 3, half, half)
    cos, sin = slice_axis(cos, 3, 0, half), slice_axis(sin, 3, 0, half)
    real = ew.sub(ew.mul(cos, first), ew.mul(sin, second))
    imaginary = ew.add(ew.mul(sin, first), ew.mul(cos, second))
    if interleaved:
        pairs = concat((unsqueeze(real, (4,)), unsqueeze(imaginary, (4,))), 4)
        done = reshape(pairs, (*real.type.shape[:3], rotated))
    else:
        done = concat((real, imaginary), 3)
    if rotated < width:
        done = concat((done, slice_axis(h, 3, rotated, width - rotated)), 3)
    return _join_heads(done) if flat else done
