# SPDX-License-Identifier: Apache-2.0
"""Runs cases, and says which ones ran operators on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rlx.base.errors import RlxError
from rlx.testing import Case
from rlx.testing.conformance import Outcome


def _outcome(case: Case) -> Outcome:
    try:
        return case.run()
    except (RlxError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Outcome([f"raised {error!r}"])


@pytest.fixture
def conform() -> Callable[[Sequence[Case]], dict[Case, tuple[str, ...]]]:
    """Run cases and fail with the problems of all; return what ran on the host, by case."""

    def check(cases: Sequence[Case]) -> dict[Case, tuple[str, ...]]:
        outcomes = {case: _outcome(case) for case in cases}
        problems = [f"{case}: {p}" for case, outcome in outcomes.items() for p in outcome.problems]
        assert not problems, "\n".join(
            [f"{len(problems)} problems in {len(cases)} cases", *problems]
        )
        return {case: outcome.hosted for case, outcome in outcomes.items() if outcome.hosted}

    return check
