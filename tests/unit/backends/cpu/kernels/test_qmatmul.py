# SPDX-License-Identifier: Apache-2.0
"""Products of bytes: exact integer sums for every zero point, and depths the kernel cannot take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.ops import PackedQuantizedMatMul
from rlx.backends.cpu.passes import PackQuantizedMatMul
from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.expr.body import BodyBuilder
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.evaluate import evaluate
from rlx.ops.qmatmul import QuantizedMatMul
from rlx.ops.region import WithEpilogue
from rlx.passes.fold import Fold
from rlx.passes.fuse import FormRegions
from rlx.passes.hoist import Hoist
from rlx.passes.manager import PassContext

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_bytes = pytest.mark.parametrize("dtype", [DType.U8, DType.I8], ids=str)
_native = pytest.mark.skipif(not _HOST.has_vnni, reason="needs a CPU with AVX-512 VNNI")
Lower = Callable[[Graph, Isa], Any]


def _bytes_of(dtype: DType, *shape: int) -> Array:
    info = np.iinfo(dtype.numpy)
    whole = np.random.default_rng(sum(shape)).integers(info.min, info.max, shape, endpoint=True)
    return whole.astype(dtype.numpy)


def _graph(
    dtype: DType, weight: Array, zero: int | None, scales: Array, op: Op | None = None
) -> Graph:
    """Return the product of an input [M, K] with weights; an epilogue reads an input [N] too."""
    graph = Graph()
    builder = Builder(graph.block, graph.facts)

    def param(name: str, data: Array) -> Any:
        return graph.add_param(name, data, TensorType(DType.of(data.dtype), data.shape))

    a = graph.add_input("a", TensorType(dtype, (symbol("m", lower=0), weight.shape[0])))
    point = None if zero is None else param("zero", np.array(zero, dtype.numpy))
    operands = [a, param("scale", np.array(0.25, np.float32)), point]
    operands += [param("w", weight), param("scales", scales)]
    if op is not None:
        operands.append(graph.add_input("bias", TensorType(DType.F32, (weight.shape[1],))))
    with graph.facts.active():
        (result,) = builder.emit(op or QuantizedMatMul(), *operands)
    graph.set_outputs({"y": result})
    return graph


def _packed(graph: Graph) -> tuple[Graph, dict[str, Array]]:
    """Pack the weights as the backend does; return the graph and the weights it now reads."""
    context = PassContext()
    PackQuantizedMatMul(_HOST).run(graph, context)
    for step in (FormRegions(), Fold(), Hoist(growth=256)):
        step.run(graph, context)
    own = {n: p.data for n, p in context.params.graph.params.items() if p.data is not None}
    return graph, evaluate(context.params.graph, own)


def _names(graph: Graph) -> set[str]:
    return {
        node.op.anchor.name if isinstance(node.op, WithEpilogue) else node.op.name
        for node in graph.block
    }


def _check(lower: Lower, build: Callable[[], Graph], rows: Sequence[int], dtype: DType) -> None:
    plain = build()
    graph, constants = _packed(build())
    lowered = lower(graph, _HOST)
    depth, columns = plain.params["w"].value.type.shape
    assert isinstance(depth, int)
    assert isinstance(columns, int)
    for m in rows:
        inputs = {"a": _bytes_of(dtype, m, depth)}
        if len(plain.inputs) > 1:
            inputs["bias"] = np.arange(columns, dtype=np.float32) - 3
        want = evaluate(plain, inputs)["y"]
        got = lowered.run(inputs, constants)["y"]
        np.testing.assert_array_equal(got, want)


@_native
@_bytes
@pytest.mark.parametrize("zero", [None, 3, 127])
def test_every_tail(zero: int | None, dtype: DType, lower_graph: Lower) -> None:
    for depth, columns in ((4, 1), (4, 130), (64, 63), (64, 64), (20, 65)):
        weight = _bytes_of(DType.I8, depth, columns)
        scales = (2.0 ** (np.arange(columns) % 5)).astype(np.float32)

        def build(weight: Array = weight, scales: Array = scales) -> Graph:
            return _graph(dtype, weight, zero, scales)

        assert PackedQuantizedMatMul.name in _names(_packed(build())[0])
        _check(lower_graph, build, (0, 1, 2, 5, 6, 7, 97), dtype)


@_native
@_bytes
@pytest.mark.parametrize("zero", [-128, 255])
def test_the_ends_of_the_range(zero: int, dtype: DType, lower_graph: Lower) -> None:
    if (zero < 0) is not dtype.is_signed:
        return
    # Sums of extreme products do not saturate.
    weight = np.full((256, 65), -128, np.int8)
    one = np.array(1.0, np.float32)
    _check(lower_graph, lambda: _graph(dtype, weight, zero, one), (1, 7), dtype)


@_native
@_bytes
@pytest.mark.parametrize("depth", [1, 5, 62])
def test_other_depths_become_float_products(depth: int, dtype: DType, lower_graph: Lower) -> None:
    weight = _bytes_of(DType.I8, depth, 65)
    scales = np.full(65, 0.5, np.float32)

    def build() -> Graph:
        return _graph(dtype, weight, 3, scales)

    assert PackedQuantizedMatMul.name not in _names(_packed(build())[0])
    _check(lower_graph, build, (1, 7), dtype)


@_native
@_bytes
@pytest.mark.parametrize("depth", [5, 64])
def test_epilogues(depth: int, dtype: DType, lower_graph: Lower) -> None:
    builder = BodyBuilder([DType.F32, DType.F32])
    total = builder.input(0) + builder.input(1)
    body = builder.finish(builder.emit("max", total, builder.const(0, DType.F32)))
    op = WithEpilogue(QuantizedMatMul(), 5, body)
    weight, one = _bytes_of(DType.I8, depth, 65), np.array(1.0, np.float32)
    _check(lower_graph, lambda: _graph(dtype, weight, 9, one, op), (1, 2, 7), dtype)
