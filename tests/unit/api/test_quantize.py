# SPDX-License-Identifier: Apache-2.0
"""Quantised graphs hold 8-bit weights, run in integers where there is a kernel, and stay close."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.backends.cpu.isa import host_isa
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ops.conv import Conv
from rlx.ops.spec import emit_one

_RNG = np.random.default_rng(0)
_W1 = (_RNG.standard_normal((20, 32)) * _RNG.uniform(0.1, 3, 32)).astype(np.float32)
_W2 = _RNG.standard_normal((32, 8)).astype(np.float32)
_KERNEL = _RNG.standard_normal((6, 3, 3, 3)).astype(np.float32)


def _mlp() -> rlx.Graph:
    with rlx.Graph("mlp") as g:
        x = g.input("x", ["N", 20])
        hidden = ops.relu(x @ g.param("w1", _W1))
        g.output("y", hidden @ g.param("w2", _W2))
    return g


def _samples(count: int = 4) -> list[dict[str, Array]]:
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((5, 20), np.float32)} for _ in range(count)]


def _dtypes(graph: rlx.Graph) -> dict[str, str]:
    return {n: p.value.type.dtype.value for n, p in graph.ir.params.items()}


def _run(graph: rlx.Graph, x: Array, device: str = "cpu") -> Array:
    with rlx.compile(graph, device) as model:
        return model.run({"x": x})["y"]


def test_products_run_in_integers_close_to_the_floats() -> None:
    quantized = rlx.quantize(_mlp(), rlx.calibrate(_mlp(), _samples()))
    assert _dtypes(quantized) == {
        "w1.i8": "i8",
        "w1.scale": "f32",
        "w2.i8": "i8",
        "w2.scale": "f32",
    }
    x = _samples()[0]["x"]
    exact = _run(_mlp(), x)
    with rlx.compile(quantized) as model:
        got = model.run({"x": x})["y"]
        kernels = {name: how for name, how, _ in model.program.compiled.dispatch}
    assert any("quantized_matmul" in name for name in kernels) is host_isa().has_vnni
    assert set(kernels.values()) == {"kernel"}
    assert np.linalg.norm(got - exact) < 0.02 * np.linalg.norm(exact)
    reference = _run(quantized, x, "reference")
    # A value on the border of two steps may fall to either side where sums are ordered otherwise.
    assert np.linalg.norm(got - reference) < 0.005 * np.linalg.norm(exact)


def test_the_source_graph_is_untouched() -> None:
    graph = _mlp()
    before = _run(graph, _samples()[0]["x"])
    rlx.quantize(graph, rlx.calibrate(graph, _samples()))
    assert _dtypes(graph) == {"w1": "f32", "w2": "f32"}
    assert np.array_equal(_run(graph, _samples()[0]["x"]), before)


def test_weights_alone_need_no_data_and_round_to_nearest() -> None:
    quantized = rlx.quantize(_mlp())
    stored, scale = (quantized.ir.params[n].data for n in ("w1.i8", "w1.scale"))
    assert stored is not None
    assert scale is not None
    assert np.abs(stored).max(axis=0).tolist() == [127] * 32
    assert (np.abs(stored * scale - _W1) <= scale * 0.5001).all()
    x = _samples()[0]["x"]
    want = np.maximum(x @ (stored * scale), 0)
    stored2, scale2 = (quantized.ir.params[n].data for n in ("w2.i8", "w2.scale"))
    assert stored2 is not None
    assert scale2 is not None
    np.testing.assert_allclose(_run(quantized, x), want @ (stored2 * scale2), rtol=1e-4, atol=1e-4)


def test_channels_of_different_size_want_scales_of_their_own() -> None:
    x = _samples()[0]["x"]
    exact = _run(_mlp(), x)

    def error(per_channel: bool) -> float:
        return float(np.linalg.norm(_run(rlx.quantize(_mlp(), per_channel=per_channel), x) - exact))

    assert error(per_channel=True) < error(per_channel=False)


@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_both_activation_dtypes(dtype: str) -> None:
    calibration = rlx.calibrate(_mlp(), _samples(), method="mse")
    quantized = rlx.quantize(_mlp(), calibration, activation_dtype=dtype)
    x = _samples()[1]["x"]
    exact = _run(_mlp(), x)
    assert np.linalg.norm(_run(quantized, x) - exact) < 0.03 * np.linalg.norm(exact)


def test_convolutions() -> None:
    with rlx.Graph("conv") as g:
        x = g.input("x", ["N", 3, 8, 8])
        y = emit_one(Conv((1, 1), (1, 1), ((1, 1), (1, 1))), x, g.param("k", _KERNEL))
        g.output("y", ops.relu(y))
    data = np.random.default_rng(2).standard_normal((2, 3, 8, 8), np.float32)
    quantized = rlx.quantize(g, rlx.calibrate(g, [{"x": data}]))
    scale = quantized.ir.params["k.scale"].data
    assert scale is not None
    assert scale.shape == (6,)
    exact = _run(g, data)
    assert np.linalg.norm(_run(quantized, data) - exact) < 0.02 * np.linalg.norm(exact)


def test_a_product_of_two_activations_stays() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [4, 4])
        g.output("y", x @ x)
    with pytest.raises(rlx.UsageError, match="no matmul or conv"):
        rlx.quantize(g)


def test_a_state_is_no_weight() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [4, 4])
        h = g.state("h", [4, 4])
        y = x @ h
        g.set_next(h, y)
        g.output("y", y)
    with pytest.raises(rlx.UsageError, match="no matmul or conv"):
        rlx.quantize(g)


def test_a_weight_that_is_computed_from_weights() -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 32])
        g.output("y", x @ ops.transpose(g.param("w", _W1), (1, 0)))
    quantized = rlx.quantize(g)
    assert sorted(_dtypes(quantized).values()) == ["f32", "i8"]
    data = np.random.default_rng(3).standard_normal((4, 32), np.float32)
    np.testing.assert_allclose(_run(quantized, data), data @ _W1.T, rtol=0.1, atol=0.5)


def test_excluding_and_choosing_operators() -> None:
    first = _mlp().ir
    names = [str(n.location) for n in first.block if n.op.name == "matmul"]
    line = names[0].rpartition(":")[2]
    quantized = rlx.quantize(_mlp(), exclude=[f"*:{line}"])
    assert _dtypes(quantized) == {"w1": "f32", "w2.i8": "i8", "w2.scale": "f32"}
    with pytest.raises(rlx.UsageError, match="matches no matmul or conv"):
        rlx.quantize(_mlp(), exclude=["nothing*"])
    with pytest.raises(rlx.UsageError, match="cannot quantise softmax"):
        rlx.quantize(_mlp(), ops=["softmax"])


def test_a_calibration_of_other_options_is_refused() -> None:
    line = str(next(n for n in _mlp().ir.block if n.op.name == "matmul").location).rpartition(":")[
        2
    ]
    calibration = rlx.calibrate(_mlp(), _samples(), exclude=[f"*:{line}"])
    with pytest.raises(rlx.UsageError, match="no range for x"):
        rlx.quantize(_mlp(), calibration)


def test_activations_that_are_not_finite_are_named() -> None:
    bad = [{"x": np.full((1, 20), np.inf, np.float32)}]
    with pytest.raises(rlx.UsageError, match="calibration of 'x': there are NaNs or infinities"):
        rlx.calibrate(_mlp(), bad)


def test_activations_without_elements_have_no_range() -> None:
    nothing = [{"x": np.empty((0, 20), np.float32)}]
    with pytest.raises(rlx.UsageError, match=r"calibration of 'x', .*all samples are empty"):
        rlx.calibrate(_mlp(), nothing)
    ranges = rlx.calibrate(_mlp(), [*nothing, *_samples()])
    assert ranges.ranges == rlx.calibrate(_mlp(), _samples()).ranges


@pytest.mark.parametrize("inner", [65_793, 70_000])
def test_sums_that_leave_i32_are_no_integer_products(inner: int) -> None:
    x = np.ones((2, inner), np.float32)  # 255 as u8
    with rlx.Graph() as g:
        w = g.param("w", -np.ones((inner, 4), np.float32))  # -127 as i8
        g.output("y", g.input("x", ["N", inner]) @ w)
    quantized = rlx.quantize(g, rlx.calibrate(g, [{"x": x}]))
    for device in ("cpu", "reference"):
        np.testing.assert_allclose(_run(quantized, x, device), np.full((2, 4), -inner), rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "mixed-f16"])
@pytest.mark.parametrize("isa", ["v3", "v4"])
def test_products_of_quantised_activations_stay_as_they_are_under_a_precision(
    precision: str, isa: str
) -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 20])
        g.output("y", x @ g.param("w1", _W1))
    quantized = rlx.quantize(g, rlx.calibrate(g, _samples()))
    x = _samples()[0]["x"]
    want = _run(quantized, x)
    close = 1e-5 * np.abs(want).max()
    for device in ("cpu", "reference"):
        with (
            override(RLX_CPU_ISA=isa),
            rlx.compile(quantized, device, precision=precision) as model,
        ):
            got = model.run({"x": x})["y"]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=close)


@pytest.mark.parametrize("precision", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("weight_zero", [0, 128, 77])
def test_a_model_that_quantises_its_activations_itself(weight_zero: int, precision: str) -> None:
    onnx = pytest.importorskip("onnx")
    make, random = onnx.helper, np.random.default_rng(3)
    constants = {
        "w": random.integers(0, 255, (20, 24)).astype(np.uint8),
        "w_zero": np.uint8(weight_zero),
        "w_scale": np.float32(0.02),
    }
    nodes = [
        make.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        make.make_node("MatMulInteger", ["q", "w", "zero", "w_zero"], ["sums"]),
        make.make_node("Cast", ["sums"], ["wide"], to=1),
        make.make_node("Mul", ["scale", "w_scale"], ["both"]),
        make.make_node("Mul", ["wide", "both"], ["y"]),
    ]
    values = [make.make_tensor_value_info(n, 1, ["B", s]) for n, s in (("x", 20), ("y", 24))]
    tensors = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    model = make.make_model(make.make_graph(nodes, "g", values[:1], values[1:], tensors))
    with rlx.load(model, precision=precision) as fast, rlx.load(model, "reference") as exact:
        for batch in (1, 7, 40):
            x = random.standard_normal((batch, 20), np.float32)
            got, want = fast(x), exact(x)
            off = 1e-6 if precision == "f32" else 0.02 * np.abs(want).max()
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=off)
        names = [name for name, _, _ in fast.program.compiled.dispatch]
    assert any("quantized_matmul" in name for name in names) is host_isa().has_vnni


def test_weights_of_convolutions_are_read_back_and_set(tmp_path: Path) -> None:
    kernel = np.random.default_rng(5).standard_normal((10, 5, 3, 3), np.float32)
    with rlx.Graph("conv") as g:
        x = g.input("x", ["N", 5, 8, 8])
        g.output("y", emit_one(Conv((1, 1), (1, 1), ((1, 1), (1, 1))), x, g.param("k", kernel)))
    data = np.random.default_rng(2).standard_normal((2, 5, 8, 8), np.float32)
    quantized = rlx.quantize(g, rlx.calibrate(g, [{"x": data}]))
    weight = quantized.ir.params["k.i8"].data
    assert weight is not None
    with rlx.compile(quantized) as m:
        before = m(data)
        np.testing.assert_array_equal(m.get_param("k.i8"), weight)
        m.set_param_range("k.i8", 0, np.zeros((1, 5, 3, 3), np.int8))
        after = m(data)
        assert not after[:, 0].any()
        np.testing.assert_array_equal(after[:, 1:], before[:, 1:])
        m.save(tmp_path / "m.rlxp")
    with rlx.open(tmp_path / "m.rlxp") as opened:
        np.testing.assert_array_equal(opened(data), after)
        np.testing.assert_array_equal(opened.get_param("k.i8")[1:], weight[1:])


def test_arguments_are_checked() -> None:
    with pytest.raises(rlx.UsageError, match="at least one run"):
        rlx.calibrate(_mlp(), [])
    with pytest.raises(rlx.UsageError, match="inputs of several runs"):
        rlx.calibrate(_mlp(), _samples()[0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(rlx.UsageError, match="method is one of minmax, percentile, mse"):
        rlx.calibrate(_mlp(), _samples(), method="kl")  # pyright: ignore[reportArgumentType]
    with pytest.raises(rlx.UsageError, match="percentile is above 50"):
        rlx.calibrate(_mlp(), _samples(), percentile=3)
    with pytest.raises(rlx.UsageError, match="'u8' or 'i8'"):
        rlx.quantize(_mlp(), activation_dtype="i4")
    with pytest.raises(rlx.UsageError, match=r"exclude is a list: exclude=\['fc'\]"):
        rlx.quantize(_mlp(), exclude="fc")
    with pytest.raises(rlx.UsageError, match=r"calibration is of another model.*'seq'"):
        rlx.quantize(_mlp(), rlx.Calibration({}, {"seq": 3}))


def test_a_saved_calibration_quantises_alike(tmp_path: Path) -> None:
    calibration = rlx.calibrate(_mlp(), _samples())
    calibration.save(tmp_path / "ranges.json")
    x = _samples()[0]["x"]
    again = rlx.quantize(_mlp(), rlx.Calibration.load(tmp_path / "ranges.json"))
    assert np.array_equal(_run(again, x), _run(rlx.quantize(_mlp(), calibration), x))
