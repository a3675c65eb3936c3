# SPDX-License-Identifier: Apache-2.0
"""Cases that kernels do not take as they are: what the passes make of them runs natively, and right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.isa import host_isa
from rlx.base.config import override
from rlx.base.dtypes import FLOATS, INTEGERS, DType
from rlx.base.numeric import Array
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.attention import Attention
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.elementwise import add, relu
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.integer import IntegerConv, IntegerMatMul
from rlx.ops.leaf import constant
from rlx.ops.matmul import MatMul, matmul
from rlx.ops.pool import Pool
from rlx.ops.qconv import QuantizedConv
from rlx.ops.qmatmul import QuantizedMatMul
from rlx.ops.resize import Resize
from rlx.ops.spec import emit_one
from rlx.testing.tolerances import allowed_error, mismatch

_LEVELS = ["v3", "v4"] if host_isa().name == "v4" else ["v3"]
pytestmark = pytest.mark.parametrize("level", _LEVELS)
_INTEGERS = sorted(INTEGERS, key=str)
_FLOATS = sorted(FLOATS, key=str)


def _numbers(dtype: DType, *shape: int) -> Array:
    """Return numbers over all of the range of an integer dtype, so that sums wrap."""
    rng = np.random.default_rng(sum(shape))
    if not dtype.is_integer:
        return rng.standard_normal(shape).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    return rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)


def _check(
    level: str,
    made: Op | Callable[[list[Value]], Value],
    inputs: Sequence[Array],
    *,
    params: Sequence[Array] = (),
    names: Sequence[Any] = (),
) -> list[str]:
    """Compare what is made of values with its meaning, without the host; return the operators that ran.

    Args:
        level: instruction set.
        made: an operator, or a function that builds, of the inputs and then the params.
        inputs: their data.
        params: data of weights.
        names: shapes of the inputs with symbols, where they have any.
    """
    with rlx.Graph() as g:
        shapes = names or [a.shape for a in inputs]
        values = [
            g.input(f"x{i}", s, a.dtype)
            for i, (a, s) in enumerate(zip(inputs, shapes, strict=True))
        ]
        values += [g.param(f"p{i}", a) for i, a in enumerate(params)]
        g.output("y", emit_one(made, *values) if isinstance(made, Op) else made(values))
    given = {f"x{i}": a for i, a in enumerate(inputs)}
    weights = {f"p{i}": a for i, a in enumerate(params)}
    with override(RLX_CPU_ISA=level), rlx.compile(g, "cpu", host_ops="error") as m:
        got = m.run(given)["y"]
        ran = [name for name, _, _ in m.program.compiled.dispatch]
    operands = [*inputs, *params]
    want = evaluate(g.ir, given, weights, exact=True)["y"]
    nodes = g.ir.block.nodes()
    if DType.of(got.dtype).is_integer:
        np.testing.assert_array_equal(got, want)
    elif len(nodes) == 1:
        wide = [a.astype(np.float64) if a.dtype.kind not in "iub" else a for a in operands]
        (allowed,) = allowed_error(nodes[0].op, wide, [want])
        assert not mismatch(got, want, allowed)
    else:
        unit = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7}.get(DType.of(got.dtype), 1e-5)
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=unit, atol=unit
        )
    return ran


@pytest.mark.parametrize("dtype", _INTEGERS, ids=str)
def test_integer_products_wrap(level: str, dtype: DType) -> None:
    a, b = _numbers(dtype, 2, 7, 33), _numbers(dtype, 33, 70)
    assert "matmul" in _check(level, MatMul(), [a, b])[0]
    assert "cpu.packed_matmul" in _check(level, MatMul(), [a], params=[b])[0]
    more = _numbers(dtype, 70)
    _check(level, lambda v: add(matmul(v[0], v[1]), v[2]), [a, b, more])


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64], ids=str)
def test_products_of_other_floats(level: str, dtype: DType) -> None:
    a, b = _numbers(dtype, 7, 33), _numbers(dtype, 33, 70)
    _check(level, MatMul(), [a, b])
    _check(level, MatMul(), [a], params=[b])
    (how, *_) = _check(level, lambda v: relu(matmul(v[0], v[1])), [a], params=[b])
    assert how == "cpu.packed_matmul+epilogue"


def test_constant_factors_are_packed_once(level: str) -> None:
    x, b = _numbers(DType.F32, 3, 6), _numbers(DType.F32, 6, 5)
    assert _check(level, lambda v: matmul(v[0], constant(b)), [x]) == ["cpu.packed_matmul"]


def test_products_of_vectors(level: str) -> None:
    a, b = _numbers(DType.F32, 7), _numbers(DType.F32, 2, 7, 3)
    for left, right in ((a, a), (a, b), (_numbers(DType.F32, 2, 3, 7), a)):
        _check(level, MatMul(), [left, right])


def test_a_narrow_float_is_rounded_in_the_epilogue(level: str) -> None:
    x, w = _numbers(DType.F16, 1, 12, 5, 9), _numbers(DType.F16, 20, 12, 3, 3)
    op = Conv((1, 1), (1, 1), ((1, 1), (1, 1)))
    other = _numbers(DType.F16, 1, 20, 5, 9)
    ran = _check(level, lambda v: relu(add(emit_one(op, v[0], v[2]), v[1])), [x, other], params=[w])
    assert "cpu.packed_conv+epilogue" in ran


_TRANSPOSED = ConvTranspose((2, 3), (1, 1), ((1, 0), (0, 1)), (0, 1))


@pytest.mark.parametrize("dtype", [DType.F32, DType.I8, DType.F16], ids=str)
@pytest.mark.parametrize(
    ("op", "x", "w"),
    [
        (Conv((1, 1), (1, 1), ((1, 1), (1, 1))), (1, 12, 5, 9), (70, 12, 3, 3)),
        (Conv((2,), (1,), ((1, 1),), 2), (2, 6, 9), (10, 3, 3)),
        (Conv((1, 1), (1, 1), ((0, 0), (0, 0)), 12), (1, 12, 5, 9), (24, 1, 3, 2)),
        (Conv((1, 1), (1, 1), ((0, 0), (0, 0))), (3, 12, 1, 1), (7, 12, 1, 1)),
        (_TRANSPOSED, (1, 12, 5, 4), (12, 35, 3, 4)),
        (ConvTranspose((1,), (2,), ((0, 0),), (0,), 3), (1, 6, 5), (6, 2, 3)),
        (ConvTranspose((2, 2), (1, 1), ((0, 0), (0, 0)), (0, 0)), (1, 6, 5, 4), (6, 3, 2, 2)),
    ],
)
def test_convolution_with_weights_of_the_run(
    level: str, op: Any, x: tuple[int, ...], w: tuple[int, ...], dtype: DType
) -> None:
    arrays = [_numbers(dtype, *x), _numbers(dtype, *w)]
    ran = _check(level, op, arrays)
    assert any("conv" in name or "matmul" in name for name in ran)


@pytest.mark.parametrize(
    ("op", "w"),
    [
        (Conv((1, 1), (1, 1), ((1, 1), (0, 0)), 2), (10, 3, 3, 2)),
        (ConvTranspose((1, 1), (1, 1), ((1, 1), (0, 0)), (0, 0)), (6, 5, 2, 2)),
    ],
)
def test_channels_that_only_the_weights_tell(level: str, op: Any, w: tuple[int, ...]) -> None:
    x, kernel = _numbers(DType.F32, 3, 6, 9, 8), _numbers(DType.F32, *w)
    with rlx.Graph() as g:
        g.ir.facts.hints |= {"N": 3, "C": 6, "H": 9, "W": 8}
        g.output("y", emit_one(op, g.input("x", ["N", "C", "H", "W"]), g.param("w", kernel)))
    with override(RLX_CPU_ISA=level), rlx.compile(g, "cpu", host_ops="error") as m:
        got = m.run({"x": x})["y"]
    want = op.reference(x.astype(np.float64), kernel.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("channels", [1, 3, 40])
def test_pools_over_any_number_of_channels(level: str, kind: Any, channels: int) -> None:
    with rlx.Graph() as g:
        v = g.input("x", [2, "C", 9, 8])
        op = Pool(kind, (3, 2), (2, 1), (1, 1), ((1, 1), (0, 1)), (5, 8), True)
        g.output("y", emit_one(op, v))
    with override(RLX_CPU_ISA=level), rlx.compile(g, "cpu", host_ops="error") as m:
        for count in (channels, 2 * channels + 1):
            x = _numbers(DType.F32, 2, count, 9, 8)
            np.testing.assert_allclose(m(x), op.reference(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", _FLOATS, ids=str)
@pytest.mark.parametrize("mask", [None, DType.BOOL, *_FLOATS], ids=str)
def test_attention_of_every_float(level: str, dtype: DType, mask: DType | None) -> None:
    arrays = [_numbers(dtype, 1, 2, n, 8) for n in (5, 9, 9)]
    if mask is not None:
        arrays.append((_numbers(DType.F32, 5, 9) > -1).astype(mask.numpy))
    op = Attention(0.35, "zeros", "bottom_right")
    _check(level, op, arrays)


def test_attention_of_an_unknown_depth(level: str) -> None:
    arrays = [_numbers(DType.F32, 1, 2, n, 8) for n in (5, 9, 9)]
    names = [[1, 2, "S", "D"], [1, 2, "T", "D"], [1, 2, "T", "D"]]
    _check(level, Attention(0.35), arrays, names=names)


@pytest.mark.parametrize(
    ("op", "shape", "weight"),
    [
        (QuantizedMatMul(), (5, 16), (16, 9)),
        (QuantizedMatMul(), (5, 19), (19, 9)),
        (QuantizedConv((1, 1), (1, 1), ((1, 1), (0, 1))), (2, 6, 5, 7), (9, 6, 3, 3)),
        (QuantizedConv((2, 1), (1, 1), ((0, 0), (1, 1)), 4), (2, 4, 5, 7), (8, 1, 3, 3)),
    ],
    ids=["matmul", "no_quads", "conv", "depthwise"],
)
@pytest.mark.parametrize("weights", [True, False])
def test_quantised_products(
    level: str, op: Op, shape: tuple[int, ...], weight: tuple[int, ...], weights: bool
) -> None:
    x, w = _numbers(DType.U8, *shape), _numbers(DType.I8, *weight)
    scale = np.linspace(0.01, 0.1, weight[1 if op == QuantizedMatMul() else 0], dtype=np.float32)
    arrays = [np.asarray(v) for v in (x, np.float32(0.05), np.uint8(3), w, scale)]
    with rlx.Graph() as g:
        values: list[Value] = []
        for i, array in enumerate(arrays):
            known = weights and i > 2
            name, extents = f"x{i}", array.shape
            values.append(g.param(name, array) if known else g.input(name, extents, array.dtype))
        g.output("y", emit_one(op, *values))
    given = {f"x{i}": v for i, v in enumerate(arrays)}
    with override(RLX_CPU_ISA=level), rlx.compile(g, "cpu", host_ops="error") as m:
        got = m.run({s.name: given[s.name] for s in m.inputs})["y"]
    np.testing.assert_allclose(got, run_op(op, arrays)[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("op", "shape", "weight"),
    [
        (IntegerMatMul(), (3, 5, 19), (19, 9)),
        (IntegerConv((1, 1), (1, 1), ((1, 1), (0, 1))), (2, 6, 5, 7), (9, 6, 3, 3)),
        (IntegerConv((2, 1), (1, 1), ((0, 0), (1, 1)), 4), (2, 4, 5, 7), (8, 1, 3, 3)),
    ],
    ids=["matmul", "conv", "depthwise"],
)
@pytest.mark.parametrize("dtypes", ["u8 u8", "u8 i8", "i8 u8", "i8 i8"])
@pytest.mark.parametrize("zeros", ["none", "one", "columns", "params"])
def test_integer_products(
    level: str, op: Op, shape: tuple[int, ...], weight: tuple[int, ...], dtypes: str, zeros: str
) -> None:
    left, right = (DType(d) for d in dtypes.split())
    x, w = _numbers(left, *shape), _numbers(right, *weight)
    columns = weight[1 if op == IntegerMatMul() else 0]
    x_zero = None if zeros == "none" else np.asarray(3, left.numpy)
    w_zero = {"none": None, "one": np.asarray(128 if right is DType.U8 else 0, right.numpy)}.get(
        zeros, np.arange(columns).astype(right.numpy)
    )
    with rlx.Graph() as g:
        a = g.input("x", shape, x.dtype)
        zero = None if x_zero is None else g.input("zero", (), x_zero.dtype)
        weight_zero: Value | None = None
        if w_zero is not None:
            weight_zero = g.param("wz", w_zero) if zeros == "params" else constant(w_zero)
        g.output("y", emit_one(op, a, zero, g.param("w", w), weight_zero))
    given = {"x": x} if x_zero is None else {"x": x, "zero": x_zero}
    with override(RLX_CPU_ISA=level), rlx.compile(g, "cpu", host_ops="error") as m:
        got = m.run(given)["y"]
    np.testing.assert_array_equal(got, run_op(op, [x, x_zero, w, w_zero])[0])


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.U8, DType.I32], ids=str)
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_resize_rounds_once(level: str, mode: Any, dtype: DType) -> None:
    x = np.clip(_numbers(DType.F32, 2, 3, 4, 4) * 50 + 100, 0, 255).astype(dtype.numpy)
    apart = Resize((2, 5, 4, 6), (None,) * 4, mode)
    five = Resize((3, 5, 7, 6), (None,) * 4, mode)
    for op in (apart, five, Resize((2, 3, 4, 4), (None,) * 4, mode)):
        _check(level, op, [x])
