# SPDX-License-Identifier: Apache-2.0
"""The dtype table and the promotion lattice."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UsageError

__all__ = ["FLOATS", "INTEGERS", "NUMERIC", "SIGNED", "UNSIGNED", "DType", "promote"]


class DType(Enum):
    """An element type. The value is its name in text forms.

    `f8e4m3`, `f8e5m2`, `i4` and `u4` are storage types: they may be cast, moved and (de)quantised, nothing else.
    """

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U16 = "u16"
    U32 = "u32"
    U64 = "u64"
    BOOL = "bool"
    C64 = "c64"
    C128 = "c128"
    F8E4M3 = "f8e4m3"
    F8E5M2 = "f8e5m2"
    I4 = "i4"
    U4 = "u4"

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory (4-bit types occupy one byte each once unpacked)."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        """True for f16, bf16, f32, f64 and the fp8 storage types."""
        return self in _ALL_FLOATS

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers, not for bool."""
        return self in INTEGERS or self in (DType.I4, DType.U4)

    @property
    def is_signed(self) -> bool:
        """True for signed integers."""
        return self in SIGNED or self is DType.I4

    @property
    def is_complex(self) -> bool:
        """True for c64 and c128."""
        return self in (DType.C64, DType.C128)

    @property
    def is_narrow_float(self) -> bool:
        """True for floats that are computed in f32 and rounded once per operator."""
        return self in (DType.F16, DType.BF16, DType.F8E4M3, DType.F8E5M2)

    @property
    def compute(self) -> DType:
        """The dtype an operator on this dtype computes in: f32 for narrow floats, else itself."""
        return DType.F32 if self.is_narrow_float else self

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (from ml_dtypes for bf16, fp8 and 4-bit integers)."""
        return _numpy(self)

    @classmethod
    def of(cls, dtype: Any) -> DType:
        """Return the DType for a DType, its name, or anything `numpy.dtype` accepts.

        Raises:
            UsageError: rlx has no such dtype.
        """
        if isinstance(dtype, DType):
            return dtype
        if isinstance(dtype, str) and dtype in _BY_NAME:
            return _BY_NAME[dtype]
        try:
            name = np.dtype(dtype).name
        except TypeError as error:
            hint = did_you_mean(str(dtype), _BY_NAME)
            raise UsageError(f"unknown dtype {dtype!r}.{hint}") from error
        if name not in _BY_NUMPY_NAME:
            known = ", ".join(_BY_NUMPY_NAME)
            raise UsageError(f"dtype {name!r} is not supported; supported are {known}")
        return _BY_NUMPY_NAME[name]


_BY_NAME = {d.value: d for d in DType}
_BY_NUMPY_NAME = {
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "float32": DType.F32,
    "float64": DType.F64,
    "int8": DType.I8,
    "int16": DType.I16,
    "int32": DType.I32,
    "int64": DType.I64,
    "uint8": DType.U8,
    "uint16": DType.U16,
    "uint32": DType.U32,
    "uint64": DType.U64,
    "bool": DType.BOOL,
    "complex64": DType.C64,
    "complex128": DType.C128,
    "float8_e4m3fn": DType.F8E4M3,
    "float8_e5m2": DType.F8E5M2,
    "int4": DType.I4,
    "uint4": DType.U4,
}
_NUMPY_NAME = {d: name for name, d in _BY_NUMPY_NAME.items()}
_ITEMSIZE = {
    DType.F16: 2,
    DType.BF16: 2,
    DType.F32: 4,
    DType.F64: 8,
    DType.I8: 1,
    DType.I16: 2,
    DType.I32: 4,
    DType.I64: 8,
    DType.U8: 1,
    DType.U16: 2,
    DType.U32: 4,
    DType.U64: 8,
    DType.BOOL: 1,
    DType.C64: 8,
    DType.C128: 16,
    DType.F8E4M3: 1,
    DType.F8E5M2: 1,
    DType.I4: 1,
    DType.U4: 1,
}

SIGNED = frozenset({DType.I8, DType.I16, DType.I32, DType.I64})
UNSIGNED = frozenset({DType.U8, DType.U16, DType.U32, DType.U64})
INTEGERS = SIGNED | UNSIGNED
FLOATS = frozenset({DType.F16, DType.BF16, DType.F32, DType.F64})
NUMERIC = INTEGERS | FLOATS
_ALL_FLOATS = FLOATS | {DType.F8E4M3, DType.F8E5M2}


@cache
def _numpy(dtype: DType) -> np.dtype[Any]:
    name = _NUMPY_NAME[dtype]
    if hasattr(np, name):
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


_INT_RANK = {1: 0, 2: 1, 4: 2, 8: 3}
_SIGNED_OF_SIZE = {1: DType.I8, 2: DType.I16, 4: DType.I32, 8: DType.I64}


def promote(a: DType, b: DType) -> DType:
    """Return the smallest dtype both convert to without losing range.

    bool < integers < floats < complex. f16 with bf16 gives f32, a 64-bit integer with a float gives f64, other
    integers with f16 or bf16 give f32; u64 with a signed integer gives f64.
    """
    if a is b:
        return a
    if a is DType.BOOL:
        return b
    if b is DType.BOOL:
        return a
    if a.is_complex or b.is_complex:
        wide = DType.C128 in (a, b) or DType.F64 in (a, b)
        return DType.C128 if wide else DType.C64
    if a.is_float and b.is_float:
        return DType.F64 if DType.F64 in (a, b) else DType.F32
    if a.is_float or b.is_float:
        real, whole = (a, b) if a.is_float else (b, a)
        return DType.F64 if whole.itemsize == 8 or real is DType.F64 else DType.F32
    return _promote_integers(a, b)


def _promote_integers(a: DType, b: DType) -> DType:
    if a.is_signed == b.is_signed:
        return a if a.itemsize >= b.itemsize else b
    signed, unsigned = (a, b) if a.is_signed else (b, a)
    if signed.itemsize > unsigned.itemsize:
        return signed
    return _SIGNED_OF_SIZE.get(unsigned.itemsize * 2, DType.F64)
