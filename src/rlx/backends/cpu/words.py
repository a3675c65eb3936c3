# SPDX-License-Identifier: Apache-2.0
"""The numbers of the native ABI that both the run-time half and the emitters name."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CTX", "Failure"]


class CTX(IntEnum):
    """Words of the context (8 bytes each)."""

    SLOTS = 0
    DIMS = 1
    THUNKS = 3
    POOL = 4
    THREADS = 5
    SCRATCH = 6
    SCRATCH_STRIDE = 7
    ERROR = 8
    BUDGET = 9
    DIM_PROGRAM = 10
    LOG = 11


class Failure(IntEnum):
    """Kinds of failure a kernel records in the context, in the low byte of the error word."""

    DIVIDE_BY_ZERO = 1
    INDEX_OUT_OF_RANGE = 2
    DIM_OVERFLOW = 3
    OVER_BOUND = 4
