# SPDX-License-Identifier: Apache-2.0
"""Programs for single values of extents, kept where they are faster than the one for all values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from operator import index
from statistics import median
from time import perf_counter
from typing import Any, cast

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UsageError

__all__ = ["Specialization", "check_extents", "check_threshold", "measure"]

_MOST_RUNS = 31
_LEAST_RUNS = 3
_SECONDS = 1.0


@dataclass(frozen=True)
class Specialization:
    """What compiling for single values of extents gained.

    Attributes:
        extents: the values that the program is for.
        general: median seconds of a run of the program for all values.
        special: and of the one for these.
        kept: whether runs with these extents use it now.
    """

    extents: Mapping[str, int]
    general: float
    special: float
    kept: bool

    @property
    def speedup(self) -> float:
        """How many times as fast as the program for all values it runs."""
        return self.general / self.special


def check_extents(
    model: str, extents: Any, symbols: set[str], bounds: Mapping[str, int]
) -> dict[str, int]:
    """Return extents to specialise for.

    Raises:
        UsageError: there are none, one is no symbol of the inputs, or no extent, or a symbol has neither a value nor a
            bound.
    """
    if not isinstance(extents, Mapping) or not extents:
        raise UsageError(
            f"specialize takes a dict with values of {', '.join(sorted(symbols)) or 'symbols'}, not {extents!r}"
        )
    found: dict[str, int] = {}
    for name, value in cast("Mapping[Any, Any]", extents).items():
        if name not in symbols:
            raise UsageError(
                f"the inputs of {model} have no symbol {name!r}.{did_you_mean(str(name), symbols)} They have "
                f"{', '.join(sorted(symbols)) or 'none'}"
            )
        try:
            found[name] = 0 if isinstance(value, bool) else index(value)
        except TypeError:
            found[name] = 0
        if found[name] < 1:
            raise UsageError(f"an extent is an int of at least 1, not {name}={value!r}")
    missing = sorted(symbols - found.keys() - bounds.keys())
    if missing:
        raise UsageError(
            f"specialize needs a value of {', '.join(missing)} too, or bounds with "
            f"dims={{{', '.join(f'{n!r}: ...' for n in missing)}}}"
        )
    return found


def check_threshold(at_least: Any) -> float:
    """Return how many times as fast a program must be.

    Raises:
        UsageError: it is no number.
    """
    if not isinstance(at_least, (int, float)) or isinstance(at_least, bool) or isnan(at_least):
        raise UsageError(f"at_least is a number, not {at_least!r}")
    return float(at_least)


def measure(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """Return the median seconds of two functions, which are called in turn for about a second."""
    times: tuple[list[float], list[float]] = ([], [])
    start = perf_counter()
    for run in (first, second):
        run()  # memory is touched, pages are there
    while len(times[0]) < _MOST_RUNS and (
        len(times[0]) < _LEAST_RUNS or perf_counter() - start < _SECONDS
    ):
        for run, into in zip((first, second), times, strict=True):
            before = perf_counter()
            run()
            into.append(perf_counter() - before)
    return median(times[0]), median(times[1])
