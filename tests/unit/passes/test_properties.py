# SPDX-License-Identifier: Apache-2.0
"""Random small graphs: the text form round-trips, and passes keep every bit of every output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.clone import clone_graph
from rlx.ir.graph import Graph, Value
from rlx.ir.op import registered_ops
from rlx.ir.parse import parse_graph
from rlx.ir.text import content_hash, print_graph
from rlx.ir.verify import verify
from rlx.ops.elementwise import cast, logical_not, where
from rlx.ops.evaluate import evaluate
from rlx.ops.leaf import constant
from rlx.ops.movement import Concat, Expand, Reshape, Slice, Transpose
from rlx.ops.spec import building, emit_one
from rlx.passes.canonicalize import Canonicalize
from rlx.passes.cse import Cse
from rlx.passes.dce import Dce
from rlx.passes.fold import Fold
from rlx.passes.hoist import Hoist
from rlx.passes.manager import Pass, PassContext

_SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    0.5,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
    3.4e38,
)
_UNARY = ("neg", "abs", "sqrt", "floor", "relu", "sign", "round")
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "pow")
_DTYPES = (DType.F32, DType.F16, DType.F64, DType.I8, DType.I32, DType.BOOL)
_EXTENT = 3


class _Maker:
    """Adds random nodes; values are f32 of a few shapes over N and constants."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        self.n = symbol("N")
        self.graph = Graph("random")
        self.values: list[Value] = [
            self.graph.add_input("x", TensorType(DType.F32, (self.n, 3))),
            self.graph.add_input("z", TensorType(DType.F32, (3,))),
        ]
        for i in range(2):
            data = np.array([draw(st.sampled_from(_SPECIAL)) for _ in range(3)], np.float32)
            self.values.append(self.graph.add_param(f"w{i}", data, TensorType(DType.F32, (3,))))

    def pick(self, *ranks: int) -> Value:
        return self.draw(
            st.sampled_from([v for v in self.values if not ranks or v.type.rank in ranks])
        )

    def step(self) -> Value:
        kinds = (
            self.binary,
            self.binary,
            self.unary,
            self.move,
            self.choose,
            self.convert,
            self.literal,
        )
        kind = self.draw(st.sampled_from(kinds))
        return kind()

    def unary(self) -> Value:
        op = registered_ops()[self.draw(st.sampled_from(_UNARY))]()
        return emit_one(op, self.pick())

    def binary(self) -> Value:
        op = registered_ops()[self.draw(st.sampled_from(_BINARY))]()
        a = self.pick()
        b = self.literal() if self.draw(st.booleans()) else self.pick()
        a, b = (b, a) if self.draw(st.booleans()) else (a, b)
        fits = [v for v in (a, b) if v.type.shape in ((), (3,), (self.n, 3))]
        return emit_one(op, *(fits if len(fits) == 2 else (a, a)))

    def literal(self) -> Value:
        number = np.float32(self.draw(st.sampled_from(_SPECIAL)))
        return constant(np.full(self.draw(st.sampled_from(((), (3,)))), number, np.float32))

    def choose(self) -> Value:
        a = self.pick()
        condition = self.draw(st.sampled_from((None, True, False)))
        if condition is not None:
            return where(constant(np.array(condition)), a, emit_one(registered_ops()["neg"](), a))
        mask = emit_one(registered_ops()["less"](), a, constant(np.float32(0.5)))
        return where(logical_not(mask), a, constant(np.float32(1)))

    def convert(self) -> Value:
        first, second = (self.draw(st.sampled_from(_DTYPES)) for _ in range(2))
        return cast(cast(cast(self.pick(), first), second), DType.F32)

    def move(self) -> Value:
        kind = self.draw(
            st.sampled_from((self.transpose, self.reshape, self.slice, self.expand, self.concat))
        )
        return kind()

    def transpose(self) -> Value:
        x = self.pick()
        return emit_one(Transpose(tuple(self.draw(st.permutations(range(x.type.rank))))), x)

    def reshape(self) -> Value:
        x = self.pick()
        shapes: list[tuple[Dim, ...]] = [
            (x.type.elements,),
            (1, x.type.elements),
            x.type.shape,
            (*x.type.shape, 1),
        ]
        if x.type.elements == 3 * self.n:
            shapes.append((self.n, 3))
        return emit_one(Reshape(self.draw(st.sampled_from(shapes))), x)

    def slice(self) -> Value:
        x = self.pick()
        starts: list[Dim] = []
        sizes: list[Dim] = []
        steps: list[int] = []
        for extent in x.type.shape:
            reverse = self.draw(st.booleans())
            whole = not isinstance(extent, int) or self.draw(st.booleans())
            size = extent if whole else max(extent - 1, 1)
            starts.append(extent - 1 if reverse else 0)
            sizes.append(size)
            steps.append(-1 if reverse else 1)
        return emit_one(Slice(tuple(starts), tuple(sizes), tuple(steps)), x)

    def expand(self) -> Value:
        x = self.pick()
        shape = (self.n, 3) if x.type.shape in ((), (3,), (self.n, 3)) else x.type.shape
        return emit_one(Expand(shape), x)

    def concat(self) -> Value:
        x = self.pick(1, 2, 3)
        parts = [x] * self.draw(st.integers(1, 2))
        return emit_one(Concat(0), *parts)


@st.composite
def graphs(draw: Callable[..., Any]) -> Graph:
    """Graphs of up to a dozen random steps, most of whose values are outputs."""
    maker = _Maker(draw)
    with building(Builder(maker.graph.block, maker.graph.facts)):
        for _ in range(draw(st.integers(1, 12))):
            maker.values.append(maker.step())
    kept = [v for v in maker.values[4:] if draw(st.integers(0, 3))] or maker.values[-1:]
    maker.graph.set_outputs({f"y{i}": v for i, v in enumerate(kept)})
    return maker.graph


def _inputs() -> dict[str, Array]:
    x = np.array([[1.5, -0.0, np.inf], [-2.25, np.nan, 0.5], [3e38, 1e-45, -7.0]], np.float32)
    return {"x": x[:_EXTENT], "z": np.array([-0.0, 2.0, -np.inf], np.float32)}


def _assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (array.dtype, array.shape)
        # NaNs are equal whatever their payload and sign; everything else to the bit.
        np.testing.assert_array_equal(other != other, array != array)  # noqa: PLR0124
        keep = array == array  # noqa: PLR0124
        assert other[keep].tobytes() == array[keep].tobytes()


@settings(deadline=None)
@given(graphs())
def test_the_text_form_round_trips(graph: Graph) -> None:
    text = print_graph(graph)
    again = parse_graph(text)
    verify(again)
    assert print_graph(again) == text
    assert content_hash(again) == content_hash(graph)
    _assert_same(evaluate(again, _inputs()), evaluate(graph, _inputs()))


@pytest.mark.parametrize("step", [Canonicalize(), Fold(), Cse(), Dce()], ids=lambda s: s.name)
@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_passes_keep_every_bit(step: Pass, graph: Graph) -> None:
    changed = clone_graph(graph)
    step.run(changed, PassContext())
    verify(changed)
    _assert_same(evaluate(changed, _inputs()), evaluate(graph, _inputs()))
    again = print_graph(changed)
    step.run(changed, PassContext())
    assert print_graph(changed) == again, "a second run changes nothing"


@pytest.mark.parametrize(
    "dtype", [DType.F32, DType.F16, DType.BF16, DType.F64, DType.I32, DType.U8], ids=str
)
@pytest.mark.parametrize(
    "name", [*_BINARY, "bit_or", "bit_xor", "shift_left", "shift_right", "floor_mod"]
)
def test_every_special_operand_on_either_side_keeps_every_bit(name: str, dtype: DType) -> None:
    op = registered_ops()[name]()
    is_bitwise = name.startswith(("bit", "shift"))
    if is_bitwise and dtype.is_float:
        return  # a type error, which the operator's own tests check
    specials = _SPECIAL if dtype.is_float else (0, 1, 2, 3, 7, 100)
    with np.errstate(over="ignore"):
        numbers = np.array(specials).astype(dtype.numpy)
    for number in numbers:
        if name in ("div", "floor_mod") and not dtype.is_float and number == 0:
            continue
        for left in (False, True):
            graph = Graph()
            x = graph.add_input("x", TensorType(dtype, numbers.shape))
            with building(Builder(graph.block, graph.facts)):
                c = constant(np.array(number))
                graph.set_outputs({"y": emit_one(op, c, x) if left else emit_one(op, x, c)})
            changed = clone_graph(graph)
            Canonicalize().run(changed, PassContext())
            given = {
                "x": numbers if dtype.is_float else np.maximum(numbers, 1).astype(numbers.dtype)
            }
            _assert_same(evaluate(changed, given), evaluate(graph, given))


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_hoisting_keeps_every_bit(graph: Graph) -> None:
    changed, ctx = clone_graph(graph), PassContext()
    for step in (Canonicalize(), Hoist(), Canonicalize(), Hoist()):
        step.run(changed, ctx)
        verify(changed)
        verify(ctx.params.graph)
    derived = evaluate(ctx.params.graph, {})
    data = {n: derived.get(n, p.data) for n, p in changed.params.items()}
    _assert_same(
        evaluate(changed, _inputs(), {n: a for n, a in data.items() if a is not None}),
        evaluate(graph, _inputs()),
    )
