# SPDX-License-Identifier: Apache-2.0
"""Files of named arrays, `.safetensors` and `.npz`: mapped, described without reading data, and never trusted.

Offsets, sizes and shapes are checked before a byte is touched, and nothing is allocated on the word of a header.
Pickled objects are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import SEEK_CUR, SEEK_END, SEEK_SET, BytesIO, RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base.bounded_json import read_json
from rlx.base.dtypes import DType
from rlx.base.errors import ParseError, RlxError, UsageError
from rlx.base.numeric import Array
from rlx.frontends.checked import map_source

__all__ = ["StoredArray", "open_arrays"]

_LONGEST_NPY_HEADER = 1 << 14
_CHUNK = 1 << 20


@dataclass(frozen=True)
class StoredArray:
    """An array of a file.

    Attributes:
        dtype: of its elements.
        shape: its extents.
        load: returns it, as a read-only view of the mapped file where it lies there as it is.
    """

    dtype: DType
    shape: tuple[int, ...]
    load: Callable[[], Array]


def open_arrays(path: Path) -> dict[str, StoredArray]:
    """Return the arrays of a file by name.

    Raises:
        UsageError: the file cannot be read, or its name ends in neither `.safetensors` nor `.npz`.
        ParseError: it is not well formed.
    """
    kinds = {".safetensors": _open_safetensors, ".npz": _open_npz}
    opener = kinds.get(path.suffix.lower())
    if opener is None:
        raise UsageError(f"{str(path)!r}: arrays come from a {' or '.join(kinds)} file")
    data = map_source(path, f"a {path.suffix} file")
    try:
        return opener(data)
    except RlxError as error:
        raise type(error)(f"{str(path)!r}: {error}") from error


# -- safetensors -------------------------------------------------------------------------------------------------------

_SAFETENSORS = {
    "F16": DType.F16,
    "BF16": DType.BF16,
    "F32": DType.F32,
    "F64": DType.F64,
    "I8": DType.I8,
    "I16": DType.I16,
    "I32": DType.I32,
    "I64": DType.I64,
    "U8": DType.U8,
    "U16": DType.U16,
    "U32": DType.U32,
    "U64": DType.U64,
    "BOOL": DType.BOOL,
    "C64": DType.C64,
    "F8_E4M3": DType.F8E4M3,
    "F8_E5M2": DType.F8E5M2,
}


def _open_safetensors(data: memoryview) -> dict[str, StoredArray]:
    """Read the header: 8 bytes of its length, then JSON with dtype, shape and offsets of every array."""
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 0 <= length <= len(data) - 8:
        raise ParseError(
            f"not a safetensors file: its header would be {length} bytes of {len(data)}"
        )
    entries = read_json(data[8 : 8 + length], "the header of the safetensors file")
    body = data[8 + length :]
    return {n: _safetensor(body, n, e) for n, e in entries.items() if n != "__metadata__"}


def _safetensor(body: memoryview, name: str, entry: Any) -> StoredArray:
    what = f"array {name[:200]!r}"
    try:
        kind = _SAFETENSORS.get(entry["dtype"])
        shape: list[Any] = list(entry["shape"])
        begin, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ParseError(f"{what} lacks a dtype, a shape or two offsets: {error!r}") from error
    if kind is None:
        raise ParseError(
            f"{what} has the dtype {str(entry['dtype'])[:40]!r}, which rlx does not have"
        )
    if not all(map(_is_extent, [*shape, begin, end])):
        raise ParseError(f"{what} has a shape or offsets that are no numbers from 0 to 2**63")
    extents = tuple(shape)
    if not begin <= end <= len(body) or end - begin != prod(extents) * kind.itemsize:
        raise ParseError(
            f"{what} is {kind}{list(extents)} at bytes {begin} to {end} of {len(body)}: that is another size, or past "
            "the end"
        )
    return StoredArray(kind, extents, partial(_view, body[begin:end], kind, extents))


def _is_extent(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _view(data: memoryview, kind: DType, shape: tuple[int, ...]) -> Array:
    return np.frombuffer(data, np.uint8).view(kind.numpy).reshape(shape)


# -- npz ---------------------------------------------------------------------------------------------------------------


def _open_npz(data: memoryview) -> dict[str, StoredArray]:
    try:
        archive = zipfile.ZipFile(_Reader(data))
        members = archive.infolist()
        if len({info.header_offset for info in members}) < len(members):
            raise ParseError("not an npz file: two members begin at the same place")
        return {info.filename.removesuffix(".npy"): _npy(data, archive, info) for info in members}
    except (
        zipfile.BadZipFile,
        OSError,
        ValueError,
        EOFError,
        NotImplementedError,
        zlib.error,
    ) as error:
        raise ParseError(f"not an npz file: {error}") from error
    except RuntimeError as error:  # encrypted
        raise ParseError(f"not a readable npz file: {error}") from error


class _Reader(RawIOBase):
    """A file object over mapped bytes (`BytesIO` would copy them)."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        base = {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        chunk = self._data[self._at : self._at + len(target)]
        target[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)


def _npy(data: memoryview, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    """Describe one member; its header is read, its data is not."""
    what = f"array {info.filename[:200]!r}"
    with archive.open(info) as member:
        head = BytesIO(member.read(_LONGEST_NPY_HEADER))
    version = np.lib.format.read_magic(head)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ParseError(f"{what} has version {version} of the npy format")
    shape, fortran, dtype = readers[version](head)
    if dtype.hasobject or dtype.kind not in "biufc":
        raise ParseError(f"{what} has the dtype {dtype}; only plain numbers are read")
    kind, start = DType.of(dtype.newbyteorder("=")), head.tell()
    nbytes = prod(shape) * dtype.itemsize
    if not all(map(_is_extent, shape)) or info.file_size - start != nbytes:
        raise ParseError(
            f"{what} is {dtype}{list(shape)}: {nbytes} bytes, but it has {info.file_size - start}"
        )
    if info.compress_type == zipfile.ZIP_STORED and dtype.isnative and not fortran:
        begin = _member_offset(data, info) + start
        if begin + nbytes > len(data):
            raise ParseError(f"{what} ends past the end of the file")
        return StoredArray(kind, shape, partial(_view, data[begin : begin + nbytes], kind, shape))
    order = "F" if fortran else "C"
    return StoredArray(
        kind, shape, partial(_decompressed, archive, info, start, dtype, shape, order)
    )


def _member_offset(data: memoryview, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a member begin: behind its local header, which has a name and extras of its own."""
    at = info.header_offset
    name, extra = (int.from_bytes(data[at + i : at + i + 2], "little") for i in (26, 28))
    return at + 30 + name + extra


def _decompressed(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    start: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    order: Any,
) -> Array:
    raw = np.empty(prod(shape) * dtype.itemsize, np.uint8)
    try:
        with archive.open(info) as member:
            member.read(start)
            filled = 0
            while (
                chunk := member.read(min(_CHUNK, len(raw) - filled)) if filled < len(raw) else b""
            ):
                raw[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
                filled += len(chunk)
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
        raise ParseError(f"array {info.filename[:200]!r} does not decompress: {error}") from error
    if filled < len(raw):
        raise ParseError(f"array {info.filename[:200]!r} ends after {filled} of {len(raw)} bytes")
    array = raw.view(dtype).reshape(shape, order=order)
    return array.astype(dtype.newbyteorder("="), copy=False)
