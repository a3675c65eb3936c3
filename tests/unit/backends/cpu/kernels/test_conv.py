# SPDX-License-Identifier: Apache-2.0
"""Convolutions of every form against their NumPy meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.claims import cpu_claims
from rlx.backends.cpu.conv_ops import DepthwiseConv, PackedConv, PackedConvTranspose
from rlx.backends.cpu.conv_passes import PackConvolutions
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.ops import PackedMatMul
from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import Shape, TensorType
from rlx.expr.body import Body, Scalar, trace
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ir.verify import verify
from rlx.ops import elementwise as ew
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.evaluate import evaluate
from rlx.ops.movement import Reshape
from rlx.ops.region import WithEpilogue
from rlx.passes.fuse import FormRegions
from rlx.passes.manager import PassContext
from rlx.passes.params import split_params
from rlx.passes.widen import Widen

Lower = Callable[[Graph, Isa], Any]


def _isas() -> list[Isa]:
    host = host_isa()
    return [host, host.restricted("v3")] if host.name == "v4" else [host]


ISAS = pytest.mark.parametrize("isa", _isas(), ids=lambda isa: isa.name)


@dataclass
class Case:
    """An operator on an input of that shape with weights of that shape."""

    op: Conv | ConvTranspose
    x: Shape
    w: tuple[int, ...]
    dtype: DType = DType.F32
    bias: bool = False
    body: Body | None = None
    extras: tuple[Shape, ...] = ()

    def data(self, rng: np.random.Generator, shape: Sequence[int]) -> Array:
        """Return numbers, whole ones for integers."""
        x = rng.standard_normal(shape) * (1 if self.dtype.is_float else 30)
        return x.astype(self.dtype.numpy)

    def weights(self) -> dict[str, Array]:
        """Return w and bias."""
        rng = np.random.default_rng(3)
        columns = self.w[0] if isinstance(self.op, Conv) else self.w[1] * self.op.groups
        out = {"w": self.data(rng, self.w)}
        if self.bias:
            out["bias"] = self.data(rng, (columns,))
        return out

    def graph(self) -> Graph:
        """Return the graph of the operator with its epilogue."""
        graph = Graph()
        builder = Builder(graph.block, graph.facts)
        x = graph.add_input("x", TensorType(self.dtype, self.x))
        params = {
            n: graph.add_param(n, d, TensorType(self.dtype, d.shape))
            for n, d in self.weights().items()
        }
        extras = [
            graph.add_input(f"e{i}", TensorType(self.dtype, s)) for i, s in enumerate(self.extras)
        ]
        op: Op = self.op if self.body is None else WithEpilogue(self.op, 3, self.body)
        graph.set_outputs({"y": builder.emit_one(op, x, params["w"], params.get("bias"), *extras)})
        return graph

    def lower(self, isa: Isa, lower: Lower) -> Callable[[Mapping[str, Array]], Array]:
        """Return a function of the inputs that runs the kernels."""
        graph, context = self.graph(), PassContext(claims=cpu_claims(isa))
        Widen().run(graph, context)
        assert PackConvolutions(isa).run(graph, context)
        FormRegions().run(graph, context)
        verify(graph)
        program = split_params(graph)
        derived = evaluate(program.graph, {})
        lowered = lower(graph, isa)
        return lambda inputs: lowered.run(inputs, derived)["y"]

    def check(self, isa: Isa, lower: Lower, extents: Sequence[Mapping[str, int]] = ({},)) -> None:
        """Compare kernels and reference for every binding of the symbols, on one lowering."""
        run = self.lower(isa, lower)
        for env in extents:
            rng = np.random.default_rng(5)
            inputs = {
                value.name: self.data(
                    rng, [env[str(d)] if not isinstance(d, int) else d for d in value.type.shape]
                )
                for value in self.graph().inputs
            }
            self.compare(run(inputs), evaluate(self.graph(), inputs, exact=True)["y"])

    def compare(self, found: Array, expected: Array) -> None:
        """Check a result."""
        if self.dtype.is_integer:
            np.testing.assert_array_equal(found, expected)
            return
        narrow = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7}
        rtol = narrow.get(self.dtype, 1e-5)
        depth = int(np.prod(self.w)) / max(1, self.w[0])
        atol = 4 * np.finfo(self.dtype.compute.numpy).eps * (4 + depth) + rtol / 100
        np.testing.assert_allclose(
            found.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=atol
        )

    def anchor(self, isa: Isa) -> Op:
        """Return the operator that the packing pass chooses."""
        graph = self.graph()
        PackConvolutions(isa).run(graph, PassContext())
        assert graph.outputs[0].producer is not None
        op = graph.outputs[0].producer.op
        return op.anchor if isinstance(op, WithEpilogue) else op


def conv(
    x: Shape,
    w: tuple[int, ...],
    *,
    strides: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (),
    pads: tuple[tuple[int, int], ...] = (),
    groups: int = 1,
    **more: Any,
) -> Case:
    rank = len(w) - 2
    one = (1,) * rank
    op = Conv(strides or one, dilations or one, pads or ((0, 0),) * rank, groups, "nhwc")
    return Case(op, x, w, **more)


def transposed(
    x: Shape,
    w: tuple[int, ...],
    *,
    strides: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (),
    pads: tuple[tuple[int, int], ...] = (),
    extra: tuple[int, ...] = (),
    groups: int = 1,
    **more: Any,
) -> Case:
    rank = len(w) - 2
    one = (1,) * rank
    op = ConvTranspose(
        strides or one,
        dilations or one,
        pads or ((0, 0),) * rank,
        extra or (0,) * rank,
        groups,
        "nhwc",
    )
    return Case(op, x, w, **more)


SAME = ((1, 1), (1, 1))
CASES = {
    "whole panels": conv((1, 8, 13, 32), (64, 32, 3, 3), pads=SAME),
    "panel tail, odd channels": conv((2, 7, 5, 17), (83, 17, 3, 3), pads=SAME, strides=(2, 1)),
    "one column": conv((1, 5, 9, 12), (1, 12, 3, 3), pads=SAME),
    "three vectors": conv((1, 6, 9, 9), (40, 9, 3, 3), pads=SAME),
    "dilated, uneven padding": conv(
        (1, 9, 11, 8), (20, 8, 3, 2), pads=((2, 0), (0, 3)), dilations=(2, 3)
    ),
    "few channels, strided": conv((1, 17, 41, 3), (16, 3, 3, 3), pads=SAME, strides=(2, 2)),
    "few channels, large kernel": conv((1, 15, 30, 1), (24, 1, 7, 7), pads=((3, 3), (3, 3))),
    "few channels, dilated": conv((1, 15, 30, 2), (64, 2, 3, 3), dilations=(1, 2)),
    "few channels, wide panel": conv((1, 9, 33, 3), (64, 3, 5, 5), pads=((2, 2), (2, 2))),
    "long filter": conv((2, 700, 1), (18, 1, 256), strides=(64,), pads=((10, 5),)),
    "padding wider than x": conv((1, 1, 2, 5), (16, 5, 3, 3), pads=((3, 3), (2, 2))),
    "line": conv((2, 23, 10), (20, 10, 3), pads=((1, 1),), strides=(2,)),
    "volume": conv(
        (2, 4, 5, 6, 9), (18, 9, 2, 3, 2), pads=((1, 0), (1, 1), (0, 1)), dilations=(2, 1, 1)
    ),
    "pointwise": conv((2, 5, 7, 33), (150, 33, 1, 1)),
    "pointwise, strided": conv((1, 5, 7, 33), (17, 33, 1, 1), strides=(2, 2)),
    "one pixel": conv((3, 1, 1, 33), (70, 33, 1, 1), bias=True),
    "groups": conv((1, 6, 7, 24), (66, 8, 3, 3), pads=SAME, groups=3),
    "groups of few channels": conv((1, 6, 7, 8), (12, 2, 3, 3), pads=SAME, groups=4),
    "depthwise": conv((2, 6, 19, 35), (35, 1, 3, 3), pads=SAME, groups=35),
    "depthwise, strided": conv(
        (1, 9, 31, 40), (40, 1, 5, 5), pads=((2, 2), (2, 1)), strides=(2, 2), groups=40
    ),
    "depthwise, long": conv((2, 50, 20), (20, 1, 31), pads=((15, 15),), groups=20),
    "depthwise, volume": conv(
        (1, 3, 5, 6, 20), (20, 1, 2, 3, 3), pads=((1, 0), (1, 1), (1, 1)), groups=20
    ),
    "depthwise, multiplied": conv((1, 6, 13, 7), (21, 1, 3, 3), pads=SAME, groups=7),
    "transposed": transposed(
        (2, 4, 5, 20), (20, 24, 3, 3), strides=(2, 2), pads=SAME, extra=(1, 1)
    ),
    "transposed, disjoint": transposed((1, 4, 15, 20), (20, 1, 2, 2), strides=(2, 2)),
    "transposed, groups": transposed(
        (2, 4, 5, 20),
        (20, 12, 2, 3),
        strides=(3, 1),
        dilations=(2, 2),
        pads=((1, 0), (2, 1)),
        extra=(2, 0),
        groups=2,
    ),
    "transposed, gaps": transposed((2, 14, 20), (20, 12, 3), strides=(5,), pads=((1, 2),)),
    "transposed, extended": transposed(
        (2, 14, 20), (20, 12, 3), strides=(4,), dilations=(6,), pads=((-1, 2),)
    ),
    "transposed, volume": transposed(
        (1, 3, 4, 4, 6), (6, 12, 3, 2, 3), strides=(2, 2, 2), pads=((0, 1),) * 3
    ),
}


@ISAS
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str, isa: Isa, lower_graph: Lower) -> None:
    CASES[name].check(isa, lower_graph)


_DTYPES = (
    *(DType.F64, DType.F16, DType.BF16, DType.I32, DType.I64, DType.U64),
    *(DType.I8, DType.U8, DType.I16, DType.U16),
)


@ISAS
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_dtypes(dtype: DType, bias: bool, isa: Isa, lower_graph: Lower) -> None:
    more: dict[str, Any] = {"dtype": dtype, "bias": bias}
    conv((1, 5, 9, 12), (20, 12, 3, 3), pads=SAME, **more).check(isa, lower_graph)
    conv((1, 5, 19, 12), (12, 1, 3, 3), pads=SAME, groups=12, **more).check(isa, lower_graph)
    transposed((1, 5, 9, 12), (12, 35, 3, 3), strides=(2, 2), **more).check(isa, lower_graph)


def _relu_of_sum(a: Scalar, b: Scalar, e: Scalar) -> Scalar:
    return ew.relu(a + b + e)


def _silu_chain(a: Scalar, row: Scalar, column: Scalar, one: Scalar) -> Scalar:
    return ew.silu(a * row) + column * one


FORMS = {
    "conv": conv((2, 5, 9, 12), (70, 12, 3, 3), pads=SAME),
    "pointwise": conv((2, 5, 9, 12), (70, 12, 1, 1)),
    "one pixel": conv((3, 1, 1, 12), (70, 12, 1, 1)),
    "depthwise": conv((2, 5, 19, 35), (35, 1, 3, 3), pads=SAME, groups=35),
    "transposed": transposed((2, 5, 9, 12), (12, 20, 3, 3), strides=(2, 2), pads=SAME),
    "transposed, disjoint": transposed((2, 5, 9, 12), (12, 3, 2, 3), strides=(2, 3)),
}


@ISAS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_epilogue(form: str, bias: bool, isa: Isa, lower_graph: Lower) -> None:
    case = FORMS[form]
    types = [TensorType(DType.F32, case.x), TensorType(DType.F32, case.w)]
    shape = case.op.infer(*types).shape
    row = (*shape[:-1], 1)
    for body, extras in (
        (trace(_relu_of_sum, [DType.F32] * 3), (shape, (shape[-1],))),
        (trace(_silu_chain, [DType.F32] * 4), (row, (1, shape[-1]), (1, 1))),
    ):
        Case(case.op, case.x, case.w, DType.F32, bias, body, extras).check(isa, lower_graph)


@ISAS
@pytest.mark.parametrize("form", FORMS)
def test_symbolic_extents(form: str, isa: Isa, lower_graph: Lower) -> None:
    case = FORMS[form]
    if form == "one pixel":
        shape: Shape = (symbol("N"), 1, 1, 12)
    else:
        shape = (symbol("N"), symbol("H"), symbol("W"), case.x[-1])
    extents = [
        {"N": 1, "H": 1, "W": 1},
        {"N": 2, "H": 3, "W": 20},
        {"N": 0, "H": 5, "W": 5},
        {"N": 3, "H": 9, "W": 2},
    ]
    Case(case.op, shape, case.w, bias=True).check(isa, lower_graph, extents)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (FORMS["conv"], PackedConv),
        (FORMS["pointwise"], PackedConv),
        (FORMS["one pixel"], PackedMatMul),
        (FORMS["depthwise"], DepthwiseConv),
        (CASES["depthwise, multiplied"], DepthwiseConv),
        (CASES["groups"], PackedConv),
        (FORMS["transposed"], PackedConvTranspose),
        (FORMS["transposed, disjoint"], Reshape),
    ],
)
def test_pass_chooses_form(case: Case, kind: type[Op]) -> None:
    assert isinstance(case.anchor(host_isa()), kind)


@pytest.mark.parametrize("name", CASES)
def test_packed_operators_mean_the_same(name: str) -> None:
    case = CASES[name]
    packed, plain = case.graph(), case.graph()
    PackConvolutions(host_isa()).run(packed, PassContext())
    inputs = {
        "x": np.random.default_rng(1).standard_normal([int(d) for d in case.x]).astype(np.float32)
    }
    expected = evaluate(plain, inputs, exact=True)[
        "y"
    ]  # f32: a bias in an epilogue is rounded in between
    np.testing.assert_allclose(
        evaluate(packed, inputs, exact=True)["y"], expected, rtol=2e-6, atol=2e-6
    )


def test_result_of_a_pixel_does_not_depend_on_others(lower_graph: Lower) -> None:
    case = conv((symbol("N"), symbol("H"), 30, 12), (40, 12, 3, 3), pads=((0, 0), (1, 1)))
    run = case.lower(host_isa(), lower_graph)
    x = np.random.default_rng(0).standard_normal((3, 10, 30, 12)).astype(np.float32)
    whole = run({"x": x})
    part = run({"x": np.ascontiguousarray(x[1:2, 4:8])})
    assert part.tobytes() == np.ascontiguousarray(whole[1:2, 4:6]).tobytes()


def test_nan_and_infinity_reach_only_their_windows(lower_graph: Lower) -> None:
    case = conv((1, 9, 30, 4), (16, 4, 3, 3), pads=SAME)
    x = np.ones((1, 9, 30, 4), np.float32)
    x[0, 4, 10, 2] = np.nan
    y = case.lower(host_isa(), lower_graph)({"x": x})
    hit: Array = np.isnan(y[0]).all(axis=-1)
    expected = np.zeros((9, 30), bool)
    expected[3:6, 9:12] = True
    np.testing.assert_array_equal(hit, expected)
    assert np.isfinite(y[0][~expected]).all()
