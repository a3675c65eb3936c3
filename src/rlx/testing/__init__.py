# SPDX-License-Identifier: Apache-2.0
"""Public: the conformance suite, tolerances, samples, and the zoo of real models."""

from __future__ import annotations

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.testing.bisect import Finding, bisect, check
from rlx.testing.compare import Difference
from rlx.testing.conformance import Case, Outcome, conformance
from rlx.testing.settings import Setting

__all__ = ["Case", "Difference", "Finding", "Outcome", "Setting", "bisect", "check", "conformance"]
