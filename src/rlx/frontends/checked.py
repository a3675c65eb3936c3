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

__all__ = ["Home", "SideFiles", "map_file", "map_source", "window"]

# O_NONBLOCK: opening a FIFO must fail the regular-file test below, not hang waiting for a writer.
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_BINARY", 0)
)


def map_file(path: Path) -> memoryview:
    """Return the bytes of a regular file as a read-only memory map; see `_map`."""
    return _map(path)[0]


def _map(path: Path) -> tuple[memoryview, tuple[int, ...]]:
    """Return the bytes of a regular file as a read-only memory map, and the stamp of the file.

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
            return memoryview(b""), _stamp(status)
        mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        return memoryview(mapped), _stamp(status)
    finally:
        os.close(descriptor)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_size, *times)


@dataclass(frozen=True)
class Home:
    """Where the files beside a model may lie.

    Attributes:
        folder: in which locations are looked up.
        linked: real folders outside, whose files a symlink in `folder` may stand for.
    """

    folder: Path
    linked: frozenset[Path] = frozenset()

    @classmethod
    def of_model(cls, path: Path) -> Home:
        """Return the folder of a model file; if the file is a link, links beside it may lead to where it leads."""
        return cls(path.parent, _hub_blobs(path.parent) | {path.resolve().parent})

    @classmethod
    def given(cls, folder: str | os.PathLike[str]) -> Home:
        """Return the folder that a caller named.

        Raises:
            UsageError: it is not there, or not a folder.
        """
        if not isinstance(folder, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"folder is a path, not a {type(folder).__name__}")
        folder = Path(folder)
        if not folder.is_dir():
            raise UsageError(
                f"folder={str(folder)!r} is no folder; external data is looked up in one"
            )
        return cls(folder, _hub_blobs(folder))

    def find(self, location: str, what: str) -> Path:
        """Return the resolved path of a location that a model file states.

        Args:
            location: a relative POSIX path.
            what: the subject of the error message, such as ``tensor 'w'``.

        Raises:
            ModelError: the location is empty, absolute, has a ``..``, does not exist, or leads
                elsewhere through a symlink.
        """
        shown = location if len(location) <= 200 else f"{location[:200]}..."
        refused = f"{what}: external data location {shown!r} is refused:"
        # Both separators count on every system: a file made for one must not be an escape on the
        # other.
        parts = location.replace("\\", "/").split("/")
        if not location or "\0" in location:
            raise ModelError(f"{refused} it is empty or has a NUL character")
        if parts[0] == "" or parts[0][1:2] == ":":  # a root, a share or a drive letter
            raise ModelError(f"{refused} it is absolute; it must be relative to the model's folder")
        if ".." in parts:
            raise ModelError(
                f"{refused} it has a '..'; the file must lie inside the model's folder"
            )
        try:
            root = self.folder.resolve(strict=True)
            path = (root / location).resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"{what}: external data file {shown!r} cannot be opened in {str(self.folder)!r} ({error}); "
                "put it there, or pass folder= to say where it is"
            ) from error
        if not path.is_relative_to(root) and path.parent not in self.linked:
            raise ModelError(
                f"{refused} a symlink leads out of the model's folder, to {str(path)!r}"
            )
        return path


def _hub_blobs(folder: Path) -> frozenset[Path]:
    """Return the ``blobs`` folder of the repository in a Hugging Face cache that a folder is a snapshot of, if it is.

    There, ``models--ORG--NAME/snapshots/REVISION/...`` holds links to ``models--ORG--NAME/blobs/HASH``.
    """
    real = folder.resolve()
    for revision in (real, *real.parents):
        repository = revision.parent.parent
        if revision.parent.name == "snapshots" and repository.name.startswith("models--"):
            return frozenset({repository / "blobs"})
    return frozenset()


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
        home: where locations are resolved; None when the model came from bytes.
    """

    home: Home | None
    _maps: dict[Path, tuple[str, memoryview]] = field(
        default_factory=dict[Path, tuple[str, memoryview]]
    )
    _stamps: dict[Path, tuple[int, ...]] = field(default_factory=dict[Path, tuple[int, ...]])
    _found: dict[str, memoryview] = field(default_factory=dict[str, memoryview])

    def opened(self) -> dict[str, memoryview]:
        """Return the files read so far, each under one of its locations."""
        return dict(self._maps.values())

    def changed(self) -> bool:
        """Return whether one of the files is not the one that was mapped any more."""
        try:
            return any(_stamp(path.stat()) != stamp for path, stamp in self._stamps.items())
        except OSError:
            return True

    def read(self, location: str, what: str) -> memoryview:
        """Return all bytes of the file at ``location``, as a shared map.

        Raises:
            ModelError: there is no folder, or the location is refused (see `Home.find`).
        """
        known = self._found.get(location)
        if known is not None:
            return known
        if self.home is None:
            raise ModelError(
                f"{what}: its data is in the external file {location[:200]!r}, but the model was "
                "not given by path; pass folder= to say where its files are"
            )
        path = self.home.find(location, what)
        if path not in self._maps:  # two spellings of one path share a map
            try:
                view, self._stamps[path] = _map(path)
                self._maps[path] = location, view
            except OSError as error:
                raise ModelError(
                    f"{what}: cannot map external file {location[:200]!r}: {error}"
                ) from error
        view = self._found[location] = self._maps[path][1]
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
