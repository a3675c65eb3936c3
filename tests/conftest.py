# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: the cache on disk is not the user's, and Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest

from rlx.base.config import CACHE_DIR, cache_dir


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Hear Ctrl-C also where shells start commands in the background, which ignore it, and so would their children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Keep what tests compile in a folder of the session; a folder that the environment names is kept.

    Real models that were downloaded before are found where they are.
    """
    if os.environ.get(CACHE_DIR.name):
        yield
        return
    folder, models = tmp_path_factory.mktemp("cache"), cache_dir() / "zoo"
    if models.is_dir():
        (folder / "zoo").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_DIR.name, str(folder))
        yield
