# SPDX-License-Identifier: Apache-2.0
"""Operators private to the CPU backend: the recurrent part of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlx.base.dims import Dim
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.op import Op
from rlx.ops.rnn import GRU, LSTM, RNN
from rlx.ops.spec import op

__all__ = ["Layer", "Recurrence", "gate_parts", "one_direction"]

Layer = LSTM | GRU | RNN


def gate_parts(layer: Layer) -> tuple[int, ...]:
    """Return how many gates each product of a step computes.

    A GRU that resets the state before its candidate's product needs two products in a row;
    everything else one.
    """
    if isinstance(layer, GRU) and not layer.linear_before_reset:
        return (2, 1)
    return (layer.gates,)


def _unpacked(panels: Array) -> Array:
    """Return [D, G * H, H] for weights in the layout that `Recurrence` reads."""
    directions, groups, hidden, gates, lanes = panels.shape
    parts = panels.transpose(0, 3, 1, 4, 2).reshape(directions, gates, groups * lanes, hidden)
    return parts[:, :, :hidden].reshape(directions, gates * hidden, hidden)


@op("cpu.recurrence")
@dataclass(frozen=True)
class Recurrence(Op):
    """The steps of a recurrent layer whose input products are computed already, with their biases.

    gates: [T, B, D * G * H], all directions and gates of an input side by side; r: recurrent
        weights of the first
    product of a step, r2: of its second one where `gate_parts` says so; recurrent: [D, H], the bias
    inside a GRU's reset; lens, h0, c0, p as the layer's -> the layer's results. With layout 1 the
    gates are [B, T, D * G * H].

    Weights are [D, ceil(H / lanes), H, gates, lanes]: for `lanes` hidden units all gates of the
    product side by side, units beyond the last are zeros.

    Attributes:
        layer: what is computed.
    """

    operands = ("gates", "r", "r2?", "recurrent?", "lens?", "h0?", "c0?", "p?")
    layer: Layer

    def infer(  # noqa: D102, PLR0913, PLR0917
        self,
        gates: TensorType,
        r: TensorType,
        r2: TensorType | None = None,
        recurrent: TensorType | None = None,
        lens: TensorType | None = None,
        h0: TensorType | None = None,
        c0: TensorType | None = None,
        p: TensorType | None = None,
    ) -> tuple[TensorType, ...]:
        layer, hidden = self.layer, self.layer.hidden
        directions, width = layer.directions, layer.gates * layer.hidden
        parts = gate_parts(layer)
        for panels, count in zip((r, r2), (*parts, 0), strict=False):
            if count and (
                panels is None
                or panels.shape[2:4] != (hidden, count)
                or panels.shape[0] != directions
            ):
                raise TypeRuleError(
                    f"{panels} are not the packed weights of {count} gates of {hidden} hidden units"
                )
        if gates.rank != 3 or gates.shape[2] != directions * width:
            raise TypeRuleError(
                f"the gates must have {directions} * {width} columns, found {gates}"
            )
        square: tuple[Dim, ...] = (directions, width, width)
        x, w = gates.with_shape((*gates.shape[:2], width)), gates.with_shape(square)
        unpacked = gates.with_shape((directions, width, hidden))
        bias = None if recurrent is None else gates.with_shape((directions, 2 * width))
        if isinstance(layer, LSTM):
            return layer.infer(x, w, unpacked, bias, lens, h0, c0, p)
        return layer.infer(x, w, unpacked, bias, lens, h0)

    def reference(  # noqa: D102, PLR0913, PLR0917
        self,
        gates: Array,
        r: Array,
        r2: Array | None = None,
        recurrent: Array | None = None,
        lens: Array | None = None,
        h0: Array | None = None,
        c0: Array | None = None,
        p: Array | None = None,
    ) -> tuple[Array, ...]:
        layer = self.layer
        width = layer.gates * layer.hidden
        weights = _unpacked(r)
        if r2 is not None:
            weights = np.concatenate([weights, _unpacked(r2)], axis=1)
        bias = np.zeros((layer.directions, 2 * width), gates.dtype)
        if recurrent is not None:
            bias[:, -layer.hidden :] = recurrent
        found: list[tuple[Array, ...]] = []
        for index in range(layer.directions):
            # The layer itself, with the identity as input weights.
            one = slice(index, index + 1)
            x = gates[..., index * width : (index + 1) * width]
            begin = [
                None if s is None else (s[:, one] if layer.layout else s[one]) for s in (h0, c0)
            ]
            states = (
                [*begin, None if p is None else p[one]] if isinstance(layer, LSTM) else begin[:1]
            )
            single = one_direction(layer, index)
            identity = np.eye(width, dtype=gates.dtype)[None]
            found.append(single.reference(x, identity, weights[one], bias[one], lens, *states))
        axes = (2, 1, 1) if layer.layout else (1, 0, 0)
        return tuple(
            np.concatenate(parts, axis)
            for parts, axis in zip(zip(*found, strict=True), axes, strict=False)
        )

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        del results
        return operands[0].elements * self.layer.hidden * 2

    def may_fail(self, *types: TensorType | None) -> bool:  # noqa: D102
        return len(types) > 4 and types[4] is not None


def one_direction(layer: Layer, index: int) -> Layer:
    """Return the layer of a single direction of a layer."""
    count = len(layer.defaults)

    def part(items: tuple[object, ...]) -> tuple[object, ...]:
        return items[index * count : (index + 1) * count]

    backward = layer.direction == "reverse" or index == 1
    return replace(
        layer,
        direction="reverse" if backward else "forward",
        activations=part(layer.activations),
        alphas=part(layer.alphas),
        betas=part(layer.betas),
    )
