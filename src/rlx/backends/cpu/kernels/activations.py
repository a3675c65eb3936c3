# SPDX-License-Identifier: Apache-2.0
"""The activation functions of recurrent layers as vector code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.backends.cpu import vmath
from rlx.backends.cpu.builder import Function, Value

__all__ = ["Activation"]

_Emit = Callable[[Function, Value, float, float], Value]


def _relu(f: Function, x: Value, _a: float, _b: float) -> Value:
    return f.fmax_nan(x, 0.0)


def _softplus(f: Function, x: Value, _a: float, _b: float) -> Value:
    return f.fmax_nan(x, 0.0) + vmath.log1p(f, vmath.exp(f, -f.abs(x)))


_EMIT: dict[str, _Emit] = {
    "sigmoid": lambda f, x, _a, _b: vmath.sigmoid(f, x),
    "tanh": lambda f, x, _a, _b: vmath.tanh(f, x),
    "relu": _relu,
    "affine": lambda _f, x, a, b: x * a + b,
    "leakyrelu": lambda f, x, a, _b: f.select(x >= 0.0, x, x * a),
    "thresholdedrelu": lambda f, x, a, _b: f.select((x > a) | x.is_nan(), x, 0.0),
    "scaledtanh": lambda f, x, a, b: vmath.tanh(f, x * b) * a,
    "hardsigmoid": lambda f, x, a, b: f.fmin_nan(f.fmax_nan(x * a + b, 0.0), 1.0),
    "elu": lambda f, x, a, _b: f.select(x >= 0.0, x, vmath.expm1(f, x) * a),
    "softsign": lambda f, x, _a, _b: x / (f.abs(x) + 1.0),
    "softplus": _softplus,
}


@dataclass(frozen=True)
class Activation:
    """One activation function of `rlx.ops.rnn.ACTIVATIONS` with its parameters.

    Attributes:
        name: which function.
        alpha: its first parameter.
        beta: its second parameter.
        clip: x is clipped to [-clip, clip] before; None for no clipping.
    """

    name: str
    alpha: float
    beta: float
    clip: float | None

    def emit(self, f: Function, x: Value) -> Value:
        """Return the function of every lane."""
        if self.clip is not None:
            x = f.fmin_nan(f.fmax_nan(x, -self.clip), self.clip)
        return _EMIT[self.name](f, x, self.alpha, self.beta)
