# SPDX-License-Identifier: Apache-2.0
"""Giving memory back to the operating system: pages of mapped files, and what the allocator holds free."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from rlx.base.numeric import Array

__all__ = ["give_back", "release_free_memory"]


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
