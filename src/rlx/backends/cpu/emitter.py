# SPDX-License-Identifier: Apache-2.0
"""The core of a function under construction: emission, constants, vectors, calls."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlx.backends.cpu.intrinsics import INTRINSICS
from rlx.backends.cpu.lltypes import F32, I32, I64, PTR, VOID, Type, literal, vec
from rlx.backends.cpu.value import Number, Operand, Value
from rlx.base.errors import BuildError

if TYPE_CHECKING:
    from rlx.backends.cpu.builder import Module
    from rlx.backends.cpu.isa import Isa

__all__ = ["Emitter"]


class Emitter:
    """The text of one function: emission, constants, vectors, calls.

    Attributes:
        module: the module it belongs to.
        name: its symbol.
        result: its result type.
        args: its parameters as values.
        block: label of the basic block being emitted.
    """

    def __init__(
        self, module: Module, name: str, result: Type, params: Sequence[tuple[str, Type]], head: str
    ) -> None:
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
            raise BuildError(
                f"arithmetic on {left!r} and {right!r} is not defined; convert to a type that has it"
            )
        return self.emit(kind, f"{op} {kind.text} {left.text}, {right.text}")

    @contextmanager
    def at_entry(self) -> Generator[None]:
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
        first = self.emit(
            kind, f"insertelement {kind.text} poison, {scalar.type.text} {scalar.text}, i64 0"
        )
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

    def call(self, target: Emitter | str, *args: Value, result: Type = VOID) -> Value:
        """Call a function of this module, or an external one by name (it must be on the linker's allowlist).

        Raises:
            BuildError: the operands do not match the called function.
        """
        if isinstance(target, Emitter):
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

    def choose(
        self, index: Value, functions: Mapping[int, Emitter | str], params: Sequence[Type]
    ) -> Value:
        """Return a pointer to the function that the mapping has for an index, for `call_pointer`.

        One call through it is less to compile than a call of each behind a branch. An index that the
        mapping lacks gives any of them.
        """
        kinds = tuple(params)
        chosen: Value | None = None
        for number, target in functions.items():
            if isinstance(target, Emitter):
                if target.params != kinds:
                    raise BuildError(f"{target.name} takes {target.params}, not {kinds}")
                name = target.name
            else:
                name = target
                self.module.declare(name, VOID, kinds)
            pointer = Value(self, PTR, f"@{name}")
            chosen = pointer if chosen is None else self.select(index.eq(number), pointer, chosen)
        if chosen is None:
            raise BuildError("choose needs at least one function")
        return chosen

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
            raise BuildError(
                f"intrinsic {name!r} is not in the table of rlx.backends.cpu.intrinsics"
            )
        needed = entry.requires | frozenset((requires,) if requires else ())
        missing = sorted(needed - self.isa.features)
        if missing:
            raise BuildError(
                f"intrinsic {name} needs {', '.join(missing)}, which the target {self.isa.name} lacks"
            )
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
