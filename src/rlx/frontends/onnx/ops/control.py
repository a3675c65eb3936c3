# SPDX-License-Identifier: Apache-2.0
"""If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.base.dims import Dim, DimExpr, dim_max, equal
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.facts import current_facts
from rlx.base.types import TensorType, normalize_axis
from rlx.frontends.onnx.registry import Call, Mapped, ObjectArray, onnx_op
from rlx.ir.graph import Block, Node, Value
from rlx.ops.control import If, Loop, Scan
from rlx.ops.indexing import gather
from rlx.ops.leaf import constant
from rlx.ops.movement import arange, expand, flip, reshape, transpose
from rlx.ops.spec import current_builder

__all__ = ["decide"]


@onnx_op("If", "then_branch else_branch", outputs=1 << 20)
def _if(call: Call) -> Mapped:
    """A condition that follows from shapes takes its branch in place; else both are regions."""
    condition = call.value(0)
    if condition.type.dtype is not DType.BOOL:
        raise call.wrong(f"the condition is {condition.type}, not a bool")
    decided = decide(call, condition)
    if decided is not None:
        return call.control.inline(call.get_graph("then_branch" if decided else "else_branch"))
    if condition.type.rank:
        condition = reshape(condition, ())
    return _both(call, condition)


def _both(call: Call, condition: Value) -> Sequence[Value]:
    frames = _branches(call)
    captures = _unify(frames)
    blocks = tuple(frame.builder.block for frame in frames)
    kinds = [[v.type for v in block.results] for block in blocks]
    if len(kinds[0]) != len(kinds[1]):
        raise call.wrong(f"the branches have {len(kinds[0])} and {len(kinds[1])} outputs")
    for index, (a, b) in enumerate(zip(*kinds, strict=True)):
        if a.dtype is not b.dtype or a.rank != b.rank:
            raise call.refuse(
                f"output {index} is {a} in then_branch ({blocks[0].results[index]!r}) but {b} in "
                f"else_branch ({blocks[1].results[index]!r}), and the condition depends on data; "
                "both must have one dtype and rank"
            )
    return current_builder().emit(If(), condition, *captures, regions=blocks)


def _branches(call: Call) -> list[Any]:
    """Return both branches as regions.

    Exporters keep branches that do not fit the extents at hand (a model for another sampling
    rate). One that has no valid types becomes a region that raises if it is taken.
    """
    frames: list[Any] = []
    errors: list[TypeRuleError] = []
    for name in ("then_branch", "else_branch"):
        try:
            frames.append(call.control.region(call.get_graph(name)))
        except TypeRuleError as error:
            frames.append(None)
            errors.append(error)
    if len(errors) == 2:
        raise errors[0]
    if errors:
        valid = next(frame for frame in frames if frame is not None)
        types = [v.type for v in valid.builder.block.results]
        why = f"{call.node.label} takes a branch that is not valid for these extents: {errors[0]}"
        frames[frames.index(None)] = call.control.region_from(lambda: _failure(types), why)
    return frames


def _failure(types: Sequence[TensorType]) -> list[Value]:
    """Return values whose computation raises: element 1 of a tensor of one element."""
    beyond = constant(1, DType.I64)
    return [expand(gather(constant([0], t.dtype), beyond), t.shape) for t in types]


def _unify(frames: Sequence[Any]) -> list[Value]:
    """Give all regions the same captures in the same order; return them."""
    first = len(frames[0].builder.block.parameters) - _captured_parameters(frames[0])
    captures = list(dict.fromkeys(v for frame in frames for v in _captures(frame)))
    for frame in frames:
        block = frame.builder.block
        own = block.parameters[:first]
        block.parameters = own
        for outer in captures:
            inner = frame.captured.get(outer)
            if inner is None or inner.producer is not None:
                block.add_parameter(outer.type, outer.name)
            else:
                inner.index = len(block.parameters)
                block.parameters.append(inner)
    return captures


def _captures(frame: Any) -> list[Value]:
    """Return the outer values that became parameters (known ones were written again inside)."""
    return [outer for outer, inner in frame.captured.items() if inner.producer is None]


def _captured_parameters(frame: Any) -> int:
    return len(_captures(frame))


def decide(call: Call, condition: Value) -> bool | None:
    """Return the condition if it follows from extents (or hints, guarded), None if it is data."""
    array = call.known(condition)
    if array is not None:
        element = array.reshape(-1)[0]
        return element if isinstance(element, bool) else bool(element)
    node = condition.producer
    if node is None or not all(o is not None for o in node.operands):
        return None
    return _decide_node(call, node)


def _decide_node(call: Call, node: Node) -> bool | None:
    name = node.op.name
    operands = [o for o in node.operands if o is not None]
    if name in ("reshape", "cast", "logical_not") and operands[0].type.elements == 1:
        inner = decide(call, operands[0])
        return None if inner is None else inner != (name == "logical_not")
    if name in ("logical_and", "logical_or"):
        sides = [decide(call, o) for o in operands]
        winner = name == "logical_or"
        if winner in sides:
            return winner
        return None if None in sides else not winner
    sides_of = [_single(call.known(o)) for o in operands]
    if len(sides_of) != 2 or sides_of[0] is None or sides_of[1] is None:
        return None
    return _compare(name, sides_of[0], sides_of[1], f"condition of {call.node.label}")


def _single(array: ObjectArray | None) -> Dim | None:
    element = array.reshape(-1)[0] if array is not None and array.size == 1 else None
    return element if isinstance(element, int | DimExpr) else None


def _compare(name: str, a: Dim, b: Dim, reason: str) -> bool | None:
    facts = current_facts()
    if name in ("equal", "not_equal"):
        return facts.assume_equal(a, b, reason) == (name == "equal")
    if name in ("less_equal", "greater"):
        return facts.assume_less_equal(a, b, reason) == (name == "less_equal")
    if name in ("greater_equal", "less"):
        return facts.assume_less_equal(b, a, reason) == (name == "greater_equal")
    return None


@onnx_op("Loop", "body", outputs=1 << 20)
def _loop(call: Call) -> Mapped:
    trip, condition = call.maybe(0), call.maybe(1)
    trip = reshape(trip, ()) if trip is not None and trip.type.rank else trip
    condition = (
        reshape(condition, ()) if condition is not None and condition.type.rank else condition
    )
    carried = call.values(2)
    first = [TensorType(DType.I64, ()), TensorType(DType.BOOL, ()), *(v.type for v in carried)]
    frame = call.control.region(call.get_graph("body"), first, repeats=True, counted=True)
    _check_carried(call, [v.type for v in frame.builder.block.results[1:]], carried)
    block = frame.builder.block
    op = Loop(len(carried), _iterations(call, trip, condition, block))
    if op.trip is None and len(block.results) > len(carried) + 1:
        raise call.refuse("it stacks results, but the number of iterations depends on data")
    operands = (trip, condition, *carried, *_captures(frame))
    return current_builder().emit(op, *operands, regions=(block,))


def _iterations(
    call: Call, trip: Value | None, condition: Value | None, block: Block
) -> Dim | None:
    """Return the number of iterations if no run can end the loop earlier."""
    again = block.results[0]
    goes_on = _is_true(call.known(again)) or again is block.parameters[1]
    starts = condition is None or _is_true(call.known(condition))
    limit = _single(call.known(trip)) if trip is not None else None
    return dim_max(0, limit) if goes_on and starts and limit is not None else None


def _is_true(array: ObjectArray | None) -> bool:
    return array is not None and array.size == 1 and array.reshape(-1)[0] is True


def _check_carried(call: Call, results: Sequence[TensorType], carried: Sequence[Value]) -> None:
    if len(results) < len(carried):
        raise call.wrong(f"the body returns {len(results)} values for {len(carried)} carried ones")
    for index, (value, result) in enumerate(zip(carried, results, strict=False)):
        same = value.type.dtype is result.dtype and value.type.rank == result.rank
        if not same or any(
            equal(a, b) is False for a, b in zip(value.type.shape, result.shape, strict=True)
        ):
            raise call.refuse(
                f"carried value {index} is {value.type} at first but {result} after an iteration; "
                "it must keep its type and shape"
            )


@onnx_op(
    "Scan",
    "body num_scan_inputs scan_input_axes scan_input_directions scan_output_axes "
    "scan_output_directions",
    since=9,
    outputs=1 << 20,
)
def _scan(call: Call) -> Mapped:
    """Axes and directions are brought to "forward along axis 0" around the operator."""
    count = call.get_int("num_scan_inputs")
    values = call.values()
    carried, scanned = values[: len(values) - count], values[len(values) - count :]
    axes = call.get_ints("scan_input_axes", (0,) * count)
    reverse = call.get_ints("scan_input_directions", (0,) * count)
    moved = [
        _inward(x, normalize_axis(a, x.type.rank), bool(r))
        for x, a, r in zip(scanned, axes, reverse, strict=True)
    ]
    slices = [v.type.with_shape(v.type.shape[1:]) for v in moved]
    types = [*(v.type for v in carried), *slices]
    frame = call.control.region(call.get_graph("body"), types, repeats=True)
    block = frame.builder.block
    _check_carried(call, [v.type for v in block.results], carried)
    trip = moved[0].type.shape[0]
    if frame.iteration is not None:  # something in the body asked for it: one more scanned input
        _move_parameter(block, frame.iteration, len(types))
        moved.append(arange(trip))
        count += 1
    operands = (*carried, *moved, *_captures(frame))
    results = current_builder().emit(Scan(trip, len(carried), count), *operands, regions=(block,))
    stacked = results[len(carried) :]
    out_axes = call.get_ints("scan_output_axes", (0,) * len(stacked))
    backward = call.get_ints("scan_output_directions", (0,) * len(stacked))
    outward = [_outward(y, a, bool(r)) for y, a, r in zip(stacked, out_axes, backward, strict=True)]
    return (*results[: len(carried)], *outward)


def _move_parameter(block: Block, parameter: Value, to: int) -> None:
    block.parameters.remove(parameter)
    block.parameters.insert(to, parameter)
    for index, value in enumerate(block.parameters):
        value.index = index


def _inward(x: Value, axis: int, reverse: bool) -> Value:
    if axis:
        x = transpose(x, (axis, *(a for a in range(x.type.rank) if a != axis)))
    return flip(x, 0) if reverse else x


def _outward(y: Value, axis: int, reverse: bool) -> Value:
    y = flip(y, 0) if reverse else y
    axis = normalize_axis(axis, y.type.rank)
    if not axis:
        return y
    rest = list(range(1, y.type.rank))
    return transpose(y, (*rest[:axis], 0, *rest[axis:]))
