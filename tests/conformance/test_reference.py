# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from rlx.testing import Case, conformance


@pytest.mark.parametrize("case", conformance("reference"), ids=str)
def test_reference(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", conformance("reference", selection="full"), ids=str)
def test_reference_full(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)
