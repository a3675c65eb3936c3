# SPDX-License-Identifier: Apache-2.0
"""Random graphs: however they are compiled, they compute the same.

A recipe is a list of small numbers; `_build` turns it into a graph whose extent N is a number or a symbol, so that one
recipe can be compiled in several ways. Everything runs with the checker of the memory plan and a poisoned arena.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.backends.protocol import CompileOptions
from rlx.backends.registry import get_backend
from rlx.base.config import override
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ir.op import registered_ops
from rlx.memory.plan import plan_memory
from rlx.ops.elementwise import cast, sigmoid, tanh
from rlx.ops.indexing import gather
from rlx.ops.leaf import constant
from rlx.ops.matmul import matmul
from rlx.ops.movement import concat, flip, pad, reshape, slice_axis, transpose
from rlx.ops.norm import layer_norm, softmax
from rlx.ops.reduce import reduce_max, reduce_mean, reduce_sum
from rlx.ops.spec import ElementwiseOp, building, emit_one
from rlx.passes.fuse import FuseEpilogues, FuseRegions
from rlx.passes.manager import Pipeline
from rlx.passes.pipelines import default_pipeline
from rlx.runtime.executable import Executable
from rlx.runtime.source import graph_source
from rlx.testing.tolerances import family_of

_WIDTH = 5
_EXAMPLES = 400
_SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -2.5,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-39,
        3.4e38,
        255.5,
        7.0,
        -3.0,
    ],
    np.float32,
)
_WEIGHTS: dict[str, tuple[int, ...]] = {"row": (_WIDTH,), "one": ()}
_STEP = st.tuples(*[st.integers(0, 1 << 16)] * 5)
_RECIPE = st.lists(_STEP, min_size=1, max_size=14)


def _elementwise(*, exact: bool) -> list[type[ElementwiseOp]]:
    """Return the elementwise operators on f32, all or those that round at most once."""
    found: list[type[ElementwiseOp]] = []
    for _, cls in sorted(registered_ops().items()):
        if not issubclass(cls, ElementwiseOp) or DType.F32 not in cls.decl.domain or cls.decl.mixed:
            continue
        if not exact or family_of(cls(), [DType.F32] * cls.decl.arity) == "exact":
            found.append(cls)
    return found


_EXACT = _elementwise(exact=True)
_ALL = _elementwise(exact=False)


# -- graphs ------------------------------------------------------------------------------------------------------------


class _Maker:
    def __init__(self, n: Dim, weights: dict[str, Array] | None = None) -> None:
        self.n = n
        self.graph = Graph("random")
        self.values: list[Value] = [self.graph.add_input("x", TensorType(DType.F32, (n, _WIDTH)))]
        for name, shape in _WEIGHTS.items():
            type_ = TensorType(DType.F32, shape)
            if weights is None:
                self.values.append(self.graph.add_input(name, type_))
            else:
                self.values.append(self.graph.add_param(name, weights[name], type_))

    def pick(self, number: int) -> Value:
        return self.values[-1 - number % len(self.values)]

    def matrix(self, number: int) -> Value:
        """Return one of the values of shape [N, width]."""
        whole = [v for v in self.values if v.type.shape == (self.n, _WIDTH)]
        return whole[-1 - number % len(whole)]


def _apply(maker: _Maker, cls: type[ElementwiseOp], *numbers: int) -> Value:
    values = [maker.pick(number) for number in numbers[: cls.decl.arity]]
    y = emit_one(cls(), *values)
    return y if y.type.dtype is DType.F32 else cast(y, DType.F32)


def _pointwise(maker: _Maker, step: tuple[int, ...], choices: list[type[ElementwiseOp]]) -> Value:
    kind, which, *numbers = step
    if kind % 8 == 0:
        return cast(
            cast(maker.pick(which), (DType.I32, DType.F16, DType.BF16, DType.BOOL)[numbers[0] % 4]),
            DType.F32,
        )
    if kind % 8 == 1:
        return constant(_SPECIAL[which % len(_SPECIAL)])
    return _apply(maker, choices[which % len(choices)], *numbers)


def _bounded(maker: _Maker, step: tuple[int, ...]) -> Value:
    """Return a step that keeps values and errors small, so that one tolerance fits every graph."""
    kind, which, first, second, third = step
    x = maker.matrix(first)
    width = np.linspace(-0.3, 0.4, _WIDTH * _WIDTH, dtype=np.float32).reshape(_WIDTH, _WIDTH)
    steps: tuple[Callable[[], Value], ...] = (
        lambda: (maker.pick(first) + maker.pick(second)) * constant(np.float32(0.5)),
        lambda: maker.pick(first) * tanh(maker.pick(second)),
        lambda: sigmoid(maker.pick(first)),
        lambda: matmul(x, constant(width)),
        lambda: softmax(x, which % 2),
        lambda: layer_norm(x, axis=1, eps=0.1),
        lambda: x - reduce_mean(x, [1]),
        lambda: x - reduce_max(x, [which % 2]),
        lambda: x + tanh(reduce_sum(x, [0])),
        lambda: slice_axis(concat([x, maker.matrix(second)], 1), 1, which % _WIDTH, _WIDTH),
        lambda: gather(x, constant(np.array([4, -5, 2, 2, 1])), 1),
        lambda: flip(x, which % 2),
        lambda: reshape(transpose(transpose(x)), (maker.n, _WIDTH)),
        lambda: transpose(tanh(transpose(x) + constant(np.float32(0.25)))),
        lambda: slice_axis(pad(x, (0, 1), (0, 1)), 1, third % 3, _WIDTH),
        lambda: reshape(
            reshape(x, (maker.n * _WIDTH,)) * constant(np.float32(-0.75)), (maker.n, _WIDTH)
        ),
        lambda: _leaky(x, maker.pick(second), maker.pick(third)),
    )
    return steps[kind % len(steps)]()


def _leaky(x: Value, y: Value, slope: Value) -> Value:
    """Return half of x - y, scaled where x >= y: a choice between equal values where rounding decides it."""
    half = (x - y) * constant(np.float32(0.5))
    below = emit_one(registered_ops()["less"](), x, y)
    return emit_one(registered_ops()["where"](), below, half, half * tanh(slope))


def _build(
    recipe: list[tuple[int, ...]],
    n: Dim,
    step: Callable[..., Value],
    weights: dict[str, Array] | None = None,
) -> Graph:
    """Return the graph of a recipe; the last value and every third one are outputs.

    What is in `weights` are params, otherwise they are inputs.
    """
    maker = _Maker(n, weights)
    with building(Builder(maker.graph.block, maker.graph.facts)):
        for numbers in recipe:
            maker.values.append(step(maker, numbers))
    made = maker.values[3:]
    kept = {i: v for i, v in enumerate(made) if i % 3 == 2 or i == len(made) - 1}
    maker.graph.set_outputs({f"y{i}": v for i, v in kept.items()})
    return maker.graph


def _inputs(n: int, *, special: bool) -> dict[str, Array]:
    rng = np.random.default_rng(n)

    def make(*shape: int) -> Array:
        if special:
            return rng.choice(_SPECIAL, shape).astype(np.float32)
        return rng.uniform(-1, 1, shape).astype(np.float32)

    return {"x": make(n, _WIDTH), "row": make(_WIDTH), "one": make()}


# -- ways of compiling ---------------------------------------------------------------------------------------------


def _run(
    graph: Graph, inputs: dict[str, Array], device: str = "cpu", threads: int = 1
) -> dict[str, Array]:
    with override(RLX_CHECK=True, RLX_VERIFY=True), _compiled(graph, device, threads) as run:
        return run.run(inputs)


def _compiled(graph: Graph, device: str = "cpu", threads: int = 1) -> Executable:
    backend = get_backend(device)
    return Executable(
        graph_source(graph), backend, backend.targets()[0], CompileOptions(threads=threads)
    )


@contextmanager
def _unfused() -> Generator[None]:
    """Compile with one kernel per operator."""

    def pipeline(*arguments: Any) -> Pipeline:
        entries = default_pipeline(*arguments).entries
        return Pipeline(
            tuple(e for e in entries if not isinstance(e.step, FuseRegions | FuseEpilogues))
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlx.runtime.compile.default_pipeline", pipeline)
        yield


@contextmanager
def _without_reuse() -> Generator[None]:
    """Plan memory with bytes of its own for every value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlx.backends.cpu.program.plan_memory", partial(plan_memory, reuse=False))
        yield


def _same_bits(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(found) == list(expected)
    for name, want in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        number = want == want  # noqa: PLR0124  (NaNs are equal whatever their payload)
        np.testing.assert_array_equal(got == got, number, err_msg=name)  # noqa: PLR0124
        np.testing.assert_array_equal(
            got[number].view(np.uint32), want[number].view(np.uint32), err_msg=name
        )


def _close(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """Values and the derivatives of the steps are of order 1: ten steps of a few dozen roundings stay below 1e-4."""
    for name, want in expected.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-4, err_msg=name)


# -- properties ----------------------------------------------------------------------------------------------------


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_RECIPE, st.integers(1, 9))
def test_exact_elementwise_graphs_equal_the_reference_bit_for_bit(
    recipe: list[Any], n: int
) -> None:
    graph = _build(recipe, n, partial(_pointwise, choices=_EXACT))
    inputs = _inputs(n, special=True)
    expected = _run(graph, inputs, "reference")
    _same_bits(_run(graph, inputs), expected)
    with _unfused():
        _same_bits(_run(graph, inputs), expected)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_RECIPE, st.integers(1, 9))
def test_fused_elementwise_graphs_equal_unfused_ones_bit_for_bit(recipe: list[Any], n: int) -> None:
    graph = _build(recipe, n, partial(_pointwise, choices=_ALL))
    inputs = _inputs(n, special=True)
    found = _run(graph, inputs)
    with _unfused():
        _same_bits(found, _run(graph, inputs))


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_RECIPE, st.integers(1, 70))
def test_graphs_equal_the_reference_fused_and_unfused(recipe: list[Any], n: int) -> None:
    graph = _build(recipe, n, _bounded)
    inputs = _inputs(n, special=False)
    expected = _run(graph, inputs, "reference")
    _close(_run(graph, inputs), expected)
    with _unfused():
        _close(_run(graph, inputs), expected)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_RECIPE, st.integers(1, 70))
def test_reuse_of_memory_and_threads_change_nothing(recipe: list[Any], n: int) -> None:
    graph = _build(recipe, n, _bounded)
    inputs = _inputs(n, special=False)
    found = _run(graph, inputs)
    _same_bits(_run(graph, inputs, threads=2), found)
    with _without_reuse():
        _same_bits(_run(graph, inputs), found)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_RECIPE)
def test_symbolic_graphs_equal_static_ones(recipe: list[Any]) -> None:
    graph = _build(recipe, symbol("N"), _bounded)
    with override(RLX_CHECK=True), _compiled(graph) as run:
        for n in (7, 1, 33):
            inputs = _inputs(n, special=False)
            expected = _run(_build(recipe, n, _bounded), inputs, "reference")
            _close(run.run(inputs), expected)
        assert run.variants == 1


@settings(max_examples=_EXAMPLES // 4, deadline=None)
@given(_RECIPE, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_all_ways_of_running_give_the_same(recipe: list[Any], sizes: list[int]) -> None:
    """By name and position, some outputs, into buffers, asynchronously, pipelined: at once, with extents that vary."""
    inputs = [_inputs(n, special=False) for n in sizes]
    graph = _build(recipe, symbol("N"), _bounded)
    with override(RLX_CHECK=True), _compiled(graph, threads=2) as run:
        want = [run.run(given) for given in inputs]
        futures = [run.run_async(given) for given in inputs]
        pipelined = run.run_pipelined(list(given.values()) for given in inputs)
        for given, expected, future, piped in zip(inputs, want, futures, pipelined, strict=True):
            _same_bits(future.result(), expected)
            _same_bits(piped, expected)
            buffers = {name: np.full_like(y, np.nan) for name, y in expected.items()}
            found = run.run(given, out=buffers)
            assert all(found[name] is buffers[name] for name in expected)
            _same_bits(buffers, expected)
            last = list(expected)[-1]
            _same_bits(run.run(given, [last]), {last: expected[last]})


@settings(max_examples=_EXAMPLES // 4, deadline=None)
@given(_RECIPE)
def test_weights_set_later_clones_and_packages_equal_a_fresh_compilation(
    tmp_path_factory: pytest.TempPathFactory, recipe: list[Any]
) -> None:
    inputs, other = _inputs(6, special=False), _inputs(7, special=False)
    x = {"x": inputs.pop("x")}
    del other["x"]
    expected = _run(_build(recipe, 6, _bounded, other), x)
    path = tmp_path_factory.getbasetemp() / "random.rlxp"
    with override(RLX_CHECK=True), _compiled(_build(recipe, 6, _bounded, inputs)) as run:
        first = run.run(x)
        twin = run.clone()
        for name in other:
            run.set_param(name, other[name])
            assert run.get_param(name).tobytes() == other[name].tobytes()
        _same_bits(run.run(x), expected)
        _same_bits(run.clone().run(x), expected)
        _same_bits(twin.run(x), first)
        run.save(path)
        with rlx.open(path) as opened:
            _same_bits(opened.run(x), expected)
            for name, value in inputs.items():
                opened.set_param(name, value)
            _same_bits(opened.run(x), first)


def test_the_registry_feeds_these_graphs() -> None:
    assert len(_EXACT) > 15
    assert len(_ALL) > len(_EXACT)
