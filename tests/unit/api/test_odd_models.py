# SPDX-License-Identifier: Apache-2.0
"""Models that are unusual and right, and sizes that no machine has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.errors import OutOfMemoryError
from rlx.base.numeric import Array

onnx: Any = pytest.importorskip("onnx")
_FLOAT = 1
_X = np.arange(-6, 6, dtype=np.float32).reshape(4, 3)
_RELU = np.maximum(_X, 0)


@pytest.fixture(params=("reference", "cpu"))
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _node(*args: Any, **kwargs: Any) -> Any:
    return onnx.helper.make_node(*args, **kwargs)


def _model(
    nodes: Sequence[Any],
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[str],
    tensors: Sequence[Any] = (),
) -> Any:
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [info(n, _FLOAT, s) for n, s in inputs],
        [info(n, _FLOAT, None) for n in outputs],
        tensors,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])


def _tensor(name: str, values: Any) -> Any:
    return onnx.numpy_helper.from_array(np.asarray(values), name)


def _run(model: Any, device: str, **inputs: Any) -> dict[str, Array]:
    return rlx.load(model, device, threads=1).run(inputs)


def test_outputs_that_are_inputs(device: str) -> None:
    found = _run(_model([], [("x", ["n", 3])], ["x"]), device, x=_X)
    np.testing.assert_array_equal(found["x"], _X)
    assert not np.shares_memory(found["x"], _X)
    relu = _node("Relu", ["x"], ["y"])
    found = _run(_model([relu], [("x", ["n", 3])], ["x", "y"]), device, x=_X)
    np.testing.assert_array_equal(found["x"], _X)
    np.testing.assert_array_equal(found["y"], _RELU)


@pytest.mark.parametrize("size", [5, 500])  # a constant, a weight
def test_outputs_that_are_initialisers_and_models_without_inputs(device: str, size: int) -> None:
    values = np.arange(size, dtype=np.float32) - 2
    tensors = [_tensor("w", values)]
    np.testing.assert_array_equal(_run(_model([], [], ["w"], tensors), device)["w"], values)
    found = _run(_model([_node("Relu", ["w"], ["y"])], [], ["y", "w"], tensors), device)
    np.testing.assert_array_equal(found["y"], np.maximum(values, 0))
    np.testing.assert_array_equal(found["w"], values)


def test_models_without_nodes_inputs_or_outputs(device: str) -> None:
    assert _run(_model([], [], []), device) == {}
    assert _run(_model([_node("Relu", ["x"], ["y"])], [("x", ["n", 3])], []), device, x=_X) == {}


def test_inputs_that_nothing_reads(device: str) -> None:
    model = _model([_node("Relu", ["x"], ["y"])], [("x", ["n", 3]), ("u", ["k"])], ["y"])
    found = _run(model, device, x=_X, u=np.zeros(7, np.float32))
    np.testing.assert_array_equal(found["y"], _RELU)
    with pytest.raises(rlx.UsageError, match=r"missing inputs: u: f32\[k\]"):
        _run(model, device, x=_X)


@pytest.mark.parametrize(
    ("name", "extent"),
    [
        ("\N{GREEK SMALL LETTER PHI}", "\N{GREEK SMALL LETTER BETA}"),
        ("a b/c:0", "n[0] * 2"),
        ("'\"{}%s\n", "min"),
        ("class", "lambda"),
    ],
)
def test_names_that_are_no_identifiers(device: str, name: str, extent: str) -> None:
    model = _model([_node("Relu", [name], [f"{name}!"])], [(name, [extent, 3])], [f"{name}!"])
    loaded = rlx.load(model, device, threads=1)
    np.testing.assert_array_equal(loaded.run({name: _X})[f"{name}!"], _RELU)
    np.testing.assert_array_equal(loaded(_X), _RELU)
    bounded = rlx.load(model, device, threads=1, dims={extent: 4})
    np.testing.assert_array_equal(bounded(_X), _RELU)


def test_an_output_that_is_listed_twice_is_refused() -> None:
    model = _model([_node("Relu", ["x"], ["y"])], [("x", ["n", 3])], ["y", "y"])
    with pytest.raises(rlx.ModelError, match=r"output 'y' of graph 'g' is listed twice"):
        rlx.load(model)


def test_an_input_without_a_shape_says_what_to_do() -> None:
    model = _model([_node("Relu", ["x"], ["y"])], [("x", None)], ["y"])
    with pytest.raises(rlx.ModelError, match=r"input 'x' has no shape.*declare one in the file"):
        rlx.load(model)


def test_extents_that_no_machine_has(device: str) -> None:
    model = _model([_node("Relu", ["x"], ["y"])], [("x", [2**40, 2**30])], ["y"])
    with pytest.raises((OutOfMemoryError, rlx.UsageError), match=r"more than 64-bit|is fixed"):
        _run(model, device, x=_X)
    tiles = _tensor("s", np.array([2**50]))
    model = _model([_node("Tile", ["x", "s"], ["y"])], [("x", ["n"])], ["y"], [tiles])
    with pytest.raises(OutOfMemoryError, match="4503599627370496 bytes"):
        _run(model, device, x=np.ones(1, np.float32))
    extents = _tensor("s", np.array([2**31, 2**31, 4]))
    nodes = [_node("Expand", ["x", "s"], ["b"]), _node("CumSum", ["b", "a"], ["y"])]
    axis = _tensor("a", np.array(0))
    model = _model(nodes, [("x", [1])], ["y"], [extents, axis])
    with pytest.raises(OutOfMemoryError, match=r"64-bit|73786976294838206464 bytes"):
        _run(model, device, x=np.ones(1, np.float32))
