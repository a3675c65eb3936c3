# SPDX-License-Identifier: Apache-2.0
"""Scalar bodies as vector SSA: every operator of `rlx.expr.table` on every dtype, in one place.

Region kernels and every epilogue emit their bodies here, so an operator means the same wherever it
is fused. A value is in *register form* (narrow floats as f32, bool as i1) or in *storage form*
(what lies in memory: bits of f16 and bf16 as i16, bool as one byte 0 or 1). One vector length
serves a whole body; wider element types simply take several machine registers. Row instructions are
not emitted here: the row kernel provides their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

from rlx.backends.cpu import vconvert, vmath
from rlx.backends.cpu.abi import Failure, Kernel
from rlx.backends.cpu.builder import Function, Operand, Value
from rlx.backends.cpu.lltypes import F64, Type, int_type, scalar_type, storage_type, vec
from rlx.base.dtypes import DType
from rlx.base.errors import BuildError
from rlx.expr.body import Body, Instr
from rlx.expr.table import TABLE, constant_value

__all__ = [
    "BodyEmitter",
    "decode",
    "emit_body",
    "encode",
    "is_emittable",
    "load_storage",
    "load_value",
    "maximum",
    "may_fail",
    "memory_type",
    "minimum",
    "register_type",
    "store_storage",
    "store_value",
]

_DIVISIONS = frozenset({"div", "mod", "fmod"})
_ENCODED: WeakKeyDictionary[Function, dict[str, Value]] = WeakKeyDictionary()
"""Per function: name of a narrow float's register form -> its bits, so that storing is free."""


def may_fail(body: Body) -> bool:
    """Return whether a body divides integers, which records a failure for a zero divisor."""
    return any(i.op in _DIVISIONS and i.dtype.is_integer for i in body.instrs)


def is_emittable(body: Body) -> bool:
    """Return whether every value of a body has a register form (complex numbers have none)."""
    dtypes = {*body.inputs, *(i.dtype for i in body.instrs)}
    return not any(d.is_complex for d in dtypes)


def memory_type(dtype: DType) -> Type:
    """Return the type of elements in memory; complex numbers, only moved, are plain integers."""
    if dtype.is_complex:
        return int_type(8 * dtype.itemsize)
    return storage_type(dtype)


def register_type(dtype: DType, lanes: int) -> Type:
    """Return the type of a vector of `lanes` elements in register form (0 lanes: a scalar)."""
    return vec(scalar_type(dtype), lanes)


# Memory


def load_storage(
    fn: Function, kind: Type, pointer: Value, index: Operand, mask: Value | None = None
) -> Value:
    """Load elements in storage form, those of the mask if there is one (the others are 0)."""
    if mask is None:
        return fn.load(kind, pointer, index)
    return fn.load_masked(kind, pointer, mask, index)


def store_storage(
    fn: Function, value: Value, pointer: Value, index: Operand, mask: Value | None = None
) -> None:
    """Store elements in storage form, those of the mask if there is one."""
    if mask is None:
        fn.store(value, pointer, index)
    else:
        fn.store_masked(value, pointer, mask, index)


def load_value(
    fn: Function,
    dtype: DType,
    pointer: Value,
    index: Operand,
    lanes: int,
    mask: Value | None = None,
) -> Value:
    """Load `lanes` elements (0: a scalar) `index` elements after the pointer, in register form."""
    return decode(
        fn, dtype, load_storage(fn, vec(storage_type(dtype), lanes), pointer, index, mask)
    )


def store_value(
    fn: Function,
    dtype: DType,
    value: Value,
    pointer: Value,
    index: Operand,
    mask: Value | None = None,
) -> None:
    """Store a register value `index` elements after the pointer, rounded to a narrow dtype."""
    store_storage(fn, encode(fn, dtype, value), pointer, index, mask)


def decode(fn: Function, dtype: DType, raw: Value) -> Value:
    """Return the register form of elements in storage form."""
    if dtype is DType.BOOL:
        return raw.ne(0)
    if dtype in (DType.I4, DType.U4):
        # What the upper half of the byte holds is not defined.
        return raw.shl(4).ashr(4) if dtype.is_signed else raw & 15
    if not dtype.is_narrow_float:
        return raw
    value = vconvert.widen(fn, raw, dtype)
    _ENCODED.setdefault(fn, {})[value.text] = raw
    return value


def encode(fn: Function, dtype: DType, value: Value) -> Value:
    """Return the storage form of a register value; narrow floats round to nearest even."""
    if dtype is DType.BOOL:
        return fn.zext(value, storage_type(dtype))
    if dtype in (DType.I4, DType.U4):
        return value & 15
    if not dtype.is_narrow_float:
        return value
    known = _ENCODED.get(fn, {}).get(value.text)
    # A value of an fp8 dtype comes from a conversion, which has saturated if it should: an infinity is meant.
    return known if known is not None else vconvert.narrow(fn, value, dtype, saturate=False)


def _cast(fn: Function, value: Value, source: DType, to: DType, *, saturate: bool) -> Value:
    """Convert between register forms by the rules of `rlx.base.numeric.cast`."""
    if source is DType.F32 and to.is_narrow_float:
        return decode(fn, to, vconvert.narrow(fn, value, to, saturate=saturate))
    return vconvert.cast(fn, value, source, to, saturate=saturate)


# Operators. Each takes (emitter, dtype of the operands, operands).


def _neg(_: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return -a[0]


def _abs(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    if not dtype.is_float and not dtype.is_signed:
        return a[0]
    return e.fn.abs(a[0])


def _sign(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    x, fn = a[0], e.fn
    if not dtype.is_float:
        return fn.smax(fn.smin(x, 1), -1) if dtype.is_signed else fn.umin(x, 1)
    # The last arm keeps NaN and turns -0 into 0.
    return fn.select(x > 0.0, 1.0, fn.select(x < 0.0, -1.0, fn.select(x.eq(0.0), 0.0, x)))


def _add(_: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return a[0] | a[1] if dtype is DType.BOOL else a[0] + a[1]


def _sub(_: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return a[0] - a[1]


def _mul(_: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return a[0] & a[1] if dtype is DType.BOOL else a[0] * a[1]


def _fma(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return e.fn.fma(*a) if dtype.is_float else a[0] * a[1] + a[2]


def _div(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    if dtype.is_float:
        return a[0] / a[1]
    return e.divide("sdiv" if dtype.is_signed else "udiv", a[0], a[1])


def _fmod(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    if dtype.is_float:
        return _float_remainder(e.fn, a[0], a[1])
    return e.divide("srem" if dtype.is_signed else "urem", a[0], a[1])


def _mod(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    fn, (x, y) = e.fn, a
    if dtype.is_float:
        rest = _float_remainder(fn, x, y)
        other_sign = (rest < 0.0) ^ (y < 0.0)
        moved = fn.select(other_sign, rest + y, rest)
        return fn.select(rest.eq(0.0), fn.copysign(rest, y), moved)
    if not dtype.is_signed:
        return e.divide("urem", x, y)
    rest = e.divide("srem", x, y)
    return fn.select(rest.ne(0) & ((rest ^ y) < 0), rest + y, rest)


def _float_remainder(fn: Function, x: Value, y: Value) -> Value:
    """C's fmod, lane by lane; the remainder of two f32 is an f32, so going through f64 is exact."""
    kind, lanes = x.type, x.type.lanes
    wide = [fn.f32_to_f64(v) if v.type.bits == 32 else v for v in (x, y)]
    if not lanes:
        out = fn.call("fmod", *wide, result=F64)
    else:
        pairs = [[fn.extract(v, lane) for v in wide] for lane in range(lanes)]
        out = fn.pack([fn.call("fmod", *pair, result=F64) for pair in pairs])
    return fn.f64_to_f32(out) if kind.bits == 32 else out


def _pow(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    if dtype.is_float:
        return vmath.power(e.fn, a[0], a[1])
    return _integer_pow(e.fn, a[0], a[1], signed=dtype.is_signed)


def _integer_pow(fn: Function, base: Value, exponent: Value, *, signed: bool) -> Value:
    """Square and multiply, wrapping; a negative power is the inverse truncated to an integer."""
    one = fn.const(1, base.type)
    count = fn.select(exponent < 0, 0 - exponent, exponent) if signed else exponent
    with fn.while_([one, base, count]) as loop:
        result, square, left = loop.carry
        loop.test(fn.any(left.ne(0)) if base.type.lanes else left.ne(0))
        result = fn.select((left & 1).ne(0), result * square, result)
        loop.next(result, square * square, left.lshr(1))
    power = loop.out[0]
    if not signed:
        return power
    limit = (1 << (base.type.bits - 1)) - 1
    inverse = fn.select(base.eq(0), limit, fn.select(base.eq(1) | base.eq(-1), power, 0))
    return fn.select(exponent < 0, inverse, power)


def _max(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return maximum(e.fn, dtype, a[0], a[1])


def _min(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return minimum(e.fn, dtype, a[0], a[1])


def maximum(fn: Function, dtype: DType, a: Value, b: Value) -> Value:
    """Return the larger of both; NaN when either is NaN."""
    if dtype.is_float:
        return fn.fmax_nan(a, b)
    if dtype is DType.BOOL:
        return a | b
    return fn.smax(a, b) if dtype.is_signed else fn.umax(a, b)


def minimum(fn: Function, dtype: DType, a: Value, b: Value) -> Value:
    """Return the smaller of both; NaN when either is NaN."""
    if dtype.is_float:
        return fn.fmin_nan(a, b)
    if dtype is DType.BOOL:
        return a & b
    return fn.smin(a, b) if dtype.is_signed else fn.umin(a, b)


def _shr(e: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    if not dtype.is_signed:
        return a[0].lshr(a[1])
    # A shift of the width or more gives 0 here, also for negative numbers.
    return e.fn.select(a[1].ult(a[0].type.bits), a[0].ashr(a[1]), 0)


def _less(_: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return a[0] < a[1] if dtype.is_float or dtype.is_signed else a[0].ult(a[1])


def _less_equal(_: BodyEmitter, dtype: DType, a: Sequence[Value]) -> Value:
    return a[0] <= a[1] if dtype.is_float or dtype.is_signed else a[0].ule(a[1])


_Emit = Callable[["BodyEmitter", DType, Sequence[Value]], Value]
_OPERATORS: dict[str, _Emit] = {
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "sqrt": lambda e, _, a: e.fn.sqrt(a[0]),
    "rsqrt": lambda e, _, a: 1.0 / e.fn.sqrt(a[0]),
    "floor": lambda e, _, a: e.fn.floor(a[0]),
    "ceil": lambda e, _, a: e.fn.ceil(a[0]),
    "trunc": lambda e, _, a: e.fn.trunc_float(a[0]),
    "round": lambda e, _, a: e.fn.round_even(a[0]),
    "isnan": lambda _e, _, a: a[0].is_nan(),
    "isinf": lambda e, _, a: e.fn.abs(a[0]).eq(float("inf")),
    "not": lambda _e, _, a: ~a[0],
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "fmod": _fmod,
    "mod": _mod,
    "pow": _pow,
    "max": _max,
    "min": _min,
    "atan2": lambda e, _, a: vmath.atan2(e.fn, a[0], a[1]),
    "and": lambda _e, _, a: a[0] & a[1],
    "or": lambda _e, _, a: a[0] | a[1],
    "xor": lambda _e, _, a: a[0] ^ a[1],
    "shl": lambda _e, _, a: a[0].shl(a[1]),
    "shr": _shr,
    "eq": lambda _e, _, a: a[0].eq(a[1]),
    "ne": lambda _e, _, a: a[0].ne(a[1]),
    "lt": _less,
    "le": _less_equal,
    "gt": lambda e, d, a: _less(e, d, (a[1], a[0])),
    "ge": lambda e, d, a: _less_equal(e, d, (a[1], a[0])),
    "fma": _fma,
}


class BodyEmitter:
    """Emits the instructions of a body on demand, each once, for one vector of points.

    Args:
        fn: where to emit; a `Kernel` when the body may fail.
        body: the instructions.
        lanes: vector length (0: scalars).
        known: values that exist already, by index (inputs first, then instructions), in register
            form.
        read: gives an input in storage form when it is first needed.
        mask: lanes that are real; the others never fail.
        flat_index: index of lane 0 for failures; lanes are neighbours.
    """

    def __init__(
        self,
        fn: Function,
        body: Body,
        lanes: int,
        *,
        known: Mapping[int, Value] | None = None,
        read: Callable[[int], Value] | None = None,
        mask: Value | None = None,
        flat_index: Operand = 0,
    ) -> None:
        self.fn = fn
        self.body = body
        self.lanes = lanes
        self.mask = mask
        self.flat_index = flat_index
        self._read = read
        self._values: dict[int, Value] = dict(known or {})
        self._raw: dict[int, Value] = {}

    def raw(self, index: int) -> Value:
        """Return a value in storage form; an input that is only moved is never converted."""
        if index < len(self.body.inputs) and index not in self._values:
            return self._input(index)
        return encode(self.fn, self.body.dtype(index), self.value(index))

    def value(self, index: int) -> Value:
        """Return a value in register form."""
        found = self._values.get(index)
        if found is None:
            n = len(self.body.inputs)
            if index < n:
                found = decode(self.fn, self.body.inputs[index], self._input(index))
            else:
                found = self._emit(self.body.instrs[index - n])
            self._values[index] = found
        return found

    def child(
        self, read: Callable[[int], Value], mask: Value | None = None, flat_index: Operand = 0
    ) -> BodyEmitter:
        """Return an emitter for one vector that starts with everything emitted here."""
        out = BodyEmitter(
            self.fn,
            self.body,
            self.lanes,
            known=self._values,
            read=read,
            mask=mask,
            flat_index=flat_index,
        )
        out._raw.update(self._raw)
        return out

    def set(self, index: int, value: Value) -> None:
        """Provide a value that was computed elsewhere."""
        self._values[index] = value

    def divide(self, op: str, a: Value, b: Value) -> Value:
        """Return an integer quotient or remainder; a zero divisor records a failure."""
        result, zero = self.fn.divide_nonzero(op, a, b)
        if not isinstance(self.fn, Kernel):
            raise BuildError(
                f"integer division in {self.fn.name} needs a kernel to record failures in"
            )
        failed = zero if self.mask is None else zero & self.mask
        self.fn.fail_where(failed, Failure.DIVIDE_BY_ZERO, self.flat_index)
        return result

    def _input(self, index: int) -> Value:
        if index not in self._raw:
            if self._read is None:
                raise BuildError(f"input {index} of {self.body} has no value")
            self._raw[index] = self._read(index)
        return self._raw[index]

    def _emit(self, instr: Instr) -> Value:
        if instr.op == "const":
            number = constant_value(str(instr.attribute), instr.dtype).item()
            return self.fn.const(number, register_type(instr.dtype, self.lanes))
        dtype = self.body.dtype(instr.args[-1])
        args = [self.value(a) for a in instr.args]
        if instr.op == "cast":
            return _cast(self.fn, args[0], dtype, instr.dtype, saturate=instr.attribute != "wrap")
        if instr.op == "select":
            return self.fn.select(*args)
        if TABLE[instr.op].is_row:
            raise BuildError(f"row instruction {instr} needs a row kernel")
        found = _OPERATORS.get(instr.op)
        return (
            found(self, dtype, args)
            if found is not None
            else vmath.UNARY[instr.op](self.fn, args[0])
        )


def emit_body(
    fn: Function,
    body: Body,
    inputs: Sequence[Value],
    lanes: int,
    *,
    mask: Value | None = None,
    flat_index: Operand = 0,
) -> list[Value]:
    """Emit an elementwise body and return its results, all in register form.

    Args:
        fn: where to emit; a `Kernel` when the body may fail.
        body: instructions without row reductions.
        inputs: one vector of `lanes` elements per input (scalars are splatted).
        lanes: vector length (0: scalars).
        mask: lanes that are real; the others never fail.
        flat_index: index of lane 0 for failures; lanes are neighbours.

    Raises:
        BuildError: a row instruction, or integer division outside a kernel.
    """
    kinds = [register_type(d, lanes) for d in body.inputs]
    known = {i: fn.lift(v, kind) for i, (v, kind) in enumerate(zip(inputs, kinds, strict=True))}
    emitter = BodyEmitter(fn, body, lanes, known=known, mask=mask, flat_index=flat_index)
    return [emitter.value(r) for r in body.results]
