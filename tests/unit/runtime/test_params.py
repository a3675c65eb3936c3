# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ops.indexing import gather
from rlx.ops.matmul import matmul
from rlx.ops.movement import concat
from rlx.runtime import cells as module

_DEVICES = ("reference", "cpu")


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _two_layers(w: Any = None, v: Any = None) -> rlx.Graph:
    """y = (x @ w + b) @ v: both matrices are packed on the CPU, the bias is read as it is."""
    with rlx.Graph("layers") as g:
        x = g.input("x", ["N", 32])
        w = g.param("w", _array(32, 80) if w is None else w)
        b = g.param("b", _array(80, seed=1))
        v = g.param("v", _array(80, 16, seed=2) if v is None else v)
        g.output("y", matmul(matmul(x, w) + b, v))
    return g


def _expected(run: rlx.Executable, x: Array) -> Array:
    w, b, v = (run.get_param(n).astype(np.float64) for n in "wbv")
    return ((x @ w + b) @ v).astype(np.float32)


def _check(run: rlx.Executable, rows: int = 3) -> Array:
    x = _array(rows, 32, seed=5)
    y = run(x)
    np.testing.assert_allclose(y, _expected(run, x), rtol=2e-5, atol=2e-4)
    return y


def _computed(run: rlx.Executable) -> int:
    return run._weights.computed  # pyright: ignore[reportPrivateUsage]


# -- values and versions ----------------------------------------------------------------------------------------------


def test_params_are_listed_with_their_versions(device: str) -> None:
    run = rlx.compile(_two_layers(), device)
    assert list(run.params) == ["w", "b", "v"]
    assert str(run.params["w"]) == "w: f32[32,80]"
    assert [(s.version, s.has_value) for s in run.params.values()] == [(0, True)] * 3
    run.set_param("b", np.zeros(80))
    run.set_param("b", np.ones(80))
    assert [s.version for s in run.params.values()] == [0, 2, 0]


def test_a_set_param_counts_from_the_next_run_on_also_after_packing(device: str) -> None:
    run = rlx.compile(_two_layers(), device)
    before = _check(run)
    for name in "wbv":
        run.set_param(name, run.get_param(name) * 2)
        after = _check(run)
        assert not np.array_equal(before, after)
        before = after
    assert run.variants == 1


def test_a_set_param_before_the_first_run_counts(device: str) -> None:
    run = rlx.compile(_two_layers(), device)
    run.set_param("w", np.zeros((32, 80)))
    np.testing.assert_array_equal(run.get_param("w"), np.zeros((32, 80), np.float32))
    _check(run)


def test_setting_a_param_recomputes_what_depends_on_it_and_nothing_else() -> None:
    run = rlx.compile(_two_layers(), "cpu")
    _check(run)
    assert _computed(run) == 2  # two packed matrices
    _check(run, 7)
    assert _computed(run) == 2
    run.set_param("b", np.zeros(80))
    _check(run)
    assert _computed(run) == 2  # read as it is
    run.set_param("w", _array(32, 80, seed=9))
    run.set_param("w", _array(32, 80, seed=10))
    assert _computed(run) == 2  # not before somebody needs it
    _check(run)
    _check(run)
    assert _computed(run) == 3


def test_one_weight_computed_from_several_params_follows_each(device: str) -> None:
    with rlx.Graph("joined") as g:
        x = g.input("x", ["N", 8])
        parts = [g.param(n, _array(8, 40, seed=i)) for i, n in enumerate(("q", "k", "v"))]
        g.output("y", matmul(x, concat(parts, axis=1)))
    run = rlx.compile(g, device)
    x = _array(2, 8, seed=7)
    for name in ("q", "v", "k", "q"):
        run.set_param(name, run.get_param(name) + 1)
        joined = np.concatenate([run.get_param(n) for n in ("q", "k", "v")], axis=1)
        np.testing.assert_allclose(run(x), x @ joined, rtol=1e-5, atol=1e-5)


def test_setting_a_param_never_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.runtime import compile as compiler

    run = rlx.compile(_two_layers(), "cpu")
    _check(run)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "compile_graph", fail)
    run.set_param("w", np.ones((32, 80)))
    _check(run)


def test_every_variant_sees_a_new_value(device: str) -> None:
    run = rlx.compile(_two_layers(), device)
    for factor in (1, 3):
        run.set_param("v", _array(80, 16) * factor)
        for rows in (3, 0, 5):  # no rows at all is a program of its own
            assert _check(run, rows).shape == (rows, 16)
    assert run.variants == 2
    if device == "cpu":
        assert _computed(run) == 3  # w once, v twice: variants share what they read


# -- bits --------------------------------------------------------------------------------------------------------------


_BITS = {
    "f32": np.array([0x7FC12345, 0x80000000, 1, 0xFF800000, 0x7F800001], np.uint32).view(
        np.float32
    ),
    "f64": np.array([0x7FF8000000012345, 1 << 63, 1], np.uint64).view(np.float64),
}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_get_param_returns_the_bits_also_from_a_packed_layout(device: str, dtype: str) -> None:
    w = np.resize(_BITS[dtype], (5, 7)).copy()  # NaN payloads, negative zero, denormals, infinities
    with rlx.Graph("bits") as g:
        g.output("y", matmul(g.input("x", ["N", 5], dtype), g.param("w", w)))
    run = rlx.compile(g, device)
    run(np.ones((2, 5), w.dtype))
    for _ in range(2):
        found = run.get_param("w")
        assert found.tobytes() == w.tobytes()
        assert found.flags.writeable
        w = w[::-1].copy()
        run.set_param_bytes("w", w.tobytes(), dtype)
        run(np.ones((2, 5), w.dtype))


def test_packed_params_are_held_once() -> None:
    run = rlx.compile(_two_layers(), "cpu")
    _check(run)
    held = run._weights.at_hand()  # pyright: ignore[reportPrivateUsage]
    assert held["w"] is None
    assert held["v"] is None
    assert held["b"] is not None
    run.set_param("w", _array(32, 80, seed=3))
    _check(run)
    assert run._weights.at_hand()["w"] is None  # pyright: ignore[reportPrivateUsage]
    np.testing.assert_array_equal(run.get_param("w"), _array(32, 80, seed=3))


def test_a_weight_that_was_not_only_moved_keeps_its_original(device: str) -> None:
    with rlx.Graph("folded") as g:
        x = g.input("x", ["N", 8])
        w, s = g.param("w", _array(8, 70)), g.param("s", _array(70, seed=1))
        g.output("y", matmul(x, w * s))
    run = rlx.compile(g, device)
    x = _array(2, 8, seed=2)
    run(x)
    np.testing.assert_array_equal(run.get_param("w"), _array(8, 70))
    run.set_param("s", np.full(70, 2.0))
    np.testing.assert_allclose(run(x), x @ (2 * _array(8, 70)), rtol=1e-5, atol=1e-5)


def test_what_the_caller_does_to_the_arrays_afterwards_changes_nothing(device: str) -> None:
    w, v = _array(32, 80), _array(80, 16, seed=2)
    run = rlx.compile(_two_layers(w, v), device)
    first = _check(run)
    w[:] = 0
    v[:] = 0
    np.testing.assert_array_equal(_check(run), first)
    b = np.ones(80, np.float32)
    run.set_param("b", b)
    second = _check(run)
    b[:] = 0
    run.get_param("b")[:] = 0
    np.testing.assert_array_equal(_check(run), second)


# -- conversion and its errors -----------------------------------------------------------------------------------------


def _typed(dtype: str, count: int = 70) -> rlx.Graph:
    with rlx.Graph("typed") as g:
        x = g.input("x", [count], dtype)
        g.output("y", x + g.param("p", shape=[count], dtype=dtype))
    return g


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "i8", "u8", "i32", "i64"])
def test_values_are_converted_to_the_params_dtype_not_reinterpreted(
    device: str, dtype: str
) -> None:
    run = rlx.compile(_typed(dtype), device)
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bf16" else None
    values = np.arange(70) % 50
    x = np.zeros(70, kind or run.inputs[0].dtype.numpy)
    for source in (np.int64, np.float64, np.float32, np.uint8):
        run.set_param("p", values.astype(source))
        np.testing.assert_array_equal(run(x).astype(np.float64), values)
    run.set_param("p", list(range(70)))
    assert run.get_param("p").dtype == x.dtype


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("u8", -1), ("u8", 256), ("i8", 0.5), ("i32", float("nan")), ("f16", 1e6), ("f32", 2**24 + 1)],
)
def test_values_that_do_not_fit_are_errors_and_change_nothing(dtype: str, value: Any) -> None:
    run = rlx.compile(_typed(dtype))
    run.set_param("p", np.full(70, 3))
    bad = np.full(70, 3, dtype=np.array(value).dtype)
    bad[41] = value
    with pytest.raises(rlx.UsageError, match=rf"param 'p' of typed is {dtype}.*element 41 "):
        run.set_param("p", bad)
    assert run.params["p"].version == 1
    np.testing.assert_array_equal(run.get_param("p").astype(np.int64), np.full(70, 3))


def test_wrong_names_shapes_and_sizes_are_errors(device: str) -> None:
    run = rlx.compile(_two_layers(), device)
    with pytest.raises(rlx.UsageError, match=r"no param 'vv'.*Did you mean 'v'"):
        run.set_param("vv", np.zeros((80, 16)))
    with pytest.raises(rlx.UsageError, match="'vv'"):
        run.get_param("vv")
    with pytest.raises(rlx.UsageError, match=r"'b' of layers is f32\[80\], got shape \[81\]"):
        run.set_param("b", np.zeros(81))
    with pytest.raises(rlx.UsageError, match=r"got shape \[1, 80\]"):
        run.set_param("b", np.zeros((1, 80)))
    with pytest.raises(rlx.UsageError, match=r"80 elements of f32 are 320 bytes, got 319"):
        run.set_param_bytes("b", bytes(319), "f32")
    with pytest.raises(rlx.UsageError, match=r"640 bytes, got 320"):
        run.set_param_bytes("b", bytes(320), "f64")
    with pytest.raises(rlx.UsageError, match="f33"):
        run.set_param_bytes("b", bytes(320), "f33")
    assert all(s.version == 0 for s in run.params.values())
    run.close()
    for call in (lambda: run.params, lambda: run.get_param("b"), lambda: run.set_param("b", 0)):
        with pytest.raises(rlx.UsageError, match="closed"):
            call()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "i8", "u8", "i64"])
def test_bytes_are_counted_in_bytes_of_their_dtype(device: str, dtype: str) -> None:
    run = rlx.compile(_typed(dtype), device)
    kind = run.inputs[0].dtype.numpy
    data = (np.arange(70) % 100).astype(kind)
    run.set_param_bytes("p", data.tobytes(), dtype)
    assert run(np.zeros(70, kind)).tobytes() == data.tobytes()
    run.set_param_bytes("p", (np.arange(70) % 90).astype(np.float64).tobytes(), "f64")
    np.testing.assert_array_equal(run(np.zeros(70, kind)).astype(np.int64), np.arange(70) % 90)


# -- without a value ---------------------------------------------------------------------------------------------------


def test_a_param_without_a_value_is_an_error_that_names_it(device: str) -> None:
    with rlx.Graph("hollow") as g:
        x = g.input("x", ["N", 8])
        g.output(
            "y", matmul(x, g.param("w", shape=(8, 70))) + g.param("b", shape=[70], dtype="f32")
        )
    run = rlx.compile(g, device)
    x = _array(2, 8)
    with pytest.raises(
        rlx.UsageError, match=r"hollow has params without a value: .*'w'.*set_param"
    ):
        run(x)
    with pytest.raises(rlx.UsageError, match="no value"):
        run.get_param("w")
    run.set_param("w", _array(8, 70))
    with pytest.raises(rlx.UsageError, match="without a value: 'b'"):
        run(x)
    assert [s.has_value for s in run.params.values()] == [True, False]
    run.set_param("b", np.zeros(70))
    np.testing.assert_allclose(run(x), x @ _array(8, 70), rtol=1e-5, atol=1e-5)


def test_a_value_at_the_address_of_an_old_one_is_a_value_of_its_own(device: str) -> None:
    run = rlx.compile(_two_layers(), device)
    for seed in range(20):  # every array is freed before the next one is made
        w = _array(32, 80, seed=seed)
        run.set_param("w", w)
        del w
        _check(run)
        other = rlx.compile(_two_layers(_array(32, 80, seed=seed + 50)), device)
        _check(other)
        other.close()


def test_a_param_takes_data_or_a_shape() -> None:
    with rlx.Graph("g") as g:
        wrong: list[dict[str, Any]] = [{}, {"data": np.zeros(3), "shape": [3]}, {"shape": [-1]}]
        for arguments in wrong:
            with pytest.raises(rlx.UsageError):
                g.param("p", **arguments)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_replaced_in_place_and_in_packed_layouts(device: str) -> None:
    run = rlx.compile(_two_layers(), device)
    _check(run)
    for name, width in (("w", 80), ("v", 16)):
        before = run.get_param(name)
        run.set_param_range(name, 3, np.full((2, width), 7, np.int64))
        before[3:5] = 7
        np.testing.assert_array_equal(run.get_param(name), before)
        _check(run)
    run.set_param_range("b", 79, [1.0])
    assert run.get_param("b")[79] == 1
    _check(run)
    run.set_param_range("b", 5, np.zeros(0))
    assert run.params["b"].version == 2


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "i8", "u8", "i32", "i64"])
def test_rows_of_every_dtype_are_converted_and_leave_their_neighbours(
    device: str, dtype: str
) -> None:
    run = rlx.compile(_typed(dtype), device)
    want = np.arange(70) % 50
    run.set_param("p", want)
    x = np.zeros_like(run.get_param("p"))
    for start, source in ((0, np.float64), (33, np.int64), (69, np.uint8), (35, np.float32)):
        rows = np.arange(min(3, 70 - start)).astype(source) + 60
        run.set_param_range("p", start, rows)
        want[start : start + len(rows)] = rows
        np.testing.assert_array_equal(run(x).astype(np.float64), want)
        np.testing.assert_array_equal(run.get_param("p").astype(np.float64), want)


def test_rows_outside_are_errors_and_change_nothing() -> None:
    run = rlx.compile(_two_layers())
    for start, rows in ((31, 2), (-1, 1), (33, 0)):
        with pytest.raises(rlx.UsageError, match="rows 0 to 32"):
            run.set_param_range("w", start, np.zeros((rows, 80)))
    with pytest.raises(rlx.UsageError, match=r"first row .* is a whole number, not 1\.5"):
        run.set_param_range("w", 1.5, np.zeros((1, 80)))  # pyright: ignore[reportArgumentType]
    for shape in ((2,), (2, 79), (1, 2, 80)):
        with pytest.raises(rlx.UsageError, match=r"are \[rows, 80\]"):
            run.set_param_range("w", 0, np.zeros(shape))
    with pytest.raises(rlx.UsageError, match="element 1 "):
        run.set_param_range("b", 0, np.array([0, 1e300]))
    np.testing.assert_array_equal(run.get_param("w"), _array(32, 80))
    assert run.params["w"].version == 0


# -- files -------------------------------------------------------------------------------------------------------------


def _safetensors(path: Path, arrays: dict[str, Array]) -> Path:
    import json

    header: dict[str, Any] = {"__metadata__": {"made": "here"}}
    at, body = 0, b""
    names = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "int64": "I64"}
    for name, array in arrays.items():
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        body += array.tobytes()
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def _npz(path: Path, arrays: dict[str, Array]) -> Path:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


def _npz_compressed(path: Path, arrays: dict[str, Array]) -> Path:
    np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


_WRITERS: dict[str, tuple[str, Callable[[Path, dict[str, Array]], Path]]] = {
    "safetensors": ("w.safetensors", _safetensors),
    "npz": ("w.npz", _npz),
    "npz-compressed": ("w.npz", _npz_compressed),
}


@pytest.mark.parametrize("kind", _WRITERS)
def test_many_params_from_a_file(device: str, tmp_path: Path, kind: str) -> None:
    name, write = _WRITERS[kind]
    wide = {"w": _array(32, 80, seed=7), "b": _array(80, seed=8), "v": _array(80, 16, seed=9)}
    path = write(tmp_path / name, {**wide, "b": wide["b"].astype(np.float64)})
    run = rlx.compile(_two_layers(), device)
    _check(run)
    run.load_params(path)
    for n, expected in wide.items():
        np.testing.assert_array_equal(run.get_param(n), expected)
    _check(run)
    assert [s.version for s in run.params.values()] == [1, 1, 1]


def test_arrays_that_fit_stay_in_the_mapped_file(tmp_path: Path) -> None:
    path = _safetensors(tmp_path / "w.safetensors", {"b": _array(80, seed=8)})
    run = rlx.compile(_two_layers(), "cpu")
    run.load_params(path, partial=True)
    _check(run)
    held = run._weights.at_hand()["b"]  # pyright: ignore[reportPrivateUsage]
    assert held is not None
    assert not held.flags.owndata
    assert not held.flags.writeable
    run.set_param_range("b", 0, [5.0])  # makes it a copy
    assert run.get_param("b")[0] == 5
    other = rlx.compile(_two_layers(), "cpu")
    other.load_params(path, partial=True)
    assert other.get_param("b")[0] == _array(80, seed=8)[0]


def test_names_can_differ_and_be_missing_only_if_said(tmp_path: Path) -> None:
    run = rlx.compile(_two_layers())
    w = _array(32, 80, seed=7)
    with pytest.raises(rlx.UsageError, match=r"missing: 'b', 'v'"):
        run.load_params({"w": w})
    with pytest.raises(rlx.UsageError, match=r"unknown: 'layer.w'"):
        run.load_params({"layer.w": w}, partial=True)
    with pytest.raises(rlx.UsageError, match="no array 'x'"):
        run.load_params({"w": w}, names={"x": "w"}, partial=True)
    with pytest.raises(rlx.UsageError, match="both for param 'w'"):
        run.load_params({"w": w, "u": w}, names={"u": "w"}, partial=True)
    with pytest.raises(rlx.UsageError, match="got shape"):
        run.load_params({"w": w, "b": w}, partial=True)
    with pytest.raises(rlx.UsageError, match="cannot open"):
        run.load_params(tmp_path / "missing.npz")
    with pytest.raises(rlx.UsageError, match=r"\.safetensors or \.npz"):
        run.load_params(tmp_path / "w.bin")
    assert all(s.version == 0 for s in run.params.values())
    run.load_params({"layer.w": w}, names={"layer.w": "w"}, partial=True)
    np.testing.assert_array_equal(run.get_param("w"), w)


# -- ONNX, from the file and from the cache ----------------------------------------------------------------------------


def _model(path: Path, *, decoded: bool = False) -> Path:
    """y = relu(x @ w + b); `decoded`: the matrix does not lie in the file as plain bytes."""
    import os

    w, b = _array(64, 128), _array(128, seed=1)
    stored = numpy_helper.from_array(w, "w")
    if decoded:
        stored = helper.make_tensor("w", TensorProto.FLOAT16, w.shape, w.astype(np.float16).ravel())
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "c"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 128])],
        [stored, numpy_helper.from_array(b, "b")],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)  # pyright: ignore[reportUnknownMemberType]
    os.utime(path, (1e9, 1e9))
    return path


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_params_of_a_model_can_be_read_and_set(tmp_path: Path, cached: bool, decoded: bool) -> None:
    path = _model(tmp_path / "m.onnx", decoded=decoded)
    x = _array(2, 64, seed=3)
    with override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        if cached:
            rlx.load(path)(x)
        run = rlx.load(path)
        first = run(x)
        assert ("cache" in run.program.seconds) is cached
        w = run.get_param("w")
        assert w.dtype == (np.float16 if decoded else np.float32)
        np.testing.assert_array_equal(w, _array(64, 128, dtype=w.dtype))
        np.testing.assert_allclose(first, x @ w + run.get_param("b"), rtol=1e-5, atol=1e-4)
        before = _computed(run)
        run.set_param("b", np.zeros(128))
        np.testing.assert_allclose(run(x), x @ w, rtol=1e-5, atol=1e-4)
        assert _computed(run) == before
        run.set_param("w", w * 2)
        np.testing.assert_allclose(run(x), x @ (2 * w), rtol=1e-5, atol=1e-4)
        assert _computed(run) == before + 1
        np.testing.assert_array_equal(run.get_param("w"), 2 * w)
        run.close()
        np.testing.assert_array_equal(
            rlx.load(path)(x), first
        )  # what the cache holds is the model's own


def test_params_are_known_before_anything_is_compiled(tmp_path: Path) -> None:
    with override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        run = rlx.load(_model(tmp_path / "m.onnx"))
        assert [str(s) for s in run.params.values()] == ["w: f32[64,128]", "b: f32[128]"]
        run.set_param("b", np.zeros(128))
        x = _array(2, 64, seed=3)
        np.testing.assert_allclose(run(x), x @ _array(64, 128), rtol=1e-5, atol=1e-4)
        assert run.variants == 1
        # Values that were set are nobody else's: the model's own come back.
        np.testing.assert_array_equal(
            rlx.load(tmp_path / "m.onnx").get_param("b"), _array(128, seed=1)
        )


# -- sizes and threads -------------------------------------------------------------------------------------------------


def test_weights_beyond_4_gib_are_addressed_in_64_bits(tmp_path: Path) -> None:
    """A sparse file of 5 GiB takes no disk; only the pages that are read take memory."""
    rows, width = 5 << 20, 256
    path = tmp_path / "table.bin"
    with path.open("wb") as file:
        file.truncate(rows * width * 4)
        for row in (0, 3, (4 << 20) - 1, 4 << 20, (4 << 20) + 3, rows - 1):
            file.seek(row * width * 4)
            file.write(np.full(width, row, np.float32).tobytes())
    table = np.memmap(path, np.float32, "r", shape=(rows, width))
    with rlx.Graph("embedding") as g:
        ids = g.input("ids", ["N"], "i64")
        g.output("y", gather(g.param("table", table), ids, axis=0))
    with override(RLX_CACHE="off"):
        run = rlx.compile(g)
        ids = np.array([rows - 1, 3, 4 << 20, (4 << 20) + 3, (4 << 20) - 1, -1, 5])
        expected = np.where(ids == -1, rows - 1, np.where(ids == 5, 0, ids)).astype(np.float32)
        y = run(ids)
        np.testing.assert_array_equal(y, np.repeat(expected[:, None], width, axis=1))
        assert run.memory().weights == rows * width * 4 > 5 * 2**30 - 1
        assert run.memory().arena < 1 << 20, "no byte is counted twice"
        run.close()


def test_setting_params_while_another_thread_runs_gives_one_version_or_the_other() -> None:
    run = rlx.compile(_two_layers())
    x = np.ones((4, 32), np.float32)
    zero, one = np.zeros((80, 16)), np.ones((80, 16))
    run.set_param("w", np.zeros((32, 80)))
    run.set_param("b", np.ones(80))
    run.set_param("v", zero)
    stop, seen = threading.Event(), set[float]()

    def work() -> None:
        while not stop.is_set():
            y = run(x)
            assert np.all(y == y[0, 0])
            seen.add(float(y[0, 0]))

    thread = threading.Thread(target=work)
    thread.start()
    for i in range(60):
        run.set_param("v", one if i % 2 else zero)
    stop.set()
    thread.join()
    assert seen <= {0.0, 80.0}
    assert run.params["v"].version == 61


def test_reading_back_refuses_what_does_not_hold_all_elements() -> None:
    from rlx.runtime.recipes import part, recover

    with rlx.Graph("g") as g:
        w = g.param("w", _array(4, 4))
        g.output("y", w * 2)
    piece = part(g.ir, ["y"])
    with pytest.raises(rlx.UsageError, match="cannot be read back"):
        recover(piece, _array(4, 4), "w")


def test_no_values_outlive_their_executable() -> None:
    pool = module._POOL  # pyright: ignore[reportPrivateUsage]
    gc.collect()  # executables of other tests
    before = len(pool)
    run = rlx.compile(_two_layers(), "cpu")
    _check(run)
    run.set_param("w", np.zeros((32, 80)))
    _check(run)
    assert len(pool) == before + 2
    run.close()
    assert len(pool) == before
