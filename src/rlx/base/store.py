# SPDX-License-Identifier: Apache-2.0
"""A content-addressed store on disk: safe across processes, verified on every read, bounded in size.

An entry is one file: a header (magic, key, length and sha256 of the payload) and the payload. It is written to a
temporary file and renamed, so readers see all of it or nothing. The folder belongs to the user with mode 0700; if it
does not, it is not used and a warning says so once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

from rlx.base import config

__all__ = ["Entry", "Store", "default_store"]

_LOG = getLogger("rlx")
_MAGIC = b"rlxstore1\0"
_HEADER = len(_MAGIC) + 32 + 8 + 32
_ALIGNED = 128  # payloads start at a multiple of this, so mapped arrays are aligned


@dataclass(frozen=True)
class Entry:
    """One entry on disk, for listings."""

    kind: str
    key: str
    nbytes: int
    used: float
    """Seconds since the epoch of the last use."""


class Store:
    """Entries of several kinds (objects, programs, weights) under one folder and one size limit.

    Args:
        folder: created with mode 0700 on first write.
        limit: bytes above which the least recently used entries are removed.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._usable: bool | None = None
        self._written = 0

    def get(self, kind: str, key: str) -> memoryview | None:
        """Return an entry's payload, mapped read-only, or None. A damaged entry is removed and counts as missing."""
        path = self._path(kind, key)
        if not self._is_usable():
            return None
        try:
            with path.open("rb") as file:
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            os.utime(path)
        except (OSError, ValueError):
            return None
        payload = _verified(mapped, kind, key)
        if payload is None:
            _LOG.warning("removed a damaged cache entry: %s", path)
            path.unlink(missing_ok=True)
        return payload

    def put(self, kind: str, key: str, payload: bytes | bytearray | memoryview) -> None:
        """Write an entry; failing to (full disk, no permission) only costs the next process time."""
        if not self._is_usable(create=True):
            return
        path = self._path(kind, key)
        header = (
            _MAGIC
            + _key_hash(kind, key)
            + len(payload).to_bytes(8, "little")
            + hashlib.sha256(payload).digest()
        )
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(header.ljust(_ALIGNED, b"\0"))
                    file.write(payload)
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _LOG.warning("could not write cache entry %s: %s", path, error)
            return
        self._written += len(payload)
        if self._written > self.limit // 16:
            self.trim()

    def entries(self) -> list[Entry]:
        """Return all entries, most recently used first."""
        found: list[Entry] = []
        if self._is_usable():
            for path in self.folder.glob("*/*/*"):
                try:
                    stat = path.stat()
                except OSError:
                    continue
                if not path.name.startswith(".tmp"):
                    kind = path.parent.parent.name
                    found.append(
                        Entry(kind, path.parent.name + path.name, stat.st_size, stat.st_mtime)
                    )
        return sorted(found, key=lambda e: -e.used)

    def trim(self, limit: int | None = None) -> int:
        """Remove the least recently used entries above the limit; return how many were removed."""
        room = self.limit if limit is None else limit
        removed = 0
        for entry in self.entries():
            room -= entry.nbytes
            if room < 0:
                self._path(entry.kind, entry.key).unlink(missing_ok=True)
                removed += 1
        self._written = 0
        return removed

    def clear(self) -> int:
        """Remove all entries; return how many."""
        return self.trim(limit=0)

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / key[2:]

    def _is_usable(self, *, create: bool = False) -> bool:
        if self._usable is None or (create and not self.folder.exists()):
            if create:
                try:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                except OSError as error:
                    _LOG.warning(
                        "the cache folder %s cannot be made (%s); nothing is cached",
                        self.folder,
                        error,
                    )
                    self._usable = False
                    return False
            if not self.folder.exists():
                return False
            self._usable = self._is_private()
        return self._usable

    def _is_private(self) -> bool:
        stat = self.folder.stat()
        if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
            _LOG.warning(
                "the cache folder %s is not used: it must belong to you and nobody else may write to it",
                self.folder,
            )
            return False
        return True


def _key_hash(kind: str, key: str) -> bytes:
    return hashlib.sha256(f"{kind}:{key}".encode()).digest()


def _verified(mapped: memoryview, kind: str, key: str) -> memoryview | None:
    """Return the payload if the header and the checksum fit, else None."""
    if len(mapped) < _ALIGNED or bytes(mapped[: len(_MAGIC)]) != _MAGIC:
        return None
    fields = bytes(mapped[len(_MAGIC) : _HEADER])
    length = int.from_bytes(fields[32:40], "little")
    payload = mapped[_ALIGNED:]
    if fields[:32] != _key_hash(kind, key) or len(payload) != length:
        return None
    return payload if hashlib.sha256(payload).digest() == fields[40:72] else None


_STORES: dict[tuple[Path, int], Store] = {}


def default_store() -> Store | None:
    """Return the store the knobs describe, or None where `RLX_CACHE=off`."""
    if config.CACHE.get() == "off":
        return None
    place = (config.cache_dir() / "store", config.CACHE_LIMIT.get())
    if place not in _STORES:
        _STORES[place] = Store(*place)
    return _STORES[place]
