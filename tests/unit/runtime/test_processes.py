# SPDX-License-Identifier: Apache-2.0
"""Threads, forks, other processes, Ctrl-C, and the end of the interpreter."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.base.numeric import Array
from rlx.ops.matmul import matmul
from rlx.ops.norm import softmax
from rlx.runtime.executable import Executable

_SECONDS = 60


def _model(width: int = 32) -> rlx.Graph:
    random = np.random.default_rng(0)
    with rlx.Graph("model") as g:
        x = g.input("x", ["N", width])
        w = g.param("w", random.standard_normal((width, width)).astype(np.float32))
        g.output("y", softmax(matmul(x, w)))
        g.output("z", x * 2)
    return g


def _x(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, 32)).astype(np.float32)


_LONG = """
import numpy as np
import rlx

with rlx.Graph("long") as g:
    x = g.input("x", [768, 768])
    w = g.param("w", np.eye(768, dtype=np.float32))
    for _ in range(100):
        x = x @ w
    g.output("y", x)
m = rlx.compile(g)
x = np.ones((768, 768), np.float32)
m.warmup()
"""
"""A model `m` that runs for a second or more, in kernels of about 10 ms, and its input."""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=2 * _SECONDS,
        check=False,
    )


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["run", "call", "async", "out"])
def test_eight_threads_use_one_executable(call: str) -> None:
    m = rlx.compile(_model(), threads=2)
    inputs = [_x(n % 7 + 1, n) for n in range(40)]
    want = [m.run([x]) for x in inputs]
    wrong: list[str] = []

    def use(thread: int) -> None:
        for i in range(len(inputs)):
            at = (i * 7 + thread * 5) % len(inputs)
            x = inputs[at]
            if call == "run":
                y = m.run([x])["y"]
            elif call == "call":
                y = m(x).y
            elif call == "async":
                y = m.run_async([x]).result(_SECONDS)["y"]
            else:
                y = m.run([x], ["y"], [np.empty_like(want[at]["y"])])["y"]
            if y.tobytes() != want[at]["y"].tobytes():
                wrong.append(f"thread {thread}, input {at}")

    threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    assert not wrong


def test_threads_that_grow_the_bounds_do_not_disturb_others() -> None:
    m = rlx.compile(_model(), threads=2, dims={"N": 1})
    wrong: list[int] = []

    def use(first: int) -> None:
        for n in range(first, 400, 8):
            y = m.run([np.ones((n, 32), np.float32)])["z"]
            wrong.extend([n] * (y.shape != (n, 32) or bool((y != 2).any())))

    threads = [threading.Thread(target=use, args=(i + 1,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    assert not wrong


def test_clones_run_in_parallel_and_do_not_disturb_each_other() -> None:
    m = rlx.compile(_model(), threads=2)
    inputs = [_x(n % 7 + 1, n) for n in range(40)]
    want = [m.run([x])["y"].tobytes() for x in inputs]
    wrong: list[int] = []

    def use(twin: Executable) -> None:
        for at, x in enumerate(inputs * 3):
            if twin.run([x])["y"].tobytes() != want[at % len(inputs)]:
                wrong.append(at)

    threads = [threading.Thread(target=use, args=(m.clone(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    assert not wrong


def test_every_run_sees_the_weights_of_one_moment() -> None:
    with rlx.Graph("scaled") as g:
        x = g.input("x", ["N", 100])
        g.output("y", x * g.param("w", np.zeros(100, np.float32)))
        g.output("z", x * g.param("w2", np.zeros(100, np.float32)))
    m = rlx.compile(g, threads=1)
    twin = m.clone()
    x = np.ones((50, 100), np.float32)
    torn: list[Any] = []
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            torn.extend(y for y in m.run([x]).values() if y.min() != y.max())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for value in range(200):
        m.set_param("w", np.full(100, value, np.float32))
    stop.set()
    for thread in threads:
        thread.join(_SECONDS)
    assert not torn
    assert m.run([x])["y"].max() == 199
    assert twin.run([x])["y"].max() == 0


def test_a_run_within_a_run_is_refused() -> None:
    m = rlx.compile(_model())
    found: list[str] = []

    def handler(*_: object) -> None:
        for call in (lambda: m.run([_x(1)]), m.close):
            try:
                call()
            except rlx.UsageError as error:
                found.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        inner = m.program.compiled if m.variants else m.warmup({"x": (1, 32)}).program.compiled
        original = inner.run

        def run(*arguments: Any) -> None:
            signal.raise_signal(signal.SIGALRM)
            original(*arguments)

        inner.run = run  # pyright: ignore[reportAttributeAccessIssue]
        y = m.run([_x(3)])["z"]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert found == [
        "model is running: a run cannot use it again from its middle",
        "model is running: it cannot be closed from there",
    ]
    np.testing.assert_array_equal(y, _x(3) * 2)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def _interrupt_after(seconds: float) -> None:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=kill, daemon=True).start()


@pytest.fixture(scope="module")
def long() -> Executable:
    names: dict[str, Any] = {}
    exec(_LONG, names)
    return names["m"]


@pytest.mark.parametrize("call", ["run", "async", "pipelined"])
def test_ctrl_c_ends_the_waiting_and_leaves_the_executable_usable(
    long: Executable, call: str
) -> None:
    x = np.ones((768, 768), np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: [long.run([x]) for _ in range(20)],
        "async": lambda: [f.result() for f in [long.run_async([x]) for _ in range(3)]],
        "pipelined": lambda: long.run_pipelined([[x]] * 20),
    }
    began = time.monotonic()
    _interrupt_after(0.3)
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert time.monotonic() - began < 20, "at once, not after all runs"
    np.testing.assert_array_equal(long.run([x])["y"], x)


# -- the end of the interpreter ---------------------------------------------------------------------------------------

_ENDINGS = {
    "runs wait in the queue": """
futures = [m.run_async([x]) for _ in range(8)]
""",
    "a daemon thread runs": """
threading.Thread(target=lambda: [m.run([x]) for _ in range(99)], daemon=True).start()
time.sleep(0.1)
""",
    "a thread runs": """
threading.Thread(target=lambda: m.run([x])).start()
time.sleep(0.1)
""",
    "a thread waits for room": """
def submit():
    try:
        for _ in range(99):
            m.run_async([x], queue=1)
    except rlx.UsageError:
        pass

threading.Thread(target=submit, daemon=True).start()
time.sleep(0.1)
""",
    "the program ends by sys.exit": """
futures = [m.run_async([x]) for _ in range(8)]
sys.exit(0)
""",
    "jobs wait in a lane": """
m.run([x])
futures = [m.run_async([x]) for _ in range(8)]
time.sleep(0.02)
""",
    "the lane is idle": """
m.run([x])
futures = [m.run_async([x]).result() for _ in range(2)]
""",
    "the queue is idle": """
m.run_async([x]).result()
""",
}


@pytest.mark.parametrize("ending", _ENDINGS)
def test_the_interpreter_exits_with_runs_in_flight(ending: str) -> None:
    began = time.monotonic()
    done = _python(_LONG + "import sys, threading, time\n" + _ENDINGS[ending])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert time.monotonic() - began < _SECONDS


def test_an_exit_that_comes_up_in_a_finalizer_is_not_lost() -> None:
    code = """
import threading, time
import numpy as np
import rlx

begun = threading.Event()

class Slow:
    def __del__(self):
        begun.set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

@rlx.op("test.endless", infer=lambda x: x)
def endless(x):
    Slow()
    while True:
        time.sleep(0.01)

with rlx.Graph() as g:
    g.output("y", endless(g.input("x", [2])))
future = rlx.compile(g).run_async([np.ones(2, np.float32)])
begun.wait()
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_run_cut_short_by_the_exit_tells_its_callbacks() -> None:
    code = """
futures = [m.run_async([x]) for _ in range(4)]
for f in futures:
    f.add_done_callback(lambda f: print("cancelled" if f.cancelled() else type(f.exception()).__name__, flush=True))
time.sleep(0.05)
"""
    done = _python(_LONG + "import sys, threading, time\n" + code)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    assert told.count("cancelled") >= 2
    assert set(told) <= {"cancelled", "CancelledError", "NoneType"}
    assert len(told) == 4


# -- fork -------------------------------------------------------------------------------------------------------------

_FORK = """
import os, sys, threading, time
import numpy as np
import rlx
from rlx.ops.norm import softmax

def _model():
    with rlx.Graph("model") as g:
        x = g.input("x", ["N", 32])
        g.output("y", softmax(x @ g.param("w", np.eye(32, dtype=np.float32))))
        g.output("z", x * 2)
    return g

def _x(n):
    return np.random.default_rng(n).standard_normal((n, 32)).astype(np.float32)

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            ok = work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            ok = False
        os._exit(0 if ok else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""
_DURING = """
other = rlx.compile(_model())
{before}
future = m.run_async([x])
waiting = m.run_async([x])
time.sleep({seconds})

def child():
    assert np.array_equal(other.run([_x(5)])["z"], _x(5) * 2)
    for what in (lambda: m.run([x]), future.result, waiting.exception):
        try:
            what()
        except rlx.UsageError as error:
            assert "fork" in str(error), error
        else:
            return False
    m.close()
    return True

in_child(child)
assert np.array_equal(future.result()["y"], x)
"""
_FORKS = {
    "before the first run": """
m = rlx.compile(_model(), threads=2)
in_child(lambda: np.array_equal(m.run([_x(500)])["z"], _x(500) * 2))
assert np.array_equal(m.run([_x(500)])["z"], _x(500) * 2)
""",
    "after a run": """
m = rlx.compile(_model(), threads=2)
want = m.run([_x(5000)])["y"].tobytes()
in_child(lambda: m.run([_x(5000)])["y"].tobytes() == want)
in_child(lambda: m.run_async([_x(5000)]).result(60)["y"].tobytes() == want)
assert m.run([_x(5000)])["y"].tobytes() == want
""",
    "after an enqueued run": """
m = rlx.compile(_model(), threads=2)
want = m.run_async([_x(5000)]).result()["y"].tobytes()
in_child(lambda: m.run_async([_x(5000)]).result(60)["y"].tobytes() == want)
assert m.run_async([_x(5000)]).result()["y"].tobytes() == want
""",
    "and compile in the child": """
m = rlx.compile(_model(), threads=2)
m.run([_x(5)])
in_child(lambda: np.array_equal(rlx.compile(_model()).run([_x(5)])["z"], _x(5) * 2))
""",
    "during a job": _DURING.format(before="m.run([x])", seconds=0.02),
    "during a run of another thread": _DURING.format(before="", seconds=0.1),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("when", _FORKS)
def test_a_child_made_by_fork_works(when: str) -> None:
    done = _python((_LONG if "m = " not in _FORKS[when] else "") + _FORK + _FORKS[when])
    assert done.returncode == 0, done.stderr


# -- pickle and multiprocessing -------------------------------------------------------------------------------------


def _write(path: Path, scale: float = 1.0) -> Path:
    weights = np.linspace(-scale, scale, 120, dtype=np.float32).reshape(4, 30)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 30])],
        [numpy_helper.from_array(weights, "w")],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def test_a_model_is_pickled_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    m = rlx.load("m.onnx", dims={"batch": 2}, threads=1)
    monkeypatch.chdir("/")
    data = pickle.dumps(m)
    assert len(data) < 1000
    x = np.ones((2, 4), np.float32)
    again = pickle.loads(data)
    assert again(x).tobytes() == m(x).tobytes()
    assert again.variants == 1, "the bounds travel: it is compiled"
    _write(tmp_path / "m.onnx", 2.0)
    os.utime(tmp_path / "m.onnx", (1, 1))
    with pytest.raises(rlx.UsageError, match="has changed since"):
        pickle.loads(data)
    (tmp_path / "m.onnx").unlink()
    with pytest.raises(rlx.UsageError, match=r"m\.onnx"):
        pickle.loads(data)


def test_a_model_without_a_path_is_pickled_by_its_content(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.onnx")
    with path.open("rb") as stream:
        m = rlx.load(stream)
    path.unlink()
    x = np.ones((2, 4), np.float32)
    assert pickle.loads(pickle.dumps(m))(x).tobytes() == m(x).tobytes()


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_graph_is_pickled_with_its_params(device: str) -> None:
    m = rlx.compile(_model(), device)
    again = pickle.loads(pickle.dumps(m))
    assert again(_x(3)).y.tobytes() == m(_x(3)).y.tobytes()
    assert repr(again) == repr(m)
    once_more = pickle.loads(pickle.dumps(again))
    assert once_more(_x(3)).y.tobytes() == m(_x(3)).y.tobytes()


def test_changed_weights_and_the_seed_travel(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.onnx")
    x = np.ones((2, 4), np.float32)
    for m in (rlx.load(path), rlx.load(path.read_bytes())):
        m.set_param("w", np.full((4, 30), 7, np.float32))
        again = pickle.loads(pickle.dumps(m))
        np.testing.assert_array_equal(again(x), np.full((2, 30), 28))
        assert again.get_param("w").tobytes() == m.get_param("w").tobytes()
    graph = rlx.compile(_model(), rng=rlx.RngPolicy(5))
    graph.set_param("w", np.zeros((32, 32), np.float32))
    graph.run([_x(1)])
    again = pickle.loads(pickle.dumps(graph))
    assert again.rng == graph.rng
    np.testing.assert_array_equal(again(_x(2)).y, np.full((2, 32), 1 / 32))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_states_travel(device: str) -> None:
    with rlx.Graph("sum") as g:
        x = g.input("x", [3])
        total = g.state("total", [3])
        g.set_next(total, total + x)
        g.output("y", total + x)
    m = rlx.compile(g, device)
    one = np.ones(3, np.float32)
    untouched = pickle.loads(pickle.dumps(m))
    for _ in range(3):
        m(one)
    again = pickle.loads(pickle.dumps(m))
    np.testing.assert_array_equal(again(one), [4, 4, 4])
    np.testing.assert_array_equal(m(one), [4, 4, 4])
    np.testing.assert_array_equal(untouched(one), [1, 1, 1])


def test_a_model_compiled_in_another_way_is_not_pickled_as_the_first(tmp_path: Path) -> None:
    m = rlx.load(_write(tmp_path / "m.onnx"), dims={"batch": 2})
    with pytest.raises(rlx.UsageError, match="cannot be pickled"):
        pickle.dumps(m.derive())
    twin = m.clone()
    x = np.ones((2, 4), np.float32)
    assert pickle.loads(pickle.dumps(twin))(x).tobytes() == m(x).tobytes()


def test_a_param_without_a_value_travels_as_that() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [3])
        w = g.param("w", shape=[3])
        g.output("y", x * w)
    m = pickle.loads(pickle.dumps(rlx.compile(g)))
    with pytest.raises(rlx.UsageError, match="w"):
        m(np.ones(3, np.float32))
    m.set_param("w", np.full(3, 2, np.float32))
    np.testing.assert_array_equal(m(np.ones(3, np.float32)), [2, 2, 2])


_POOL = """
import concurrent.futures, multiprocessing, sys
import numpy as np
import rlx
from rlx.ops.norm import softmax

KEPT = []

def keep(m):
    KEPT.append(m)

def given(m, x):
    return m.run([x])["y"]

def kept(x):
    return KEPT[0].run([x])["y"]

def main():
    with rlx.Graph() as g:
        x = g.input("x", ["N", 32])
        g.output("y", softmax(x @ g.param("w", np.eye(32, dtype=np.float32))))
    m = rlx.compile(g, threads=2)
    inputs = [np.random.default_rng(n).standard_normal((99 * n, 32)).astype(np.float32) for n in (1, 2, 3, 4)]
    want = [m.run([x])["y"].tobytes() for x in inputs]
    context = multiprocessing.get_context(sys.argv[1])
    with concurrent.futures.ProcessPoolExecutor(2, context, initializer=keep, initargs=(m,)) as pool:
        assert [y.tobytes() for y in pool.map(given, [m] * 4, inputs)] == want
        assert [y.tobytes() for y in pool.map(kept, inputs)] == want
    with context.Pool(2, keep, (m,)) as pool:
        assert [y.tobytes() for y in pool.starmap(given, [(m, x) for x in inputs])] == want
        assert [y.tobytes() for y in pool.map(kept, inputs)] == want

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_process_pools_run_what_the_parent_compiled(method: str, tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(_POOL)
    done = subprocess.run(
        [sys.executable, str(script), method],
        capture_output=True,
        text=True,
        timeout=2 * _SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
