# SPDX-License-Identifier: Apache-2.0
"""Pages of the operating system: of files that are written to be mapped, and giving memory back."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, BinaryIO

import numpy as np

from rlx.base.numeric import Array

__all__ = ["bring_pages", "give_back", "release_free_memory", "write_parts"]

_MOST_PARTS = 1024
"""Of one call, on Linux."""
_WORTHWHILE = 65_536
"""Bytes from which on it takes less time than it saves."""
_HUGE = 4 << 20
"""Bytes from which on NumPy asks for huge pages, which cost little each."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux, which `mmap` does not name."""


def give_back(array: Array) -> bool:
    """Drop the resident pages of an array that is a view of a read-only mapped file; other arrays stay as they are.

    The data stays readable: the next access takes it from the system's cache of the file, or from the file.

    Returns:
        Whether it is such a view.
    """
    region = _mapping(array)
    if region is None:
        return False
    if not hasattr(mmap, "MADV_DONTNEED"):
        return True
    first = int(np.frombuffer(region, np.uint8).__array_interface__["data"][0])
    start = int(array.__array_interface__["data"][0]) - first
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        region.madvise(mmap.MADV_DONTNEED, begin, end - begin)
    return True


def bring_pages(array: Array) -> None:
    """Let the system back new memory with pages now; what is in it, or is being written to it, stays.

    A first write to each page costs more, and costs it to whoever writes. Small arrays, and those in huge pages, are
    left as they are, and so are all where the system cannot do it (Linux before 5.14, all others).
    """
    if not _WORTHWHILE <= array.nbytes < _HUGE or not array.flags.c_contiguous:
        return
    start = int(array.__array_interface__["data"][0])
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if advise is not None:
        advise(begin, end - begin, _POPULATE_WRITE)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def write_parts(file: BinaryIO, parts: Iterable[bytes | memoryview]) -> None:
    """Write parts one after the other from the file's position on, with as few calls as possible.

    Linux keeps what one call writes in its cache in pages as large as the file system has (2 MB with ext4 and xfs), and
    maps them as such: weights that are mapped from there are read about a tenth faster than from pages of 4 KB, which
    are what a call for each weight leaves behind.

    Args:
        file: opened without a buffer.
        parts: bytes; views are of bytes too.
    """
    pending = [memoryview(p) for p in parts if len(p)]
    while pending:
        some = pending[:_MOST_PARTS]
        gathers = hasattr(os, "writev")
        written = os.writev(file.fileno(), some) if gathers else file.write(some[0])
        done = 0
        while done < len(some) and written >= len(some[done]):
            written -= len(some[done])
            done += 1
        del pending[:done]
        if written:
            pending[0] = pending[0][written:]


def release_free_memory() -> None:
    """Let the C library return memory that it keeps for later allocations, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _mapping(array: Array) -> mmap.mmap | None:
    """Return the read-only mapped file behind an array: dropping pages of anything else would lose data."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, memoryview) or not base.readonly:
        return None
    return base.obj if isinstance(base.obj, mmap.mmap) and array.flags.c_contiguous else None
