# SPDX-License-Identifier: Apache-2.0
"""Arrays of callers: NumPy's, other libraries', numbers and lists."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from rlx.base.dlpack import from_dlpack
from rlx.base.errors import RlxError, UsageError
from rlx.base.numeric import Array

__all__ = ["as_array"]


def as_array(given: Any, what: str) -> Array:
    """Return what a caller gave as an array; not a copy where its memory can be used.

    Args:
        given: an array, an object with `__dlpack__` or `__array__`, numbers, or nested lists of them.
        what: the subject of messages.

    Raises:
        UsageError: it gives no array, or one with masked elements, which have no value.
    """
    if np.ma.is_masked(given):
        raise UsageError(
            f"{what} got a masked array; masked elements have no value, fill them with .filled(...)"
        )
    if isinstance(given, np.ndarray):
        return cast("Array", given)
    try:
        if hasattr(given, "__dlpack__") and not issubclass(type(given), np.generic):
            try:
                return from_dlpack(given)
            except (BufferError, TypeError, ValueError):
                if not hasattr(given, "__array__"):  # not exported, but perhaps as NumPy array
                    raise
        return np.asarray(given)
    except RlxError:
        raise
    except Exception as error:  # whatever another library raises: it is about this object
        raise UsageError(
            f"{what} got a {type(given).__name__} that gives no array: {error}"
        ) from error
