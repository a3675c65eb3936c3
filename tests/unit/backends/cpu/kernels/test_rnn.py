# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on the CPU against their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.backends.cpu.kernels  # pyright: ignore[reportUnusedImport]
from rlx.backends.cpu.isa import Isa, generic_isa, host_isa
from rlx.backends.cpu.rnn_ops import Layer
from rlx.backends.cpu.rnn_passes import SplitRecurrent
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array, cast
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate
from rlx.ops.rnn import ACTIVATIONS, GRU, LSTM, RNN
from rlx.ops.spec import emit
from rlx.passes.fuse import FormRegions
from rlx.passes.manager import PassContext

Lower = Callable[[Graph, Isa], Any]
_OPTIONAL = {
    LSTM: ("b", "lens", "h0", "c0", "p"),
    GRU: ("b", "lens", "h0"),
    RNN: ("b", "lens", "h0"),
}


def _isas() -> list[Isa]:
    host = host_isa()
    try:
        return list({isa.name: isa for isa in (host, host.restricted("v3"))}.values())
    except UsageError:
        return [host]


def _shapes(layer: Layer, steps: Dim, batch: Dim, inputs: int) -> dict[str, tuple[Dim, ...]]:
    d, h, g = layer.directions, layer.hidden, layer.gates
    state = (batch, d, h) if layer.layout else (d, batch, h)
    x = (batch, steps, inputs) if layer.layout else (steps, batch, inputs)
    shapes: dict[str, tuple[Dim, ...]] = {
        "x": x,
        "w": (d, g * h, inputs),
        "r": (d, g * h, h),
        "b": (d, 2 * g * h),
    }
    return shapes | {"lens": (batch,), "h0": state, "c0": state, "p": (d, 3 * h)}


class _Case:
    """A layer with some of its optional operands, over symbolic steps and batch, split once."""

    def __init__(
        self,
        layer: Layer,
        isa: Isa,
        lower: Lower,
        present: tuple[str, ...],
        dtype: DType = DType.F32,
    ) -> None:
        self.layer = layer
        self.dtype = dtype
        self.names = ["x", "w", "r", *(n for n in _OPTIONAL[type(layer)] if n in present)]
        self.graph = self._graph()
        self.lowered = lower(self._split(isa), isa)

    def _graph(self) -> Graph:
        graph = Graph()
        steps, batch = symbol("steps", lower=0), symbol("batch", lower=0)
        shapes = _shapes(self.layer, steps, batch, 5)
        operands = {
            n: graph.add_input(n, TensorType(DType.I32 if n == "lens" else self.dtype, shapes[n]))
            for n in self.names
        }
        builder = Builder(graph.block, graph.facts)
        every = ("x", "w", "r", *_OPTIONAL[type(self.layer)])
        results = builder.emit(self.layer, *(operands.get(n) for n in every))
        graph.set_outputs({f"out{i}": r for i, r in enumerate(results)})
        return graph

    def _split(self, isa: Isa) -> Graph:
        graph = self._graph()
        SplitRecurrent(isa).run(graph, PassContext())
        FormRegions().run(graph, PassContext())
        assert not any(isinstance(n.op, (LSTM, GRU, RNN)) for n in graph.block.walk())
        return graph

    def check(self, steps: int, batch: int) -> None:
        rng = np.random.default_rng(steps * 31 + batch)
        shapes = _shapes(self.layer, steps, batch, 5)
        inputs: dict[str, Array] = {}
        for name in self.names:
            if name == "lens":
                inputs[name] = rng.integers(0, steps + 1, batch).astype(np.int32)
            else:
                # Weights of large layers as trained ones are, or their sums saturate every gate.
                most = min(1.0, 6 / np.sqrt(self.layer.hidden)) if name == "r" else 1.0
                inputs[name] = cast(rng.uniform(-most, most, shapes[name]), self.dtype)
        exact = evaluate(self.graph, inputs, exact=True)
        found = self.lowered.run(inputs)
        bound = {DType.F32: 2e-6, DType.F64: 1e-14, DType.F16: 2e-3}[self.dtype]
        bound *= max(1, self.layer.hidden / 70)  # the error of a chain of FMAs grows with it
        for name, want in exact.items():
            np.testing.assert_allclose(
                found[name].astype(np.float64),
                want.astype(np.float64),
                rtol=bound,
                atol=bound,
                err_msg=name,
            )


_LAYERS: list[Layer] = [
    LSTM(19, "bidirectional"),
    LSTM(16, "reverse", input_forget=True),
    LSTM(6, layout=1, clip=0.5),
    LSTM(40),
    GRU(19, "bidirectional"),
    GRU(7, "reverse", layout=1),
    GRU(40, "bidirectional", linear_before_reset=True),
    GRU(16, linear_before_reset=True, layout=1),
    RNN(19, "bidirectional"),
    RNN(70),
    RNN(6, "reverse", layout=1, activations=("relu",)),
]
_LARGE: list[Layer] = [
    LSTM(165, "bidirectional"),
    LSTM(160, "reverse", layout=1),
    GRU(230, "bidirectional"),
    GRU(185, linear_before_reset=True),
    RNN(330, layout=1),
]
"""Layers whose every step is a launch, split over hidden units."""


@pytest.mark.parametrize("isa", _isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize(
    "layer", _LAYERS, ids=lambda op: f"{op.name}{op.hidden}{op.direction[:2]}{op.layout}"
)
@pytest.mark.parametrize("present", [(), ("b", "lens", "h0", "c0", "p")], ids=["plain", "all"])
def test_layer(layer: Layer, present: tuple[str, ...], isa: Isa, lower_graph: Lower) -> None:
    case = _Case(layer, isa, lower_graph, present)
    for steps, batch in ((3, 1), (1, 2), (2, 5), (2, 14), (0, 2), (2, 0), (1, 30)):
        case.check(steps, batch)


@pytest.mark.parametrize("isa", _isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("layer", _LARGE, ids=lambda op: f"{op.name}{op.hidden}{op.direction[:2]}")
def test_large_layer(layer: Layer, isa: Isa, lower_graph: Lower) -> None:
    case = _Case(layer, isa, lower_graph, ("b", "lens", "h0", "c0", "p"))
    steps = [t.kernel.symbol for t in case.lowered.program.thunks if t.chunks not in (0, 1)]
    assert any("_step_" in symbol for symbol in steps)
    for count, batch in ((4, 1), (3, 14), (0, 2), (1, 0)):
        case.check(count, batch)


@pytest.mark.parametrize("layer", _LARGE[1:3], ids=lambda op: op.name)
def test_threads_give_equal_bits(layer: Layer) -> None:
    rng = np.random.default_rng(3)
    shapes = _shapes(layer, 40, 3, 5)
    inputs = {n: rng.uniform(-1, 1, shapes[n]).astype(np.float32) / 4 for n in ("x", "w", "r")}
    with rlx.Graph() as graph:
        operands = [graph.input(name, a.shape) for name, a in inputs.items()]
        graph.output("y", emit(layer, *operands)[0])
    found: list[bytes] = []
    for threads in (1, 2):
        with rlx.compile(graph, threads=threads) as program:
            found += [program.run(inputs)["y"].tobytes() for _ in range(5)]
    assert len(set(found)) == 1


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name: str, lower_graph: Lower) -> None:
    other = "tanh" if name != "tanh" else "relu"
    layer = GRU(9, "bidirectional", activations=("sigmoid", name, "hardsigmoid", other), clip=0.75)
    _Case(layer, host_isa(), lower_graph, ("b", "h0")).check(2, 3)


def test_activation_parameters(lower_graph: Lower) -> None:
    layer = LSTM(
        9,
        activations=("hardsigmoid", "scaledtanh", "affine"),
        alphas=(0.3, 1.5, 0.5),
        betas=(0.4, 0.5, None),
    )
    _Case(layer, host_isa(), lower_graph, ("b", "c0")).check(2, 3)


@pytest.mark.parametrize("dtype", [DType.F64, DType.F16])
def test_dtypes(dtype: DType, lower_graph: Lower) -> None:
    _Case(LSTM(19), host_isa(), lower_graph, ("b", "h0", "c0"), dtype).check(3, 4)


def test_sequences_do_not_depend_on_their_neighbours(lower_graph: Lower) -> None:
    case = _Case(LSTM(33), host_isa(), lower_graph, ("b",))
    rng = np.random.default_rng(5)
    shapes = _shapes(case.layer, 3, 17, 5)
    inputs = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in case.names}
    every = case.lowered.run(inputs)["out0"]
    for index in (0, 11, 16):
        single = case.lowered.run(inputs | {"x": inputs["x"][:, index : index + 1]})["out0"]
        assert single.tobytes() == np.ascontiguousarray(every[:, :, index : index + 1]).tobytes()


@pytest.mark.parametrize("name", ["v3", "neon"])
def test_compiles_for_other_processors(name: str) -> None:
    from rlx.backends.cpu.jit import compile_text
    from rlx.backends.cpu.lowerer import CpuLowerer
    from rlx.kernel.schedule import schedule

    isa = generic_isa(name)
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.F32, (2, 1, 3)))
    w = graph.add_input("w", TensorType(DType.F32, (1, 12, 3)))
    r = graph.add_input("r", TensorType(DType.F32, (1, 12, 3)))
    results = Builder(graph.block, graph.facts).emit(LSTM(3), x, w, r)
    graph.set_outputs({"y": results[0]})
    SplitRecurrent(isa).run(graph, PassContext())
    FormRegions().run(graph, PassContext())
    with graph.facts.active():
        program = schedule(graph, CpuLowerer(isa, "error"))
    for thunk in program.thunks:
        if thunk.kernel is not None:
            assert compile_text(thunk.kernel.text, isa)
