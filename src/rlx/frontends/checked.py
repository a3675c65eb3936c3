# SPDX-License-Identifier: Apache-2.0
"""Bounded access to untrusted model files: map them read-only, and never leave their folder.

Everything here distrusts what a model file says: locations, offsets and lengths are checked before
a byte is touched, and nothing is allocated on the word of a header.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from rlx.base.errors import ModelError, UsageError

__all__ = ["SideFiles", "contained_path", "map_file", "map_source", "window"]

# O_NONBLOCK: opening a FIFO must fail the regular-file test below, not hang waiting for a writer.
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_BINARY", 0)
)


def map_file(path: Path) -> memoryview:
    """Return the bytes of a regular file as a read-only memory map.

    The map lives as long as a view of it does; an empty file gives an empty view. ``path`` must be
    resolved: a symlink is refused, so that a path checked before cannot be swapped for a link in
    between.

    Raises:
        OSError: the file cannot be opened or mapped.
        ModelError: it is not a regular file.
    """
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{str(path)!r} is not a regular file; only regular files are read")
        if status.st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def contained_path(folder: Path, location: str, what: str) -> Path:
    """Return the resolved path of ``location``, which must stay inside ``folder``.

    Args:
        folder: the folder of the model file.
        location: the relative POSIX path that the model file states.
        what: the subject of the error message, such as ``tensor 'w'``.

    Raises:
        ModelError: the location is empty, absolute, has a ``..``, does not exist, or leads out of
            the folder through a symlink.
    """
    shown = location if len(location) <= 200 else f"{location[:200]}..."
    refused = f"{what}: external data location {shown!r} is refused:"
    # Both separators count on every system: a file made for one must not be an escape on the other.
    parts = location.replace("\\", "/").split("/")
    if not location or "\0" in location:
        raise ModelError(f"{refused} it is empty or has a NUL character")
    if parts[0] == "" or parts[0][1:2] == ":":  # a root, a share or a drive letter
        raise ModelError(f"{refused} it is absolute; it must be relative to the model's folder")
    if ".." in parts:
        raise ModelError(f"{refused} it has a '..'; the file must lie inside the model's folder")
    try:
        root = folder.resolve(strict=True)
        path = (root / location).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"{what}: external data file {shown!r} cannot be opened in {str(folder)!r} ({error}); "
            "put it next to the model file"
        ) from error
    if not path.is_relative_to(root):
        raise ModelError(f"{refused} a symlink leads out of the model's folder, to {str(path)!r}")
    return path


def window(view: memoryview, offset: int, length: int, what: str) -> memoryview:
    """Return ``view[offset : offset + length]`` after checking that the whole range exists.

    Raises:
        ModelError: the range is negative or ends past the end of ``view``.
    """
    if offset < 0 or length < 0 or offset + length > len(view):
        raise ModelError(
            f"{what}: bytes {offset} to {offset + length} were asked for, but the file has "
            f"{len(view)}; it is truncated or the offset is wrong"
        )
    return view[offset : offset + length]


@dataclass(slots=True)
class SideFiles:
    """The files that lie beside a model and hold its weights, each mapped once.

    Attributes:
        folder: where locations are resolved; None when the model came from bytes.
    """

    folder: Path | None
    _maps: dict[str, memoryview] = field(default_factory=dict[str, memoryview])

    def opened(self) -> dict[Path, memoryview]:
        """Return the files read so far, by resolved path."""
        return {Path(key[1:]): view for key, view in self._maps.items() if key.startswith("/")}

    def read(self, location: str, what: str) -> memoryview:
        """Return all bytes of the file at ``location``, as a shared map.

        Raises:
            ModelError: there is no folder, or the location is refused (see `contained_path`).
        """
        known = self._maps.get(location)
        if known is not None:
            return known
        if self.folder is None:
            raise ModelError(
                f"{what}: its data is in the external file {location[:200]!r}, but the model was "
                "given as bytes, without a folder; load it by path or pass folder="
            )
        path = contained_path(self.folder, location, what)
        key = f"/{path}"  # no location starts with a slash; two spellings of one path share a map
        view = self._maps.get(key)
        if view is None:
            try:
                view = map_file(path)
            except OSError as error:
                raise ModelError(
                    f"{what}: cannot map external file {location[:200]!r}: {error}"
                ) from error
            self._maps[key] = view
        self._maps[location] = view
        return view


def map_source(path: Path, kind: str) -> memoryview:
    """Return the bytes of a file that the caller named; symlinks are followed here.

    Args:
        path: the file.
        kind: what it should be, for messages: ``an ONNX model``.

    Raises:
        UsageError: it does not exist, is no regular file or cannot be read.
    """
    try:
        return map_file(path.resolve(strict=True))
    except (OSError, RuntimeError, ValueError, ModelError) as error:
        raise UsageError(f"cannot open {str(path)!r} as {kind}: {error}") from error
