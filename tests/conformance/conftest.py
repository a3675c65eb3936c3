# SPDX-License-Identifier: Apache-2.0
"""Counts the operators that ran on the host, so that a missing kernel is seen."""

from __future__ import annotations

from collections import Counter

import pytest

from rlx.testing import Case

_HOSTED: Counter[str] = Counter()


@pytest.fixture
def conforms() -> object:
    """Run a case and fail with its problems."""

    def check(case: Case) -> None:
        outcome = case.run()
        _HOSTED.update(f"{case.backend} {name}" for name in outcome.hosted)
        assert not outcome.problems, "; ".join(outcome.problems)

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _HOSTED:
        terminalreporter.section("operators without a kernel, by cases that met them")
        for name, count in _HOSTED.most_common():
            terminalreporter.write_line(f"{count:6d} {name}")
