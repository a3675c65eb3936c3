# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter, one-hot."""

from __future__ import annotations

from rlx.base.dtypes import DType
from rlx.base.types import normalize_axis
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ops import elementwise as ew
from rlx.ops.indexing import Gather, GatherElements, GatherND, ScatterElements, ScatterND, one_hot
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
    depth = call.dims(1, "the depth")[0]
    indices = call.value(0)
    if indices.type.dtype.is_float:  # ONNX allows whole floats
        indices = ew.cast(indices, DType.I64)
    return one_hot(indices, call.value(2), depth, call.get_int("axis", -1))
