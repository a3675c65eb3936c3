# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlx.base import config
from rlx.base.errors import UsageError


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (config.CACHE, "content", "content"),
        (config.CACHE_LIMIT, "0", 0),
        (config.THREADS, "3", 3),
        (config.VERIFY, "On", True),
        (config.VERIFY, "", False),
        (config.DUMP, "/any/where", "/any/where"),
    ],
)
def test_what_knobs_take(
    knob: config.Knob[int], text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knob.name, text)
    assert knob.get() == value


@pytest.mark.parametrize(
    ("knob", "text", "takes"),
    [
        (config.CACHE, "maybe", "one of on, off, content"),
        (config.CACHE, "", "one of on, off, content"),
        (config.CACHE_LIMIT, "1 GB", "a whole number from 0 on"),
        (config.THREADS, "-1", "a whole number from 0 on"),
        (config.VERIFY, "maybe", "0 or 1"),
    ],
)
def test_what_knobs_do_not_take(
    knob: config.Knob[int], text: str, takes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knob.name, text)
    with pytest.raises(UsageError, match=f"{knob.name}='{text}' is not {takes}: "):
        knob.get()


def test_an_unknown_knob_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import rlx.base.config"],
        env={**os.environ, "RLX_THREAD": "2", "RLX_VERIFY": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines() == [
        "environment variable RLX_THREAD is unknown to rlx. Did you mean 'RLX_THREADS'?"
    ]
