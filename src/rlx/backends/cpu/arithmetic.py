# SPDX-License-Identifier: Apache-2.0
"""Arithmetic, conversions and horizontal operations of a function under construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.emitter import Emitter
from rlx.backends.cpu.lltypes import F32, F64, I1, I32, I64, I128, PTR, Type, int_type
from rlx.backends.cpu.value import Operand, Value
from rlx.base.errors import BuildError

__all__ = ["Arithmetic"]


class Arithmetic(Emitter):
    """Operations on values that touch neither memory nor control flow."""

    # Arithmetic

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """Return a * b + c, rounded once."""
        typed = [x for x in (a, b, c) if isinstance(x, Value)]
        kind = next((x.type for x in typed if x.type.lanes), typed[0].type)
        return self.generic("fma", *(self.lift(x, kind) for x in (a, b, c)))

    def abs(self, value: Value) -> Value:
        """Absolute value; of the least integer: itself (it wraps)."""
        if value.type.is_float:
            return self.generic("fabs", value)
        return self.smax(value, 0 - value)

    def copysign(self, value: Value, sign: Value) -> Value:
        """Return the magnitude of `value` with the sign of `sign`."""
        return self.generic("copysign", value, sign)

    def sqrt(self, value: Value) -> Value:
        """Correctly rounded square root."""
        return self.generic("sqrt", value)

    def floor(self, value: Value) -> Value:
        """Round toward -inf."""
        return self.generic("floor", value)

    def ceil(self, value: Value) -> Value:
        """Round toward +inf."""
        return self.generic("ceil", value)

    def trunc_float(self, value: Value) -> Value:
        """Round toward zero."""
        return self.generic("trunc", value)

    def round_even(self, value: Value) -> Value:
        """Round to the nearest integer, ties to even."""
        return self.generic("roundeven", value)

    def smin(self, a: Value, b: Operand) -> Value:
        """Signed integer minimum."""
        return self.generic("smin", a, self.lift(b, a.type))

    def smax(self, a: Value, b: Operand) -> Value:
        """Signed integer maximum."""
        return self.generic("smax", a, self.lift(b, a.type))

    def umin(self, a: Value, b: Operand) -> Value:
        """Unsigned integer minimum."""
        return self.generic("umin", a, self.lift(b, a.type))

    def umax(self, a: Value, b: Operand) -> Value:
        """Unsigned integer maximum."""
        return self.generic("umax", a, self.lift(b, a.type))

    def fmax_fast(self, a: Value, b: Operand) -> Value:
        """Return a if a > b else b: one instruction on x86; `b` when either is NaN."""
        right = self.lift(b, a.type)
        return self.select(a > right, a, right)

    def fmin_fast(self, a: Value, b: Operand) -> Value:
        """Return a if a < b else b: one instruction on x86; `b` when either is NaN."""
        right = self.lift(b, a.type)
        return self.select(a < right, a, right)

    def fmax_nan(self, a: Value, b: Operand) -> Value:
        """Float maximum that gives NaN when either operand is NaN."""
        return self.select(a.is_nan(), a, self.fmax_fast(a, b))

    def fmin_nan(self, a: Value, b: Operand) -> Value:
        """Float minimum that gives NaN when either operand is NaN."""
        return self.select(a.is_nan(), a, self.fmin_fast(a, b))

    def popcount(self, value: Value) -> Value:
        """Number of one bits."""
        return self.generic("ctpop", value)

    def count_leading_zeros(self, value: Value) -> Value:
        """Number of leading zero bits; the width for 0."""
        name = f"llvm.ctlz.{value.type.mangled}"
        return self.call(name, value, self.const(0, I1), result=value.type)

    def count_trailing_zeros(self, value: Value) -> Value:
        """Number of trailing zero bits; the width for 0."""
        name = f"llvm.cttz.{value.type.mangled}"
        return self.call(name, value, self.const(0, I1), result=value.type)

    def divide_nonzero(self, op: str, a: Value, b: Operand) -> tuple[Value, Value]:
        """Integer division that never traps.

        Args:
            op: `sdiv`, `srem` (truncating toward zero), `udiv` or `urem`.
            a: dividend.
            b: divisor.

        Returns:
            The result, computed with divisor 1 where `b` is 0 (wrapping for the least integer over -1), and the
            mask of lanes where `b` was 0. Report it with `Kernel.fail`.
        """
        if op not in ("sdiv", "srem", "udiv", "urem"):
            raise BuildError(f"{op!r} is not an integer division")
        if isinstance(b, (int, float)) and b not in (0, -1):
            divisor = self.const(b, a.type)
            result = self.emit(a.type, f"{op} {a.type.text} {a.text}, {divisor.text}")
            return result, self.const(0, a.type.with_elem(I1))
        raw = self.lift(b, a.type)
        zero = raw.eq(0)
        unsafe = zero if op[0] == "u" else zero | raw.eq(-1)
        one = self.const(1, a.type)
        kind = a.type.text
        text = f"select {unsafe.type.text} {unsafe.text}, {kind} {one.text}, {kind} {raw.text}"
        # The name states the guard: a check over all emitted text looks for divisions by anything else.
        divisor = self.emit(a.type, text, "nonzero")
        result = self.emit(a.type, f"{op} {kind} {a.text}, {divisor.text}")
        if op == "sdiv":
            result = self.select(raw.eq(-1), 0 - a, result)
        return result, zero

    def umulh(self, a: Value, b: Value) -> Value:
        """High half of the product of two unsigned 64-bit integers (scalars)."""
        wide = self.zext(a, I128) * self.zext(b, I128)
        return self.trunc(wide.lshr(64), I64)

    # Conversions

    def cast(self, op: str, value: Value, kind: Type) -> Value:
        """Emit a conversion instruction; `kind` may be a scalar type, lanes follow the operand."""
        if value.type.lanes and not kind.lanes and op != "bitcast":
            kind = kind.with_lanes(value.type.lanes)
        if kind is value.type:
            return value
        return self.emit(kind, f"{op} {value.type.text} {value.text} to {kind.text}")

    def bitcast(self, value: Value, kind: Type) -> Value:
        """Reinterpret the bits; a scalar `kind` of the operand's element width keeps the lanes."""
        if value.type.lanes and not kind.lanes and kind.bits == value.type.bits:
            kind = kind.with_lanes(value.type.lanes)
        return self.cast("bitcast", value, kind)

    def trunc(self, value: Value, kind: Type) -> Value:
        """Keep the low bits of an integer."""
        return self.cast("trunc", value, kind)

    def zext(self, value: Value, kind: Type) -> Value:
        """Widen an unsigned integer (or a mask to 0 and 1)."""
        return self.cast("zext", value, kind)

    def sext(self, value: Value, kind: Type) -> Value:
        """Widen a signed integer (or a mask to 0 and -1)."""
        return self.cast("sext", value, kind)

    def resize(self, value: Value, kind: Type, *, signed: bool) -> Value:
        """Convert an integer to another width: truncate, or widen by sign or zero."""
        if kind.bits < value.type.bits:
            return self.trunc(value, kind)
        return self.sext(value, kind) if signed else self.zext(value, kind)

    def f32_to_f64(self, value: Value) -> Value:
        """Widen f32 to f64, exactly."""
        return self.cast("fpext", value, F64)

    def f64_to_f32(self, value: Value) -> Value:
        """Round f64 to f32, to nearest even, overflow to inf."""
        return self.cast("fptrunc", value, F32)

    def int_to_float(self, value: Value, kind: Type, *, signed: bool) -> Value:
        """Round an integer to f32 or f64, to nearest even."""
        if kind.bits < 32:
            raise BuildError(f"integer to {kind}: convert to f32 first, then with vmath")
        return self.cast("sitofp" if signed else "uitofp", value, kind)

    def float_to_int(self, value: Value, kind: Type, *, signed: bool) -> Value:
        """Truncate f32 or f64 toward zero to an integer; saturates, NaN gives 0."""
        op = "fptosi" if signed else "fptoui"
        if value.type.lanes:
            return self._floats_to_ints(op, value, kind, signed=signed)
        return self.call(f"llvm.{op}.sat.{kind.mangled}.{value.type.mangled}", value, result=kind)

    def _floats_to_ints(self, op: str, value: Value, kind: Type, *, signed: bool) -> Value:
        """Convert a vector that was brought into range before: LLVM's own saturation goes lane by lane on x86."""
        low = -(1 << (kind.bits - 1)) if signed else 0
        high = (1 << (kind.bits - 1 if signed else kind.bits)) - 1
        digits = 24 if value.type.bits == 32 else 53
        below = max(high.bit_length() - digits, 0)
        top = high >> below << below  # the largest float that does not exceed `high`
        if low:
            value = self.select(value.is_nan(), 0.0, value)
        raised = self.fmax_fast(value, float(low))  # which is `low` for a NaN
        limit = self.const(float(top), raised.type)
        fits = raised < limit
        text = f"select {fits.type.text} {fits.text}, {raised.type.text} {raised.text}, {limit.type.text} {limit.text}"
        # The name states the guard: a check over all emitted text looks for conversions of anything else.
        within = self.emit(raised.type, text, "within")
        if kind.bits < 32:
            return self.trunc(self.cast("fptosi", within, I32), kind)
        whole = self.cast(op, within, kind)
        return whole if top == high else self.select(value >= float(high + 1), high, whole)

    def to_pointer(self, address: Value) -> Value:
        """Return an i64 address as a pointer."""
        return self.cast("inttoptr", address, PTR)

    def to_address(self, pointer: Value) -> Value:
        """Return a pointer as an i64 address."""
        return self.cast("ptrtoint", pointer, I64)

    # Horizontal

    def reduce(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Combine all lanes by the fixed tree: lane i with lane i + n/2, halving n until one lane is left.

        Raises:
            BuildError: the lane count is not a power of two.
        """
        lanes = vector.type.lanes
        if lanes & (lanes - 1) or lanes == 0:
            raise BuildError(f"reduce needs a power-of-two lane count, got {vector!r}")
        while lanes > 1:
            lanes //= 2
            vector = combine(self.slice(vector, 0, lanes), self.slice(vector, lanes, lanes))
        return self.extract(vector, 0)

    def reduce_add(self, vector: Value) -> Value:
        """Sum of all lanes, by the tree of `reduce`."""
        return self.reduce(vector, lambda a, b: a + b)

    def combine_all(
        self, values: Sequence[Value], combine: Callable[[Value, Value], Value]
    ) -> Value:
        """Combine values by the fixed tree: neighbours pairwise, an odd last one goes up unchanged."""
        level = list(values)
        while len(level) > 1:
            pairs = [combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(level) & ~1 :]
        return level[0]

    def mask_bits(self, mask: Value) -> Value:
        """Return a mask as an integer, lane i in bit i."""
        return self.cast("bitcast", mask, int_type(mask.type.lanes))

    def any(self, mask: Value) -> Value:
        """True (i1) when a lane of the mask is set."""
        return self.mask_bits(mask).ne(0) if mask.type.lanes else mask

    def all(self, mask: Value) -> Value:
        """True (i1) when every lane of the mask is set."""
        return self.mask_bits(~mask).eq(0) if mask.type.lanes else mask
