# SPDX-License-Identifier: Apache-2.0
"""Reductions, arg-reductions, running sums, the k largest."""

from __future__ import annotations

from rlx.base.dtypes import DType
from rlx.base.types import normalize_axes, normalize_axis
from rlx.frontends.onnx.ops.movement import axes_of
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops import elementwise as ew
from rlx.ops.reduce import ArgReduce, CumSum, Reduce, TopK
from rlx.ops.spec import emit, emit_one

_KINDS = {
    "ReduceL1": "l1",
    "ReduceL2": "l2",
    "ReduceLogSum": "logsum",
    "ReduceLogSumExp": "logsumexp",
    "ReduceMax": "max",
    "ReduceMean": "mean",
    "ReduceMin": "min",
    "ReduceProd": "prod",
    "ReduceSum": "sum",
    "ReduceSumSquare": "sumsq",
}


def _declare(name: str, kind: str, since: int) -> None:
    """Declare one reduction, whose axes are an operand from version `since` on."""

    @onnx_op(name, "axes keepdims")
    @onnx_op(name, "keepdims noop_with_empty_axes", since=since)
    def reduction(call: Call) -> Mapped:
        x = call.value(0)
        axes = axes_of(call, 1, since)
        if not axes:
            axes = () if call.get_flag("noop_with_empty_axes") else tuple(range(x.type.rank))
        return _reduce(
            x, kind, normalize_axes(axes, x.type.rank), keep=call.get_flag("keepdims", default=True)
        )


def _reduce(x: Value, kind: str, axes: tuple[int, ...], *, keep: bool) -> Value:
    if x.type.dtype is DType.BOOL and kind in ("max", "min"):  # any and all
        return ew.cast(_reduce(ew.cast(x, DType.U8), kind, axes, keep=keep), DType.BOOL)
    return emit_one(Reduce(kind, axes, keep), x)


for _name, _kind in _KINDS.items():
    _declare(_name, _kind, 13 if _name == "ReduceSum" else 18)


def _declare_arg(name: str, kind: str) -> None:
    @onnx_op(name, "axis keepdims select_last_index")
    def arg_reduction(call: Call) -> Mapped:
        x = call.value(0)
        axis = normalize_axis(call.get_int("axis", 0), x.type.rank)
        keep = call.get_flag("keepdims", default=True)
        return emit_one(ArgReduce(kind, axis, keep, call.get_flag("select_last_index")), x)


_declare_arg("ArgMax", "max")
_declare_arg("ArgMin", "min")


@onnx_op("CumSum", "exclusive reverse")
def _cumsum(call: Call) -> Mapped:
    x = call.value(0)
    axis = normalize_axis(call.integer(1, "the axis"), x.type.rank)
    return emit_one(CumSum(axis, call.get_flag("exclusive"), call.get_flag("reverse")), x)


@onnx_op("TopK", "axis k", outputs=2)
@onnx_op("TopK", "axis", since=10, outputs=2)
@onnx_op("TopK", "axis largest sorted", since=11, outputs=2)
def _top_k(call: Call) -> Mapped:
    x = call.value(0)
    axis = normalize_axis(call.get_int("axis", -1), x.type.rank)
    count = call.get_int("k") if call.has("k") else call.dims(1, "k")[0]
    largest, ordered = call.get_flag("largest", default=True), call.get_flag("sorted", default=True)
    return emit(TopK(count, axis, largest, ordered), x)
