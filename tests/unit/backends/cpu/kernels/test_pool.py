# SPDX-License-Identifier: Apache-2.0
"""Pooling against its NumPy meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.kernels.window import Window, window_words
from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import UnsupportedOpError
from rlx.base.numeric import Array
from rlx.base.types import Shape, TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate
from rlx.ops.pool import Pool

Lower = Callable[[Graph, Isa], Any]


def _isas() -> list[Isa]:
    host = host_isa()
    return [host, host.restricted("v3")] if host.name == "v4" else [host]


ISAS = pytest.mark.parametrize("isa", _isas(), ids=lambda isa: isa.name)
WINDOWS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "halved": (
        (2, 6, 21, 35),
        {"kernel": (2, 2), "strides": (2, 2), "pads": ((0, 0), (0, 0)), "out": (3, 10)},
    ),
    "padded": (
        (1, 9, 33, 35),
        {"kernel": (3, 3), "strides": (2, 2), "pads": ((1, 1), (1, 1)), "out": (5, 17)},
    ),
    "ceil": (
        (1, 4, 4, 3),
        {"kernel": (3, 3), "strides": (2, 2), "pads": ((0, 0), (0, 0)), "out": (2, 2)},
    ),
    "wide": (
        (1, 7, 30, 20),
        {"kernel": (5, 9), "strides": (1, 1), "pads": ((2, 2), (4, 4)), "out": (7, 30)},
    ),
    "line": ((2, 40, 5), {"kernel": (4,), "strides": (2,), "pads": ((1, 0),), "out": (19,)}),
    "volume": (
        (1, 4, 5, 3, 18),
        {
            "kernel": (2, 3, 1),
            "strides": (1, 2, 2),
            "pads": ((1, 0), (1, 1), (0, 0)),
            "out": (4, 3, 2),
        },
    ),
    "nothing": (
        (0, 4, 4, 3),
        {"kernel": (2, 2), "strides": (1, 1), "pads": ((0, 0), (0, 0)), "out": (3, 3)},
    ),
}
CASES = [
    ("max", DType.F32, False),
    ("max", DType.F64, False),
    ("max", DType.F16, False),
    ("max", DType.BF16, False),
    ("max", DType.I8, False),
    ("max", DType.U8, False),
    ("max", DType.I64, False),
    ("avg", DType.F32, False),
    ("avg", DType.F32, True),
    ("avg", DType.F64, False),
    ("avg", DType.F16, True),
    ("avg", DType.BF16, False),
]


def _graph(kind: Any, dtype: DType, counted: bool, shape: Shape, window: dict[str, Any]) -> Graph:
    graph = Graph()
    builder = Builder(graph.block, graph.facts)
    x = graph.add_input("x", TensorType(dtype, shape))
    dilations = (1,) * len(window["kernel"])
    more: dict[str, Any] = {"dilations": dilations, "layout": "nhwc", **window}
    op = Pool(kind=kind, count_include_pad=counted, **more)
    graph.set_outputs({"y": builder.emit_one(op, x)})
    return graph


def _data(shape: Shape, dtype: DType) -> Array:
    rng = np.random.default_rng(2)
    x = rng.standard_normal([int(d) for d in shape]) * 40
    if dtype is DType.U8:
        x = np.abs(x)
    return x.astype(dtype.numpy)


@ISAS
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(("kind", "dtype", "counted"), CASES)
def test_matches_reference(
    kind: Any, dtype: DType, counted: bool, name: str, isa: Isa, lower_graph: Lower
) -> None:
    shape, window = WINDOWS[name]
    graph = _graph(kind, dtype, counted, shape, window)
    x = _data(shape, dtype)
    y = lower_graph(graph, isa).run({"x": x})["y"].astype(np.float64)
    expected = evaluate(graph, {"x": x}, exact=True)["y"].astype(np.float64)
    if kind == "max":
        np.testing.assert_array_equal(y, expected)
    else:
        eps = float(np.finfo(np.float32 if dtype is DType.F32 else np.float64).eps)
        if dtype.is_narrow_float:
            eps = 2.0 ** (-10 if dtype is DType.F16 else -7)
        np.testing.assert_allclose(
            y, expected, rtol=8 * eps, atol=400 * eps if not dtype.is_narrow_float else eps
        )


@ISAS
def test_nan_wins(isa: Isa, lower_graph: Lower) -> None:
    shape, window = WINDOWS["padded"]
    graph = _graph("max", DType.F32, False, shape, window)
    x = _data(shape, DType.F32)
    x[0, ::4, ::5, ::3] = np.nan
    x[0, 1, :, 1] = -np.inf
    y = lower_graph(graph, isa).run({"x": x})["y"]
    expected = evaluate(graph, {"x": x})["y"]
    assert np.isnan(expected).any()
    np.testing.assert_array_equal(y, expected)


def test_all_minus_infinity_stays(lower_graph: Lower) -> None:
    graph = _graph("max", DType.F32, False, *WINDOWS["padded"])
    y = lower_graph(graph, host_isa()).run({"x": np.full((1, 9, 33, 35), -np.inf, np.float32)})["y"]
    assert (y == -np.inf).all()


def test_symbolic_extents(lower_graph: Lower) -> None:
    n, h, w = symbol("N"), symbol("H"), symbol("W")
    window = {
        "kernel": (2, 2),
        "strides": (2, 2),
        "pads": ((0, 0), (0, 0)),
        "out": (h // 2, w // 2),
    }
    graph = _graph("avg", DType.F32, False, (n, h, w, 24), window)
    lowered = lower_graph(graph, host_isa())
    for extents in ((1, 2, 2), (3, 8, 40), (2, 1, 6), (0, 4, 4)):
        x = _data((*extents, 24), DType.F32)
        expected = evaluate(graph, {"x": x}, exact=True)["y"]
        np.testing.assert_allclose(lowered.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-4)


def test_an_axis_that_positions_cannot_count_is_refused() -> None:
    window = Window(1, (2**31,), (2**10,), 1, 1, (3,), (2**21,), (1,), (1,))
    with pytest.raises(UnsupportedOpError, match="at most 2147483647 elements, found 2147483648"):
        window_words(window, 1)
