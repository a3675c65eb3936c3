# SPDX-License-Identifier: Apache-2.0
"""The checker accepts what the planner makes and finds faults that are planted in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.errors import PassError
from rlx.memory.check import check_plan
from rlx.memory.plan import plan_memory


def _three(programs: Any) -> Any:
    """Return a program in which slots 0 and 1 are live together and 2 follows."""
    builder = programs.build()
    a, b, c = (builder.slot(128) for _ in range(3))
    builder.call([], [a])
    builder.call([], [b])
    builder.call([a, b], [c])
    builder.call([c], [])
    return builder.program


@pytest.mark.parametrize("shift", [0, 64, -64])
def test_an_overlap_of_live_slots_is_found(shift: int, programs: Any) -> None:
    program = _three(programs)
    plan = plan_memory(program, {})
    plan.offsets = {0: 64, 1: 64 + shift, 2: 512}
    with pytest.raises(PassError, match="reads slot 0, which thunk 1 has overwritten"):
        check_plan(program, plan)


def test_slots_side_by_side_are_accepted(programs: Any) -> None:
    program = _three(programs)
    plan = plan_memory(program, {})
    plan.offsets = {0: 0, 1: 128, 2: 256}
    check_plan(program, plan)


def test_a_take_over_needs_a_declaration_and_the_same_offset(programs: Any) -> None:
    program = _three(programs)
    plan = plan_memory(program, {})
    plan.offsets = {0: 0, 1: 128, 2: 128}
    with pytest.raises(PassError, match="writes slot 2 over its operand in slot 1"):
        check_plan(program, plan)
    program.thunks[2].inplace = ((1, 2),)
    check_plan(program, plan)
    plan.offsets[2] = 192
    with pytest.raises(PassError, match="writes slot 2 over its operand in slot 1"):
        check_plan(program, plan)


def test_results_of_one_thunk_may_not_overlap(programs: Any) -> None:
    builder = programs.build()
    a, b = builder.slot(64), builder.slot(64)
    builder.call([], [a, b])
    builder.call([b], [])
    plan = plan_memory(builder.program, {})
    check_plan(builder.program, plan)
    plan.offsets = {a: 0, b: 0}
    with pytest.raises(PassError, match="slots 0 and 1"):
        check_plan(builder.program, plan)


def test_a_read_before_any_write_is_found(programs: Any) -> None:
    builder = programs.build()
    a = builder.slot(64)
    builder.call([a], [])
    with pytest.raises(PassError, match="before it is written"):
        check_plan(builder.program, plan_memory(builder.program, {}))


def test_the_second_iteration_is_replayed(programs: Any) -> None:
    builder = programs.build()
    outer, inner = builder.slot(64), builder.slot(64)
    builder.call([], [outer])
    loop = builder.begin_loop(2)
    builder.call([outer], [])
    builder.call([], [inner])
    builder.end_loop(loop)
    plan = plan_memory(builder.program, {})
    check_plan(builder.program, plan)
    plan.offsets = {outer: 0, inner: 0}
    with pytest.raises(PassError, match="reads slot 0"):
        check_plan(builder.program, plan)


def test_an_overlap_behind_a_view_is_found(programs: Any) -> None:
    builder = programs.build()
    a, b = builder.slot(64), builder.slot(64)
    builder.call([], [a])
    view = builder.view(a)
    builder.call([], [b])
    builder.call([view], [])
    plan = plan_memory(builder.program, {})
    plan.offsets = {a: 0, b: 0}
    with pytest.raises(PassError, match="reads slot 0"):
        check_plan(builder.program, plan)


@pytest.mark.parametrize("seed", range(20))
def test_faults_that_show_when_bytes_are_run_are_found(seed: int, programs: Any) -> None:
    """Every plan that a straight run shows to be wrong is refused, and every other one accepted."""
    builder = programs.build(seed)
    builder.block([], 25, depth=2)
    program = builder.program
    plan = plan_memory(program, {})
    slots = list(plan.offsets)
    chance = np.random.default_rng(seed)
    refused = 0
    for _ in range(20):
        damaged = plan_memory(program, {})
        moved = int(chance.choice(slots))
        damaged.offsets[moved] = damaged.offsets[int(chance.choice(slots))]
        damaged.arena = max(damaged.offsets[s] + damaged.sizes[s] for s in slots)
        try:
            programs.run(program, damaged, [])
        except AssertionError:
            refused += 1
            with pytest.raises(PassError):
                check_plan(program, damaged)
        else:
            check_plan(program, damaged)
    assert refused
