# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from rlx.cli.common import show_table


def test_brackets_are_text_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("x [N]", ("a", "n"), [("f32[batch,3] == [bold]", 1234)])
    shown = capsys.readouterr().out
    assert "f32[batch,3] == [bold]" in shown
    assert "x [N]" in shown
    assert "1,234" in shown
