# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from rlx.ir.op import registered_ops
from rlx.testing import Case, conformance

_OPS = sorted(name for name in registered_ops() if "." not in name)


@pytest.mark.parametrize("case", conformance("reference"), ids=str)
def test_reference(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)


@pytest.mark.slow
@pytest.mark.parametrize("op", _OPS)
def test_reference_full(op: str, all_conform: Callable[[list[Case]], None]) -> None:
    all_conform([c for c in conformance("reference", selection="full") if c.op == op])
