# SPDX-License-Identifier: Apache-2.0
"""Runs cases, and counts the operators that ran on the host, so that a missing kernel is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from rlx.base.errors import RlxError
from rlx.testing import Case

_HOSTED: Counter[str] = Counter()


def _problems(case: Case) -> list[str]:
    try:
        outcome = case.run()
    except (RlxError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return [f"raised {error!r}"]
    _HOSTED.update(f"{case.backend} {name}" for name in outcome.hosted)
    return outcome.problems


@pytest.fixture
def conform() -> Callable[[Sequence[Case]], None]:
    """Run cases and fail with the problems of all."""

    def check(cases: Sequence[Case]) -> None:
        problems = [f"{case}: {problem}" for case in cases for problem in _problems(case)]
        assert not problems, "\n".join(
            [f"{len(problems)} problems in {len(cases)} cases", *problems]
        )

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _HOSTED:
        terminalreporter.section("operators without a kernel, by the cases that met them")
        for name, count in _HOSTED.most_common():
            terminalreporter.write_line(f"{count:6d} {name}")
