# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.types import TensorType
from rlx.ops.norm import softmax


def _graph() -> rlx.Graph:
    with rlx.Graph("small") as g:
        x = g.input("x", ["N", 4])
        g.output("y", softmax(x * 2.0))
    return g


def test_devices_lists_what_device_accepts() -> None:
    names = [d.name for d in rlx.devices()]
    assert "reference" in names
    assert all(d.description for d in rlx.devices())
    with pytest.raises(rlx.UsageError, match=r"no backend 'CPU'.*Did you mean 'cpu'"):
        rlx.load(b"", "CPU")
    with pytest.raises(rlx.UsageError, match="does not run on GPUs yet"):
        rlx.load(b"", "cuda")
    with pytest.raises(rlx.UsageError, match=r"no backend 'cqu'.*cpu"):
        rlx.compile(_graph(), "cqu")
    with pytest.raises(
        rlx.DeviceError, match=r"no device 'reference:7'; this machine has .*reference"
    ):
        rlx.compile(_graph(), "reference:7")
    with pytest.raises(rlx.DeviceError, match="no device 'reference:x'"):
        rlx.compile(_graph(), "reference:x")
    for name in ("reference:", "reference:-1", "reference:\N{SUPERSCRIPT TWO}"):
        with pytest.raises(rlx.DeviceError, match="no device"):
            rlx.compile(_graph(), name)


def test_options_are_checked() -> None:
    with pytest.raises(rlx.UsageError, match=r"precision is one of f32, .*, not 'f17'"):
        rlx.compile(_graph(), precision="f17")
    with pytest.raises(rlx.UsageError, match=r"'MatMul', which is no operator.*mean 'matmul'"):
        rlx.compile(_graph(), precision=rlx.PrecisionPolicy("f16", ops={"MatMul": "f32"}))
    with pytest.raises(rlx.UsageError, match="'cast', which keeps its dtypes under every policy"):
        rlx.compile(_graph(), precision=rlx.PrecisionPolicy("f16", ops={"cast": "f16"}))
    with pytest.raises(rlx.UsageError, match="'allow' or 'error', not 'maybe'"):
        rlx.compile(_graph(), host_ops="maybe")
    wrong: Any
    for wrong in (0, -1, True, 1.5, "2", None, 2**31):
        with pytest.raises(rlx.UsageError, match=r"dims\['N'\] is an upper bound"):
            rlx.compile(_graph(), dims={"N": wrong})
        if wrong is not None:
            with pytest.raises(rlx.UsageError, match="threads is a number of CPU threads"):
                rlx.compile(_graph(), threads=wrong)
    for wrong in ([("N", 3)], "N", 5):
        with pytest.raises(rlx.UsageError, match="dims is a dict of upper bounds by name"):
            rlx.compile(_graph(), dims=wrong)
    for wrong in (None, 3):
        with pytest.raises(rlx.UsageError, match="device is a name such as 'cpu'"):
            rlx.compile(_graph(), wrong)
    for wrong in (None, "model.onnx", _graph().ir):
        with pytest.raises(rlx.UsageError, match=r"takes an rlx\.Graph"):
            rlx.compile(wrong)
    wrong = {1: 3}
    with pytest.raises(rlx.UsageError, match="no extent 1; it has N"):
        rlx.compile(_graph(), dims=wrong)
    count: Any = np.int64(1)
    assert rlx.compile(_graph(), dims={"N": count}, threads=count).variants == 1
    with pytest.raises(rlx.UsageError, match=r"small has no extent 'M'; it has N"):
        rlx.compile(_graph(), dims={"M": 1})


@pytest.mark.parametrize("threads", [1, 2, 7, None])
def test_results_do_not_depend_on_the_number_of_threads(threads: int | None) -> None:
    x = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    want = rlx.compile(_graph(), threads=1)(x)
    assert rlx.compile(_graph(), threads=threads)(x).tobytes() == want.tobytes()


def _same_type(x: TensorType) -> TensorType:
    return x


@rlx.op("example.twice", infer=_same_type)
def _twice(x: Any) -> Any:
    """2 x."""
    return x + x


def test_operators_without_a_kernel_run_on_the_host_unless_refused() -> None:
    with rlx.Graph() as g:
        g.output("y", _twice(g.input("x", [3])))
    run = rlx.compile(g)
    assert ("example.twice", "host", 1) in list(run.program.compiled.dispatch)
    np.testing.assert_array_equal(run(np.array([1, -2, 1000], np.float32)), [2, -4, 2000])
    with pytest.raises(rlx.UnsupportedOpError, match=r"example\.twice\(f32\[3\].*no CPU kernel"):
        rlx.compile(g, host_ops="error")


def test_a_compiled_graph_is_independent_of_the_graph() -> None:
    g = _graph()
    run = rlx.compile(g, "reference", dims={"N": 2})
    with g:
        g.output("z", g.input("more", [1]))
    assert [o.name for o in run.outputs] == ["y"]
    assert set(run.run({"x": np.ones((2, 4), np.float32)})) == {"y"}
    again = rlx.compile(g, "reference")
    assert [i.name for i in again.inputs] == ["x", "more"]


def test_load_reads_bytes_paths_and_files(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Add", ["a", "a"], ["b"])
    info = [onnx.helper.make_tensor_value_info(n, 1, ["N", 2]) for n in ("a", "b")]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", info[:1], info[1:]))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    x = np.ones((3, 2), np.float32)
    with path.open("rb") as file:
        for source in (path, str(path), model.SerializeToString(), model, file):
            np.testing.assert_array_equal(rlx.load(source, "reference")(x), x + x)
    bounded = rlx.load(path, dims={"N": 5})
    assert bounded.variants == 1
    with pytest.raises(rlx.UsageError, match=r"no symbolic extent 'K'; it has N"):
        rlx.load(path, dims={"K": 5})
    with pytest.raises(rlx.RlxError, match="nowhere"):
        rlx.load(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize(
    "source", [None, 3, [], {}, object(), np.zeros(3), io.StringIO("text"), "", Path, "."]
)
def test_what_is_no_source_of_a_model(source: Any) -> None:
    with pytest.raises(rlx.UsageError, match=r"ONNX model|binary mode"):
        rlx.load(source)
    with pytest.raises(rlx.UsageError, match="folder is a path, not a int"):
        rlx.load(source, folder=3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "an empty file"),
        (b"graph {\n  node: 3\n}\n", "a text file"),
        (b'{"irVersion": 8}', "a text file"),
        (b"PK\x03\x04", "a zip archive"),
    ],
)
def test_files_of_another_format_are_named(data: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    for source in (tmp_path / "m.onnx", data, io.BytesIO(data)):
        with pytest.raises(rlx.ParseError, match=f"not an ONNX model, it looks like {what}"):
            rlx.load(source)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_call_that_breaks_an_assumption_compiles_a_variant(device: str) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Add", ["a", "b"], ["y"])
    a, b, y = (
        onnx.helper.make_tensor_value_info(n, 1, [e])
        for n, e in (("a", "A"), ("b", "B"), ("y", "Y"))
    )
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [a, b], [y]))
    run = rlx.load(model, device)

    def call(first: int, second: int) -> int:
        found = run(np.arange(first, dtype=np.float32), np.ones(second, np.float32))
        want = np.arange(first, dtype=np.float32) + np.ones(second, np.float32)
        np.testing.assert_array_equal(found, want)
        return run.variants

    assert [call(3, 3), call(5, 5), call(5, 1), call(7, 1), call(3, 3), call(1, 4)] == [
        1,
        1,
        2,
        2,
        2,
        3,
    ]
    with pytest.raises(rlx.RlxError, match="differ"):
        call(2, 3)
    assert call(9, 9) == 3
