# SPDX-License-Identifier: Apache-2.0
"""The Python in the guide and the how-tos runs, block after block in one namespace per page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = [p for folder in ("guide", "how") for p in sorted((_ROOT / "docs" / folder).glob("*.md"))]


def _program(page: Path) -> str:
    """Return the blocks as one program whose line numbers are those of the page."""
    text = page.read_text(encoding="utf-8")
    lines: list[str] = []
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        lines += [""] * (first - len(lines))
        lines += block.group(1).splitlines()
    return "\n".join(lines)


def test_there_are_examples() -> None:
    assert sum(bool(_program(p).strip()) for p in _PAGES) > 5


@pytest.mark.parametrize("page", _PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    program = _program(page)
    if not program.strip():
        return
    file = tmp_path / f"{page.stem.replace('-', '_')}_example.py"
    file.write_text(program, encoding="utf-8")
    # A process of its own: pages may register operators and backends.
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        cwd=tmp_path,
        env={
            **os.environ,
            "RLX_CACHE_DIR": str(tmp_path / "cache"),
            "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, f"{page.relative_to(_ROOT)}:\n{done.stderr[-2000:]}"
