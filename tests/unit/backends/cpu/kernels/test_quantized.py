# SPDX-License-Identifier: Apache-2.0
"""Products and convolutions of bytes: exact integer sums for every zero point, and what their kernels cannot take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.conv_passes import PackConvolutions
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.quantized_ops import (
    DepthwiseBytes,
    PackedQuantizedConv,
    PackedQuantizedMatMul,
)
from rlx.backends.cpu.quantized_passes import PackQuantizedProducts
from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.expr.body import BodyBuilder
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.evaluate import evaluate
from rlx.ops.qconv import QuantizedConv
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
    dtype: DType,
    weight: Array,
    zero: int | None,
    scales: Array,
    op: Op | None = None,
    shape: Sequence[int] | None = None,
) -> Graph:
    """Return the product of an input [M, K] (or [M, *shape]) with weights; an epilogue reads an input [N] too."""
    graph = Graph()
    builder = Builder(graph.block, graph.facts)

    def param(name: str, data: Array) -> Any:
        return graph.add_param(name, data, TensorType(DType.of(data.dtype), data.shape))

    rest = weight.shape[:1] if shape is None else shape
    a = graph.add_input("a", TensorType(dtype, (symbol("m", lower=0), *rest)))
    point = None if zero is None else param("zero", np.array(zero, dtype.numpy))
    operands = [a, param("scale", np.array(0.25, np.float32)), point]
    operands += [param("w", weight), param("scales", scales)]
    if isinstance(op, WithEpilogue):
        columns = weight.shape[1 if shape is None else 0]
        operands.append(graph.add_input("bias", TensorType(DType.F32, (columns,))))
    with graph.facts.active():
        (result,) = builder.emit(op or QuantizedMatMul(), *operands)
    graph.set_outputs({"y": result})
    return graph


def _packed(graph: Graph) -> tuple[Graph, dict[str, Array]]:
    """Pack the weights as the backend does; return the graph and the weights it now reads."""
    context = PassContext()
    PackQuantizedProducts(_HOST).run(graph, context)
    for step in (FormRegions(), PackConvolutions(_HOST), Fold(), Hoist(growth=256)):
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
    for m in rows:
        shapes = {v.name: (m, *v.type.shape[1:]) for v in plain.inputs[:1]}
        inputs = {n: _bytes_of(dtype, *map(int, shape)) for n, shape in shapes.items()}
        for value in plain.inputs[1:]:
            inputs[value.name] = np.arange(int(value.type.shape[0]), dtype=np.float32) - 3
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
def test_depths_that_are_not_whole_quads(depth: int, dtype: DType, lower_graph: Lower) -> None:
    weight = _bytes_of(DType.I8, depth, 65)
    scales = np.full(65, 0.5, np.float32)

    def build() -> Graph:
        return _graph(dtype, weight, 3, scales)

    assert PackedQuantizedMatMul.name in _names(_packed(build())[0])
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


def _conv(kernel: int, **attributes: Any) -> QuantizedConv:
    """Return a convolution of images, channels last, that pads where its kernel has more than one element."""
    pads = ((kernel // 2, 0), (1, kernel // 2)) if kernel > 1 else ((0, 0), (0, 0))
    plain: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "pads": pads, "layout": "nhwc"}
    return QuantizedConv(**(plain | attributes))


@_native
@_bytes
@pytest.mark.parametrize("zero", [None, 3, 127])
@pytest.mark.parametrize(
    ("op", "weight", "space"),
    [
        (_conv(3), (64, 4, 3, 3), (9, 30)),
        (_conv(3), (65, 12, 3, 3), (5, 4)),
        (_conv(1), (7, 8, 1, 1), (4, 5)),
        (_conv(3, strides=(2, 1), dilations=(1, 2)), (3, 36, 3, 3), (11, 9)),
        (_conv(3, groups=2), (10, 8, 3, 3), (6, 26)),
        (_conv(5), (9, 3, 5, 5), (8, 31)),
        (_conv(1, strides=(2, 2)), (130, 5, 1, 1), (7, 8)),
        (_conv(3, groups=32), (32, 1, 3, 3), (7, 30)),
        (_conv(3, groups=35, strides=(2, 2)), (35, 1, 3, 3), (9, 40)),
        (_conv(5, groups=5, strides=(1, 2), dilations=(2, 1)), (5, 1, 5, 5), (11, 33)),
        (_conv(9, groups=17), (17, 1, 9, 9), (4, 25)),
        (QuantizedConv((1,), (1,), ((200, 199),), 20, "nhwc"), (20, 1, 400), (450,)),
        (
            QuantizedConv((1, 2, 1), (1, 1, 2), ((1, 0), (0, 1), (1, 1)), 18, "nhwc"),
            (18, 1, 3, 2, 3),
            (3, 4, 6),
        ),
    ],
    ids=str,
)
def test_convolutions(
    op: QuantizedConv,
    weight: tuple[int, ...],
    space: tuple[int, ...],
    zero: int | None,
    dtype: DType,
    lower_graph: Lower,
) -> None:
    data = _bytes_of(DType.I8, *weight)
    data[0] = -128  # sums as large as they may be
    scales = (2.0 ** (np.arange(weight[0]) % 5)).astype(np.float32)

    def build() -> Graph:
        shape = (*space, weight[1] * op.groups)
        return _graph(dtype, data, zero, scales, op, shape)

    kernel = DepthwiseBytes if op.groups == weight[0] else PackedQuantizedConv
    assert kernel.name in _names(_packed(build())[0])
    _check(lower_graph, build, (0, 1, 3), dtype)


@_native
@_bytes
def test_convolutions_of_lines_and_volumes(dtype: DType, lower_graph: Lower) -> None:
    line = QuantizedConv((2,), (1,), ((1, 2),), 1, "nhwc")
    volume = QuantizedConv((1, 2, 1), (1, 1, 2), ((1, 0), (0, 1), (1, 1)), 1, "nhwc")
    one = np.array(0.5, np.float32)
    for op, weight, space in ((line, (5, 8, 4), (40,)), (volume, (6, 4, 2, 3, 2), (3, 4, 6))):
        data = _bytes_of(DType.I8, *weight)

        def build(op: Op = op, data: Array = data, space: tuple[int, ...] = space) -> Graph:
            return _graph(dtype, data, 5, one, op, (*space, data.shape[1]))

        _check(lower_graph, build, (1, 2), dtype)


@_native
def test_depthwise_convolutions_of_many_taps_are_not_summed_in_f32() -> None:
    op = QuantizedConv((1,), (1,), ((0, 0),), 3, "nhwc")
    weight, one = np.full((3, 1, 600), -128, np.int8), np.array(1.0, np.float32)

    def build() -> Graph:
        return _graph(DType.U8, weight, 0, one, op, (700, 3))

    assert DepthwiseBytes.name not in _names(_packed(build())[0])


@_native
@_bytes
@pytest.mark.parametrize("groups", [1, 3])
def test_epilogues_of_convolutions(groups: int, dtype: DType, lower_graph: Lower) -> None:
    """Groups of a single channel have no kernel for bytes where they have several filters."""
    builder = BodyBuilder([DType.F32, DType.F32])
    total = builder.input(0) + builder.input(1)
    body = builder.finish(builder.emit("max", total, builder.const(0, DType.F32)))
    op = WithEpilogue(_conv(3, groups=groups), 5, body)
    weight, one = _bytes_of(DType.I8, 9, 3 // groups, 3, 3), np.array(1.0, np.float32)

    def build() -> Graph:
        return _graph(dtype, weight, 9, one, op, (5, 6, 3))

    assert (PackedQuantizedConv.name in _names(_packed(build())[0])) is (groups == 1)
    _check(lower_graph, build, (1, 2), dtype)
