# SPDX-License-Identifier: Apache-2.0
"""Memory of programs and contexts: aligned blocks, and weights in huge pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import addressof
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rlx.base.allocation import out_of_memory
from rlx.base.numeric import Array

__all__ = ["HUGE_PAGE", "WeightBuffer", "address_of", "aligned_bytes", "bytes_at", "huge_bytes"]

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64 and on AArch64 with 4 KiB pages."""
_ALIGNMENT = 64
_from_buffer = cast("Callable[[Any], ctypes.c_char]", ctypes.c_char.from_buffer)


def aligned_bytes(nbytes: int, alignment: int = 64) -> npt.NDArray[np.uint8]:
    """Return a zeroed byte array whose first byte lies on a multiple of `alignment`.

    Raises:
        MemoryError: there is not so much memory, or not so many addresses.
    """
    try:
        block = np.zeros(nbytes + alignment, np.uint8)
    except (ValueError, OverflowError) as error:  # more than an address can say
        raise MemoryError(str(error)) from error
    start = -int(block.ctypes.data) % alignment
    return block[start : start + nbytes]


class _Region:
    """Memory as NumPy takes it; arrays over it keep it, and so `keep`, alive."""

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }


def bytes_at(address: int, nbytes: int, keep: object) -> npt.NDArray[np.uint8]:
    """Return the bytes at an address as an array.

    Args:
        address: of the first.
        nbytes: how many, at least one.
        keep: what owns them; it lives as long as the array and all views of it.
    """
    return np.asarray(_Region(address, nbytes, keep))


def huge_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed bytes that the system is asked to back by huge pages, where they fill one.

    A matrix is then streamed with one address translation per 2 MiB instead of one per 4 KiB.

    Raises:
        MemoryError: there is not so much memory, or not so many addresses.
    """
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_bytes(nbytes, 128)
    try:
        region = mmap.mmap(-1, nbytes + HUGE_PAGE)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    # Only a wish: a system without huge pages refuses, and small ones serve as well.
    with suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(region, np.uint8)
    start = -int(block.ctypes.data) % HUGE_PAGE
    return block[start : start + nbytes]


def address_of(array: Array) -> int:
    """Return the address of a C-contiguous array's first byte, in a third of the time `ctypes.data` takes."""
    try:
        return addressof(_from_buffer(array))
    except (TypeError, ValueError, BufferError):
        # Read-only, empty, or of a dtype that buffers do not know.
        return array.__array_interface__["data"][0]


class WeightBuffer:
    """One allocation for many weights, each in a place of its own.

    Args:
        sizes: bytes of every weight that may come, by key. Memory that is never written is never backed by pages.

    Raises:
        OutOfMemoryError: there is no room for all of them.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._offsets: dict[int, int] = {}
        total = 0
        for key, nbytes in sizes.items():
            self._offsets[key] = total
            total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        try:
            self._block = huge_bytes(total)
        except MemoryError as error:
            raise out_of_memory("the packed weights", total) from error

    def place(self, key: int, data: Array) -> Array:
        """Copy a weight to its place and return it there, in the same dtype and shape."""
        start = self._offsets[key]
        target = self._block[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
        np.copyto(target, data)
        return target
