# SPDX-License-Identifier: Apache-2.0
"""Allocating, and what is said where memory is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.base.errors import OutOfMemoryError
from rlx.base.numeric import Array

__all__ = ["allocate", "out_of_memory"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def out_of_memory(
    what: str, nbytes: int, extents: Mapping[str, int] | None = None
) -> OutOfMemoryError:
    """Return the error for an allocation that failed.

    Args:
        what: was to be kept there.
        nbytes: that were asked for.
        extents: which the size follows from, by symbol.
    """
    if not extents:
        return OutOfMemoryError(
            f"{what}: {_size(nbytes)} could not be allocated; there is less memory here than this takes"
        )
    listed = ", ".join(f"{name} = {value}" for name, value in sorted(extents.items()))
    return OutOfMemoryError(
        f"{what}: {_size(nbytes)} could not be allocated for extents up to {listed}; "
        "give smaller bounds with dims=, or smaller inputs"
    )


def allocate(
    what: str, shape: Sequence[int], dtype: np.dtype[Any], *, zeros: bool = False
) -> Array:
    """Return a new array.

    Args:
        what: is to be kept there, for the message.
        shape: of the array, at least 0 everywhere.
        dtype: of the array.
        zeros: whether it is filled with zeros; else its content means nothing.

    Raises:
        OutOfMemoryError: there is not so much memory, or not so many addresses.
    """
    try:
        return np.zeros(shape, dtype) if zeros else np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise out_of_memory(what, math.prod(shape) * dtype.itemsize) from error


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "bytes"
    for larger in _UNITS:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{nbytes} bytes ({value:.1f} {unit})"
