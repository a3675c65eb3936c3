# SPDX-License-Identifier: Apache-2.0
"""Symbolic extents through the import: names, shape arithmetic, slices, guards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.base.errors import ModelError, UndecidedError, UnsupportedOpError, UsageError
from rlx.frontends.onnx.importer import ImportedModel, import_model
from rlx.frontends.onnx.model import load_model
from rlx.ops.evaluate import evaluate

onnx: Any = pytest.importorskip("onnx")
T: Any = onnx.TensorProto
helper: Any = onnx.helper
numpy_helper: Any = onnx.numpy_helper


def build(
    nodes: list[Any],
    inputs: dict[str, tuple[int, Any]],
    outputs: list[str],
    constants: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, (kind, shape) in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )
    opset = options.pop("opset", 18)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def imported(*args: Any, hints: dict[str, int] | None = None, **options: Any) -> ImportedModel:
    return import_model(load_model(build(*args, **options)), hints=hints)


def output_shape(model: ImportedModel, index: int = 0) -> str:
    return str(model.graph.outputs[index].type)


def names(model: ImportedModel) -> list[str]:
    return [node.op.name for node in model.graph.block]


NODE = helper.make_node


def test_equal_texts_share_a_symbol_and_odd_texts_become_identifiers() -> None:
    model = imported(
        [NODE("Identity", ["x"], ["y"])],
        {
            "x": (T.FLOAT, ["batch size", "floor(H/2)+1", None, "?"]),
            "z": (T.FLOAT, ["batch size", "min", 3]),
        },
        ["y"],
    )
    x, z = (v.type.shape for v in model.graph.inputs)
    assert [str(d) for d in x] == ["batch_size", "floor_H_2_1", "x_2", "x_3"]
    assert [str(d) for d in z] == ["batch_size", "min_", "3"]
    assert model.symbols["floor_H_2_1"] == "floor(H/2)+1"
    assert model.symbols["x_2"] == "x[2]"


def test_texts_that_would_give_one_identifier_stay_apart() -> None:
    model = imported(
        [NODE("Identity", ["x"], ["y"])], {"x": (T.FLOAT, ["a.b", "a b", "a_b"])}, ["y"]
    )
    assert [str(d) for d in model.graph.inputs[0].type.shape] == ["a_b", "a_b_2", "a_b_3"]


def test_unknown_rank_needs_a_shape() -> None:
    proto = build([NODE("Identity", ["x"], ["y"])], {"x": (T.FLOAT, None)}, ["y"])
    with pytest.raises(ModelError, match="no shape, not even a rank"):
        import_model(load_model(proto))
    model = import_model(load_model(proto), shapes={"x": ["n", 3]})
    assert output_shape(model) == "f32[n,3]"


def test_names_that_mean_nothing_are_refused() -> None:
    proto = load_model(build([NODE("Identity", ["x"], ["y"])], {"x": (T.FLOAT, ["n"])}, ["y"]))
    with pytest.raises(UsageError, match="Did you mean 'x'"):
        import_model(proto, shapes={"xx": [1]})
    with pytest.raises(UsageError, match="no symbolic extent 'm'"):
        import_model(proto, hints={"m": 1})


def test_a_shape_chain_becomes_an_attribute() -> None:
    """Shape, Gather, Unsqueeze, Concat, Reshape: nothing of the chain is left."""
    model = imported(
        [
            NODE("Shape", ["x"], ["s"]),
            NODE("Gather", ["s", "zero"], ["b"]),
            NODE("Gather", ["s", "one"], ["n"]),
            NODE("Mul", ["n", "two"], ["n2"]),
            NODE("Unsqueeze", ["b", "axes"], ["b1"]),
            NODE("Unsqueeze", ["n2", "axes"], ["n1"]),
            NODE("Concat", ["b1", "n1", "rest"], ["shape"], axis=0),
            NODE("Reshape", ["x", "shape"], ["y"]),
        ],
        {"x": (T.FLOAT, ["b", "n", 6])},
        ["y"],
        {
            "zero": np.int64(0),
            "one": np.int64(1),
            "two": np.int64(2),
            "axes": np.array([0]),
            "rest": np.array([-1]),
        },
    )
    assert output_shape(model) == "f32[b,2*n,3]"
    assert names(model) == ["reshape"]


def test_extents_survive_a_cast_to_float_and_back() -> None:
    model = imported(
        [
            NODE("Shape", ["x"], ["s"]),
            NODE("Cast", ["s"], ["f"], to=T.FLOAT),
            NODE("Mul", ["f", "two"], ["f2"]),
            NODE("Cast", ["f2"], ["i"], to=T.INT64),
            NODE("ConstantOfShape", ["i"], ["y"]),
        ],
        {"x": (T.FLOAT, ["n"])},
        ["y"],
        {"two": np.float32(2)},
    )
    assert output_shape(model) == "f32[2*n]"


def test_a_shape_used_as_data_is_a_dim_tensor() -> None:
    model = imported(
        [NODE("Shape", ["x"], ["s"]), NODE("Add", ["s", "d"], ["y"])],
        {"x": (T.FLOAT, ["n", 4]), "d": (T.INT64, [2])},
        ["y", "s"],
    )
    assert names(model) == ["dim_tensor", "add"]
    got = evaluate(model.graph, {"x": np.zeros((3, 4), np.float32), "d": np.array([10, 20])})
    assert got["y"].tolist() == [13, 24]
    assert got["s"].tolist() == [3, 4]


def test_reshape_to_data_is_refused_with_the_node() -> None:
    with pytest.raises(UnsupportedOpError, match=r"Reshape node 'r'.*depends on the data"):
        imported(
            [NODE("Reshape", ["x", "s"], ["y"], name="r")],
            {"x": (T.FLOAT, ["n"]), "s": (T.INT64, [2])},
            ["y"],
        )


@pytest.mark.parametrize(
    ("shape", "allowzero", "expected"),
    [
        ([0, -1], 0, "f32[n,6*m]"),
        ([-1], 0, "f32[6*m*n]"),
        ([-1, 6, 0], 0, "f32[m,6,n]"),
        ([2, -1, 0], 0, "f32[2,3*n,m]"),
    ],
)
def test_reshape_of_symbolic_shapes(shape: list[int], allowzero: int, expected: str) -> None:
    extents = ["n", "m", 6] if shape != [-1, 6, 0] else ["m", 6, "n"]
    extents = ["n", 6, "m"] if shape == [2, -1, 0] else extents
    model = imported(
        [NODE("Reshape", ["x", "s"], ["y"], allowzero=allowzero)],
        {"x": (T.FLOAT, extents)},
        ["y"],
        {"s": np.array(shape)},
    )
    assert output_shape(model) == expected


def test_allowzero_keeps_zeros() -> None:
    model = imported(
        [NODE("Reshape", ["x", "s"], ["y"], allowzero=1)],
        {"x": (T.FLOAT, [4, 2, 0])},
        ["y"],
        {"s": np.array([0, 0, 4])},
    )
    assert output_shape(model) == "f32[0,0,4]"


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [
        (1, 2**63 - 1, 1),
        (0, -1, 1),
        (-3, 2**63 - 1, 1),
        (2, 5, 1),
        (-1, -(2**63), -1),
        (1, -1, 2),
        (100, 200, 1),
        (-100, 3, 1),
        (5, 1, -2),
    ],
)
def test_slices_of_a_symbolic_axis_are_those_of_numpy(start: int, end: int, step: int) -> None:
    model = imported(
        [NODE("Slice", ["x", "s", "e", "a", "t"], ["y"])],
        {"x": (T.FLOAT, [2, "n"])},
        ["y"],
        {"s": np.array([start]), "e": np.array([end]), "a": np.array([-1]), "t": np.array([step])},
    )
    for extent in (1, 2, 5, 9):
        x = np.arange(2 * extent, dtype=np.float32).reshape(2, extent)
        got = evaluate(model.graph, {"x": x})["y"]
        np.testing.assert_array_equal(got, x[:, start:end:step])


def test_same_padding_of_a_symbolic_axis() -> None:
    model = imported(
        [NODE("MaxPool", ["x"], ["y"], kernel_shape=[3], strides=[2], auto_pad="SAME_UPPER")],
        {"x": (T.FLOAT, [1, 1, "n"])},
        ["y"],
    )
    for extent in (1, 2, 5, 8):
        x = np.arange(extent, dtype=np.float32).reshape(1, 1, extent)
        got = evaluate(model.graph, {"x": x})["y"]
        assert got.shape == (1, 1, -(-extent // 2))
        assert got[0, 0, -1] == extent - 1


def test_a_broadcast_of_two_symbols_needs_a_hint_and_records_a_guard() -> None:
    args: Any = (
        [NODE("Add", ["x", "z"], ["y"])],
        {"x": (T.FLOAT, ["n"]), "z": (T.FLOAT, ["m"])},
        ["y"],
    )
    with pytest.raises(UndecidedError, match=r"dims=\{'[nm]'"):
        imported(*args)
    model = imported(*args, hints={"n": 4, "m": 4})
    assert [str(g).split(" (")[0] for g in model.graph.facts.guards] == ["n == m"]


def test_where_over_extents_folds() -> None:
    """What torch exports for expand(-1, n): Where(Equal(shape, -1), ones, shape)."""
    model = imported(
        [
            NODE("Shape", ["x"], ["s"]),
            NODE("Equal", ["s", "minus"], ["c"]),
            NODE("Where", ["c", "ones", "s"], ["t"]),
            NODE("Expand", ["v", "t"], ["y"]),
        ],
        {"x": (T.FLOAT, ["a", "b"]), "v": (T.FLOAT, [1, 1])},
        ["y"],
        {"minus": np.array([-1, -1]), "ones": np.array([1, 1])},
    )
    assert output_shape(model) == "f32[a,b]"


def test_a_ratio_of_extents_may_be_data() -> None:
    model = imported(
        [
            NODE("Shape", ["x"], ["s"]),
            NODE("Cast", ["s"], ["f"], to=T.FLOAT),
            NODE("Div", ["f", "three"], ["y"]),
            NODE("Floor", ["y"], ["whole"]),
            NODE("Cast", ["whole"], ["i"], to=T.INT64),
            NODE("ConstantOfShape", ["i"], ["zeros"]),
        ],
        {"x": (T.FLOAT, ["n"])},
        ["y", "zeros"],
        {"three": np.float32(3)},
    )
    got = evaluate(model.graph, {"x": np.zeros(7, np.float32)})
    np.testing.assert_allclose(got["y"], [7 / 3], rtol=1e-6)
    assert got["zeros"].shape == (2,)


def test_a_scale_that_is_a_ratio_of_extents_gives_an_extent() -> None:
    """Resize to the size of another tensor, written as a scale."""
    model = imported(
        [
            NODE("Shape", ["x"], ["a"]),
            NODE("Shape", ["z"], ["b"]),
            NODE("Cast", ["a"], ["af"], to=T.FLOAT),
            NODE("Cast", ["b"], ["bf"], to=T.FLOAT),
            NODE("Div", ["bf", "af"], ["scales"]),
            NODE(
                "Resize",
                ["x", "", "scales"],
                ["y"],
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            ),
        ],
        {"x": (T.FLOAT, [1, 1, "w"]), "z": (T.FLOAT, [1, 1, "v"])},
        ["y"],
    )
    assert output_shape(model) == "f32[1,1,v]"
    x = np.arange(3, dtype=np.float32).reshape(1, 1, 3)
    got = evaluate(model.graph, {"x": x, "z": np.zeros((1, 1, 6), np.float32)})["y"]
    assert got.reshape(-1).tolist() == [0, 0, 1, 1, 2, 2]


def test_an_end_of_a_billion_means_to_the_end() -> None:
    args: Any = (
        [NODE("Slice", ["x", "s", "e"], ["y"])],
        {"x": (T.FLOAT, ["n"])},
        ["y"],
        {"s": np.array([0]), "e": np.array([10**9])},
    )
    assert output_shape(imported(*args, hints={"n": 4})) == "f32[n]"
    assert output_shape(imported(*args)) == "f32[min(1000000000,n)]"


def test_hints_go_by_the_names_of_the_file_too() -> None:
    model = imported(
        [NODE("Add", ["x", "z"], ["y"])],
        {"x": (T.FLOAT, ["n.1"]), "z": (T.FLOAT, [None])},
        ["y"],
        hints={"n.1": 3, "z[0]": 3},
    )
    assert model.graph.facts.hints == {"n_1": 3, "z_0": 3}
