# SPDX-License-Identifier: Apache-2.0
"""Objects that must know when this process is a fork of the one they were made in.

A fork copies memory and one thread: locks that other threads held stay locked for ever in the child, and threads that
would have done something are not there.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["Forkable", "watch_forks"]


class Forkable(Protocol):
    """Something with locks or threads."""

    def after_fork_in_child(self) -> None:
        """Make new locks, and forget what other threads were doing."""
        ...


_LIVE: WeakSet[Forkable] = WeakSet()


def watch_forks(thing: Forkable) -> None:
    """Call the thing's `after_fork_in_child` in every child, as long as it lives."""
    _LIVE.add(thing)


def _after_fork_in_child() -> None:
    for thing in list(_LIVE):
        thing.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
