# SPDX-License-Identifier: Apache-2.0
"""Finding backends by entry point. Nothing above this file names a backend module."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from rlx.backends.protocol import Backend

__all__ = ["backend_names", "get_backend"]

_GROUP = "rlx.backends"
_OWN = ("cpu", "null", "reference")
"""The entry points of this package, known without reading the metadata of everything installed (20 ms)."""
_GPUS = ("cuda", "gpu", "metal", "mps", "nvidia", "rocm", "xpu")


@cache
def _entries() -> dict[str, Any]:
    from importlib import metadata

    return {entry.name: entry for entry in metadata.entry_points(group=_GROUP)}


def backend_names() -> list[str]:
    """Return the names of all installed backends."""
    return sorted(
        {*_OWN, *_entries()}
    )  # rlx's own also where it runs from a folder that was not installed


@cache
def get_backend(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        UsageError: none is installed under that name.
        DeviceError: it failed to load.
    """
    try:
        if name in _OWN:
            return import_module(f"rlx.backends.{name}").backend
        entry = _entries().get(name)
        if entry is not None:
            return entry.load()
    except ImportError as error:
        raise DeviceError(f"backend {name!r} failed to load: {error}") from error
    known = ", ".join(backend_names())
    hint = did_you_mean(name.lower(), backend_names())
    if name.lower() in _GPUS:
        hint = " rlx does not run on GPUs yet"
    raise UsageError(f"no backend {name!r} is installed; installed are {known}.{hint}")
