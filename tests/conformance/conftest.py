# SPDX-License-Identifier: Apache-2.0
"""Counts the operators that ran on the host, so that a missing kernel is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from rlx.testing import Case

_HOSTED: Counter[str] = Counter()


def _problems(case: Case) -> list[str]:
    outcome = case.run()
    _HOSTED.update(f"{case.backend} {name}" for name in outcome.hosted)
    return outcome.problems


@pytest.fixture
def conforms() -> Callable[[Case], None]:
    """Run a case and fail with its problems."""

    def check(case: Case) -> None:
        problems = _problems(case)
        assert not problems, "; ".join(problems)

    return check


@pytest.fixture
def all_conform() -> Callable[[Sequence[Case]], None]:
    """Run many cases and fail with the problems of all."""

    def check(cases: Sequence[Case]) -> None:
        problems = [f"{case}: {problem}" for case in cases for problem in _problems(case)]
        assert not problems, "\n".join(problems)

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _HOSTED:
        terminalreporter.section("operators without a kernel, by the cases that met them")
        for name, count in _HOSTED.most_common():
            terminalreporter.write_line(f"{count:6d} {name}")
