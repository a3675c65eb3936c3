# SPDX-License-Identifier: Apache-2.0
"""What threads share: the order of imports when several use rlx for the first time, and tables of the process.

A package whose `__init__` imports its own modules has to come before these. A thread that begins with a module locks it
and waits for the package; if another thread is importing the package just then, it waits for the module.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.api import onnx as api_onnx
from rlx.backends.registry import backend_names
from rlx.frontends.onnx import model
from rlx.frontends.onnx.registry import mapped_ops
from rlx.frontends.onnx.source import OpenModel, open_model
from rlx.ir.op import registered_ops
from rlx.ir.text import registered_forms

_SOURCE = Path(rlx.__file__).parents[1]
_PACKAGES = ("rlx.ops", "rlx.backends.cpu.kernels")
_ENTRIES = ("rlx.testing", *(f"rlx.backends.{n}" for n in backend_names()))
"""What is imported by name, or by users."""


@cache
def _modules() -> dict[str, ast.Module]:
    found: dict[str, ast.Module] = {}
    for path in sorted((_SOURCE / "rlx").rglob("*.py")):
        name = ".".join(path.relative_to(_SOURCE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def _imports(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Iterate the modules of rlx that import statements name, with the packages that they are in."""
    for node in statements:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name in _modules())


def _load(module: str, done: set[str]) -> None:
    """Enter everything that is there when a module has been imported."""
    if module not in done:
        done.add(module)
        _load(module.rpartition(".")[0] or module, done)
        for name in _imports(_modules()[module].body):
            _load(name, done)


def _finds_package(module: str, package: str, done: set[str]) -> bool:
    """Import as Python does; return False where a module of the package is reached before the package."""
    if module in done or package in done:
        return True
    if module.startswith(f"{package}."):
        return False
    done.add(module)
    if module == package:
        return True
    parent = module.rpartition(".")[0] or module
    names = (parent, *_imports(_modules()[module].body))
    return all(_finds_package(name, package, done) for name in names)


@pytest.mark.parametrize("package", _PACKAGES)
def test_a_package_is_imported_before_its_modules(package: str) -> None:
    wrong = [e for e in _ENTRIES if not _finds_package(e, package, set())]
    for module, tree in _modules().items():
        there = set[str]()
        _load(module, there)
        for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
            done = set(there)
            if not all(_finds_package(n, package, done) for n in _imports(ast.walk(function))):
                wrong.append(f"{module}.{function.name}")
    assert not wrong, f"they import a module of {package} first"


_RACE = """
import sys, threading, traceback
import numpy as np
import rlx

gate, failures = threading.Barrier(8), []

def compiled(number):
    from rlx.ops import relu
    with rlx.Graph("double") as g:
        g.output("y", relu(g.input("x", [3, 8]) @ g.param("w", 2 * np.eye(8, dtype=np.float32))))
    return rlx.compile(g, ("cpu", "reference", "null")[number % 3])

def use(number):
    try:
        gate.wait()
        x = np.ones((3, 8), np.float32)
        if number == 7:
            for name in rlx.__all__:
                getattr(rlx, name)
        elif number == 6:
            rlx.devices()
        else:
            m = compiled(number)
            assert number % 3 == 2 or (m(x) == 2).all()  # the null device does not run
    except BaseException:
        failures.append(traceback.format_exc())

threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("".join(failures) or 0)
"""


def test_first_uses_may_race() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RACE], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("table", [registered_ops, mapped_ops, registered_forms])
def test_tables_may_grow_while_another_thread_looks_through_them(
    table: Callable[[], Mapping[Any, Any]],
) -> None:
    assert table() is not table()
    assert table() == table()


def test_clones_that_read_a_model_at_once_share_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 4]) for n in "xy")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight]
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=8).SerializeToString())
    read, gate, found = model.load_model, threading.Barrier(2), list[Any]()

    def both(opened: OpenModel) -> model.Model:
        with suppress(threading.BrokenBarrierError):  # before Python 3.12 one waits for the other
            gate.wait(1)
        return read(opened)

    monkeypatch.setattr(model, "load_model", both)
    reader = api_onnx._Reader(open_model(path))  # pyright: ignore[reportPrivateUsage]
    threads = [threading.Thread(target=lambda: found.append(reader.model)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is reader.model


def test_models_are_loaded_while_another_thread_imports_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rlx.api.graph", ModuleType("rlx.api.graph"))  # has just begun
    with pytest.raises(rlx.UsageError, match="nowhere"):
        rlx.load("nowhere.onnx")
