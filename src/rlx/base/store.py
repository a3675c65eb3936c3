# SPDX-License-Identifier: Apache-2.0
"""A store on disk: safe across processes, verified on every read, bounded in size.

An entry is one file: a header (magic, kind of checksum, hash of kind and key, length and checksum of the payload) and
the payload. It is written to a temporary file and renamed, so readers see all of it or nothing. The folder belongs to
the user with mode 0700; if it does not, it is not used and a warning says so once.

The version of that form is part of the path, so another version's entries are never read. They count towards the limit
like all others and are removed when nobody used them for long, or by `clear`.

Two checksums: sha256, and for large payloads sums of 64-bit words per block, which run at the speed of memory. Sums
find what disks and crashes do (a cut file, blocks of zeros, flipped bits), not what an attacker does; whoever can write
to the folder could as well write a new sha256.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from rlx.base import config
from rlx.base.pages import write_parts

__all__ = ["ALIGNMENT", "OUTDATED", "Entry", "Store", "default_store", "digest"]

_LOG = getLogger("rlx")
_FORMAT = 3
_MAGIC = f"rlxstore{_FORMAT}".encode()
_SHA256, _SUMS = b"h", b"s"
_HEADER = len(_MAGIC) + 1 + 32 + 8 + 32
_ALIGNED = 128  # payloads start at a multiple of this, so mapped arrays are aligned
ALIGNMENT = 64
"""Offset of every part of a payload is a multiple of this."""
_BLOCK = 1 << 15
_ABANDONED = 3600.0
"""Seconds after which a temporary file belongs to no living writer."""
OUTDATED = "outdated"
"""The kind under which entries of other formats are listed."""

_Bytes: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Entry:
    """One entry on disk, for listings.

    Attributes:
        kind: as it was put, or `OUTDATED`.
        key: as it was put.
        nbytes: of the whole file.
        used: seconds since the epoch of the last use.
        path: of the file.
    """

    kind: str
    key: str
    nbytes: int
    used: float
    path: Path


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
        except (OSError, ValueError):
            return None
        payload = _verified(mapped, kind, key)
        try:
            if payload is None:
                _LOG.warning("removed a damaged cache entry: %s", path)
                path.unlink(missing_ok=True)
            else:
                os.utime(path)
        except (
            OSError
        ):  # a folder that may only be read: damaged entries stay, and the order of use is not kept
            pass
        return payload

    def put(
        self, kind: str, key: str, payload: _Bytes | Sequence[_Bytes], *, quick: bool = False
    ) -> bool:
        """Write an entry; failing to (full disk, no permission) only costs the next process time.

        Args:
            kind: one of a few words, such as `object`.
            key: hexadecimal.
            payload: bytes, or parts which are written one after the other, each at a multiple of `ALIGNMENT`.
            quick: check by sums instead of sha256, for payloads of many megabytes.

        Returns:
            Whether the entry was written. One that alone would take half of the limit is not.
        """
        parts = [_flat(p) for p in ([payload] if _is_bytes(payload) else payload)]
        nbytes = sum(-(-len(p) // ALIGNMENT) * ALIGNMENT for p in parts)
        if nbytes > self.limit // 2 or not self._is_usable(create=True):
            return False
        import tempfile  # with what it imports, a tenth of opening a package

        path = self._path(kind, key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp")
            try:
                with os.fdopen(handle, "w+b", buffering=0) as file:
                    _write(file, parts, _SUMS if quick else _SHA256, _key_hash(kind, key))
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _LOG.warning("could not write cache entry %s: %s", path, error)
            return False
        self._written += nbytes
        if self._written > self.limit // 16:
            self.trim()
        return True

    def remove(self, kind: str, key: str) -> None:
        """Remove an entry if it is there and may be removed."""
        self._unlink(self._path(kind, key))

    def entries(self) -> list[Entry]:
        """Return all entries, most recently used first."""
        found: list[Entry] = []
        for folder, _, names in os.walk(self.folder) if self._is_usable() else ():
            for name in names:
                path = Path(folder, name)
                try:
                    status = path.stat()
                except OSError:
                    continue
                if name.startswith(".tmp"):
                    self._sweep(path, status.st_mtime)
                else:
                    kind, key = self._identify(path)
                    found.append(Entry(kind, key, status.st_size, status.st_mtime, path))
        return sorted(found, key=lambda e: -e.used)

    def trim(self, limit: int | None = None) -> int:
        """Remove the least recently used entries above the limit; return how many were removed."""
        room = self.limit if limit is None else limit
        removed = 0
        for entry in self.entries():
            room -= entry.nbytes
            if room < 0:
                self._unlink(entry.path)
                removed += 1
        self._written = 0
        return removed

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
            if not path.is_relative_to(
                self._root
            ):  # nobody will fill the folders of another format again
                for folder in path.relative_to(self.folder).parents[:-1]:
                    (self.folder / folder).rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                _LOG.warning("could not remove a cache entry: %s", error)

    @staticmethod
    def _sweep(path: Path, written: float) -> None:
        """Remove what a writer that died left behind."""
        if time.time() - written > _ABANDONED:
            path.unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove all entries; return how many."""
        return self.trim(limit=0)

    @property
    def _root(self) -> Path:
        return self.folder / f"v{_FORMAT}"

    def _path(self, kind: str, key: str) -> Path:
        return self._root / kind / key[:2] / key[2:]

    def _identify(self, path: Path) -> tuple[str, str]:
        """Return kind and key of an entry's file."""
        parts = path.relative_to(self.folder).parts
        if len(parts) == 4 and parts[0] == self._root.name:
            return parts[1], parts[2] + parts[3]
        return OUTDATED, "/".join(parts)

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


def _is_bytes(payload: object) -> bool:
    return isinstance(payload, (bytes, bytearray, memoryview, np.ndarray))


def _flat(part: Any) -> memoryview:
    """Return the bytes of a part; NumPy's own views also take dtypes that the buffer protocol does not know."""
    if isinstance(part, np.ndarray):
        array: Any = np.ascontiguousarray(cast("np.ndarray[Any, Any]", part))
        return memoryview(array.reshape(-1).view(np.uint8))
    return memoryview(part).cast("B") if len(part) else memoryview(b"")


def _write(file: Any, parts: Sequence[memoryview], check: bytes, key: bytes) -> None:
    """Write header and parts; the checksum is taken from the file's pages, as readers will."""
    padded = [piece for p in parts for piece in (p, bytes(-len(p) % ALIGNMENT))]
    write_parts(file, [bytes(_ALIGNED), *padded[:-1]])
    length = file.tell() - _ALIGNED
    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    checksum = _digest(mapped[_ALIGNED:], check)
    file.seek(0)
    file.write(_MAGIC + check + key + length.to_bytes(8, "little") + checksum)


def digest(payload: memoryview, *, quick: bool) -> bytes:
    """Return the checksum of some bytes: sha256, or `quick` sums that find damage but no forgery."""
    return _digest(payload, _SUMS if quick else _SHA256)


def _digest(payload: memoryview, check: bytes) -> bytes:
    if check == _SHA256:
        return hashlib.sha256(payload).digest()
    whole = len(payload) // _BLOCK * _BLOCK
    blocks = np.frombuffer(payload[:whole], np.uint64).reshape(-1, _BLOCK // 8)
    sums = blocks.sum(1, dtype=np.uint64)
    return hashlib.sha256(sums.tobytes() + payload[whole:]).digest()


def _verified(mapped: memoryview, kind: str, key: str) -> memoryview | None:
    """Return the payload if the header and the checksum fit, else None."""
    start = len(_MAGIC) + 1
    if len(mapped) < _ALIGNED or bytes(mapped[: len(_MAGIC)]) != _MAGIC:
        return None
    fields, check = bytes(mapped[start:_HEADER]), bytes(mapped[len(_MAGIC) : start])
    length = int.from_bytes(fields[32:40], "little")
    payload = mapped[_ALIGNED:]
    if (
        check not in (_SHA256, _SUMS)
        or fields[:32] != _key_hash(kind, key)
        or len(payload) != length
    ):
        return None
    return payload if _digest(payload, check) == fields[40:72] else None


_STORES: dict[tuple[Path, int], Store] = {}


def default_store() -> Store | None:
    """Return the store the knobs describe, or None where `RLX_CACHE=off`."""
    if config.CACHE.get() == "off":
        return None
    place = (config.cache_dir() / "store", config.CACHE_LIMIT.get())
    if place not in _STORES:
        _STORES[place] = Store(*place)
    return _STORES[place]
