# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from rlx.backends.cpu.isa import host_isa
from rlx.testing import Case, conformance

_LEVELS = {"v3": ("v3", "v4"), "v4": ("v4",)}
"""Level -> hosts that can run it."""


def _needs(level: str) -> pytest.MarkDecorator:
    host = host_isa().name
    return pytest.mark.skipif(
        host not in _LEVELS[level], reason=f"this processor is {host}, level {level} needs more"
    )


def _cases(level: str, selection: str) -> list[Case]:
    chosen = "full" if selection == "full" else "pairwise"
    return conformance("cpu", knobs={"RLX_CPU_ISA": level}, selection=chosen)


@_needs("v4")
@pytest.mark.parametrize("case", _cases("v4", "pairwise"), ids=str)
def test_v4(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)


@_needs("v3")
@pytest.mark.parametrize("case", _cases("v3", "pairwise"), ids=str)
def test_v3(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)


@_needs("v4")
@pytest.mark.slow
@pytest.mark.parametrize("case", _cases("v4", "full"), ids=str)
def test_v4_full(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)


@_needs("v3")
@pytest.mark.slow
@pytest.mark.parametrize("case", _cases("v3", "full"), ids=str)
def test_v3_full(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)
