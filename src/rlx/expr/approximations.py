# SPDX-License-Identifier: Apache-2.0
"""Coefficients of functions that several code generators spell out, lowest power first."""

from __future__ import annotations

__all__ = ["ERF32_BORDER", "ERF32_LIMIT", "ERF32_SMALL", "ERF32_TAIL"]

ERF32_BORDER = 0.86
"""Up to this absolute value erf(x) = x + x * ERF32_SMALL(x^2), beyond it is 1 - e^(x * ERF32_TAIL(x))."""
ERF32_LIMIT = 4.0
"""From here on erf rounds to 1 in f32."""
ERF32_SMALL = (0.12837917, -0.37612563, 0.11282618, -0.026798284, 0.0050436864, -0.00062705233)
"""erf(x) / x - 1 in x^2 on |x| <= 0.86."""
ERF32_TAIL = (
    -1.1286033, -0.63533974, -0.10591704, 0.023479683, -0.003505828, 0.0002884704, -7.732075e-06
)  # fmt: skip
"""log(1 - erf(x)) / x on [0.84, 4]."""
