# SPDX-License-Identifier: Apache-2.0
"""Calibrations are written and read back, and other files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.base.errors import UsageError
from rlx.quantization.calibration import Calibration
from rlx.quantization.ranges import Range


def test_what_is_no_calibration_says_why(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    (tmp_path / "empty").write_text("{}")
    for name, why in (
        ("bytes", "it is no text$"),
        ("empty", "it has no 'format'$"),
        ("none", "No such"),
    ):
        with pytest.raises(UsageError, match=why):
            Calibration.load(tmp_path / name)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    made = Calibration({"a": Range(-1.5, 2.0), "b": Range(0.0, 1 / 3)}, {"N": 4})
    made.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "rlx-calibration-1"}',
        '{"format": "rlx-calibration-1", "ranges": {"a": [1]}, "extents": {}}',
        '{"format": "rlx-calibration-1", "ranges": {"a": [1, 2]}, "extents": {}}',
        '{"format": "rlx-calibration-1", "ranges": {"a": [0, "x"]}, "extents": {}}',
        '{"format": "rlx-calibration-1", "ranges": [1], "extents": {}}',
        '{"format": "rlx-calibration-1", "ranges": {"a": [0, 1%s]}, "extents": {}}' % ("0" * 400),
        '{"format": "rlx-calibration-1", "ranges": {}, "extents": {"N": 1.5}}',
        '{"format": "rlx-calibration-1", "ranges": {}, "extents": {"N": -1}}',
        '{"format": "other", "ranges": {}, "extents": {}}',
        "[" * 100_000,
    ],
    ids=range(13),
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError):
        Calibration.load(tmp_path / "c.json")
