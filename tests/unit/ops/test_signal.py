# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms against the sum itself, framing, windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.dims import floordiv, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops import signal
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.signal import DFT, STFT, Frame
from rlx.ops.spec import building, emit_one


def _normal(*shape: int) -> Array:
    return np.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), np.float32)


def _sum(x: Array, length: int, sign: int) -> Array:
    """The transform of the last axis by its definition, zero-padded or cut."""
    n = min(x.shape[-1], length)
    turns = [[row * column for column in range(length)] for row in range(n)]
    angle = np.array(turns, np.float64) * (sign * 2 * np.pi / length)
    return x[..., :n].astype(complex) @ np.exp(1j * angle)


def _complex(x: Array) -> Array:
    return x[..., 0] + 1j * x[..., 1]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 10, 15, 17, 30])
@pytest.mark.parametrize("extent", [10, 7])
def test_transforms_of_any_length(length: int, extent: int) -> None:
    real, pair = _normal(2, extent, 1), _normal(2, extent, 2)
    (full,) = run_op(DFT(1, False, False, length), [real])
    np.testing.assert_allclose(_complex(full), _sum(real[..., 0], length, -1), rtol=1e-4, atol=1e-4)
    (half,) = run_op(DFT(1, False, True, length), [real])
    np.testing.assert_allclose(half, full[:, : length // 2 + 1], rtol=1e-6, atol=1e-6)
    (two,) = run_op(DFT(1, False, False, length), [pair])
    np.testing.assert_allclose(
        _complex(two), _sum(_complex(pair), length, -1), rtol=1e-4, atol=1e-4
    )
    (back,) = run_op(DFT(1, True, False, length), [pair])
    want = _sum(_complex(pair), length, 1) / length
    np.testing.assert_allclose(_complex(back), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("axis", [0, 1])
def test_onesided_inverse_restores_the_signal(length: int, axis: int) -> None:
    shape = [3, 4, 1]
    shape[axis] = length
    x = _normal(*shape)
    (spectrum,) = run_op(DFT(axis, False, True, length), [x])
    assert spectrum.shape[axis] == length // 2 + 1
    (back,) = run_op(DFT(axis, True, True, length), [spectrum])
    np.testing.assert_allclose(back, x, rtol=1e-5, atol=1e-6)


def test_dft_type_rules() -> None:
    n = symbol("N")
    x = TensorType(DType.F32, (n, 10, 1))
    assert DFT(1, False, True, 10).infer(x).shape == (n, 6, 2)
    assert DFT(0, False, True, n).infer(x).shape == (floordiv(n, 2) + 1, 10, 2)
    assert DFT(1, True, True, 18).infer(x).shape == (n, 18, 1)
    for op, message in (
        (DFT(2, False, False, 4), "axis"),
        (DFT(1, False, False, 0), "at least 1"),
    ):
        with pytest.raises(TypeRuleError, match=message):
            op.infer(x)
    with pytest.raises(TypeRuleError, match="onesided"):
        DFT(1, False, True, 10).infer(TensorType(DType.F32, (1, 10, 2)))


@pytest.mark.parametrize(("length", "step"), [(4, 2), (5, 2), (3, 5), (4, 4), (7, 1), (400, 160)])
def test_frames_with_a_symbolic_extent(length: int, step: int) -> None:
    n = symbol("N")
    graph = Graph("g")
    op = Frame(length, step)
    with building(Builder(graph.block, graph.facts)):
        x = graph.add_input("x", TensorType(DType.F32, (2, n)))
        graph.set_outputs({"y": emit_one(op, x), "z": op.decompose(x)})
    assert graph.outputs[0].type == graph.outputs[1].type
    for extra in (0, 1, step, 3 * step + 1):
        given = _normal(2, length + extra)
        found = evaluate(graph, {"x": given})
        starts = range(0, extra + 1, step)
        want = np.stack([given[:, s : s + length] for s in starts], axis=1)
        np.testing.assert_array_equal(found["y"], want)
        np.testing.assert_array_equal(found["z"], want)


@pytest.mark.parametrize("onesided", [True, False])
@pytest.mark.parametrize("form", ["flat", "real", "complex"])
@pytest.mark.parametrize("windowed", [True, False])
def test_stft(onesided: bool, form: str, windowed: bool) -> None:
    if form == "complex" and onesided:
        with pytest.raises(TypeRuleError, match="onesided"):
            STFT(4, 9).infer(TensorType(DType.F32, (1, 30, 2)))
        return
    x = _normal(2, 40, 2 if form == "complex" else 1)
    window = _normal(9) if windowed else None
    values = _complex(x) if form == "complex" else x[..., 0]
    op = STFT(4, 9, onesided)
    given = x[..., 0] if form == "flat" else x
    (got,) = run_op(op, [np.ascontiguousarray(given), window])
    bins = 5 if onesided else 9
    assert got.shape == (2, 8, bins, 2)
    for f in range(8):
        piece = values[:, 4 * f : 4 * f + 9] * (1 if window is None else window)
        want = _sum(piece, 9, -1)[:, :bins]
        np.testing.assert_allclose(_complex(got[:, f]), want, rtol=1e-4, atol=1e-4)


def test_stft_decomposes_with_a_symbolic_extent() -> None:
    n = symbol("N")
    op = STFT(160, 400)
    graph = Graph("g")
    with building(Builder(graph.block, graph.facts)):
        x = graph.add_input("x", TensorType(DType.F32, (1, n)))
        window = signal.hann_window(400)
        found = op.decompose(x, window)
        assert found is not None
        graph.set_outputs({"y": emit_one(op, x, window), "z": found})
    for extent in (400, 559, 2000):
        results = evaluate(graph, {"x": _normal(1, extent)})
        assert results["y"].shape == (1, (extent - 400) // 160 + 1, 201, 2)
        np.testing.assert_allclose(results["z"], results["y"], rtol=1e-4, atol=2e-4)


WINDOWS = {
    "hann_window": (0.5, -0.5),
    "hamming_window": (25 / 46, -21 / 46),
    "blackman_window": (0.42, -0.5, 0.08),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("symbolic", [True, False])
def test_windows(name: str, periodic: bool, symbolic: bool) -> None:
    graph = Graph("g")
    size: Any = symbol("N") if symbolic else 9
    with building(Builder(graph.block, graph.facts)):
        graph.add_input("x", TensorType(DType.F32, (size,)))
        made = getattr(signal, name)(size, periodic=periodic, dtype=DType.F64)
        graph.set_outputs({"y": made})
    found = evaluate(graph, {"x": np.zeros(9, np.float32)})["y"]
    turn = 2 * np.pi * np.arange(9) / (9 if periodic else 8)
    want = sum(factor * np.cos(j * turn) for j, factor in enumerate(WINDOWS[name]))
    np.testing.assert_allclose(found, want, atol=1e-12)


def test_a_symmetric_window_of_one_element_is_one() -> None:
    graph = Graph("g")
    with building(Builder(graph.block, graph.facts)):
        graph.set_outputs({"y": signal.hann_window(1, periodic=False)})
    np.testing.assert_array_equal(evaluate(graph, {})["y"], [1.0])
