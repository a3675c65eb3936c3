# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from rlx.base.dims import symbol
from rlx.base.errors import UndecidedError
from rlx.base.facts import Facts

_N, _M, _K = symbol("N"), symbol("M"), symbol("K")


def test_a_question_asked_again_is_one_guard() -> None:
    facts = Facts(hints={"N": 4, "M": 9})
    for reason in ("first", "second"):
        assert not facts.assume_equal(_N, _M, reason)
        assert not facts.assume_equal(_M, _N, reason)
        assert facts.assume_less_equal(_N, _M, reason)
        assert not facts.assume_less_equal(_M, _N + 1, reason)
    assert [str(g) for g in facts.guards] == ["N != M (first)", "N <= M (first)", "M > N+1 (first)"]


def test_a_question_is_the_same_under_an_equality_learned_in_between() -> None:
    facts = Facts(hints={"N": 4, "M": 4, "K": 9})
    assert not facts.assume_equal(_M, _K, "add")
    assert facts.assume_equal(_N, _M, "add")
    assert not facts.assume_equal(_N, _K, "add")
    assert not facts.assume_equal(_M, _K, "add")
    assert [str(g) for g in facts.guards] == ["M != K (add)", "N == M (add)"]


def test_what_was_assumed_answers_without_a_hint() -> None:
    facts = Facts(hints={"N": 4, "M": 9})
    facts.assume_equal(_N, _M, "add")
    facts.hints.clear()
    assert not facts.assume_equal(_N, _M, "mul")
    with pytest.raises(UndecidedError, match=r"mul: .*dims=\{'K'"):
        facts.assume_equal(_K, _M, "mul")


def test_the_advice_is_the_callers() -> None:
    facts = Facts(advice="ask {symbol}")
    with pytest.raises(UndecidedError, match=r"before the first call; ask N$"):
        facts.assume_equal(_N, _M, "add")
