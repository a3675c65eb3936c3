# SPDX-License-Identifier: Apache-2.0
"""How many floating-point operations operators say they take."""

from __future__ import annotations

import pytest

import rlx.backends.cpu.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport]
from rlx.base.dims import Dim, evaluate, symbol
from rlx.base.dtypes import DType
from rlx.base.types import TensorType
from rlx.expr.body import Scalar, trace
from rlx.ir.graph import Node
from rlx.ir.parse import parse_graph
from rlx.ops.matmul import MatMul
from rlx.ops.region import Region, WithEpilogue


def _last(text: str) -> Node:
    node = parse_graph(text).block.last
    assert node is not None
    return node


def _flops(text: str) -> Dim | None:
    node = _last(text)
    return node.op.flops([o and o.type for o in node.operands], [r.type for r in node.results])


@pytest.mark.parametrize(
    ("operands", "call", "count"),
    [
        ("a: f32[2,5,7] b: f32[7,3]", "matmul(%a, %b)", 2 * (2 * 5 * 3) * 7),
        (
            "x: f32[1,4,9,9] w: f32[6,2,3,3]",
            "conv(%x, %w) {strides=(1, 1), dilations=(1, 1), pads=((0, 0), (0, 0)), groups=2}",
            2 * (6 * 7 * 7) * (2 * 3 * 3),
        ),
        (
            "q: f32[2,4,5,8] k: f32[2,4,7,8] v: f32[2,4,7,3]",
            "attention(%q, %k, %v, none) {scale=1.0}",
            2 * (2 * 4 * 5 * 7) * (8 + 3),
        ),
        ("x: f32[4,3]", "transpose(%x) {perm=(1, 0)}", None),
    ],
)
def test_counts(operands: str, call: str, count: int | None) -> None:
    inputs = "\n".join(f"input %{o}" for o in operands.replace("] ", "]\n").splitlines())
    assert _flops(f'graph {{ {inputs}\n%y = {call}\nreturn %y as "y" }}') == count


def test_counts_of_symbolic_extents() -> None:
    count = _flops("""graph {
      input %a: f32[N,7]
      input %b: f32[7,3]
      %y = matmul(%a, %b)
      return %y as "y"
    }""")
    assert count is not None
    assert count == symbol("N") * 42
    assert evaluate(count, {"N": 5}) == 210


def _three_steps(a: Scalar) -> Scalar:
    return (a.builder.emit("exp", a) * 2.0 + a).cast(DType.F16)


def test_counts_of_fused_operators() -> None:
    body = trace(_three_steps, (DType.F32,))
    x = TensorType(DType.F32, (3, 4))
    region = Region(body, x.shape)
    assert region.flops([x], region.infer(x)) == 3 * 12
    w = TensorType(DType.F32, (4, 5))
    fused = WithEpilogue(MatMul(), 2, body)
    assert fused.label == "matmul+epilogue"
    assert fused.flops([x, w], fused.infer(x, w)) == 2 * 15 * 4 + 15 * 3
