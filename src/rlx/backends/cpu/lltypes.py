# SPDX-License-Identifier: Apache-2.0
"""LLVM types and constants as text: interned `Type` objects and exact literals."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache

from rlx.base.dtypes import DType
from rlx.base.errors import BuildError

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "I1",
    "I8",
    "I16",
    "I32",
    "I64",
    "I128",
    "PTR",
    "VOID",
    "Type",
    "int_type",
    "literal",
    "scalar_type",
    "storage_type",
    "vec",
]

_BITS = {
    "void": 0,
    "half": 16,
    "bfloat": 16,
    "float": 32,
    "double": 64,
    "ptr": 64,
}
_MANGLED = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64", "ptr": "p0"}
_FLOATS = frozenset(("half", "bfloat", "float", "double"))


@dataclass(frozen=True, eq=False)
class Type:
    """A first-class LLVM type: a scalar (`lanes == 0`) or a vector of `lanes` scalars.

    Objects are interned (made by `vec` and the constants of this module), so `is` compares types.

    Attributes:
        elem: LLVM name of the scalar, such as `float` or `i32`.
        lanes: number of lanes of a vector, 0 for a scalar.
        text: how LLVM spells the type.
        mangled: its part in the names of overloaded intrinsics, such as `v16f32`.
        bits: bits of one element.
    """

    elem: str
    lanes: int
    text: str
    mangled: str
    bits: int

    @property
    def is_float(self) -> bool:
        """True for half, bfloat, float, double and vectors of them."""
        return self.elem in _FLOATS

    @property
    def is_int(self) -> bool:
        """True for integers (i1 included) and vectors of them."""
        return self.elem[0] == "i"

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory, which is also the alignment that loads and stores assume."""
        return (self.bits + 7) // 8

    @property
    def scalar(self) -> Type:
        """The element type."""
        return vec(self.elem, 0)

    def with_lanes(self, lanes: int) -> Type:
        """Return the type with the same element and another lane count (0 = scalar)."""
        return vec(self.elem, lanes)

    def with_elem(self, elem: Type) -> Type:
        """Return the type with the same lane count and another element."""
        return vec(elem.elem, self.lanes)

    def __repr__(self) -> str:
        return self.text


@cache
def _interned(elem: str, lanes: int) -> Type:
    bits = int(elem[1:]) if elem[0] == "i" and elem[1:].isdecimal() else _BITS.get(elem)
    if bits is None:
        raise BuildError(f"no LLVM type named {elem!r}; known are iN, {', '.join(_BITS)}")
    name = _MANGLED.get(elem, elem)
    if lanes == 0:
        return Type(elem, 0, elem, name, bits)
    return Type(elem, lanes, f"<{lanes} x {elem}>", f"v{lanes}{name}", bits)


def vec(elem: Type | str, lanes: int) -> Type:
    """Return the vector type of `lanes` elements (0 = the scalar itself)."""
    return _interned(elem if isinstance(elem, str) else elem.elem, lanes)


VOID = vec("void", 0)
PTR = vec("ptr", 0)
I1, I8, I16, I32, I64, I128 = (vec(f"i{n}", 0) for n in (1, 8, 16, 32, 64, 128))
F16, BF16, F32, F64 = (vec(n, 0) for n in ("half", "bfloat", "float", "double"))

_SCALAR = {
    DType.F32: F32,
    DType.F64: F64,
    DType.F16: F32,
    DType.BF16: F32,
    DType.F8E4M3: F32,
    DType.F8E5M2: F32,
    DType.BOOL: I1,
}
_BY_SIZE = {1: I8, 2: I16, 4: I32, 8: I64}


def int_type(bits: int, lanes: int = 0) -> Type:
    """Return the integer type of that width."""
    return vec(f"i{bits}", lanes)


def scalar_type(dtype: DType) -> Type:
    """Return the type values of `dtype` have in registers (narrow floats are f32, bool is i1).

    Raises:
        BuildError: complex dtypes have no register type.
    """
    if dtype in _SCALAR:
        return _SCALAR[dtype]
    if dtype.is_complex:
        raise BuildError(
            f"{dtype} has no single register type; split it into real and imaginary parts"
        )
    return _BY_SIZE[dtype.itemsize]


def storage_type(dtype: DType) -> Type:
    """Return the type elements of `dtype` have in memory: f16 and bf16 are i16, fp8, bool and 4-bit are i8.

    Raises:
        BuildError: complex dtypes have no single storage type.
    """
    if dtype in (DType.F32, DType.F64):
        return _SCALAR[dtype]
    if dtype.is_complex:
        raise BuildError(f"{dtype} has no single storage type; load its two parts")
    return _BY_SIZE[dtype.itemsize]


def _bits_of(number: float, elem: str) -> str:
    if elem == "double":
        return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
    if elem == "float":
        # LLVM spells a float by the bits of the double of the same value.
        rounded = _round_to("<f", number)
        return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
    if elem == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', _round_to('<e', number)))[0]:04X}"
    raise BuildError(
        f"no literal of type {elem}; make it in f32 and convert, or give its bits as an integer"
    )


def _round_to(code: str, number: float) -> float:
    try:
        return struct.unpack(code, struct.pack(code, number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def literal(number: float, kind: Type) -> str:
    """Return the exact text of a constant: floats as bit patterns (NaN, inf and -0 included), vectors splatted.

    Raises:
        BuildError: the number is not representable as an integer of that width.
    """
    if kind.is_float:
        text = _bits_of(float(number), kind.elem)
    elif kind is PTR and number == 0:
        text = "null"
    else:
        text = _integer(number, kind)
    return f"splat ({kind.elem} {text})" if kind.lanes else text


def _integer(number: float, kind: Type) -> str:
    whole = int(number)
    if not kind.is_int or whole != number:
        raise BuildError(f"{number!r} is not a constant of type {kind}")
    if not -(1 << (kind.bits - 1)) <= whole < (1 << kind.bits):
        raise BuildError(f"constant {whole} does not fit {kind.elem}")
    if kind.bits == 1:
        return "true" if whole else "false"
    return str(whole)
