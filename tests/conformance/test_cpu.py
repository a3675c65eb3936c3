# SPDX-License-Identifier: Apache-2.0
"""The CPU backend conforms on both levels of x86-64; one test per operator, which names every case that does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rlx.backends.cpu.isa import host_isa
from rlx.ir.op import registered_ops
from rlx.testing import Case, conformance

_OPS = sorted(name for name in registered_ops() if "." not in name)
_HOSTS = {"v3": ("v3", "v4"), "v4": ("v4",)}
"""Level -> hosts that can run it."""


def _needs(level: str) -> pytest.MarkDecorator:
    host = host_isa().name
    reason = f"this processor is {host}, level {level} needs {' or '.join(_HOSTS[level])}"
    return pytest.mark.skipif(host not in _HOSTS[level], reason=reason)


_LEVELS = [pytest.param(name, marks=_needs(name)) for name in _HOSTS]


@pytest.mark.parametrize("level", _LEVELS)
@pytest.mark.parametrize("op", _OPS)
def test_cpu(level: str, op: str, conform: Callable[[Sequence[Case]], None]) -> None:
    conform([c for c in conformance("cpu", knobs={"RLX_CPU_ISA": level}) if c.op == op])


@pytest.mark.slow
@pytest.mark.parametrize("level", _LEVELS)
@pytest.mark.parametrize("op", _OPS)
def test_cpu_full(level: str, op: str, conform: Callable[[Sequence[Case]], None]) -> None:
    cases = conformance("cpu", knobs={"RLX_CPU_ISA": level}, selection="full")
    conform([c for c in cases if c.op == op])
