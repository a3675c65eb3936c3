# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ops.elementwise import div
from rlx.ops.matmul import matmul
from rlx.ops.norm import softmax
from rlx.runtime import package as module


def _array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _graph() -> rlx.Graph:
    """A packed weight, one that is folded with a factor, one that is read as it is, and a constant."""
    with rlx.Graph("layers") as g:
        x = g.input("x", ["N", 32])
        h = matmul(x, g.param("w", _array(32, 80))) + g.param("b", _array(80, seed=1))
        v = g.param("v", _array(80, 16, seed=2)) * g.param("s", _array(16, seed=3))
        g.output("y", softmax(matmul(h, v) * np.arange(16, dtype=np.float32)))
    return g


_X = _array(3, 32, seed=9)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Array, str]:
    with rlx.compile(_graph(), threads=1) as run:
        y = run(_X)
        digest = run.save(tmp_path / "m.rlxp")
    return tmp_path / "m.rlxp", y, digest


def test_a_package_gives_the_same_bits(saved: tuple[Path, Array, str]) -> None:
    path, y, _ = saved
    with rlx.open(path, threads=1) as run:
        assert [str(s) for s in (*run.inputs, *run.outputs)] == ["x: f32[N,32]", "y: f32[N,16]"]
        assert run.variants == 0
        np.testing.assert_array_equal(run(_X), y)
        big = _array(100, 32)
        np.testing.assert_array_equal(run(big)[:3], run(big[:3]))
        assert run.variants == 1
    assert sorted(p.name for p in path.parent.iterdir() if p.is_file()) == ["m.rlxp"]


def test_params_are_there_bit_for_bit_and_can_be_set(saved: tuple[Path, Array, str]) -> None:
    run = rlx.open(saved[0])
    expected = {"w": (32, 80), "b": (80,), "v": (80, 16), "s": (16,)}
    assert {n: s.shape for n, s in run.params.items()} == expected
    for seed, name in enumerate("wbvs"):
        np.testing.assert_array_equal(run.get_param(name), _array(*expected[name], seed=seed))
    fresh = rlx.compile(_graph(), threads=1)
    for name in ("s", "w", "b"):
        new = run.get_param(name) * 2
        for one in (run, fresh):
            one.set_param(name, new)
        np.testing.assert_array_equal(run(_X), fresh(_X))
        np.testing.assert_array_equal(run.get_param(name), new)
    np.testing.assert_array_equal(rlx.open(saved[0])(_X), saved[1])


def test_weights_are_used_in_place_and_stored_once(saved: tuple[Path, Array, str]) -> None:
    run = rlx.open(saved[0])
    run(_X)
    compiled: Any = run.program.compiled
    weights = [
        a for n, slot in compiled._names.items() if (a := compiled._weights[slot]) is not None and n
    ]
    assert weights
    assert all(not w.flags.owndata and not w.flags.writeable for w in weights)
    data = saved[0].read_bytes()
    assert (
        data.count(_array(32, 80)[0, :16].tobytes()) == 1
    )  # one row of a panel; not a second copy
    assert data.count(_array(80, 16, seed=2)[0].tobytes()) == 1  # folded: the original is kept


def test_all_variants_are_in_it(tmp_path: Path) -> None:
    with rlx.compile(_graph(), threads=1) as run:
        run(_X)
        run(_X[:0])
        run.save(tmp_path / "m.rlxp")
    run = rlx.open(tmp_path / "m.rlxp")
    assert run(_X[:0]).shape == (0, 16)
    assert run(_X).shape == (3, 16)
    assert run.variants == 2


def test_extents_that_no_program_is_for_are_an_error(saved: tuple[Path, Array, str]) -> None:
    run = rlx.open(saved[0])
    with pytest.raises(rlx.UsageError, match=r"no program for the extents \{'N': 0\}"):
        run(_X[:0])
    run(_X)


def test_bounds_are_kept_and_can_be_given(tmp_path: Path) -> None:
    with rlx.compile(_graph(), threads=1, dims={"N": 8}) as run:
        run.save(tmp_path / "m.rlxp")
    for dims in (None, {"N": 40}):
        run = rlx.open(tmp_path / "m.rlxp", dims=dims).warmup()
        assert run.memory().arena > 0
    with pytest.raises(rlx.UsageError, match="no extent 'M'"):
        rlx.open(tmp_path / "m.rlxp", dims={"M": 4})


def test_the_digest_pins_the_content(saved: tuple[Path, Array, str]) -> None:
    path, y, digest = saved
    np.testing.assert_array_equal(rlx.open(path, digest=digest.upper())(_X), y)
    with pytest.raises(rlx.UsageError, match=f"has the digest {digest}"):
        rlx.open(path, digest="0" * 64)


def test_saving_again_from_a_package_gives_the_same_package(
    saved: tuple[Path, Array, str], tmp_path: Path
) -> None:
    run = rlx.open(saved[0], threads=1)
    run(_X)
    assert run.save(tmp_path / "again.rlxp") == saved[2]
    run.set_param("b", np.zeros(80))
    assert run.save(tmp_path / "other.rlxp") != saved[2]  # before a run with the new value
    np.testing.assert_array_equal(rlx.open(tmp_path / "other.rlxp")(_X), run(_X))


def test_states_begin_with_their_initial_values(tmp_path: Path) -> None:
    with rlx.Graph("counter") as g:
        total = g.state("total", ["B", 4], "f32", 3)
        now = total + g.input("x", ["B", 4])
        g.set_next(total, now)
        g.output("y", now)
    ones = np.ones((2, 4), np.float32)
    with rlx.compile(g, threads=1) as run:
        run(ones)
        run.save(tmp_path / "m.rlxp")
    run = rlx.open(tmp_path / "m.rlxp")
    assert [float(run(ones)[0, 0]) for _ in range(3)] == [4, 5, 6]
    run.state.reset()
    assert run(ones[:1])[0, 0] == 4


def test_clones_and_pickles_of_a_package_run(saved: tuple[Path, Array, str]) -> None:
    run = rlx.open(saved[0], threads=1)
    np.testing.assert_array_equal(run.clone()(_X), saved[1])
    run.set_param("b", np.zeros(80))
    twin = run.clone()
    copy = pickle.loads(pickle.dumps(run))
    np.testing.assert_array_equal(twin(_X), run(_X))
    np.testing.assert_array_equal(copy(_X), run(_X))


def test_a_package_of_a_real_model_file(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch size", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch size", 80])],
        [numpy_helper.from_array(_array(32, 80), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data = model.SerializeToString()
    with rlx.load(data, threads=1) as run:
        expected = run(_X)
        run.save(tmp_path / "m.rlxp")
    run = rlx.open(tmp_path / "m.rlxp", threads=1, dims={"batch_size": 4})
    np.testing.assert_array_equal(run(_X), expected)
    np.testing.assert_array_equal(run.get_param("w"), _array(32, 80))


def test_opening_imports_no_compiler_and_reads_no_weights(saved: tuple[Path, Array, str]) -> None:
    script = (
        "import sys, numpy as np, rlx\n"
        "m = rlx.open(sys.argv[1], threads=1)\n"
        "print('llvmlite.binding' in sys.modules)\n"
        "y = m(np.load(sys.argv[2]))\n"
        "heavy = ('rlx.ops', 'rlx.passes', 'rlx.ir', 'rlx.expr', 'rlx.frontends.onnx',"
        " 'rlx.backends.cpu.kernels')\n"
        "print([n for n in sys.modules if n.startswith(heavy)])\n"
        "np.save(sys.argv[2], y)\n"
    )
    for warm in (False, True):  # the first process asks LLVM what the processor can do
        np.save(saved[0].with_name("x.npy"), _X)
        done = subprocess.run(
            [sys.executable, "-c", script, str(saved[0]), str(saved[0].with_name("x.npy"))],
            env={**os.environ, "RLX_CACHE_DIR": str(saved[0].parent / "cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [str(not warm), "[]"]
        np.testing.assert_array_equal(np.load(saved[0].with_name("x.npy")), saved[1])


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    run = rlx.compile(_graph())
    with pytest.raises(rlx.UsageError, match="not compiled yet"):
        run.save(tmp_path / "m.rlxp")
    with rlx.Graph("hollow") as g:
        g.output("y", g.input("x", [4]) + g.param("w", shape=[4]))
    with pytest.raises(rlx.UsageError, match="without a value: 'w'"):
        rlx.compile(g).save(tmp_path / "m.rlxp")
    reference = rlx.compile(_graph(), "reference")
    reference(_X)
    with pytest.raises(rlx.UsageError, match="'reference' cannot be saved"):
        reference.save(tmp_path / "m.rlxp")
    run(_X)
    with pytest.raises(rlx.UsageError, match="missing"):
        run.save(tmp_path / "missing" / "m.rlxp")
    run.close()
    with pytest.raises(rlx.UsageError, match="closed"):
        run.save(tmp_path / "m.rlxp")
    assert list(tmp_path.iterdir()) == []


def _change(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the head of a package and make its checksum right again."""
    data = path.read_bytes()
    length = int.from_bytes(data[8:16], "little")
    head = json.loads(data[64 : 64 + length])
    change(head)
    return _rewrite(path, json.dumps(head, separators=(",", ":")).encode(), length)


def _rewrite(path: Path, text: bytes, length: int) -> Path:
    data = path.read_bytes()
    old, new = (-(-(64 + n) // 4096) * 4096 for n in (length, len(text)))
    start = data[:8] + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
    front = start + bytes(64 - len(start)) + text
    path.write_bytes(front + bytes(new - len(front)) + data[old:])
    return path


def test_another_version_or_processor_is_refused_with_the_reason(
    saved: tuple[Path, Array, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved[0]
    with pytest.raises(rlx.UsageError, match="not reference"):
        rlx.open(path, "reference")
    with (
        override(RLX_CPU_ISA="v3"),
        pytest.raises(rlx.UsageError, match=r"another processor(.|\n)*this machine: v3"),
    ):
        rlx.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "__version__", "9.9")
        with pytest.raises(rlx.UsageError, match=r"saved by rlx .*, this is 9\.9"):
            rlx.open(path)
    path.write_bytes(path.read_bytes()[:7] + b"\x07" + path.read_bytes()[8:])
    with pytest.raises(rlx.ParseError, match="version 7 of the form"):
        rlx.open(path)


@pytest.mark.parametrize("where", ["magic", "length", "head", "cut head", "cut", "empty"])
def test_a_damaged_file_is_refused(saved: tuple[Path, Array, str], where: str) -> None:
    path = saved[0]
    data = bytearray(path.read_bytes())
    match where:
        case "magic":
            data[0] ^= 1
        case "length":
            data[15] = 0x7F
        case "head":
            data[200] ^= 1
        case "cut head":
            del data[100:]
        case "cut":
            del data[len(data) // 2 :]
        case _:
            data.clear()
    path.write_bytes(data)
    with pytest.raises(rlx.ParseError, match=r"m\.rlxp"):
        rlx.open(path)(_X)


def _use(run: rlx.Executable) -> None:
    """Run, and read all params: originals are read when asked for."""
    run(_X)
    for name in run.params:
        run.get_param(name)


def test_every_byte_that_a_run_depends_on_is_checked(saved: tuple[Path, Array, str]) -> None:
    path = saved[0]
    good = path.read_bytes()
    length = int.from_bytes(good[8:16], "little")
    places = json.loads(good[64 : 64 + length])["sections"]
    body = -(-(64 + length) // 4096) * 4096
    for at, nbytes, *_ in places:
        if not nbytes:
            continue
        data = bytearray(good)
        data[body + at + nbytes // 2] ^= 4
        path.write_bytes(data)
        run = rlx.open(path, threads=1)
        with pytest.raises(rlx.ParseError, match="damaged"):
            _use(run)


def _set(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(head: dict[str, Any]) -> None:
        item: Any = head
        for key in keys[:-1]:
            item = item[next(iter(item)) if key == "first" else key]
        item[next(iter(item)) if keys[-1] == "first" else keys[-1]] = value

    change.__name__ = f"{'.'.join(map(str, keys))}={value}"  # the name of the case
    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("sections", 0, value=[0, 1 << 61, "h", ""]),
        _set("sections", 0, value=[-64, 64, "h", ""]),
        _set("sections", 0, value=[0, 64, "x", ""]),
        _set("sections", 0, value=3),
        _set("sections", value=[]),
        _set("programs", value=[]),
        _set("programs", value={}),
        _set("programs", 0, "blobs", value=[10**6]),
        _set("programs", 0, "blobs", value=[-1]),
        _set("programs", 0, "derived", "first", value=["f32", [1 << 40, 1 << 40], 0]),
        _set("programs", 0, "derived", "first", value=["f32", [-1], 0]),
        _set("programs", 0, "derived", value={}),
        _set("programs", 0, "plan", value={}),
        _set("programs", 0, "plan", "recipes", value={"a": 1}),
        _set("programs", 0, "outputs", value=[["y", "f99", []]]),
        _set("programs", 0, "outputs", value=[["y", "f32", ["N + "]]]),
        _set("programs", 0, "compiled", value={}),
        _set("programs", 0, "compiled", "program", "inputs", value=[10**6]),
        _set("programs", 0, "compiled", "program", "thunks", value=[[1]]),
        _set("programs", 0, "compiled", "objects", value=10**6),
        _set("params", value=3),
        _set("params", "b", value=["f32", [80], 10**6]),
        _set("params", "b", value=["f32", [81], 0]),
        _set("inputs", value=[["x", "f32", ["N"], 1]]),
        _set("inputs", value=[["x", "f32", ["M"]]]),
        _set("uppers", value={"N": -1}),
        _set("symbols", value={}),
    ],
)
def test_a_head_that_lies_is_a_parse_error(
    saved: tuple[Path, Array, str], change: Callable[[dict[str, Any]], None]
) -> None:
    """With right checksums: what its author, not the disk, got wrong."""
    path = _change(saved[0], change)
    with pytest.raises(rlx.RlxError):
        _use(rlx.open(path, threads=1))


def test_mutated_packages_raise_rlx_errors_only(saved: tuple[Path, Array, str]) -> None:
    """Opened and linked, not run: the machine code of a forged package does what its author wants."""
    path = saved[0]
    good = path.read_bytes()
    length = int.from_bytes(good[8:16], "little")
    chance = random.Random(3)
    for _ in range(150):
        text = bytearray(good[64 : 64 + length])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text))
            text[at : at + chance.randint(0, 3)] = chance.choice(
                (b"9", b"[", b"]", b'"', b"", b"-", b"null", b"{}")
            )
        path.write_bytes(good)
        _rewrite(path, bytes(text), length)
        try:
            run = rlx.open(path, threads=1)
            run._variants._restore({"N": 3}, {}, {"N": 3})  # pyright: ignore[reportPrivateUsage]
        except rlx.RlxError:
            pass


_HOSTILE = """
import resource, sys, rlx
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    rlx.open(sys.argv[1])
except rlx.RlxError:
    pass
before = peak()
for path in sys.argv[2:]:
    try:
        rlx.open(path)
    except rlx.RlxError as error:
        print(type(error).__name__)
print(peak() - before)
"""


def test_a_hostile_head_takes_no_memory(tmp_path: Path) -> None:
    texts = [b"{}", b"[" * 10**6, b'{"a":' * 10**6, b"[" + b"[]," * 10**7 + b"[]]", b"[]", b"\xff"]
    texts.append(b'{"a":[' + b"[]," * (10**6 // 2) + b"[]]}")  # just below the limit
    paths: list[str] = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.rlxp"
        path.write_bytes(module._MAGIC + bytes(8))  # pyright: ignore[reportPrivateUsage]
        paths.append(str(_rewrite(path, text, 0)))
    done = subprocess.run(
        [sys.executable, "-c", _HOSTILE, *paths], capture_output=True, text=True, check=True
    )
    *errors, kilobytes = done.stdout.split()
    assert len(errors) == len(texts) - 1
    assert int(kilobytes) < 200_000


def test_a_package_is_a_regular_file(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "none.rlxp"):
        with pytest.raises(rlx.UsageError, match="cannot open"):
            rlx.open(bad)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(rlx.UsageError, match="regular file"):
        rlx.open(tmp_path / "pipe")


def test_operators_of_ones_own_are_found_again_by_name_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(x: rlx.TensorType) -> rlx.TensorType:
        return x

    def double(x: Array) -> Array:
        return x * 2

    made = {v: rlx.op(f"packaged.double{v}", infer=same, version=v)(double) for v in ("", "1")}
    for version, own in made.items():
        with rlx.Graph("own") as g:
            g.output("y", own(g.input("x", ["N"])))
        with rlx.compile(g) as run:
            assert run(np.ones(2, np.float32))[0] == 2
            if version:
                run.save(tmp_path / "m.rlxp")
            else:
                with pytest.raises(rlx.UsageError, match="without a version"):
                    run.save(tmp_path / "m.rlxp")
    assert rlx.open(tmp_path / "m.rlxp")(np.ones(2, np.float32))[0] == 2
    monkeypatch.setattr("rlx.ops.custom.custom_version", str)  # another version
    with pytest.raises(rlx.ParseError, match=r"packaged\.double1 is not registered with version"):
        rlx.open(tmp_path / "m.rlxp")(np.ones(2, np.float32))


def test_failures_of_a_run_name_their_node(tmp_path: Path) -> None:
    with rlx.Graph("ints") as g:
        g.output("y", div(g.input("a", ["N"], "i64"), g.input("b", ["N"], "i64")))
    with rlx.compile(g, threads=1) as run:
        run(np.array([4]), np.array([2]))
        run.save(tmp_path / "m.rlxp")
    run = rlx.open(tmp_path / "m.rlxp")
    assert run(np.array([7]), np.array([2])) == [3]
    with pytest.raises(rlx.ExecutionError, match=r"division by zero in .*element 0"):
        run(np.array([4]), np.array([0]))


def test_a_package_is_told_from_a_model_and_a_folder_from_a_file(tmp_path: Path) -> None:
    with rlx.Graph("g") as g:
        g.output("y", g.input("x", [2]) + 1)
    m = rlx.compile(g)
    m.save(tmp_path / "m.rlxp")
    with pytest.raises(rlx.UsageError, match="is a package of compiled programs, not a model"):
        rlx.load(tmp_path / "m.rlxp")
    with pytest.raises(rlx.UsageError, match=r"rlx\.compile takes an rlx\.Graph"):
        rlx.load(g)
    with pytest.raises(rlx.UsageError, match=r"x\.rlxp: there is no folder .*none"):
        m.save(tmp_path / "none" / "x.rlxp")
    with pytest.raises(rlx.UsageError, match="it is a folder"):
        m.save(tmp_path)
