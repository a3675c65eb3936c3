# SPDX-License-Identifier: Apache-2.0
"""Emitted code run on arrays, on each instruction set of the host: elementary functions, conversions, memory access."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu import vconvert, vmath
from rlx.backends.cpu.abi import CTX, Emitted, Failure, Kernel, finish
from rlx.backends.cpu.builder import Function, Module, Value
from rlx.backends.cpu.isa import Isa, generic_isa, host_isa
from rlx.backends.cpu.jit import ALLOWED, Library, compile_text, undefined_symbols
from rlx.backends.cpu.lltypes import F32, F64, I8, I32, I64, Type, scalar_type, storage_type, vec
from rlx.base import numeric
from rlx.base.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]
Body = Callable[..., Value]
_ENTRY = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


def runnable() -> list[Isa]:
    """The host's instruction set and the levels below it."""
    host = host_isa()
    return [host, host.restricted("v3")] if host.name == "v4" else [host]


def run_kernel(
    library: Library, symbol: str, buffers: list[Array], dims: list[int], chunks: int = 1
) -> int:
    """Call a kernel whose arguments are all buffers, then all dims; returns the error word."""
    slots = np.array([b.ctypes.data for b in buffers], np.int64)
    extents = np.array(dims, np.int64)
    ctx = np.zeros(16, np.int64)
    ctx[CTX.SLOTS], ctx[CTX.DIMS] = slots.ctypes.data, extents.ctypes.data
    ctx[CTX.ERROR] = np.iinfo(np.int64).max
    args = np.array([*range(len(buffers)), *range(len(dims))], np.int64)
    _ENTRY(library.address(symbol))(ctx.ctypes.data, args.ctypes.data, 0, chunks, 0)
    return int(ctx[CTX.ERROR])


class Maps:
    """Elementwise functions compiled for one target, called by name on arrays.

    Args:
        isa: the target.
        bodies: name -> (emitter of one step, operand types, result type).
        lanes: lanes of a step, 0 for scalar code; arrays must have a multiple of it.
    """

    def __init__(
        self, isa: Isa, bodies: Mapping[str, tuple[Body, list[Type], Type]], lanes: int
    ) -> None:
        self.emitted = emit_maps(isa, bodies, lanes)
        self.lanes = lanes
        self._arity = {name: len(operands) for name, (_, operands, _) in bodies.items()}
        self._symbols = dict(zip(bodies, self.emitted.symbols, strict=True))
        self._library = Library([compile_text(self.emitted.text, isa)], self.emitted.symbols, isa)

    def __call__(self, name: str, result: Any, *operands: Array) -> Array:
        """Apply one function; `result` is the NumPy dtype of the output."""
        assert len(operands) == self._arity[name]
        assert operands[0].size % max(self.lanes, 1) == 0
        out = np.empty(operands[0].shape, result)
        run_kernel(self._library, self._symbols[name], [*operands, out], [operands[0].size])
        return out


def emit_maps(isa: Isa, bodies: Mapping[str, tuple[Body, list[Type], Type]], lanes: int) -> Emitted:
    """Emit one kernel per body: out[i] = body(in0[i], in1[i], ...)."""
    module = Module(isa)
    for name, (body, operands, result) in bodies.items():
        with module.kernel(name, len(operands) + 2) as k:
            _emit_map(k, body, operands, result, lanes)
    return finish(module)


def _emit_map(k: Kernel, body: Body, operands: list[Type], result: Type, lanes: int) -> None:
    inputs = [k.slot(i) for i in range(len(operands))]
    out, count = k.slot(len(operands)), k.dim(len(operands) + 1)
    with k.loop(0, count, max(lanes, 1)) as loop:
        values = [
            k.load(vec(kind, lanes), p, loop.index)
            for kind, p in zip(operands, inputs, strict=True)
        ]
        value = body(k, *values)
        assert value.type.scalar is result
        k.store(value, out, loop.index)


_ISAS = runnable()
_SPECIAL = [
    0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-40, 2.0**-126, 3e38, -3e38, 0.5, -0.5,
    2.0**20, 2.0**30, 1e30, 88.7, 88.73, 89.0, -87.5, -103.9, -104.5, 10.0, 4.0, 127.999, -149.5,
]  # fmt: skip


def _inputs() -> Array:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 32, 40_000, dtype=np.uint32).view(np.float32)
    spread = rng.standard_normal(30_000) * 10.0 ** rng.uniform(-6, 2, 30_000)
    near_one = 1.0 + rng.uniform(-1, 1, 4_000) * 1e-3
    plain = rng.uniform(-110, 110, 20_000)
    x = np.concatenate([_SPECIAL, spread, near_one, plain]).astype(np.float32)
    x = np.concatenate([x, bits])
    return np.ascontiguousarray(x[: x.size // 16 * 16])


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def _rsqrt(x: Array) -> Array:
    return 1.0 / np.sqrt(x)


_REFERENCE: dict[str, Callable[[Array], Array]] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh, "cbrt": np.cbrt, "cos": np.cos, "cosh": np.cosh, "erf": np.vectorize(math.erf),
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log10": np.log10, "log1p": np.log1p,
    "log2": np.log2, "rsqrt": _rsqrt, "sigmoid": _sigmoid, "sin": np.sin, "sinh": np.sinh, "sqrt": np.sqrt,
    "tan": np.tan, "tanh": np.tanh,
}  # fmt: skip


def _ulp(got: Array, exact: Array) -> Array:
    """Distance in units of the last place; 0 where both are the same special value, inf where only one is."""
    info = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        unit = np.spacing(np.maximum(np.abs(rounded), info.tiny)).astype(np.longdouble)
        distance = np.abs(got.astype(np.longdouble) - exact) / unit
    # Half a unit beyond the largest number rounds to either side.
    edge = np.isinf(got) & (np.abs(exact) > info.max * (1 - 4 * info.eps))
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded)) | edge
    signed = (got != 0) | (np.signbit(got) == np.signbit(rounded)) | (exact != 0)
    distance = np.where(same, 0.0, np.where(np.isfinite(distance), distance, np.inf))
    return np.where(signed, distance, np.inf)


def _unary(kind: Type) -> dict[str, tuple[Body, list[Type], Type]]:
    return {name: (fn, [kind], kind) for name, fn in vmath.UNARY.items()}


@pytest.fixture(scope="module", params=_ISAS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    return request.param


def test_every_function_has_a_reference() -> None:
    assert set(vmath.UNARY) == set(_REFERENCE)


def test_f32_functions_within_4_ulp_over_all_inputs(isa: Isa) -> None:
    maps = Maps(isa, _unary(F32), isa.lanes(DType.F32))
    x = _inputs()
    worst: dict[str, str] = {}
    for name, reference in _REFERENCE.items():
        with np.errstate(all="ignore"):
            # NumPy's f64 trigonometry and math.erf are not available in extended precision.
            wide = x.astype(np.float64 if name in ("erf", "sin", "cos", "tan") else np.longdouble)
            exact = reference(wide).astype(np.longdouble)
        distance = _ulp(maps(name, np.float32, x), exact)
        if (at := int(np.argmax(distance))) >= 0 and distance[at] > 4.0:
            worst[name] = f"{float(distance[at]):.3g} ULP at {x[at]!r}"
    assert not worst


def test_f64_functions_within_4_ulp(isa: Isa) -> None:
    maps = Maps(isa, _unary(F64), isa.lanes(DType.F64))
    rng = np.random.default_rng(3)
    spread = rng.standard_normal(6_000) * 10.0 ** rng.uniform(-12, 2, 6_000)
    plain = rng.uniform(-760, 760, 2_000)
    special = [v for v in _SPECIAL if abs(v) != 1e-45] + [
        5e-324,
        1e-310,
        709.7,
        710.0,
        -745.1,
        1e300,
    ]
    x = np.concatenate([special, spread, plain])
    x = np.ascontiguousarray(x[: x.size // 8 * 8])
    worst: dict[str, str] = {}
    for name, reference in _REFERENCE.items():
        with np.errstate(all="ignore"):
            wide = x if name in ("erf", "sin", "cos", "tan") else x.astype(np.longdouble)
            exact = reference(wide).astype(np.longdouble)
        distance = _ulp(maps(name, np.float64, x), exact)
        if (at := int(np.argmax(distance))) >= 0 and distance[at] > 4.0:
            worst[name] = f"{float(distance[at]):.3g} ULP at {x[at]!r}"
    assert not worst


@pytest.mark.parametrize(("name", "reference"), [("power", np.power), ("atan2", np.arctan2)])
def test_binary_functions_within_4_ulp(isa: Isa, name: str, reference: Any) -> None:
    maps = Maps(isa, {name: (getattr(vmath, name), [F32, F32], F32)}, isa.lanes(DType.F32))
    edge = np.array(
        [0.0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e-40, 1e38, -7], "f4"
    )
    grid = np.stack(np.meshgrid(edge, edge), -1).reshape(-1, 2)
    rng = np.random.default_rng(5)
    spread = (rng.standard_normal((20_000, 2)) * 10.0 ** rng.uniform(-2, 1.2, (20_000, 2))).astype(
        "f4"
    )
    pairs = np.concatenate([grid, spread])
    pairs = pairs[: len(pairs) // 16 * 16]
    x, y = (np.ascontiguousarray(pairs[:, i]) for i in range(2))
    with np.errstate(all="ignore"):
        exact = reference(x.astype(np.longdouble), y.astype(np.longdouble))
    distance = _ulp(maps(name, np.float32, x, y), exact)
    at = int(np.argmax(distance))
    assert distance[at] <= 4.0, (x[at], y[at], exact[at])


def test_scalar_and_vector_forms_agree_bit_for_bit() -> None:
    isa = host_isa()
    x = _inputs()[:4096]
    vector, scalar = (Maps(isa, _unary(F32), lanes) for lanes in (isa.lanes(DType.F32), 0))
    for name in vmath.UNARY:
        a, b = vector(name, np.float32, x), scalar(name, np.float32, x)
        assert np.array_equal(a, b, equal_nan=True), name


# Conversions

_DTYPES = [d for d in DType if not d.is_complex]
_CASTS = [
    (a, b, saturate)
    for a in _DTYPES
    for b in _DTYPES
    if a is not b
    for saturate in ((True, False) if b in (DType.F8E4M3, DType.F8E5M2) else (True,))
]


def _convert(a: DType, b: DType, *, saturate: bool) -> Body:
    def body(f: Function, raw: Value) -> Value:
        value = vconvert.cast(f, vconvert.widen(f, raw, a), a, b, saturate=saturate)
        return vconvert.narrow(f, value, b, saturate=saturate)

    return body


def _cast_maps() -> dict[str, tuple[Body, list[Type], Type]]:
    return {
        f"cast_{a}_{b}_{int(s)}": (_convert(a, b, saturate=s), [storage_type(a)], storage_type(b))
        for a, b, s in _CASTS
    }


def _samples(dtype: DType) -> Array:
    rng = np.random.default_rng(11)
    n = 16_384
    if dtype is DType.BOOL:
        return np.arange(n) % 3 == 0
    if dtype in (DType.I4, DType.U4):
        return (np.arange(n) % 16 - (8 if dtype is DType.I4 else 0)).astype(dtype.numpy)
    raw = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(dtype.numpy).copy()
    if dtype.is_float and dtype.itemsize >= 4:
        _float_samples(rng, raw)
    if dtype.is_integer and dtype.itemsize == 8:
        raw[: n // 2] >>= rng.integers(0, 64, n // 2).astype(dtype.numpy)
        raw[:8] = [
            0,
            1,
            2**63 - 1,
            2**53 + 1,
            2**24 + 1,
            2**40 + 1,
            2**62 + 2**54 + 1,
            2**39 + 2**31 + 1,
        ]
    return raw


def _float_samples(rng: np.random.Generator, raw: Array) -> None:
    """Overwrite random bits by moderate numbers, all f16 values' neighbours and exact ties of bf16."""
    n = raw.size
    raw[: n // 4] = rng.standard_normal(n // 4) * 10.0 ** rng.uniform(-9, 6, n // 4)
    raw[:9] = [0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 57344 + 4096]
    with np.errstate(all="ignore"):
        ties = ((rng.integers(0, 1 << 16, 4096, dtype=np.uint32) << 16) | 0x8000).view(np.float32)
        raw[-4096:] = ties.astype(raw.dtype)
        raw[-2048:] = np.nextafter(raw[-2048:], raw.dtype.type(np.inf))


def test_every_conversion_matches_the_contract(isa: Isa) -> None:
    maps = Maps(isa, _cast_maps(), 8)
    wrong: list[str] = []
    for a, b, saturate in _CASTS:
        x = _samples(a)
        with np.errstate(all="ignore"):
            want = numeric.cast(x, b, saturate=saturate)
        got = maps(f"cast_{a}_{b}_{int(saturate)}", b.numpy, x)
        same = want.view(f"u{b.itemsize}") == got.view(f"u{b.itemsize}")
        if b.is_float:
            with np.errstate(all="ignore"):
                same |= np.isnan(want.astype(np.float64)) & np.isnan(got.astype(np.float64))
        if not same.all():
            at = int(np.argmin(same))
            wrong.append(
                f"{a} -> {b} (saturate={saturate}): {x[at]} gives {got[at]}, not {want[at]}"
            )
    assert not wrong


# All targets


@pytest.mark.parametrize("name", ["v3", "v4", "neon"])
def test_emitted_code_compiles_for_every_target_without_foreign_symbols(name: str) -> None:
    target = generic_isa(name)
    lanes = target.lanes(DType.F32)
    for bodies, width in ((_unary(F32), lanes), (_unary(F64), lanes // 2), (_cast_maps(), lanes)):
        emitted = emit_maps(target, bodies, width)
        assert emitted == emit_maps(target, bodies, width), "the text must not vary"
        assert undefined_symbols(compile_text(emitted.text, target)) <= ALLOWED
        _check_instructions(emitted.text)


def _check_instructions(text: str) -> None:
    assert not re.search(r"\b(fast|contract|nnan|ninf|nsz|arcp|afn|reassoc)\b", text)
    for converted in re.findall(r"= fpto[su]i <\d+ x \w+> (\S+) ", text):
        assert converted.startswith("%within")
    assert not re.search(r"= fpto[su]i [^<]", text)
    for divisor in re.findall(r"= [su](?:div|rem) \S.*, (\S+)$", text, re.MULTILINE):
        assert divisor.startswith(("%nonzero", "splat")) or divisor.lstrip("-").isdigit()


# Memory


def _guarded(size: int) -> tuple[mmap.mmap, int]:
    """Return a mapping of two pages whose second is inaccessible, and the address of its last `size` usable bytes."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    return memory, start + page - size


@pytest.mark.parametrize("elem", [I8, F32, F64, I64], ids=str)
def test_masked_tails_touch_nothing_beyond_the_operand(isa: Isa, elem: Type) -> None:
    lanes = isa.vector_bits // elem.bits
    kind = vec(elem, lanes)
    module = Module(isa)
    with module.kernel("tail", 3) as k:
        mask = k.tail_mask(k.dim(2), kind)
        k.store_masked(k.load_masked(kind, k.slot(0), mask), k.slot(1), mask)
    emitted = finish(module)
    library = Library([compile_text(emitted.text, isa)], emitted.symbols, isa)
    dtype = {I8: np.int8, F32: np.float32, F64: np.float64, I64: np.int64}[elem]
    for count in (0, 1, lanes - 1, lanes):
        size = count * elem.itemsize
        keep, address = _guarded(size)
        source: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).view(
            dtype
        )
        source[:] = np.arange(count) + 1
        out = np.zeros(lanes, dtype)
        run_kernel(library, emitted.symbol, [source, out], [count])
        assert np.array_equal(out, [*source, *[0] * (lanes - count)])
        run_kernel(library, emitted.symbol, [out, source], [count])
        del source, keep


def test_division_guards_and_reports_the_first_zero(isa: Isa) -> None:
    module = Module(isa)
    kind = vec(I32, 8)
    with module.kernel("div", 4) as k, k.loop(0, k.dim(3), 8) as loop:
        a, b = (k.load(kind, k.slot(i), loop.index) for i in range(2))
        result, zero = k.divide_nonzero("sdiv", a, b)
        k.fail_where(zero, Failure.DIVIDE_BY_ZERO, loop.index)
        k.store(result, k.slot(2), loop.index)
    emitted = finish(module)
    _check_instructions(emitted.text)
    library = Library([compile_text(emitted.text, isa)], emitted.symbols, isa)
    low = -(2**31)
    a = np.array([7, -7, low, 9, 5, 6, 7, 8] * 2, np.int32)
    b = np.array([2, 2, -1, 4, 1, 1, 1, 1] * 2, np.int32)
    out = np.empty_like(a)
    assert run_kernel(library, emitted.symbol, [a, b, out], [16]) == np.iinfo(np.int64).max
    assert out[:4].tolist() == [3, -3, low, 2]
    b[[11, 14]] = 0
    error = run_kernel(library, emitted.symbol, [a, b, out], [16])
    assert divmod(error, 256) == (11, Failure.DIVIDE_BY_ZERO)


def _shl(_: Function, value: Value, amount: Value) -> Value:
    return value.shl(amount)


def _lshr(_: Function, value: Value, amount: Value) -> Value:
    return value.lshr(amount)


def _ashr(_: Function, value: Value, amount: Value) -> Value:
    return value.ashr(amount)


def test_shifts_of_the_width_or_more_give_zero(isa: Isa) -> None:
    bodies: dict[str, tuple[Body, list[Type], Type]] = {
        "shl": (_shl, [I32, I32], I32),
        "lshr": (_lshr, [I32, I32], I32),
        "ashr": (_ashr, [I32, I32], I32),
    }
    maps = Maps(isa, bodies, 8)
    a = np.full(8, -5, np.int32)
    n = np.array([0, 1, 31, 32, 33, 1000, -1, 2**31 - 1], np.int32)
    assert maps("shl", np.int32, a, n).tolist() == [-5, -10, -(2**31), 0, 0, 0, 0, 0]
    assert maps("lshr", np.uint32, a, n).tolist() == [2**32 - 5, 2**31 - 3, 1, 0, 0, 0, 0, 0]
    assert maps("ashr", np.int32, a, n).tolist() == [-5, -3, -1, -1, -1, -1, -1, -1]


def test_minimum_and_maximum_with_nan(isa: Isa) -> None:
    bodies: dict[str, tuple[Body, list[Type], Type]] = {
        "max_nan": (Function.fmax_nan, [F32, F32], F32),
        "min_nan": (Function.fmin_nan, [F32, F32], F32),
        "max_fast": (Function.fmax_fast, [F32, F32], F32),
    }
    maps = Maps(isa, bodies, 8)
    nan = np.nan
    a = np.array([1, 2, nan, 3, nan, -np.inf, 0, 5], np.float32)
    b = np.array([2, 1, 4, nan, nan, 7, -1, 5], np.float32)
    assert np.array_equal(maps("max_nan", np.float32, a, b), np.maximum(a, b), equal_nan=True)
    assert np.array_equal(maps("min_nan", np.float32, a, b), np.minimum(a, b), equal_nan=True)
    assert np.array_equal(maps("max_fast", np.float32, a, b), np.where(a > b, a, b), equal_nan=True)


def test_register_types_cover_every_dtype() -> None:
    assert {scalar_type(d).bits for d in _DTYPES} == {1, 8, 16, 32, 64}
