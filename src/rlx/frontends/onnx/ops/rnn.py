# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers."""

from __future__ import annotations

from typing import Any

from rlx.base.dtypes import DType
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.rnn import GRU, LSTM, RNN
from rlx.ops.spec import emit

_COMMON = "activation_alpha activation_beta activations clip direction hidden_size layout"


def _attributes(call: Call, defaults: tuple[str, ...]) -> dict[str, Any]:
    """Return what the three layers share."""
    direction = call.get_choice("direction", ("forward", "reverse", "bidirectional"), "forward")
    count = 2 if direction == "bidirectional" else 1
    activations = call.get_strings("activations", defaults * count)
    if len(activations) != len(defaults) * count:
        raise call.wrong(
            f"{len(activations)} activations are named; {direction} needs {len(defaults) * count}"
        )
    for name in ("activation_alpha", "activation_beta"):
        if call.has(name) and call.get_floats(name):
            raise call.refuse(f"attribute {name!r}: activations with parameters of their own")
    return {
        "hidden": call.get_int("hidden_size", int(_hidden(call))),
        "direction": direction,
        "activations": tuple(name.lower() for name in activations),
        "clip": call.get_float("clip") if call.has("clip") else None,
        "layout": call.get_int("layout", 0),
    }


def _hidden(call: Call) -> int:
    extent = call.type_of(2).shape[-1]
    if not isinstance(extent, int):
        raise call.refuse("the recurrent weights have a symbolic extent")
    return extent


def _lengths(call: Call) -> Value | None:
    lengths = call.maybe(4)
    return (
        lengths
        if lengths is None or lengths.type.dtype is DType.I32
        else ew.cast(lengths, DType.I32)
    )


@onnx_op("LSTM", _COMMON + " input_forget", outputs=3)
def _lstm(call: Call) -> Mapped:
    common = _attributes(call, ("Sigmoid", "Tanh", "Tanh"))
    op = LSTM(**common, input_forget=call.get_flag("input_forget"))
    x, w, r = call.value(0), call.value(1), call.value(2)
    rest = (call.maybe(i) for i in range(5, 8))
    return emit(op, x, w, r, call.maybe(3), _lengths(call), *rest)


@onnx_op("GRU", _COMMON + " linear_before_reset", outputs=2)
def _gru(call: Call) -> Mapped:
    common = _attributes(call, ("Sigmoid", "Tanh"))
    op = GRU(**common, linear_before_reset=call.get_flag("linear_before_reset"))
    return emit(
        op,
        call.value(0),
        call.value(1),
        call.value(2),
        call.maybe(3),
        _lengths(call),
        call.maybe(5),
    )


@onnx_op("RNN", _COMMON, outputs=2)
def _rnn(call: Call) -> Mapped:
    op = RNN(**_attributes(call, ("Tanh",)))
    return emit(
        op,
        call.value(0),
        call.value(1),
        call.value(2),
        call.maybe(3),
        _lengths(call),
        call.maybe(5),
    )
