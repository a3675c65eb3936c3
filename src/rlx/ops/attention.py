# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention with masks and grouped heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import FLOATS, DType
from rlx.base.errors import TypeRuleError
from rlx.base.facts import current_facts
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType, require_equal
from rlx.expr.body import BodyBuilder
from rlx.expr.index import IndexMap
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.region import Region
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["Attention", "attention"]

Causal = Literal["none", "bottom_right", "upper_left"]


def _qkv(
    b: int, heads: tuple[int, int], lengths: tuple[int, int], depths: tuple[int, int]
) -> tuple[Operand, ...]:
    (h, hk), (s, t), (d, dv) = heads, lengths, depths
    return Operand((b, h, s, d)), Operand((b, hk, t, d)), Operand((b, hk, t, dv))


@op("attention")
@dataclass(frozen=True)
class Attention(Op):
    """softmax(cap(q k' * scale) + mask) v per batch and head.

    q: [B, H, S, D], k: [B, Hk, T, D], v: [B, Hk, T, Dv] -> [B, H, S, Dv]; H is a multiple of Hk,
        and query head h
    reads head h // (H / Hk) of k and v. mask broadcasts to [B, H, S, T]: bool (True keeps a key) or
    float (added to the scores as a number, so finite masks do not hide). cap(x) = softcap * tanh(x
    / softcap).

    The scores of keys that a bool mask or `causal` hides are replaced, not added to, so NaN in such
    a key does not reach the probabilities. NaN and infinities in its row of v do reach the result,
    as 0 * NaN; but of keys that `causal` hides, kernels read only those that a neighbouring query
    sees, so there a backend may leave them out. A key hidden by a float mask of -inf is poisonous
    either way. The softmax subtracts the row's maximum; f16 and bf16 compute in f32.

    Attributes:
        scale: factor of the scores.
        masked_row: what a row gives whose keys are all hidden (all scores -inf): `nan`, as softmax
            does, or `zeros`; `nan_to_zeros` makes every probability that is NaN zero, whatever the
            reason. Without any keys (T = 0) a row is a sum of nothing, 0, in each case.
        causal: query i sees key j where j <= i (`upper_left`) or j <= i + T - S (`bottom_right`);
            `none` sees all.
        softcap: bound of the scores before the mask; 0 for none.
        shape: (B, H, S, T, D, Dv) where the operands are read through `maps`; () otherwise.
        maps: how the element (batch, head, position, depth) is read from the q, k and v operands;
            () where these have the shapes above.
        out_layout: `bhsd` or `bshd`, the order of the result's axes.
    """

    precision_class = OpClass.COMPUTE

    operands = ("q", "k", "v", "mask?")
    keeps = ("mask",)
    scale: float
    masked_row: Literal["nan", "zeros", "nan_to_zeros"] = "nan"
    causal: Causal = "none"
    softcap: float = 0.0
    shape: tuple[Dim, ...] = ()
    maps: tuple[IndexMap, ...] = ()
    out_layout: Literal["bhsd", "bshd"] = "bhsd"
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((*_qkv(2, (3, 3), (4, 6), (8, 5)), None), {"scale": 0.35}),
        Sample((*_qkv(1, (4, 2), (5, 5), (8, 8)), None), {"scale": 0.35, "causal": "upper_left"}),
        Sample((*_qkv(1, (6, 1), (3, 7), (4, 4)), None), {"scale": 0.5, "causal": "bottom_right"}),
        Sample(
            (*_qkv(2, (2, 2), (4, 6), (8, 8)), Operand((2, 1, 4, 6), DType.BOOL, "bool")),
            {"scale": 0.35, "masked_row": "zeros"},
        ),
        Sample(
            (*_qkv(2, (2, 2), (4, 6), (8, 8)), Operand((4, 6))), {"scale": 0.35, "softcap": 2.0}
        ),
        # More queries than keys: the first rows see nothing.
        Sample(
            (*_qkv(1, (1, 1), (4, 2), (4, 4)), None),
            {"scale": 0.5, "causal": "bottom_right", "masked_row": "zeros"},
        ),
        Sample(
            (*_qkv(1, (1, 1), (4, 2), (4, 4)), None),
            {"scale": 0.5, "causal": "bottom_right", "masked_row": "nan"},
        ),
        Sample(
            (*_qkv(1, (1, 1), (4, 2), (4, 4)), None),
            {"scale": 0.5, "causal": "bottom_right", "masked_row": "nan_to_zeros"},
        ),
        Sample((*_qkv(0, (2, 1), (3, 4), (4, 4)), None), {"scale": 0.5}),
        Sample((*_qkv(1, (2, 2), (3, 0), (4, 4)), None), {"scale": 0.5, "masked_row": "zeros"}),
        Sample((*_qkv(2, (2, 2), (3, 4), (4, 6)), None), {"scale": 0.5, "out_layout": "bshd"}),
        Sample((*_qkv(1, (4, 3), (3, 4), (4, 4)), None), {"scale": 0.5}, error="multiple"),
    )

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        del results
        if self.shape:
            b, h, s, t, d, dv = self.shape
        else:
            q, k, v = operands[:3]
            (b, h, s, d), t, dv = q.shape, k.shape[2], v.shape[3]
        return b * h * s * t * (d + dv) * 2

    def infer(  # noqa: D102
        self, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None = None
    ) -> TensorType:
        if q.dtype not in FLOATS or not q.dtype is k.dtype is v.dtype:
            raise TypeRuleError(
                f"needs q, k and v of one float dtype, found {q.dtype}, {k.dtype} and {v.dtype}"
            )
        self._check_choices()
        batch, heads, queries, keys, _, depth = self.extents(q, k, v)
        if mask is not None:
            _check_mask(mask, (batch, heads, queries, keys))
        bshd = self.out_layout == "bshd"
        return q.with_shape(
            (batch, queries, heads, depth) if bshd else (batch, heads, queries, depth)
        )

    def _check_choices(self) -> None:
        for name, choices in (
            ("masked_row", ("nan", "zeros", "nan_to_zeros")),
            ("causal", ("none", "bottom_right", "upper_left")),
            ("out_layout", ("bhsd", "bshd")),
        ):
            if getattr(self, name) not in choices:
                raise TypeRuleError(
                    f"{name} {getattr(self, name)!r} is none of {', '.join(choices)}"
                )
        if not self.softcap >= 0:
            raise TypeRuleError(f"softcap is {self.softcap}; it must be at least 0")

    def extents(
        self, q: TensorType, k: TensorType, v: TensorType
    ) -> tuple[Dim, Dim, Dim, Dim, Dim, Dim]:
        """Return (B, H, S, T, D, Dv).

        Raises:
            TypeRuleError: the operands do not fit each other.
        """
        if self.maps:
            if len(self.maps) != 3 or len(self.shape) != 6:
                raise TypeRuleError(
                    f"needs three maps and six extents, found {len(self.maps)} and {self.shape}"
                )
            for mapped, operand in zip(self.maps, (q, k, v), strict=True):
                if mapped.rank != 4 or len(mapped.axes) != operand.rank:
                    raise TypeRuleError(
                        f"an index map over rank {mapped.rank} does not fit {operand}"
                    )
            batch, heads, queries, keys, inner, depth = self.shape
            return batch, heads, queries, keys, inner, depth
        if not q.rank == k.rank == v.rank == 4:
            raise TypeRuleError(f"needs operands of rank 4, found {q}, {k} and {v}")
        batch = require_equal(q.shape[0], k.shape[0], "the batch of q and k")
        require_equal(batch, v.shape[0], "the batch of q and v")
        heads, kv_heads = q.shape[1], require_equal(k.shape[1], v.shape[1], "the heads of k and v")
        whole = isinstance(heads, int) and isinstance(kv_heads, int)
        if current_facts().equal(heads, kv_heads) is not True and (
            not whole or not kv_heads or heads % kv_heads
        ):
            raise TypeRuleError(
                f"{heads} query heads are no multiple of {kv_heads} heads of k and v"
            )
        inner = require_equal(q.shape[3], k.shape[3], "the depth of q and k")
        keys = require_equal(k.shape[2], v.shape[2], "the positions of k and v")
        return batch, heads, q.shape[2], keys, inner, v.shape[3]

    def reference(  # noqa: D102
        self, q: Array, k: Array, v: Array, mask: Array | None = None
    ) -> Array:
        if self.maps:
            b, h, s, t, d, dv = (int(e) for e in self.shape)
            spaces = ((b, h, s, d), (b, h, t, d), (b, h, t, dv))
            q, k, v = (_read(a, m, e) for a, m, e in zip((q, k, v), self.maps, spaces, strict=True))
        b, h, s = q.shape[:3]
        kv_heads, t = k.shape[1:3]
        grouped = q.reshape(b, kv_heads, h // kv_heads if kv_heads else 0, s, q.shape[3])
        with np.errstate(all="ignore"):
            scores = np.matmul(grouped, k.swapaxes(-1, -2)[:, :, None]) * np.asarray(
                self.scale, q.dtype
            )
            scores = self._masked(scores.reshape(b, h, s, t), mask)
            p = self._softmax(scores).astype(q.dtype)
            y = np.matmul(p.reshape(*grouped.shape[:4], t), v[:, :, None])
        y = y.reshape(b, h, s, v.shape[3])
        return np.ascontiguousarray(y.swapaxes(1, 2)) if self.out_layout == "bshd" else y

    def _masked(self, scores: Array, mask: Array | None) -> Array:
        if self.softcap:
            cap = np.asarray(self.softcap, scores.dtype)
            scores = np.tanh(scores / cap) * cap
        if mask is not None:
            scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
        if self.causal != "none":
            s, t = scores.shape[-2:]
            keep = np.tril(np.ones((s, t), np.bool_), t - s if self.causal == "bottom_right" else 0)
            scores = np.where(keep, scores, -np.inf)
        return scores

    def _softmax(self, scores: Array) -> Array:
        wide = scores.astype(np.float64)
        top = wide.max(axis=-1, keepdims=True, initial=-np.inf)
        e = np.exp(wide - top)
        p = e / e.sum(axis=-1, keepdims=True)
        if self.masked_row == "nan_to_zeros":
            return np.where(np.isnan(p), 0.0, p)
        return np.where(top == -np.inf, 0.0, p) if self.masked_row == "zeros" else p

    def decompose(self, q: Value, k: Value, v: Value, mask: Value | None = None) -> Value:
        """Return two matmuls around a softmax; scores and probabilities round to the dtype."""
        from rlx.ops.elementwise import mul
        from rlx.ops.leaf import constant
        from rlx.ops.matmul import matmul
        from rlx.ops.movement import reshape, transpose
        from rlx.ops.norm import Softmax

        batch, heads, queries, keys, inner, depth = self.extents(q.type, k.type, v.type)
        if self.maps:
            lengths = ((queries, inner), (keys, inner), (keys, depth))
            q, k, v = (
                _emit_read(value, mapped, (batch, heads, *ends))
                for value, mapped, ends in zip((q, k, v), self.maps, lengths, strict=True)
            )
        kv_heads = k.type.shape[1]
        k_t = transpose(k, (0, 1, 3, 2))
        shared = current_facts().equal(heads, kv_heads) is not True
        groups = int(heads) // int(kv_heads) if shared else 1
        if shared:
            q = reshape(q, (batch, kv_heads, groups, queries, inner))
            k_t = reshape(k_t, (batch, kv_heads, 1, inner, keys))
            v = reshape(v, (batch, kv_heads, 1, keys, depth))
        scores = reshape(matmul(q, k_t), (batch, heads, queries, keys))
        scores = self._emit_masked(mul(scores, constant(self.scale, q.type.dtype)), mask)
        p = self._emit_zero_rows(scores, emit_one(Softmax(3), scores))
        if shared:
            p = reshape(p, (batch, kv_heads, groups, queries, keys))
        y = reshape(matmul(p, v), (batch, heads, queries, depth))
        return transpose(y, (0, 2, 1, 3)) if self.out_layout == "bshd" else y

    def _emit_masked(self, scores: Value, mask: Value | None) -> Value:
        from rlx.ops.elementwise import add, cast, div, less_equal, mul, tanh, where
        from rlx.ops.leaf import constant, dim_tensor
        from rlx.ops.movement import arange, unsqueeze

        dtype = scores.type.dtype
        if self.softcap:
            cap = constant(self.softcap, dtype)
            scores = mul(tanh(div(scores, cap)), cap)
        hidden = constant(-math.inf, dtype)
        if mask is not None:
            is_bool = mask.type.dtype is DType.BOOL
            scores = where(mask, scores, hidden) if is_bool else add(scores, cast(mask, dtype))
        if self.causal != "none":
            queries, keys = scores.type.shape[-2:]
            row = arange(queries)
            if self.causal == "bottom_right":
                row = add(row, dim_tensor((keys - queries,), ()))
            scores = where(less_equal(arange(keys), unsqueeze(row, (1,))), scores, hidden)
        return scores

    def _emit_zero_rows(self, scores: Value, p: Value) -> Value:
        from rlx.ops.elementwise import equal, is_nan, where
        from rlx.ops.leaf import constant
        from rlx.ops.reduce import reduce_max

        if self.masked_row == "nan":
            return p
        dtype = scores.type.dtype
        if self.masked_row == "nan_to_zeros":
            return where(is_nan(p), constant(0.0, dtype), p)
        empty = equal(reduce_max(scores, (3,), True), constant(-math.inf, dtype))
        return where(empty, constant(0.0, dtype), p)


def attention(  # noqa: PLR0913
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    *,
    scale: float | None = None,
    causal: Causal = "none",
    softcap: float = 0.0,
    masked_row: Literal["nan", "zeros", "nan_to_zeros"] = "nan",
) -> Value:
    """Return attention over [B, H, S, D] operands.

    See `Attention`; the default scale is 1 / sqrt(D).

    Raises:
        TypeRuleError: the operands do not fit, or D is symbolic and no scale is given.
    """
    if scale is None:
        depth = q.type.shape[-1] if q.type.rank else 0
        if not isinstance(depth, int) or depth < 1:
            raise TypeRuleError(f"there is no default scale for q {q.type}; give one")
        scale = 1.0 / math.sqrt(depth)
    return emit_one(Attention(scale, masked_row, causal, softcap), q, k, v, mask)


def _check_mask(mask: TensorType, scores: tuple[Dim, ...]) -> None:
    if mask.dtype is not DType.BOOL and mask.dtype not in FLOATS:
        raise TypeRuleError(f"the mask must be bool or a float, found {mask.dtype}")
    facts = current_facts()
    lead = len(scores) - mask.rank
    if lead < 0 or any(
        d != 1 and facts.equal(d, e) is False
        for d, e in zip(mask.shape, scores[lead:], strict=True)
    ):
        raise TypeRuleError(f"the mask {mask} does not broadcast to the scores {scores}")


def _read(array: Array, mapped: IndexMap, shape: Sequence[int]) -> Array:
    """Return the operand over (batch, head, position, depth)."""
    indices: list[Array] = []
    for axis in mapped.axes:
        extent = shape[axis.axis] if axis.axis is not None else 1
        line = int(axis.start) + axis.step * np.arange(extent)
        indices.append(line.reshape([extent if i == axis.axis else 1 for i in range(len(shape))]))
    return np.ascontiguousarray(np.broadcast_to(array[tuple(indices)], tuple(shape)))


def _emit_read(value: Value, mapped: IndexMap, shape: tuple[Dim, ...]) -> Value:
    builder = BodyBuilder([value.type.dtype])
    return emit_one(Region(builder.finish(builder.input(0)), shape, (mapped,)), value)
