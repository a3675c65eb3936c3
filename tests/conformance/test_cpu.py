# SPDX-License-Identifier: Apache-2.0
"""The CPU backend conforms on both levels of x86-64; one test per operator, which names every case that does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest

from rlx.backends.cpu.isa import host_isa
from rlx.ir.op import registered_ops
from rlx.testing import Case, conformance

_OPS = sorted(name for name in registered_ops() if "." not in name)
_Conform = Callable[[Sequence[Case]], dict[Case, tuple[str, ...]]]
_HOSTED: dict[str, Callable[[Case], bool]] = {
    "cast": lambda case: case.dtype.is_complex,
    "conv": lambda case: case.variant == "symbolic",
    "conv_transpose": lambda case: case.variant == "symbolic",
    "dft": lambda case: case.variant == "symbolic",
    "integer_conv": lambda case: case.variant == "symbolic",
    "quantized_conv": lambda case: case.variant == "symbolic",
    "scatter_elements": lambda case: case.dtype.is_complex,
    "scatter_nd": lambda case: case.dtype.is_complex,
}
"""Operator -> cases that may run on the host; the reasons are in docs/internals/06-cpu-backend.md."""
_HOSTS = {"v3": ("v3", "v4"), "v4": ("v4",)}
"""Level -> hosts that can run it."""


def _needs(level: str) -> pytest.MarkDecorator:
    host = host_isa().name
    reason = f"this processor is {host}, level {level} needs {' or '.join(_HOSTS[level])}"
    return pytest.mark.skipif(host not in _HOSTS[level], reason=reason)


_LEVELS = [pytest.param(name, marks=_needs(name)) for name in _HOSTS]


def _check(level: str, op: str, conform: _Conform, selection: Literal["pairwise", "full"]) -> None:
    cases = conformance("cpu", knobs={"RLX_CPU_ISA": level}, selection=selection)
    hosted = conform([c for c in cases if c.op == op])
    allowed = _HOSTED.get(op, lambda _: False)
    unexpected = [
        f"{case}: {', '.join(what)}" for case, what in hosted.items() if not allowed(case)
    ]
    assert not unexpected, "ran on the host: " + "; ".join(unexpected)
    assert bool(hosted) == (op in _HOSTED), f"{op} runs natively, so it is no longer an exception"


@pytest.mark.parametrize("level", _LEVELS)
@pytest.mark.parametrize("op", _OPS)
def test_cpu(level: str, op: str, conform: _Conform) -> None:
    _check(level, op, conform, "pairwise")


@pytest.mark.slow
@pytest.mark.parametrize("level", _LEVELS)
@pytest.mark.parametrize("op", _OPS)
def test_cpu_full(level: str, op: str, conform: _Conform) -> None:
    _check(level, op, conform, "full")


def test_the_documentation_names_what_runs_on_the_host() -> None:
    page = Path(__file__).parents[2] / "docs/internals/06-cpu-backend.md"
    _, _, section = page.read_text(encoding="utf-8").partition("## What runs on the host")
    rows = re.findall(r"^\| (`.*?`) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(_HOSTED)
