# SPDX-License-Identifier: Apache-2.0
"""Every sample of the compute operators runs; its region and decomposition mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from rlx.base import numeric
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.ops.attention import Attention
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.matmul import MatMul
from rlx.ops.pool import Pool
from rlx.ops.quant import DequantizeLinear, QuantizeLinear
from rlx.ops.resize import Resize
from rlx.ops.rnn import GRU, LSTM, RNN
from rlx.ops.signal import DFT, STFT, Frame
from rlx.ops.spec import Operand, Sample, building

OPS: tuple[Any, ...] = (
    MatMul,
    Conv,
    ConvTranspose,
    Pool,
    Resize,
    LSTM,
    GRU,
    RNN,
    DFT,
    STFT,
    Frame,
    QuantizeLinear,
    DequantizeLinear,
    Attention,
)
CASES = [
    pytest.param(kind, sample, id=f"{kind.name}-{i}")
    for kind in OPS
    for i, sample in enumerate(kind.samples)
]


def _array(operand: Operand, rng: np.random.Generator) -> Array:
    dtype = operand.dtype or DType.F32
    if operand.fill == "bool":
        return rng.integers(0, 2, operand.shape).astype(dtype.numpy)
    if dtype.is_integer:
        low = -8 if dtype.is_signed else 0
        return numeric.cast(rng.integers(low, 8, operand.shape), dtype)
    x = np.asarray(rng.standard_normal(operand.shape), np.float32)
    if operand.fill == "positive":
        x = np.abs(x) + np.float32(0.1)
    if operand.fill == "special" and x.size > 3:
        x.reshape(-1)[:3] = (np.nan, np.inf, -np.inf)
    return numeric.cast(np.asarray(x), dtype)


def _arrays(sample: Sample) -> list[Array | None]:
    rng = np.random.default_rng(7)
    return [None if o is None else _array(o, rng) for o in sample.operands]


def _decomposed(op: Op, arrays: list[Array | None]) -> Iterator[list[Array]]:
    """Yield the results of the region and of the decomposition, where there are any."""
    region: Any = getattr(op, "region", None)
    types = [None if a is None else TensorType(DType.of(a.dtype), a.shape) for a in arrays]
    found = region(*types) if region else None
    if found is not None:
        yield list(run_op(found, [a for a in arrays if a is not None]))
    decompose: Any = getattr(op, "decompose", None)
    if decompose is None:
        return
    graph = Graph("sample")
    values = [None if t is None else graph.add_input(f"x{i}", t) for i, t in enumerate(types)]
    with building(Builder(graph.block, graph.facts)):
        out: Any = decompose(*values)
    if out is not None:
        results = cast("tuple[Any, ...]", out if isinstance(out, tuple) else (out,))
        graph.set_outputs({f"y{i}": v for i, v in enumerate(results)})
        named = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
        yield list(evaluate(graph, named).values())


@pytest.mark.parametrize(("kind", "sample"), CASES)
def test_sample(kind: Any, sample: Sample) -> None:
    op, arrays = kind(**sample.attributes), _arrays(sample)
    if sample.error:
        with pytest.raises(TypeRuleError, match=sample.error):
            run_op(op, arrays)
        return
    results = run_op(op, arrays)
    exact = run_op(op, arrays, exact=True)
    for got, want in zip(results, exact, strict=True):
        _assert_close(got, want)
    for found in _decomposed(op, arrays):
        for got, want in zip(found, results, strict=True):
            _assert_close(got, want)


def _assert_close(got: Array, want: Array) -> None:
    assert got.dtype == want.dtype
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=2e-5, atol=2e-5
        )


def test_enough_operators_decompose() -> None:
    """The comparison above says nothing if decompositions silently return None."""
    seen: dict[str, int] = {}
    for kind in OPS:
        for sample in kind.samples:
            if not sample.error:
                count = len(list(_decomposed(kind(**sample.attributes), _arrays(sample))))
                seen[kind.name] = seen.get(kind.name, 0) + count
    for kind in (ConvTranspose, Resize, DFT, STFT, Frame, QuantizeLinear, Attention, MatMul):
        assert seen[kind.name] >= 3, kind.name
