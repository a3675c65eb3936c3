# SPDX-License-Identifier: Apache-2.0
"""ONNX's random operators: seeds, streams by name, loops, functions, dropout in training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base import config
from rlx.base.numeric import Array

onnx: Any = pytest.importorskip("onnx")
T: Any = onnx.TensorProto
helper: Any = onnx.helper
NODE = helper.make_node


def info(name: str, kind: int = T.FLOAT, shape: Any = ()) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: list[Any],
    outputs: list[str],
    inputs: list[Any] | None = None,
    functions: list[Any] | None = None,
    opset: int = 18,
) -> Any:
    graph = helper.make_graph(
        nodes, "g", inputs or [], [helper.make_empty_tensor_value_info(name) for name in outputs]
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions or [])


def run(proto: Any, device: str = "reference", runs: int = 1, **inputs: Array) -> list[Any]:
    """Return the outputs of the first runs; one output comes as an array, several as a dict."""
    with rlx.load(proto, device) as m:
        found = [m.run(inputs) for _ in range(runs)]
    return [next(iter(f.values())) if len(f) == 1 else f for f in found]


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_random_uniform(device: str) -> None:
    node = NODE("RandomUniform", [], ["y"], shape=[300, 100], low=2.0, high=4.0, dtype=T.DOUBLE)
    (y,) = run(model([node], ["y"]), device)
    assert (y.dtype, y.shape) == (np.float64, (300, 100))
    assert y.min() >= 2
    assert y.max() < 4
    assert abs(y.mean() - 3) < 0.02


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_random_normal(device: str) -> None:
    (y,) = run(
        model([NODE("RandomNormal", [], ["y"], shape=[30000], mean=5.0, scale=2.0)], ["y"]), device
    )
    assert (y.dtype, y.shape) == (np.float32, (30000,))
    assert abs(y.mean() - 5) < 0.06
    assert abs(y.std() - 2) < 0.05


@pytest.mark.parametrize("op", ["RandomUniformLike", "RandomNormalLike"])
@pytest.mark.parametrize("dtype", [None, T.FLOAT16, T.BFLOAT16])
def test_like_takes_shape_and_dtype_of_its_operand(op: str, dtype: int | None) -> None:
    attributes = {} if dtype is None else {"dtype": dtype}
    proto = model([NODE(op, ["x"], ["y"], **attributes)], ["y"], [info("x", T.DOUBLE, ["N", 3])])
    with rlx.load(proto) as m:
        for rows in (1, 4):
            y = m(np.zeros((rows, 3)))
            assert y.shape == (rows, 3)
            names = {None: "float64", T.FLOAT16: "float16", T.BFLOAT16: "bfloat16"}
            assert y.dtype.name == names[dtype]
        assert m.variants == 1


def test_like_of_integers_needs_a_dtype() -> None:
    inputs = [info("x", T.INT64, [3])]
    with pytest.raises(rlx.ModelError, match="without an attribute dtype it must be a float"):
        run(model([NODE("RandomNormalLike", ["x"], ["y"])], ["y"], inputs), x=np.zeros(3, np.int64))
    proto = model([NODE("RandomNormalLike", ["x"], ["y"], dtype=T.FLOAT)], ["y"], inputs)
    assert run(proto, x=np.zeros(3, np.int64))[0].dtype == np.float32


def test_integers_are_no_draw() -> None:
    with pytest.raises(rlx.ModelError, match="draws f16, bf16, f32 or f64, not i32"):
        run(model([NODE("RandomUniform", [], ["y"], shape=[3], dtype=T.INT32)], ["y"]))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_bernoulli_and_multinomial(device: str) -> None:
    p = np.tile(np.array([0, 0.5, 1], np.float32), 2000)
    nodes = [
        NODE("Bernoulli", ["p"], ["b"], dtype=T.BOOL),
        NODE("Bernoulli", ["p"], ["f"]),
        NODE("Multinomial", ["l"], ["m"], sample_size=4000, dtype=T.INT64),
    ]
    proto = model(nodes, ["b", "f", "m"], [info("p", shape=[6000]), info("l", shape=[2, 3])])
    logits = np.log(np.array([[1, 1, 2], [1, 9, 0.0001]], np.float32))
    (found,) = run(proto, device, p=p, l=logits)
    assert found["b"].dtype == np.bool_
    assert found["f"].dtype == np.float32
    for name in ("b", "f"):
        zero, half, one = found[name].astype(float).reshape(2000, 3).mean(axis=0)
        assert (zero, one) == (0, 1)
        assert abs(half - 0.5) < 0.06
    assert found["m"].shape == (2, 4000)
    share = [np.bincount(row, minlength=3) / 4000 for row in found["m"]]
    np.testing.assert_allclose(share, [[0.25, 0.25, 0.5], [0.1, 0.9, 0]], atol=0.04)


def test_nodes_runs_and_models() -> None:
    """Nodes differ from each other and runs from each other; the same model gives the same again."""
    nodes = [NODE("RandomNormal", [], [name], shape=[50]) for name in ("a", "b")]
    proto = model(nodes, ["a", "b"])
    found = run(proto, "cpu", 2)
    assert len({f[n].tobytes() for f in found for n in "ab"}) == 4
    for f, g in zip(found, run(proto, "cpu", 2), strict=True):
        for name in "ab":
            np.testing.assert_array_equal(f[name], g[name])


def test_a_stream_follows_from_the_name_of_the_output() -> None:
    one = model([NODE("RandomNormal", [], ["a"], shape=[50])], ["a"])
    more = model(
        [
            NODE("RandomUniform", [], ["first"], shape=[50]),
            NODE("RandomNormal", [], ["a"], shape=[50]),
        ],
        ["first", "a"],
    )
    np.testing.assert_array_equal(run(one)[0], run(more)[0]["a"])


def test_seeded_nodes() -> None:
    """A seed makes a node independent of its name and of the executable's seed; its runs still differ."""

    def seeded(name: str, seed: float) -> Any:
        return NODE("RandomNormal", [], [name], shape=[50], seed=seed)

    proto = model([seeded("a", 1.0), seeded("b", 1.0), seeded("c", 2.5)], ["a", "b", "c"])
    first, second = run(proto, runs=2)
    np.testing.assert_array_equal(first["a"], first["b"])
    assert (first["a"] != first["c"]).any()
    assert (first["a"] != second["a"]).any()
    with rlx.load(proto, rng=rlx.RngPolicy(99)) as m:
        other = m.run({})
    np.testing.assert_allclose(other["a"], first["a"], rtol=1e-6)
    with rlx.load(model([seeded("renamed", 1.0)], ["renamed"]), "reference") as m:
        np.testing.assert_array_equal(m(), first["a"])


def _body(kind: str) -> Any:
    """Return a body that draws; Loop's has an iteration number and a condition."""
    nodes = [NODE("RandomNormal", [], ["drawn"], shape=[8]), NODE("Identity", ["drawn"], ["y"])]
    if kind == "loop":
        nodes.append(NODE("Identity", ["c"], ["c_out"]))
        inputs = [info("i", T.INT64), info("c", T.BOOL)]
        outputs = [info("c_out", T.BOOL), info("y", shape=[8])]
    else:
        nodes.append(NODE("Add", ["s", "x"], ["s_out"]))
        inputs, outputs = [info("s"), info("x")], [info("s_out"), info("y", shape=[8])]
    return helper.make_graph(nodes, "body", inputs, outputs)


def _repeated(kind: str) -> Any:
    if kind == "loop":
        trip = helper.make_node("Constant", [], ["n"], value_int=3)
        return [trip, NODE("Loop", ["n", ""], ["y"], body=_body(kind))], []
    scan = NODE("Scan", ["s0", "xs"], ["s", "y"], body=_body(kind), num_scan_inputs=1)
    return [scan], [info("s0"), info("xs", shape=["T"])]


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["loop", "scan"])
def test_iterations_draw_different_numbers(device: str, kind: str) -> None:
    nodes, inputs = _repeated(kind)
    given = {"s0": np.float32(1), "xs": np.arange(3, dtype=np.float32)} if inputs else {}
    outputs = ["y"] if kind == "loop" else ["s", "y"]
    found = run(
        model(nodes, outputs, inputs), device, 2, **{k: np.asarray(v) for k, v in given.items()}
    )
    rows = [f if kind == "loop" else f["y"] for f in found]
    assert rows[0].shape == (3, 8)
    assert len({row.tobytes() for y in rows for row in y}) == 6
    if kind == "scan":
        assert float(found[0]["s"]) == 4


def test_nested_loops_draw_different_numbers() -> None:
    inner, _ = _repeated("loop")
    nodes = [*inner, NODE("Identity", ["c0"], ["c0_out"])]
    body = helper.make_graph(
        nodes,
        "outer",
        [info("i0", T.INT64), info("c0", T.BOOL)],
        [info("c0_out", T.BOOL), info("y", shape=[3, 8])],
    )
    trip = helper.make_node("Constant", [], ["m"], value_int=2)
    proto = model([trip, NODE("Loop", ["m", ""], ["z"], body=body)], ["z"])
    found = [run(proto, device)[0] for device in ("reference", "cpu")]
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert len({row.tobytes() for row in found[0].reshape(6, 8)}) == 6


def test_branches_draw() -> None:
    branch = {
        name: helper.make_graph(
            [NODE("RandomUniform", [], ["v"], shape=[8], low=low, high=low + 1)],
            name,
            [],
            [info("v", shape=[8])],
        )
        for name, low in (("then_branch", 10.0), ("else_branch", 20.0))
    }
    proto = model([NODE("If", ["c"], ["y"], **branch)], ["y"], [info("c", T.BOOL)])
    with rlx.load(proto) as m:
        high, low = m(np.array(False)), m(np.array(True))
    assert ((high >= 20) & (high < 21)).all()
    assert ((low >= 10) & (low < 11)).all()


def test_calls_of_a_function_draw_different_numbers() -> None:
    body = [NODE("RandomNormal", [], ["drawn"], shape=[8]), NODE("Add", ["x", "drawn"], ["y"])]
    function = helper.make_function(
        "local", "Noise", ["x"], ["y"], body, [helper.make_opsetid("", 18)]
    )
    nodes = [NODE("Noise", ["x"], [name], domain="local") for name in ("a", "b")]
    proto = model(nodes, ["a", "b"], [info("x", shape=[8])], [function])
    (found,) = run(proto, x=np.zeros(8, np.float32))
    assert (found["a"] != found["b"]).all()


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_dropout_in_training(device: str) -> None:
    x = np.linspace(1, 2, 20000, dtype=np.float32)
    nodes = [NODE("Dropout", ["x", "r", "t"], ["y", "mask"])]
    inputs = [info("x", shape=[20000]), info("r"), info("t", T.BOOL)]
    with rlx.load(model(nodes, ["y", "mask"], inputs), device) as m:
        y, mask = m(x, np.float32(0.25), np.array(True))
        np.testing.assert_array_equal(y, np.where(mask, x * (np.float32(1) / np.float32(0.75)), 0))
        assert abs(mask.mean() - 0.75) < 0.02
        same, all_kept = m(x, np.float32(0.25), np.array(False))
        np.testing.assert_array_equal(same, x)
        assert all_kept.all()


def test_dropout_of_a_known_mode() -> None:
    x = np.ones(1000, np.float32)

    def found(*initializers: Any, **attributes: Any) -> Array:
        names = ["x", *(i.name for i in initializers)]
        proto = model(
            [NODE("Dropout", names, ["y"], **attributes)], ["y"], [info("x", shape=[1000])]
        )
        proto.graph.initializer.extend(initializers)
        return run(proto, x=x)[0]

    ratio = onnx.numpy_helper.from_array(np.float32(0.5), "r")
    none = onnx.numpy_helper.from_array(np.float32(0), "r")
    on, off = (onnx.numpy_helper.from_array(np.bool_(flag), "t") for flag in (True, False))
    assert set(np.unique(found(ratio, on)).tolist()) == {0, 2}
    np.testing.assert_array_equal(found(ratio, on, seed=3), found(ratio, on, seed=3))
    for same in (found(), found(ratio), found(ratio, off), found(none, on)):
        np.testing.assert_array_equal(same, x)


def test_a_cached_program_draws_the_same(tmp_path: Path) -> None:
    path = tmp_path / "noise.onnx"
    onnx.save(model([NODE("RandomNormal", [], ["y"], shape=[50])], ["y"]), path)
    os.utime(path, (1e9, 1e9))  # old enough to be known by its stamp
    found: list[Array] = []
    with config.override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        for seed in (1, 1, 2):
            with rlx.load(path, rng=rlx.RngPolicy(seed)) as m:
                found.append(m())
                warm = "cache" in m.program.seconds
        assert warm
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


def test_an_input_may_not_have_the_name_of_the_key() -> None:
    proto = model([NODE("Identity", ["<rng>"], ["y"])], ["y"], [info("<rng>", shape=[4])])
    with pytest.raises(rlx.ModelError, match="rename it"):
        rlx.load(proto)
