# SPDX-License-Identifier: Apache-2.0
"""Faults put into a pass, a kernel or the constant folder are found, at the node they are in."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu import program, vmath
from rlx.base.numeric import Array
from rlx.expr.body import Body
from rlx.ir.builder import Builder
from rlx.ir.graph import Node
from rlx.ir.parse import parse_graph
from rlx.ir.rewrite import Match, rule
from rlx.kernel.program import Program
from rlx.memory.plan import Plan
from rlx.ops.elementwise import tanh
from rlx.passes import attention, canonicalize, fold, fuse
from rlx.testing.bisect import bisect, check
from rlx.testing.compare import difference, differences
from rlx.testing.settings import Setting

_BLOCKS = 12
_PLAIN, _FAST = Setting.parse("reference,passes=off"), Setting.parse("cpu,threads=1")


def _model(at: int, lines: str, blocks: int = _BLOCKS) -> rlx.Executable:
    """Return a chain of blocks of which one, number `at`, has further lines from %t to %z."""
    text = ["graph {", "  input %h0: f32[N,8]", "  input %w: f32[8,8]", "  input %b: f32[8]"]
    for i in range(blocks):
        text += [
            f'  %m{i} = matmul(%h{i}, %w) @ "m{i}"',
            f'  %a{i} = add(%m{i}, %b) @ "a{i}"',
            f'  %t{i} = tanh(%a{i}) @ "t{i}"',
        ]
        end = f"%t{i}"
        if i == at:
            text += [line.replace("%t", f"%t{i}") for line in lines.splitlines()]
            end = "%z"
        text.append(f'  %h{i + 1} = add({end}, %h{i}) @ "s{i}"')
    graph = rlx.Graph("chain")
    graph.ir = parse_graph("\n".join([*text, f'  return %h{blocks} as "y"', "}"]))
    return rlx.compile(graph, "reference", dims={"N": 4})


def _inputs() -> dict[str, Array]:
    random = np.random.default_rng(3)
    shapes: Mapping[str, tuple[int, ...]] = {"h0": (3, 8), "w": (8, 8), "b": (8,)}
    found = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    found["w"] = np.linalg.qr(found["w"])[0]  # neither damps a difference nor blows it up
    return found


# -- faults ----------------------------------------------------------------------------------------


def _forget_kernels() -> None:
    """Emitted kernels are remembered by what they compute."""
    for name, module in list(sys.modules.items()):
        if name.startswith("rlx.backends.cpu.kernels."):
            for item in vars(module).values():
                if hasattr(item, "cache_clear"):
                    item.cache_clear()


@pytest.fixture(autouse=True)
def kernels_as_they_should_be() -> Iterator[None]:
    yield
    _forget_kernels()


def _kernel(patch: pytest.MonkeyPatch) -> None:
    """The emitted code of atan is that of tanh."""
    _forget_kernels()
    patch.setitem(vmath.UNARY, "atan", vmath.UNARY["tanh"])


@rule("atan")
def _wrong_rule(node: Node, builder: Builder) -> Match:
    return builder.emit_one(tanh.op(), node.operands[0])


def _rule(patch: pytest.MonkeyPatch) -> None:
    """A rewrite takes atan for tanh."""
    patch.setattr(canonicalize, "RULES", (*canonicalize.RULES, _wrong_rule))


def _fold(patch: pytest.MonkeyPatch) -> None:
    """The constant folder is off by one in products."""
    right = fold.run_op

    def wrong(op: Any, arrays: Sequence[Array | None]) -> tuple[Array, ...]:
        found = right(op, arrays)
        return tuple(a + 1 for a in found) if op.name == "mul" else found

    patch.setattr(fold, "run_op", wrong)


def _fusion(patch: pytest.MonkeyPatch) -> None:
    """Where regions merge, differences are taken the wrong way round."""
    right = fuse.canonical

    def wrong(body: Body) -> tuple[Body, Sequence[int]]:
        instrs = [
            dataclasses.replace(i, args=i.args[::-1]) if i.op == "sub" else i for i in body.instrs
        ]
        return right(dataclasses.replace(body, instrs=tuple(instrs)))

    patch.setattr(fuse, "canonical", wrong)


def _recogniser(patch: pytest.MonkeyPatch) -> None:
    """The recogniser of attention forgets the factor of the scores."""
    right = attention._factor  # pyright: ignore[reportPrivateUsage]

    def wrong(*args: Any) -> tuple[float, Any]:
        return 1.0, right(*args)[1]

    patch.setattr(attention, "_factor", wrong)


_ATAN = '  %z = atan(%t) @ "guilty"'
_CONSTANTS = """  %c = constant() {data=literal dense<f32[]: 3.0>}
  %d = constant() {data=literal dense<f32[]: 0.25>}
  %e = mul(%c, %d) @ "guilty"
  %z = add(%t, %e) @ "after"
"""
_SUB = """  %g = sub(%t, %b) @ "inner"
  %z = exp(%g) @ "guilty"
"""
_ATTENTION = """  %q = reshape(%t) {shape=(<N>, 1, 2, 4)} @ "q"
  %k = transpose(%q) {perm=(0, 1, 3, 2)} @ "k"
  %p = matmul(%q, %k) @ "scores"
  %root = constant() {data=literal dense<f32[]: 0.0625>}
  %f = mul(%p, %root) @ "scaled"
  %o = softmax(%f) {axis=3} @ "soft"
  %v = matmul(%o, %q) @ "guilty"
  %z = reshape(%v) {shape=(<N>, 8)} @ "back"
"""
_FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, tuple[str, ...]]] = {
    "kernel": (_kernel, _ATAN, ()),
    "rule": (_rule, _ATAN, ("canonicalize",)),
    "fold": (_fold, _CONSTANTS, ()),
    "fusion": (_fusion, _SUB, ("fuse-regions",)),
    "recogniser": (_recogniser, _ATTENTION, ("recognize-attention",)),
}


@pytest.mark.parametrize("at", [0, 4, _BLOCKS - 1])
@pytest.mark.parametrize("fault", _FAULTS)
def test_the_guilty_node_is_named(fault: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, lines, passes = _FAULTS[fault]
    model, inputs = _model(at, lines), _inputs()
    assert check(model, inputs, _PLAIN, _FAST) == []
    assert bisect(model, inputs, _PLAIN, _FAST) is None
    inject(monkeypatch)
    (output,) = check(model, inputs, _PLAIN, _FAST)
    assert output.name == "y"
    found = bisect(model, inputs, _PLAIN, _FAST)
    assert found is not None
    assert found.node == "'guilty'"
    assert found.runs < 30
    assert found.guilty == str(_FAST)
    assert set(passes) <= set(found.passes)
    assert "'guilty'" in str(found)
    assert str(_FAST) in found.kernels[1]
    assert ("folded or rewrote" in found.kernels[1]) == (fault == "fold")


@pytest.mark.parametrize("stored", [("y",), ("t2", "y", "s9"), ("guilty", "s1")])
def test_stored_values_lead_to_the_guilty_node(
    stored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = _model(6, _ATAN), _inputs()
    with model.expose("t2", "s1", "s9", "guilty") as exposed:
        golden = exposed.run(inputs)
    given = {name: golden[name] for name in stored}
    assert bisect(model, inputs, given, _FAST) is None
    _kernel(monkeypatch)
    found = bisect(model, inputs, given, _FAST)
    assert found is not None
    assert found.node == "'guilty'"
    assert found.guilty == str(_FAST)
    assert found.runs < 30


def test_stored_values_that_the_model_does_not_mean() -> None:
    model, inputs = _model(6, _ATAN), _inputs()
    with model.expose("t2", "s4") as exposed:
        golden = exposed.run(inputs)
    golden["s4"] = golden["s4"] + 1
    found = bisect(model, inputs, golden, _FAST)
    assert found is not None
    assert (found.node, found.difference.name) == ("'s4'", "s4")
    assert "the stored value is not what the model's own meaning gives" in str(found)
    with pytest.raises(rlx.UsageError, match="no value or node 's5x'"):
        bisect(model, inputs, {"s5x": golden["s4"]}, _FAST)


def test_stored_values_and_computed_ones_on_either_side_of_the_reference() -> None:
    model, inputs = _model(6, _ATAN), _inputs()
    exact = _PLAIN.run(model, inputs)["y"]
    tolerance = float(np.abs(_FAST.run(model, inputs)["y"] - exact).max() / np.abs(exact).max())
    for sign in (1, -1):
        golden = exact + sign * np.float32(0.9 * max(tolerance, 1e-7)) * np.abs(exact).max()
        differ = check(model, inputs, {"y": golden}, _FAST, max(tolerance, 1e-7))
        found = bisect(model, inputs, {"y": golden}, _FAST, max(tolerance, 1e-7))
        assert (found is None) == (differ == [])


@pytest.mark.parametrize("stored", [[1.0], None, {}])
def test_what_is_no_stored_value_is_refused(stored: Any) -> None:
    model, inputs = _model(0, _ATAN, blocks=1), _inputs()
    for compare in (check, bisect):
        with pytest.raises(rlx.UsageError, match="stored"):
            compare(model, inputs, stored, _FAST)


@pytest.mark.parametrize("tolerance", [-1.0, float("nan")])
def test_a_tolerance_that_is_none_is_refused(tolerance: float) -> None:
    model, inputs = _model(0, _ATAN, blocks=1), _inputs()
    for compare in (check, bisect):
        with pytest.raises(rlx.UsageError, match="at least 0"):
            compare(model, inputs, _PLAIN, _FAST, tolerance)


def test_stored_values_of_another_byte_order() -> None:
    model, inputs = _model(0, _ATAN, blocks=1), _inputs()
    golden = {n: a.astype(">f4") for n, a in _FAST.run(model, inputs).items()}
    assert bisect(model, inputs, golden, _FAST) is None
    assert check(model, inputs, golden, _FAST) == []


def test_the_search_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _model(37, _ATAN, blocks=60), _inputs()
    _kernel(monkeypatch)
    found = bisect(model, inputs, _PLAIN, _FAST)
    assert found is not None
    assert found.node == "'guilty'"
    assert found.nodes == 60 * 4 + 1
    assert found.runs < 30


def test_of_two_faults_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '  %y1 = atan(%t) @ "first"\n  %y2 = exp(%y1) @ "between"\n  %z = atan(%y2) @ "second"'
    _kernel(monkeypatch)
    found = bisect(_model(5, lines), _inputs(), _PLAIN, _FAST)
    assert found is not None
    assert found.node in ("'first'", "'second'")


def test_other_outputs_and_branches_do_not_confuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = rlx.Graph("two")
    graph.ir = parse_graph("""graph {
      input %x: f32[4,4]
      %a = matmul(%x, %x) @ "a"
      %b = exp(%a) @ "b"
      %c = atan(%b) @ "guilty"
      %d = matmul(%c, %x) @ "d"
      %e = matmul(%a, %a) @ "e"
      %f = tanh(%e) @ "f"
      return %f as "good", %d as "bad"
    }""")
    model = rlx.compile(graph)
    inputs = {"x": np.eye(4, dtype=np.float32)}
    _kernel(monkeypatch)
    assert [d.name for d in check(model, inputs, _PLAIN, _FAST)] == ["bad"]
    found = bisect(model, inputs, _PLAIN, _FAST)
    assert found is not None
    assert found.node == "'guilty'"
    assert found.nodes == 4  # those that lead to the output that differs


def test_constants_in_front_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["graph {", "  input %s0: f32[4]"]
    lines += [f"  %c{i} = constant() {{data=literal dense<f32[]: {i + 2}.0>}}" for i in range(12)]
    lines += [f"  %s{i + 1} = mul(%s{i}, %c{i})" for i in range(12)]
    lines += ['  %a = atan(%s12) @ "guilty"', '  return %a as "y"', "}"]
    graph = rlx.Graph("constants")
    graph.ir = parse_graph("\n".join(lines))
    _kernel(monkeypatch)
    found = bisect(rlx.compile(graph), {"s0": np.full(4, 1e-9, np.float32)}, _PLAIN, _FAST)
    assert found is not None
    assert found.node == "'guilty'"
    assert found.nodes == 13


def test_the_weights_are_those_that_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with rlx.Graph("weights") as g:
        x = g.input("x", [2, 9])
        g.output("y", x @ g.param("w", np.zeros((9, 9), np.float32)))
    model = rlx.compile(g)
    model.set_param("w", np.eye(9, dtype=np.float32))
    x = np.arange(18, dtype=np.float32).reshape(2, 9)
    assert check(model, {"x": x}, {"y": x}, _FAST) == []
    assert check(model, {"x": x}, {"y": x + 1}, _FAST)[0].name == "y"
    with pytest.raises(rlx.UsageError, match=r"'z' is none of the model's, which are y"):
        check(model, {"x": x}, {"z": x}, _FAST)


# -- settings and comparisons ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["cpu", "reference,passes=off", "cpu,isa=v3,threads=2", "cpu,skip=cse+dce"]
)
def test_settings_read_and_print(text: str) -> None:
    assert str(Setting.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu,fast=yes", "not 'fast=yes'"),
        ("cpu,threads=many", "'many'"),
        ("cpu,passes=on", "'on'"),
        ("cpu,skip=csee", "Did you mean 'cse'"),
        ("cpu,skip=decompose", "cannot be skipped"),
        ("cpu,threads", "not 'threads'"),
        ("cpu,threads=1,threads=2", "not 'threads=2'"),
    ],
)
def test_settings_that_are_none(text: str, message: str) -> None:
    with pytest.raises(rlx.UsageError, match=message):
        Setting.parse(text)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(rlx.RlxError, match="gpu"):
        Setting.parse("gpu").run(_model(0, _ATAN), _inputs())


@pytest.mark.parametrize("level", ["v3", "v4"])
def test_levels_of_instructions_agree(level: str) -> None:
    from rlx.backends.cpu.isa import host_isa

    if level not in host_isa().name and level == "v4":
        pytest.skip("this processor has no AVX-512")
    assert check(_model(1, _ATAN), _inputs(), Setting.parse(f"cpu,isa={level}"), _FAST) == []


_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1.0, 2.0], [1.0, 2.001], False),
        ([1.0, 1000.0], [1.01, 1000.0], True),  # small beside the largest
        ([0.0, 0.0], [0.0, 1e-30], False),
        ([_NAN, 1.0], [_NAN, 1.0], True),
        ([_NAN, 1.0], [0.0, 1.0], False),
        ([_INF, 1.0], [_INF, 1.0], True),
        ([_INF, 1.0], [-_INF, 1.0], False),
        ([], [], True),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([True, False], [True, True], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_when_arrays_are_alike(left: list[Any], right: list[Any], alike: bool) -> None:
    kind = np.float32 if left and isinstance(left[0], float) else None
    a, b = np.array(left, kind), np.array(right, kind)
    found = difference("v", a, b)
    assert (found is None) == alike
    assert (difference("v", b, a) is None) == alike
    if found is not None:
        assert str(found).startswith("'v': ")
        assert found.error > 0


def test_dtypes_and_absent_values_differ() -> None:
    one = np.ones(2, np.float32)
    assert difference("v", one, one.astype(np.float64)) is not None
    (absent,) = differences({"a": one, "b": one}, {"a": one})
    assert absent.name == "b"
    assert difference("v", one, one * np.float32(1.5), tolerance=1.0) is None


# -- faults of whole programs ----------------------------------------------------------------------

_OVERWRITTEN = """  %kept = matmul(%t, %w) @ "kept"
  %p = softmax(%t) {axis=1} @ "clobbers"
  %c = matmul(%p, %w) @ "product"
  %z = add(%kept, %c) @ "guilty"
"""


@pytest.mark.parametrize("at", [0, 5, _BLOCKS - 1])
def test_a_fault_of_the_memory_plan_of_the_whole_program(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, right = _model(at, _OVERWRITTEN), _inputs(), program.plan_memory

    def wrong(scheduled: Program, *args: Any, **options: Any) -> Plan:
        plan, slots = right(scheduled, *args, **options), {v.name: v.slot for v in scheduled.values}
        if "y" in slots:  # the whole model; its product reads %t behind the softmax
            plan.offsets[slots["p"]] = plan.offsets[slots[f"t{at}"]]
        return plan

    monkeypatch.setattr(program, "plan_memory", wrong)
    found = bisect(model, inputs, _PLAIN, _FAST)
    assert found is not None
    assert found.node == f"'s{at}'"  # what the kernel stores that reads overwritten bytes
    assert found.kernels[1].endswith(f"which does kept, s{at}, guilty")
    assert found.runs < 30
