# SPDX-License-Identifier: Apache-2.0
"""Kernel families of the CPU backend: an emitter and its lowering per file.

Importing this package registers every lowering.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

for _file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"{__name__}.{_file.stem}")
