# SPDX-License-Identifier: Apache-2.0
"""Bodies as single-assignment C text, shared by CUDA C++ and Metal Shading Language.

`body_text` writes the statements, `map_kernel` a whole elementwise kernel and `row_kernel` one with row reductions.
A `Dialect` holds what differs: type names, the kernel's signature, thread index, literals and function names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlx.base.dtypes import DType
from rlx.base.errors import BuildError
from rlx.expr.approximations import ERF32_BORDER, ERF32_LIMIT, ERF32_SMALL, ERF32_TAIL
from rlx.expr.body import Body, Instr
from rlx.expr.table import TABLE

__all__ = ["CUDA", "MSL", "Dialect", "body_text", "map_kernel", "row_kernel"]


@dataclass(frozen=True)
class Dialect:
    """One C-like language.

    Attributes:
        name: for messages.
        types: dtype -> type name; dtypes that are missing are refused.
        kernel: (name, parameters) -> the head of a kernel up to its opening brace.
        pointer: (type name, is const, name, index) -> one parameter.
        extent: (name, index) -> an extent parameter (64-bit integer).
        index: expression of the global thread index as a 64-bit integer.
        prelude: text before the kernel (includes).
        functions: scalar operator -> format with {0} {1} {2}, over f32 operands, where it differs from `_COMMON`.
    """

    name: str
    types: dict[DType, str]
    kernel: Callable[[str, Sequence[str]], str]
    pointer: Callable[[str, bool, str, int], str]
    extent: Callable[[str, int], str]
    index: str
    prelude: str = ""
    functions: dict[str, str] = field(default_factory=dict[str, str])

    def type(self, dtype: DType) -> str:
        """Return the type name.

        Raises:
            BuildError: the language has no such type.
        """
        if dtype not in self.types:
            raise BuildError(f"{self.name} has no type for {dtype}; cast to f32 first")
        return self.types[dtype]


_COMMON = {
    "neg": "-{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "select": "{0} ? {1} : {2}",
    "isnan": "{0} != {0}",
    # NaN is the greatest value and propagates, on both sides.
    "max": "({0} > {1} || {0} != {0}) ? {0} : {1}",
    "min": "({0} < {1} || {0} != {0}) ? {0} : {1}",
    "sign": "{0} > 0 ? 1 : {0} < 0 ? -1 : {0}",
    "sigmoid": "1.0f / (1.0f + exp(-{0}))",
    "fma": "fma({0}, {1}, {2})",
    "round": "rint({0})",
    "fmod": "fmod({0}, {1})",
    "mod": "{0} - floor({0} / {1}) * {1}",
    "pow": "pow({0}, {1})",
    "atan2": "atan2({0}, {1})",
    "isinf": "isinf({0})",
    "abs": "fabs({0})",
    **{
        name: name + "({0})"
        for name in "sqrt rsqrt exp expm1 log log1p tanh sin cos tan asin acos atan sinh cosh asinh acosh "
        "atanh floor ceil trunc".split()
    },
}
_INTEGER = {
    "abs": "{0}",
    "sign": "{0} != 0",
    "not": "~{0}",
    # A zero divisor is reported by the host before the launch; the kernel only has to stay safe.
    "div": "{1} == 0 ? 0 : {0} / {1}",
    "fmod": "{1} == 0 ? 0 : {0} % {1}",
    "mod": "{1} == 0 ? 0 : {0} % {1}",
    "fma": "{0} * {1} + {2}",
    "shl": "{1} >= {bits} ? 0 : {0} << {1}",
    "shr": "{1} >= {bits} ? 0 : {0} >> {1}",
    "max": "{0} > {1} ? {0} : {1}",
    "min": "{0} < {1} ? {0} : {1}",
}
# The remainder has the sign of the divisor, C's has that of the dividend.
_SIGNED = {
    "abs": "{0} < 0 ? -{0} : {0}",
    "sign": "{0} > 0 ? 1 : {0} < 0 ? -1 : 0",
    "mod": "{1} == 0 ? 0 : {0} % {1} == 0 || ({0} < 0) == ({1} < 0) ? {0} % {1} : {0} % {1} + {1}",
}
_FLOAT_ONLY = frozenset({"pow"})
"""Operators whose text would go through floats and lose digits of an integer."""


def body_text(
    body: Body, dialect: Dialect, inputs: Sequence[str], indent: str = "  "
) -> tuple[list[str], list[str]]:
    """Return (statements, result expressions) of a body without row instructions.

    Args:
        body: what to compute.
        dialect: the language.
        inputs: an expression per body input, already of its dtype.
        indent: what every statement begins with.
    """
    names = list(inputs)
    lines: list[str] = []
    for position, instr in enumerate(body.instrs):
        name = f"t{position}"
        lines.append(_statement(dialect, instr, name, [names[a] for a in instr.args], body, indent))
        names.append(name)
    return lines, [names[r] for r in body.results]


def _statement(
    dialect: Dialect, instr: Instr, name: str, args: Sequence[str], body: Body, indent: str
) -> str:
    source = body.dtype(instr.args[0]) if instr.args else instr.dtype
    return f"{indent}const {dialect.type(instr.dtype)} {name} = {_expression(dialect, instr, args, source)};"


def _expression(dialect: Dialect, instr: Instr, args: Sequence[str], source: DType) -> str:
    if instr.op == "const":
        return _literal(str(instr.attribute), instr.dtype)
    if instr.op == "cast":
        return _cast(dialect, args[0], source, instr.dtype)
    if TABLE[instr.op].is_row:
        raise BuildError(f"{instr.op} belongs into a row kernel")
    if instr.op == "not" and instr.dtype is DType.BOOL:
        return f"!{args[0]}"
    if instr.op == "div" and instr.dtype.is_float:
        return f"{args[0]} / {args[1]}"
    if source.is_integer and instr.op in _INTEGER:
        template = (_SIGNED if source.is_signed else _INTEGER).get(instr.op, _INTEGER[instr.op])
        return template.format(*args, bits=8 * source.itemsize)
    template = dialect.functions.get(instr.op) or _COMMON.get(instr.op)
    if template is None or (source.is_integer and instr.op in _FLOAT_ONLY):
        raise BuildError(f"{dialect.name} has no text for scalar operator {instr.op!r} on {source}")
    return template.format(*args)


def _cast(dialect: Dialect, value: str, source: DType, to: DType) -> str:
    target = dialect.type(to)
    if source.is_narrow_float and not to.is_float:
        value = f"(float){value}"  # comparisons of a narrow float with a number are ambiguous
    if to is DType.BOOL:
        return f"{value} != 0"
    if to.is_integer and source.is_float:
        bits = 8 * to.itemsize
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if to.is_signed else (0, 2**bits - 1)
        # Converted back, the largest integer may round up to 2^bits, so the comparison is with the power of two.
        top = _literal(repr(float(high + 1)), DType.F32)
        bottom = _literal(repr(float(low)), DType.F32)
        low_text, high_text = _literal(str(low), to), _literal(str(high), to)
        return (
            f"{value} != {value} ? ({target})0 : {value} >= {top} ? {high_text} : "
            f"{value} < {bottom} ? {low_text} : ({target}){value}"
        )
    return f"({target}){value}"


def _literal(text: str, dtype: DType) -> str:
    if dtype is DType.BOOL:
        return "true" if text == "True" else "false"
    if not dtype.is_float:
        value = int(text)
        if value == -(2**63):
            return "(-9223372036854775807L - 1L)"
        suffix = ("u" if not dtype.is_signed else "") + ("L" if dtype.itemsize == 8 else "")
        return f"{value}{suffix}"
    value = float(text)
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if dtype is DType.F64:
        return repr(value)
    single = struct.unpack("f", struct.pack("f", value))[0]
    return f"{single:.9g}f" if any(c in f"{single:.9g}" for c in ".e") else f"{single:.9g}.0f"


def map_kernel(name: str, body: Body, dialect: Dialect, strides: Sequence[int]) -> str:
    """Return a kernel that computes `body` for every element of a contiguous space.

    Args:
        name: the kernel's name.
        body: without row instructions.
        dialect: the language.
        strides: per input 1 (walks with the output) or 0 (one element for all).
    """
    parameters, loads = _operands(body, dialect, ["i" if s else "0" for s in strides])
    statements, results = body_text(body, dialect, [f"x{i}" for i in range(len(body.inputs))])
    stores = [f"  out{i}[i] = {value};" for i, value in enumerate(results)]
    head = dialect.kernel(name, [*parameters, dialect.extent("n", len(parameters))])
    lines = [dialect.prelude, head, f"  const long i = {dialect.index};", "  if (i >= n) return;"]
    return "\n".join([*lines, *loads, *statements, *stores, "}", ""])


def _operands(body: Body, dialect: Dialect, where: Sequence[str]) -> tuple[list[str], list[str]]:
    parameters: list[str] = []
    loads: list[str] = []
    for index, dtype in enumerate(body.inputs):
        parameters.append(dialect.pointer(dialect.type(dtype), True, f"in{index}", len(parameters)))
        loads.append(f"  const {dialect.type(dtype)} x{index} = in{index}[{where[index]}];")
    for index, dtype in enumerate(body.result_types):
        parameters.append(
            dialect.pointer(dialect.type(dtype), False, f"out{index}", len(parameters))
        )
    return parameters, loads


_REDUCTIONS = {
    "rsum": ("0", "{acc} + {x}"),
    "rprod": ("1", "{acc} * {x}"),
    "rmax": ("-INFINITY", "({acc} > {x} || {acc} != {acc}) ? {acc} : {x}"),
    "rmin": ("INFINITY", "({acc} < {x} || {acc} != {acc}) ? {acc} : {x}"),
}


def row_kernel(name: str, body: Body, dialect: Dialect, kinds: Sequence[str]) -> str:
    """Return a kernel in which one thread computes one row of length n: the plain form every target can compile.

    Args:
        name: the kernel's name.
        body: with row instructions over f32 or f64.
        dialect: the language.
        kinds: per input `full` (an element per point), `row` (one per row), `column` (shared by all rows).
    """
    index = {"full": "r * n + i", "row": "r", "column": "i"}
    where = [index[k] for k in kinds]
    uniform = body.uniform([k == "row" for k in kinds])
    parameters, _ = _operands(body, dialect, where)
    parameters += [
        dialect.extent("rows", len(parameters)),
        dialect.extent("n", len(parameters) + 1),
    ]
    lines = [dialect.prelude, dialect.kernel(name, parameters)]
    lines += [f"  const long r = {dialect.index};", "  if (r >= rows) return;"]
    known: dict[int, str] = {}
    for i, kind in enumerate(kinds):
        if kind == "row":
            known[i] = f"in{i}[r]"
    count = len(body.inputs)
    for position, instr in enumerate(body.instrs):
        place = count + position
        if TABLE[instr.op].is_row:
            lines += _reduction(dialect, body, instr, position, known, where)
            known[place] = f"t{position}"
        elif uniform[place]:
            args = [known[a] for a in instr.args]
            lines.append(_statement(dialect, instr, f"t{position}", args, body, "  "))
            known[place] = f"t{position}"
    lines += _row_stores(dialect, body, known, uniform, where)
    return "\n".join([*lines, "}", ""])


def _inside(
    dialect: Dialect, body: Body, wanted: Sequence[int], known: dict[int, str], where: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return (statements inside the row loop, expressions) for values that vary along the row."""
    count = len(body.inputs)
    needed: set[int] = set()
    pending = list(wanted)
    while pending:
        current = pending.pop()
        if current in needed or current in known:
            continue
        needed.add(current)
        if current >= count:
            pending.extend(body.instrs[current - count].args)
    names = dict(known)
    lines: list[str] = []
    for current in sorted(needed):
        if current < count:
            names[current] = f"in{current}[{where[current]}]"
        else:
            instr = body.instrs[current - count]
            args = [names[a] for a in instr.args]
            lines.append(_statement(dialect, instr, f"v{current - count}", args, body, "    "))
            names[current] = f"v{current - count}"
    return lines, [names[w] for w in wanted]


def _reduction(
    dialect: Dialect,
    body: Body,
    instr: Instr,
    position: int,
    known: dict[int, str],
    where: Sequence[str],
) -> list[str]:
    first, step = _REDUCTIONS[instr.op]
    statements, (value,) = _inside(dialect, body, [instr.args[0]], known, where)
    update = step.format(acc=f"t{position}", x=value)
    return [
        f"  {dialect.type(instr.dtype)} t{position} = {first};",
        "  for (long i = 0; i < n; ++i) {",
        *statements,
        f"    t{position} = {update};",
        "  }",
    ]


def _row_stores(
    dialect: Dialect,
    body: Body,
    known: dict[int, str],
    uniform: Sequence[bool],
    where: Sequence[str],
) -> list[str]:
    lines = [f"  out{i}[r] = {known[r]};" for i, r in enumerate(body.results) if uniform[r]]
    varying = [(i, r) for i, r in enumerate(body.results) if not uniform[r]]
    if varying:
        statements, values = _inside(dialect, body, [r for _, r in varying], known, where)
        lines += ["  for (long i = 0; i < n; ++i) {", *statements]
        lines += [
            f"    out{i}[r * n + i] = {value};"
            for (i, _), value in zip(varying, values, strict=True)
        ]
        lines.append("  }")
    return lines


def _horner(x: str, coefficients: Sequence[float]) -> str:
    """Return c[0] + c[1] x + c[2] x^2 + ... as one expression, an fma a term."""
    total, *rest = (_literal(repr(c), DType.F32) for c in reversed(coefficients))
    for coefficient in rest:
        total = f"fma({total}, {x}, {coefficient})"
    return total


def _erf() -> str:
    """Return the text of erf in f32, by the polynomials that the CPU uses; NaN takes the first range and stays."""
    limit = f"fmin(fabs({{0}}), {_literal(repr(ERF32_LIMIT), DType.F32)})"
    tail = f"copysign(1.0f - exp({limit} * {_horner(limit, ERF32_TAIL)}), {{0}})"
    small = f"fma({_horner('({0} * {0})', ERF32_SMALL)}, {{0}}, {{0}})"
    return f"(fabs({{0}}) > {_literal(repr(ERF32_BORDER), DType.F32)} ? {tail} : {small})"


def _cuda_kernel(name: str, parameters: Sequence[str]) -> str:
    return f'extern "C" __global__ void {name}({", ".join(parameters)}) {{'


def _msl_kernel(name: str, parameters: Sequence[str]) -> str:
    return f"kernel void {name}({', '.join(parameters)}, uint gid [[thread_position_in_grid]]) {{"


_INTEGER_TYPES = {
    DType.I8: "signed char",
    DType.I16: "short",
    DType.I32: "int",
    DType.I64: "long",
    DType.U8: "unsigned char",
    DType.U16: "unsigned short",
    DType.U32: "unsigned int",
    DType.U64: "unsigned long",
    DType.BOOL: "bool",
    DType.F32: "float",
}
CUDA = Dialect(
    "CUDA",
    {**_INTEGER_TYPES, DType.F64: "double", DType.F16: "__half", DType.BF16: "__nv_bfloat16"},
    _cuda_kernel,
    lambda type_, const, name, _: f"{'const ' if const else ''}{type_}* __restrict__ {name}",
    lambda name, _: f"const long {name}",
    "(long)blockIdx.x * blockDim.x + threadIdx.x",
    "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n",
    {"erf": "erf({0})"},
)
MSL = Dialect(
    "MSL",
    {**_INTEGER_TYPES, DType.F16: "half", DType.BF16: "bfloat"},
    _msl_kernel,
    lambda type_, const, name, index: (
        f"device {'const ' if const else ''}{type_}* {name} [[buffer({index})]]"
    ),
    lambda name, index: f"constant long& {name} [[buffer({index})]]",
    "(long)gid",
    "#include <metal_stdlib>\nusing namespace metal;\n",
    {
        # MSL has none of these; they are written with what it has, within the documented tolerance of its fast path.
        "erf": _erf(),
        "expm1": "(fabs({0}) < 1e-2f ? {0} * (1.0f + {0} * (0.5f + {0} * 0.16666667f)) : exp({0}) - 1.0f)",
        "log1p": "(fabs({0}) < 1e-2f ? {0} * (1.0f - {0} * (0.5f - {0} * 0.33333333f)) : log(1.0f + {0}))",
    },
)
