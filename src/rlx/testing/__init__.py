# SPDX-License-Identifier: Apache-2.0
"""Public: the conformance suite, tolerances, samples, and the zoo of real models."""
