# SPDX-License-Identifier: Apache-2.0
"""Ways to compile and run one model, to be compared with each other."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.backends.protocol import CompileOptions
from rlx.backends.registry import get_backend
from rlx.base.config import override
from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import DeviceError, UsageError
from rlx.base.numeric import Array
from rlx.passes.pipelines import OPTIONAL

if TYPE_CHECKING:
    from rlx.runtime.derive import Choose
    from rlx.runtime.executable import Executable

__all__ = ["Setting"]

_WORDS = ("isa", "passes", "skip", "threads")


@dataclass(frozen=True)
class Setting:
    """One way to compile and run a model.

    Attributes:
        device: one of `rlx.devices()`.
        isa: level of instructions, `v3` or `v4`; empty for what the machine has.
        threads: most threads of a run; None for all.
        skip: passes that do not run.
    """

    device: str = "cpu"
    isa: str = ""
    threads: int | None = None
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in self.skip:
            if name not in OPTIONAL:
                raise UsageError(
                    f"pass {name!r} cannot be skipped.{did_you_mean(name, OPTIONAL)} These can: "
                    f"{', '.join(sorted(OPTIONAL))}"
                )

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Return the setting of a text such as ``cpu,isa=v3,threads=1`` or ``cpu,passes=off`` or ``cpu,skip=cse+dce``.

        Raises:
            UsageError: the text has another form.
        """
        device, *items = (part.strip() for part in text.split(","))
        given: dict[str, str] = {}
        for item in items:
            name, sep, value = item.partition("=")
            if name not in _WORDS or not sep or name in given:
                raise UsageError(
                    f"a setting is a device and then isa=, threads=, skip= or passes=off, not {item!r} in {text!r}"
                )
            given[name] = value
        if given.get("passes", "off") != "off":
            raise UsageError(f"passes= takes only 'off', not {given['passes']!r}")
        if not given.get("threads", "1").isdecimal():
            raise UsageError(f"threads= takes a number, not {given['threads']!r}")
        skip = (
            OPTIONAL
            if "passes" in given
            else frozenset(filter(None, given.get("skip", "").split("+")))
        )
        threads = int(given["threads"]) if "threads" in given else None
        return cls(device, given.get("isa", ""), threads, skip)

    def __str__(self) -> str:
        parts = [self.device]
        if self.isa:
            parts.append(f"isa={self.isa}")
        if self.threads is not None:
            parts.append(f"threads={self.threads}")
        if self.skip:
            parts.append(
                "passes=off" if self.skip == OPTIONAL else f"skip={'+'.join(sorted(self.skip))}"
            )
        return ",".join(parts)

    def without(self, name: str) -> Setting:
        """Return this setting with one more pass skipped."""
        return Setting(self.device, self.isa, self.threads, self.skip | {name})

    def run(
        self, model: Executable, inputs: Mapping[str, Any], outputs: Choose | None = None
    ) -> dict[str, Array]:
        """Compile a model in this way, run it once, and give everything back.

        Args:
            model: any executable of it.
            inputs: as for `run`.
            outputs: which values to return; by default the model's outputs.

        Raises:
            DeviceError: there is no such device.
        """
        with self.compiled(model, outputs) as compiled:
            return compiled.run(inputs)

    @contextmanager
    def compiled(self, model: Executable, outputs: Choose | None = None) -> Generator[Executable]:
        """Give the model compiled in this way to the block."""
        backend = get_backend(self.device)
        targets = backend.targets()
        if not targets:
            raise DeviceError(f"there is no device {self.device!r} on this machine")
        options = CompileOptions(threads=self.threads, skip=self.skip)
        level = override(RLX_CPU_ISA=self.isa) if self.isa else nullcontext()
        with (
            level,
            model.derive(outputs, backend=backend, target=targets[0], options=options) as made,
        ):
            yield made
