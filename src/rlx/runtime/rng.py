# SPDX-License-Identifier: Apache-2.0
"""The random numbers of an executable: counts its runs and gives each run its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.backends.protocol import Run
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.base.rng import RngPolicy

__all__ = ["RunKeys"]

_MASK = 0xFFFFFFFF


class RunKeys:
    """Hands out one key per run. The owner serialises calls.

    Attributes:
        policy: seed and number of the next run.
    """

    def __init__(self, policy: RngPolicy) -> None:
        self.restart(policy)

    def restart(self, policy: RngPolicy) -> None:
        """Go on with the runs of another policy.

        Raises:
            UsageError: it is no policy.
        """
        if not isinstance(policy, RngPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"rng is an rlx.RngPolicy such as RngPolicy(seed=7), not {policy!r}")
        self.policy = policy

    def next(self) -> Array:
        """Return the key of the next run, u32[4]: seed (low, high), number of the run (low, high)."""
        seed, run = self.policy.seed, self.policy.run
        self.policy = RngPolicy(seed, (run + 1) % (1 << 64))
        return np.array([seed & _MASK, seed >> 32, run & _MASK, run >> 32], np.uint32)

    def feeding(self, run: Run, position: int) -> Run:
        """Return `run` with the key of every run inserted among its inputs.

        Args:
            run: of a compiled graph.
            position: of the key among the program's inputs; -1 for a program without random numbers.
        """
        if position < 0:
            return run

        def fed(inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]) -> None:
            run([*inputs[:position], self.next(), *inputs[position:]], outputs, env)

        return fed
