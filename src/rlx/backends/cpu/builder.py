# SPDX-License-Identifier: Apache-2.0
"""A typed builder of textual LLVM IR: values with operators, structured control flow, masked memory access.

What it holds for all emitted code:

- The text is a function of the calls alone: the same calls give the same bytes.
- Loads and stores assume element alignment only. Tails go through `load_masked` and `store_masked`, which touch no
  byte of an inactive lane.
- No fast-math flag, no contraction: `a * b + c` rounds twice, `fma` once, on every target.
- No operation with undefined results: shifts select 0 when the amount reaches the width, division guards its
  divisor, float to integer conversion saturates.
- Arithmetic on `half` and `bfloat` is refused: narrow floats are computed in f32 (`rlx.backends.cpu.vmath` converts).
- Target intrinsics go through `Function.intrinsic`, which knows the features each one needs.

Comparison operators `< <= > >=` are ordered for floats (false with a NaN) and signed for integers; unsigned
comparisons are the methods `ult`, `ule`, `ugt`, `uge`. Equality is `eq` and `ne`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NoReturn

from rlx.backends.cpu.intrinsics import INTRINSICS
from rlx.backends.cpu.lltypes import F32, F64, I1, I8, I32, I64, I128, PTR, VOID, Type, int_type, literal, vec
from rlx.base.errors import BuildError

if TYPE_CHECKING:
    from rlx.backends.cpu.abi import Kernel
    from rlx.backends.cpu.isa import Isa

__all__ = ["Function", "IfElse", "Loop", "Module", "Number", "Operand", "Value", "While"]

_STACK_LIMIT = 8 << 10
"""Bytes one function may reserve with `alloca`; kernels must stay below 16 KB with what the compiler spills."""


class Value:
    """An SSA value or constant of a function.

    Attributes:
        fn: the function it belongs to.
        type: its LLVM type.
        text: how an instruction names it.
        const: the number when it is a constant.
    """

    __slots__ = ("const", "fn", "text", "type")

    def __init__(self, fn: Function, kind: Type, text: str, const: float | None = None) -> None:
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
                raise BuildError(f"{op} of {self.type} by {amount}: the amount must be in [0, {width})")
            return self if amount == 0 else self.fn.binary(op, self, self.fn.lift(amount, self.type))
        count = self.fn.lift(amount, self.type)
        if op == "ashr":
            return self.fn.binary(op, self, self.fn.umin(count, width - 1))
        shifted = self.fn.binary(op, self, count & (width - 1))
        return self.fn.select(count.ult(width), shifted, 0)

    def _compare(self, float_op: str, int_op: str, other: Operand) -> Value:
        right = self.fn.lift(other, self.type)
        op = f"fcmp {float_op}" if self.type.is_float else f"icmp {int_op}"
        if op in ("fcmp ", "icmp "):
            raise BuildError(f"comparison is not defined on {self.type}")
        return self.fn.emit(self.type.with_elem(I1), f"{op} {self.type.text} {self.text}, {right.text}")

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


class Loop:
    """A counted loop while its body is emitted.

    Attributes:
        index: the counter, i64.
        carry: the carried values at the start of this iteration.
        out: the carried values after the last iteration (valid after the `with` block).
    """

    def __init__(self, index: Value, carry: list[Value]) -> None:
        self.index = index
        self.carry = carry
        self.out = carry
        self.following: list[Operand] | None = None if carry else []

    def next(self, *values: Operand) -> None:
        """Set the carried values of the next iteration; once, at the end of the body."""
        self.following = list(values)


class While:
    """A loop with a test while its body is emitted: `test` first, then the body, then `next`.

    Attributes:
        carry: the carried values when the test is evaluated.
        out: the carried values when the test failed (valid after the `with` block).
    """

    def __init__(self, fn: Function, carry: list[Value]) -> None:
        self.carry = carry
        self.out = carry
        self.following: list[Operand] | None = None if carry else []
        self.exit = ""
        self._fn = fn

    def test(self, condition: Value) -> None:
        """Leave the loop when the condition (i1) is false."""
        body, self.exit = self._fn.fresh("body"), self._fn.fresh("exit")
        self._fn.branch_if(condition, body, self.exit)
        self._fn.label(body)

    def next(self, *values: Operand) -> None:
        """Set the carried values of the next iteration; once, at the end of the body."""
        self.following = list(values)


class IfElse:
    """Two branches that yield values: `with b.then(): ... b.yields(x)`, `with b.otherwise(): ... b.yields(y)`.

    Attributes:
        results: the merged values (valid after the outer `with` block).
    """

    def __init__(self, fn: Function, condition: Value) -> None:
        self.results: list[Value] = []
        self._fn = fn
        self._labels = [fn.fresh("then"), fn.fresh("else")]
        self.end = fn.fresh("end")
        self._arms: list[tuple[str, list[Value]]] = []
        self._yielded: list[Value] = []
        fn.branch_if(condition, *self._labels)

    @contextmanager
    def _arm(self, index: int) -> Iterator[None]:
        if len(self._arms) != index:
            raise BuildError("if_else takes `then` and `otherwise` once each, in this order")
        self._fn.label(self._labels[index])
        self._yielded = []
        yield
        self._arms.append((self._fn.block, self._yielded))
        self._fn.branch(self.end)

    def then(self) -> AbstractContextManager[None]:
        """Open the branch taken when the condition holds."""
        return self._arm(0)

    def otherwise(self) -> AbstractContextManager[None]:
        """Open the other branch."""
        return self._arm(1)

    def yields(self, *values: Value) -> None:
        """Set what this branch gives; both branches give the same number of values of the same types."""
        self._yielded = list(values)

    def finish(self) -> None:
        """Emit the phis at the join."""
        if len(self._arms) != 2:
            raise BuildError("if_else needs both branches; use if_ for one")
        (block_a, left), (block_b, right) = self._arms
        if [v.type for v in left] != [v.type for v in right]:
            raise BuildError(f"the branches of if_else yield different types: {left} and {right}")
        self._fn.label(self.end)
        for a, b in zip(left, right, strict=True):
            text = f"phi {a.type.text} [ {a.text}, %{block_a} ], [ {b.text}, %{block_b} ]"
            self.results.append(self._fn.emit(a.type, text))


class Function:
    """One function under construction. Made by `Module.function` and `Module.kernel`.

    Attributes:
        module: the module it belongs to.
        name: its symbol.
        result: its result type.
        args: its parameters as values.
        block: label of the basic block being emitted.
    """

    def __init__(self, module: Module, name: str, result: Type, params: Sequence[tuple[str, Type]], head: str) -> None:
        self.module = module
        self.name = name
        self.result = result
        self.block = "entry"
        self.args = [Value(self, kind, f"%{arg}") for arg, kind in params]
        self.params = tuple(kind for _, kind in params)
        self._head = head
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._sink = self._lines
        self._count = 0
        self._stack = 0
        self._returned = False

    @property
    def isa(self) -> Isa:
        """The target."""
        return self.module.isa

    # Emission

    def fresh(self, prefix: str = "v") -> str:
        """Return a name that no other value or label of this function has."""
        self._count += 1
        return f"{prefix}{self._count}"

    def line(self, text: str) -> None:
        """Append one instruction without result."""
        self._sink.append(f"  {text}")

    def emit(self, kind: Type, text: str, prefix: str = "v") -> Value:
        """Append one instruction and return its result."""
        self._count += 1
        name = f"%{prefix}{self._count}"
        self._sink.append(f"  {name} = {text}")
        return Value(self, kind, name)

    def binary(self, op: str, left: Value, right: Value) -> Value:
        """Emit a two-operand instruction on operands of one type.

        Raises:
            BuildError: the operation does not exist on that type.
        """
        kind = left.type
        if not op or (kind.is_float and kind.bits < 32):
            raise BuildError(f"arithmetic on {left!r} and {right!r} is not defined; convert to a type that has it")
        return self.emit(kind, f"{op} {kind.text} {left.text}, {right.text}")

    @contextmanager
    def at_entry(self) -> Iterator[None]:
        """Emit into the entry block, before everything else: for loads that belong there wherever they are asked."""
        outer, self._sink = self._sink, self._entry
        try:
            yield
        finally:
            self._sink = outer

    def ret(self, value: Value | None = None) -> None:
        """Return from the function; the last thing emitted."""
        self.line("ret void" if value is None else f"ret {value.type.text} {value.text}")
        self._returned = True

    def render(self) -> str:
        """Return the text of the finished function."""
        if not self._returned:
            if self.result is not VOID:
                raise BuildError(f"function {self.name} must return a {self.result}")
            self.ret()
        return "\n".join([self._head, "entry:", *self._entry, *self._lines, "}", ""])

    # Constants

    def const(self, number: Number, kind: Type) -> Value:
        """Return a constant of that type (splatted over a vector)."""
        return Value(self, kind, literal(number, kind), number)

    def i64(self, number: int) -> Value:
        """Return an i64 constant."""
        return self.const(number, I64)

    def i32(self, number: int) -> Value:
        """Return an i32 constant."""
        return self.const(number, I32)

    def f32(self, number: float) -> Value:
        """Return an f32 constant."""
        return self.const(number, F32)

    def vector(self, numbers: Sequence[Number], elem: Type) -> Value:
        """Return a vector constant with these elements."""
        body = ", ".join(f"{elem.text} {literal(n, elem)}" for n in numbers)
        return Value(self, vec(elem, len(numbers)), f"<{body}>")

    def iota(self, kind: Type) -> Value:
        """Return the vector 0, 1, 2, ... of that integer vector type."""
        return self.vector(range(kind.lanes), kind.scalar)

    def poison(self, kind: Type) -> Value:
        """Return a value that must not be used (the start of a chain of insertions)."""
        return Value(self, kind, "poison")

    def lift(self, operand: Operand, kind: Type) -> Value:
        """Return the operand as a value of that type: numbers become constants, scalars are splatted.

        Raises:
            BuildError: the value has another type.
        """
        if not isinstance(operand, Value):
            return self.const(operand, kind)
        if operand.type is kind:
            return operand
        if kind.lanes and operand.type is kind.scalar:
            return self.splat(operand, kind.lanes)
        raise BuildError(f"{operand!r} where a {kind} is expected; convert it explicitly")

    def address_of(self, table: str) -> Value:
        """Return the address of a constant array made by `Module.table`."""
        return Value(self, PTR, f"@{table}")

    # Vectors

    def splat(self, scalar: Value, lanes: int) -> Value:
        """Return a vector with the scalar in every lane."""
        kind = vec(scalar.type, lanes)
        if scalar.const is not None:
            return self.const(scalar.const, kind)
        first = self.emit(kind, f"insertelement {kind.text} poison, {scalar.type.text} {scalar.text}, i64 0")
        text = f"shufflevector {kind.text} {first.text}, {kind.text} poison, <{lanes} x i32> zeroinitializer"
        return self.emit(kind, text)

    def extract(self, vector: Value, lane: Operand) -> Value:
        """Return one lane (a Python index, or an i64 value that must be in range)."""
        index = self.lift(lane, I64)
        return self.emit(
            vector.type.scalar, f"extractelement {vector.type.text} {vector.text}, i64 {index.text}"
        )

    def insert(self, vector: Value, scalar: Operand, lane: int) -> Value:
        """Return the vector with one lane replaced."""
        item = self.lift(scalar, vector.type.scalar)
        text = f"insertelement {vector.type.text} {vector.text}, {item.type.text} {item.text}, i64 {lane}"
        return self.emit(vector.type, text)

    def pack(self, scalars: Sequence[Value]) -> Value:
        """Return a vector of these scalars."""
        out = self.poison(vec(scalars[0].type, len(scalars)))
        for lane, scalar in enumerate(scalars):
            out = self.insert(out, scalar, lane)
        return out

    def shuffle(self, first: Value, second: Value | None, lanes: Sequence[int]) -> Value:
        """Return the lanes picked from the concatenation of both vectors (-1: unspecified)."""
        other = self.poison(first.type) if second is None else self.lift(second, first.type)
        body = ", ".join("i32 poison" if lane < 0 else f"i32 {lane}" for lane in lanes)
        kind = first.type
        text = f"shufflevector {kind.text} {first.text}, {kind.text} {other.text}, <{len(lanes)} x i32> <{body}>"
        return self.emit(vec(kind, len(lanes)), text)

    def slice(self, vector: Value, start: int, lanes: int) -> Value:
        """Return `lanes` lanes from `start` on."""
        return self.shuffle(vector, None, range(start, start + lanes))

    def concat(self, low: Value, high: Value) -> Value:
        """Return the vector of all lanes of `low`, then all of `high`."""
        return self.shuffle(low, high, range(2 * low.type.lanes))

    def select(self, condition: Value, yes: Operand, no: Operand) -> Value:
        """Return `yes` where the condition holds, else `no`, lane by lane."""
        typed = yes if isinstance(yes, Value) else no
        if not isinstance(typed, Value):
            raise BuildError("select needs at least one typed operand")
        kind = typed.type
        if condition.type.lanes and not kind.lanes:
            kind = kind.with_lanes(condition.type.lanes)
        a, b = self.lift(yes, kind), self.lift(no, kind)
        text = f"select {condition.type.text} {condition.text}, {kind.text} {a.text}, {kind.text} {b.text}"
        return self.emit(kind, text)

    # Calls

    def call(self, target: Function | str, *args: Value, result: Type = VOID) -> Value:
        """Call a function of this module, or an external one by name (it must be on the linker's allowlist).

        Raises:
            BuildError: the operands do not match the called function.
        """
        if isinstance(target, Function):
            if tuple(a.type for a in args) != target.params:
                raise BuildError(f"{target.name} takes {target.params}, got {args}")
            name, result = target.name, target.result
        else:
            name = target
            self.module.declare(name, result, tuple(a.type for a in args))
        text = f"call {result.text} @{name}({', '.join(f'{a.type.text} {a.text}' for a in args)})"
        if result is VOID:
            self.line(text)
            return Value(self, VOID, "void")
        return self.emit(result, text)

    def call_pointer(self, pointer: Value, *args: Value, result: Type = VOID) -> Value:
        """Call through a function pointer."""
        text = f"call {result.text} {pointer.text}({', '.join(f'{a.type.text} {a.text}' for a in args)})"
        if result is VOID:
            self.line(text)
            return Value(self, VOID, "void")
        return self.emit(result, text)

    def intrinsic(self, name: str, *args: Operand, requires: str | None = None) -> Value:
        """Call a target intrinsic of the table, by its name without `llvm.`.

        Args:
            name: such as `x86.avx512.vpdpbusd.512`.
            args: operands; Python numbers become immediates or constants.
            requires: a further LLVM feature this use depends on.

        Raises:
            BuildError: it is not in the table, or the target lacks a feature it needs.
        """
        entry = INTRINSICS.get(name)
        if entry is None:
            raise BuildError(f"intrinsic {name!r} is not in the table of rlx.backends.cpu.intrinsics")
        needed = entry.requires | ({requires} if requires else set())
        missing = sorted(needed - self.isa.features)
        if missing:
            raise BuildError(f"intrinsic {name} needs {', '.join(missing)}, which the target {self.isa.name} lacks")
        if len(args) != len(entry.args):
            raise BuildError(f"intrinsic {name} takes {len(entry.args)} operands, got {len(args)}")
        for index in sorted(entry.immediates):
            if isinstance(args[index], Value):
                raise BuildError(f"operand {index} of intrinsic {name} must be a Python integer")
        values = [self.lift(a, kind) for a, kind in zip(args, entry.args, strict=True)]
        return self.call(f"llvm.{name}", *values, result=entry.result)

    def generic(self, name: str, *args: Value) -> Value:
        """Call a target-independent intrinsic overloaded on its first operand, such as `fma` or `ctpop`."""
        if args[0].type.is_float and args[0].type.bits < 32:
            raise BuildError(f"{name} on {args[0]!r}: convert to f32 first")
        return self.call(f"llvm.{name}.{args[0].type.mangled}", *args, result=args[0].type)

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
        target = kind.with_lanes(value.type.lanes)
        op = "fptosi" if signed else "fptoui"
        return self.call(f"llvm.{op}.sat.{target.mangled}.{value.type.mangled}", value, result=target)

    def to_pointer(self, address: Value) -> Value:
        """Return an i64 address as a pointer."""
        return self.cast("inttoptr", address, PTR)

    def to_address(self, pointer: Value) -> Value:
        """Return a pointer as an i64 address."""
        return self.cast("ptrtoint", pointer, I64)

    # Memory

    def offset(self, pointer: Value, index: Operand, elem: Type = I8) -> Value:
        """Return the pointer `index` elements of type `elem` further (default: bytes)."""
        if isinstance(index, int) and index == 0:
            return pointer
        at = index if isinstance(index, Value) else self.i64(int(index))
        kind = PTR.with_lanes(at.type.lanes)
        text = f"getelementptr {elem.scalar.text}, ptr {pointer.text}, {at.type.text} {at.text}"
        return self.emit(kind, text)

    def load(self, kind: Type, pointer: Value, index: Operand = 0) -> Value:
        """Load a value `index` elements after the pointer."""
        at = self.offset(pointer, index, kind)
        return self.emit(kind, f"load {kind.text}, ptr {at.text}, align {kind.itemsize}")

    def store(self, value: Value, pointer: Value, index: Operand = 0) -> None:
        """Store a value `index` elements after the pointer."""
        at = self.offset(pointer, index, value.type)
        self.line(f"store {value.type.text} {value.text}, ptr {at.text}, align {value.type.itemsize}")

    def tail_mask(self, count: Value, kind: Type) -> Value:
        """Return the mask of the first `count` lanes (i64; <= 0 gives none, >= lanes all) for vectors of `kind`."""
        lane_kind = int_type(min(max(kind.bits, 8), 64), kind.lanes)
        limit = self.trunc(self.smin(self.smax(count, 0), kind.lanes), lane_kind.scalar)
        return self.iota(lane_kind).ult(limit)

    def load_masked(
        self, kind: Type, pointer: Value, mask: Value, index: Operand = 0, fill: Operand = 0
    ) -> Value:
        """Load the lanes of the mask; inactive lanes give `fill` and their bytes are not touched."""
        at, other = self.offset(pointer, index, kind), self.lift(fill, kind)
        name = f"llvm.masked.load.{kind.mangled}.p0"
        self.module.declare(name, kind, (PTR, mask.type, kind))
        text = (
            f"call {kind.text} @{name}(ptr align {kind.itemsize} {at.text}, "
            f"{mask.type.text} {mask.text}, {kind.text} {other.text})"
        )
        return self.emit(kind, text)

    def store_masked(self, value: Value, pointer: Value, mask: Value, index: Operand = 0) -> None:
        """Store the lanes of the mask; the bytes of the others are not touched."""
        kind = value.type
        at = self.offset(pointer, index, kind)
        name = f"llvm.masked.store.{kind.mangled}.p0"
        self.module.declare(name, VOID, (kind, PTR, mask.type))
        self.line(
            f"call void @{name}({kind.text} {value.text}, ptr align {kind.itemsize} {at.text}, "
            f"{mask.type.text} {mask.text})"
        )

    def gather(
        self, kind: Type, pointer: Value, indices: Value, mask: Value | None = None, fill: Operand = 0
    ) -> Value:
        """Load lane i from `indices[i]` elements after the pointer; inactive lanes give `fill`, untouched."""
        at = self.offset(pointer, indices, kind)
        active = self.const(1, vec(I1, kind.lanes)) if mask is None else mask
        other = self.lift(fill, kind)
        name = f"llvm.masked.gather.{kind.mangled}.{at.type.mangled}"
        self.module.declare(name, kind, (at.type, active.type, kind))
        text = (
            f"call {kind.text} @{name}({at.type.text} align {kind.itemsize} {at.text}, "
            f"{active.type.text} {active.text}, {kind.text} {other.text})"
        )
        return self.emit(kind, text)

    def scatter(self, value: Value, pointer: Value, indices: Value, mask: Value | None = None) -> None:
        """Store lane i to `indices[i]` elements after the pointer, in lane order."""
        kind = value.type
        at = self.offset(pointer, indices, kind)
        active = self.const(1, vec(I1, kind.lanes)) if mask is None else mask
        name = f"llvm.masked.scatter.{kind.mangled}.{at.type.mangled}"
        self.module.declare(name, VOID, (kind, at.type, active.type))
        self.line(
            f"call void @{name}({kind.text} {value.text}, {at.type.text} align {kind.itemsize} {at.text}, "
            f"{active.type.text} {active.text})"
        )

    def alloca(self, kind: Type, count: int = 1) -> Value:
        """Reserve stack for `count` elements in the entry block, aligned to 64 bytes.

        Raises:
            BuildError: the function would reserve more than 8 KB.
        """
        self._stack += kind.itemsize * max(kind.lanes, 1) * count
        if self._stack > _STACK_LIMIT:
            raise BuildError(f"{self.name} reserves {self._stack} bytes of stack, more than {_STACK_LIMIT}; use scratch")
        with self.at_entry():
            return self.emit(PTR, f"alloca {kind.text}, i64 {count}, align 64")

    def memcpy(self, target: Value, source: Value, size: Operand) -> None:
        """Copy `size` bytes between ranges that do not overlap."""
        self.call("memcpy", target, source, self.lift(size, I64), result=PTR)

    def memset(self, target: Value, byte: int, size: Operand) -> None:
        """Set `size` bytes."""
        self.call("memset", target, self.i32(byte), self.lift(size, I64), result=PTR)

    def prefetch(self, pointer: Value, level: int = 1) -> None:
        """Ask for the cache line at the pointer (any address) into cache level 1, 2 or 3."""
        self.module.declare("llvm.prefetch.p0", VOID, (PTR, I32, I32, I32))
        self.line(f"call void @llvm.prefetch.p0(ptr {pointer.text}, i32 0, i32 {4 - level}, i32 1)")

    # Atomics (naturally aligned integers)

    def atomic_load(self, kind: Type, pointer: Value, order: str = "acquire") -> Value:
        """Load atomically."""
        return self.emit(kind, f"load atomic {kind.text}, ptr {pointer.text} {order}, align {kind.itemsize}")

    def atomic_store(self, value: Value, pointer: Value, order: str = "release") -> None:
        """Store atomically."""
        kind = value.type
        self.line(f"store atomic {kind.text} {value.text}, ptr {pointer.text} {order}, align {kind.itemsize}")

    def atomic_rmw(self, op: str, pointer: Value, value: Value, order: str = "acq_rel") -> Value:
        """Read, apply `op` (add, sub, xchg, and, or, min, umin, ...) and write atomically; returns the old value."""
        text = f"atomicrmw {op} ptr {pointer.text}, {value.type.text} {value.text} {order}, align {value.type.itemsize}"
        return self.emit(value.type, text)

    def compare_exchange(self, pointer: Value, expected: Value, desired: Value) -> tuple[Value, Value]:
        """Replace `expected` by `desired` atomically; returns the old value and whether it was replaced (i1)."""
        kind = expected.type.text
        pair = self.fresh("pair")
        self.line(
            f"%{pair} = cmpxchg ptr {pointer.text}, {kind} {expected.text}, {kind} {desired.text} acq_rel acquire, "
            f"align {expected.type.itemsize}"
        )
        old = self.emit(expected.type, f"extractvalue {{ {kind}, i1 }} %{pair}, 0")
        return old, self.emit(I1, f"extractvalue {{ {kind}, i1 }} %{pair}, 1")

    def pause(self) -> None:
        """Tell the core that this is a spin loop."""
        if self.isa.is_x86:
            self.intrinsic("x86.sse2.pause")
        else:
            self.intrinsic("aarch64.hint", 1)

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

    def combine_all(self, values: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
        """Combine values by the fixed tree: neighbours pairwise, an odd last one goes up unchanged."""
        level = list(values)
        while len(level) > 1:
            pairs = [combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(level) & ~1 :]
        return level[0]

    def mask_bits(self, mask: Value) -> Value:
        """Return a mask as an integer, lane i in bit i."""
        return self.bitcast(mask, int_type(mask.type.lanes))

    def any(self, mask: Value) -> Value:
        """True (i1) when a lane of the mask is set."""
        return self.mask_bits(mask).ne(0) if mask.type.lanes else mask

    def all(self, mask: Value) -> Value:
        """True (i1) when every lane of the mask is set."""
        return self.mask_bits(~mask).eq(0) if mask.type.lanes else mask

    # Control flow

    def label(self, name: str) -> None:
        """Start a basic block."""
        self._sink.append(f"{name}:")
        self.block = name

    def branch(self, target: str) -> None:
        """End the block with a jump."""
        self.line(f"br label %{target}")

    def branch_if(self, condition: Value, yes: str, no: str) -> None:
        """End the block with a conditional jump."""
        if condition.type is not I1:
            raise BuildError(f"a branch needs an i1, got {condition!r}; reduce a mask with any or all")
        self.line(f"br i1 {condition.text}, label %{yes}, label %{no}")

    def _open_phis(self, kinds: Sequence[Type]) -> tuple[list[Value], int]:
        values = [Value(self, kind, f"%{self.fresh('p')}") for kind in kinds]
        slot = len(self._lines)
        self._lines.extend("" for _ in kinds)
        return values, slot

    def _close_phis(
        self, phis: list[Value], slot: int, before: tuple[str, list[Value]], latch: tuple[str, list[Value]]
    ) -> None:
        for index, phi in enumerate(phis):
            first, again = before[1][index], latch[1][index]
            self._lines[slot + index] = (
                f"  {phi.text} = phi {phi.type.text} [ {first.text}, %{before[0]} ], [ {again.text}, %{latch[0]} ]"
            )

    def _following(self, phis: list[Value], values: list[Operand] | None) -> list[Value]:
        if values is None or len(values) != len(phis):
            raise BuildError(f"the loop carries {len(phis)} values, next() got {0 if values is None else len(values)}")
        return [self.lift(v, phi.type) for v, phi in zip(values, phis, strict=True)]

    @contextmanager
    def loop(
        self, lo: Operand, hi: Operand, step: Operand = 1, carry: Sequence[Value] = ()
    ) -> Iterator[Loop]:
        """Emit `for index in range(lo, hi, step)` (signed i64, step > 0) with carried values.

        ::

            with f.loop(0, n, 16, carry=[zero]) as loop:
                loop.next(loop.carry[0] + f.load(V16, x, loop.index))
            total = loop.out[0]
        """
        start, stop = self.lift(lo, I64), self.lift(hi, I64)
        before, head, body, end = self.block, self.fresh("head"), self.fresh("body"), self.fresh("exit")
        self.branch(head)
        self.label(head)
        phis, slot = self._open_phis([I64, *(c.type for c in carry)])
        self.branch_if(phis[0] < stop, body, end)
        self.label(body)
        state = Loop(phis[0], phis[1:])
        yield state
        following = [phis[0] + step, *self._following(phis[1:], state.following)]
        latch = self.block
        self.branch(head)
        self._close_phis(phis, slot, (before, [start, *carry]), (latch, following))
        self.label(end)

    @contextmanager
    def while_(self, carry: Sequence[Value] = ()) -> Iterator[While]:
        """Emit a loop that runs while `test` holds; see `While`."""
        before, head = self.block, self.fresh("head")
        self.branch(head)
        self.label(head)
        phis, slot = self._open_phis([c.type for c in carry])
        state = While(self, phis)
        yield state
        if not state.exit:
            raise BuildError("a while_ loop needs a test")
        following = self._following(phis, state.following)
        latch = self.block
        self.branch(head)
        self._close_phis(phis, slot, (before, list(carry)), (latch, following))
        self.label(state.exit)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        """Emit a block that runs only when the condition (i1) holds."""
        then, end = self.fresh("then"), self.fresh("end")
        self.branch_if(condition, then, end)
        self.label(then)
        yield
        self.branch(end)
        self.label(end)

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[IfElse]:
        """Emit two branches whose yielded values merge; see `IfElse`."""
        state = IfElse(self, condition)
        yield state
        state.finish()


class Module:
    """One unit of emitted code.

    Args:
        isa: the target; it decides which intrinsics exist.
    """

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self._functions: list[str] = []
        self._declared: dict[str, str] = {}
        self._tables: dict[str, str] = {}
        self._names: set[str] = set()
        self.kernels: list[Kernel] = []

    def declare(self, name: str, result: Type, args: tuple[Type, ...]) -> None:
        """Declare an external function or intrinsic."""
        if name not in self._declared:
            self._declared[name] = f"declare {result.text} @{name}({', '.join(a.text for a in args)})"

    def unique(self, hint: str) -> str:
        """Return a global name not used yet in this module."""
        name, count = hint, 1
        while name in self._names:
            count += 1
            name = f"{hint}.{count}"
        self._names.add(name)
        return name

    @contextmanager
    def function(
        self, hint: str, params: Sequence[tuple[str, Type]], result: Type = VOID, *, exported: bool = False
    ) -> Iterator[Function]:
        """Emit a function; internal unless exported. Its name is the hint, made unique in this module."""
        name = self.unique(hint)
        linkage = "" if exported else "internal "
        text = ", ".join(f"{kind.text} %{arg}" for arg, kind in params)
        fn = Function(self, name, result, params, f"define {linkage}{result.text} @{name}({text}) #0 {{")
        yield fn
        self._functions.append(fn.render())

    def table(self, hint: str, numbers: Sequence[Number], elem: Type) -> str:
        """Add a constant array (once) and return its name, for `Function.address_of`."""
        body = ", ".join(f"{elem.text} {literal(n, elem)}" for n in numbers)
        value = f"[{len(numbers)} x {elem.text}] [{body}]"
        if value not in self._tables:
            self._tables[value] = self.unique(hint)
        return self._tables[value]

    @contextmanager
    def kernel(self, hint: str, nargs: int) -> Iterator[Kernel]:
        """Emit a kernel of the native ABI; its symbol is known after `finish`. See `rlx.backends.cpu.abi`."""
        from rlx.backends.cpu.abi import Kernel

        kernel = Kernel(self, hint, nargs)
        yield kernel
        self._functions.append(kernel.render())
        self.kernels.append(kernel)

    def body(self) -> str:
        """Return the text with placeholders for kernel symbols."""
        declared = [self._declared[name] for name in sorted(self._declared)]
        attributes = 'attributes #0 = { nounwind "frame-pointer"="all" }\n'
        tables = [
            f"@{name} = private unnamed_addr constant {value}, align 64"
            for value, name in self._tables.items()
        ]
        return "\n".join([*tables, *declared, *self._functions, attributes])
