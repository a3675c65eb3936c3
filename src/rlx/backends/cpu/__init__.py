# SPDX-License-Identifier: Apache-2.0
"""The CPU backend; see `backend.py`, then `program.py`, `lowering.py` and `kernels/`."""

from __future__ import annotations

from rlx.backends.cpu.backend import CpuBackend

__all__ = ["backend"]

backend = CpuBackend()
