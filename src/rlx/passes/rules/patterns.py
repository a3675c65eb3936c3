# SPDX-License-Identifier: Apache-2.0
"""Questions that rules ask about values."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np

from rlx.base.numeric import Array
from rlx.ir.graph import Node, Value
from rlx.ir.op import Op
from rlx.ops.leaf import Constant

__all__ = ["constant_of", "is_all", "made_by", "named"]

OpT = TypeVar("OpT", bound=Op)


def made_by(value: Value | None, cls: type[OpT]) -> tuple[OpT, Node] | None:
    """Return the operator and node that make a value, if the operator is of this class."""
    node = value.producer if value is not None else None
    return (node.op, node) if node is not None and isinstance(node.op, cls) else None


def named(value: Value | None, name: str) -> Node | None:
    """Return the node that makes a value, if its operator has this name."""
    node = value.producer if value is not None else None
    return node if node is not None and node.op.name == name else None


def constant_of(value: Value | None) -> Array | None:
    """Return the data of a constant."""
    found = made_by(value, Constant)
    return found[0].data.array if found else None


def is_all(array: Array | None, number: Any) -> bool:
    """Return whether a constant has elements and all are this number; -0.0 is not 0.0."""
    if array is None or array.size == 0:
        return False
    wide: Any = array if array.dtype.kind in "biuf" else array.astype(np.float32)
    same = bool(np.all(wide == number))
    if not same or wide.dtype.kind != "f" or number != 0:
        return same
    return bool(np.all(np.signbit(wide) == np.signbit(cast("Any", np.float64(number)))))
