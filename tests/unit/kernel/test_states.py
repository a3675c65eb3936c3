# SPDX-License-Identifier: Apache-2.0
"""Next values of states are written in place exactly where the order of the thunks proves it harmless."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.backends.cpu.isa import host_isa
from rlx.backends.cpu.lowerer import CpuLowerer
from rlx.base.errors import ModelError, PassError
from rlx.ir.parse import parse_graph
from rlx.kernel.program import Program, SlotKind
from rlx.kernel.saved import DimReader, DimWriter, program_from_data, program_to_data
from rlx.kernel.schedule import schedule
from rlx.memory.check import check_plan
from rlx.memory.plan import plan_memory

Scheduled = Callable[[str], Program]


@pytest.fixture
def scheduled() -> Scheduled:
    def compile_text(text: str) -> Program:
        graph = parse_graph(text)
        with graph.facts.active():
            program = schedule(graph, CpuLowerer(host_isa(), "allow"))
        check_plan(program, plan_memory(program, {"N": 7, "B": 3}))
        return program

    return compile_text


def _in_place(program: Program) -> list[bool]:
    return [s.following != s.slot for s in program.states]


_HEAD = """graph {
  input %r: f32[1,4]
  input %p: i64[]
  state "kv" %kv: f32[N,4] = dense<f32[]: 0.0>
"""


def test_rows_are_written_into_the_state(scheduled: Scheduled) -> None:
    program = scheduled(
        _HEAD
        + """
      %a = write_rows(%kv, %r, %p) : f32[N,4]
      next "kv" = %a
      return
    }"""
    )
    (state,) = program.states
    assert state.aliases == (state.following,)
    assert all(program.slots[s].kind is SlotKind.STATE for s in (state.slot, state.following))
    copy, write = program.thunks
    assert (copy.chunks, list(write.writes())) == (0, [state.following])
    assert plan_memory(program, {"N": 7}).arena == 0
    assert plan_memory(program, {"N": 7}).state == 7 * 16


def test_writes_in_a_row_and_reshapes_between_them_stay_in_place(scheduled: Scheduled) -> None:
    program = scheduled(
        _HEAD
        + """
      %a = write_rows(%kv, %r, %p) : f32[N,4]
      %b = reshape(%a) {shape=(<N>, 2, 2)} : f32[N,2,2]
      %q = reshape(%r) {shape=(1, 2, 2)} : f32[1,2,2]
      %c = write_rows(%b, %q, %p) {ring=true} : f32[N,2,2]
      %d = reshape(%c) {shape=(<N>, 4)} : f32[N,4]
      next "kv" = %d
      return %d as "y"
    }"""
    )
    assert _in_place(program) == [True]
    assert [t.chunks for t in program.thunks if t.copies] == [0, 0]


def test_scatters_are_written_into_the_state_too(scheduled: Scheduled) -> None:
    program = scheduled(
        """graph {
      input %r: f32[2,4]
      input %i: i64[2,1]
      state "kv" %kv: f32[9,4] = dense<f32[]: 0.0>
      %a = scatter_nd(%kv, %i, %r) : f32[9,4]
      next "kv" = %a
      return
    }"""
    )
    assert _in_place(program) == [True]


def test_an_old_value_that_is_read_later_is_not_overwritten(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[4]
      input %i: i64[4]
      state "s" %s: f32[4] = dense<f32[]: 0.0>
      %a = gather(%s, %i) : f32[4]
      %b = gather(%s, %i) : f32[4]
      %y = gather(%b, %i) : f32[4]
      next "s" = %a
      return %y as "y"
    }""")
    assert _in_place(program) == [False]
    assert list(program.thunks[-1].writes()) == [program.states[0].slot]


def test_a_value_that_is_written_after_the_last_read_needs_no_permission(
    scheduled: Scheduled,
) -> None:
    """gather may not write over its operand, but the second one does not read the state any more."""
    program = scheduled("""graph {
      input %i: i64[4]
      state "s" %s: f32[4] = dense<f32[]: 0.0>
      %a = gather(%s, %i) : f32[4]
      %b = gather(%a, %i) : f32[4]
      next "s" = %b
      return
    }""")
    assert _in_place(program) == [True]


def test_states_that_take_each_others_value_are_copied(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      state "a" %a: f32[4] = dense<f32[]: 0.0>
      state "b" %b: f32[4] = dense<f32[]: 1.0>
      next "a" = %b
      next "b" = %a
      return
    }""")
    assert _in_place(program) == [False, False]
    assert len(program.thunks) == 3  # one of them is saved first


def test_one_value_for_two_states_is_copied(scheduled: Scheduled) -> None:
    program = scheduled(
        _HEAD
        + """
      state "other" %o: f32[N,4] = dense<f32[]: 0.0>
      %a = write_rows(%kv, %r, %p) {copy=true} : f32[N,4]
      next "kv" = %a
      next "other" = %a
      return
    }"""
    )
    assert _in_place(program) == [False, False]


def test_an_unchanged_state_costs_nothing(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      state "a" %a: f32[4] = dense<f32[]: 0.0>
      next "a" = %a
      return %a as "y"
    }""")
    assert [t.kernel is not None for t in program.thunks] == [True]  # the copy to the output


def test_a_branch_that_reads_the_old_value_is_copied(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %c: bool[]
      input %i: i64[4]
      state "s" %s: f32[4] = dense<f32[]: 0.0>
      %y = if(%c, %s, %i) : f32[4] {
        region(%s1: f32[4], %i1: i64[4]) {
          %a = gather(%s1, %i1) : f32[4]
          return %a
        }
        region(%s2: f32[4], %i2: i64[4]) {
          return %s2
        }
      }
      next "s" = %y
      return
    }""")
    assert _in_place(program) == [False]


def test_a_loop_that_reads_the_old_value_is_copied(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[3,4]
      state "s" %s: f32[4] = dense<f32[]: 0.0>
      %y, %z = scan(%s, %x, %s) {carried=1, scan_inputs=1, trip=3} : f32[4], f32[3,4] {
        region(%a: f32[4], %b: f32[4], %c: f32[4]) {
          %d = add(%a, %b) : f32[4]
          %e = add(%d, %c) : f32[4]
          return %e, %d
        }
      }
      next "s" = %y
      return %z as "z"
    }""")
    assert _in_place(program) == [False]


def test_a_write_in_a_branch_is_refused(scheduled: Scheduled) -> None:
    text = """graph {
      input %c: bool[]
      input %r: f32[1,4]
      input %p: i64[]
      state "kv" %kv: f32[9,4] = dense<f32[]: 0.0>
      %y = if(%c, %kv, %r, %p) : f32[9,4] {
        region(%a: f32[9,4], %b: f32[1,4], %d: i64[]) {
          %e = write_rows(%a, %b, %d) : f32[9,4]
          return %e
        }
        region(%f: f32[9,4], %g: f32[1,4], %h: i64[]) {
          return %f
        }
      }
      next "kv" = %y
      return
    }"""
    with pytest.raises(ModelError, match="would copy all of state 'kv'"):
        scheduled(text)
    program = scheduled(text.replace("%d) :", "%d) {copy=true} :"))
    assert _in_place(program) == [False]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            """%a = write_rows(%kv, %r, %p) : f32[N,4]
      %i = constant() {data=literal dense<i64[1]: 0>} : i64[1]
      %y = gather(%kv, %i) : f32[1,4]
      next "kv" = %a
      return %y as "y\"""",
            r"gather\(.*\) at node <unknown> reads the old rows after it",
        ),
        (
            """%a = write_rows(%kv, %r, %p) : f32[N,4]
      next "kv" = %a
      return %kv as "y\"""",
            "an output",
        ),
        (
            """%a = write_rows(%kv, %r, %p) : f32[N,4]
      next "kv" = %kv
      return %a as "y\"""",
            "its result is not the next value",
        ),
        (
            """%q = slice(%kv) {starts=(1, 0), sizes=(1, 4), steps=(1, 1)} : f32[1,4]
      %a = write_rows(%kv, %q, %p) : f32[N,4]
      next "kv" = %a
      return""",
            "the rows that it writes are rows of that state",
        ),
    ],
)
def test_a_write_that_would_copy_a_state_is_refused(
    body: str, why: str, scheduled: Scheduled
) -> None:
    with pytest.raises(ModelError, match=why) as raised:
        scheduled(_HEAD + body + "\n}")
    assert "write_rows(f32[N,4], f32[1,4], i64[]) at node <unknown> would copy all of" in str(
        raised.value
    )
    program = scheduled((_HEAD + body + "\n}").replace("%p) :", "%p) {copy=true} :"))
    assert _in_place(program) == [False]


def test_the_checker_finds_a_false_claim(scheduled: Scheduled) -> None:
    """Were the slot of a value that is written too early an alias of the state, the checker would say so."""
    program = scheduled("""graph {
      input %i: i64[4]
      state "s" %s: f32[4] = dense<f32[]: 0.0>
      %a = gather(%s, %i) : f32[4]
      %b = gather(%s, %i) : f32[4]
      %y = gather(%b, %i) : f32[4]
      next "s" = %a
      return %y as "y"
    }""")
    (state,) = program.states
    early = next(program.thunks[0].writes())
    program.slots[early].kind = SlotKind.STATE
    program.states[0] = dataclasses.replace(state, following=early, aliases=(early,))
    del program.thunks[-1]
    with pytest.raises(PassError, match=r"writes slot .* over its operand"):
        check_plan(program, plan_memory(program, {}))


def test_the_checker_finds_a_next_value_that_is_lost(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %i: i64[4]
      state "s" %s: f32[4] = dense<f32[]: 0.0>
      %a = gather(%s, %i) : f32[4]
      %b = gather(%a, %i) : f32[4]
      next "s" = %b
      return
    }""")
    del program.thunks[-1]
    with pytest.raises(PassError, match="state 's' does not hold its next value"):
        check_plan(program, plan_memory(program, {}))


def test_states_are_saved_with_a_program(scheduled: Scheduled) -> None:
    program = scheduled(
        _HEAD + '%a = write_rows(%kv, %r, %p) : f32[N,4]\n next "kv" = %a\n return }'
    )
    for thunk in program.thunks:
        thunk.kernel = "kernel"
    dims = DimWriter()
    data, constants = program_to_data(program, dims)
    again = program_from_data(json.loads(json.dumps(data)), constants, DimReader(dims.symbols))
    assert again.states == program.states
    assert [s.kind for s in again.slots] == [s.kind for s in program.slots]
    data["states"][0][2] = 99
    with pytest.raises(IndexError):
        program_from_data(data, constants, DimReader(dims.symbols))
