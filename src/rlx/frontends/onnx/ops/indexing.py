# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter, one-hot."""

from __future__ import annotations

from rlx.base.dtypes import DType
from rlx.base.types import normalize_axis
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ops import elementwise as ew
from rlx.ops import movement as mv
from rlx.ops.indexing import Gather, GatherElements, GatherND, ScatterElements, ScatterND
from rlx.ops.leaf import constant, dim_tensor
from rlx.ops.spec import emit_one

_REDUCTIONS = ("none", "add", "mul", "max", "min")


@onnx_op("Gather", "axis")
def _gather(call: Call) -> Mapped:
    x = call.value(0)
    return emit_one(Gather(normalize_axis(call.get_int("axis", 0), x.type.rank)), x, call.value(1))


@onnx_op("GatherElements", "axis")
def _gather_elements(call: Call) -> Mapped:
    x = call.value(0)
    return emit_one(
        GatherElements(normalize_axis(call.get_int("axis", 0), x.type.rank)), x, call.value(1)
    )


@onnx_op("GatherND", "batch_dims")
def _gather_nd(call: Call) -> Mapped:
    return emit_one(GatherND(call.get_int("batch_dims", 0)), call.value(0), call.value(1))


@onnx_op("ScatterElements", "axis reduction")
@onnx_op("Scatter", "axis")
def _scatter_elements(call: Call) -> Mapped:
    x = call.value(0)
    axis = normalize_axis(call.get_int("axis", 0), x.type.rank)
    op = ScatterElements(axis, call.get_choice("reduction", _REDUCTIONS, "none"))
    return emit_one(op, x, call.value(1), call.value(2))


@onnx_op("ScatterND", "reduction")
def _scatter_nd(call: Call) -> Mapped:
    op = ScatterND(call.get_choice("reduction", _REDUCTIONS, "none"))
    return emit_one(op, call.value(0), call.value(1), call.value(2))


@onnx_op("OneHot", "axis")
def _one_hot(call: Call) -> Mapped:
    """`values[1]` where the class is the index, else `values[0]`.

    An index outside [-depth, depth) is no class.
    """
    indices, values = call.value(0), call.value(2)
    depth = call.dims(1, "the depth")[0]
    rank = indices.type.rank + 1
    axis = normalize_axis(call.get_int("axis", -1), rank)
    off, on = (mv.reshape(mv.slice(values, (i,), (1,), (1,)), ()) for i in (0, 1))
    whole = indices if indices.type.dtype is DType.I64 else ew.cast(indices, DType.I64)
    shape = indices.type.shape
    spread = mv.reshape(whole, (*shape[:axis], 1, *shape[axis:]))
    line = mv.arange(depth)
    classes = mv.reshape(line, (depth, *([1] * (rank - 1 - axis))))
    positive = ew.where(
        ew.less(spread, constant(0, DType.I64)), ew.add(spread, dim_tensor((depth,), ())), spread
    )
    return ew.where(ew.equal(classes, positive), on, off)
