# SPDX-License-Identifier: Apache-2.0
"""Interpolation along axes, with ONNX's coordinate rules computed exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np

from rlx.base import numeric
from rlx.base.dims import Dim
from rlx.base.dtypes import NUMERIC, DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["Resize", "scale_ratio"]

Coordinate = Literal[
    "half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"
]
Nearest = Literal["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]

_COORDINATES = (
    "half_pixel",
    "asymmetric",
    "align_corners",
    "pytorch_half_pixel",
    "half_pixel_symmetric",
)
_ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
_HALF = Fraction(1, 2)
# Largest denominator of a ratio that an f32 scale is taken for.
_SMALL = 4096


def scale_ratio(scale: float) -> Fraction:
    """Return the ratio that an f32 scale stands for.

    Scales are stored as f32, so 0.3 arrives as 0.30000001. Where the scale is the f32 nearest to a
    ratio of small numbers that ratio is meant, which makes ties come out as with the exact scale;
    else the f32 itself is.
    """
    exact = Fraction(float(np.float32(scale)))
    small = exact.limit_denominator(_SMALL)
    return small if np.float32(small.numerator / small.denominator) == np.float32(scale) else exact


def _sample(
    shape: tuple[int, ...], sizes: tuple[int, ...], error: str = "", **attributes: Any
) -> Sample:
    dtype = attributes.pop("dtype", None)
    scales = attributes.pop("scales", (None,) * len(sizes))
    return Sample((Operand(shape, dtype),), {"sizes": sizes, "scales": scales, **attributes}, error)


def _samples() -> Iterator[Sample]:
    up, down = ((1, 2, 3, 4), (1, 2, 6, 8)), ((1, 2, 7, 9), (1, 2, 3, 4))
    for coordinate in _COORDINATES:
        yield _sample(*up, mode="linear", coordinate=coordinate)
        yield _sample(*down, mode="linear", coordinate=coordinate)
        yield _sample(
            *down, mode="cubic", coordinate=coordinate, cubic_a=-0.5, exclude_outside=True
        )
        for nearest in _ROUNDINGS:
            yield _sample(
                (1, 1, 4, 5), (1, 1, 7, 3), mode="nearest", coordinate=coordinate, nearest=nearest
            )
    yield _sample(*up, mode="cubic")
    yield _sample(
        *up, mode="nearest", coordinate="asymmetric", nearest="floor", scales=(1.0, 1.0, 2.0, 2.0)
    )
    yield _sample((1, 1, 2, 4), (1, 1, 1, 2), mode="linear", scales=(1.0, 1.0, 0.6, 0.6))
    yield _sample((1, 1, 2, 4), (1, 1, 1, 2), mode="linear", dtype=DType.U8)
    yield _sample((2, 5), (2, 9), mode="linear")
    yield _sample((1, 2, 3, 4, 5), (1, 2, 4, 3, 7), mode="linear")
    yield _sample((2, 3, 4, 4), (2, 5, 4, 6), mode="linear")
    yield _sample((1, 1, 3), (1, 1, 1), mode="linear", coordinate="align_corners")
    yield _sample((0, 2, 3), (0, 2, 5), mode="nearest")
    yield _sample((1, 0), (1, 4), "empty", mode="nearest")


@op("resize")
@dataclass(frozen=True)
class Resize(Op):
    """x sampled at other positions along every axis, axis by axis.

    Element i of an axis of the result is read at the coordinate c(i) of x's axis, where in and out
    are the extents and s is the scale (out / in where none is given):

    - ``half_pixel``: (i + 0.5) / s - 0.5
    - ``pytorch_half_pixel``: the same, but 0 where out is 1
    - ``half_pixel_symmetric``: the same plus in / 2 * (1 - out / (s * in)), which centres what
      rounding cut off
    - ``asymmetric``: i / s
    - ``align_corners``: i * (in - 1) / (s * in - 1), 0 where s * in is 1 (out where no scale is
      given)

    Mode ``nearest`` takes the element at c rounded by `nearest`; ``linear`` weights the two
    neighbours of c, ``cubic`` four by the kernel with parameter `cubic_a`. Positions outside of x
    read the element at the edge. Coordinates are exact rationals, so ties are ties. Integers are
    interpolated in f64, then rounded half to even and saturated.

    Attributes:
        sizes: extents of the result, one per axis.
        scales: the scales as the model gives them (f32); None where only the size is given.
        mode: `nearest`, `linear` or `cubic`.
        coordinate: one of the rules above.
        nearest: `floor`, `ceil`, or to the nearest with halves down (`round_prefer_floor`) or up.
        cubic_a: parameter of the cubic kernel.
        exclude_outside: neighbours outside of x get no weight and the others are scaled to sum to
            1.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    sizes: tuple[Dim, ...]
    scales: tuple[float | None, ...]
    mode: Literal["nearest", "linear", "cubic"] = "nearest"
    coordinate: Coordinate = "half_pixel"
    nearest: Nearest = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    samples: ClassVar[tuple[Sample, ...]] = tuple(_samples())

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if x.dtype not in NUMERIC:
            raise TypeRuleError(f"does not accept {x.dtype}; cast first")
        if not len(self.sizes) == len(self.scales) == x.rank:
            raise TypeRuleError(
                f"sizes and scales need one entry for each of the {x.rank} axes of {x}"
            )
        for name, choices in (
            ("mode", ("nearest", "linear", "cubic")),
            ("coordinate", _COORDINATES),
            ("nearest", _ROUNDINGS),
        ):
            if getattr(self, name) not in choices:
                raise TypeRuleError(
                    f"{name} {getattr(self, name)!r} is none of {', '.join(choices)}"
                )
        for axis, (have, want, scale) in enumerate(
            zip(x.shape, self.sizes, self.scales, strict=True)
        ):
            if scale is not None and not 0 < scale < np.inf:
                raise TypeRuleError(
                    f"the scale of axis {axis} is {scale}; it must be positive and finite"
                )
            if isinstance(want, int) and want < 0:
                raise TypeRuleError(f"the size of axis {axis} is {want}")
            if have == 0 and want != 0:
                raise TypeRuleError(f"axis {axis} is empty and cannot be resized to {want}")
        return x.with_shape(self.sizes)

    def is_copied(self, axis: int, extent: Dim) -> bool:
        """Return whether an axis of this extent of x is known to stay as it is."""
        return self.sizes[axis] == extent and self.scales[axis] in (None, 1.0)

    def coordinates(self, axis: int, extent: int) -> list[Fraction]:
        """Return the coordinate in x of every element of an axis of the result.

        Args:
            axis: which axis.
            extent: its extent in x; the size must be static.
        """
        out = int(self.sizes[axis])
        if out == 0:
            return []
        given = self.scales[axis]
        scale = Fraction(out, extent) if given is None else scale_ratio(given)
        positions = range(out)
        match self.coordinate:
            case "asymmetric":
                return [i / scale for i in positions]
            case "align_corners":
                last = scale * extent - 1
                return [Fraction(0) if last == 0 else i * (extent - 1) / last for i in positions]
            case "pytorch_half_pixel" if out == 1:
                return [Fraction(0)] * out
            case _:
                symmetric = self.coordinate == "half_pixel_symmetric"
                offset = (
                    Fraction(extent, 2) * (1 - out / (scale * extent)) if symmetric else Fraction(0)
                )
                return [offset + (i + _HALF) / scale - _HALF for i in positions]

    def taps(self, axis: int, extent: int) -> tuple[Array, Array]:
        """Return (indices [taps, out] into x's axis, weights [taps, out] in f64) of an axis.

        Args:
            axis: which axis.
            extent: its extent in x; the size must be static.
        """
        where = self.coordinates(axis, extent)
        if self.mode == "nearest":
            indices = np.array([[self._rounded(c) for c in where]], np.int64).reshape(1, len(where))
            return np.clip(indices, 0, max(extent - 1, 0)), np.ones((1, len(where)))
        floors = np.array([c.__floor__() for c in where], np.int64)
        rest = np.array([float(c - c.__floor__()) for c in where], np.float64)
        if self.mode == "linear":
            offsets, weights = (0, 1), np.stack([1.0 - rest, rest])
        else:
            offsets, weights = (-1, 0, 1, 2), _cubic_weights(rest, self.cubic_a)
        indices = np.stack([floors + o for o in offsets])
        if self.exclude_outside:
            weights = np.where((indices < 0) | (indices >= extent), 0.0, weights)
            weights = weights / weights.sum(axis=0)
        return np.clip(indices, 0, max(extent - 1, 0)), weights

    def _rounded(self, c: Fraction) -> int:
        match self.nearest:
            case "floor":
                return c.__floor__()
            case "ceil":
                return c.__ceil__()
            case "round_prefer_floor":
                return (c - _HALF).__ceil__()
            case _:
                return (c + _HALF).__floor__()

    def reference(self, x: Array) -> Array:  # noqa: D102
        y = x if self.mode == "nearest" or x.dtype.kind == "f" else x.astype(np.float64)
        for axis, extent in enumerate(x.shape):
            if self.is_copied(axis, extent):
                continue
            if extent == 0 and self.sizes[axis] != 0:
                raise ExecutionError(
                    f"axis {axis} is empty and cannot be resized to {self.sizes[axis]}"
                )
            y = self._along(y, axis, *self.taps(axis, extent))
        if y.dtype == x.dtype:
            return y
        return numeric.cast(numeric.round_half_even(y), DType.of(x.dtype))

    def _along(self, x: Array, axis: int, indices: Array, weights: Array) -> Array:
        if self.mode == "nearest":
            return np.take(x, indices[0], axis)
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        with np.errstate(all="ignore"):
            parts = (
                np.take(x, index, axis) * weight.astype(x.dtype).reshape(shape)
                for index, weight in zip(indices, weights, strict=True)
            )
            y = next(parts)
            for part in parts:
                y += part
        return y

    def decompose(self, x: Value) -> Value | None:
        """Return it as repeats, or as gathers along each axis; None where extents are symbolic.

        Intermediate results are rounded to the dtype. Integers are interpolated in f32.
        """
        from rlx.ops.elementwise import cast

        axes = [a for a, d in enumerate(x.type.shape) if not self.is_copied(a, d)]
        factors = [self._factor(x.type.shape[a], a) for a in axes]
        static = all(
            isinstance(d, int) and d for a in axes for d in (x.type.shape[a], self.sizes[a])
        )
        dtype = x.type.dtype
        if any(f is None for f in factors) and not static:
            return None
        if self.mode != "nearest" and dtype.is_integer:
            if dtype.itemsize > 2:
                return None
            x = cast(x, DType.F32)
        for axis, factor in zip(axes, factors, strict=True):
            x = _emit_repeat(x, axis, factor) if factor else self._emit_along(x, axis)
        return self._emit_rounded(x, dtype)

    def _emit_rounded(self, x: Value, dtype: DType) -> Value:
        from rlx.ops import elementwise as ew

        return x if x.type.dtype is dtype else ew.cast(ew.round(x), dtype)

    def _factor(self, extent: Dim, axis: int) -> int | None:
        """Return r where the axis is every element of x repeated r times, else None."""
        given = self.scales[axis]
        if self.mode != "nearest":
            return None
        if given is not None:
            ratio = scale_ratio(given)
        elif isinstance(extent, int) and extent and isinstance(self.sizes[axis], int):
            ratio = Fraction(int(self.sizes[axis]), extent)
        else:
            ratio = next(
                (Fraction(r) for r in range(2, 9) if self.sizes[axis] == extent * r), Fraction(1, 2)
            )
        if ratio.denominator != 1 or self.sizes[axis] != extent * int(ratio):
            return None
        half = self.coordinate not in ("asymmetric", "align_corners") and self.nearest.startswith(
            "round"
        )
        return (
            int(ratio)
            if half or (self.coordinate == "asymmetric" and self.nearest == "floor")
            else None
        )

    def _emit_along(self, x: Value, axis: int) -> Value:
        from rlx.ops.elementwise import add, mul
        from rlx.ops.indexing import Gather
        from rlx.ops.leaf import constant

        extent = x.type.shape[axis]
        assert isinstance(extent, int)
        indices, weights = self.taps(axis, extent)
        shape = [-1 if i == axis else 1 for i in range(x.type.rank)]
        total: Value | None = None
        for index, weight in zip(indices, weights, strict=True):
            part = emit_one(Gather(axis), x, constant(index))
            if self.mode == "nearest":
                return part
            factor = numeric.cast(weight.reshape(shape), x.type.dtype)
            part = mul(part, constant(factor))
            total = part if total is None else add(total, part)
        assert total is not None
        return total


def _cubic_weights(rest: Array, a: float) -> Array:
    """Return the weights [4, ...] of the elements at -1, 0, 1, 2. Source: Keys 1981."""
    t, u = rest, 1.0 - rest

    def near(d: Array) -> Array:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Array) -> Array:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return np.stack([far(1.0 + t), near(t), near(u), far(1.0 + u)])


def _emit_repeat(x: Value, axis: int, count: int) -> Value:
    """Return x with every element of an axis repeated in place."""
    from rlx.ops.movement import expand, reshape

    shape = x.type.shape
    column = reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    wide = expand(column, (*shape[: axis + 1], count, *shape[axis + 1 :]))
    return reshape(wide, (*shape[:axis], shape[axis] * count, *shape[axis + 1 :]))
