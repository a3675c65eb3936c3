# SPDX-License-Identifier: Apache-2.0
"""What an executable shows of itself: intermediate values, times, reports. `Executable` inherits it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from rlx.backends.protocol import CompiledGraph, watchable
from rlx.base.numeric import Array

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.runtime.profile import Profile
    from rlx.runtime.report import ModelReport

__all__ = ["Call", "Observable"]


@dataclass(frozen=True)
class Call:
    """One call with its arrays bound, ready to run as often as wanted.

    Attributes:
        compiled: the backend's part.
        run: runs it.
        outputs: what it fills, by name.
        extents: the values of the symbols.
        build: makes the graph that was compiled, before all passes; None where only programs are at hand.
    """

    compiled: CompiledGraph
    run: Callable[[], None]
    outputs: dict[str, Array]
    extents: Mapping[str, int]
    build: Callable[[], Graph] | None


class Observable(ABC):
    """Looking into a compiled model. All of it works on the program that `run` runs, without another compilation."""

    @abstractmethod
    def _prepared(self, inputs: Mapping[str, Any] | Sequence[Any]) -> AbstractContextManager[Call]:
        """Bind inputs as `run` does, and keep other calls out inside the block."""

    @property
    @abstractmethod
    def _title(self) -> tuple[str, str]:
        """The names of the model and of the device."""

    @overload
    def tap(self, name: str, inputs: Mapping[str, Any] | Sequence[Any]) -> Array: ...
    @overload
    def tap(
        self, name: list[str] | tuple[str, ...], inputs: Mapping[str, Any] | Sequence[Any]
    ) -> dict[str, Array]: ...
    def tap(
        self,
        name: str | list[str] | tuple[str, ...],
        inputs: Mapping[str, Any] | Sequence[Any],
    ) -> Array | dict[str, Array]:
        """Run once, as `run` does, and return a copy of an intermediate value, or of several by name.

        Args:
            name: of a value, or of the node that makes it (its first result). In a loop the last one counts.
            inputs: as for `run`.

        Raises:
            UsageError: there is no such value, or the program does not store it because it was fused or folded away
                (the message says into what), or it lies in a branch that was not taken.
        """
        from rlx.runtime.taps import Stored, tap

        names = [name] if isinstance(name, str) else list(name)
        with self._prepared(inputs) as call:
            compiled = watchable(call.compiled, "tap")
            stored = Stored(compiled.program)
            found = tap(compiled, stored, stored.find(names, call.build), call.run)
        return found[name] if isinstance(name, str) else found

    def check_finite(
        self, inputs: Mapping[str, Any] | Sequence[Any], *, infinities: bool = True
    ) -> dict[str, Array]:
        """Run once as `run` does, and look at the results of every node. `RLX_NAN_CHECK` does it for all runs.

        Args:
            inputs: as for `run`.
            infinities: whether they count as well as NaN.

        Raises:
            ExecutionError: names the first node that made a NaN (or infinity) from operands that had none.
        """
        from rlx.runtime.finite import FiniteCheck

        with self._prepared(inputs) as call:
            FiniteCheck(watchable(call.compiled, "check_finite"), infinities=infinities).run(
                call.run
            )
            return call.outputs

    def profile(
        self, inputs: Mapping[str, Any] | Sequence[Any], runs: int = 20, warmup: int = 3
    ) -> Profile:
        """Run some times and return where the time went.

        Args:
            inputs: as for `run`.
            runs: how often; times are medians over them.
            warmup: runs before them.

        Raises:
            UsageError: the numbers of runs make no sense, or the device cannot be watched.
        """
        from rlx.runtime.profile import Profile, measure

        model, device = self._title
        with self._prepared(inputs) as call:
            compiled = watchable(call.compiled, "profile")
            times, spans = measure(compiled, call.run, runs, warmup)
            return Profile(
                model, device, compiled.threads, dict(call.extents), times, spans, compiled.program
            )

    @abstractmethod
    def report(self) -> ModelReport:
        """Return what is known about the compiled model: how operators run, what fused, memory."""
