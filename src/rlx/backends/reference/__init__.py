# SPDX-License-Identifier: Apache-2.0
"""The oracle: runs every operator by its NumPy meaning."""

from __future__ import annotations

from rlx.backends.reference.backend import ReferenceBackend

__all__ = ["backend"]

backend = ReferenceBackend()
