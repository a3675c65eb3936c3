# SPDX-License-Identifier: Apache-2.0
"""Every environment knob of rlx: its name, type, default and meaning. Nothing else reads the environment."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UsageError

__all__ = ["KNOBS", "Knob", "override"]

T = TypeVar("T", bool, int, str)
_OVERRIDES: ContextVar[dict[str, object] | None] = ContextVar("rlx_knobs", default=None)
KNOBS: dict[str, Knob[bool] | Knob[int] | Knob[str]] = {}
"""All knobs by name; the documentation's table is generated from it."""


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable with a typed default.

    Attributes:
        name: of the variable.
        default: where it is not set; its type is the knob's.
        doc: what it does.
        choices: the only texts it takes; empty: any.
        least: the smallest number it takes.
    """

    name: str
    default: T
    doc: str
    choices: tuple[str, ...] = ()
    least: int = 0

    def __post_init__(self) -> None:
        KNOBS[self.name] = self  # pyright: ignore[reportArgumentType]

    def get(self) -> T:
        """Return the value: a scoped override, else the environment, else the default.

        Raises:
            UsageError: the environment holds what the knob does not take.
        """
        scoped = _OVERRIDES.get()
        if scoped is not None and self.name in scoped:
            return cast("T", scoped[self.name])
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        value = self._parse(text)
        if value is None:
            raise UsageError(
                f"environment variable {self.name}={text!r} is not {self._takes()}: {self.doc}"
            )
        return value

    def _parse(self, text: str) -> T | None:
        if isinstance(self.default, bool):
            return cast("T | None", _BOOLEANS.get(text.strip().lower()))
        if isinstance(self.default, int):
            try:
                number = int(text)
            except ValueError:
                return None
            return cast("T", number) if number >= self.least else None
        return cast("T", text) if not self.choices or text in self.choices else None

    def _takes(self) -> str:
        if isinstance(self.default, bool):
            return "0 or 1"
        if isinstance(self.default, int):
            return f"a whole number from {self.least} on"
        return f"one of {', '.join(self.choices)}"


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_BOOLEANS[""] = False


@contextmanager
def override(**values: object) -> Generator[None]:
    """Set knobs for a block of code, by name (`override(RLX_VERIFY=True)`).

    Raises:
        UsageError: no knob has that name, or the value has another type than its default.
    """
    for name, value in values.items():
        if name not in KNOBS:
            raise UsageError(f"unknown knob {name!r}.{did_you_mean(name, KNOBS)}")
        if type(value) is not type(KNOBS[name].default):
            raise UsageError(f"{name} takes a {type(KNOBS[name].default).__name__}, not {value!r}")
    token = _OVERRIDES.set({**(_OVERRIDES.get() or {}), **values})
    try:
        yield
    finally:
        _OVERRIDES.reset(token)


VERIFY = Knob("RLX_VERIFY", False, "Verify the graph after every pass.")
CHECK = Knob(
    "RLX_CHECK", False, "Check the memory plan independently and poison dead slots with NaN."
)
DUMP = Knob("RLX_DUMP", "", "Folder that receives the IR and the assembly of every kernel.")
PERF = Knob(
    "RLX_PERF", False, "Write the names of compiled functions where Linux `perf` looks for them."
)
CACHE = Knob(
    "RLX_CACHE",
    "on",
    "`on`, `off`, or `content` (identify model files by content instead of by stamp).",
    choices=("on", "off", "content"),
)
CACHE_DIR = Knob(
    "RLX_CACHE_DIR", "", "Folder of the on-disk cache; empty means the user's cache folder."
)
CACHE_LIMIT = Knob(
    "RLX_CACHE_LIMIT", 1 << 30, "Size in bytes above which the oldest cache entries are removed."
)
GOLDENS = Knob(
    "RLX_GOLDENS",
    "",
    "Folder of recorded model outputs; empty: tests/goldens of a source checkout.",
)
CPU_ISA = Knob(
    "RLX_CPU_ISA",
    "",
    "Restrict the CPU backend to a level of instructions: `v3` (AVX2) or `v4` (AVX-512).",
)
NAN_CHECK = Knob(
    "RLX_NAN_CHECK",
    "",
    "`1` makes every run stop at the first node that makes a NaN or an infinity from operands without one, `nan` at "
    "the first NaN only. Read when a model meets input shapes for the first time.",
)
THREADS = Knob("RLX_THREADS", 0, "Default number of threads of a run; 0 means all available CPUs.")


def cache_dir() -> Path:
    """Return the folder of the on-disk cache (not created here)."""
    chosen = CACHE_DIR.get()
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rlx"


def _warn_of_unknown() -> None:
    unknown = [n for n in os.environ if n.startswith("RLX_") and n not in KNOBS]
    if unknown:
        from logging import getLogger  # most processes need it later, or never

        for name in unknown:
            hint = did_you_mean(name, KNOBS)
            getLogger("rlx").warning("environment variable %s is unknown to rlx.%s", name, hint)


_warn_of_unknown()
