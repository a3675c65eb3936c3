# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms of any length, one transform per lane.

    z[k] = sum over t < n of z[t] e^(-2 pi i t k / n)

A point is a vector of real parts followed by a vector of imaginary parts, a lane per transform, so
every factor is the same in all lanes and nothing is shuffled. Stages of radix 4, 2, 3, 5, 7, 11 and
13 go back and forth between two buffers and leave the points in order (Stockham). A length with a
larger prime factor becomes a convolution with a chirp, by two transforms of a longer length without
one (Bluestein). The inverse transform is the forward one with real and imaginary parts exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.lltypes import PTR, Type

__all__ = ["Point", "Transform", "buffer_points", "factors"]

_RADICES = (4, 2, 3, 5, 7, 11, 13)
_Complex = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class Point:
    """A complex number per lane."""

    re: Value
    im: Value

    def __add__(self, other: Point) -> Point:
        return Point(self.re + other.re, self.im + other.im)

    def __sub__(self, other: Point) -> Point:
        return Point(self.re - other.re, self.im - other.im)

    def times(self, f: Function, factor: Point) -> Point:
        """Return the product with a factor."""
        re = f.fma(self.re, factor.re, -(self.im * factor.im))
        return Point(re, f.fma(self.re, factor.im, self.im * factor.re))


def factors(n: int) -> list[int] | None:
    """Return radices whose product is n, None if a prime factor is too large."""
    out: list[int] = []
    for radix in _RADICES:
        while n % radix == 0:
            out.append(radix)
            n //= radix
    return out if n == 1 else None


def _convolution_length(n: int) -> int:
    """Return the least length of at least 2 n - 1 whose factors are 2, 3 and 5."""
    length = 2 * n - 1
    while True:
        rest = length
        for radix in (2, 3, 5):
            while rest % radix == 0:
                rest //= radix
        if rest == 1:
            return length
        length += 1


def buffer_points(n: int) -> int:
    """Return how many points each of the two buffers of a transform needs."""
    return n if factors(n) is not None else _convolution_length(n)


def _circle(n: int, steps: npt.NDArray[np.int64]) -> _Complex:
    """Return e^(-2 pi i step / n)."""
    return np.exp(-2j * np.pi * (steps % n) / n)


class Transform:
    """Emits a transform of n points as functions of a module.

    Attributes:
        n: number of points.
        vector: type of one part of a point.
    """

    def __init__(self, module: Module, n: int, vector: Type) -> None:
        self.module = module
        self.n = n
        self.vector = vector
        self.lanes = vector.lanes
        self._stages: dict[int, Function] = {}

    # Points in buffers

    def load(self, f: Function, buffer: Value, index: Value, *, swap: bool = False) -> Point:
        """Return a point of a buffer, with its parts exchanged if `swap`."""
        at = f.offset(buffer, index * (2 * self.lanes), self.vector)
        parts = f.load(self.vector, at), f.load(self.vector, at, self.lanes)
        return Point(*reversed(parts)) if swap else Point(*parts)

    def store(
        self, f: Function, point: Point, buffer: Value, index: Value, *, swap: bool = False
    ) -> None:
        """Write a point of a buffer, with its parts exchanged if `swap`."""
        at = f.offset(buffer, index * (2 * self.lanes), self.vector)
        first, second = (point.im, point.re) if swap else (point.re, point.im)
        f.store(first, at)
        f.store(second, at, self.lanes)

    def table(self, f: Function, numbers: _Complex) -> Value:
        """Return the address of complex constants."""
        flat = np.stack([numbers.real, numbers.imag], -1).reshape(-1)
        name = self.module.table("factors", [float(x) for x in flat], self.vector.scalar)
        return f.address_of(name)

    def factor(self, f: Function, table: Value, index: Value) -> Point:
        """Return a complex constant in all lanes."""
        parts = [f.load(self.vector.scalar, table, index * 2 + part) for part in range(2)]
        return Point(*(f.splat(part, self.lanes) for part in parts))

    # Transforms

    def emit(self, f: Function, source: Value, spare: Value, *, swap: bool) -> Value:
        """Emit the transform of the points in a buffer.

        Args:
            f: where to emit.
            source: the points; overwritten.
            spare: another buffer of `buffer_points` points.
            swap: exchange real and imaginary parts before and after.

        Returns:
            The buffer that holds the result.
        """
        if factors(self.n) is None:
            return self._chirp(f, source, spare, swap=swap)
        return self._direct(f, self.n, source, spare, swap=swap)

    def _direct(self, f: Function, n: int, source: Value, spare: Value, *, swap: bool) -> Value:
        """Emit the stages; `swap` exchanges the parts in the first and the last one."""
        radices = factors(n)
        assert radices is not None
        if not radices:
            return source
        self._call_stages(f, n, radices, source, spare, swap=swap)
        return source if len(radices) % 2 == 0 else spare

    def _call_stages(
        self, f: Function, n: int, radices: list[int], source: Value, spare: Value, *, swap: bool
    ) -> None:
        key = 2 * n + swap
        if key not in self._stages:
            with self.module.function(f"fft{n}", [("a", PTR), ("b", PTR)]) as function:
                a, b = function.args
                table = self.table(function, _circle(n, np.arange(n)))
                left, stride = n, 1
                for index, radix in enumerate(radices):
                    ends = (swap and index == 0, swap and index == len(radices) - 1)
                    left //= radix
                    self._stage(function, (a, b), table, (radix, left, stride), ends)
                    stride *= radix
                    a, b = b, a
            self._stages[key] = function
        f.call(self._stages[key], source, spare)

    def _stage(
        self,
        f: Function,
        buffers: tuple[Value, Value],
        table: Value,
        sizes: tuple[int, int, int],
        swap: tuple[bool, bool],
    ) -> None:
        """Emit one stage: for q < left, k < stride: `radix` points k + stride (q + left j).

        They go to k + stride (radix q + r), times the factor e^(-2 pi i stride q r / n).
        """
        radix, left, stride = sizes
        source, target = buffers
        with f.loop(0, left) as outer:
            q = outer.index
            turns = [
                self.factor(f, table, q * (stride * r)) if r and left > 1 else None
                for r in range(radix)
            ]
            with f.loop(0, stride) as inner:
                first = inner.index + q * stride
                points = [
                    self.load(f, source, first + stride * left * j, swap=swap[0])
                    for j in range(radix)
                ]
                to = inner.index + q * (stride * radix)
                for r, point in enumerate(_butterfly(f, points)):
                    turn = turns[r]
                    out = point if turn is None else point.times(f, turn)
                    self.store(f, out, target, to + stride * r, swap=swap[1])
                inner.next()
            outer.next()

    def _chirp(self, f: Function, source: Value, spare: Value, *, swap: bool) -> Value:
        """Emit Bluestein's transform: t k = (t^2 + k^2 - (k - t)^2) / 2 makes it a convolution."""
        n, length = self.n, _convolution_length(self.n)
        squares = np.arange(n) ** 2
        chirp = _circle(2 * n, squares)
        wrapped = np.zeros(length, np.complex128)
        wrapped[:n] = chirp.conj()
        wrapped[length - n + 1 :] = chirp[1:][::-1].conj()
        chirps = self.table(f, chirp)
        spectrum = self.table(f, np.fft.fft(wrapped) / length)
        with f.loop(0, n) as loop:
            point = self.load(f, source, loop.index, swap=swap)
            turned = point.times(f, self.factor(f, chirps, loop.index))
            self.store(f, turned, source, loop.index)
            loop.next()
        rest = f.offset(source, 2 * self.lanes * n, self.vector)
        f.memset(rest, 0, (length - n) * 2 * self.lanes * self.vector.itemsize)
        first = self._direct(f, length, source, spare, swap=False)
        other = spare if first is source else source
        with f.loop(0, length) as loop:
            point = self.load(f, first, loop.index)
            self.store(f, point.times(f, self.factor(f, spectrum, loop.index)), first, loop.index)
            loop.next()
        second = self._direct(f, length, first, other, swap=True)
        with f.loop(0, n) as loop:
            point = self.load(f, second, loop.index)
            turned = point.times(f, self.factor(f, chirps, loop.index))
            self.store(f, turned, second, loop.index, swap=swap)
            loop.next()
        return second


def _turned(point: Point) -> Point:
    """Return -i times a point."""
    return Point(point.im, -point.re)


def _butterfly(f: Function, points: list[Point]) -> list[Point]:
    """Return the transform of a few points."""
    radix = len(points)
    if radix == 2:
        return [points[0] + points[1], points[0] - points[1]]
    if radix == 4:
        a, b, c, d = points
        even, odd = a + c, b + d
        left, right = a - c, _turned(b - d)
        return [even + odd, left + right, even - odd, left - right]
    return _odd_butterfly(f, points)


def _odd_butterfly(f: Function, points: list[Point]) -> list[Point]:
    """Return the transform of an odd number of points: results r and radix - r share their sums."""
    radix, half = len(points), len(points) // 2
    sums = [points[j] + points[radix - j] for j in range(1, half + 1)]
    differences = [points[j] - points[radix - j] for j in range(1, half + 1)]
    total = points[0]
    for part in sums:
        total = total + part
    out: list[Point] = [total] * radix
    for r in range(1, half + 1):
        angles = 2 * np.pi * (np.arange(1, half + 1) * r % radix) / radix
        even = points[0]
        odd: Point | None = None
        for s, d, angle in zip(sums, differences, angles, strict=True):
            cosine, sine = float(np.cos(angle)), float(np.sin(angle))
            even = Point(f.fma(s.re, cosine, even.re), f.fma(s.im, cosine, even.im))
            if odd is None:
                odd = Point(d.re * sine, d.im * sine)
            else:
                odd = Point(f.fma(d.re, sine, odd.re), f.fma(d.im, sine, odd.im))
        assert odd is not None
        side = _turned(odd)
        out[r], out[radix - r] = even + side, even - side
    return out
