# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers against one-sequence-at-a-time loops in f64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ops.evaluate import run_op
from rlx.ops.rnn import ACTIVATIONS, GRU, LSTM, RNN

T, B, I, H = 5, 3, 4, 6  # noqa: E741


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 0.5, np.float32)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _lstm_step(x: Array, h: Array, c: Array, w: Array, r: Array, b: Array, p: Array) -> Any:
    wi, wo, wf, wc = np.split(w, 4)
    ri, ro, rf, rc = np.split(r, 4)
    bi, bo, bf, bc = np.split(b[: 4 * H] + b[4 * H :], 4)
    pi, po, pf = np.split(p, 3)
    i = _sigmoid(wi @ x + ri @ h + pi * c + bi)
    f = _sigmoid(wf @ x + rf @ h + pf * c + bf)
    c = f * c + i * np.tanh(wc @ x + rc @ h + bc)
    o = _sigmoid(wo @ x + ro @ h + po * c + bo)
    return o * np.tanh(c), c


def _gru_step(x: Array, h: Array, w: Array, r: Array, b: Array, linear: bool) -> Array:
    wz, wr, wh = np.split(w, 3)
    rz, rr, rh = np.split(r, 3)
    bz, br, bh, sz, sr, sh = np.split(b, 6)
    z = _sigmoid(wz @ x + rz @ h + bz + sz)
    gate = _sigmoid(wr @ x + rr @ h + br + sr)
    inner = gate * (rh @ h + sh) if linear else rh @ (gate * h) + sh
    return (1 - z) * np.tanh(wh @ x + inner + bh) + z * h


def _operands(gates: int, directions: int) -> list[Array]:
    return [
        _normal(T, B, I, seed=1),
        _normal(directions, gates * H, I, seed=2),
        _normal(directions, gates * H, H, seed=3),
        _normal(directions, 2 * gates * H, seed=4),
    ]


LENS = np.array([5, 2, 0], np.int32)
DIRECTIONS = ("forward", "reverse", "bidirectional")


def _steps(direction: str, index: int, length: int) -> list[int]:
    steps = list(range(length))
    return steps[::-1] if direction == "reverse" or index == 1 else steps


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lens", [None, LENS])
def test_lstm(direction: Any, lens: Array | None) -> None:
    d = 2 if direction == "bidirectional" else 1
    x, w, r, b = _operands(4, d)
    h0, c0, p = _normal(d, B, H, seed=5), _normal(d, B, H, seed=6), _normal(d, 3 * H, seed=7)
    y, yh, yc = run_op(LSTM(H, direction), [x, w, r, b, lens, h0, c0, p])
    for k, n in np.ndindex(d, B):
        h, c = h0[k, n].astype(float), c0[k, n].astype(float)
        length = T if lens is None else int(lens[n])
        for t in _steps(direction, k, length):
            h, c = _lstm_step(x[t, n].astype(float), h, c, w[k], r[k], b[k], p[k])
            np.testing.assert_allclose(y[t, k, n], h, rtol=1e-4, atol=1e-5)
        assert (y[length:, k, n] == 0).all()
        np.testing.assert_allclose(yh[k, n], h, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(yc[k, n], c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("lens", [None, LENS])
def test_gru(direction: Any, linear: bool, lens: Array | None) -> None:
    d = 2 if direction == "bidirectional" else 1
    x, w, r, b = _operands(3, d)
    h0 = _normal(d, B, H, seed=5)
    y, yh = run_op(GRU(H, direction, linear_before_reset=linear), [x, w, r, b, lens, h0])
    for k, n in np.ndindex(d, B):
        h = h0[k, n].astype(float)
        length = T if lens is None else int(lens[n])
        for t in _steps(direction, k, length):
            h = _gru_step(x[t, n].astype(float), h, w[k], r[k], b[k], linear)
            np.testing.assert_allclose(y[t, k, n], h, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(yh[k, n], h, rtol=1e-4, atol=1e-5)


def test_rnn_with_an_activation_per_direction() -> None:
    x, w, r, b = _operands(1, 2)
    op = RNN(H, "bidirectional", ("relu", "affine"), alphas=(None, 0.5), betas=(None, 0.1))
    y, yh = run_op(op, [x, w, r, b, None, None])

    def relu(v: Array) -> Array:
        return np.maximum(v, 0)

    def affine(v: Array) -> Array:
        return 0.5 * v + 0.1

    functions: list[Any] = [relu, affine]
    for k, n in np.ndindex(2, B):
        h: Any = np.zeros(H)
        for t in _steps("bidirectional", k, T):
            total: Any = w[k] @ x[t, n] + r[k] @ h + b[k, :H] + b[k, H:]
            h = functions[k](total)
            np.testing.assert_allclose(y[t, k, n], h, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(yh[k, n], h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_batch_first_is_a_transpose(kind: Any) -> None:
    x, w, r, b = _operands(kind.gates, 2)
    states = [_normal(2, B, H, seed=8 + i) for i in range(kind.states)]
    first = run_op(kind(H, "bidirectional"), [x, w, r, b, LENS, *states])
    moved = [np.ascontiguousarray(s.swapaxes(0, 1)) for s in states]
    batched = run_op(
        kind(H, "bidirectional", layout=1),
        [np.ascontiguousarray(x.swapaxes(0, 1)), w, r, b, LENS, *moved],
    )
    np.testing.assert_array_equal(batched[0], first[0].transpose(2, 0, 1, 3))
    for a, c in zip(batched[1:], first[1:], strict=True):
        np.testing.assert_array_equal(a, c.swapaxes(0, 1))


def test_clip_bounds_what_the_activations_see() -> None:
    x = np.full((1, 1, 1), 100.0, np.float32)
    w, r = np.ones((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    (y, _) = run_op(RNN(1, clip=0.5), [x, w, r, None, None, None])
    np.testing.assert_allclose(y.item(), math.tanh(0.5), rtol=1e-6)


def test_input_forget_couples_the_gates() -> None:
    x, w, r, b = _operands(4, 1)
    c0 = _normal(1, B, H, seed=9)
    op = LSTM(H, input_forget=True)
    _, _, c = run_op(op, [x[:1], w, r, b, None, None, c0, None])
    both = np.split(x[0] @ w[0].T + b[0, : 4 * H] + b[0, 4 * H :], 4, axis=1)
    i = _sigmoid(both[0])
    np.testing.assert_allclose(c[0], (1 - i) * c0[0] + i * np.tanh(both[3]), rtol=1e-4, atol=1e-5)


def test_activations() -> None:
    x = np.array([-2.0, -0.5, 0.0, 0.5, 3.0])
    want = {
        "sigmoid": 1 / (1 + np.exp(-x)),
        "tanh": np.tanh(x),
        "relu": np.maximum(x, 0),
        "affine": 2 * x + 0.5,
        "leakyrelu": np.where(x < 0, 2 * x, x),
        "thresholdedrelu": np.where(x > 2, x, 0),
        "scaledtanh": 2 * np.tanh(0.5 * x),
        "hardsigmoid": np.clip(2 * x + 0.5, 0, 1),
        "elu": np.where(x < 0, 2 * (np.exp(x) - 1), x),
        "softsign": x / (1 + np.abs(x)),
        "softplus": np.log(1 + np.exp(x)),
    }
    assert want.keys() == ACTIVATIONS.keys()
    for name, expected in want.items():
        got = ACTIVATIONS[name][0](x, 2.0, 0.5)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12, err_msg=name)
        assert np.isnan(ACTIVATIONS[name][0](np.array([np.nan]), 2.0, 0.5)).all(), name


@pytest.mark.parametrize("wrong", [-1, 6])
def test_lengths_out_of_range(wrong: int) -> None:
    x, w, r, b = _operands(1, 1)
    lens = np.array([5, wrong, 1], np.int32)
    with pytest.raises(ExecutionError, match=f"sequence 1 is {wrong}"):
        run_op(RNN(H), [x, w, r, b, lens, None])
    types = [TensorType(DType.of(a.dtype), a.shape) for a in (x, w, r, b, lens)]
    assert RNN(H).may_fail(*types)
    assert not RNN(H).may_fail(*types[:4], None)


def test_symbolic_time_and_batch() -> None:
    t, n = symbol("T"), symbol("N")
    types = [TensorType(DType.F32, s) for s in ((t, n, I), (1, 4 * H, I), (1, 4 * H, H))]
    y, h, c = LSTM(H).infer(*types)
    assert (y.shape, h.shape, c.shape) == ((t, 1, n, H), (1, n, H), (1, n, H))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (RNN(H + 1), "hidden units"),
        (RNN(H, "both"), "direction"),  # pyright: ignore[reportArgumentType]
        (RNN(H, "bidirectional"), "hidden units"),
        (RNN(H, activations=("tanh", "tanh")), "activations has 2 entries"),
        (RNN(H, activations=("swish",)), "swish"),
        (RNN(H, clip=0.0), "clip"),
        (RNN(H, layout=2), "layout"),
    ],
)
def test_refusals(op: RNN, message: str) -> None:
    x, w, r, _ = (TensorType(DType.F32, a.shape) for a in _operands(1, 1))
    with pytest.raises(TypeRuleError, match=message):
        op.infer(x, w, r)
