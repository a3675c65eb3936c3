# SPDX-License-Identifier: Apache-2.0
"""SSA values with operators; `rlx.backends.cpu.builder` states the rules they follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from rlx.backends.cpu.lltypes import I1, Type
from rlx.base.errors import BuildError

if TYPE_CHECKING:
    from rlx.backends.cpu.emitter import Emitter

__all__ = ["Number", "Operand", "Value"]


class Value:
    """An SSA value or constant of a function.

    Attributes:
        fn: the function it belongs to.
        type: its LLVM type.
        text: how an instruction names it.
        const: the number when it is a constant.
    """

    __slots__ = ("const", "fn", "text", "type")

    def __init__(self, fn: Emitter, kind: Type, text: str, const: float | None = None) -> None:
        self.fn = fn
        self.type = kind
        self.text = text
        self.const = const

    def __repr__(self) -> str:
        return f"{self.type} {self.text}"

    def __bool__(self) -> NoReturn:
        raise BuildError(f"{self!r} has no value while code is emitted; use select or if_")

    def _arith(self, float_op: str, int_op: str, other: Operand, *, swap: bool = False) -> Value:
        right = self.fn.lift(other, self.type)
        first, second = (right, self) if swap else (self, right)
        return self.fn.binary(float_op if self.type.is_float else int_op, first, second)

    def __add__(self, other: Operand) -> Value:
        if not self.type.is_float and isinstance(other, int) and other == 0:
            return self
        return self._arith("fadd", "add", other)

    def __radd__(self, other: Number) -> Value:
        return self + other

    def __sub__(self, other: Operand) -> Value:
        return self._arith("fsub", "sub", other)

    def __rsub__(self, other: Number) -> Value:
        return self._arith("fsub", "sub", other, swap=True)

    def __mul__(self, other: Operand) -> Value:
        if isinstance(other, int) and other == 1 and not self.type.is_float:
            return self
        return self._arith("fmul", "mul", other)

    def __rmul__(self, other: Number) -> Value:
        return self * other

    def __truediv__(self, other: Operand) -> Value:
        return self._arith("fdiv", "", other)

    def __rtruediv__(self, other: Number) -> Value:
        return self._arith("fdiv", "", other, swap=True)

    def __neg__(self) -> Value:
        if self.type.is_float:
            return self.fn.emit(self.type, f"fneg {self.type.text} {self.text}")
        return 0 - self

    def __and__(self, other: Operand) -> Value:
        return self._arith("", "and", other)

    def __or__(self, other: Operand) -> Value:
        return self._arith("", "or", other)

    def __xor__(self, other: Operand) -> Value:
        return self._arith("", "xor", other)

    def __invert__(self) -> Value:
        return self ^ (1 if self.type.bits == 1 else -1)

    def shl(self, amount: Operand) -> Value:
        """Shift left; 0 when the unsigned amount is >= the width."""
        return self._shift("shl", amount)

    def lshr(self, amount: Operand) -> Value:
        """Shift right filling with zeros; 0 when the unsigned amount is >= the width."""
        return self._shift("lshr", amount)

    def ashr(self, amount: Operand) -> Value:
        """Shift right filling with the sign; all sign bits when the unsigned amount is >= the width."""
        return self._shift("ashr", amount)

    def _shift(self, op: str, amount: Operand) -> Value:
        width = self.type.bits
        if isinstance(amount, (int, float)):
            if not 0 <= amount < width:
                raise BuildError(
                    f"{op} of {self.type} by {amount}: the amount must be in [0, {width})"
                )
            return (
                self if amount == 0 else self.fn.binary(op, self, self.fn.lift(amount, self.type))
            )
        count = self.fn.lift(amount, self.type)
        if op == "ashr":
            return self.fn.binary(
                op, self, self.fn.generic("umin", count, self.fn.const(width - 1, self.type))
            )
        shifted = self.fn.binary(op, self, count & (width - 1))
        return self.fn.select(count.ult(width), shifted, 0)

    def _compare(self, float_op: str, int_op: str, other: Operand) -> Value:
        right = self.fn.lift(other, self.type)
        op = f"fcmp {float_op}" if self.type.is_float else f"icmp {int_op}"
        if op in ("fcmp ", "icmp "):
            raise BuildError(f"comparison is not defined on {self.type}")
        return self.fn.emit(
            self.type.with_elem(I1), f"{op} {self.type.text} {self.text}, {right.text}"
        )

    def __lt__(self, other: Operand) -> Value:
        return self._compare("olt", "slt", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("ole", "sle", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare("ogt", "sgt", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare("oge", "sge", other)

    def eq(self, other: Operand) -> Value:
        """Equal (false with a NaN)."""
        return self._compare("oeq", "eq", other)

    def ne(self, other: Operand) -> Value:
        """Not equal (true with a NaN)."""
        return self._compare("une", "ne", other)

    def ult(self, other: Operand) -> Value:
        """Unsigned less than, integers only."""
        return self._compare("", "ult", other)

    def ule(self, other: Operand) -> Value:
        """Unsigned less than or equal, integers only."""
        return self._compare("", "ule", other)

    def ugt(self, other: Operand) -> Value:
        """Unsigned greater than, integers only."""
        return self._compare("", "ugt", other)

    def uge(self, other: Operand) -> Value:
        """Unsigned greater than or equal, integers only."""
        return self._compare("", "uge", other)

    def is_nan(self) -> Value:
        """Mask of NaN lanes, floats only."""
        return self._compare("uno", "", self)


Number = int | float
"""A Python number where a value is expected: it becomes a constant of the other operand's type."""
Operand = Value | Number
