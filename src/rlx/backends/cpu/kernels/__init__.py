# SPDX-License-Identifier: Apache-2.0
"""Kernel families of the CPU backend: an emitter and its lowering per file.

Importing this package registers every lowering. As with `rlx.ops`, it is imported before its modules.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)

for _file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"{__name__}.{_file.stem}")
