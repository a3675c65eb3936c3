# SPDX-License-Identifier: Apache-2.0
"""Attention and rotary embedding of the default operator set (version 23 on)."""

from __future__ import annotations

import math

from rlx.base.dims import floordiv
from rlx.frontends.onnx.ops.movement import slice_axis
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.attention import Attention
from rlx.ops.indexing import Gather
from rlx.ops.movement import concat, reshape, transpose, unsqueeze
from rlx.ops.spec import emit_one


@onnx_op(
    "Attention",
    "is_causal kv_num_heads q_num_heads scale softcap softmax_precision",
    since=23,
    only={
        "qk_matmul_output_mode": (0, 1, 2, 3)
    },  # chooses what the fourth output is, which is refused when used
    outputs=3,
)
def _attention(call: Call) -> Mapped:
    """softmax(Q K' * scale + mask) V; 3-D operands are [B, S, heads * D]."""
    flat = call.type_of(0).rank == 3
    heads, kv_heads = call.get_int("q_num_heads", 0), call.get_int("kv_num_heads", 0)
    q = _split_heads(call.value(0), heads) if flat else call.value(0)
    k = _split_heads(call.value(1), kv_heads) if flat else call.value(1)
    v = _split_heads(call.value(2), kv_heads) if flat else call.value(2)
    past_k, past_v = call.maybe(4), call.maybe(5)
    if past_k is not None and past_v is not None:
        k, v = concat((past_k, k), 2), concat((past_v, v), 2)
    if call.maybe(6) is not None:
        raise call.refuse("nonpad_kv_seqlen (input 6) is in use")
    extent = q.type.shape[3]
    if not isinstance(extent, int) and not call.has("scale"):
        raise call.refuse(f"the head size {extent} is symbolic, so that there is no default scale")
    scale = call.get_float("scale") if call.has("scale") else 1.0 / math.sqrt(int(extent))
    causal = "none"
    if call.get_flag("is_causal"):
        causal = "upper_left" if past_k is None else "bottom_right"
    op = Attention(
        scale=scale, masked_row="nan", causal=causal, softcap=call.get_float("softcap", 0.0)
    )
    y = emit_one(op, q, k, v, call.maybe(3))
    return (_join_heads(y) if flat else y), k, v


def _split_heads(x: Value, heads: int) -> Value:
    """[B, S, H * D] -> [B, H, S, D]."""
    b, s, width = x.type.shape
    return transpose(reshape(x, (b, s, heads, floordiv(width, heads))), (0, 2, 1, 3))


def _join_heads(x: Value) -> Value:
    b, h, s, d = x.type.shape
    return reshape(transpose(x, (0, 2, 1, 3)), (b, s, h * d))


@onnx_op("RotaryEmbedding", "interleaved num_heads rotary_embedding_dim", since=23)
def _rotary(call: Call) -> Mapped:
    """Rotate pairs of the first `rotary_embedding_dim` features by the angles of their positions."""
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
