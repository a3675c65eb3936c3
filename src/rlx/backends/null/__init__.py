# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: claims everything, compiles and plans everything, and refuses to run."""

from __future__ import annotations

from rlx.backends.null.backend import NullBackend

__all__ = ["backend"]

backend = NullBackend()
