# SPDX-License-Identifier: Apache-2.0
"""Each rule on a small graph: what it turns into, and what it must leave alone."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.dtypes import DType
from rlx.base.numeric import cast
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.movement import Slice
from rlx.passes.canonicalize import Canonicalize
from rlx.passes.manager import PassContext
from rlx.passes.rules.cast import preserves


def _run(
    body: str, returned: str = "%y", inputs: str = "input %x: f32[N,3]"
) -> tuple[list[str], Graph, PassContext]:
    graph = parse_graph(f'graph {{ {inputs} {body} return {returned} as "y" }}')
    ctx = PassContext()
    Canonicalize().run(graph, ctx)
    verify(graph)
    return [n.op.name for n in graph.block if n.op.name != "constant"], graph, ctx


def _scalar(name: str, value: str, dtype: str = "f32") -> str:
    return f"%{name} = constant() {{data=literal dense<{dtype}[]: {value}>}} "


@pytest.mark.parametrize(
    ("op", "value", "left"),
    [
        ("add", "-0.0", True),
        ("add", "-0.0", False),
        ("sub", "0.0", False),
        ("mul", "1.0", True),
        ("mul", "1.0", False),
        ("div", "1.0", False),
        ("pow", "1.0", False),
        ("maximum", "-inf", True),
        ("minimum", "inf", False),
    ],
)
def test_neutral_constants_vanish(op: str, value: str, left: bool) -> None:
    operands = "%c, %x" if left else "%x, %c"
    assert _run(_scalar("c", value) + f"%y = {op}({operands})")[0] == []


@pytest.mark.parametrize(
    ("op", "value", "left"),
    [
        ("add", "0.0", False),  # -0.0 + 0.0 is 0.0
        ("sub", "-0.0", False),  # -0.0 - -0.0 is 0.0
        ("sub", "0.0", True),
        ("div", "1.0", True),
        ("mul", "0.0", True),  # NaN and infinities
        ("maximum", "inf", True),
        ("pow", "0.5", False),
    ],
)
def test_constants_that_are_not_neutral_for_every_float_stay(
    op: str, value: str, left: bool
) -> None:
    operands = "%c, %x" if left else "%x, %c"
    assert _run(_scalar("c", value) + f"%y = {op}({operands})")[0] == [op]


def test_integers_have_one_zero() -> None:
    text = _scalar("c", "0", "i64") + "%y = add(%x, %c)"
    assert _run(text, inputs="input %x: i64[N]")[0] == []


def test_a_neutral_constant_that_broadcasts_stays_with_a_reason() -> None:
    body = "%c = constant() {data=literal dense<f32[2,1,1]: 1.0, 1.0>} %y = mul(%x, %c)"
    names, _, ctx = _run(body)
    assert names == ["mul"]
    assert "broadcasts f32[N,3] to f32[2,N,3]" in "\n".join(ctx.report)


def test_transposes_merge_and_cancel() -> None:
    assert _run("%a = transpose(%x) {perm=(1, 0)} %y = transpose(%a) {perm=(1, 0)}")[0] == []
    body = "%a = transpose(%x) {perm=(1, 2, 0)} %y = transpose(%a) {perm=(1, 2, 0)}"
    names, graph, _ = _run(body, inputs="input %x: f32[2,3,4]")
    assert names == ["transpose"]
    assert str(graph.outputs[0].type) == "f32[4,2,3]"


def test_reshapes_merge_and_cancel() -> None:
    assert _run("%a = reshape(%x) {shape=(<3*N>,)} %y = reshape(%a) {shape=(<N>, 3)}")[0] == []
    assert _run("%a = reshape(%x) {shape=(<3*N>,)} %y = reshape(%a) {shape=(3, <N>)}")[0] == [
        "reshape"
    ]


def test_slices_compose() -> None:
    body = (
        "%a = slice(%x) {starts=(1, 8), sizes=(4, 4), steps=(2, -2)}"
        "%y = slice(%a) {starts=(1, 2), sizes=(2, 2), steps=(2, -1)}"
    )
    _, graph, _ = _run(body, inputs="input %x: f32[9,9]")
    (node,) = graph.block.nodes()
    assert node.op == Slice((3, 4), (2, 2), (4, 2))


def test_a_slice_of_everything_vanishes() -> None:
    assert _run("%y = slice(%x) {starts=(0, 0), sizes=(<N>, 3), steps=(1, 1)}")[0] == []
    assert _run("%y = slice(%x) {starts=(<N-1>, 0), sizes=(<N>, 3), steps=(-1, 1)}")[0] == ["slice"]


def test_an_expand_that_broadcasting_does_anyway_vanishes() -> None:
    inputs = "input %x: f32[N,3] input %b: f32[3]"
    assert _run("%e = expand(%b) {shape=(<N>, 3)} %y = add(%x, %e)", inputs=inputs)[0] == ["add"]
    assert _run("%e = expand(%b) {shape=(2, <N>, 3)} %y = add(%x, %e)", inputs=inputs)[0] == [
        "expand",
        "add",
    ]


def test_an_expand_is_not_absorbed_by_guessing_extents() -> None:
    inputs = "input %x: f32[N,3] input %b: f32[1,3]"
    text = "%e = expand(%b) {shape=(<N>, 3)} %f = expand(%b) {shape=(<N>, 3)} %y = add(%e, %f)"
    names, graph, _ = _run(text, inputs=inputs)
    assert names == ["expand", "add"]
    assert graph.facts.guards == []


def test_a_concat_of_one_vanishes_and_nested_ones_merge() -> None:
    assert _run("%y = concat(%x) {axis=0}")[0] == []
    assert _run("%a = concat(%x, %x) {axis=0} %y = concat(%a, %x) {axis=0}")[0] == ["concat"]
    assert _run("%a = concat(%x, %x) {axis=1} %y = concat(%a, %a) {axis=0}")[0] == [
        "concat",
        "concat",
    ]


@pytest.mark.parametrize("name", ["neg", "logical_not"])
def test_involutions_cancel(name: str) -> None:
    dtype = "f32" if name == "neg" else "bool"
    assert _run(f"%a = {name}(%x) %y = {name}(%a)", inputs=f"input %x: {dtype}[N]")[0] == []


def test_powers() -> None:
    assert _run(_scalar("c", "2.0") + "%y = pow(%x, %c)")[0] == ["mul"]
    assert _run(_scalar("c", "0.5") + "%a = mul(%x, %x) %y = pow(%a, %c)")[0] == ["mul", "sqrt"]
    assert _run(_scalar("c", "3.0") + "%y = pow(%x, %c)")[0] == ["pow"]


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("f64", "f32", 0),
        ("f64", "bf16", 1),
        ("f16", "f32", 2),
        ("i32", "f32", 2),
        ("f32", "f64", 1),
    ],
)
def test_casts_merge_only_if_the_first_loses_nothing(first: str, second: str, count: int) -> None:
    assert len(_run(f"%a = cast(%x) {{to={first}}} %y = cast(%a) {{to={second}}}")[0]) == count


def test_a_cast_through_float_saturates_where_integers_wrap() -> None:
    text = "%a = cast(%x) {to=f32} %y = cast(%a) {to=i8}"
    assert _run(text, inputs="input %x: i16[N]")[0] == ["cast", "cast"]
    assert _run(text, inputs="input %x: i8[N]")[0] == []


def test_preserves_is_right_for_small_dtypes() -> None:
    narrow = (DType.I8, DType.U8, DType.I16, DType.U16, DType.F16, DType.BF16)
    exponents = {DType.F16: np.uint16(0x7C00), DType.BF16: np.uint16(0x7F80)}
    for source in narrow:
        every = np.arange(1 << (8 * source.itemsize), dtype=f"u{source.itemsize}").view(
            source.numpy
        )
        if source.is_float:
            every = every[
                (every.view(np.uint16) & exponents[source]) != exponents[source]
            ]  # finite ones
        wide = every.astype(np.float64)
        for target in (*narrow, DType.I32, DType.U32, DType.F32, DType.F64):
            found = cast(every, target)
            same = bool(np.all(found.astype(np.float64) == wide)) and bool(
                np.all(cast(found, source) == every)
            )
            assert preserves(source, target) == same, (source, target)


def test_where_with_a_known_condition() -> None:
    inputs = "input %x: f32[N,3] input %b: f32[3]"
    yes, no = _scalar("c", "true", "bool"), _scalar("c", "false", "bool")
    assert _run(yes + "%y = where(%c, %x, %b)", inputs=inputs)[0] == []
    assert _run(no + "%y = where(%c, %x, %b)", inputs=inputs)[0] == ["expand"]
    mixed = (
        "%c = constant() {data=literal dense<bool[3]: true, false, true>} %y = where(%c, %x, %b)"
    )
    assert _run(mixed, inputs=inputs)[0] == ["where"]
    inverted = "%n = logical_not(%m) %y = where(%n, %x, %b)"
    names, graph, _ = _run(inverted, inputs=inputs + " input %m: bool[N,3]")
    assert names == ["where"]
    assert [o.name for o in graph.block.nodes()[0].operands if o] == ["m", "b", "x"]


_GRID = """
  %zero = constant() {data=literal dense<i64[]: 0>}
  %one = constant() {data=literal dense<i64[]: 1>}
  %ra = range(%zero, %one) {size=<N>}
  %rb = range(%zero, %one) {size=<S>}
  %a1 = reshape(%ra) {shape=(<N>, 1, 1, 1)}
  %b1 = reshape(%rb) {shape=(1, 1, 1, <S>)}
  %a2 = expand(%a1) {shape=(<N>, 1, 1, <S>)}
  %b2 = expand(%b1) {shape=(<N>, 1, 1, <S>)}
  %a3 = reshape(%a2) {shape=(<N>, 1, 1, <S>, 1)}
  %b3 = reshape(%b2) {shape=(<N>, 1, 1, <S>, 1)}
"""


def test_gathering_over_a_counting_grid_is_its_data() -> None:
    text = _GRID + "%grid = concat(%a3, %b3) {axis=4} %y = gather_nd(%x, %grid)"
    names, graph, _ = _run(text, inputs="input %x: f32[N,S]")
    assert names == ["reshape"]
    assert str(graph.outputs[0].type) == "f32[N,1,1,S]"


def test_a_grid_that_swaps_its_components_transposes() -> None:
    text = _GRID + "%grid = concat(%b3, %a3) {axis=4} %y = gather_nd(%x, %grid)"
    assert _run(text, inputs="input %x: f32[S,N]")[0] == ["transpose", "reshape"]


def test_a_grid_that_counts_elsewhere_stays() -> None:
    text = _GRID + "%grid = concat(%b3, %a3) {axis=4} %y = gather_nd(%x, %grid)"
    names, _, ctx = _run(text, inputs="input %x: f32[N,S]")
    assert "gather_nd" in names
    assert "a component counts to S where the data has N" in "\n".join(ctx.report)
    doubled = _GRID.replace("range(%zero, %one) {size=<S>}", "range(%one, %one) {size=<S>}")
    text = doubled + "%grid = concat(%a3, %b3) {axis=4} %y = gather_nd(%x, %grid)"
    assert "gather_nd" in _run(text, inputs="input %x: f32[N,S]")[0]


def test_gathering_everything_in_order_vanishes() -> None:
    text = "%i = constant() {data=literal dense<i64[3]: 0, 1, 2>} %y = gather(%x, %i) {axis=1}"
    assert _run(text)[0] == []
    assert _run(text.replace("0, 1, 2", "0, 2, 1"))[0] == ["gather"]
