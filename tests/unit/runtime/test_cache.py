# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.base.store import Store, default_store
from rlx.runtime import cache as module


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        yield tmp_path / "cache"


def _store() -> Store:
    store = default_store()
    assert store is not None
    return store


def _count(kind: str) -> int:
    return sum(e.kind == kind for e in _store().entries())


def _write(path: Path, graph: Any, **kwargs: Any) -> Path:
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, path, **kwargs)  # pyright: ignore[reportUnknownMemberType]
    _settle(path, *(path.parent / str(v) for k, v in kwargs.items() if k == "location"))
    return path


def _settle(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (1e9, 1e9))  # old enough to be known by its stamp


def _input(name: str, shape: list[Any]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _dense(path: Path, factor: float = 1.0, **kwargs: Any) -> Path:
    """y = relu(x @ w + b), whose w is packed (computed) and whose b is read as it is in the file."""
    w = (np.arange(64 * 128, dtype=np.float32).reshape(64, 128) % 7 - 3) * np.float32(factor)
    b = np.arange(128, dtype=np.float32) * np.float32(factor)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["p"]),
            helper.make_node("Add", ["p", "b"], ["s"]),
            helper.make_node("Relu", ["s"], ["y"]),
        ],
        "dense",
        [_input("x", ["batch size", 64])],
        [_input("y", ["batch size", 128])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")],
    )
    return _write(path, graph, **kwargs)


def _x(rows: int = 3) -> Array:
    return np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)


def _from_cache(model: rlx.Executable) -> bool:
    return "cache" in model.program.seconds


def _run(model: Any, x: Array | None = None, **kwargs: Any) -> tuple[Array, bool]:
    with rlx.load(model, threads=1, **kwargs) as loaded:
        y = loaded.run({"x": _x() if x is None else x})["y"]
        return y, _from_cache(loaded)


def test_the_second_load_compiles_nothing_and_gives_the_same_bits(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    first, cached = _run(path)
    assert not cached
    assert (_count("program"), _count("weights")) == (1, 1)
    second, cached = _run(path)
    assert cached
    np.testing.assert_array_equal(first, second)
    assert (_count("program"), _count("weights")) == (1, 1)


def test_a_cached_program_serves_other_extents_and_grows(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    _run(path, _x(2))
    fresh: dict[int, Array] = {}
    with override(RLX_CACHE="off"):
        for rows in (1, 5, 100):
            fresh[rows], _ = _run(path, _x(rows))
    with rlx.load(path, threads=1) as loaded:
        for rows in (1, 5, 100):
            np.testing.assert_array_equal(loaded.run({"x": _x(rows)})["y"], fresh[rows])
        assert _from_cache(loaded)
        assert loaded.variants == 1
        assert loaded.memory().weights > 64 * 128 * 4
        assert [str(s) for s in loaded.outputs] == ["y: f32[batch_size,128]"]
        with pytest.raises(rlx.UsageError, match="rank 1"):
            loaded.run({"x": np.ones(64, np.float32)})


def test_a_process_that_finds_its_program_imports_no_compiler(tmp_path: Path, folder: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    expected, _ = _run(path)
    script = (
        "import sys, numpy as np, rlx\n"
        "m = rlx.load(sys.argv[1], threads=1)\n"
        "np.save(sys.argv[3], m.run({'x': np.load(sys.argv[2])})['y'])\n"
        "heavy = ('rlx.ops', 'rlx.passes', 'rlx.ir', 'rlx.expr', 'rlx.frontends.onnx.model',"
        " 'rlx.backends.cpu.kernels',"
        " 'importlib.metadata')\n"
        "print([n for n in sys.modules if n.startswith(heavy)])\n"
    )
    np.save(tmp_path / "x.npy", _x())
    files = [str(tmp_path / n) for n in ("m.onnx", "x.npy", "y.npy")]
    done = subprocess.run(
        [sys.executable, "-c", script, *files],
        env={**os.environ, "RLX_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected)


def test_nothing_is_kept_when_the_cache_is_off(tmp_path: Path, folder: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    with override(RLX_CACHE="off"):
        assert not _run(path)[1]
        assert not _run(path)[1]
    assert not folder.exists()


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    first, _ = _run(path)
    size = path.stat().st_size
    _dense(path, factor=-0.5)  # same size and same modification time
    assert path.stat().st_size == size
    second, cached = _run(path)
    assert not cached
    assert not np.array_equal(first, second)


def test_a_file_that_may_still_change_is_known_by_its_content(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    data = memoryview(path.read_bytes())
    by_stamp = module.identify(path, data)
    os.utime(path)
    assert len(module.identify(path, data)) == 2 < len(by_stamp)
    assert module.identify(path, data) == module.identify(None, data)


def test_by_content_a_copy_is_the_same_model(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    copy = tmp_path / "elsewhere" / "copy.onnx"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    with override(RLX_CACHE="content"):
        first, _ = _run(path)
        second, cached = _run(copy)
    assert cached
    np.testing.assert_array_equal(first, second)


def test_bytes_are_known_by_content(tmp_path: Path) -> None:
    data = _dense(tmp_path / "m.onnx").read_bytes()
    first, _ = _run(data)
    second, cached = _run(bytes(data))
    assert cached
    np.testing.assert_array_equal(first, second)
    other = _dense(tmp_path / "m.onnx", factor=3).read_bytes()
    assert not _run(other)[1]


_EXTERNAL: dict[str, Any] = {
    "save_as_external_data": True,
    "location": "w.bin",
    "size_threshold": 0,
}


def test_external_data_is_part_of_the_model(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx", **_EXTERNAL)
    first, _ = _run(path)
    second, cached = _run(path)
    assert cached
    np.testing.assert_array_equal(first, second)
    side = tmp_path / "w.bin"
    values = np.frombuffer(side.read_bytes(), np.float32)
    side.write_bytes((values * np.float32(2)).tobytes())
    _settle(side)
    third, cached = _run(path)
    assert not cached
    np.testing.assert_array_equal(third, first * 2)
    assert _run(path)[1]


def _given(path: Path, how: str) -> Any:
    data = path.read_bytes()
    if how == "message":
        return onnx.ModelProto.FromString(data)
    return io.BytesIO(data) if how == "stream" else data


@pytest.mark.parametrize("how", ["bytes", "stream", "message"])
def test_external_data_of_a_model_that_is_no_path(tmp_path: Path, how: str) -> None:
    path = _dense(tmp_path / "m.onnx", **_EXTERNAL)
    expected, _ = _run(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(rlx.ModelError, match=r"'w.bin', but the model was not given by path; pass"):
        _run(_given(path, how))
    with pytest.raises(rlx.ModelError, match=r"'w\.bin' cannot be opened"):
        _run(_given(path, how), folder=tmp_path / "empty")
    with pytest.raises(rlx.UsageError, match="is no folder"):
        _run(_given(path, how), folder=path)
    for cached in (False, True):
        result, found = _run(_given(path, how), folder=str(tmp_path))
        assert found is cached
        np.testing.assert_array_equal(result, expected)


def test_one_model_with_other_data_in_another_folder(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx", **_EXTERNAL)
    other = tmp_path / "other"
    other.mkdir()
    (other / "m.onnx").symlink_to(path)
    values = np.frombuffer((tmp_path / "w.bin").read_bytes(), np.float32)
    (other / "w.bin").write_bytes((values * np.float32(2)).tobytes())
    _settle(tmp_path / "w.bin", other / "w.bin")
    for cached in (False, True):
        first, found = _run(path)
        assert found is cached
        for second in (_run(other / "m.onnx"), _run(path.read_bytes(), folder=other)):
            assert second[1] is cached
            np.testing.assert_array_equal(second[0], first * 2)


def test_a_snapshot_of_a_hub_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0f1e" / "onnx"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    expected, _ = _run(_dense(tmp_path / "m.onnx", **_EXTERNAL))
    for name, blob in (("m.onnx", "aa"), ("w.bin", "bb")):
        (tmp_path / name).rename(blobs / blob)
        (snapshot / name).symlink_to(f"../../../blobs/{blob}")
    for cached in (False, True):
        result, found = _run(snapshot / "m.onnx")
        assert found is cached
        np.testing.assert_array_equal(result, expected)
    (snapshot / "w.bin").unlink()
    (snapshot / "w.bin").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_bytes((blobs / "bb").read_bytes())
    with pytest.raises(rlx.ModelError, match="leads out of the model's folder"):
        _run(snapshot / "m.onnx")


def _broadcasting(path: Path) -> Path:
    """Two extents that may or may not be equal: a program each for what holds in a call."""
    nodes = [helper.make_node("Add", ["x", "z"], ["y"])]
    graph = helper.make_graph(
        nodes, "two", [_input("x", ["N"]), _input("z", ["M"])], [_input("y", [None])]
    )
    return _write(path, graph)


def test_every_variant_is_kept_and_found_again(tmp_path: Path) -> None:
    path = _broadcasting(tmp_path / "m.onnx")
    three, one = np.arange(3, dtype=np.float32), np.ones(1, np.float32)
    for expected in (False, True):
        with rlx.load(path, threads=1) as loaded:
            for x, z in ((three, three), (three, one), (one, three), (three[:0], three[:0])):
                np.testing.assert_array_equal(loaded.run({"x": x, "z": z})["y"], x + z)
                assert _from_cache(loaded) is expected
            variants = loaded.variants
        assert _count("program") == variants > 1


def test_a_program_of_the_cache_can_be_joined_by_a_new_one(tmp_path: Path) -> None:
    path = _broadcasting(tmp_path / "m.onnx")
    three, one = np.arange(3, dtype=np.float32), np.ones(1, np.float32)
    with rlx.load(path, threads=1) as loaded:
        loaded.run({"x": three, "z": three})
    with rlx.load(path, threads=1) as loaded:
        loaded.run({"x": three, "z": three})
        assert _from_cache(loaded)
        np.testing.assert_array_equal(loaded.run({"x": three, "z": one})["y"], three + 1)
        assert not _from_cache(loaded)
        np.testing.assert_array_equal(loaded.run({"x": three, "z": three})["y"], three * 2)


def _affine(path: Path, **kwargs: Any) -> Path:
    """y = x @ w + z, whose z may be one row or many: variants that pack the same weight."""
    w = (np.arange(64 * 128, dtype=np.float32) % 7 - 3).reshape(64, 128)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "z"], ["y"]),
    ]
    ports = [_input("x", ["N", 64]), _input("z", ["M", 128])]
    init = [numpy_helper.from_array(w, "w")]
    graph = helper.make_graph(nodes, "affine", ports, [_input("y", [None, 128])], init)
    return _write(path, graph, **kwargs)


def _z(rows: int) -> Array:
    return np.full((rows, 128), rows, np.float32)


@pytest.mark.parametrize("external", [False, True])
def test_variants_and_options_keep_one_copy_of_equal_weights(
    tmp_path: Path, external: bool
) -> None:
    path = _affine(tmp_path / "m.onnx", **(_EXTERNAL if external else {}))
    for expected in (False, True):
        with rlx.load(path, threads=1) as loaded:
            for rows in (3, 1):
                found = loaded.run({"x": _x(), "z": _z(rows)})["y"]
                assert _from_cache(loaded) is expected
                one = _run_plain(path, rows)
                np.testing.assert_array_equal(found, one)
            assert loaded.variants == 2
        assert (_count("program"), _count("weights")) == (2, 1)
    with rlx.load(path, threads=1, host_ops="error") as loaded:
        loaded.run({"x": _x(), "z": _z(3)})
        assert not _from_cache(loaded)
    assert (_count("program"), _count("weights")) == (3, 1)
    _store().remove("weights", next(e.key for e in _store().entries() if e.kind == "weights"))
    with rlx.load(path, threads=1) as loaded:  # gone: compiled and kept again, for both
        for rows in (3, 1):
            loaded.run({"x": _x(), "z": _z(rows)})
    assert _count("weights") == 1


def _run_plain(path: Path, rows: int) -> Array:
    with override(RLX_CACHE="off"), rlx.load(path, threads=1) as loaded:
        return loaded.run({"x": _x(), "z": _z(rows)})["y"]


def _packed(loaded: rlx.Executable) -> Array:
    (derived,) = loaded.program.weights.derived.values()
    return derived.array


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_executables_of_one_file_hold_one_copy_of_what_they_packed(
    tmp_path: Path, external: bool, warm: bool
) -> None:
    path = _affine(tmp_path / "m.onnx", **(_EXTERNAL if external else {}))
    given = {"x": _x(), "z": _z(3)}
    if warm:
        with rlx.load(path, threads=1) as loaded:
            loaded.run(given)
    first, second = rlx.load(path, threads=1), rlx.load(path, threads=1)
    expected = first.run(given)["y"]
    np.testing.assert_array_equal(second.run(given)["y"], expected)
    assert _packed(first) is _packed(second)
    second.set_param("w", np.zeros((64, 128)))
    np.testing.assert_array_equal(second.run(given)["y"], _z(3))
    np.testing.assert_array_equal(first.run(given)["y"], expected)
    assert _packed(first) is not _packed(second)
    first.close()
    np.testing.assert_array_equal(second.run(given)["y"], _z(3))
    third = rlx.load(path, threads=1)
    np.testing.assert_array_equal(third.run(given)["y"], expected)


def test_params_that_are_no_plain_bytes_of_the_file_are_read_at_the_extents_of_the_program(
    tmp_path: Path,
) -> None:
    """The model cannot be imported without extents, so a program of the cache has to bring its own."""
    values = np.arange(128 * 128, dtype=np.int32).reshape(128, 128) % 7 - 3
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "z"], ["y"]),
    ]
    ports = [_input("x", ["N", 128]), _input("z", ["M", 128])]
    init = [
        helper.make_tensor("q", TensorProto.INT8, values.shape, values.ravel().tolist()),
        numpy_helper.from_array(np.array(0.5, np.float32), "s"),
    ]
    graph = helper.make_graph(nodes, "affine", ports, [_input("y", [None, 128])], init)
    path = _write(tmp_path / "m.onnx", graph)
    for turn, rows in enumerate((3, 1, 0, 3, 1, 0)):
        with rlx.load(path, threads=1) as loaded:
            x, z = np.ones((3 if rows else 0, 128), np.float32), _z(rows)
            found = loaded.run({"x": x, "z": z})["y"]
            assert _from_cache(loaded) is (turn >= 3)
            np.testing.assert_array_equal(loaded.get_param("q"), values)
            digest = loaded.save(tmp_path / "m.rlxp")
        with rlx.open(tmp_path / "m.rlxp", digest=digest) as opened:
            np.testing.assert_array_equal(opened.run({"x": x, "z": z})["y"], found)


def test_executables_of_a_file_that_changed_do_not_share(tmp_path: Path) -> None:
    path = _affine(tmp_path / "m.onnx", **_EXTERNAL)
    side = tmp_path / "w.bin"
    _settle(side)
    given = {"x": _x(), "z": _z(3)}
    first = rlx.load(path, threads=1)
    expected = first.run(given)["y"]
    values = np.frombuffer(side.read_bytes(), np.float32) * np.float32(2)
    side.unlink()  # the first has mapped the old one
    side.write_bytes(values.tobytes())
    _settle(side)
    second = rlx.load(path, threads=1)
    np.testing.assert_allclose(second.run(given)["y"] - _z(3), (expected - _z(3)) * 2, rtol=1e-5)
    assert _packed(first) is not _packed(second)
    np.testing.assert_array_equal(first.run(given)["y"], expected)


def test_external_data_that_is_replaced_before_the_first_run(tmp_path: Path) -> None:
    """What was mapped at the load is used, and is not taken for what lies there now."""
    path = _affine(tmp_path / "m.onnx", **_EXTERNAL)
    side = tmp_path / "w.bin"
    _settle(side)
    expected = _run_plain(path, 3)
    first = rlx.load(path, threads=1)
    values = np.frombuffer(side.read_bytes(), np.float32) * np.float32(2)
    side.unlink()
    side.write_bytes(values.tobytes())
    _settle(side)
    given = {"x": _x(), "z": _z(3)}
    np.testing.assert_array_equal(first.run(given)["y"], expected)
    for cached in (False, True):
        second = rlx.load(path, threads=1)
        np.testing.assert_allclose(second.run(given)["y"] - 3, (expected - 3) * 2, rtol=1e-5)
        assert _from_cache(second) is cached


def test_bounds_by_the_files_own_names_work_from_the_cache(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    for cached in (False, True):
        with rlx.load(path, threads=1, dims={"batch size": 8}) as loaded:
            assert _from_cache(loaded) is cached
            assert loaded.memory().arena == 0 or loaded.memory().arena_lower_bound > 0
    with pytest.raises(rlx.UsageError, match="batch_size"):
        rlx.load(path, dims={"batchsize": 8})


def test_programs_of_other_code_or_settings_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _dense(tmp_path / "m.onnx")
    _run(path)
    assert not _run(path, device="reference")[1]
    assert not _run(path, host_ops="error")[1]
    monkeypatch.setattr(module, "code_stamp", lambda: "other sources")
    assert not _run(path)[1]
    assert _run(path)[1]
    with override(RLX_CPU_ISA="v3"):
        assert not _run(path)[1]


def test_the_stamp_of_the_code_changes_with_a_source_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("")
    (package / "a.py").write_text("a = 1")
    monkeypatch.setattr(rlx, "__file__", str(tmp_path / "package" / "__init__.py"))
    stamp: Callable[[], str] = module.code_stamp.__wrapped__
    before = stamp()
    assert stamp() == before
    (package / "notes.txt").write_text("not code")
    assert stamp() == before
    os.utime(package / "a.py", (1, 1))
    assert stamp() != before


@pytest.mark.parametrize("kind", ["program", "weights", "object"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damaged_entries_cost_a_compile_and_nothing_else(
    tmp_path: Path, folder: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = _dense(tmp_path / "m.onnx")
    expected, _ = _run(path)
    for file in [p for p in (folder / "store" / "v3" / kind).rglob("*") if p.is_file()]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    with caplog.at_level(logging.WARNING):
        result, cached = _run(path)
    np.testing.assert_array_equal(result, expected)
    assert cached is (kind == "object")
    assert how == "gone" or kind == "object" or "damaged" in caplog.text
    result, cached = _run(path)
    assert cached
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("change", ["missing", "slots", "blobs", "shape", "objects"])
def test_an_entry_of_another_form_is_dropped(tmp_path: Path, change: str) -> None:
    """Entries with a right checksum and wrong contents, as a mistake in rlx would leave them."""
    path = _dense(tmp_path / "m.onnx")
    expected, _ = _run(path)
    store = _store()
    (entry,) = [e for e in store.entries() if e.kind == "program"]
    payload = store.get("program", entry.key)
    assert payload is not None
    length = int.from_bytes(payload[:16], "little")
    text = bytes(payload[16 : 16 + length])
    head = module.json.loads(text)
    match change:
        case "missing":
            del head["compiled"]["program"]["thunks"]
        case "slots":
            head["compiled"]["program"]["inputs"] = [10**6]
        case "blobs":
            head["blobs"][-1] = 10**9
        case "shape":
            head["params"] = {
                n: [d, [10**6, *s], f, o] for n, (d, s, f, o) in head["params"].items()
            }
        case _:
            head["compiled"]["objects"] += 1
    text = module.json.dumps(head).encode()
    body = payload[16 + length :]
    store.put("program", entry.key, [len(text).to_bytes(16, "little") + text, bytes(body)])
    result, cached = _run(path)
    assert not cached
    np.testing.assert_array_equal(result, expected)
    assert _run(path)[1]


def test_a_cache_that_cannot_be_written_changes_no_result(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    (tmp_path / "file").write_text("in the way")
    with override(RLX_CACHE_DIR=str(tmp_path / "file")):
        first, _ = _run(path)
        second, cached = _run(path)
    assert not cached
    np.testing.assert_array_equal(first, second)


def test_weights_too_large_for_the_limit_are_not_kept(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    with override(RLX_CACHE_LIMIT=40_000):
        assert not _run(path)[1]
        assert not _run(path)[1]
        assert (_count("program"), _count("weights")) == (0, 0)


def test_clearing_the_cache_leaves_open_models_alone(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    expected, _ = _run(path)
    with rlx.load(path, threads=1) as loaded:
        loaded.run({"x": _x()})
        assert _from_cache(loaded)
        assert _store().clear() > 0
        np.testing.assert_array_equal(loaded.run({"x": _x()})["y"], expected)
    assert not _run(path)[1]


def test_many_at_once_all_get_the_same(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    with override(RLX_CACHE="off"):
        expected, _ = _run(path)
    results: list[Array] = []
    cache = str(tmp_path / "cache")

    def work() -> None:
        with override(RLX_CACHE_DIR=cache):  # knobs are of one thread
            results.extend(_run(path)[0] for _ in range(2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results:
        np.testing.assert_array_equal(result, expected)
    assert _run(path)[1]


def test_failures_name_their_node_from_the_cache_too(tmp_path: Path) -> None:
    nodes = [helper.make_node("Div", ["x", "z"], ["y"], name="the division")]
    ports = [helper.make_tensor_value_info(n, TensorProto.INT32, ["N"]) for n in ("x", "z", "y")]
    path = _write(tmp_path / "m.onnx", helper.make_graph(nodes, "div", ports[:2], ports[2:]))
    messages: list[str] = []
    for _ in range(2):
        with rlx.load(path, threads=1) as loaded, pytest.raises(rlx.ExecutionError) as caught:
            loaded.run({"x": np.ones(3, np.int32), "z": np.array([1, 1, 0], np.int32)})
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "division by zero" in messages[0]
    assert "the division" in messages[0]
    assert "i32[N]" in messages[0]


def test_a_dump_of_all_kernels_is_complete(tmp_path: Path) -> None:
    path = _dense(tmp_path / "m.onnx")
    _run(path)
    with override(RLX_DUMP=str(tmp_path / "dump")):
        assert not _run(path)[1]
    assert list((tmp_path / "dump").glob("*.s"))


def test_params_that_lie_in_the_file_are_views_of_it(tmp_path: Path) -> None:
    size = 1 << 16
    table = np.arange(size * 4, dtype=np.float32).reshape(size, 4)
    nodes = [helper.make_node("Gather", ["t", "i"], ["y"])]
    index = helper.make_tensor_value_info("i", TensorProto.INT64, ["N"])
    init = [numpy_helper.from_array(table, "t")]
    graph = helper.make_graph(nodes, "g", [index], [_input("y", ["N", 4])], init)
    for padding in range(4):  # one of these makes the file's data aligned
        graph.name = "g" + "x" * padding
        path = _write(tmp_path / f"m{padding}.onnx", graph)
        for _ in range(2):
            with rlx.load(path, threads=1) as loaded:
                picked = loaded.run({"i": np.array([size - 1, 0])})["y"]
                np.testing.assert_array_equal(picked, table[[size - 1, 0]])
    # The aligned one needed no copy of its weights.
    assert _count("program") == 4
    assert _count("weights") == 3


def _accumulate(path: Path) -> Path:
    """total_out = x @ w + total, y = relu(total_out)."""
    w = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 5 - 2
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["p"]),
            helper.make_node("Add", ["p", "total"], ["total_out"]),
            helper.make_node("Relu", ["total_out"], ["y"]),
        ],
        "accumulate",
        [_input("x", ["batch", 64]), _input("total", [None, 64])],
        [_input("y", ["batch", 64]), _input("total_out", ["batch", 64])],
        [numpy_helper.from_array(w, "w")],
    )
    return _write(path, graph)


def test_programs_with_states_are_found_again_beside_those_without(tmp_path: Path) -> None:
    path = _accumulate(tmp_path / "m.onnx")
    results: list[list[Array]] = []
    for attempt in range(2):
        with rlx.load(path, threads=1).bind_state({"total_out": "total"}) as loaded:
            results.append([loaded.run({"x": _x()})["y"] for _ in range(3)])
            assert _from_cache(loaded) is (attempt > 0)
            assert loaded.memory().state == 3 * 64 * 4
            loaded.state.reset()
            results[-1].append(loaded.run({"x": _x(5)})["y"])
            assert loaded.variants == 1
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)
    total = np.zeros((3, 64), np.float32)
    for _, expected in zip(range(3), results[0], strict=False):
        with rlx.load(path, threads=1) as plain:
            found = plain.run({"x": _x(), "total": total})
            assert [i.name for i in plain.inputs] == ["x", "total"]
        total = found["total_out"]
        np.testing.assert_array_equal(found["y"], expected)


def test_what_a_model_takes_is_known_from_a_program_with_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _accumulate(tmp_path / "m.onnx")
    with rlx.load(path).bind_state({"total_out": "total"}) as loaded:
        loaded.run({"x": _x()})

    def unread(*_: object) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr("rlx.frontends.onnx.model.load_model", unread)
    with rlx.load(path) as loaded:
        assert [str(i) for i in loaded.inputs] == ["x: f32[batch,64]", "total: f32[total_0,64]"]
        loaded.bind_state({"total_out": "total"}).run({"x": _x()})
