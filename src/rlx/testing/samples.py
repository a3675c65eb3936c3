# SPDX-License-Identifier: Apache-2.0
"""Data for the conformance suite: which samples an operator has, and arrays for their operands."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.ir.op import Op
from rlx.ops.spec import ElementwiseOp, Operand, Sample

__all__ = ["make_array", "samples_of", "seed_of"]

_SPECIAL_FLOATS = (
    float("nan"),
    float("inf"),
    float("-inf"),
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -2.5,
    3.5,
    1e-45,  # a denormal, or zero, in every float dtype
    6e-8,  # a denormal of f16
    1e-39,  # a denormal of f32 and bf16
    60000.0,
    -1e30,
    255.5,
    -129.0,
)


def samples_of(cls: type[Op]) -> tuple[Sample, ...]:
    """Return what an operator declares, or the default of an elementwise one.

    The default: equal shapes of normal and of special values, broadcasting along a row, a column and from a single
    element, and no elements at all.
    """
    declared: Sequence[Sample] = getattr(cls, "samples", ())
    if declared or not issubclass(cls, ElementwiseOp):
        return tuple(declared)
    arity = cls.decl.arity

    def each(fill: str, *shapes: tuple[int, ...]) -> Sample:
        chosen = [shapes[min(i, len(shapes) - 1)] for i in range(arity)]
        return Sample(tuple(Operand(shape, fill=fill) for shape in chosen))

    found = [each("normal", (3, 17)), each("special", (3, 17)), each("normal", (2, 0, 3))]
    if arity > 1:
        found += [
            each("normal", (3, 17), (17,)),
            each("normal", (3, 1), (1, 17), ()),
            each("special", (), (9,)),
        ]
    return tuple(found)


def seed_of(*parts: object) -> int:
    """Return a number that is the same for the same parts in every process."""
    return zlib.crc32(repr(parts).encode())


def make_array(
    operand: Operand, dtype: DType, shape: tuple[int, ...], seed: int, limit: int = 0
) -> Array:
    """Return data for an operand.

    Args:
        operand: what it wants.
        dtype: of the result.
        shape: of the result.
        seed: equal seeds give equal data.
        limit: bound of indices, the operand's own if 0.
    """
    rng = np.random.default_rng(seed)
    if operand.fill == "index":
        bound = limit or operand.limit
        return rng.integers(-bound, bound, shape).astype(dtype.numpy)
    if operand.fill == "bits":
        low, high = _range(dtype)
        return rng.integers(low, high, shape, dtype.numpy, endpoint=True)
    if operand.fill == "bool" or dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(dtype.numpy)
    if dtype.is_integer:
        return _integers(operand.fill, dtype, shape, rng)
    values = np.asarray(_FLOATS[operand.fill](rng, shape))
    if dtype.is_complex:
        real, values = values, np.zeros(shape, np.complex128)
        values.real, values.imag = real, _FLOATS[operand.fill](rng, shape)
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(dtype.numpy)


def _special(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    values = np.resize(np.array(_SPECIAL_FLOATS), max(count, len(_SPECIAL_FLOATS)))
    return rng.permutation(values)[:count].reshape(shape)


def _nonzero(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(0.25, 3, shape) * rng.choice([-1.0, 1.0], shape)


_FLOATS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "positive": lambda rng, shape: rng.uniform(1.0, 4.0, shape),
    "unit": lambda rng, shape: rng.uniform(-0.999, 0.999, shape),
    "special": _special,
    "nonzero": _nonzero,
    "sorted": lambda rng, shape: np.sort(rng.standard_normal(shape), axis=-1),
}


def _integers(fill: str, dtype: DType, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    low, high = _range(dtype)
    count = int(np.prod(shape))
    if fill == "special":
        edges = [
            v
            for v in (low, low + 1, high, high - 1, 0, 1, -1, 2, 7, 8, 31, 32, 63, 64)
            if low <= v <= high
        ]
        values = rng.permutation(np.resize(np.array(edges, object), max(count, len(edges))))[
            :count
        ].reshape(shape)
    elif fill == "unit":
        values = rng.integers(max(low, -1), 2, shape)
    elif fill == "positive":
        values = rng.integers(1, 1 + min(high, 8), shape)
    else:
        values = rng.integers(max(low, -20), min(high, 20), shape, endpoint=True)
    array = np.asarray(values).astype(dtype.numpy)
    if fill == "nonzero":
        array = np.where(array == 0, np.ones((), dtype.numpy), array)
    if fill == "sorted":
        array = np.sort(array, axis=-1)
    return array


def _range(dtype: DType) -> tuple[int, int]:
    if dtype in (DType.I4, DType.U4):
        return (-8, 7) if dtype is DType.I4 else (0, 15)
    info = np.iinfo(dtype.numpy)
    return int(info.min), int(info.max)
