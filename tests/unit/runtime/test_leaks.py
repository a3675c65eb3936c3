# SPDX-License-Identifier: Apache-2.0
"""A short form of `benchmarks/leaks.py`, and that it would find a leak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[3] / "benchmarks" / "leaks.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments", [("--cycles=100", "--shapes=0"), ("--cycles=0", "--shapes=1500")], ids=str
)
def test_memory_does_not_grow(arguments: tuple[str, str]) -> None:
    done = _run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_leak_of_a_few_kilobytes_per_round_is_found() -> None:
    done = _run("--cycles=0", "--shapes=1500", "--leak=16384")
    assert done.returncode == 1, done.stdout + done.stderr
