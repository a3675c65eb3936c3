# SPDX-License-Identifier: Apache-2.0
"""The documentation is in step with the code: generated pages are fresh, links lead somewhere."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import rlx.backends.cpu.kernels  # pyright: ignore[reportUnusedImport]
import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]
from rlx.base import errors
from rlx.base.config import KNOBS
from rlx.ir.op import registered_ops

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = sorted([*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")])
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`\n]*`")


def _prose(text: str) -> str:
    return _INLINE.sub("", _FENCE.sub("", text))


def _anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_generated_pages_are_fresh() -> None:
    script = _ROOT / "scripts" / "generate_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", _PAGES, ids=lambda p: str(p.relative_to(_ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken: list[str] = []
    for target in _LINK.findall(_prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        found = file.exists() and (
            not anchor or anchor in _anchors(file.read_text(encoding="utf-8"))
        )
        if not found:
            broken.append(target)
    assert not broken, f"{page.relative_to(_ROOT)} links to what is not there: {broken}"


def test_every_page_can_be_reached_from_the_index() -> None:
    docs = _ROOT / "docs"
    linked = {
        (docs / target.partition("#")[0]).resolve()
        for target in _LINK.findall(_prose((docs / "index.md").read_text(encoding="utf-8")))
    }
    pages = [p for p in docs.glob("**/*.md") if p.name != "index.md"]
    missing = [str(p.relative_to(docs)) for p in pages if p.resolve() not in linked]
    assert not missing, f"docs/index.md does not link to {missing}"


def _reads_wrong(summary: str, operands: Sequence[str]) -> bool:
    """Return whether a sentence that opens with a formula opens with a capital that is not part of it."""
    if re.match(r"[A-Z]\w*( [-+*/<>=@]|\()", summary):
        return True
    return bool(re.match(r"[A-Z]\b(?!\[)", summary)) and summary[0].lower() in operands


def test_formulas_in_the_operator_table_begin_as_they_are_written() -> None:
    for wrong in ("A + b; wraps", "X where x >= 0", "Exp(x)", "Gamma * elu(x)", "A = b"):
        assert _reads_wrong(wrong, ("x", "a", "b"))
    for right in ("A small tensor", "a + b", "X[k] = sum over n of x[n]", "Not x.", "|x|"):
        assert not _reads_wrong(right, ("x",))
    wrong_ones = {
        name: summary
        for name, cls in registered_ops().items()
        if _reads_wrong(
            summary := (inspect.getdoc(cls) or "").partition("\n")[0],
            [operand.rstrip("?*") for operand in cls.operands],
        )
    }
    assert not wrong_ones


def test_every_error_has_a_section() -> None:
    text = (_ROOT / "docs" / "guide" / "errors.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    classes = {
        n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.RlxError)
    }
    assert classes - sections == set()
    assert sections - classes == set()


def test_every_knob_that_prose_names_exists() -> None:
    unknown = {
        f"{page.relative_to(_ROOT)}: {name}"
        for page in _PAGES
        for name in re.findall(r"\bRLX_[A-Z_]+\b", page.read_text(encoding="utf-8"))
        if name not in KNOBS
    }
    assert not unknown


def test_every_test_that_prose_names_exists() -> None:
    missing: list[str] = []
    for page in _PAGES:
        for file, name in re.findall(
            r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")
        ):
            path = _ROOT / file
            if not path.is_file() or f"def {name}" not in path.read_text(encoding="utf-8"):
                missing.append(f"{page.relative_to(_ROOT)}: {file}::{name}")
    assert not missing
