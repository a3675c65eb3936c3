# SPDX-License-Identifier: Apache-2.0
"""Resize: coordinates, ties, edges, integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.dims import symbol
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.resize import Resize, scale_ratio
from rlx.ops.spec import building, emit_one


def _line(n: int, out: int, **attributes: Any) -> list[float]:
    scale = attributes.pop("scale", None)
    (y,) = run_op(Resize((out,), (scale,), **attributes), [np.arange(n, dtype=np.float32)])
    return y.tolist()


@pytest.mark.parametrize("scale", [None, 0.3])
def test_ties_round_as_asked(scale: float | None) -> None:
    # onnxruntime #28291: the coordinate of the second element is 4.5 exactly.
    common: dict[str, Any] = {"mode": "nearest", "scale": scale}
    assert _line(20, 6, nearest="round_prefer_ceil", **common) == [1, 5, 8, 11, 15, 18]
    assert _line(20, 6, nearest="round_prefer_floor", **common) == [1, 4, 8, 11, 14, 18]


def test_floor_below_the_first_element_stays_inside() -> None:
    # iree #24264: floor(-0.25) is -1, which reads the edge.
    common: dict[str, Any] = {"mode": "nearest", "nearest": "floor", "scale": 2.0}
    assert _line(4, 8, **common) == [0, 0, 0, 1, 1, 2, 2, 3]
    assert _line(4, 8, **{**common, "nearest": "ceil"}) == [0, 1, 1, 2, 2, 3, 3, 3]


def test_half_pixel_of_one_element() -> None:
    assert _line(4, 1, mode="linear") == [1.5]
    assert _line(4, 1, mode="linear", coordinate="pytorch_half_pixel") == [0.0]
    assert _line(4, 1, mode="linear", coordinate="align_corners") == [0.0]


def test_integers_round_half_to_even() -> None:
    # onnxruntime #25417: 2.667 and 4.333 in floats.
    x = np.arange(1, 9, dtype=np.uint8).reshape(1, 1, 2, 4)
    op = Resize((1, 1, 1, 2), (1.0, 1.0, 0.6, 0.6), "linear")
    np.testing.assert_array_equal(run_op(op, [x])[0].reshape(-1), [3, 4])
    np.testing.assert_allclose(
        run_op(op, [x.astype(np.float32)])[0].reshape(-1), [8 / 3, 13 / 3], rtol=1e-6
    )
    half = Resize((3,), (None,), "linear", "align_corners")
    np.testing.assert_array_equal(run_op(half, [np.array([0, 5], np.int8)])[0], [0, 2, 5])
    np.testing.assert_array_equal(run_op(half, [np.array([0, 7], np.int8)])[0], [0, 4, 7])


def test_cubic_saturates_integers() -> None:
    op = Resize((8,), (None,), "cubic")
    (y,) = run_op(op, [np.array([0, 255, 255, 0], np.uint8)])
    wide = run_op(op, [np.array([0, 255, 255, 0], np.float64)])[0]
    assert wide.max() > 255
    assert wide.min() < 0
    np.testing.assert_array_equal(y, np.clip(np.rint(wide), 0, 255).astype(np.uint8))


def _direct(x: list[float], out: int, coordinate: str, a: float, exclude: bool) -> list[float]:
    """The cubic kernel as a sum over four neighbours."""
    n, scale = len(x), out / len(x)
    result: list[float] = []
    for i in range(out):
        c = {
            "half_pixel": (i + 0.5) / scale - 0.5,
            "asymmetric": i / scale,
            "align_corners": i * (n - 1) / (out - 1),
        }[coordinate]
        total = weights = 0.0
        for k in range(int(np.floor(c)) - 1, int(np.floor(c)) + 3):
            d = abs(c - k)
            w = (
                (a + 2) * d**3 - (a + 3) * d**2 + 1
                if d <= 1
                else a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
            )
            if exclude and not 0 <= k < n:
                continue
            total += w * x[min(max(k, 0), n - 1)]
            weights += w
        result.append(total / weights if exclude else total)
    return result


@pytest.mark.parametrize("coordinate", ["half_pixel", "asymmetric", "align_corners"])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("out", [3, 7, 16])
def test_cubic(coordinate: Any, exclude: bool, out: int) -> None:
    x = [1.0, -2.0, 0.5, 4.0, 3.0, 3.5, -1.0]
    op = Resize((out,), (None,), "cubic", coordinate, cubic_a=-0.6, exclude_outside=exclude)
    (y,) = run_op(op, [np.array(x)])
    np.testing.assert_allclose(y, _direct(x, out, coordinate, -0.6, exclude), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("out", [2, 5, 6, 13])
def test_linear_between_corners_is_numpys(out: int) -> None:
    x = np.random.default_rng(0).standard_normal(6)
    (y,) = run_op(Resize((out,), (None,), "linear", "align_corners"), [x])
    np.testing.assert_allclose(y, np.interp(np.linspace(0, 5, out), np.arange(6), x), atol=1e-12)


def test_symmetric_half_pixel_centres_what_rounding_cut_off() -> None:
    # in 5, scale 0.5: out is 2 of 2.5 elements; coordinates shift by 5 / 2 * (1 - 2 / 2.5) = 0.5.
    op = Resize((2,), (0.5,), "linear", "half_pixel_symmetric")
    assert [float(c) for c in op.coordinates(0, 5)] == [1.0, 3.0]


def test_unchanged_axes_are_not_touched() -> None:
    x = np.array([[np.nan, np.inf, 1.0]], np.float32)
    (y,) = run_op(Resize((2, 3), (2.0, 1.0), "linear", "asymmetric"), [x])
    # A neighbour of weight 0 takes part, and 0 * infinity is NaN.
    np.testing.assert_array_equal(y, [[np.nan, np.nan, 1], [np.nan, np.inf, 1]])
    (z,) = run_op(Resize((1, 3), (None, None), "cubic"), [x])
    np.testing.assert_array_equal(z, x)


def test_a_scale_is_the_ratio_it_was_rounded_from() -> None:
    assert scale_ratio(float(np.float32(0.3))).denominator == 10
    assert scale_ratio(2.0) == 2
    odd = float(np.float32(np.pi))
    assert abs(float(scale_ratio(odd)) - odd) < 1e-7


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_symbolic_extents(mode: Any) -> None:
    h = symbol("H")
    graph = Graph("g")
    op = Resize((1, h * 2), (None, 2.0), mode)
    with building(Builder(graph.block, graph.facts)):
        x = graph.add_input("x", TensorType(DType.F32, (1, h)))
        outputs = {"y": emit_one(op, x)}
        repeated = op.decompose(x)
        assert (repeated is not None) == (mode == "nearest")
        if repeated is not None:
            outputs["z"] = repeated
    graph.set_outputs(outputs)
    for extent in (1, 2, 5):
        x = np.random.default_rng(extent).standard_normal((1, extent)).astype(np.float32)
        found = evaluate(graph, {"x": x})
        if mode == "nearest":
            np.testing.assert_array_equal(found["y"], np.repeat(x, 2, axis=1))
            np.testing.assert_array_equal(found["z"], found["y"])
        else:
            where = np.clip((np.arange(2 * extent) + 0.5) / 2 - 0.5, 0, extent - 1)
            want = np.interp(where, np.arange(extent), np.asarray(x[0], np.float64))
            np.testing.assert_allclose(found["y"][0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"mode": "area"}, "mode 'area'"),
        ({"coordinate": "tf_crop_and_resize"}, "coordinate"),
        ({"nearest": "up"}, "nearest"),
        ({"scales": (0.0,)}, "positive"),
        ({"sizes": (1, 2)}, "one entry"),
    ],
)
def test_refusals(attributes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"sizes": (3,), "scales": (None,), **attributes}
    op = Resize(**given)
    with pytest.raises(TypeRuleError, match=message):
        op.infer(TensorType(DType.F32, (4,)))
