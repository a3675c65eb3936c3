# SPDX-License-Identifier: Apache-2.0
"""Where a node came from, and closest-name hints for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["UNKNOWN", "Location", "did_you_mean"]


@dataclass(frozen=True, slots=True)
class Location:
    """The origin of a node: its name in the source model, and the file or Python line it stands in."""

    name: str = ""
    source: str = ""

    def __str__(self) -> str:
        if self.name and self.source:
            return f"{self.name!r} ({self.source})"
        return repr(self.name) if self.name else self.source or "<unknown>"


UNKNOWN = Location()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
