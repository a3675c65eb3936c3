# SPDX-License-Identifier: Apache-2.0
"""The file in which Linux `perf` looks for the names of code that no file on disk holds.

`perf report` reads `/tmp/perf-PID.map`, a line `address size name` in hexadecimal per function. The
folder is fixed by perf. A library that is closed keeps its lines; where a later one takes its
addresses, the later line counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlx.backends.cpu.elf import elf_symbols

__all__ = ["map_path", "write_perf_map"]


def map_path() -> Path:
    """Return where this process's map is."""
    return Path(f"/tmp/perf-{os.getpid()}.map")  # noqa: S108  (where perf looks)


def write_perf_map(objects: Iterable[bytes], addresses: Mapping[str, int]) -> None:
    """Append every function of linked objects; `addresses` knows at least one symbol of each.

    Functions that a kernel keeps to itself are written as `kernel:function`.
    """
    lines: list[str] = []
    for data in objects:
        functions = [s for s in elf_symbols(data) if s.is_function and s.section]
        for section in dict.fromkeys(s.section for s in functions):
            inside = [s for s in functions if s.section == section]
            known = next((s for s in inside if s.name in addresses), None)
            if known is None:
                continue
            base = addresses[known.name] - known.offset
            for symbol in inside:
                own = symbol.name if symbol.name in addresses else f"{known.name}:{symbol.name}"
                lines.append(f"{base + symbol.offset:x} {symbol.size:x} {own}\n")
    # One write of a file opened for appending: threads that link at once do not mix their lines.
    target = os.open(map_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        os.write(target, "".join(lines).encode())
    finally:
        os.close(target)
