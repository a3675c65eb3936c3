# SPDX-License-Identifier: Apache-2.0
"""Where a node came from, and closest-name hints for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["UNKNOWN", "Location", "did_you_mean"]


@dataclass(frozen=True, slots=True)
class Location:
    """The origin of a node: its name in the source model, and the file or Python line it stands in.

    Attributes:
        name: of the node in the source model.
        source: file or Python line.
        parts: names (or else sources) of further nodes whose work it does.
    """

    name: str = ""
    source: str = ""
    parts: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What to call all nodes whose work is done here: their names, or else their sources."""
        own = self.name or self.source
        return (own, *self.parts) if own else self.parts

    def joined(self, *others: Location) -> Location:
        """Return this location for a node that also does the work of nodes at others."""
        names = dict.fromkeys((*self.parts, *(n for o in others for n in o.names)))
        names.pop(self.name or self.source, None)
        return Location(self.name, self.source, tuple(names))

    def __str__(self) -> str:
        if self.name and self.source:
            return f"{self.name!r} ({self.source})"
        return repr(self.name) if self.name else self.source or "<unknown>"


UNKNOWN = Location()


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest known name, or an empty string (also where the name is no text)."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
