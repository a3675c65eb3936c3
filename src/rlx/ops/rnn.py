# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: LSTM, GRU and the plain one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import FLOATS, DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType, require_equal
from rlx.expr.table import TABLE
from rlx.ir.op import Op
from rlx.ops.spec import Operand, Sample, op

__all__ = ["ACTIVATIONS", "GRU", "LSTM", "RNN"]

Direction = Literal["forward", "reverse", "bidirectional"]
_Function = Callable[[Array], Array]


def _where(condition: Array, a: Array, b: Array | float) -> Array:
    return np.where(condition, a, b).astype(a.dtype)


def _number(value: float, x: Array) -> Any:
    return np.asarray(value, x.dtype)[()]


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


ACTIVATIONS: dict[str, tuple[Callable[[Array, float, float], Array], float, float]] = {
    "sigmoid": (lambda x, _a, _b: TABLE["sigmoid"].meaning(x), 0.0, 0.0),
    "tanh": (lambda x, _a, _b: TABLE["tanh"].meaning(x), 0.0, 0.0),
    "relu": (lambda x, _a, _b: np.maximum(x, 0), 0.0, 0.0),
    "affine": (lambda x, a, b: _number(a, x) * x + _number(b, x), 1.0, 0.0),
    "leakyrelu": (lambda x, a, _b: _where(x >= 0, x, _number(a, x) * x), 0.01, 0.0),
    "thresholdedrelu": (lambda x, a, _b: _where((x > a) | np.isnan(x), x, 0), 1.0, 0.0),
    "scaledtanh": (
        lambda x, a, b: _number(a, x) * TABLE["tanh"].meaning(_number(b, x) * x),
        1.0,
        1.0,
    ),
    "hardsigmoid": (lambda x, a, b: np.clip(_number(a, x) * x + _number(b, x), 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, _b: _where(x >= 0, x, _number(a, x) * np.expm1(x)), 1.0, 0.0),
    "softsign": (lambda x, _a, _b: x / (1 + np.abs(x)), 0.0, 0.0),
    "softplus": (lambda x, _a, _b: _softplus(x), 0.0, 0.0),
}
"""Name -> (function of x, alpha and beta; default alpha; default beta).

affine: alpha x + beta; leakyrelu, elu, thresholdedrelu, hardsigmoid as the operators; scaledtanh:
    alpha tanh(beta x).
"""


def _layer(
    gates: int, *, time: int = 4, batch: int = 3, directions: int = 1, first: bool = False
) -> list[Operand | None]:
    """Return x, w, r, b for input size 5 and hidden size 6."""
    lead = (batch, time) if first else (time, batch)
    return [
        Operand((*lead, 5)),
        Operand((directions, gates * 6, 5), fill="unit"),
        Operand((directions, gates * 6, 6), fill="unit"),
        Operand((directions, 2 * gates * 6)),
    ]


def _lens(batch: int = 3) -> Operand:
    return Operand((batch,), DType.I32, "bool")  # lengths of 0 and 1 fit every sample


def _samples(gates: int, states: int, extra: int) -> tuple[Sample, ...]:
    """Return the cases that the layers share; `states` and `extra` count the last operands."""
    none: tuple[Operand | None, ...] = (None,) * (1 + states + extra)
    state = (Operand((1, 3, 6)),) * states
    both = (Operand((2, 3, 6)),) * states
    first = (Operand((3, 1, 6)),) * states
    rest: tuple[Operand | None, ...] = (None,) * extra
    return (
        Sample((*_layer(gates), *none), {"hidden": 6}),
        Sample((*_layer(gates)[:3], None, *none), {"hidden": 6, "direction": "reverse"}),
        Sample(
            (*_layer(gates, directions=2), None, *both, *rest),
            {"hidden": 6, "direction": "bidirectional"},
        ),
        Sample((*_layer(gates, first=True), None, *first, *rest), {"hidden": 6, "layout": 1}),
        Sample((*_layer(gates), None, *state, *rest), {"hidden": 6, "clip": 0.5}),
        Sample((*_layer(gates, batch=1, time=1), *none), {"hidden": 6}),
        Sample((*_layer(gates, time=0), *none), {"hidden": 6}),
        Sample((*_layer(gates, batch=0), *none), {"hidden": 6}),
        Sample((*_layer(gates), *none), {"hidden": 7}, error="hidden"),
    )


@dataclass(frozen=True)
class _Recurrent(Op):
    """What the layers share.

    Attributes:
        hidden: number of hidden units H.
        direction: `forward`, `reverse` or `bidirectional`; D is 2 for the last and else 1.
        activations: names of `ACTIVATIONS`, as many per direction as the layer has functions; ()
            for its defaults.
        clip: what activations are applied to is clipped to [-clip, clip]; None for no clipping.
        layout: 0 for time first, 1 for batch first.
        alphas: alpha per activation, None for its default; () for all defaults.
        betas: beta per activation.
    """

    precision_class = OpClass.COMPUTE

    gates: ClassVar[int]
    states: ClassVar[int]
    defaults: ClassVar[tuple[str, ...]]

    hidden: int
    direction: Direction = "forward"
    activations: tuple[str, ...] = ()
    clip: float | None = None
    layout: int = 0
    alphas: tuple[float | None, ...] = ()
    betas: tuple[float | None, ...] = ()

    @property
    def directions(self) -> int:
        """The number of directions."""
        return 2 if self.direction == "bidirectional" else 1

    def functions(self, direction: int) -> tuple[_Function, ...]:
        """Return the activations of a direction, applied after clipping."""
        count = len(self.defaults)
        names = self.activations or self.defaults * self.directions
        return tuple(
            self._function(names[i], i) for i in range(direction * count, (direction + 1) * count)
        )

    def _function(self, name: str, index: int) -> _Function:
        function, alpha, beta = ACTIVATIONS[name]
        given_alpha = self.alphas[index] if self.alphas else None
        given_beta = self.betas[index] if self.betas else None
        a = alpha if given_alpha is None else given_alpha
        b = beta if given_beta is None else given_beta

        def apply(x: Array) -> Array:
            clipped = x if self.clip is None else np.clip(x, -self.clip, self.clip)
            return function(clipped, a, b)

        return apply

    def _check_attributes(self) -> None:
        if self.direction not in ("forward", "reverse", "bidirectional"):
            raise TypeRuleError(
                f"direction {self.direction!r} is none of forward, reverse, bidirectional"
            )
        if self.layout not in (0, 1):
            raise TypeRuleError(f"layout {self.layout} is neither 0 nor 1")
        if self.clip is not None and not self.clip > 0:
            raise TypeRuleError(f"clip is {self.clip}; it must be positive")
        wanted = len(self.defaults) * self.directions
        for name, given in (
            ("activations", self.activations),
            ("alphas", self.alphas),
            ("betas", self.betas),
        ):
            if given and len(given) != wanted:
                raise TypeRuleError(
                    f"{name} has {len(given)} entries; {self.direction} needs {wanted}"
                )
        for name in self.activations:
            if name not in ACTIVATIONS:
                raise TypeRuleError(f"activation {name!r} is none of {', '.join(ACTIVATIONS)}")

    def _infer(
        self,
        x: TensorType,
        w: TensorType,
        r: TensorType,
        b: TensorType | None,
        lens: TensorType | None,
        states: tuple[TensorType | None, ...],
    ) -> tuple[TensorType, ...]:
        self._check_attributes()
        if x.rank != 3 or x.dtype not in FLOATS:
            raise TypeRuleError(f"x must be a float of rank 3, found {x}")
        batch, time = x.shape[self.layout ^ 1], x.shape[self.layout]
        d, h, g = self.directions, self.hidden, self.gates
        state: tuple[Dim, ...] = (batch, d, h) if self.layout else (d, batch, h)
        _require(x, "w", w, (d, g * h, x.shape[2]))
        _require(x, "r", r, (d, g * h, h))
        _require(x, "b", b, (d, 2 * g * h))
        for given in states:
            _require(x, "an initial state", given, state)
        if lens is not None:
            if lens.dtype is not DType.I32 or lens.rank != 1:
                raise TypeRuleError(f"the lengths must be i32[{batch}], found {lens}")
            require_equal(lens.shape[0], batch, "the lengths and the batch")
        y = (batch, time, d, h) if self.layout else (time, d, batch, h)
        return (x.with_shape(y), *(x.with_shape(state),) * self.states)

    def may_fail(self, *types: TensorType | None) -> bool:
        """Return True with lengths: one beyond the extent of x is an error."""
        return len(types) > 4 and types[4] is not None

    @abstractmethod
    def _step(
        self,
        direction: int,
        xw: Array,
        states: tuple[Array, ...],
        r: Array,
        b: Array,
        p: Array | None,
    ) -> tuple[Array, ...]:
        """Return the next states of a batch; the first one is the output.

        Args:
            direction: whose activations to use.
            xw: the input times the input weights, [B, gates * H].
            states: the states [B, H].
            r: recurrent weights, [gates * H, H].
            b: input biases, then recurrent biases, [2 * gates * H].
            p: peephole weights, if the layer has any.
        """

    def _run(
        self,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None,
        lens: Array | None,
        states: tuple[Array | None, ...],
        p: Array | None = None,
    ) -> tuple[Array, ...]:
        x = x.swapaxes(0, 1) if self.layout else x
        time, batch = x.shape[:2]
        d, h = self.directions, self.hidden
        lengths = np.full(batch, time) if lens is None else _checked_lengths(lens, time)
        begin = [
            np.zeros((d, batch, h), x.dtype)
            if s is None
            else (s.swapaxes(0, 1) if self.layout else s)
            for s in states
        ]
        biases = np.zeros((d, 2 * self.gates * h), x.dtype) if b is None else b
        y = np.zeros((time, d, batch, h), x.dtype)
        ends = [np.empty((d, batch, h), x.dtype) for _ in states]
        with np.errstate(all="ignore"):
            for index in range(d):
                weights = (w[index], r[index], biases[index], None if p is None else p[index])
                final = self._direction(
                    index, x, weights, lengths, tuple(s[index] for s in begin), y[:, index]
                )
                for end, value in zip(ends, final, strict=True):
                    end[index] = value
        if self.layout:
            y, ends = y.transpose(2, 0, 1, 3), [e.swapaxes(0, 1) for e in ends]
        return tuple(np.ascontiguousarray(a) for a in (y, *ends))

    def _direction(
        self,
        index: int,
        x: Array,
        weights: tuple[Array, Array, Array, Array | None],
        lengths: Array,
        states: tuple[Array, ...],
        y: Array,
    ) -> tuple[Array, ...]:
        """Fill y [T, B, H] of one direction; return the states after each sequence's last step."""
        w, r, b, p = weights
        backward = self.direction == "reverse" or index == 1
        time, batch, size = x.shape
        xw = np.matmul(x.reshape(time * batch, size), w.T).reshape(time, batch, w.shape[0])
        # A reversed sequence starts at its own last element: the ones behind it leave the state as
        # it is.
        for t in reversed(range(time)) if backward else range(time):
            live = (t < lengths)[:, None]
            found = self._step(index, xw[t], states, r, b, p)
            y[t] = np.where(live, found[0], 0)
            states = tuple(np.where(live, new, old) for new, old in zip(found, states, strict=True))
        return states

    def _parts(self, x: Array) -> tuple[Array, ...]:
        """Return the gates of [..., gates * H]."""
        return tuple(np.split(x, self.gates, axis=-1))


def _require(x: TensorType, what: str, found: TensorType | None, shape: tuple[Dim, ...]) -> None:
    if found is None:
        return
    if found.dtype is not x.dtype or found.rank != len(shape):
        raise TypeRuleError(f"{what} must be {x.with_shape(shape)}, found {found}")
    for a, b in zip(found.shape, shape, strict=True):
        require_equal(
            a, b, f"{what} {found}, which for these hidden units must be {x.with_shape(shape)}"
        )


def _checked_lengths(lens: Array, time: int) -> Array:
    wrong = (lens < 0) | (lens > time)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ExecutionError(f"the length of sequence {at} is {int(lens[at])}; x has {time} steps")
    return lens


@op("lstm")
@dataclass(frozen=True)
class LSTM(_Recurrent):
    """Long short-term memory; the gates in the order i, o, f, c.

    i = f(x Wi' + h Ri' + Pi * c + Wbi + Rbi), likewise f; g(...) for the candidate, without a
    peephole; c' = f * c + i * candidate; o = f(x Wo' + h Ro' + Po * c' + Wbo + Rbo); h' = o *
    h(c').

    x: [T, B, I], w: [D, 4H, I], r: [D, 4H, H], b: [D, 8H], lens: i32[B], h0 and c0: [D, B, H], p:
        [D, 3H] (i, o, f)
    -> (y: [T, D, B, H], h: [D, B, H], c: [D, B, H]). With layout 1: x [B, T, I], y [B, T, D, H],
    states [B, D, H]. Beyond its length a sequence gives zeros and keeps its state; a reversed one
    starts at its last element.

    Attributes:
        input_forget: the forget gate is 1 - i.
    """

    operands = ("x", "w", "r", "b?", "lens?", "h0?", "c0?", "p?")
    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2
    defaults: ClassVar[tuple[str, ...]] = ("sigmoid", "tanh", "tanh")
    input_forget: bool = False
    samples: ClassVar[tuple[Sample, ...]] = (
        *_samples(4, 2, 1),
        Sample((*_layer(4), _lens(), None, None, Operand((1, 18))), {"hidden": 6}),
        Sample((*_layer(4), None, None, None, None), {"hidden": 6, "input_forget": True}),
        Sample(
            (*_layer(4), None, None, None, None),
            {
                "hidden": 6,
                "activations": ("hardsigmoid", "scaledtanh", "softsign"),
                "alphas": (None, 1.5, None),
                "betas": (0.4, 0.5, None),
            },
        ),
    )

    def infer(  # noqa: D102, PLR0913, PLR0917
        self,
        x: TensorType,
        w: TensorType,
        r: TensorType,
        b: TensorType | None = None,
        lens: TensorType | None = None,
        h0: TensorType | None = None,
        c0: TensorType | None = None,
        p: TensorType | None = None,
    ) -> tuple[TensorType, ...]:
        _require(x, "p", p, (self.directions, 3 * self.hidden))
        return self._infer(x, w, r, b, lens, (h0, c0))

    def reference(  # noqa: D102, PLR0913, PLR0917
        self,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        lens: Array | None = None,
        h0: Array | None = None,
        c0: Array | None = None,
        p: Array | None = None,
    ) -> tuple[Array, ...]:
        return self._run(x, w, r, b, lens, (h0, c0), p)

    def _step(
        self,
        direction: int,
        xw: Array,
        states: tuple[Array, ...],
        r: Array,
        b: Array,
        p: Array | None,
    ) -> tuple[Array, ...]:
        gate, candidate, output = self.functions(direction)
        h, c = states
        half = b.shape[0] // 2
        i, o, f, g = self._parts(xw + np.matmul(h, r.T) + (b[:half] + b[half:]))
        pi, po, pf = (None, None, None) if p is None else np.split(p, 3)
        i = gate(i if pi is None else i + pi * c)
        f = 1 - i if self.input_forget else gate(f if pf is None else f + pf * c)
        c = f * c + i * candidate(g)
        o = gate(o if po is None else o + po * c)
        return o * output(c), c


@op("gru")
@dataclass(frozen=True)
class GRU(_Recurrent):
    """Gated recurrent units; the gates in the order z, r, h.

    z = f(x Wz' + h Rz' + Wbz + Rbz), likewise r; the candidate is g(x Wh' + (r * h) Rh' + Rbh +
    Wbh), or with `linear_before_reset` g(x Wh' + r * (h Rh' + Rbh) + Wbh); h' = (1 - z) * candidate
    + z * h.

    x: [T, B, I], w: [D, 3H, I], r: [D, 3H, H], b: [D, 6H], lens: i32[B], h0: [D, B, H] -> (y: [T,
        D, B, H],
    h: [D, B, H]). Layout and lengths as for `LSTM`.

    Attributes:
        linear_before_reset: where the reset gate is applied, see above.
    """

    operands = ("x", "w", "r", "b?", "lens?", "h0?")
    gates: ClassVar[int] = 3
    states: ClassVar[int] = 1
    defaults: ClassVar[tuple[str, ...]] = ("sigmoid", "tanh")
    linear_before_reset: bool = False
    samples: ClassVar[tuple[Sample, ...]] = (
        *_samples(3, 1, 0),
        Sample(
            (*_layer(3), _lens(), Operand((1, 3, 6))), {"hidden": 6, "linear_before_reset": True}
        ),
        Sample((*_layer(3), _lens(), None), {"hidden": 6, "direction": "reverse"}),
    )

    def infer(  # noqa: D102
        self,
        x: TensorType,
        w: TensorType,
        r: TensorType,
        b: TensorType | None = None,
        lens: TensorType | None = None,
        h0: TensorType | None = None,
    ) -> tuple[TensorType, ...]:
        return self._infer(x, w, r, b, lens, (h0,))

    def reference(  # noqa: D102
        self,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        lens: Array | None = None,
        h0: Array | None = None,
    ) -> tuple[Array, ...]:
        return self._run(x, w, r, b, lens, (h0,))

    def _step(
        self,
        direction: int,
        xw: Array,
        states: tuple[Array, ...],
        r: Array,
        b: Array,
        p: Array | None,
    ) -> tuple[Array, ...]:
        gate, candidate = self.functions(direction)
        (h,) = states
        size = self.hidden
        wb, rb = b[: 3 * size], b[3 * size :]
        both = slice(0, 2 * size)
        z, reset = np.split(
            gate(xw[:, both] + np.matmul(h, r[both].T) + (wb[both] + rb[both])), 2, axis=-1
        )
        last = slice(2 * size, None)
        if self.linear_before_reset:
            recurrent = reset * (np.matmul(h, r[last].T) + rb[last])
        else:
            recurrent = np.matmul(reset * h, r[last].T) + rb[last]
        new = candidate(xw[:, last] + recurrent + wb[last])
        return ((1 - z) * new + z * h,)


@op("rnn")
@dataclass(frozen=True)
class RNN(_Recurrent):
    """The plain recurrent layer: h' = f(x W' + h R' + Wb + Rb).

    x: [T, B, I], w: [D, H, I], r: [D, H, H], b: [D, 2H], lens: i32[B], h0: [D, B, H] -> (y: [T, D,
        B, H],
    h: [D, B, H]). Layout and lengths as for `LSTM`.
    """

    operands = ("x", "w", "r", "b?", "lens?", "h0?")
    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1
    defaults: ClassVar[tuple[str, ...]] = ("tanh",)
    samples: ClassVar[tuple[Sample, ...]] = (
        *_samples(1, 1, 0),
        *(
            Sample((*_layer(1), _lens(), None), {"hidden": 6, "activations": (name,)})
            for name in ("relu", "affine", "leakyrelu", "thresholdedrelu", "elu", "softplus")
        ),
    )

    def infer(  # noqa: D102
        self,
        x: TensorType,
        w: TensorType,
        r: TensorType,
        b: TensorType | None = None,
        lens: TensorType | None = None,
        h0: TensorType | None = None,
    ) -> tuple[TensorType, ...]:
        return self._infer(x, w, r, b, lens, (h0,))

    def reference(  # noqa: D102
        self,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        lens: Array | None = None,
        h0: Array | None = None,
    ) -> tuple[Array, ...]:
        return self._run(x, w, r, b, lens, (h0,))

    def _step(
        self,
        direction: int,
        xw: Array,
        states: tuple[Array, ...],
        r: Array,
        b: Array,
        p: Array | None,
    ) -> tuple[Array, ...]:
        (function,) = self.functions(direction)
        half = b.shape[0] // 2
        return (function(xw + np.matmul(states[0], r.T) + (b[:half] + b[half:])),)
