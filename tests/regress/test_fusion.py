# SPDX-License-Identifier: Apache-2.0
"""What fusion must not change."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ops.movement import flip


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_value_that_is_an_output_keeps_its_order_when_a_reader_flips_it(device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 5])
        y = x * 0.5 + 1.0
        g.output("y", y)
        g.output("flipped", flip(y, 0))
    x0 = np.arange(35, dtype=np.float32).reshape(7, 5)
    found = rlx.compile(g, device).run({"x": x0})
    np.testing.assert_array_equal(found["y"], x0 * 0.5 + 1)
    np.testing.assert_array_equal(found["flipped"], (x0 * 0.5 + 1)[::-1])
