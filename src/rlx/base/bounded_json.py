# SPDX-License-Identifier: Apache-2.0
"""JSON from files of strangers: bounded in size, in the number of its values, and in depth."""

from __future__ import annotations

import json
from typing import Any, cast

from rlx.base.errors import ParseError

__all__ = ["read_json"]

_LONGEST = 64 << 20
_MOST = 1_500_000
"""Values in one text. Each becomes an object of up to 70 bytes, so this bounds what a small file can make of memory."""


def read_json(data: memoryview, what: str) -> dict[str, Any]:
    """Return the object that a JSON text holds.

    Args:
        data: UTF-8 text.
        what: the subject of messages.

    Raises:
        ParseError: it is too large, not JSON, or no object.
    """
    if len(data) > _LONGEST:
        raise ParseError(f"{what} has {len(data)} bytes; at most {_LONGEST} are read")
    text = bytes(data)
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > _MOST:
        raise ParseError(f"{what} has about {values} values; at most {_MOST} are read")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ParseError(f"{what} is no JSON object")
    return cast("dict[str, Any]", found)
