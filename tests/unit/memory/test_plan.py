# SPDX-License-Identifier: Apache-2.0
"""Plans of chains, loops, branches and random programs, run on bytes that know their owner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.kernel.program import Slot, SlotKind
from rlx.memory import plan as plan_module
from rlx.memory.check import check_plan
from rlx.memory.plan import ALIGNMENT, plan_memory

_SEEDS = range(40)


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("reuse", [True, False])
def test_random_programs_never_read_foreign_bytes(seed: int, reuse: bool, programs: Any) -> None:
    builder = programs.build(seed)
    builder.block([], 30)
    program = builder.program
    plan = plan_memory(program, {}, reuse=reuse)
    check_plan(program, plan)
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets.values())
    assert all(plan.offsets[s] + plan.sizes[s] <= plan.arena for s in plan.offsets)
    assert plan.arena >= plan.lower_bound
    for turn in range(4):
        conditions = [bool(b) for b in np.random.default_rng(turn).integers(0, 2, 50)]
        assert programs.run(program, plan, conditions) > 0


@pytest.mark.parametrize("seed", _SEEDS)
def test_take_over_happens_only_where_declared(seed: int, programs: Any) -> None:
    builder = programs.build(seed)
    builder.block([], 30)
    plan = plan_memory(builder.program, {})
    declared = {pair for t in builder.program.thunks for pair in t.inplace}
    assert {(operand, result) for result, operand in plan.reused.items()} <= declared
    for result, operand in plan.reused.items():
        assert plan.offsets[result] == plan.offsets[operand]
        assert plan.sizes[result] == plan.sizes[operand]


def test_random_programs_do_take_over(programs: Any) -> None:
    taken = 0
    for seed in _SEEDS:
        builder = programs.build(seed)
        builder.block([], 30)
        taken += len(plan_memory(builder.program, {}).reused)
    assert taken > 20


@pytest.mark.parametrize("seed", range(10))
def test_chains_meet_the_lower_bound(seed: int, programs: Any) -> None:
    sizes = [int(n) for n in np.random.default_rng(seed).integers(1, 5000, 60)]
    builder = programs.build()
    slots = [builder.slot(n) for n in sizes]
    builder.call([], slots[:1])
    for a, b in pairwise(slots):
        builder.call([a], [b])
    builder.call(slots[-1:], [])
    plan = plan_memory(builder.program, {})
    padded = [-(-n // ALIGNMENT) * ALIGNMENT for n in sizes]
    assert plan.lower_bound == max(a + b for a, b in pairwise(padded))
    assert plan.arena <= 1.05 * plan.lower_bound
    programs.run(builder.program, plan, [])


def test_a_chain_in_place_needs_one_buffer(programs: Any) -> None:
    builder = programs.build()
    slots = [builder.slot(640) for _ in range(9)]
    builder.call([], slots[:1])
    for a, b in pairwise(slots):
        builder.call([a], [b], inplace=[(a, b)])
    plan = plan_memory(builder.program, {})
    assert plan.arena == plan.lower_bound == 640
    assert plan.reused == dict(zip(slots[1:], slots[:-1], strict=True))
    apart = plan_memory(builder.program, {}, reuse=False)
    assert apart.arena == 9 * 640
    assert not apart.reused
    assert sorted(apart.offsets.values()) == [640 * i for i in range(9)]


def test_an_operand_that_is_read_later_is_not_taken_over(programs: Any) -> None:
    builder = programs.build()
    a, b = builder.slot(64), builder.slot(64)
    builder.call([], [a])
    builder.call([a], [b], inplace=[(a, b)])
    builder.call([a, b], [])
    plan = plan_memory(builder.program, {})
    assert not plan.reused
    assert plan.arena == 128


def test_a_smaller_operand_and_an_input_are_not_taken_over(programs: Any) -> None:
    builder = programs.build()
    builder.program.slots.append(Slot(SlotKind.INPUT, 128))
    a, b, c = builder.slot(64), builder.slot(128), builder.slot(128)
    builder.call([], [a])
    builder.call([a], [b], inplace=[(a, b)])
    builder.call([0, b], [c], inplace=[(0, c)])
    plan = plan_memory(builder.program, {})
    assert not plan.reused
    assert set(plan.offsets) == {a, b, c}


def test_what_a_loop_reads_lives_until_the_loop_ends(programs: Any) -> None:
    builder = programs.build()
    outer, inner, late = builder.slot(64), builder.slot(64), builder.slot(64)
    builder.call([], [outer])
    loop = builder.begin_loop(3)
    builder.call([outer], [inner], inplace=[(outer, inner)])
    builder.call([inner], [late])
    builder.end_loop(loop)
    plan = plan_memory(builder.program, {})
    first, last = builder.program.loops[0]
    assert (plan.intervals[outer].first, plan.intervals[outer].last) == (0, last)
    assert first < plan.intervals[inner].first
    assert plan.intervals[inner].last < last
    assert outer not in plan.reused.values()
    programs.run(builder.program, plan, [])


def test_a_view_keeps_what_it_points_into_alive(programs: Any) -> None:
    builder = programs.build()
    a, b = builder.slot(64), builder.slot(64)
    builder.call([], [a])
    view = builder.view(builder.view(a))
    builder.call([], [b])
    builder.call([view, b], [])
    plan = plan_memory(builder.program, {})
    assert plan.intervals[a].last == builder.position - 1
    assert plan.arena == 128


def test_arms_of_a_branch_share_bytes(programs: Any) -> None:
    builder = programs.build()
    condition, result = builder.slot(64), builder.slot(64)
    builder.call([], [condition])
    arms = [builder.slot(6400), builder.slot(6400)]
    for slot in arms:
        builder.call([], [slot])
        builder.call([slot], [result])
    builder.call([result], [])
    plan = plan_memory(builder.program, {})
    assert plan.offsets[arms[0]] == plan.offsets[arms[1]]
    assert plan.arena == 64 + 6400


def test_extents_are_planned_at_their_upper_bounds(programs: Any) -> None:
    builder = programs.build()
    n = symbol("n")
    builder.program.slots.append(Slot(SlotKind.ARENA, n * DType.F32.itemsize))
    builder.program.slots.append(Slot(SlotKind.ARENA, n * 2 + 1))
    builder.call([], [0])
    builder.call([0], [1])
    builder.program.thunks[1].scratch = n * 8
    plan = plan_memory(builder.program, {"n": 100})
    assert plan.sizes == {0: 400, 1: 201}
    assert plan.scratch == 800
    assert plan.arena == 448 + 256


def test_a_program_without_arena_slots(programs: Any) -> None:
    plan = plan_memory(programs.build().program, {})
    assert (plan.arena, plan.lower_bound, plan.scratch, plan.offsets) == (0, 0, 0, {})


@pytest.mark.parametrize("searched", [True, False])
def test_the_search_for_a_better_plan_is_bounded(
    programs: Any, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    """However far the lower bound is out of reach: a number of placements for each buffer, and a budget for all.

    Where the budget is for a few moves only there is no search.
    """
    builder = programs.build(3)
    builder.block([], 400)
    placed: list[int] = []
    place = plan_module._place  # pyright: ignore[reportPrivateUsage]

    def counted(ordered: Sequence[Any], *rest: int) -> int:
        placed.append(len(ordered))
        return place(ordered, *rest)

    monkeypatch.setattr(plan_module, "_place", counted)
    monkeypatch.setattr(plan_module, "_GOOD_ENOUGH", 0)
    monkeypatch.setattr(plan_module, "_SEARCH_PLACEMENTS", 10_000)
    monkeypatch.setattr(plan_module, "_LEAST_MOVES", 1 if searched else 1000)
    plan = plan_memory(builder.program, {})
    check_plan(builder.program, plan)
    buffers = placed[0]
    assert buffers > 100
    least, most = (10_000 - buffers, 10_000 + 6 * buffers) if searched else (0, 6 * buffers)
    assert least < sum(placed) <= most
