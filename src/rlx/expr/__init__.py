# SPDX-License-Identifier: Apache-2.0
"""Scalar and row expressions: the one source of NumPy meaning, derivatives and emitted code."""
