# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlx.base.errors import UsageError
from rlx.ir.op import Op
from rlx.testing.tolerances import allowed_error, family_of


@dataclass(frozen=True)
class _Bare(Op):
    name = "bare_for_tests"


@dataclass(frozen=True)
class _Own(_Bare):
    def allowed_error(self, operands: Any, y: Any, dtype: Any) -> Any:
        del operands, dtype
        return np.abs(y) / 4


def test_an_operator_brings_its_own_bound() -> None:
    x = np.array([2, -4, np.inf], np.float32)
    (bound,) = allowed_error(_Own(), [x], [x])
    assert bound.tolist() == [0.5, 1.0, 0.0]


def test_an_operator_without_any_is_named() -> None:
    with pytest.raises(UsageError, match="'bare_for_tests' is: give _Bare a method"):
        family_of(_Bare(), [])
