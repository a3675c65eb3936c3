# SPDX-License-Identifier: Apache-2.0
"""Rearrangements of vectors in registers."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.builder import Function, Value

__all__ = ["transposed"]


def transposed(f: Function, lines: Sequence[Value]) -> list[Value]:
    """Return the transpose of n vectors of n lanes, n a power of two: log2(n) rounds of shuffles.

    Each round swaps the off-diagonal quarters of blocks of half the size.
    """
    out = list(lines)
    side = len(out)
    half = side // 2
    while half:
        low = [lane if not lane & half else side + lane - half for lane in range(side)]
        high = [lane + half if not lane & half else side + lane for lane in range(side)]
        for i in range(side):
            if not i & half:
                a, b = out[i], out[i + half]
                out[i], out[i + half] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        half //= 2
    return out
