# SPDX-License-Identifier: Apache-2.0
"""`rlx cache`: what the on-disk cache holds, and clearing it."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from rlx.base.store import default_store
from rlx.cli.common import console, show_table

__all__ = ["cache"]


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries.")] = False,
) -> None:
    """Show or clear the on-disk cache of compiled code, programs and packed weights."""
    store = default_store()
    if store is None:
        console.print("the cache is off (RLX_CACHE=off)")
        return
    if clear:
        console.print(f"removed {store.clear()} entries from {store.folder}")
        return
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for entry in store.entries():
        sizes[entry.kind] += entry.nbytes
        counts[entry.kind] += 1
    rows = [(kind, counts[kind], sizes[kind]) for kind in sorted(counts)]
    show_table(f"{store.folder} (limit {store.limit:,} bytes)", ("kind", "entries", "bytes"), rows)
