# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms, framing and window functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from rlx.base import numeric
from rlx.base.dims import Dim, ceildiv, floordiv, less_equal
from rlx.base.dtypes import FLOATS, NUMERIC, DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType, require_equal
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["DFT", "STFT", "Frame", "blackman_window", "dft_matrix", "hamming_window", "hann_window"]

# Longer transforms are not decomposed into a product with the matrix of the transform.
_MATRIX_LIMIT = 4096


def _bins(length: Dim, onesided: bool) -> Dim:
    return floordiv(length, 2) + 1 if onesided else length


@cache
def dft_matrix(rows: int, length: int, components: int, inverse: bool, onesided: bool) -> Array:
    """Return the matrix that a transform multiplies flattened rows by, in f64.

    Args:
        rows: number of elements that are there; the transform takes them as zero-padded to
            `length`.
        length: length of the transform.
        components: 1 for real, 2 for complex rows (real and imaginary part interleaved).
        inverse: the inverse transform.
        onesided: a real signal from or to the first half of the spectrum.

    Returns:
        [rows * components, results * (1 or 2)].
    """
    basis = np.eye(rows * components).reshape(rows * components, rows, components)
    out = _transform(basis, 1, length, inverse=inverse, onesided=onesided)
    return out.reshape(rows * components, -1)


def _transform(x: Array, axis: int, length: int, *, inverse: bool, onesided: bool) -> Array:
    """Return the transform of x [..., 1 or 2] along an axis: [..., 2], [..., 1] if it is real."""
    wide = x.astype(np.float64)
    if x.shape[axis] == 0:  # NumPy leaves the result of no samples as it found the memory
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        wide = np.zeros(shape)
    z = wide[..., 0] + 1j * wide[..., 1] if x.shape[-1] == 2 else wide[..., 0]
    with np.errstate(all="ignore"):
        if inverse and onesided:
            return np.fft.irfft(z, length, axis)[..., None].astype(x.dtype)
        if onesided:
            out = np.fft.rfft(z, length, axis)
        else:
            out = np.fft.ifft(z, length, axis) if inverse else np.fft.fft(z, length, axis)
    return np.stack([out.real, out.imag], axis=-1).astype(x.dtype)


@op("dft")
@dataclass(frozen=True)
class DFT(Op):
    """X[k] = sum over n < length of x[n] e^(-2 pi i k n / length) along an axis.

    x: [..., 1] (real) or [..., 2] (real and imaginary part) -> [..., 2]. An axis that is longer is
        cut, a shorter one
    is padded with zeros. The inverse has e^(+...) and a factor 1 / length. With `onesided` the
    forward transform of a real x keeps length // 2 + 1 results, and the inverse takes as many and
    gives the real signal [..., 1]. Computed in f64, rounded once.

    Attributes:
        axis: which axis is transformed; not the last one.
        inverse: the inverse transform.
        onesided: use the symmetry of the spectrum of a real signal.
        length: length of the signal, at least 1; any number.
    """

    precision_class = OpClass.COMPUTE

    operands = ("x",)
    axis: int
    inverse: bool
    onesided: bool
    length: Dim
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample(
            (Operand((2, 8, 1)),), {"axis": 1, "inverse": False, "onesided": False, "length": 8}
        ),
        Sample(
            (Operand((2, 10, 1)),), {"axis": 1, "inverse": False, "onesided": True, "length": 10}
        ),
        Sample((Operand((2, 7, 1)),), {"axis": 1, "inverse": False, "onesided": True, "length": 7}),
        Sample((Operand((2, 7, 2)),), {"axis": 1, "inverse": True, "onesided": False, "length": 7}),
        Sample((Operand((2, 5, 2)),), {"axis": 1, "inverse": True, "onesided": True, "length": 8}),
        Sample((Operand((2, 5, 2)),), {"axis": 1, "inverse": True, "onesided": True, "length": 9}),
        Sample(
            (Operand((2, 5, 1)),), {"axis": 1, "inverse": False, "onesided": False, "length": 9}
        ),
        Sample(
            (Operand((2, 9, 2)),), {"axis": 1, "inverse": False, "onesided": False, "length": 4}
        ),
        Sample(
            (Operand((3, 4, 5, 2)),), {"axis": 0, "inverse": False, "onesided": False, "length": 3}
        ),
        Sample((Operand((0, 4, 1)),), {"axis": 1, "inverse": False, "onesided": True, "length": 4}),
        Sample((Operand((1, 1, 1)),), {"axis": 1, "inverse": False, "onesided": True, "length": 1}),
        Sample(
            (Operand((2, 8, 2)),),
            {"axis": 1, "inverse": False, "onesided": True, "length": 8},
            error="onesided",
        ),
        Sample(
            (Operand((2, 8, 3)),),
            {"axis": 1, "inverse": False, "onesided": False, "length": 8},
            error="last",
        ),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if x.dtype not in FLOATS:
            raise TypeRuleError(f"does not accept {x.dtype}; cast first")
        if x.rank < 2 or x.shape[-1] not in (1, 2):
            raise TypeRuleError(
                f"the last axis must hold 1 (real) or 2 (complex) numbers, found {x}"
            )
        if not 0 <= self.axis < x.rank - 1:
            raise TypeRuleError(
                f"axis {self.axis} is out of range for {x}, whose last axis holds the components"
            )
        if less_equal(1, self.length) is False:
            raise TypeRuleError(f"the length is {self.length}; it must be at least 1")
        if self.onesided and not self.inverse and x.shape[-1] == 2:
            raise TypeRuleError(
                "onesided needs a real x with one component; the spectrum of a complex one is full"
            )
        to_real = self.inverse and self.onesided
        count = self.length if to_real else _bins(self.length, self.onesided)
        shape = (*x.shape[: self.axis], count, *x.shape[self.axis + 1 : -1])
        return x.with_shape((*shape, 1 if to_real else 2))

    def reference(self, x: Array) -> Array:  # noqa: D102
        length = int(self.length)
        if length < 1:
            raise ExecutionError(f"the length is {length}; it must be at least 1")
        return _transform(x, self.axis, length, inverse=self.inverse, onesided=self.onesided)

    def decompose(self, x: Value) -> Value | None:
        """Return a product with the transform's matrix; None for symbolic or large extents."""
        from rlx.ops.leaf import constant
        from rlx.ops.matmul import matmul
        from rlx.ops.movement import reshape, slice_axis, transpose

        extent, length = x.type.shape[self.axis], self.length
        if not isinstance(extent, int) or not isinstance(length, int) or length > _MATRIX_LIMIT:
            return None
        used = min(extent, _bins(length, self.inverse and self.onesided))
        assert isinstance(used, int)
        if used < extent:
            x = slice_axis(x, self.axis, 0, used)
        rank, axis = x.type.rank, self.axis
        components = int(x.type.shape[-1])
        moved = transpose(
            x, (*(a for a in range(rank) if a not in (axis, rank - 1)), axis, rank - 1)
        )
        lead = moved.type.shape[:-2]
        matrix = dft_matrix(used, length, components, self.inverse, self.onesided)
        weights = constant(numeric.cast(matrix, x.type.dtype))
        out = matmul(reshape(moved, (*lead, used * components)), weights)
        results = 1 if self.inverse and self.onesided else 2
        out = reshape(out, (*lead, matrix.shape[1] // results, results))
        back = list(range(rank - 2))
        back.insert(axis, rank - 2)
        return transpose(out, (*back, rank - 1))


@op("frame")
@dataclass(frozen=True)
class Frame(Op):
    """y[..., f, t] = x[..., f * step + t]: overlapping pieces of the last axis.

    x: [..., L] -> [..., frames, length] with frames = floor((L - length) / step) + 1.

    Attributes:
        length: extent of a piece, at least 1.
        step: distance of the starts of neighbouring pieces, at least 1.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    length: int
    step: int
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 20)),), {"length": 8, "step": 3}),
        Sample((Operand((20,)),), {"length": 4, "step": 4}),
        Sample((Operand((1, 20)),), {"length": 3, "step": 5}),
        Sample((Operand((0, 9)),), {"length": 9, "step": 1}),
        Sample((Operand((2, 5)),), {"length": 8, "step": 1}, error="frames"),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if x.dtype not in NUMERIC or not x.rank:
            raise TypeRuleError(f"needs numbers with at least one axis, found {x}")
        if self.length < 1 or self.step < 1:
            raise TypeRuleError(f"length {self.length} and step {self.step} must be at least 1")
        frames = floordiv(x.shape[-1] - self.length, self.step) + 1
        if less_equal(0, frames) is False:
            raise TypeRuleError(f"{frames} frames: {x} is shorter than one frame of {self.length}")
        return x.with_shape((*x.shape[:-1], frames, self.length))

    def reference(self, x: Array) -> Array:  # noqa: D102
        if x.shape[-1] < self.length:
            return np.zeros((*x.shape[:-1], 0, self.length), x.dtype)
        views = np.lib.stride_tricks.sliding_window_view(x, self.length, axis=-1)
        return np.ascontiguousarray(views[..., :: self.step, :])

    def decompose(self, x: Value) -> Value:
        """Return it as ceil(length / step) slices side by side; frames may be symbolic."""
        from rlx.ops.movement import concat, pad, reshape, slice_axis

        frames = floordiv(x.type.shape[-1] - self.length, self.step) + 1
        last = x.type.rank - 1
        parts = ceildiv(self.length, self.step)
        assert isinstance(parts, int)
        missing = parts * self.step - self.length
        if missing:
            x = pad(x, [0] * (last + 1), [*[0] * last, missing])
        lead = x.type.shape[:-1]
        pieces = [
            reshape(
                slice_axis(x, last, j * self.step, frames * self.step), (*lead, frames, self.step)
            )
            for j in range(parts)
        ]
        whole = pieces[0] if parts == 1 else concat(pieces, last + 1)
        return slice_axis(whole, last + 1, 0, self.length) if missing else whole


@op("stft")
@dataclass(frozen=True)
class STFT(Op):
    """The spectrum of overlapping, windowed pieces of a signal.

    signal: [B, L] or [B, L, 1] (real), or [B, L, 2] (complex); window: [frame_length], ones where
        absent ->
    [B, frames, bins, 2] with frames = floor((L - frame_length) / frame_step) + 1 and bins =
    frame_length // 2 + 1 (onesided) or frame_length. Computed in f64, rounded once.

    Attributes:
        frame_step: distance of the starts of neighbouring pieces.
        frame_length: extent of a piece.
        onesided: keep the first half of the spectrum of a real signal.
    """

    precision_class = OpClass.COMPUTE

    operands = ("signal", "window?")
    frame_step: int
    frame_length: int
    onesided: bool = True
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 64)), None), {"frame_step": 8, "frame_length": 16}),
        Sample((Operand((1, 50, 1)), Operand((15,))), {"frame_step": 6, "frame_length": 15}),
        Sample(
            (Operand((1, 50)), Operand((12,))),
            {"frame_step": 5, "frame_length": 12, "onesided": False},
        ),
        Sample(
            (Operand((2, 30, 2)), None), {"frame_step": 7, "frame_length": 9, "onesided": False}
        ),
        Sample((Operand((0, 30)), None), {"frame_step": 7, "frame_length": 9}),
        Sample(
            (Operand((1, 30)), Operand((8,))), {"frame_step": 7, "frame_length": 9}, error="window"
        ),
    )

    def infer(self, signal: TensorType, window: TensorType | None = None) -> TensorType:  # noqa: D102
        if signal.dtype not in FLOATS or (window is not None and window.dtype is not signal.dtype):
            raise TypeRuleError(
                f"needs a float signal and a window of its dtype, found {signal} and {window}"
            )
        if signal.rank not in (2, 3) or (signal.rank == 3 and signal.shape[2] not in (1, 2)):
            raise TypeRuleError(
                f"the signal must be [B, L], [B, L, 1] or [B, L, 2], found {signal}"
            )
        if self.onesided and signal.rank == 3 and signal.shape[2] == 2:
            raise TypeRuleError(
                "onesided needs a real signal; the spectrum of a complex one is full"
            )
        if window is not None:
            if window.rank != 1:
                raise TypeRuleError(f"the window must be [{self.frame_length}], found {window}")
            require_equal(window.shape[0], self.frame_length, "the window and the frame length")
        framed = Frame(self.frame_length, self.frame_step).infer(
            signal.with_shape(signal.shape[:2])
        )
        return signal.with_shape((*framed.shape[:2], _bins(self.frame_length, self.onesided), 2))

    def reference(self, signal: Array, window: Array | None = None) -> Array:  # noqa: D102
        parts = signal[..., None] if signal.ndim == 2 else signal
        framed = Frame(self.frame_length, self.frame_step).reference(np.moveaxis(parts, 2, 0))
        pieces = np.moveaxis(framed, 0, -1).astype(np.float64)  # [B, frames, length, components]
        if window is not None:
            pieces = pieces * window.astype(np.float64)[:, None]
        out = _transform(pieces, 2, self.frame_length, inverse=False, onesided=self.onesided)
        return out.astype(signal.dtype)

    def decompose(self, signal: Value, window: Value | None = None) -> Value | None:
        """Return framing and a product with the windowed matrix; None for long frames.

        The window is multiplied into the matrix, which is folded where the window is a constant.
        """
        from rlx.ops.elementwise import mul
        from rlx.ops.leaf import constant
        from rlx.ops.matmul import matmul
        from rlx.ops.movement import reshape, transpose

        length = self.frame_length
        if length > _MATRIX_LIMIT:
            return None
        batch, extent = signal.type.shape[:2]
        components = 1 if signal.type.rank == 2 else int(signal.type.shape[2])
        frame = Frame(length, self.frame_step)
        if components == 1:
            pieces = emit_one(frame, reshape(signal, (batch, extent)))
        else:
            split = emit_one(frame, transpose(signal, (0, 2, 1)))  # [B, 2, frames, length]
            frames = split.type.shape[2]
            pieces = reshape(transpose(split, (0, 2, 3, 1)), (batch, frames, length * 2))
        matrix = dft_matrix(length, length, components, False, self.onesided)
        weights = constant(numeric.cast(matrix, signal.type.dtype))
        if window is not None:
            # Rows of a complex signal's matrix come in pairs that share an element of the window.
            paired = reshape(weights, (length, components, matrix.shape[1]))
            window = reshape(window, (length, 1, 1))
            weights = reshape(mul(paired, window), (length * components, matrix.shape[1]))
        out = matmul(pieces, weights)
        return reshape(out, (*out.type.shape[:2], matrix.shape[1] // 2, 2))


# -- windows ---------------------------------------------------------------------------------------


def hann_window(size: Dim, *, periodic: bool = True, dtype: DType = DType.F32) -> Value:
    """Return [size]: 0.5 - 0.5 cos(2 pi n / N), where N is size (periodic) or size - 1."""
    return _cosine_window(size, (0.5, -0.5), periodic, dtype)


def hamming_window(size: Dim, *, periodic: bool = True, dtype: DType = DType.F32) -> Value:
    """Return [size]: 25/46 - 21/46 cos(2 pi n / N), where N is size (periodic) or size - 1."""
    return _cosine_window(size, (25 / 46, -21 / 46), periodic, dtype)


def blackman_window(size: Dim, *, periodic: bool = True, dtype: DType = DType.F32) -> Value:
    """Return [size]: 0.42 - 0.5 cos(2 pi n / N) + 0.08 cos(4 pi n / N), N as for `hann_window`."""
    return _cosine_window(size, (0.42, -0.5, 0.08), periodic, dtype)


def _cosine_window(size: Dim, factors: tuple[float, ...], periodic: bool, dtype: DType) -> Value:
    """Return the sum of factors[j] * cos(2 pi j n / N), computed in f64.

    A symmetric window of one element is 1.
    """
    from rlx.ops.elementwise import add, cast, cos, div, maximum, mul
    from rlx.ops.leaf import constant, dim_tensor
    from rlx.ops.movement import arange

    if isinstance(size, int):
        period = size if periodic else size - 1
        angle = 2 * math.pi * np.arange(size) / max(period, 1)
        window = np.zeros(size)
        for j, factor in enumerate(factors):
            window += factor * np.cos(j * angle)
        if size == 1 and not periodic:
            window[:] = 1.0
        return constant(numeric.cast(window, dtype))
    count = dim_tensor((size if periodic else size - 1,), ())
    period_ = cast(maximum(count, constant(1, DType.I64)), DType.F64)
    turn = div(mul(cast(arange(size), DType.F64), constant(2 * math.pi, DType.F64)), period_)
    total: Value | None = None
    for j, factor in enumerate(factors):
        if j == 0:
            continue
        term = mul(cos(mul(turn, constant(float(j), DType.F64))), constant(factor, DType.F64))
        total = term if total is None else add(total, term)
    assert total is not None
    return cast(add(total, constant(factors[0], DType.F64)), dtype)
