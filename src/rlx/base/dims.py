# SPDX-License-Identifier: Apache-2.0
"""Symbolic extents: canonical integer expressions over named symbols.

A `Dim` is an `int` or a `DimExpr`: a sum of integer multiples of products of atoms. Atoms are symbols, floor
division, modulo, minimum and maximum; ceil division is written with floor division. Arithmetic canonicalises, so two
expressions with equal text are equal, and constants collapse to `int`.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final, TypeAlias, cast

from rlx.base.errors import ParseError, UndecidedError, UsageError

__all__ = [
    "LIMIT",
    "Dim",
    "DimExpr",
    "Symbol",
    "bounds",
    "ceildiv",
    "dim_max",
    "dim_min",
    "equal",
    "evaluate",
    "floordiv",
    "less_equal",
    "lone_symbol",
    "parse_dim",
    "product",
    "substitute",
    "symbol",
    "symbol_atoms",
    "symbols_of",
]


LIMIT: Final = 2**31 - 1
"""The largest value a symbolic extent may have; larger extents have to be static."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named extent. Its value in a call is at least `lower`."""

    name: str
    lower: int = 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _Func:
    """A non-polynomial atom: floordiv, mod, min or max of two or more expressions."""

    op: str
    args: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.op}({','.join(map(str, self.args))})"


_Atom: TypeAlias = Symbol | _Func
_Monomial: TypeAlias = tuple[_Atom, ...]


class DimExpr:
    """A canonical symbolic integer; build it with `symbol` and arithmetic, never directly."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[_Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DimExpr):
            return self is other or (self._hash == other._hash and self.terms == other.terms)
        return False

    def __add__(self, other: Dim) -> Dim:
        return _from_terms(_sum(_terms(self), _terms(other)))

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: Dim) -> Dim:
        return self * -1 + other

    def __mul__(self, other: Dim) -> Dim:
        out: dict[_Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in _terms(other).items():
                key = tuple(sorted(m1 + m2, key=_atom_key))
                out[key] = out.get(key, 0) + c1 * c2
        return _from_terms(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return _mod(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return _mod(other, self)

    def _decide(self, other: Dim, answer: bool | None, relation: str) -> bool:
        if answer is None:
            raise UndecidedError(
                f"cannot decide {self} {relation} {other} for all values of {_listed(self, other)}; "
                "a condition in Python needs extents that are numbers"
            )
        return answer

    def __lt__(self, other: Dim) -> bool:
        return self._decide(other, less_equal(self + 1, other), "<")

    def __le__(self, other: Dim) -> bool:
        return self._decide(other, less_equal(self, other), "<=")

    def __gt__(self, other: Dim) -> bool:
        return self._decide(other, less_equal(other + 1, self), ">")

    def __ge__(self, other: Dim) -> bool:
        return self._decide(other, less_equal(other, self), ">=")

    def __int__(self) -> int:
        raise UndecidedError(
            f"the extent {self} is symbolic; it has no single value before a call, so it cannot be used as an int"
        )

    __index__ = __int__

    def __bool__(self) -> bool:
        lo, hi = bounds(self)
        if lo > 0 or hi < 0:
            return True
        raise UndecidedError(
            f"cannot decide whether {self} is zero for all values of {_listed(self)}; "
            "a condition in Python needs extents that are numbers"
        )

    def __str__(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            factors = [str(a) for a in monomial]
            if coefficient not in (1, -1) or not factors:
                factors = [str(abs(coefficient)), *factors]
            parts.append(("-" if coefficient < 0 else "+") + "*".join(factors))
        return "".join(parts).removeprefix("+")

    def __repr__(self) -> str:
        return f"Dim({self})"


Dim: TypeAlias = int | DimExpr


def symbol(name: str, lower: int = 1) -> Dim:
    """Return the extent called `name`, at least `lower` in every call.

    Raises:
        UsageError: the name is not an identifier.
    """
    if not _NAME.fullmatch(name) or name in _FUNCTIONS or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} is not a valid name for a symbolic extent: letters, digits and underscores, "
            f"and neither a word of Python's nor one of {', '.join(_FUNCTIONS)}"
        )
    return DimExpr((((Symbol(name, lower),), 1),))


def _listed(*dims: Dim) -> str:
    return ", ".join(sorted(frozenset[str]().union(*map(symbols_of, dims))))


def _atom_key(atom: _Atom) -> str:
    return str(atom)


def _terms(value: Dim) -> dict[_Monomial, int]:
    if isinstance(value, DimExpr):
        return dict(value.terms)
    return {(): int(value)} if value else {}


def _sum(a: dict[_Monomial, int], b: dict[_Monomial, int]) -> dict[_Monomial, int]:
    for monomial, coefficient in b.items():
        a[monomial] = a.get(monomial, 0) + coefficient
    return a


def _term_key(item: tuple[_Monomial, int]) -> tuple[int, tuple[str, ...]]:
    return (-len(item[0]), tuple(map(_atom_key, item[0])))


def _from_terms(terms: dict[_Monomial, int]) -> Dim:
    kept = [(m, c) for m, c in terms.items() if c]
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    return DimExpr(tuple(sorted(kept, key=_term_key)))


def _of_atom(atom: _Atom) -> Dim:
    return DimExpr((((atom,), 1),))


def floordiv(a: Dim, b: Dim) -> Dim:
    """Return a // b rounded toward minus infinity; `b` must be positive."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1:
        return a
    if isinstance(b, int):
        return _floordiv_int(a, b)
    exact = _divide_exactly(a, b)
    return _of_atom(_Func("floordiv", (a, b))) if exact is None else exact


def _floordiv_int(a: Dim, b: int) -> Dim:
    whole: dict[_Monomial, int] = {}
    rest: dict[_Monomial, int] = {}
    for monomial, coefficient in _terms(a).items():
        quotient, remainder = divmod(coefficient, b)
        if monomial and remainder:  # only whole multiples may leave the division
            rest[monomial] = coefficient
            continue
        if quotient:
            whole[monomial] = quotient
        if remainder:
            rest[monomial] = remainder
    left = _from_terms(rest)
    lo, hi = bounds(left)
    if lo >= 0 and hi < b:
        return _from_terms(whole)
    if isinstance(left, int):
        return _from_terms(whole) + left // b
    return _from_terms(whole) + _of_atom(_Func("floordiv", (left, b)))


def _divide_exactly(a: Dim, b: DimExpr) -> Dim | None:
    """Return a / b where b is one positive monomial that divides every term of a, else None."""
    if a == b:
        return 1
    if len(b.terms) != 1 or bounds(b)[0] <= 0:
        return None
    divisor, factor = b.terms[0]
    out: dict[_Monomial, int] = {}
    for monomial, coefficient in _terms(a).items():
        left = list(monomial)
        for atom in divisor:
            if atom not in left:
                return None
            left.remove(atom)
        if coefficient % factor:
            return None
        out[tuple(left)] = coefficient // factor
    return _from_terms(out)


def ceildiv(a: Dim, b: Dim) -> Dim:
    """Return a / b rounded toward plus infinity; `b` must be positive."""
    return -floordiv(-a, b)


def _mod(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    quotient = floordiv(a, b)
    if isinstance(quotient, int) or not any(
        isinstance(t, _Func) for m, _ in quotient.terms for t in m
    ):
        return a - quotient * b
    return _of_atom(_Func("mod", (a, b)))


def dim_min(*args: Dim) -> Dim:
    """Return the smallest of the extents."""
    return _extreme("min", args)


def dim_max(*args: Dim) -> Dim:
    """Return the largest of the extents."""
    return _extreme("max", args)


def _extreme(op: str, args: Iterable[Dim]) -> Dim:
    flat: list[Dim] = []
    for arg in args:
        nested = _as_func(arg, op)
        flat.extend(nested.args if nested else (arg,))
    kept: list[Dim] = []
    for arg in flat:
        if any(_absorbs(op, other, arg) for other in kept):
            continue
        kept = [other for other in kept if not _absorbs(op, arg, other)]
        kept.append(arg)
    if len(kept) == 1:
        return kept[0]
    return _of_atom(_Func(op, tuple(sorted(kept, key=str))))


def _as_func(value: Dim, op: str) -> _Func | None:
    if isinstance(value, DimExpr) and len(value.terms) == 1:
        monomial, coefficient = value.terms[0]
        if (
            coefficient == 1
            and len(monomial) == 1
            and isinstance(monomial[0], _Func)
            and monomial[0].op == op
        ):
            return monomial[0]
    return None


def _absorbs(op: str, winner: Dim, loser: Dim) -> bool:
    """True if `winner` is never on the losing side of op against `loser`."""
    return less_equal(winner, loser) is True if op == "min" else less_equal(loser, winner) is True


_Interval: TypeAlias = tuple[int, int]


def bounds(value: Dim, uppers: Mapping[str, int] | None = None) -> _Interval:
    """Return (lowest, highest) value; a symbol without an entry in `uppers` is at most `LIMIT`."""
    if isinstance(value, int):
        return value, value
    lo = hi = 0
    for monomial, coefficient in value.terms:
        term: _Interval = (coefficient, coefficient)
        for atom in monomial:
            term = _interval_mul(term, _atom_bounds(atom, uppers))
        lo, hi = lo + term[0], hi + term[1]
    return lo, hi


def _interval_mul(a: _Interval, b: _Interval) -> _Interval:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _atom_bounds(atom: _Atom, uppers: Mapping[str, int] | None) -> _Interval:
    if isinstance(atom, Symbol):
        return atom.lower, max(uppers.get(atom.name, LIMIT) if uppers else LIMIT, atom.lower)
    intervals = [bounds(a, uppers) for a in atom.args]
    if atom.op == "floordiv":
        divisors = [max(d, 1) for d in intervals[1]]
        corners = [n // d for n in intervals[0] for d in divisors]
        return min(corners), max(corners)
    if atom.op == "mod":
        return 0, max(intervals[1][1] - 1, 0)
    pick = min if atom.op == "min" else max
    return pick(i[0] for i in intervals), pick(i[1] for i in intervals)


def less_equal(a: Dim, b: Dim, uppers: Mapping[str, int] | None = None) -> bool | None:
    """Return whether a <= b for all values of the symbols: True, False (never), or None (depends)."""
    lo, hi = bounds(b - a, uppers)
    if lo >= 0:
        return True
    return False if hi < 0 else None


def equal(a: Dim, b: Dim, uppers: Mapping[str, int] | None = None) -> bool | None:
    """Return whether a == b for all values of the symbols: True, False (never), or None (depends)."""
    if a == b:
        return True
    if isinstance(a, int) and isinstance(b, int):
        return False
    lo, hi = bounds(a - b, uppers)
    return False if lo > 0 or hi < 0 else None


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of the extents (1 for none)."""
    return reduce(lambda a, b: a * b, dims, cast("Dim", 1))


def evaluate(value: Dim, env: Mapping[str, int]) -> int:
    """Return the value of an expression for these symbols.

    Raises:
        KeyError: a symbol has no value in `env`.
    """
    if isinstance(value, int):
        return value
    total = 0
    for monomial, coefficient in value.terms:
        term = coefficient
        for atom in monomial:
            term *= _evaluate_atom(atom, env)
        total += term
    return total


def _evaluate_atom(atom: _Atom, env: Mapping[str, int]) -> int:
    if isinstance(atom, Symbol):
        return env[atom.name]
    args = [evaluate(a, env) for a in atom.args]
    if atom.op in ("min", "max"):
        return min(args) if atom.op == "min" else max(args)
    if args[1] <= 0:
        raise UsageError(f"{atom} divides by {args[1]}")
    return args[0] // args[1] if atom.op == "floordiv" else args[0] % args[1]


def substitute(value: Dim, env: Mapping[str, Dim]) -> Dim:
    """Return the expression with symbols replaced; names not in `env` stay."""
    if isinstance(value, int) or not env:
        return value
    total: Dim = 0
    for monomial, coefficient in value.terms:
        term: Dim = coefficient
        for atom in monomial:
            term = term * _substitute_atom(atom, env)
        total = total + term
    return total


def _substitute_atom(atom: _Atom, env: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, Symbol):
        return env.get(atom.name, _of_atom(atom))
    args = tuple(substitute(a, env) for a in atom.args)
    return _FUNCTIONS[atom.op](*args)


def symbols_of(value: Dim) -> frozenset[str]:
    """Return the names of all symbols in the expression."""
    return frozenset(s.name for s in symbol_atoms(value))


def lone_symbol(value: Dim) -> str | None:
    """Return the name of the symbol that the expression is, or None."""
    if isinstance(value, DimExpr) and len(value.terms) == 1:
        monomial, factor = value.terms[0]
        if factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
            return monomial[0].name
    return None


def symbol_atoms(value: Dim) -> Iterable[Symbol]:
    """Iterate the symbols in the expression, a repeated one repeatedly."""
    if isinstance(value, DimExpr):
        for monomial, _ in value.terms:
            for atom in monomial:
                if isinstance(atom, Symbol):
                    yield atom
                else:
                    for arg in atom.args:
                        yield from symbol_atoms(arg)


_FUNCTIONS: dict[str, Callable[..., Dim]] = {
    "floordiv": floordiv,
    "mod": _mod,
    "min": dim_min,
    "max": dim_max,
}


def parse_dim(text: str, symbols: Callable[[str], Dim] = symbol) -> Dim:
    """Parse the text that `str` gives; `symbols` turns a name into an extent.

    Raises:
        ParseError: the text is no such expression.
    """
    try:
        return _parse_node(ast.parse(text, mode="eval").body, symbols)
    except (SyntaxError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ParseError(f"{text!r} is not an extent expression: {error}") from error


def _parse_node(node: ast.expr, symbols: Callable[[str], Dim]) -> Dim:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return symbols(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_parse_node(operand, symbols)
        case ast.BinOp(op=op, left=left, right=right):
            a, b = _parse_node(left, symbols), _parse_node(right, symbols)
            if isinstance(op, ast.Add):
                return a + b
            if isinstance(op, ast.Sub):
                return a - b
            if isinstance(op, ast.Mult):
                return a * b
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_parse_node(a, symbols) for a in args))
        case _:
            pass
    raise ValueError(f"unexpected {ast.dump(node)}")
