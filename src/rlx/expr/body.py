# SPDX-License-Identifier: Apache-2.0
"""Bodies: what one kernel computes per element, as a canonical list of scalar instructions.

A `Body` is data: hashable, printable, parseable. It is written by tracing a Python function over `Scalar` handles
(`trace`), and composed by inlining bodies into a `BodyBuilder`, which shares equal instructions. Row instructions
(`rsum`, `rmax`, `rmin`, `rprod`) reduce over the trailing axes of the iteration space; their result is uniform, the
same for every element of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from rlx.base.dtypes import DType
from rlx.base.errors import ParseError, TypeRuleError
from rlx.expr.table import TABLE, Attribute, ScalarOp

__all__ = ["Body", "BodyBuilder", "Instr", "Number", "Scalar", "canonical", "parse_body", "trace"]

Number: TypeAlias = bool | int | float


@dataclass(frozen=True, slots=True)
class Instr:
    """One scalar operation. Arguments number the inputs first, then the instructions."""

    op: str
    dtype: DType
    args: tuple[int, ...]
    attribute: Attribute = None

    def __str__(self) -> str:
        attribute = "" if self.attribute is None else f"[{self.attribute!r}]"
        return " ".join([f"{self.op}{attribute}:{self.dtype}", *map(str, self.args)])


@dataclass(frozen=True)
class Body:
    """A straight-line program over scalars.

    Attributes:
        inputs: dtypes of the operands, one element of each is read per point of the iteration space.
        instrs: the instructions in order.
        results: indices (inputs first, then instructions) of what is written.
    """

    inputs: tuple[DType, ...]
    instrs: tuple[Instr, ...]
    results: tuple[int, ...]

    def dtype(self, index: int) -> DType:
        """Return the dtype of an input or instruction."""
        n = len(self.inputs)
        return self.inputs[index] if index < n else self.instrs[index - n].dtype

    @cached_property
    def result_types(self) -> tuple[DType, ...]:
        """The dtypes of the results."""
        return tuple(self.dtype(i) for i in self.results)

    @cached_property
    def has_rows(self) -> bool:
        """True if an instruction reduces over the row."""
        return any(TABLE[i.op].is_row for i in self.instrs)

    @cached_property
    def has_sums(self) -> bool:
        """True if the result may depend on the order in which a row is reduced."""
        return any(i.op in ("rsum", "rprod") and i.dtype.is_float for i in self.instrs)

    def uniform(self, inputs: Sequence[bool]) -> list[bool]:
        """Return for every input and instruction whether it is the same for all elements of a row.

        Args:
            inputs: the same question for the inputs.
        """
        out = list(inputs)
        for instr in self.instrs:
            out.append(TABLE[instr.op].is_row or all(out[a] for a in instr.args))
        return out

    def __str__(self) -> str:
        inputs = ",".join(map(str, self.inputs))
        return f"({inputs}){{{'; '.join(map(str, self.instrs))}}}->({','.join(map(str, self.results))})"


def canonical(body: Body) -> tuple[Body, tuple[int, ...]]:
    """Return the body with inputs and instructions in order of first use from the results, and the inputs' order.

    Input i of the new body is input `order[i]` of the old one; inputs that nothing reads come last. Bodies that differ
    only in the order in which they were put together become equal.
    """
    count = len(body.inputs)
    inputs: dict[int, int] = {}
    instrs: dict[int, int] = {}
    pending = [(r, False) for r in reversed(body.results)]
    while pending:
        index, expanded = pending.pop()
        if index < count:
            inputs.setdefault(index, len(inputs))
        elif index not in instrs:
            if expanded:
                instrs[index] = len(instrs)
            else:
                pending.append((index, True))
                pending.extend((a, False) for a in reversed(body.instrs[index - count].args))
    for index in range(count):
        inputs.setdefault(index, len(inputs))
    place = {**inputs, **{old: count + new for old, new in instrs.items()}}
    moved = [body.instrs[old - count] for old in instrs]
    return (
        Body(
            tuple(body.inputs[i] for i in inputs),
            tuple(
                Instr(i.op, i.dtype, tuple(place[a] for a in i.args), i.attribute) for i in moved
            ),
            tuple(place[r] for r in body.results),
        ),
        tuple(inputs),
    )


class Scalar:
    """A handle on a value of a body under construction; arithmetic emits instructions."""

    __slots__ = ("builder", "dtype", "index")

    def __init__(self, builder: BodyBuilder, index: int, dtype: DType) -> None:
        self.builder = builder
        self.index = index
        self.dtype = dtype

    def _lift(self, other: Scalar | Number) -> Scalar:
        return other if isinstance(other, Scalar) else self.builder.const(other, self.dtype)

    def __add__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("add", self, self._lift(other))

    def __radd__(self, other: Number) -> Scalar:
        return self._lift(other) + self

    def __sub__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("sub", self, self._lift(other))

    def __rsub__(self, other: Number) -> Scalar:
        return self._lift(other) - self

    def __mul__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("mul", self, self._lift(other))

    def __rmul__(self, other: Number) -> Scalar:
        return self._lift(other) * self

    def __truediv__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("div", self, self._lift(other))

    def __rtruediv__(self, other: Number) -> Scalar:
        return self._lift(other) / self

    def __neg__(self) -> Scalar:
        return self.builder.emit("neg", self)

    def __lt__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("lt", self, self._lift(other))

    def __le__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("le", self, self._lift(other))

    def __gt__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("gt", self, self._lift(other))

    def __ge__(self, other: Scalar | Number) -> Scalar:
        return self.builder.emit("ge", self, self._lift(other))

    def equals(self, other: Scalar | Number) -> Scalar:
        """Return whether both are equal (`==` stays Python's identity)."""
        return self.builder.emit("eq", self, self._lift(other))

    def differs(self, other: Scalar | Number) -> Scalar:
        """Return whether both differ."""
        return self.builder.emit("ne", self, self._lift(other))

    def cast(self, to: DType, *, saturate: bool = True) -> Scalar:
        """Return the value converted to a dtype by the rules of `base.numeric`."""
        how = None if saturate else "wrap"
        return (
            self if to is self.dtype else self.builder.emit("cast", self, dtype=to, attribute=how)
        )


class BodyBuilder:
    """Collects instructions; equal ones are emitted once."""

    def __init__(self, inputs: Sequence[DType]) -> None:
        self.inputs = tuple(inputs)
        self._instrs: list[Instr] = []
        self._known: dict[Instr, int] = {}

    def input(self, index: int) -> Scalar:
        """Return a handle on an operand's element."""
        return Scalar(self, index, self.inputs[index])

    def const(self, value: Number, dtype: DType) -> Scalar:
        """Return a constant that belongs to the operator's own definition."""
        number: Number
        if dtype is DType.BOOL:
            number = bool(value)
        elif dtype.is_float:
            number = float(value)
        else:
            number = int(value)
        # repr keeps -0.0, inf and nan apart, and makes the attribute hashable and equal to itself.
        return self._append(Instr("const", dtype, (), repr(number)))

    def emit(
        self, op: str, *args: Scalar, dtype: DType | None = None, attribute: Attribute = None
    ) -> Scalar:
        """Append an instruction and return its value.

        Args:
            op: a name of `expr.table.TABLE`.
            args: operands, all of this builder.
            dtype: the result dtype; only for `cast`, other operators derive it.
            attribute: what the operator needs besides operands.

        Raises:
            TypeRuleError: wrong number or dtypes of operands.
        """
        rule = TABLE[op]
        result = dtype or rule.result(tuple(a.dtype for a in args))
        return self._append(Instr(op, result, tuple(a.index for a in args), attribute))

    def _append(self, instr: Instr) -> Scalar:
        index = self._known.get(instr)
        if index is None:
            index = len(self.inputs) + len(self._instrs)
            self._instrs.append(instr)
            self._known[instr] = index
        return Scalar(self, index, instr.dtype)

    def inline(self, body: Body, args: Sequence[Scalar]) -> tuple[Scalar, ...]:
        """Append another body's instructions with its inputs replaced by `args`; return its results."""
        if tuple(a.dtype for a in args) != body.inputs:
            raise TypeRuleError(
                f"a body over {body.inputs} cannot take {tuple(a.dtype for a in args)}"
            )
        values = list(args)
        for instr in body.instrs:
            mapped = tuple(values[a].index for a in instr.args)
            values.append(self._append(Instr(instr.op, instr.dtype, mapped, instr.attribute)))
        return tuple(values[r] for r in body.results)

    def finish(self, *results: Scalar) -> Body:
        """Return the body with these results; instructions that nothing needs are dropped."""
        n = len(self.inputs)
        needed: set[int] = {r.index for r in results}
        for position in range(len(self._instrs) - 1, -1, -1):
            if position + n in needed:
                needed.update(self._instrs[position].args)
        renumber = {i: i for i in range(n)}
        kept: list[Instr] = []
        for position, instr in enumerate(self._instrs):
            if position + n in needed:
                renumber[position + n] = n + len(kept)
                kept.append(
                    Instr(
                        instr.op,
                        instr.dtype,
                        tuple(renumber[a] for a in instr.args),
                        instr.attribute,
                    )
                )
        return Body(self.inputs, tuple(kept), tuple(renumber[r.index] for r in results))


def trace(
    function: Callable[..., Scalar | tuple[Scalar, ...]],
    inputs: Sequence[DType],
    result: DType | None = None,
) -> Body:
    """Return the body of a function over scalars for these operand dtypes.

    Narrow floats are widened to f32 before the function sees them, and its results are rounded once: to `result`, or
    back to the widened operands' common dtype when that is None and they were narrow.
    """
    builder = BodyBuilder(inputs)
    args = [builder.input(i) for i in range(len(inputs))]
    wide = [a.cast(a.dtype.compute) for a in args]
    out = function(*wide)
    results = out if isinstance(out, tuple) else (out,)
    narrow = next((d for d in inputs if d.is_narrow_float), None)
    rounded: list[Scalar] = []
    for value in results:
        if result is not None:
            value = value.cast(result)  # noqa: PLW2901
        elif narrow is not None and value.dtype is DType.F32:
            value = value.cast(narrow)  # noqa: PLW2901
        rounded.append(value)
    return builder.finish(*rounded)


def parse_body(text: str) -> Body:
    """Parse the text that `str(body)` gives.

    Raises:
        ParseError: the text is no body.
    """
    try:
        head, rest = text.split("){", 1)
        code, tail = rest.rsplit("}->(", 1)
        inputs = tuple(DType(t) for t in head.removeprefix("(").split(",") if t)
        instrs = tuple(_parse_instr(t) for t in code.split("; ") if t)
        results = tuple(int(t) for t in tail.removesuffix(")").split(",") if t)
        _check_order(len(inputs), instrs, results)
    except (ValueError, KeyError) as error:
        raise ParseError(f"{text!r} is not a body: {error}") from error
    return Body(inputs, instrs, results)


def _check_order(count: int, instrs: Sequence[Instr], results: Sequence[int]) -> None:
    """Raise ValueError where an instruction or result reads what does not stand before it."""
    reads = [(a, count + i) for i, instr in enumerate(instrs) for a in instr.args]
    for index, limit in (*reads, *((r, count + len(instrs)) for r in results)):
        if not 0 <= index < limit:
            raise ValueError(f"value {index} is read where there are {limit}")


def _parse_instr(text: str) -> Instr:
    head, *args = text.split(" ")
    attribute: Attribute = None
    name, _, dtype = head.rpartition(":")
    if "[" in name:
        name, _, quoted = name.partition("[")
        attribute = quoted.removesuffix("]").strip("'")
    rule: ScalarOp = TABLE[name]
    numbers = tuple(int(a) for a in args)
    if rule.arity != len(numbers):
        raise ValueError(f"{name} takes {rule.arity} operands, not {len(numbers)}")
    return Instr(name, DType(dtype), numbers, attribute)
