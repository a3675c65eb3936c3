# SPDX-License-Identifier: Apache-2.0
"""What random numbers of a run follow from: a seed and the number of the run."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from rlx.base.errors import UsageError

__all__ = ["RNG_INPUT", "RngPolicy", "stream_number"]

RNG_INPUT = "<rng>"
"""Name of the graph input that an executable fills itself: u32[4] = seed (low, high), number of the run (low, high)."""

_LIMIT = 1 << 64


@dataclass(frozen=True)
class RngPolicy:
    """Where an executable's random numbers come from.

    Every run uses the next number, so runs differ from each other; equal policies give equal runs, on every backend
    and for any number of threads.

    Attributes:
        seed: any integer of 64 bits.
        run: number of the next run.
    """

    seed: int = 0
    run: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "run"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
                raise UsageError(f"{name} of an RngPolicy is an int in [0, 2**64), not {value!r}")

    @classmethod
    def fresh(cls) -> RngPolicy:
        """Return a policy whose seed the operating system drew: no two executables then agree."""
        return cls(int.from_bytes(os.urandom(8), "little"))


def stream_number(name: str) -> int:
    """Return the number of a named stream: the same for the same name, everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
