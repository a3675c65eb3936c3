# SPDX-License-Identifier: Apache-2.0
"""The dims table: every extent, stride, count and offset of a program, and the native code that evaluates it."""

from __future__ import annotations

from rlx.backends.cpu.thunks import DimOp, DimProgram
from rlx.base.dims import Dim, DimExpr, Symbol
from rlx.base.errors import OutOfMemoryError

__all__ = ["Extents"]

_FUNCTIONS = {"floordiv": DimOp.FLOORDIV, "mod": DimOp.MOD, "min": DimOp.MIN, "max": DimOp.MAX}


class Extents:
    """Assigns an index to every distinct expression and compiles expressions into a dim program.

    Attributes:
        program: evaluates everything that depends on symbols, from the symbols' own entries.
        values: initial table: constants in place, the rest 0.
        symbols: index of every symbol.
    """

    def __init__(self) -> None:
        self.program = DimProgram()
        self.values: list[int] = []
        self.symbols: dict[str, int] = {}
        self._known: dict[Dim, int] = {}
        self._pairs: dict[tuple[DimOp, int, int], int] = {}

    def index(self, dim: Dim) -> int:
        """Return the table index of an expression."""
        found = self._known.get(dim)
        if found is None:
            found = self._new(dim) if isinstance(dim, int) else self._compile(dim)
            self._known[dim] = found
        return found

    def _new(self, value: int) -> int:
        if not -(1 << 63) <= value < 1 << 63:
            raise OutOfMemoryError(
                f"the program needs the extent or size {value}, more than 64-bit addresses hold"
            )
        self.values.append(value)
        return len(self.values) - 1

    def _compile(self, dim: DimExpr) -> int:
        total: int | None = None
        # Positive terms first: partial sums of sizes then stay within range.
        for monomial, coefficient in sorted(dim.terms, key=lambda t: t[1] < 0):
            term: int | None = None if monomial and coefficient == 1 else self.index(coefficient)
            for atom in monomial:
                factor = (
                    self._symbol(atom)
                    if isinstance(atom, Symbol)
                    else self._function(atom.op, atom.args)
                )
                term = factor if term is None else self._pair(DimOp.MUL, term, factor)
            assert term is not None
            total = term if total is None else self._pair(DimOp.ADD, total, term)
        assert total is not None
        return total

    def _symbol(self, symbol: Symbol) -> int:
        if symbol.name not in self.symbols:
            self.symbols[symbol.name] = self._new(0)
        return self.symbols[symbol.name]

    def _function(self, name: str, args: tuple[Dim, ...]) -> int:
        op = _FUNCTIONS[name]
        indices = [self.index(a) for a in args]
        result = indices[0]
        for index in indices[1:]:
            result = self._pair(op, result, index)
        return result

    def _pair(self, op: DimOp, a: int, b: int) -> int:
        key = (op, a, b)
        if key not in self._pairs:
            target = self._new(0)
            self.program.append(op, target, a, b)
            self._pairs[key] = target
        return self._pairs[key]
