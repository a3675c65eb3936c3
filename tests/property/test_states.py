# SPDX-License-Identifier: Apache-2.0
"""Random graphs with states: however they run, they compute what a loop over the graph without states does.

A recipe makes values from an input, the states and each other, writes rows into some states and makes others what a
value is. The loop feeds the next values back by hand, through inputs, and so uses nothing of what is tested here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.backends.protocol import CompileOptions
from rlx.backends.registry import get_backend
from rlx.base.config import override
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ir.op import registered_ops
from rlx.ops.elementwise import cast, maximum
from rlx.ops.evaluate import evaluate
from rlx.ops.indexing import gather
from rlx.ops.leaf import constant
from rlx.ops.movement import flip, reshape, slice_axis
from rlx.ops.reduce import reduce_max
from rlx.ops.spec import building, emit_one
from rlx.ops.state import write_rows
from rlx.runtime.executable import Executable
from rlx.runtime.source import graph_source

_ROWS, _WIDTH, _RUNS = 5, 3, 4
_DTYPES = (DType.F32, DType.F16, DType.I32, DType.I8)
_Step = tuple[int, int, int, int]
_STEP = st.tuples(*[st.integers(0, 1 << 16)] * 4)
_RECIPE = st.lists(_STEP, min_size=1, max_size=12)
_STATES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 16)), min_size=1, max_size=3)


class _Maker:
    """Makes one graph of a recipe, with states or with inputs and outputs in their place."""

    def __init__(
        self, recipe: list[_Step], states: list[tuple[int, int]], *, stateful: bool
    ) -> None:
        self.graph = Graph("random")
        types = [TensorType(_DTYPES[int(kind)], (_ROWS, _WIDTH)) for kind, _ in states]
        x = self.graph.add_input("x", TensorType(DType.F32, (_ROWS, _WIDTH)))
        self.position = self.graph.add_input("at", TensorType(DType.I64, ()))
        leaves: list[Value] = []
        for index, type_ in enumerate(types):
            init: Array = np.array(index, np.int64).astype(type_.dtype.numpy)
            if stateful:
                leaves.append(self.graph.add_state(f"s{index}", type_, init).value)
            else:
                leaves.append(self.graph.add_input(f"s{index}", type_))
        self.values = [x, *leaves]
        with building(Builder(self.graph.block, self.graph.facts)):
            for step in recipe:
                self.values.append(self.step(*step))
            following = [
                self.next(leaf, choice) for leaf, (_, choice) in zip(leaves, states, strict=True)
            ]
        outputs = {f"y{i}": v for i, v in enumerate(self.values[-3:])}
        if stateful:
            for state, value in zip(self.graph.states, following, strict=True):
                state.next = value
            self.graph.set_outputs(outputs)
        else:
            self.graph.set_outputs(outputs | {f"n{i}": v for i, v in enumerate(following)})

    def pick(self, number: int, dtype: DType | None = None) -> Value:
        found = self.values[-1 - number % len(self.values)]
        return found if dtype is None or found.type.dtype is dtype else cast(found, dtype)

    def step(self, kind: int, first: int, second: int, third: int) -> Value:
        """Return a value of the common shape; small integers, so that every order of work gives the same bits."""
        a = self.pick(first)
        dtype = a.type.dtype
        steps = (
            lambda: maximum(a, self.pick(second, dtype)),
            lambda: cast(maximum(a, constant(1, dtype)), _DTYPES[third % len(_DTYPES)]),
            lambda: flip(a, third % 2),
            lambda: gather(a, constant(np.array([4, -5, 2, 2, 1])), 0),
            lambda: reshape(reshape(a, (_ROWS * _WIDTH,)), (_ROWS, _WIDTH)),
            lambda: maximum(a, reduce_max(a, (third % 2,))),
            lambda: emit_one(registered_ops()["neg"](), a) if third % 2 else a + constant(1, dtype),
            lambda: self.written(a, second, third),
        )
        return steps[kind % len(steps)]()

    def written(self, value: Value, rows: int, how: int) -> Value:
        part = slice_axis(self.pick(rows, value.type.dtype), 0, how % (_ROWS - 1), 1 + how % 2)
        return write_rows(value, part, self.position, ring=True, copy=True)

    def next(self, leaf: Value, choice: int) -> Value:
        if choice % 3 == 0:
            return self.written(leaf, choice // 3, choice // 7)
        return self.pick(choice // 3, leaf.type.dtype)


def _inputs(run: int) -> dict[str, Array]:
    rng = np.random.default_rng(run)
    return {
        "x": rng.integers(-3, 4, (_ROWS, _WIDTH)).astype(np.float32),
        "at": np.array(int(rng.integers(-4, 9))),
    }


def _loop(recipe: list[_Step], states: list[tuple[int, int]]) -> list[dict[str, Array]]:
    """Run the graph without states, feeding the next values back by hand."""
    graph = _Maker(recipe, states, stateful=False).graph
    held = {
        v.name: np.full((_ROWS, _WIDTH), int(v.name[1:]), v.type.dtype.numpy)
        for v in graph.inputs
        if v.name.startswith("s")
    }
    results: list[dict[str, Array]] = []
    for run in range(_RUNS):
        found = evaluate(graph, {**_inputs(run), **held})
        held = {name: found.pop(f"n{name[1:]}") for name in held}
        results.append({**found, **held})
    return results


def _stateful(
    recipe: list[_Step], states: list[tuple[int, int]], device: str, threads: int
) -> list[Any]:
    graph, backend = _Maker(recipe, states, stateful=True).graph, get_backend(device)
    target, options = backend.targets()[0], CompileOptions(threads=threads)
    with (
        override(RLX_CHECK=True, RLX_VERIFY=True),
        Executable(graph_source(graph), backend, target, options) as run,
    ):
        results: list[dict[str, Array]] = []
        for number in range(_RUNS):
            found = run.run(_inputs(number))
            results.append({**found, **{name: s.get() for name, s in run.state.items()}})
        return results


@settings(max_examples=300, deadline=None)
@given(_RECIPE, _STATES, st.integers(1, 2))
def test_states_equal_a_loop_that_feeds_them_by_hand(
    recipe: list[_Step], states: list[tuple[int, int]], threads: int
) -> None:
    expected = _loop(recipe, states)
    for device in ("reference", "cpu"):
        found = _stateful(recipe, states, device, threads)
        for got, want in zip(found, expected, strict=True):
            assert got.keys() == want.keys()
            for name, array in want.items():
                assert got[name].dtype == array.dtype
                np.testing.assert_array_equal(got[name], array, err_msg=f"{device} {name}")
