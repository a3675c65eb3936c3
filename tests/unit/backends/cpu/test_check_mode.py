# SPDX-License-Identifier: Apache-2.0
"""RLX_CHECK=1: what no value may need is destroyed as it dies, so faults of a plan show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu import program as module
from rlx.base.config import override
from rlx.base.errors import PassError
from rlx.base.numeric import Array
from rlx.kernel.program import Program
from rlx.memory import check
from rlx.memory.plan import Plan, plan_memory
from rlx.ops.norm import softmax

_X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def _chain() -> rlx.Graph:
    """Products that use the first of them late: several slots live at once."""
    with rlx.Graph("chain") as g:
        x = g.input("x", [8, 8])
        w = g.param("w", np.eye(8, dtype=np.float32) * 2)
        first = g.name("first", x @ w)
        second = g.name("second", softmax(first @ w))
        third = g.name("third", second @ w)
        g.output("y", (third @ w) @ (first @ w))
    return g


def _run(graph: rlx.Graph) -> Array:
    with override(RLX_CACHE="off"), rlx.compile(graph, threads=1) as run:
        return run(_X)


def _expected() -> Array:
    first = 2 * _X
    e = np.exp(2 * first - (2 * first).max(-1, keepdims=True))
    return (4 * e / e.sum(-1, keepdims=True)) @ (2 * first)


def test_a_right_program_gives_the_same_bits() -> None:
    plain = _run(_chain())
    with override(RLX_CHECK=True):
        assert _run(_chain()).tobytes() == plain.tobytes()
    np.testing.assert_allclose(plain, _expected(), rtol=1e-5)


def _inject(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Program, Plan], None], *, blind: bool
) -> None:
    """Spoil every plan; `blind` also takes the independent check away."""

    def spoiled(program: Program, uppers: Mapping[str, int], **kwargs: Any) -> Plan:
        plan = plan_memory(program, uppers, **kwargs)
        fault(program, plan)
        return plan

    monkeypatch.setattr(module, "plan_memory", spoiled)
    if blind:

        def nothing(program: Program, plan: Plan) -> None:
            del program, plan

        monkeypatch.setattr(check, "check_plan", nothing)


def _longest(plan: Plan) -> int:
    return max(plan.intervals, key=lambda s: plan.intervals[s].last - plan.intervals[s].first)


def _die_early(program: Program, plan: Plan) -> None:
    """The plan believes that the slot that is needed longest is dead at once."""
    interval = plan.intervals[_longest(plan)]
    assert interval.last > interval.first + 1
    interval.last = interval.first


def _overlap(program: Program, plan: Plan) -> None:
    """The slot that is needed longest shares its bytes with one that lives and dies in between."""
    slot = _longest(plan)
    span = plan.intervals[slot]
    inner = next(
        s
        for s, i in plan.intervals.items()
        if s != slot and span.first < i.first <= i.last < span.last
    )
    plan.offsets[inner] = plan.offsets[slot]


@pytest.mark.parametrize("fault", [_die_early, _overlap])
def test_a_value_that_dies_too_early_shows_as_nan(
    fault: Callable[[Program, Plan], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _inject(monkeypatch, fault, blind=True)
    assert np.isfinite(_run(_chain())).all()  # without the knob nothing shows
    with override(RLX_CHECK=True):
        assert np.isnan(_run(_chain())).any()


def test_the_independent_check_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _inject(monkeypatch, _overlap, blind=False)
    with override(RLX_CHECK=True), pytest.raises(PassError, match="memory plan"):
        _run(_chain())


def test_taps_see_values_before_they_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    with override(RLX_CACHE="off", RLX_CHECK=True), rlx.compile(_chain(), threads=1) as run:
        seen = run.tap(["first", "third"], {"x": _X})
        np.testing.assert_allclose(seen["first"], 2 * _X, rtol=1e-6)
        assert np.isfinite(seen["third"]).all()
        np.testing.assert_allclose(run(_X), _expected(), rtol=1e-5)
