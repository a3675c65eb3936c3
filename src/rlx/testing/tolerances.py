# SPDX-License-Identifier: Apache-2.0
"""How far a result may be from its meaning, per operator and dtype, with the derivation of every bound.

The expected value is the reference meaning computed in f64 and rounded once. `u` is the unit roundoff of the result's
dtype (2^-24 for f32), `w` that of the dtype the operator computes in (f32 for f16 and bf16), and g(n) = n w / (1 - n w)
bounds the relative error of n roundings in any order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1): so
the bounds of sums hold for every reduction tree, and S below is a sum of magnitudes.

* exact: movement, indexing, integers, comparisons, and operators of one correctly rounded step.
* primitive: 4 ULP of the numeric contract; a narrow float is computed in f32 and rounded, so 1 ULP of its own.
* composite: the looser of 4 ULP and 4e-7 max(1, |x|) of the numeric contract, for f64 the same multiple of its own u.
* sums (reduce, matmul, conv, pool, cumsum, dft): each of n terms is a rounded product: g(n + 2) S, then u |y|.
* the others: see the function of each.

Nothing is loosened where a test is written: a result beyond its bound is a bug of the kernel, or the derivation here
is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.expr.body import Body
from rlx.ir.op import Op
from rlx.ops.spec import ElementwiseOp

__all__ = ["EXACT", "allowed_error", "family_of", "mismatch", "roundoff", "ulp"]

_F64: TypeAlias = npt.NDArray[np.float64]
_Operands: TypeAlias = Sequence[_F64 | None]
_Rule: TypeAlias = Callable[[Any, _Operands, _F64, DType], Any]

EXACT = frozenset(
    "arg_reduce cast concat constant dequantize_linear dim_tensor expand frame gather gather_elements gather_nd "
    "integer_conv integer_matmul "
    "one_hot pad quantize_linear random_bits random_uniform reshape rng_fold slice tile top_k transpose trilu "
    "write_rows if loop scan region with_epilogue".split()
)
"""Operators without a rounding of their own, or whose single roundings are fixed by the contract (quantisation)."""

_EXACT_STEPS = frozenset(
    "const cast neg abs sign floor ceil trunc round isnan isinf not max min and or xor shl shr eq ne lt le gt ge "
    "select fmod".split()
)
_ROUNDED_STEPS = frozenset({"add", "sub", "mul", "div", "sqrt", "mod"})


def roundoff(dtype: DType) -> float:
    """Return the unit roundoff: half the distance from 1 to the next number."""
    bits = {
        DType.F16: 11,
        DType.BF16: 8,
        DType.F32: 24,
        DType.F64: 53,
        DType.F8E4M3: 4,
        DType.F8E5M2: 3,
    }
    return 2.0 ** -bits.get(dtype, 53)


def ulp(y: Array, dtype: DType) -> _F64:
    """Return the distance of neighbouring numbers of a dtype at y."""
    smallest = {
        DType.F16: -14,
        DType.BF16: -126,
        DType.F32: -126,
        DType.F64: -1022,
        DType.F8E4M3: -6,
    }.get(dtype, -14)
    size = np.where(np.isfinite(y), np.abs(y), 0).astype(np.float64)
    exponent = np.where(size == 0, smallest, np.frexp(size)[1] - 1)
    return np.ldexp(2 * roundoff(dtype), np.maximum(exponent, smallest))


def family_of(op: Op, dtypes: Sequence[DType | None]) -> str:
    """Return `exact`, `primitive`, `composite`, the name of the operator's rule here, or `declared`: its own.

    An operator declares its own by a method `allowed_error(operands, y, dtype)`, which gets the finite operands and
    the expected result in f64 and returns the largest allowed error, of any shape that broadcasts to y.

    Raises:
        UsageError: the operator has no rule.
    """
    if op.name in EXACT:
        return "exact"
    if op.name in _RULES:
        return op.name
    if isinstance(op, ElementwiseOp):
        return _elementwise_family(op.body(*(d for d in dtypes if d is not None)))
    if callable(getattr(op, "allowed_error", None)):
        return "declared"
    raise UsageError(
        f"nothing says how exact operator {op.name!r} is: give {type(op).__name__} a method `allowed_error`, or add a "
        "rule to rlx.testing.tolerances"
    )


def _elementwise_family(body: Body) -> str:
    steps = [i for i in body.instrs if i.op not in _EXACT_STEPS]
    rounded = [
        i
        for i in body.instrs
        if i.op == "const" and i.dtype.is_float and not _is_short(i.attribute)
    ]
    if not any(i.dtype.is_float for i in steps):
        return "exact"
    if len(steps) > 1 or rounded:
        return "composite"
    return "exact" if steps[0].op in _ROUNDED_STEPS else "primitive"


def _is_short(text: str | None) -> bool:
    """Return whether a constant is the same number in every float dtype."""
    value = float(text or "0")
    return not np.isfinite(value) or float(np.float16(value)) == value


def allowed_error(op: Op, operands: Sequence[Array | None], results: Sequence[Array]) -> list[_F64]:
    """Return the largest allowed |got - expected| for every element of every result; 0 means equal bits.

    Args:
        op: the operator, with static extents.
        operands: what it was given, in their own dtypes.
        results: the expected results, rounded to their dtypes.
    """
    dtypes = [None if a is None else DType.of(a.dtype) for a in operands]
    family = family_of(op, dtypes)
    wide: list[_F64 | None] = []
    for array in operands:
        finite = None if array is None else _as_f64(array)
        wide.append(None if finite is None else np.where(np.isfinite(finite), finite, 0.0))
    found: list[_F64] = []
    for position, result in enumerate(results):
        dtype = DType.of(result.dtype)
        y = _as_f64(result)
        bound: Any = 0.0
        if dtype.is_float and family != "exact":
            with np.errstate(all="ignore"):
                y = np.where(np.isfinite(y), y, 0.0)
                bound = _COMMON[family](op, wide, y, dtype) if family in _COMMON else 0.0
                if family in _RULES and not (family == "top_k" and position):
                    bound = _RULES[family](op, wide, y, dtype)
                if family == "declared":
                    bound = cast("Any", op).allowed_error(wide, y, dtype)
        found.append(np.broadcast_to(np.asarray(bound, np.float64), result.shape))
    return found


def _as_f64(array: Array) -> _F64:
    """Return numbers in f64, of complex ones the absolute values."""
    return np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)


def mismatch(got: Array, want: Array, allowed: _F64) -> str:
    """Return what is wrong with a result, or an empty string.

    NaN must be where it is expected, an infinity must be the same one; everything else within `allowed`.
    """
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"got {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    if DType.of(want.dtype).is_float:
        a, b = got.astype(np.float64), want.astype(np.float64)
        with np.errstate(all="ignore"):
            near = np.abs(a - b) <= allowed
        good = (a == b) | (np.isnan(a) & np.isnan(b)) | (near & np.isfinite(b))
    else:
        a, b, good = got, want, (got == want) | ((got != got) & (want != want))  # noqa: PLR0124  (NaN)
    if good.all():
        return ""
    index = tuple(int(i) for i in np.argwhere(~good)[0])
    limit = f"; allowed {allowed[index]:.3g}" if allowed[index] else ""
    found = f"first at {list(index)}: {a[index]!r}, expected {b[index]!r}{limit}"
    return f"{int((~good).sum())} of {good.size} elements off, {found}"


# -- the bounds ----------------------------------------------------------------------------------------------------


def _gamma(n: float, dtype: DType) -> float:
    w = roundoff(dtype.compute)
    return n * w / max(1 - n * w, 0.5)


def _primitive(op: Any, operands: _Operands, y: _F64, dtype: DType) -> _F64:
    del op, operands
    # NumPy's own f64 functions, which give the expected value, are within 1 ULP.
    count = {DType.F32: 4, DType.F64: 5}.get(dtype, 1)
    return count * ulp(y, dtype)


def _composite(op: Any, operands: _Operands, y: _F64, dtype: DType) -> _F64:
    size = np.ones(())
    for x in operands:
        if x is not None:
            size = np.maximum(size, np.abs(x))
    contract = 4e-7 * roundoff(dtype.compute) / roundoff(DType.F32) * size
    if dtype is DType.F64:
        contract = 2 * contract  # the expected value is computed in f64 too
    if dtype.is_narrow_float:
        return contract + ulp(y, dtype)
    return np.maximum(_primitive(op, operands, y, dtype), contract)


def _linear(terms: float, magnitude: Any, y: _F64, dtype: DType) -> _F64:
    """Return the bound of a sum of `terms` products whose magnitudes add up to `magnitude`."""
    summed = _gamma(terms + 2, dtype) * np.asarray(magnitude, np.float64)
    return summed + 2 * roundoff(dtype) * np.abs(y) + ulp(y * 0, dtype)


def _first(result: Any) -> _F64:
    return np.asarray(result[0] if isinstance(result, tuple) else result, np.float64)


def _absolute(op: Any, operands: _Operands) -> _F64:
    """Return the operator applied to magnitudes: S of an operator that is linear with positive weights."""
    return _first(op.reference(*(None if x is None else np.abs(x) for x in operands)))


def _reduce(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    x = operands[0]
    assert x is not None
    axes: tuple[int, ...] = op.axes
    n = int(np.prod([x.shape[a] for a in axes])) if axes else 1
    total = cast("_F64", np.sum(np.abs(x), axis=axes, keepdims=op.keepdims)) if axes else np.abs(x)
    rel, tiny = _gamma(n + 2, dtype), ulp(y * 0, dtype)
    match op.kind:
        case "max" | "min":
            return 0.0
        case "sum" | "l1":
            return _linear(n, total, y, dtype)
        case "mean":
            return _linear(n, total / max(n, 1), y, dtype)
        case "sumsq" | "l2" | "prod":  # all terms of one sign, or factors: a relative error
            return (rel + 4 * roundoff(dtype)) * np.abs(y) + tiny
        case "logsum":  # d log(s) = ds / s
            signed = np.sum(x, axis=axes, keepdims=op.keepdims) if axes else x
            return rel * total / np.maximum(np.abs(signed), 1e-300) + 5 * ulp(y, dtype)
        case _:  # logsumexp: the sum is off by the exponents' (x - max) w and 4 ULP; then log, then + max
            top = (
                np.max(np.abs(x), axis=axes, keepdims=op.keepdims, initial=0) if axes else np.abs(x)
            )
            return _gamma(n + 10, dtype) + 4 * roundoff(dtype.compute) * top + 5 * ulp(y, dtype)


def _cumsum(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    x = operands[0]
    assert x is not None
    return _linear(x.shape[op.axis], _absolute(op, operands), y, dtype)


def _matmul(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    a = operands[0]
    assert a is not None
    return _linear(a.shape[-1], _absolute(op, operands), y, dtype)


def _conv(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    w = operands[1]
    assert w is not None
    return _linear(w.size / max(min(w.shape[:2]), 1), _absolute(op, operands), y, dtype)


def _pool(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    if op.kind == "max":
        return 0.0
    return _linear(
        float(np.prod(cast("tuple[int, ...]", op.kernel))), _absolute(op, operands), y, dtype
    )


def _dft(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    # |e^(i t)| = 1, so every result is a sum of at most all magnitudes (times the window's); the twiddle factors are
    # rounded to the dtype, and a decomposed one rounds its real and imaginary half sums.
    x = operands[0]
    assert x is not None
    window = operands[1] if len(operands) > 1 else None
    length = getattr(op, "frame_length", None) or op.length
    size = np.max(np.abs(x), initial=0) * (
        1 if window is None else np.max(np.abs(window), initial=0)
    )
    scale = 1 / int(length) if getattr(op, "inverse", False) else 1
    total = size * 2 * min(int(length), x.size) * scale
    return _linear(2 * int(length) + 4, total, y, dtype) + 3 * roundoff(dtype) * total


def _softmax(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    # e^(x - m): the difference is off by w |x - m|, the exponential by 4 ULP; the sum of n of them; one division.
    x = operands[0]
    assert x is not None
    n = x.shape[op.axis]
    span = np.max(x, axis=op.axis, keepdims=True, initial=-1e300) - x
    widest = np.max(span, axis=op.axis, keepdims=True, initial=0)
    rel = _gamma(n + 12, dtype) + roundoff(dtype.compute) * (span + widest)
    if op.name == "log_softmax":
        return rel + 6 * roundoff(dtype) * (np.abs(y) + 1) + roundoff(dtype.compute) * span
    return (rel + 2 * roundoff(dtype)) * np.abs(y) + ulp(y * 0, dtype)


def _normalised(
    x: _F64, axes: tuple[int, ...], eps: float, dtype: DType, centre: bool
) -> tuple[_F64, _F64]:
    """Return (x normalised over axes, bound of its error).

    The mean is off by dm = g(n) mean|x|. Sums of centred values vanish, so the variance is off by dm^2 and g(n + 2)
    relatively; rsqrt by 4 ULP. y = d r: |dm| r + |y| (half the variance's relative error + 8 w).
    """
    n = float(np.prod([x.shape[a] for a in axes]))
    mean = np.mean(x, axis=axes, keepdims=True) if centre else np.zeros(())
    error = (
        _gamma(n + 2, dtype)
        * np.mean(np.abs(x), axis=axes, keepdims=True)
        * (1.0 if centre else 0.0)
    )
    centred = x - mean
    variance = np.mean(centred**2, axis=axes, keepdims=True) + eps
    factor = 1 / np.sqrt(variance)
    y = centred * factor
    relative = _gamma(n + 12, dtype) + error**2 / variance
    return y, error * factor + np.abs(y) * relative


def _affine(y: _F64, bound: _F64, scale: _F64 | None, bias: _F64 | None, dtype: DType) -> Any:
    """Return the bound of y scale + bias; a decomposition may round each of the three steps to the dtype."""
    size = np.abs(y)
    if scale is not None:
        size, bound = size * np.abs(scale), bound * np.abs(scale)
    if bias is not None:
        size = size + np.abs(bias)
    return bound + 4 * roundoff(dtype) * size + ulp(y * 0, dtype)


def _row_norm(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    del y
    x, scale = operands[0], operands[1]
    assert x is not None
    bias = operands[2] if len(operands) > 2 else None
    if not x.size:
        return 0.0
    axes = tuple(range(op.axis % x.ndim, x.ndim))
    return _affine(
        *_normalised(x, axes, op.eps, dtype, op.name == "layer_norm"), scale, bias, dtype
    )


def _channel_norm(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    x, scale, bias = operands
    assert x is not None
    column = (-1, *([1] * (x.ndim - 2)))
    scale, bias = (None if f is None else f.reshape(column) for f in (scale, bias))
    groups = op.groups if op.name == "group_norm" else x.shape[1]
    if not x.size:
        return 0.0
    shaped = x.reshape(x.shape[0], groups, -1)
    normal, bound = _normalised(shaped, (2,), op.eps, dtype, True)
    return _affine(normal.reshape(y.shape), bound.reshape(y.shape), scale, bias, dtype)


def _batch_norm(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    # f = scale rsqrt(var + eps) and bias - mean f are rounded by themselves, then x f + shift.
    x, scale, bias, mean, variance = (np.abs(cast("_F64", o)) for o in operands)
    column = (-1, *([1] * (x.ndim - 2)))
    factor = (scale / np.sqrt(variance + op.eps)).reshape(column)
    size = (x + mean.reshape(column)) * factor + bias.reshape(column)
    return (_gamma(10, dtype) + 6 * roundoff(dtype)) * size + ulp(y * 0, dtype)


def _resize(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    # Each resized axis takes 2 or 4 products (cubic weights add up to less than 2 in magnitude) and may be rounded to
    # the dtype; the weights are off by the w of coordinates as large as the extent.
    if op.mode == "nearest":
        return 0.0
    x = operands[0]
    assert x is not None
    extent = max([1, *x.shape, *(int(s) for s in op.sizes)])
    top = np.max(np.abs(x), initial=0) * 2**x.ndim
    return (_gamma(8 * x.ndim + 4 * extent, dtype) + 2 * x.ndim * roundoff(dtype)) * top + ulp(
        y * 0, dtype
    )


def _range(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    start, delta = operands
    assert start is not None
    assert delta is not None
    return 3 * roundoff(dtype) * (np.abs(start) + np.arange(len(y)) * np.abs(delta))


def _scatter(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    # At worst all updates meet in one element; a narrow float may be rounded after each.
    if op.reduction in ("none", "max", "min"):
        return 0.0
    x, updates = operands[0], operands[2]
    assert x is not None
    assert operands[1] is not None
    assert updates is not None
    n = updates.size * roundoff(dtype)
    if op.reduction == "mul":
        return n * np.abs(y) + ulp(y * 0, dtype)
    return n * _first(op.reference(np.abs(x), operands[1].astype(np.int64), np.abs(updates)))


def _attention(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    """Scores are sums of D products, off by ds; p is off relatively by 2 ds and a softmax; then sums of T products."""
    q, k, v = (np.abs(cast("_F64", o)) for o in operands[:3])
    depth, keys = q.shape[-1], k.shape[-2]
    top = np.max(q, initial=0) * np.max(k, initial=0) * depth * abs(op.scale)
    mask = operands[3] if len(operands) > 3 else None
    shift = 0.0 if mask is None else float(np.max(np.abs(mask), initial=0))
    score = _gamma(depth + 8, dtype) * (top + shift)
    # What softmax reads and writes may be rounded to the dtype where attention is composed of operators.
    relative = 2 * score + _gamma(2 * keys + 20, dtype) + roundoff(dtype) * (2 * (top + shift) + 4)
    return relative * np.max(v, initial=0) + 2 * roundoff(dtype) * np.abs(y) + ulp(y * 0, dtype)


def _quantized_matmul(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    # The integer sum is exact where there are kernels for it; composed of operators it is a product in f32.
    del op
    a, a_scale, a_zero, w, w_scale = (None if o is None else np.abs(o) for o in operands)
    assert a is not None
    assert w is not None
    total = np.matmul(a + (0.0 if a_zero is None else a_zero), w) * a_scale * w_scale
    return _linear(a.shape[-1] + 3, total, y, dtype)


def _quantized_conv(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    # As for a product: what is composed of operators dequantises both and rounds every step.
    x, x_scale, x_zero, w, w_scale = (None if o is None else np.abs(o) for o in operands)
    assert x is not None
    assert w is not None
    zero = None if x_zero is None else -x_zero
    return _linear(
        float(np.prod(w.shape[1:])) + 3, op.reference(x, x_scale, zero, w, w_scale), y, dtype
    )


def _recurrent(op: Any, operands: _Operands, y: _F64, dtype: DType) -> Any:
    """A step's activations are off by e = g(I + H + 8) max(|W||x| + |R||h| + |b|) and what it inherits times 1 + |R|.

    The recurrence e_t = (1 + |R|) e_(t-1) + e is summed over the steps; the cell state may be as large as T.
    """
    x, w, r, b = (None if o is None else np.abs(o) for o in (*operands, None)[:4])
    assert x is not None
    assert w is not None
    assert r is not None
    steps = x.shape[1] if op.layout else x.shape[0]
    inner = np.max(np.sum(r, axis=-1), initial=0)
    state = max(
        [
            1.0,
            float(steps),
            *(float(np.max(np.abs(s), initial=0)) for s in operands[5:] if s is not None),
        ]
    )
    bias = 0.0 if b is None else 2 * np.max(b, initial=0)
    before = (
        np.max(np.sum(w, axis=-1), initial=0) * np.max(x, initial=0) + inner * state + bias + state
    )
    one = (_gamma(x.shape[-1] + r.shape[-1] + 16, dtype) + roundoff(dtype)) * before * 2
    growth = sum((1 + inner) ** k for k in range(steps))
    return one * growth * state + 2 * roundoff(dtype) * np.abs(y) + ulp(y * 0, dtype)


_COMMON: dict[str, _Rule] = {"primitive": _primitive, "composite": _composite}
_RULES: dict[str, _Rule] = {
    # Its logarithm and its sine are well conditioned where they are taken, so it keeps what primitives keep.
    "random_normal": _primitive,
    "attention": _attention,
    "batch_norm": _batch_norm,
    "conv": _conv,
    "conv_transpose": _conv,
    "cumsum": _cumsum,
    "dft": _dft,
    "group_norm": _channel_norm,
    "gru": _recurrent,
    "instance_norm": _channel_norm,
    "layer_norm": _row_norm,
    "log_softmax": _softmax,
    "lstm": _recurrent,
    "matmul": _matmul,
    "pool": _pool,
    "quantized_conv": _quantized_conv,
    "quantized_matmul": _quantized_matmul,
    "range": _range,
    "reduce": _reduce,
    "resize": _resize,
    "rms_norm": _row_norm,
    "rnn": _recurrent,
    "scatter_elements": _scatter,
    "scatter_nd": _scatter,
    "softmax": _softmax,
    "stft": _dft,
}
