# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out through DLPack without copies, in the dtypes too that NumPy does not exchange.

NumPy takes and gives no bf16 and no fp8. Both directions go through the unsigned integer of the same size: the dtype in
the structure behind a capsule is one word, which is rewritten before the capsule is handed on. Memory is owned as ever
(by the producer, until its deleter is called), because NumPy does all the rest.

Layout: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array

__all__ = ["dlpack", "from_dlpack"]

_UNSIGNED = 1
_CODES = {DType.BF16: 4, DType.F8E4M3: 10, DType.F8E5M2: 12}
_DTYPES = {(code, 8 * dtype.itemsize): dtype for dtype, code in _CODES.items()}
_CPU = 1
_HEADERS = {b"dltensor": 0, b"dltensor_versioned": 32}
"""Name of a capsule -> bytes before its DLTensor."""
_DTYPE_OFFSET = 20
"""Of the DLDataType {u8 code, u8 bits, u16 lanes} in a DLTensor."""

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


def from_dlpack(given: Any) -> Array:
    """Return an array over the memory of an object with `__dlpack__`.

    Raises:
        UsageError: the memory is not the host's, or the dtype is none of rlx's.
        BufferError: the producer does not export this object.
    """
    device = given.__dlpack_device__()[0]
    if device != _CPU:
        raise UsageError(
            f"an array on DLPack device type {int(device)} is not in host memory; copy it there first"
        )
    try:
        return np.from_dlpack(given)
    except (RuntimeError, BufferError):  # a dtype NumPy does not know; the latter since NumPy 2.5
        return _reinterpreted(given)


def _reinterpreted(given: Any) -> Array:
    try:
        capsule = given.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before version 1
        capsule = given.__dlpack__()
    field = _dtype_field(capsule)
    code, bits, lanes = field[0], field[1], field[2] | field[3] << 8
    dtype = _DTYPES.get((code, bits)) if lanes == 1 else None
    if dtype is None:
        raise UsageError(
            f"an array of DLPack dtype code {code} with {bits} bits and {lanes} lanes is not supported"
        )
    field[0] = _UNSIGNED
    return np.from_dlpack(_Exported(capsule)).view(dtype.numpy)


class _Exported:
    """A capsule on its way to a consumer."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


def dlpack(array: Array) -> Any:
    """Return what other libraries' `from_dlpack` takes without a copy.

    NumPy arrays are that already, except in bf16 and fp8 (dtypes of `ml_dtypes`), for which this is.

    Example:
        >>> import ml_dtypes, numpy as np, rlx
        >>> y = np.ones(3, ml_dtypes.bfloat16)  # then: torch.from_dlpack(rlx.dlpack(y))
        >>> rlx.dlpack(y).__dlpack_device__()
        (1, 0)

    Raises:
        UsageError: DLPack has no such dtype.
    """
    dtype = DType.of(array.dtype)
    if dtype in (DType.I4, DType.U4):
        raise UsageError(
            f"DLPack exchanges {dtype} only packed, two to a byte; hand it over as int8 with .astype('int8')"
        )
    return _Reinterpreted(array, _CODES[dtype]) if dtype in _CODES else array


class _Reinterpreted:
    """Exports an array under another dtype code than that of its integers."""

    def __init__(self, array: Array, code: int) -> None:
        self._integers = array.view(f"u{array.dtype.itemsize}")
        self._code = code

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._integers.__dlpack__(**options)
        _dtype_field(capsule)[0] = self._code
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return cast("tuple[int, int]", self._integers.__dlpack_device__())


def _dtype_field(capsule: Any) -> Any:
    """Return the four bytes of the dtype behind an unconsumed capsule, to read and write."""
    for name, header in _HEADERS.items():
        if _is_valid(capsule, name):
            address = _pointer(capsule, name) + header + _DTYPE_OFFSET
            return (ctypes.c_uint8 * 4).from_address(address)
    raise UsageError("the object's __dlpack__ gave no DLPack capsule")
