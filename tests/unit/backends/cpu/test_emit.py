# SPDX-License-Identifier: Apache-2.0
"""Every scalar operator and cast on every dtype, emitted as vectors, against the NumPy meaning."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

from rlx.backends.cpu.abi import CTX, Failure, finish
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.emit import emit_body, load_value, may_fail, store_value
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.cpu.jit import Library, compile_text
from rlx.base.dtypes import INTEGERS, DType
from rlx.base.errors import BuildError, TypeRuleError
from rlx.base.numeric import Array
from rlx.expr.body import Body, BodyBuilder
from rlx.expr.evaluate import evaluate_body
from rlx.expr.table import TABLE

_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_NO_ERROR = (1 << 63) - 1
_COUNT = 333
_FOUR_ULP = frozenset(
    {
        "exp",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "erf",
        "sigmoid",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
    }
    | {"sinh", "cosh", "asinh", "acosh", "atanh", "pow", "rsqrt", "atan2"}
)
_FLOAT_ONLY = frozenset({"isnan", "isinf"})
_BITS_ONLY = frozenset({"not", "and", "or", "xor", "shl", "shr"})
_NOT_BOOL = frozenset(
    {"neg", "abs", "sign", "sub", "div", "mod", "fmod", "pow", "shl", "shr", "fma"}
)
_DTYPES = (DType.F32, DType.F64, *sorted(INTEGERS, key=str), DType.BOOL)
_STORED = (DType.F16, DType.BF16, DType.F8E4M3, DType.F8E5M2, DType.I4, DType.U4)


def _run(body: Body, arrays: Sequence[Array], isa: Isa) -> tuple[list[Array], int]:
    """Return the results of a body over vectors, and the error word."""
    lanes, reads, n = isa.vector_bits // 32, len(arrays), len(arrays[0])
    module = Module(isa)
    with module.kernel("body", reads + len(body.results) + 1) as k:
        size = k.dim(reads + len(body.results))
        with k.loop(0, size, lanes) as loop:
            mask = k.tail_mask(size - loop.index, k.iota(_lane_type(lanes)).type)
            inputs = [
                load_value(k, d, k.slot(i), loop.index, lanes, mask)
                for i, d in enumerate(body.inputs)
            ]
            found = emit_body(k, body, inputs, lanes, mask=mask, flat_index=loop.index)
            for i, (value, dtype) in enumerate(zip(found, body.result_types, strict=True)):
                store_value(k, dtype, value, k.slot(reads + i), loop.index, mask)
    emitted = finish(module)
    library = Library([compile_text(emitted.text, isa)], [emitted.symbol], isa)
    out = [np.zeros(n, d.numpy) for d in body.result_types]
    slots = np.array([a.ctypes.data for a in (*arrays, *out)], np.uint64)
    args = np.array([*range(len(slots)), 0], np.int64)
    dims = np.array([n], np.int64)
    ctx = np.zeros(16, np.uint64)
    ctx[CTX.SLOTS], ctx[CTX.DIMS], ctx[CTX.ERROR] = slots.ctypes.data, dims.ctypes.data, _NO_ERROR
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    kernel = ctypes.CFUNCTYPE(None, pointer, pointer, word, word, word)(
        library.address(emitted.symbol)
    )
    kernel(ctx.ctypes.data, args.ctypes.data, 0, 1, 0)
    library.close()
    return out, int(ctx[CTX.ERROR])


def _lane_type(lanes: int):
    from rlx.backends.cpu.lltypes import I32, vec

    return vec(I32, lanes)


def _numbers(dtype: DType, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return rng.random(_COUNT) < 0.5
    if dtype in (DType.I4, DType.U4):
        return rng.integers(*((-8, 8) if dtype is DType.I4 else (0, 16)), _COUNT).astype(
            dtype.numpy
        )
    if dtype.is_integer:
        info = np.iinfo(dtype.numpy)
        any_ = rng.integers(info.min, info.max, _COUNT, dtype=dtype.numpy, endpoint=True)
        small = rng.integers(max(info.min, -5), 70, _COUNT).astype(dtype.numpy)
        out = np.where(rng.random(_COUNT) < 0.5, any_, small)
        out[:4] = [info.min, info.max, 0, 1]
        return rng.permutation(out)
    wide = np.float64 if dtype is DType.F64 else np.float32
    out = (rng.standard_normal(_COUNT) * 10.0 ** rng.uniform(-3, 4, _COUNT)).astype(wide)
    out[:11] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, 2.5, -2.5, 1e-40]
    with np.errstate(over="ignore"):
        return rng.permutation(out).astype(dtype.numpy)


def _accepts(op: str, dtype: DType) -> bool:
    rule = TABLE[op]
    if (
        rule.is_row
        or op in ("const", "cast", "select")
        or (op in _NOT_BOOL and dtype is DType.BOOL)
    ):
        return False
    if (dtype.is_float and op in _BITS_ONLY) or (not dtype.is_float and op in _FLOAT_ONLY):
        return False
    try:
        rule.result((dtype,) * rule.arity)
    except TypeRuleError:
        return False
    return True


def _ulps(got: Array, want: Array) -> float:
    """Return the largest distance in units of the last place; NaN and inf must be equal."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    fine = np.isfinite(want) & (got != want)
    np.testing.assert_array_equal(got[~np.isfinite(want)], want[~np.isfinite(want)])
    gap = np.abs(got[fine].astype(np.longdouble) - want[fine].astype(np.longdouble))
    return float((gap / np.spacing(np.abs(want[fine])).astype(np.longdouble)).max(initial=0))


@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_operator_means_what_the_table_says(dtype: DType, isa: Isa) -> None:
    builder = BodyBuilder((DType.BOOL, dtype, dtype, dtype))
    condition, *operands = (builder.input(i) for i in range(4))
    names = [op for op in TABLE if _accepts(op, dtype)]
    values = [builder.emit(op, *operands[: TABLE[op].arity]) for op in names]
    values.append(builder.emit("select", condition, operands[0], operands[1]))
    body = builder.finish(*values)
    arrays = [_numbers(DType.BOOL, 0), *(_numbers(dtype, seed) for seed in (1, 2, 3))]
    if dtype.is_integer:
        arrays[2] = np.where(arrays[2] == 0, 3, arrays[2]).astype(dtype.numpy)
        if (
            dtype.is_signed
        ):  # the reference raises to negative powers in f64, for all elements at once
            arrays[2] = np.abs(arrays[2] % 97).astype(dtype.numpy) + dtype.numpy.type(1)
    found, error = _run(body, arrays, isa)
    assert error == _NO_ERROR
    for name, got, want in zip([*names, "select"], found, evaluate_body(body, arrays), strict=True):
        if got.dtype.kind != "f":
            np.testing.assert_array_equal(got, want, err_msg=name)
        elif name == "fma" and dtype is DType.F64:
            np.testing.assert_allclose(
                got, want, rtol=1e-9, err_msg=name
            )  # the reference rounds twice
        else:
            assert _ulps(got, want) <= (4 if name in _FOUR_ULP else 0), name


@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("source", [*_DTYPES, *_STORED], ids=str)
def test_casts_to_every_dtype(source: DType, isa: Isa) -> None:
    builder = BodyBuilder((source,))
    targets = [d for d in (*_DTYPES, *_STORED) if d is not source]
    body = builder.finish(*(builder.emit("cast", builder.input(0), dtype=d) for d in targets))
    numbers = _numbers(source, 4)
    found, _ = _run(body, [numbers], isa)
    for target, got, want in zip(targets, found, evaluate_body(body, [numbers]), strict=True):
        exact = np.float64 if target.is_float else np.int64
        if target is DType.U64:
            exact = np.uint64
        np.testing.assert_array_equal(
            got.astype(exact), want.astype(exact), err_msg=f"{source} to {target}"
        )


@pytest.mark.parametrize("dtype", [DType.I32, DType.U8, DType.I64], ids=str)
@pytest.mark.parametrize("op", ["div", "mod", "fmod"])
def test_a_zero_divisor_is_recorded_at_its_first_element(op: str, dtype: DType) -> None:
    builder = BodyBuilder((dtype, dtype))
    body = builder.finish(builder.emit(op, builder.input(0), builder.input(1)))
    a, b = np.full(100, 7, dtype.numpy), np.full(100, 2, dtype.numpy)
    b[[41, 97]] = 0
    (got,), error = _run(body, [a, b], _HOST)
    assert may_fail(body)
    assert error == 41 * 256 + Failure.DIVIDE_BY_ZERO
    assert got[0] == (3 if op == "div" else 1)


def test_least_integer_over_minus_one_wraps() -> None:
    builder = BodyBuilder((DType.I32, DType.I32))
    a, b = (builder.input(i) for i in range(2))
    body = builder.finish(builder.emit("div", a, b), builder.emit("mod", a, b))
    low = np.full(17, np.iinfo(np.int32).min, np.int32)
    (quotient, rest), error = _run(body, [low, np.full(17, -1, np.int32)], _HOST)
    assert error == _NO_ERROR
    assert (quotient == low).all()
    assert not rest.any()


def test_negative_integer_powers_truncate_the_inverse() -> None:
    builder = BodyBuilder((DType.I32, DType.I32))
    body = builder.finish(builder.emit("pow", builder.input(0), builder.input(1)))
    base, power = (
        np.array([2, 1, -1, -1, 0, 5], np.int32),
        np.array([-1, -7, -2, -3, -1, 2], np.int32),
    )
    (got,), _ = _run(body, [base, power], _HOST)
    assert got.tolist() == [0, 1, 1, -1, np.iinfo(np.int32).max, 25]


def test_constants_are_exact() -> None:
    builder = BodyBuilder((DType.F32,))
    numbers = [-0.0, float("inf"), float("nan"), 0.1, 1e-45]
    body = builder.finish(
        *(builder.const(n, DType.F32) for n in numbers), builder.const(2**64 - 1, DType.U64)
    )
    (*floats, whole), _ = _run(body, [np.zeros(5, np.float32)], _HOST)
    for number, got in zip(numbers, floats, strict=True):
        assert got[:1].tobytes() == np.float32(number).tobytes()
    assert (whole == 2**64 - 1).all()


def test_row_instructions_are_refused() -> None:
    builder = BodyBuilder((DType.F32,))
    body = builder.finish(builder.emit("rsum", builder.input(0)))
    with pytest.raises(BuildError, match="row kernel"):
        _run(body, [np.zeros(3, np.float32)], _HOST)
