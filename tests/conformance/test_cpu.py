# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from rlx.backends.cpu.isa import host_isa
from rlx.ir.op import registered_ops
from rlx.testing import Case, conformance
from rlx.testing.conformance import Selection

_OPS = sorted(name for name in registered_ops() if "." not in name)
_HOSTS = {"v3": ("v3", "v4"), "v4": ("v4",)}
"""Level -> hosts that can run it."""


def _needs(level: str) -> pytest.MarkDecorator:
    host = host_isa().name
    reason = f"this processor is {host}, level {level} needs {' or '.join(_HOSTS[level])}"
    return pytest.mark.skipif(host not in _HOSTS[level], reason=reason)


def _cases(level: str, selection: Selection = "pairwise") -> list[Case]:
    return conformance("cpu", knobs={"RLX_CPU_ISA": level}, selection=selection)


@_needs("v4")
@pytest.mark.parametrize("case", _cases("v4"), ids=str)
def test_v4(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)


@_needs("v3")
@pytest.mark.parametrize("case", _cases("v3"), ids=str)
def test_v3(case: Case, conforms: Callable[[Case], None]) -> None:
    conforms(case)


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param(n, marks=_needs(n)) for n in _HOSTS])
@pytest.mark.parametrize("op", _OPS)
def test_cpu_full(level: str, op: str, all_conform: Callable[[list[Case]], None]) -> None:
    all_conform([c for c in _cases(level, "full") if c.op == op])
