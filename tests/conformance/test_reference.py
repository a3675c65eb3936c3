# SPDX-License-Identifier: Apache-2.0
"""The reference backend conforms; one test per operator, which names every case that does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rlx.ir.op import registered_ops
from rlx.testing import Case, conformance

_OPS = sorted(name for name in registered_ops() if "." not in name)


@pytest.mark.parametrize("op", _OPS)
def test_reference(op: str, conform: Callable[[Sequence[Case]], object]) -> None:
    conform([c for c in conformance("reference") if c.op == op])


@pytest.mark.slow
@pytest.mark.parametrize("op", _OPS)
def test_reference_full(op: str, conform: Callable[[Sequence[Case]], object]) -> None:
    conform([c for c in conformance("reference", selection="full") if c.op == op])
