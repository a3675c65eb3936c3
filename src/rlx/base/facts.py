# SPDX-License-Identifier: Apache-2.0
"""What a program assumes about its symbolic extents: bounds, hints and guards.

Type rules ask the active `Facts` questions that the symbols alone do not answer ("are these two extents equal?"). With
a hint (the extents of the first call, or `dims=`) the answer that holds there is assumed and recorded as a guard;
the runtime checks every guard before a run and compiles a variant when one does not hold.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from rlx.base.dims import (
    Dim,
    equal,
    evaluate,
    less_equal,
    lone_symbol,
    substitute,
    symbols_of,
)
from rlx.base.errors import UndecidedError

__all__ = ["Facts", "Guard", "current_facts"]


@dataclass(frozen=True, slots=True)
class Guard:
    """An assumption `left <relation> right` with relation one of ``==``, ``!=``, ``<=``, ``>``."""

    left: Dim
    relation: str
    right: Dim
    reason: str = ""

    def holds(self, env: dict[str, int]) -> bool:
        """Return whether the assumption holds for these extents."""
        a, b = evaluate(self.left, env), evaluate(self.right, env)
        return {"==": a == b, "!=": a != b, "<=": a <= b, ">": a > b}[self.relation]

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.left} {self.relation} {self.right}{because}"


@dataclass
class Facts:
    """Bounds, hints, guards and known equalities of one graph.

    Attributes:
        uppers: largest value of a symbol the plan is made for; a larger call re-plans, code is untouched.
        hints: an actual value for every symbol, or empty when none is known yet.
        guards: assumptions made so far.
        equalities: symbol name -> extent it is assumed equal to.
        advice: what an error tells the caller to do about an unknown `{symbol}`.
    """

    uppers: dict[str, int] = field(default_factory=dict[str, int])
    hints: dict[str, int] = field(default_factory=dict[str, int])
    guards: list[Guard] = field(default_factory=list[Guard])
    equalities: dict[str, Dim] = field(default_factory=dict[str, Dim])
    advice: str = "give it with dims={{{symbol!r}: ...}}"

    @contextmanager
    def active(self) -> Generator[Facts]:
        """Make these the facts that type rules consult."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def canon(self, dim: Dim) -> Dim:
        """Return the extent with assumed equalities applied."""
        return substitute(dim, self.equalities) if self.equalities else dim

    def equal(self, a: Dim, b: Dim) -> bool | None:
        """Return whether a == b follows from the symbols and the guards so far (never assumes)."""
        return equal(self.canon(a), self.canon(b))

    def assume_equal(self, a: Dim, b: Dim, reason: str) -> bool:
        """Decide a == b, assuming the hinted answer (and recording a guard) where it is not known.

        Raises:
            UndecidedError: the answer is not known and there is no hint.
        """
        known = self.equal(a, b)
        if known is not None:
            return known
        a, b = self.canon(a), self.canon(b)
        if self._assumed(a, "!=", b) or self._assumed(b, "!=", a):
            return False
        answer = self._hint(a, reason) == self._hint(b, reason)
        self.guards.append(Guard(a, "==" if answer else "!=", b, reason))
        if answer:
            self._record_equality(a, b)
        return answer

    def assume_less_equal(self, a: Dim, b: Dim, reason: str) -> bool:
        """Decide a <= b, assuming the hinted answer where it is not known.

        Raises:
            UndecidedError: the answer is not known and there is no hint.
        """
        a, b = self.canon(a), self.canon(b)
        known = less_equal(a, b)
        if known is not None:
            return known
        if self._assumed(a, "<=", b) or self._assumed(a, ">", b):
            return self._assumed(a, "<=", b)
        answer = self._hint(a, reason) <= self._hint(b, reason)
        self.guards.append(Guard(a, "<=" if answer else ">", b, reason))
        return answer

    def _assumed(self, a: Dim, relation: str, b: Dim) -> bool:
        """Return whether this was assumed before: a question that many nodes ask is one guard."""
        return any(
            g.relation == relation and self.canon(g.left) == a and self.canon(g.right) == b
            for g in self.guards
        )

    def _hint(self, dim: Dim, reason: str) -> int:
        try:
            return evaluate(dim, self.hints)
        except KeyError as error:
            raise UndecidedError(
                f"{reason}: depends on the value of {dim}, which is not known before the first call; "
                + self.advice.format(symbol=error.args[0])
            ) from error

    def _record_equality(self, a: Dim, b: Dim) -> None:
        for left, right in ((a, b), (b, a)):
            name = lone_symbol(left)
            if name is not None and name not in symbols_of(right):
                self.equalities = {
                    k: substitute(v, {name: right}) for k, v in self.equalities.items()
                }
                self.equalities[name] = right
                return


_CURRENT: ContextVar[Facts | None] = ContextVar("rlx_facts", default=None)


def current_facts() -> Facts:
    """Return the active facts, or empty ones outside a graph."""
    return _CURRENT.get() or Facts()
