# SPDX-License-Identifier: Apache-2.0
"""The NumPy meaning of a body over whole arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.base import numeric
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.expr.body import Body
from rlx.expr.table import TABLE, constant_value

__all__ = ["evaluate_body"]


def evaluate_body(body: Body, inputs: Sequence[Array], row_axes: int = 0) -> tuple[Array, ...]:
    """Return the results of a body over broadcastable arrays.

    Args:
        body: what to compute.
        inputs: one array per body input, of its dtype, broadcastable to the iteration space.
        row_axes: number of trailing axes that row instructions reduce; inputs must then have full rank.

    Returns:
        One array per result; a uniform result has extent 1 along the row axes.
    """
    values: list[Array] = list(inputs)
    axes = tuple(range(-row_axes, 0))
    space = np.broadcast_shapes(*(v.shape for v in values)) if body.has_rows else ()
    for instr in body.instrs:
        args = [values[a] for a in instr.args]
        if instr.op == "const":
            value = constant_value(str(instr.attribute), instr.dtype)
        elif instr.op == "cast":
            value = numeric.cast(args[0], instr.dtype, saturate=instr.attribute != "wrap")
        elif TABLE[instr.op].is_row:
            full = np.broadcast_to(args[0], np.broadcast_shapes(args[0].shape, space))
            value = TABLE[instr.op].meaning(full, axes)
        else:
            value = np.asarray(TABLE[instr.op].meaning(*args))
            if instr.dtype is DType.BOOL or value.dtype == instr.dtype.numpy:
                pass
            else:
                value = value.astype(instr.dtype.numpy)
        values.append(value)
    return tuple(values[r] for r in body.results)
