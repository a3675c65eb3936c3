# SPDX-License-Identifier: Apache-2.0
"""Finding backends by entry point. Nothing above this file names a backend module."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from rlx.backends.protocol import Backend
from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import DeviceError, UsageError

__all__ = ["backend_names", "get_backend"]

_GROUP = "rlx.backends"
_OWN = {name: f"rlx.backends.{name}:backend" for name in ("cpu", "null", "reference")}
"""The entry points of this package, known without reading the metadata of everything installed (20 ms)."""


@cache
def _entries() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=_GROUP)}


def _entry(name: str) -> metadata.EntryPoint | None:
    if name in _OWN:
        return metadata.EntryPoint(name, _OWN[name], _GROUP)
    return _entries().get(name)


def backend_names() -> list[str]:
    """Return the names of all installed backends."""
    return sorted(_entries())


@cache
def get_backend(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        UsageError: none is installed under that name.
        DeviceError: it failed to load.
    """
    entry = _entry(name)
    if entry is None:
        known = ", ".join(backend_names())
        raise UsageError(
            f"no backend {name!r} is installed; installed are {known}.{did_you_mean(name, _entries())}"
        )
    try:
        return entry.load()
    except ImportError as error:
        raise DeviceError(f"backend {name!r} failed to load: {error}") from error
