# SPDX-License-Identifier: Apache-2.0
"""Matrix products and convolutions of bytes whose sums stay integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from rlx.base.dims import Dim, product
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType, require_equal
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.conv import Conv
from rlx.ops.elementwise import cast, sub
from rlx.ops.matmul import matmul, product_flops
from rlx.ops.movement import reshape
from rlx.ops.spec import Operand, Sample, emit_one, op
from rlx.ops.windows import Layout, Pads

__all__ = ["BYTES", "ByteConv", "IntegerConv", "IntegerMatMul", "centred", "conv_sample"]

BYTES = (DType.I8, DType.U8)
"""Dtypes of the operands."""


def centred(x: Value, zero: Value | None) -> Value:
    """Return x minus its zero point, in i32."""
    wide = cast(x, DType.I32)
    return wide if zero is None else sub(wide, cast(zero, DType.I32))


def _check(
    a: TensorType, a_zero: TensorType | None, w: TensorType, w_zero: TensorType | None
) -> None:
    if a.dtype not in BYTES or w.dtype not in BYTES:
        raise TypeRuleError(f"needs operands of i8 or u8, found {a} and {w}")
    if a_zero is not None and (a_zero.dtype is not a.dtype or a_zero.rank):
        raise TypeRuleError(f"the zero point of {a} is {a.dtype}[], found {a_zero}")
    if w_zero is not None and (w_zero.dtype is not w.dtype or w_zero.rank > 1):
        raise TypeRuleError(
            f"the zero points of {w} are {w.dtype}[], or one per column, found {w_zero}"
        )


def _difference(x: Array, zero: Array | None, axis: int = -1) -> Array:
    """Return x minus its zero points along an axis, in f64, where sums of products are exact and fast."""
    if zero is None:
        return x.astype(np.float64)
    shape = [1] * x.ndim
    if zero.ndim:
        shape[axis] = -1
    return x.astype(np.float64) - zero.astype(np.float64).reshape(shape if zero.ndim else ())


def _wrapped(total: Array) -> Array:
    return total.astype(np.int64).astype(np.int32)


def _operands(
    a: tuple[int, ...],
    w: tuple[int, ...],
    dtypes: tuple[DType, DType],
    zeros: tuple[bool, int | None],
) -> tuple[Operand | None, ...]:
    """Return operands of a sample; zeros: whether a has a zero point, and how many w has (0: a scalar)."""
    left, right = dtypes
    count = zeros[1]
    shape = () if not count else (count,)
    return (
        Operand(a, left, "index", 100),
        Operand((), left, "index", 100) if zeros[0] else None,
        Operand(w, right, "index", 100),
        None if count is None else Operand(shape, right, "index", 100),
    )


@op("integer_matmul")
@dataclass(frozen=True)
class IntegerMatMul(Op):
    """(a - a_zero) @ (w - w_zero) in i32, which wraps.

    a: [..., K] i8 or u8; a_zero: [] of a's dtype; w: [K, N] i8 or u8; w_zero: [] or [N] of w's dtype -> [..., N] i32.
    A zero point that is absent is 0.
    """

    operands = ("a", "a_zero?", "w", "w_zero?")
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample(_operands((5, 16), (16, 9), (DType.U8, DType.I8), (True, None))),
        Sample(_operands((2, 3, 19), (19, 70), (DType.I8, DType.U8), (False, 0))),
        Sample(_operands((7, 8), (8, 5), (DType.U8, DType.U8), (True, 5))),
        Sample(_operands((6,), (6, 4), (DType.I8, DType.I8), (True, 4))),
    )

    def infer(  # noqa: D102
        self,
        a: TensorType,
        a_zero: TensorType | None,
        w: TensorType,
        w_zero: TensorType | None = None,
    ) -> TensorType:
        _check(a, a_zero, w, w_zero)
        if a.rank < 1 or w.rank != 2:
            raise TypeRuleError(f"needs [..., K] and [K, N], found {a} and {w}")
        require_equal(a.shape[-1], w.shape[0], "the inner extents of a and w")
        if w_zero is not None and w_zero.rank:
            require_equal(w_zero.shape[0], w.shape[1], "the columns of w and its zero points")
        return TensorType(DType.I32, (*a.shape[:-1], w.shape[1]))

    def reference(  # noqa: D102
        self, a: Array, a_zero: Array | None, w: Array, w_zero: Array | None = None
    ) -> Array:
        return _wrapped(np.asarray(np.matmul(_difference(a, a_zero), _difference(w, w_zero))))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return product_flops(operands, results)

    def decompose(self, a: Value, a_zero: Value | None, w: Value, w_zero: Value | None) -> Value:
        """Return it as a product of operands in i32."""
        return matmul(centred(a, a_zero), centred(w, w_zero))


@dataclass(frozen=True)
class ByteConv(Op):
    """What convolutions of bytes have in common: the attributes of `Conv`."""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads
    groups: int = 1
    layout: Layout = "nchw"

    @classmethod
    def of(cls, conv: Conv) -> Self:
        """Return this kind of convolution with the attributes of another."""
        return cls(conv.strides, conv.dilations, conv.pads, conv.groups, conv.layout)

    @property
    def conv(self) -> Conv:
        """The convolution of operands minus their zero points."""
        return Conv(self.strides, self.dilations, self.pads, self.groups, self.layout)


def conv_sample(operands: tuple[Operand | None, ...], rank: int, **attributes: Any) -> Sample:
    """Return a sample of a convolution over `rank` axes, without strides, dilations and pads unless given."""
    plain = {"strides": (1,) * rank, "dilations": (1,) * rank, "pads": ((0, 0),) * rank}
    return Sample(operands, {**plain, **attributes})


def _conv_sample(
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtypes: tuple[DType, DType],
    zeros: tuple[bool, int | None],
    **attributes: Any,
) -> Sample:
    return conv_sample(_operands(x, w, dtypes, zeros), len(w) - 2, **attributes)


@op("integer_conv")
@dataclass(frozen=True)
class IntegerConv(ByteConv):
    """y[n, o, p] = sum over c, t of (x[n, c, p stride + t dilation - before] - x_zero) (w[o, c, t] - w_zero[o]).

    x: i8 or u8, [N, C, *space] (layout nchw) or [N, *space, C] (nhwc); x_zero: [] of x's dtype; w: i8 or u8
    [O, C / groups, *kernel] in both layouts; w_zero: [] or [O] of w's dtype. A zero point that is absent is 0. The
    result is i32 of the shape that `conv` gives; sums wrap. Outside of x it reads x_zero.

    Attributes:
        strides: step of the window per spatial axis.
        dilations: distance of the window's taps.
        pads: (before, after) per spatial axis; may be symbolic, never negative.
        groups: number of groups that the channels are split into.
        layout: `nchw` or `nhwc`.
    """

    operands = ("x", "x_zero?", "w", "w_zero?")
    samples: ClassVar[tuple[Sample, ...]] = (
        _conv_sample(
            (2, 8, 6, 7),
            (9, 8, 3, 3),
            (DType.U8, DType.I8),
            (True, None),
            pads=((1, 1), (0, 2)),
        ),
        _conv_sample(
            (1, 3, 9, 8),
            (5, 3, 3, 2),
            (DType.I8, DType.I8),
            (True, None),
            strides=(2, 1),
            dilations=(1, 2),
        ),
        _conv_sample((2, 8, 5, 5), (6, 4, 3, 3), (DType.U8, DType.U8), (False, 6), groups=2),
        _conv_sample((1, 5, 8), (7, 8, 1), (DType.U8, DType.U8), (True, 0), layout="nhwc"),
        _conv_sample(
            (1, 4, 3, 4, 5),
            (3, 4, 2, 3, 1),
            (DType.I8, DType.I8),
            (True, None),
            pads=((1, 0), (1, 1), (0, 0)),
        ),
    )

    def infer(  # noqa: D102
        self,
        x: TensorType,
        x_zero: TensorType | None,
        w: TensorType,
        w_zero: TensorType | None = None,
    ) -> TensorType:
        _check(x, x_zero, w, w_zero)
        result = self.conv.infer(x.with_dtype(DType.I32), w.with_dtype(DType.I32))
        if w_zero is not None and w_zero.rank:
            require_equal(w_zero.shape[0], w.shape[0], "the filters of w and their zero points")
        return result

    def reference(  # noqa: D102
        self, x: Array, x_zero: Array | None, w: Array, w_zero: Array | None = None
    ) -> Array:
        return _wrapped(self.conv.reference(_difference(x, x_zero), _difference(w, w_zero, 0)))

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return results[0].elements * product(operands[2].shape[1:]) * 2

    def decompose(self, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None) -> Value:
        """Return it as a convolution of operands in i32."""
        if w_zero is not None and w_zero.type.rank:
            w_zero = reshape(w_zero, (w.type.shape[0], *[1] * (w.type.rank - 1)))
        return emit_one(self.conv, centred(x, x_zero), centred(w, w_zero))
