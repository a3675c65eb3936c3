# SPDX-License-Identifier: Apache-2.0
"""Text of bodies in CUDA C++ and Metal; nvcc compiles the former where it is installed."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.base.errors import BuildError
from rlx.expr.body import Body, BodyBuilder
from rlx.expr.table import TABLE
from rlx.kernel.cstyle import CUDA, MSL, body_text, map_kernel, row_kernel

_F32 = DType.F32
_INTEGER_ONLY = frozenset("not and or xor shl shr".split())
_NVCC = shutil.which("nvcc")
_needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs the C compiler cc on PATH")
_needs_nvcc = pytest.mark.skipif(_NVCC is None, reason="needs the CUDA compiler nvcc on PATH")


def _one(op: str, *dtypes: DType, to: DType | None = None) -> Body:
    builder = BodyBuilder(dtypes)
    args = [builder.input(i) for i in range(len(dtypes))]
    return builder.finish(builder.emit(op, *args, dtype=to))


def _scale_and_shift() -> Body:
    builder = BodyBuilder([_F32, _F32])
    x, y = builder.input(0), builder.input(1)
    return builder.finish(x * y + 1.0, x < y)


def _softmax() -> Body:
    builder = BodyBuilder([_F32, _F32, _F32])
    x, bias, factor = (builder.input(i) for i in range(3))
    shifted = x + bias
    e = builder.emit("exp", shifted - builder.emit("rmax", shifted))
    total = builder.emit("rsum", e)
    return builder.finish(e / total * factor, total)


_BOTH = frozenset("add sub mul div fmod mod max min abs neg sign fma".split())


def _scalar_bodies() -> Iterator[tuple[str, Body]]:
    """Iterate a body per scalar operator over f32, and over integers where these have it."""
    for name, rule in TABLE.items():
        if rule.is_row or name in ("const", "cast"):
            continue
        if name == "select":
            yield name, _one(name, DType.BOOL, _F32, _F32)
        elif name not in _INTEGER_ONLY:
            yield name, _one(name, *[_F32] * rule.arity)
        if name in _INTEGER_ONLY | _BOTH:
            yield f"{name}-i32", _one(name, *[DType.I32] * rule.arity)
            yield f"{name}-i64", _one(name, *[DType.I64] * rule.arity)
        if name in _INTEGER_ONLY | _BOTH:
            yield f"{name}-u8", _one(name, *[DType.U8] * rule.arity)


def _casts() -> Iterator[tuple[str, Body]]:
    for source in (DType.F32, DType.I32, DType.BOOL, DType.F16, DType.BF16):
        for to in (DType.I8, DType.U64, DType.I64, DType.F32, DType.F16, DType.BF16, DType.BOOL):
            if source is not to:
                yield f"cast-{source}-{to}", _one("cast", source, to=to)


_BODIES = {**dict(_scalar_bodies()), **dict(_casts())}


def test_map_kernel_for_cuda() -> None:
    text = map_kernel("scale", _scale_and_shift(), CUDA, [1, 0])
    lines = [line.strip() for line in text.splitlines()]
    assert (
        'extern "C" __global__ void scale(const float* __restrict__ in0, '
        "const float* __restrict__ in1, float* __restrict__ out0, bool* __restrict__ out1, "
        "const long n) {"
    ) in lines
    assert "const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;" in lines
    assert "if (i >= n) return;" in lines
    assert "const float x0 = in0[i];" in lines
    assert "const float x1 = in1[0];" in lines
    assert "const float t0 = x0 * x1;" in lines
    assert "const float t1 = 1.0f;" in lines
    assert "const float t2 = t0 + t1;" in lines
    assert "out0[i] = t2;" in lines
    assert "out1[i] = t3;" in lines
    assert text.count("{") == text.count("}")


def test_map_kernel_for_metal() -> None:
    text = map_kernel("scale", _scale_and_shift(), MSL, [1, 0])
    assert text.startswith("#include <metal_stdlib>\nusing namespace metal;\n")
    head = next(line for line in text.splitlines() if line.startswith("kernel void scale("))
    assert re.findall(r"\[\[buffer\((\d)\)\]\]", head) == ["0", "1", "2", "3", "4"]
    assert "device const float* in0 [[buffer(0)]]" in head
    assert "device bool* out1 [[buffer(3)]]" in head
    assert "constant long& n [[buffer(4)]]" in head
    assert head.endswith("uint gid [[thread_position_in_grid]]) {")
    assert "__restrict__" not in text
    assert "const long i = (long)gid;" in text


@pytest.mark.parametrize("dialect", [CUDA, MSL], ids=lambda d: d.name)
def test_row_kernel(dialect: object) -> None:
    assert dialect in (CUDA, MSL)
    text = row_kernel(
        "softmax", _softmax(), CUDA if dialect is CUDA else MSL, ["full", "column", "row"]
    )
    assert text.count("for (long i = 0; i < n; ++i) {") == 3  # maximum, sum, stores
    assert "if (r >= rows) return;" in text
    assert "in0[r * n + i]" in text
    assert "in1[i]" in text
    assert "in2[r]" in text
    assert "out1[r] = " in text
    assert "out0[r * n + i] = " in text
    assert text.index("out1[r]") > text.rindex("+ v")
    assert text.count("{") == text.count("}")


def test_a_value_uniform_along_the_row_is_computed_once() -> None:
    builder = BodyBuilder([_F32, _F32])
    x, y = builder.input(0), builder.input(1)
    root = builder.emit("sqrt", y)
    text = row_kernel("f", builder.finish(x * root), CUDA, ["full", "row"])
    assert text.index("sqrt") < text.index("for (")
    assert text.count("sqrt") == 1


def test_bodies_without_rows_only() -> None:
    with pytest.raises(BuildError, match="rmax belongs into a row kernel"):
        body_text(_softmax(), CUDA, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1.0, _F32, "1.0f"),
        (0.1, _F32, "0.100000001f"),
        (1e30, _F32, "1.00000002e+30f"),
        (-0.0, _F32, "-0.0f"),
        (float("inf"), _F32, "INFINITY"),
        (float("-inf"), _F32, "-INFINITY"),
        (float("nan"), _F32, "NAN"),
        (0.1, DType.F64, "0.1"),
        (True, DType.BOOL, "true"),
        (-7, DType.I32, "-7"),
        (7, DType.U8, "7u"),
        (2**64 - 1, DType.U64, "18446744073709551615uL"),
        (-(2**63), DType.I64, "(-9223372036854775807L - 1L)"),
    ],
)
def test_literals(value: float, dtype: DType, text: str) -> None:
    builder = BodyBuilder([])
    (line,), _ = body_text(builder.finish(builder.const(value, dtype)), CUDA, [])
    assert line == f"  const {CUDA.type(dtype)} t0 = {text};"


def test_dtypes_a_language_lacks_are_refused() -> None:
    with pytest.raises(BuildError, match="MSL has no type for f64"):
        map_kernel("f", _one("neg", DType.F64), MSL, [1])
    with pytest.raises(BuildError, match="CUDA has no type for f8e4m3"):
        map_kernel("f", _one("cast", DType.F8E4M3, to=_F32), CUDA, [1])


def test_integer_powers_are_refused() -> None:
    with pytest.raises(BuildError, match="no text for scalar operator 'pow' on i32"):
        map_kernel("f", _one("pow", DType.I32, DType.I32), CUDA, [1, 1])


@_needs_cc
def test_integer_remainders_have_the_sign_of_the_divisor(tmp_path: Path) -> None:
    _, (floored,) = body_text(_one("mod", DType.I32, DType.I32), CUDA, ["a", "b"])
    lines, _ = body_text(_one("mod", DType.I32, DType.I32), CUDA, ["a", "b"])
    source = (
        f"int f(int a, int b) {{ {lines[0]} return {floored}; }}\n"
        "#include <stdio.h>\nint main() { for (int a = -7; a < 8; ++a) for (int b = -3; b < 4; ++b)"
        ' printf("%d ", f(a, b)); }'
    )
    want = [a % b if b else 0 for a in range(-7, 8) for b in range(-3, 4)]
    assert [int(n) for n in _run_c(source, tmp_path)] == want


@pytest.mark.parametrize("op", ["erf", "expm1", "log1p"])
def test_metal_spells_out_what_it_lacks(op: str) -> None:
    assert f"{op}(" not in map_kernel("f", _one(op, _F32), MSL, [1])


def _run_c(source: str, folder: Path) -> list[str]:
    """Compile and run a C program; return the words that it prints."""
    (folder / "f.c").write_text(source, encoding="utf-8")
    program = str(folder / "f")
    command = ["cc", "-ffp-contract=off", "-o", program, str(folder / "f.c"), "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    return done.stdout.split()


@_needs_cc
def test_erf_for_metal_is_within_4_ulp(tmp_path: Path) -> None:
    # The text is C as well, with the type-generic functions of tgmath.h in the place of Metal's overloads.
    (line,), (result,) = body_text(_one("erf", _F32), MSL, ["x"])
    source = (
        "#include <stdio.h>\n#include <tgmath.h>\n"
        f"static float f(float x) {{ {line} return {result}; }}\n"
        "int main() { for (int i = -40000; i <= 40000; ++i) "
        'printf("%a ", f(i * 0.000125f)); printf("%a %a %a", f(NAN), f(INFINITY), f(-0.0f)); }'
    )
    *values, nan, top, zero = (float.fromhex(word) for word in _run_c(source, tmp_path))
    x = np.arange(-40000, 40001).astype(np.float32) * np.float32(0.000125)
    want = np.array([math.erf(v) for v in x.tolist()])
    unit = np.spacing(np.abs(want).astype(np.float32))
    assert np.max(np.abs(np.array(values) - want) / unit) <= 4
    assert math.isnan(nan)
    assert (top, math.copysign(1, zero)) == (1.0, -1.0)


@pytest.mark.parametrize("name", _BODIES)
def test_every_operator_has_text_in_both(name: str) -> None:
    body = _BODIES[name]
    for dialect in (CUDA, MSL):
        text = map_kernel("f", body, dialect, [1] * len(body.inputs))
        assert "out0[i] = t0;" in text
        assert "{0}" not in text


def _compile(texts: Sequence[str], folder: Path) -> str:
    source, target = folder / "kernels.cu", folder / "kernels.ptx"
    source.write_text("\n".join(texts), encoding="utf-8")
    command = [_NVCC or "nvcc", "-ptx", "-O0", "-Werror", "all-warnings", "-o", str(target)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target.read_text(encoding="utf-8")


@_needs_nvcc
def test_cuda_compiles(tmp_path: Path) -> None:
    texts = [
        map_kernel(f"k{i}", body, CUDA, [1] * len(body.inputs))
        for i, body in enumerate(_BODIES.values())
    ]
    texts.append(map_kernel("scale", _scale_and_shift(), CUDA, [1, 0]))
    texts.append(row_kernel("softmax", _softmax(), CUDA, ["full", "column", "row"]))
    ptx = _compile(texts, tmp_path)
    entries = set(re.findall(r"\.entry (\w+)", ptx))
    assert entries == {*(f"k{i}" for i in range(len(_BODIES))), "scale", "softmax"}
