# SPDX-License-Identifier: Apache-2.0
"""Public: the conformance suite, tolerances, samples, and the zoo of real models."""

from __future__ import annotations

from rlx.testing.conformance import Case, Outcome, conformance

__all__ = ["Case", "Outcome", "conformance"]
