# SPDX-License-Identifier: Apache-2.0
"""Tensors of an ONNX file: checked when the file is read, decoded when asked for.

A `Tensor` holds the encoded payload (a view of the file, or of an external file) and knows that it
has exactly as many bytes or numbers as the shape needs. `Tensor.array` decodes: without a copy for
aligned raw data, else into a fresh array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.base.errors import ModelError, ParseError
from rlx.frontends.onnx.wire import Data, count_varints, decode_varints

__all__ = [
    "MAX_DENSE_BYTES",
    "MAX_RANK",
    "ElementType",
    "Encoding",
    "SparseTensor",
    "Tensor",
    "make_sparse",
    "make_tensor",
]

MAX_RANK = 64
"""NumPy's limit."""
MAX_DENSE_BYTES = 1 << 28
"""Larger sparse tensors are refused: a file of 100 bytes can claim any dense size."""
_MAX_BYTES = (1 << 63) - 1

Array = npt.NDArray[Any]


class ElementType(IntEnum):
    """The element types of ONNX, by the number that files use."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of `Tensor.array` (`object`, holding `str`, for STRING).

        Raises:
            ModelError: the type is UNDEFINED.
        """
        name = _NUMPY_NAMES.get(self)
        if name is None:
            raise ModelError(
                "element type UNDEFINED has no NumPy dtype; the file has to say the type"
            )
        return _numpy(name)

    @property
    def bits(self) -> int:
        """Bits of one element in raw data; 0 for STRING and UNDEFINED."""
        if self in (ElementType.STRING, ElementType.UNDEFINED):
            return 0
        return _PACKED_BITS.get(self) or self.numpy.itemsize * 8


# Of NumPy or of ml_dtypes, which adds its names to NumPy.
_NUMPY_NAMES = {
    ElementType.FLOAT: "float32",
    ElementType.UINT8: "uint8",
    ElementType.INT8: "int8",
    ElementType.UINT16: "uint16",
    ElementType.INT16: "int16",
    ElementType.INT32: "int32",
    ElementType.INT64: "int64",
    ElementType.STRING: "object",
    ElementType.BOOL: "bool",
    ElementType.FLOAT16: "float16",
    ElementType.DOUBLE: "float64",
    ElementType.UINT32: "uint32",
    ElementType.UINT64: "uint64",
    ElementType.COMPLEX64: "complex64",
    ElementType.COMPLEX128: "complex128",
    ElementType.BFLOAT16: "bfloat16",
    ElementType.FLOAT8E4M3FN: "float8_e4m3fn",
    ElementType.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    ElementType.FLOAT8E5M2: "float8_e5m2",
    ElementType.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    ElementType.UINT4: "uint4",
    ElementType.INT4: "int4",
    ElementType.FLOAT4E2M1: "float4_e2m1fn",
    ElementType.FLOAT8E8M0: "float8_e8m0fnu",
    ElementType.UINT2: "uint2",
    ElementType.INT2: "int2",
    ElementType.FLOAT6E2M3: "float6_e2m3fn",
    ElementType.FLOAT6E3M2: "float6_e3m2fn",
}


@cache
def _numpy(name: str) -> np.dtype[Any]:
    import ml_dtypes  # 5 ms, only needed for types that NumPy lacks

    return np.dtype(getattr(ml_dtypes, name, name))


# Types whose elements share bytes in raw data.
_PACKED_BITS = {
    ElementType.UINT4: 4,
    ElementType.INT4: 4,
    ElementType.FLOAT4E2M1: 4,
    ElementType.UINT2: 2,
    ElementType.INT2: 2,
    ElementType.FLOAT6E2M3: 6,
    ElementType.FLOAT6E3M2: 6,
}


class Encoding(Enum):
    """Which field of the file holds the elements."""

    RAW = "raw_data"
    EXTERNAL = "external_data"
    FLOATS = "float_data"
    DOUBLES = "double_data"
    INT32S = "int32_data"
    INT64S = "int64_data"
    UINT64S = "uint64_data"
    STRINGS = "string_data"


_VARINTS = (Encoding.INT32S, Encoding.INT64S, Encoding.UINT64S)

_TYPED_FIELD = {
    ElementType.FLOAT: Encoding.FLOATS,
    ElementType.COMPLEX64: Encoding.FLOATS,
    ElementType.DOUBLE: Encoding.DOUBLES,
    ElementType.COMPLEX128: Encoding.DOUBLES,
    ElementType.INT64: Encoding.INT64S,
    ElementType.UINT32: Encoding.UINT64S,
    ElementType.UINT64: Encoding.UINT64S,
    ElementType.STRING: Encoding.STRINGS,
}  # everything else: int32_data


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A constant of the file.

    Attributes:
        name: may be empty in attributes.
        dtype: never UNDEFINED.
        shape: extents, all >= 0; ``()`` for a scalar.
        nbytes: size of the elements in row-major raw form (two 4-bit elements to a byte). For
            strings, the sum of their lengths.
        encoding: where the elements stand in the file.
        payload: the encoded elements.
    """

    name: str
    dtype: ElementType
    shape: tuple[int, ...]
    nbytes: int
    encoding: Encoding
    payload: Data | bytearray | tuple[bytes, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype.name}, {self.shape}, {self.encoding.value})"

    def array(self) -> Array:
        """Return the elements as a read-only array of ``shape`` and ``dtype.numpy``.

        Aligned raw data is not copied: the array is a view of the file. Types of less than 8 bits
        take one byte an element.

        Raises:
            ParseError: an element is out of range for the type, or a string is not UTF-8.
        """
        try:
            flat = self._flat()
        except (ParseError, UnicodeDecodeError) as error:
            raise ParseError(
                f"{_subject(self.name)} {self.dtype.name}{list(self.shape)}: {error}"
            ) from None
        result = flat.reshape(self.shape)
        result.flags.writeable = False
        return result

    def _flat(self) -> Array:
        if isinstance(self.payload, tuple):
            strings = np.empty(len(self.payload), object)
            for index, text in enumerate(self.payload):
                strings[index] = text.decode("utf-8")
            return strings
        if self.encoding in _VARINTS:
            return self._from_varints(self.payload)
        if self.dtype in _PACKED_BITS:
            return _unpack(self.payload, self.dtype, self.size)
        if self.dtype is ElementType.BOOL:
            data = np.frombuffer(self.payload, np.uint8)
            if len(data) and data.max() > 1:
                raise ParseError(f"a bool is stored as {data.max()}; only 0 and 1 are allowed")
        flat = np.frombuffer(self.payload, self.dtype.numpy)
        return flat if flat.flags.aligned else flat.copy()

    def _from_varints(self, payload: Data | bytearray) -> Array:
        """Decode int32_data, int64_data or uint64_data, each number checked against its range."""
        low, high, unit = _number_range(self.dtype, self.encoding)
        out = np.empty(_field_count(self.dtype, self.size), unit)
        at = 0
        for block in decode_varints(payload):
            values = block if self.encoding is Encoding.UINT64S else block.view(np.int64)
            if self.encoding is Encoding.INT32S:
                values = values.astype(np.int32)  # an int32 is the low half of its varint
            if values.min() < low or values.max() > high:
                worst = values.min() if values.min() < low else values.max()
                raise ParseError(f"{self.encoding.value} holds {worst}, outside [{low}, {high}]")
            out[at : at + len(values)] = values
            at += len(values)
        if self.dtype in _PACKED_BITS and _PACKED_BITS[self.dtype] != 6:
            return _unpack(out.data, self.dtype, self.size)
        return out if out.dtype == self.dtype.numpy else out.view(self.dtype.numpy)


def _number_range(dtype: ElementType, encoding: Encoding) -> tuple[int, int, np.dtype[Any]]:
    """What one number of a varint field may be, and the dtype that holds its bits."""
    if dtype in _PACKED_BITS:
        return 0, 63 if _PACKED_BITS[dtype] == 6 else 255, np.dtype(np.uint8)
    unit = dtype.numpy
    if dtype is ElementType.BOOL:
        return 0, 1, unit
    if unit.kind not in "iu":  # a float, stored as its bits
        unit = np.dtype(f"u{unit.itemsize}")
    limits = np.iinfo(unit)
    if encoding is Encoding.UINT64S:
        return 0, int(limits.max), unit
    return int(limits.min), int(limits.max), unit


def _field_count(dtype: ElementType, size: int) -> int:
    """How many numbers a typed field needs for ``size`` elements."""
    bits = _PACKED_BITS.get(dtype)
    if bits in (2, 4):
        return -(-size * bits // 8)
    return size * 2 if dtype in (ElementType.COMPLEX64, ElementType.COMPLEX128) else size


def _unpack(payload: Data | bytearray, dtype: ElementType, size: int) -> Array:
    """Spread elements of 2, 4 or 6 bits, lowest bits first, to one byte each."""
    data = np.frombuffer(payload, np.uint8)
    bits = _PACKED_BITS[dtype]
    if bits == 6:
        whole = np.zeros((-(-size // 4), 3), np.uint8)
        whole.reshape(-1)[: len(data)] = data
        a, b, c = whole[:, 0], whole[:, 1], whole[:, 2]
        parts = [a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2]
    else:
        mask = (1 << bits) - 1
        parts = [data >> shift & mask for shift in range(0, 8, bits)]
    return np.stack(parts, axis=1).reshape(-1)[:size].view(dtype.numpy)


def _subject(name: str) -> str:
    return f"tensor {name[:100]!r}" if name else "a tensor without a name"


def make_tensor(
    name: str,
    data_type: int,
    dims: Sequence[int],
    fields: dict[Encoding, Sequence[Data | bytearray]],
    external: Callable[[int], memoryview] | None = None,
) -> Tensor:
    """Return a tensor whose payload is known to fit its shape.

    Args:
        name: its name, may be empty.
        data_type: the element type's number.
        dims: extents as the file has them.
        fields: the payload pieces of each data field that is present.
        external: reads external data, given the number of bytes; then ``fields`` must be empty.

    Raises:
        ModelError: an unknown type, an impossible shape, more than one data field, the field of
            another type, or too few or too many elements.
    """
    dtype = _element_type(name, data_type)
    shape = tuple(dims)
    nbytes = _checked_nbytes(name, dtype, shape)
    subject = f"{_subject(name)} {dtype.name}{list(shape)}"
    if len(fields) > 1 or (external is not None and fields):
        held = [encoding.value for encoding in fields] + ["external_data"] * (external is not None)
        raise ParseError(f"{subject} has its elements in more than one place: {', '.join(held)}")
    if external is not None:
        if dtype is ElementType.STRING:
            raise ParseError(f"{subject}: strings cannot be external data")
        return Tensor(name, dtype, shape, nbytes, Encoding.EXTERNAL, external(nbytes))
    size = math.prod(shape)
    typed = _TYPED_FIELD.get(dtype, Encoding.INT32S)
    encoding, pieces = next(iter(fields.items()), (typed, ()))
    if encoding is Encoding.STRINGS and dtype is ElementType.STRING:
        strings = tuple(bytes(piece) for piece in pieces)
        _expect(subject, encoding, len(strings), size, "strings")
        return Tensor(name, dtype, shape, sum(map(len, strings)), encoding, strings)
    if encoding is not typed and (encoding is not Encoding.RAW or dtype is ElementType.STRING):
        raise ParseError(
            f"{subject} has its elements in {encoding.value}; it must use {typed.value}"
        )
    payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if encoding in _VARINTS:
        _expect(subject, encoding, count_varints(payload), _field_count(dtype, size), "numbers")
    else:
        _expect(subject, encoding, len(payload), nbytes, "bytes")
    return Tensor(name, dtype, shape, nbytes, encoding, payload)


def _expect(subject: str, encoding: Encoding, found: int, expected: int, unit: str) -> None:
    if found != expected:
        raise ParseError(
            f"{subject} needs {expected} {unit}, but {encoding.value} has {found}; "
            f"the tensor is {'cut off' if found < expected else 'larger than its shape says'}"
        )


def _element_type(name: str, data_type: int) -> ElementType:
    known = _BY_NUMBER.get(data_type)
    if known is None:
        raise ModelError(f"{_subject(name)} has the unknown element type {data_type}")
    if known is ElementType.UNDEFINED:
        raise ParseError(f"{_subject(name)} does not say its element type")
    return known


_BY_NUMBER = {int(known): known for known in ElementType}


def _checked_nbytes(name: str, dtype: ElementType, shape: tuple[int, ...]) -> int:
    """Return the raw size in bytes, having checked everything that NumPy would choke on."""
    if len(shape) > MAX_RANK:
        raise ParseError(
            f"{_subject(name)} has {len(shape)} dimensions; at most {MAX_RANK} are possible"
        )
    if shape and min(shape) < 0:
        raise ParseError(f"{_subject(name)} has the negative extent {min(shape)} in {list(shape)}")
    # Zero extents are left out: NumPy wants the other strides of an empty array to fit as well.
    bits = dtype.bits or 64  # a string takes a pointer
    if math.prod(extent for extent in shape if extent) * max(bits, 8) // 8 > _MAX_BYTES:
        raise ParseError(
            f"{_subject(name)} {dtype.name}{list(shape)} would take more than 2^63 bytes"
        )
    return -(-math.prod(shape) * dtype.bits // 8)


@dataclass(frozen=True, slots=True, eq=False)
class SparseTensor:
    """A tensor given by the values of some positions; the others are zero.

    Attributes:
        values: [nnz]; its name is the name of the sparse tensor.
        indices: INT64 [nnz], flat positions, or [nnz, rank].
        shape: the dense shape.
    """

    values: Tensor
    indices: Tensor
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the dense value."""
        return self.values.name

    @property
    def dtype(self) -> ElementType:
        """The element type."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Size of the dense form, in bytes."""
        return _checked_nbytes(self.name, self.dtype, self.shape)

    def array(self) -> Array:
        """Return the dense elements, read-only.

        Raises:
            ParseError: an index is outside the shape, or the indices are not in ascending order.
            ModelError: the dense form is larger than `MAX_DENSE_BYTES`.
        """
        result = np.zeros(self.shape, self.dtype.numpy)
        flat = self.indices.array()
        if flat.ndim == 2:
            if len(flat) and (flat.min() < 0 or bool((flat >= np.array(self.shape)).any())):
                raise ParseError(
                    f"sparse {_subject(self.name)} has an index outside {list(self.shape)}"
                )
            strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
            flat = flat @ np.array(strides, np.int64)
        if len(flat) and (
            flat[0] < 0 or flat[-1] >= result.size or bool((np.diff(flat) <= 0).any())
        ):
            raise ParseError(
                f"the indices of sparse {_subject(self.name)} are not ascending positions "
                f"inside {list(self.shape)}"
            )
        result.reshape(-1)[flat] = self.values.array()
        result.flags.writeable = False
        return result


def make_sparse(values: Tensor, indices: Tensor, dims: Sequence[int]) -> SparseTensor:
    """Return a sparse tensor whose parts fit each other.

    Raises:
        ModelError: strings, wrong ranks, counts or index types, or too large when dense.
    """
    shape = tuple(dims)
    subject = f"sparse {_subject(values.name)}"
    if values.dtype is ElementType.STRING:
        raise ModelError(f"{subject} has strings, which is not supported; store it dense")
    if len(values.shape) != 1 or indices.dtype is not ElementType.INT64:
        raise ParseError(f"{subject}: values must have one dimension, indices must be INT64")
    count = values.shape[0]
    if indices.shape not in ((count,), (count, len(shape))):
        raise ParseError(
            f"{subject}: indices have shape {list(indices.shape)}, "
            f"not [{count}] or [{count}, {len(shape)}]"
        )
    _checked_nbytes(values.name, values.dtype, shape)
    dense = math.prod(shape) * values.dtype.numpy.itemsize
    if dense > MAX_DENSE_BYTES:
        raise ModelError(
            f"{subject} of shape {list(shape)} takes {dense} bytes when dense, more than "
            f"{MAX_DENSE_BYTES}; store it dense or as external data"
        )
    return SparseTensor(values, indices, shape)
