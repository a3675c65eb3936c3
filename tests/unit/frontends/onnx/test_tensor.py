# SPDX-License-Identifier: Apache-2.0
# pyright: basic
from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rlx.base.errors import ModelError, ParseError
from rlx.frontends.onnx.model import Model, Tensor, load_model
from rlx.frontends.onnx.tensor import ElementType, Encoding

NUMERIC = [t for t in ElementType if t not in (ElementType.UNDEFINED, ElementType.STRING)]


def bytes_of(proto: onnx.TensorProto) -> bytes:
    """A model whose only content is the tensor ``w``."""
    proto.name = "w"
    info = onnx.ValueInfoProto(name="w")
    graph = onnx.GraphProto(name="g", initializer=[proto], output=[info])
    model = onnx.ModelProto(ir_version=10, graph=graph)
    model.opset_import.add(version=17)
    return model.SerializeToString()


def load(proto: onnx.TensorProto):
    return only(load_model(bytes_of(proto)))


def only(model: Model) -> Tensor:
    """The tensor of a model from `bytes_of`."""
    tensor = model.graph.initializers["w"]
    assert isinstance(tensor, Tensor)
    return tensor


def same_bits(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


def random_values(dtype: ElementType, count: int) -> np.ndarray:
    bits = np.random.default_rng(dtype).integers(0, 256, count * dtype.numpy.itemsize, np.uint8)
    if dtype.bits < 8:
        bits &= (1 << dtype.bits) - 1
    if dtype is ElementType.BOOL:
        bits &= 1
    return bits.view(dtype.numpy)


def test_numbers_and_names_are_those_of_onnx():
    assert {t.name: int(t) for t in ElementType} == dict(TensorProto.DataType.items())
    for dtype in NUMERIC:
        assert dtype.numpy == helper.tensor_dtype_to_np_dtype(dtype), dtype


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 3), (4,), (7,)], ids=str)
def test_raw_data_equals_onnx(dtype, shape):
    values = random_values(dtype, int(np.prod(shape))).reshape(shape)
    proto = numpy_helper.from_array(values)
    tensor = load(proto)
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == (shape, dtype, len(proto.raw_data))
    assert same_bits(tensor.array(), numpy_helper.to_array(proto))
    assert same_bits(tensor.array(), values)
    assert not tensor.array().flags.writeable


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(3, 5), (), (7,)], ids=str)
def test_typed_fields_equal_onnx(dtype, shape):
    values = random_values(dtype, int(np.prod(shape))).reshape(shape)
    if dtype.bits < 8 and dtype.bits != 6:
        raw = numpy_helper.from_array(values).raw_data
        proto = TensorProto(data_type=dtype, dims=shape, int32_data=list(raw))
    elif (
        dtype.numpy.kind in "iuf" and dtype.numpy.isbuiltin == 1 and dtype.name != "FLOAT16"
    ) or dtype.numpy.kind == "c":
        proto = helper.make_tensor("w", dtype, shape, values.reshape(-1).tolist())
    else:
        bits = values.reshape(-1).view(f"u{values.itemsize}")
        proto = TensorProto(data_type=dtype, dims=shape, int32_data=bits.tolist())
    assert not proto.raw_data
    tensor = load(proto)
    assert tensor.encoding not in (Encoding.RAW, Encoding.EXTERNAL)
    assert same_bits(tensor.array(), numpy_helper.to_array(proto))


def test_negative_and_large_integers():
    for dtype, values in [
        (TensorProto.INT8, [-128, 127, -1]),
        (TensorProto.INT32, [-(1 << 31), (1 << 31) - 1, 0]),
        (TensorProto.INT64, [-(1 << 63), (1 << 63) - 1, -1]),
        (TensorProto.UINT64, [(1 << 64) - 1, 0, 1 << 63]),
        (TensorProto.UINT32, [(1 << 32) - 1, 0, 5]),
    ]:
        assert load(helper.make_tensor("w", dtype, [3], values)).array().tolist() == values


def test_long_typed_array():
    values = np.arange(-100_000, 100_000)
    proto = helper.make_tensor("w", TensorProto.INT64, [200_000], values)
    assert np.array_equal(load(proto).array(), values)


def test_strings():
    proto = TensorProto(data_type=8, dims=[2, 2], string_data=[b"a", b"", "ünï".encode(), b"d"])
    assert load(proto).array().tolist() == [["a", ""], ["ünï", "d"]]
    empty = TensorProto(data_type=8, dims=[2], string_data=[b"", b""])
    assert load(empty).array().tolist() == ["", ""]


def test_string_that_is_not_utf8():
    tensor = load(TensorProto(data_type=8, dims=[1], string_data=[b"\xff"]))
    with pytest.raises(ParseError, match="'w' STRING"):
        tensor.array()


def test_aligned_raw_data_is_not_copied():
    values = np.arange(1000, dtype=np.float32)
    proto = numpy_helper.from_array(values)
    plain = bytes_of(proto)
    for _ in range(4):  # a longer text moves the payload by a byte each
        proto.doc_string += "x"
        data = np.frombuffer(bytes_of(proto), np.uint8)
        array = load_model(memoryview(data.tobytes())).graph.initializers["w"].array()
        assert np.array_equal(array, values)
    tensor = only(load_model(plain))
    assert isinstance(tensor.payload, memoryview)
    array = tensor.array()
    shared = np.shares_memory(array, np.frombuffer(plain, np.uint8))
    address = np.frombuffer(tensor.payload, np.uint8).ctypes.data
    assert shared == (address % 4 == 0)
    assert array.flags.aligned


def test_byte_tensor_shares_the_input():
    data = bytes_of(numpy_helper.from_array(np.arange(200, dtype=np.uint8)))
    array = load_model(data).graph.initializers["w"].array()
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (ElementType.UINT8, [256]),
        (ElementType.UINT8, [-1]),
        (ElementType.INT8, [128]),
        (ElementType.INT16, [1 << 15]),
        (ElementType.BOOL, [2]),
        (ElementType.FLOAT16, [1 << 16]),
        (ElementType.BFLOAT16, [-1]),
        (ElementType.FLOAT8E4M3FN, [256]),
        (ElementType.UINT4, [256]),
        (ElementType.FLOAT6E2M3, [64]),
    ],
    ids=str,
)
def test_number_out_of_range(dtype, numbers):
    tensor = load(TensorProto(data_type=dtype, dims=[1], int32_data=numbers))
    with pytest.raises(ParseError, match="int32_data holds"):
        tensor.array()


def test_uint32_out_of_range():
    tensor = load(TensorProto(data_type=12, dims=[1], uint64_data=[1 << 32]))
    with pytest.raises(ParseError, match="uint64_data holds 4294967296"):
        tensor.array()


def test_raw_bool_other_than_0_and_1():
    tensor = load(TensorProto(data_type=9, dims=[2], raw_data=b"\x01\x02"))
    with pytest.raises(ParseError, match="bool is stored as 2"):
        tensor.array()


MISFITS = [
    (TensorProto(data_type=1, dims=[2], raw_data=bytes(7)), "needs 8 bytes, but raw_data has 7"),
    (TensorProto(data_type=1, dims=[2], raw_data=bytes(9)), "larger than its shape"),
    (TensorProto(data_type=1, dims=[2]), "needs 8 bytes, but float_data has 0"),
    (TensorProto(data_type=1, raw_data=bytes(8)), "needs 4 bytes"),
    (TensorProto(data_type=21, dims=[3], raw_data=bytes(1)), "needs 2 bytes"),
    (TensorProto(data_type=27, dims=[3], raw_data=bytes(2)), "needs 3 bytes"),
    (TensorProto(data_type=7, dims=[3], int64_data=[1, 2]), "needs 3 numbers"),
    (TensorProto(data_type=8, dims=[3], string_data=[b"a"]), "needs 3 strings"),
    (TensorProto(data_type=8, dims=[1], raw_data=b"a"), "must use string_data"),
    (TensorProto(data_type=1, dims=[1], int32_data=[1]), "must use float_data"),
    (TensorProto(data_type=6, dims=[1], int64_data=[1]), "must use int32_data"),
    (TensorProto(data_type=1, dims=[1], float_data=[1], raw_data=bytes(4)), "more than one"),
    (TensorProto(data_type=1, dims=[1 << 62], raw_data=bytes(4)), "more than 2.63 bytes"),
    (TensorProto(data_type=1, dims=[1 << 31, 1 << 31, 2], raw_data=b"a"), "more than 2.63"),
    (TensorProto(data_type=2, dims=[1 << 62], raw_data=bytes(4)), "needs 4611686018427387904"),
    (TensorProto(data_type=1, dims=[0, 1 << 62]), "more than 2.63 bytes"),
    (TensorProto(data_type=8, dims=[1 << 62]), "more than 2.63 bytes"),
    (TensorProto(data_type=1, dims=[1] * 65, raw_data=bytes(4)), "65 dimensions"),
    (TensorProto(data_type=1, dims=[-1], raw_data=bytes(4)), "negative extent -1"),
    (TensorProto(data_type=1, dims=[-2, -2], raw_data=bytes(16)), "negative extent -2"),
    (TensorProto(dims=[1], raw_data=bytes(4)), "does not say its element type"),
    (TensorProto(data_type=99, dims=[1], raw_data=bytes(4)), "unknown element type 99"),
    (TensorProto(data_type=1, segment=TensorProto.Segment(begin=0)), "one segment"),
]


@pytest.mark.parametrize("case", range(len(MISFITS)))
def test_size_does_not_fit(case):
    proto, reason = MISFITS[case]
    with pytest.raises(ModelError, match=reason) as caught:
        load(proto)
    assert "'w'" in str(caught.value)


def sparse(values, indices, dims):
    tensor = onnx.SparseTensorProto(dims=dims)
    tensor.values.CopyFrom(numpy_helper.from_array(np.array(values, np.float32), "w"))
    tensor.indices.CopyFrom(numpy_helper.from_array(np.array(indices, np.int64)))
    graph = onnx.GraphProto(sparse_initializer=[tensor], output=[onnx.ValueInfoProto(name="w")])
    model = onnx.ModelProto(ir_version=10, graph=graph)
    model.opset_import.add(version=17)
    return load_model(model).graph.initializers["w"]


def test_sparse_initializer():
    expected = [[0, 0, 5], [7, 0, 0]]
    assert sparse([5, 7], [2, 3], [2, 3]).array().tolist() == expected
    assert sparse([5, 7], [[0, 2], [1, 0]], [2, 3]).array().tolist() == expected
    assert sparse([], [], [2]).array().tolist() == [0, 0]


@pytest.mark.parametrize("indices", [[2, 6], [-1, 2], [3, 2], [2, 2], [[0, 2], [0, 3]]], ids=str)
def test_sparse_indices(indices):
    tensor = sparse([5, 7], indices, [2, 3])
    with pytest.raises(ParseError, match="'w'"):
        tensor.array()


def test_sparse_bomb():
    with pytest.raises(ModelError, match="when dense"):
        sparse([1], [0], [1 << 40])


def test_ml_dtypes_are_used_for_narrow_types():
    assert ElementType.BFLOAT16.numpy == np.dtype(ml_dtypes.bfloat16)
    assert ElementType.INT4.bits == 4
