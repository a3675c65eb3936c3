# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from rlx.memory.deaths import deaths
from rlx.memory.plan import plan_memory


def test_slots_die_behind_their_last_reader(programs: Any) -> None:
    builder = programs.build()
    a, b, c = builder.slot(100), builder.slot(128), builder.slot(64)
    builder.call([], [a])
    builder.call([a], [b])
    builder.call([a, b], [c])
    builder.call([c], [])
    plan = plan_memory(builder.program, {}, reuse=False)
    where = plan.offsets
    assert deaths(builder.program, plan) == {
        2: [(where[a], 100), (where[b], 128)],
        3: [(where[c], 64)],
    }


def test_what_is_taken_over_in_place_lives_on(programs: Any) -> None:
    builder = programs.build()
    a, b = builder.slot(128), builder.slot(128)
    builder.call([], [a])
    builder.call([a], [b])
    builder.program.thunks[1].inplace = ((a, b),)
    builder.call([b], [])
    plan = plan_memory(builder.program, {})
    assert plan.reused == {b: a}
    assert deaths(builder.program, plan) == {2: [(plan.offsets[b], 128)]}


def test_results_that_nobody_reads_die_at_once(programs: Any) -> None:
    builder = programs.build()
    a = builder.slot(64)
    builder.call([], [a])
    builder.call([], [])
    plan = plan_memory(builder.program, {})
    assert deaths(builder.program, plan) == {0: [(plan.offsets[a], 64)]}
