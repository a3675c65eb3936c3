# SPDX-License-Identifier: Apache-2.0
"""Slots, views, copies of results, and control flow as jumps, on a backend with one launch per node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.backends.null.backend import NullBackend
from rlx.backends.protocol import CompileOptions
from rlx.base.dims import evaluate as evaluate_dim
from rlx.ir.parse import parse_graph
from rlx.kernel.program import DimArg, Program, SlotArg, SlotKind, ThunkKind
from rlx.memory.check import check_plan
from rlx.memory.plan import plan_memory


@pytest.fixture
def scheduled() -> Callable[[str], Program]:
    def compile_text(text: str) -> Program:
        backend = NullBackend()
        compiled: Any = backend.compile(parse_graph(text), backend.targets()[0], CompileOptions())
        program: Program = compiled.program
        check_plan(program, plan_memory(program, {"N": 7}))
        return program

    return compile_text


Scheduled = Callable[[str], Program]


def _kernels(program: Program) -> list[str]:
    return [str(t.kernel) for t in program.thunks if t.kind is ThunkKind.CALL]


def _kinds(program: Program) -> list[str]:
    return [str(t.kernel) if t.kind is ThunkKind.CALL else t.kind.value for t in program.thunks]


def _calls(program: Program, kernel: str) -> list[tuple[list[int], list[int]]]:
    return [(list(t.reads()), list(t.writes())) for t in program.thunks if t.kernel == kernel]


def test_results_are_written_where_they_belong(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[N]
      %a = exp(%x)
      %y = neg(%a)
      return %y as "y"
    }""")
    assert _kernels(program) == ["exp", "neg"]
    (exp,), (neg,) = _calls(program, "exp"), _calls(program, "neg")
    assert exp[0] == program.inputs
    assert program.slots[exp[1][0]].kind is SlotKind.ARENA
    assert neg == (exp[1], program.outputs)
    assert evaluate_dim(program.slots[exp[1][0]].nbytes, {"N": 7}) == 28


def test_aliases_share_a_slot(scheduled: Scheduled) -> None:
    program = scheduled(
        """graph {
      input %x: f32[2,3]
      %a = exp(%x)
      %r = reshape(%a) {shape=(6)}
      %s = reshape(%r) {shape=(3, 2)}
      %y = neg(%s)
      return %y as "y"
    }""".replace("(6)", "(6,)")
    )
    assert _kernels(program) == ["exp", "neg"]
    assert _calls(program, "exp")[0][1] == _calls(program, "neg")[0][0]


def test_a_result_behind_an_alias_is_written_directly(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[2,3]
      %a = exp(%x)
      %y = reshape(%a) {shape=(3, 2)}
      return %y as "y"
    }""")
    assert _kernels(program) == ["exp"]
    assert _calls(program, "exp")[0][1] == program.outputs


@pytest.mark.parametrize(
    ("slice_", "offset"),
    [
        ("starts=(1, 0, 0), sizes=(2, 3, 5), steps=(1, 1, 1)", 60),
        ("starts=(0, 0, 0), sizes=(2, 3, 5), steps=(1, 1, 1)", 0),
        ("starts=(1, 0, 0), sizes=(1, 3, 5), steps=(1, 1, 1)", 60),
        ("starts=(0, 1, 0), sizes=(4, 1, 5), steps=(1, 1, 1)", None),
        ("starts=(0, 0, 0), sizes=(2, 3, 5), steps=(2, 1, 1)", None),
        ("starts=(1, 0, 1), sizes=(2, 3, 2), steps=(1, 1, 1)", None),
        ("starts=(3, 0, 0), sizes=(4, 3, 5), steps=(-1, 1, 1)", None),
    ],
)
def test_outermost_slices_are_views(slice_: str, offset: int | None, scheduled: Scheduled) -> None:
    program = scheduled(f"""graph {{
      input %x: f32[4,3,5]
      %s = slice(%x) {{{slice_}}}
      %y = neg(%s)
      return %y as "y"
    }}""")
    binds = [t for t in program.thunks if t.kind is ThunkKind.BIND]
    ((read,), _) = _calls(program, "neg")[0]
    if offset is None:
        assert _kernels(program) == ["slice", "neg"]
        assert not binds
    elif offset == 0:
        assert read == program.inputs[0]
        assert not binds
    else:
        (bind,) = binds
        view, root, start, factor = bind.args
        assert view == SlotArg(read)
        assert root == SlotArg(program.inputs[0])
        assert isinstance(start, DimArg)
        assert isinstance(factor, DimArg)
        assert evaluate_dim(start.dim, {}) * evaluate_dim(factor.dim, {}) == offset
        assert program.slots[read].kind is SlotKind.VIEW
        assert program.slots[read].root == program.inputs[0]


def test_a_slice_behind_unit_axes_is_a_view(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[1,4,5]
      %s = slice(%x) {starts=(0, 2, 0), sizes=(1, 1, 5), steps=(1, 1, 1)}
      %y = neg(%s)
      return %y as "y"
    }""")
    assert _kinds(program) == ["bind", "neg"]


def test_inputs_params_constants_and_views_are_copied_to_results(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[4]
      param %w: f32[2] = dense<f32[2]: 1.0, 2.0>
      %c = constant() {data=literal dense<f32[]: 3.0>}
      %s = slice(%x) {starts=(1,), sizes=(2,), steps=(1,)}
      return %x as "x", %w as "w", %c as "c", %s as "s"
    }""")
    copies = _calls(program, "copy")
    assert [w for _, (w,) in copies] == program.outputs
    kinds = [program.slots[r].kind for (r,), _ in copies]
    assert kinds == [SlotKind.INPUT, SlotKind.WEIGHT, SlotKind.WEIGHT, SlotKind.VIEW]
    names = {program.weights[r].name for (r,), _ in copies if r in program.weights}
    assert names == {"w", ""}


def test_a_value_that_is_two_results_is_copied_once(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[6]
      %a = exp(%x)
      %b = reshape(%a) {shape=(2, 3)}
      return %a as "a", %b as "b"
    }""")
    assert _kernels(program) == ["exp", "copy"]
    first, second = program.outputs
    assert _calls(program, "exp")[0][1] == [first]
    assert _calls(program, "copy") == [([first], [second])]


def test_constants_are_weights_with_data(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[2]
      %c = constant() {data=literal dense<f32[]: 3.0>}
      %y = mul(%x, %c)
      return %y as "y"
    }""")
    ((weight, held),) = program.weights.items()
    assert held.data is not None
    assert np.asarray(held.data).item() == 3.0
    assert _calls(program, "mul")[0][0] == [program.inputs[0], weight]


def test_thunks_say_where_they_came_from(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[2]
      %y = exp(%x) @ "here"
      return %y as "y"
    }""")
    assert "exp" in str(program.thunks[0].node)
    assert "here" in str(program.thunks[0].node)


def test_if_is_two_arms_and_two_jumps(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %c: bool[]
      input %x: f32[3]
      %y = if(%c, %x) {
        region(%a: f32[3]) {
          %n = neg(%a)
          return %n
        }
        region(%a: f32[3]) {
          return %a
        }
      }
      return %y as "y"
    }""")
    assert _kinds(program) == ["jump_unless", "neg", "jump", "copy"]
    skip, neg, leave, copy = program.thunks
    assert skip.args == (SlotArg(program.inputs[0]),)
    assert (skip.target, leave.target) == (3, 4)
    for arm in (neg, copy):
        assert list(arm.reads()) == [program.inputs[1]]
        assert list(arm.writes()) == program.outputs


_SCAN = """graph {
  input %a: f32[2]
  input %b: f32[2]
  input %xs: f32[5,2]
  input %k: f32[]
  %p, %q, %s = scan(%a, %b, %xs, %k) {carried=2, scan_inputs=1, trip=5} {
    region(%u: f32[2], %v: f32[2], %x: f32[2], %f: f32[]) {
      %t = mul(%x, %f)
      return %v, %u, %t
    }
  }
  return %p as "p", %q as "q", %s as "s"
}"""


def test_scan_is_a_loop_over_views(scheduled: Scheduled) -> None:
    program = scheduled(_SCAN)
    kinds = _kinds(program)
    assert kinds.count("set_dim") == kinds.count("jump_ge") == kinds.count("add_dim") == 1
    head, back = kinds.index("jump_ge"), kinds.index("jump")
    assert program.loops == [(head, back)]
    assert program.thunks[back].target == head
    assert program.thunks[head].target == back + 1
    counter, trip = program.thunks[head].args
    assert isinstance(trip, DimArg)
    assert trip.dim == 5
    binds = [t for t in program.thunks if t.kind is ThunkKind.BIND]
    assert [b.args[2] for b in binds] == [counter, counter]
    roots = [program.slots[b.args[0].slot].root for b in binds if isinstance(b.args[0], SlotArg)]
    assert roots == [program.inputs[2], program.outputs[2]]
    assert all(head < program.thunks.index(b) < back for b in binds)


@pytest.mark.parametrize("trip", [0, 1, 2, 5])
def test_swapped_carries_do_not_overwrite_each_other(trip: int, scheduled: Scheduled) -> None:
    """Follow the copies of the loop as a machine would."""
    program = scheduled(_SCAN.replace("trip=5", f"trip={trip}").replace("[5,2]", f"[{trip},2]"))
    held: dict[int, str] = {program.inputs[0]: "a", program.inputs[1]: "b"}
    position = count = 0
    while position < len(program.thunks):
        thunk = program.thunks[position]
        position += 1
        if thunk.kernel == "copy":
            (source,), (target,) = list(thunk.reads()), list(thunk.writes())
            held[target] = held[source]
        elif thunk.kind is ThunkKind.ADD_DIM:
            count += thunk.immediate
        elif thunk.kind is ThunkKind.JUMP or (thunk.kind is ThunkKind.JUMP_GE and count >= trip):
            position = thunk.target
    want = ["a", "b"] if trip % 2 == 0 else ["b", "a"]
    assert [held[o] for o in program.outputs[:2]] == want
    assert count == trip


def test_nested_loops_have_counters_of_their_own(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %a: f32[2]
      %y = scan(%a) {carried=1, scan_inputs=0, trip=3} {
        region(%u: f32[2]) {
          %w = scan(%u) {carried=1, scan_inputs=0, trip=4} {
            region(%v: f32[2]) {
              %n = neg(%v)
              return %n
            }
          }
          return %w
        }
      }
      return %y as "y"
    }""")
    counters = [t.args[0] for t in program.thunks if t.kind is ThunkKind.SET_DIM]
    assert len(set(map(str, counters))) == 2
    (inner, outer) = sorted(program.loops, key=lambda loop: loop[1] - loop[0])
    assert outer[0] < inner[0] < inner[1] < outer[1]


def test_a_program_knows_what_its_slots_hold(scheduled: Scheduled) -> None:
    program = scheduled("""graph {
      input %x: f32[N,6]
      %a = exp(%x) @ "first"
      %r = reshape(%a) {shape=(<6*N>,)}
      %s = slice(%r) {starts=(2,), sizes=(4,), steps=(1,)}
      %y = neg(%s) @ "last"
      return %y as "out"
    }""")
    named = {v.name: v for v in program.values}
    assert {n: str(v) for n, v in named.items()} == {
        "x": "f32[N,6]",
        "a": "f32[N,6]",
        "r": "f32[6*N]",
        "s": "f32[4]",
        "y": "f32[4]",
        "out": "f32[4]",
    }
    assert named["a"].slot == named["r"].slot != named["s"].slot
    assert named["y"].slot == named["out"].slot == program.outputs[0]
    calls = [t for t in program.thunks if t.kind is ThunkKind.CALL]
    assert [t.node.names for t in calls if t.node is not None] == [("first",), ("last",)]
