# SPDX-License-Identifier: Apache-2.0
"""One function of emitted code: structured control flow over everything values, arithmetic and memory offer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rlx.backends.cpu.lltypes import I1, I64, Type
from rlx.backends.cpu.memory_access import MemoryAccess
from rlx.backends.cpu.value import Operand, Value
from rlx.base.errors import BuildError

if TYPE_CHECKING:
    pass

__all__ = ["Function", "IfElse", "Loop", "While"]


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
    def _arm(self, index: int) -> Generator[None]:
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


class Function(MemoryAccess):
    """One function under construction. Made by `Module.function` and `Module.kernel`.

    Nothing is hoisted: emit what does not change in a loop (splats, constants' products) before the loop.
    """

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
            raise BuildError(
                f"a branch needs an i1, got {condition!r}; reduce a mask with any or all"
            )
        self.line(f"br i1 {condition.text}, label %{yes}, label %{no}")

    def _open_phis(self, kinds: Sequence[Type]) -> tuple[list[Value], int]:
        values = [Value(self, kind, f"%{self.fresh('p')}") for kind in kinds]
        slot = len(self._lines)
        self._lines.extend("" for _ in kinds)
        return values, slot

    def _close_phis(
        self,
        phis: list[Value],
        slot: int,
        before: tuple[str, list[Value]],
        latch: tuple[str, list[Value]],
    ) -> None:
        for index, phi in enumerate(phis):
            first, again = before[1][index], latch[1][index]
            self._lines[slot + index] = (
                f"  {phi.text} = phi {phi.type.text} [ {first.text}, %{before[0]} ], [ {again.text}, %{latch[0]} ]"
            )

    def _following(self, phis: list[Value], values: list[Operand] | None) -> list[Value]:
        if values is None or len(values) != len(phis):
            raise BuildError(
                f"the loop carries {len(phis)} values, next() got {0 if values is None else len(values)}"
            )
        return [self.lift(v, phi.type) for v, phi in zip(values, phis, strict=True)]

    @contextmanager
    def loop(
        self, lo: Operand, hi: Operand, step: Operand = 1, carry: Sequence[Value] = ()
    ) -> Generator[Loop]:
        """Emit `for index in range(lo, hi, step)` (signed i64, step > 0) with carried values.

        ::

            with f.loop(0, n, 16, carry=[zero]) as loop:
                loop.next(loop.carry[0] + f.load(V16, x, loop.index))
            total = loop.out[0]
        """
        start, stop = self.lift(lo, I64), self.lift(hi, I64)
        before, head, body, end = (
            self.block,
            self.fresh("head"),
            self.fresh("body"),
            self.fresh("exit"),
        )
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
    def while_(self, carry: Sequence[Value] = ()) -> Generator[While]:
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
    def if_(self, condition: Value) -> Generator[None]:
        """Emit a block that runs only when the condition (i1) holds."""
        then, end = self.fresh("then"), self.fresh("end")
        self.branch_if(condition, then, end)
        self.label(then)
        yield
        self.branch(end)
        self.label(end)

    @contextmanager
    def if_else(self, condition: Value) -> Generator[IfElse]:
        """Emit two branches whose yielded values merge; see `IfElse`."""
        state = IfElse(self, condition)
        yield state
        state.finish()
