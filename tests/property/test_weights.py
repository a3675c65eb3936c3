# SPDX-License-Identifier: Apache-2.0
"""Random histories of executables that share weights: each behaves as if it had values of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array
from rlx.ops.matmul import matmul
from rlx.ops.movement import concat

_SHAPES = {"w": (16, 40), "q": (40, 16), "k": (40, 24), "s": (24,), "b": (40,)}
_X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)


def _values(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in _SHAPES.items()}


def _compile(values: dict[str, Array], device: str) -> rlx.Executable:
    """w is packed, q and k are packed together, k is scaled by s before that in one output, b is read as it is."""
    with rlx.Graph("weights") as g:
        x = g.input("x", ["N", 16])
        w, q, k, s, b = (g.param(n, values[n]) for n in _SHAPES)
        h = matmul(x, w) + b
        g.output("joined", matmul(h, concat([q, k], axis=1)))
        g.output("scaled", matmul(h, k * s))
    return rlx.compile(g, device, threads=1)


def _expected(values: dict[str, Array]) -> tuple[Array, Array]:
    w, q, k, s, b = (values[n].astype(np.float64) for n in _SHAPES)
    h = _X @ w + b
    return h @ np.concatenate([q, k], axis=1), h @ (k * s)


@dataclass
class _Held:
    """An executable and what its weights should be."""

    run: rlx.Executable
    values: dict[str, Array]

    def check(self) -> None:
        for found, expected in zip(self.run(_X), _expected(self.values), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)

    def check_bits(self, name: str) -> None:
        assert self.run.get_param(name).tobytes() == self.values[name].tobytes()


class _History:
    def __init__(self, seed: int, device: str) -> None:
        self.chance = random.Random(seed)
        self.device = device
        self.seeds = iter(range(seed * 1000, seed * 1000 + 1000))
        self.live = [self._new()]

    def _new(self) -> _Held:
        values = _values(next(self.seeds))
        return _Held(_compile(values, self.device), dict(values))

    def step(self) -> None:
        one, other = self.chance.choice(self.live), self.chance.choice(self.live)
        name = self.chance.choice(list(_SHAPES))
        match self.chance.randrange(10):
            case 0 | 1:
                one.values[name] = _values(next(self.seeds))[name]
                one.run.set_param(name, one.values[name])
            case 2:
                start = self.chance.randrange(_SHAPES[name][0])
                rows = _values(next(self.seeds))[name][start:]
                one.values[name] = np.concatenate([one.values[name][:start], rows])
                one.run.set_param_range(name, start, rows)
            case 3:
                one.run.share_weights_from(other.run)
                one.values = dict(other.values)
            case 4:
                one.run.copy_params_from(other.run)
                one.values = dict(other.values)
            case 5 if len(self.live) < 5:
                self.live.append(_Held(one.run.clone(), dict(one.values)))
            case 6 if len(self.live) < 5:
                self.live.append(self._new())
            case 7 if len(self.live) > 1:
                one.run.close()
                self.live.remove(one)
            case 8:
                one.check_bits(name)
            case _:
                one.check()

    def close(self) -> None:
        for held in self.live:
            held.check()
            for name in _SHAPES:
                held.check_bits(name)
            held.run.close()


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_executables_that_share_weights_never_see_each_others_changes(
    device: str, seed: int
) -> None:
    history = _History(seed, device)
    for _ in range(60):
        history.step()
    history.close()
