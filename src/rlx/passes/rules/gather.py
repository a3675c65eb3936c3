# SPDX-License-Identifier: Apache-2.0
"""Gathering by an index grid that counts 0, 1, 2, ... is no gathering at all."""

from __future__ import annotations

from typing import cast

import numpy as np

from rlx.base.dims import Dim
from rlx.base.numeric import Array
from rlx.base.types import Shape
from rlx.ir.builder import Builder
from rlx.ir.graph import Node, Value
from rlx.ir.rewrite import Match, Reject, rule
from rlx.ops.elementwise import Cast
from rlx.ops.indexing import Gather, GatherND
from rlx.ops.movement import Concat, Expand, Range, Reshape, Transpose
from rlx.passes.rules.patterns import constant_of, is_all, made_by

__all__ = ["GATHER_RULES"]

_ZERO = -1
"""In place of an axis: the tensor is all 0, so it counts along no axis."""


@rule("gather")
def gather_all(node: Node, builder: Builder) -> Match:
    """gather(x, [0, 1, ..., n - 1]) along an axis of extent n -> x. Exact."""
    del builder
    x, index = node.operands
    assert isinstance(node.op, Gather)
    assert x is not None
    assert index is not None
    if index.type.rank != 1 or x.type != node.result.type:
        return None
    axis = _counts_along(index)
    single = axis == _ZERO and index.type.shape == (1,)
    return x if axis == 0 or single else None


@rule("gather_nd")
def gather_grid(node: Node, builder: Builder) -> Match:
    """gather_nd(x, grid) -> x, transposed, reshaped and expanded, for a grid that counts.

    Component j of the grid counts 0, 1, ... along one axis of the grid, as many as axis j of x has.
    Exact.
    """
    x, grid = node.operands
    op = node.op
    assert isinstance(op, GatherND)
    assert x is not None
    assert grid is not None
    if op.batch_dims:
        return None
    axes = _grid_axes(grid)
    if axes is None:
        return None
    lead = grid.type.shape[:-1]
    count = len(axes)
    for axis, extent in zip(axes, x.type.shape, strict=False):
        counted = 1 if axis == _ZERO else lead[axis]
        if extent != counted:
            return Reject(f"a component counts to {counted} where the data has {extent}")
    used = [a for a in axes if a != _ZERO]
    if len(set(used)) != len(used):
        return Reject("two components count along one axis")
    order = sorted(range(count), key=lambda j: (axes[j] == _ZERO, axes[j]))
    moved = x
    if order != list(range(count)):
        moved = builder.emit_one(Transpose((*order, *range(count, x.type.rank))), x)
    shape: list[Dim] = [lead[i] if i in used else 1 for i in range(len(lead))]
    return _shaped(moved, (*shape, *x.type.shape[count:]), node, builder)


def _shaped(value: Value, shape: Shape, node: Node, builder: Builder) -> Value:
    if value.type.shape != shape:
        value = builder.emit_one(Reshape(shape), value)
    type_ = node.result.type
    return (
        value
        if value.type == type_
        else builder.emit_typed(Expand(type_.shape), [value], [type_]).result
    )


def _grid_axes(grid: Value) -> list[int] | None:
    """Return what `_counts_along` says of each component of an index grid, None if one is None."""
    array = constant_of(grid)
    if array is not None and array.ndim:
        parts = [_array_counts_along(array[..., j]) for j in range(array.shape[-1])]
    else:
        joined = made_by(grid, Concat)
        if joined is None or joined[0].axis % grid.type.rank != grid.type.rank - 1:
            return None
        operands = [o for o in joined[1].operands if o is not None]
        if any(o.type.shape[-1] != 1 for o in operands):
            return None
        parts = [_counts_along(o) for o in operands]
    found = [p for p in parts if p is not None]
    return found if len(found) == len(parts) else None


def _counts_along(value: Value) -> int | None:
    """Return the axis along which a tensor counts from 0, `_ZERO` if it is all 0, else None."""
    array = constant_of(value)
    if array is not None:
        return _array_counts_along(array)
    counter = made_by(value, Range)
    if counter is not None:
        start, delta = counter[1].operands
        return 0 if is_all(constant_of(start), 0) and is_all(constant_of(delta), 1) else None
    moved = made_by(value, Reshape) or made_by(value, Expand) or made_by(value, Cast)
    source = moved[1].operands[0] if moved else None
    if source is None or not value.type.dtype.is_integer or value.type.dtype.itemsize < 4:
        return None  # a narrow integer may wrap
    axis = _counts_along(source)
    if axis is None or axis == _ZERO:
        return axis
    if made_by(value, Expand):
        return axis + value.type.rank - source.type.rank
    return (
        _moved_axis(source.type.shape, value.type.shape, axis) if made_by(value, Reshape) else axis
    )


def _moved_axis(before: Shape, after: Shape, axis: int) -> int | None:
    """Return where an axis goes in a reshape that only adds or removes extents of 1, else None."""
    old = [i for i, d in enumerate(before) if d != 1]
    new = [i for i, d in enumerate(after) if d != 1]
    if [before[i] for i in old] != [after[i] for i in new] or axis not in old:
        return None
    return new[old.index(axis)]


def _array_counts_along(array: Array) -> int | None:
    if array.size == 0 or array.dtype.kind not in "iu":
        return None
    if not array.any():
        return _ZERO
    for axis, extent in enumerate(array.shape):
        shape = [extent if i == axis else 1 for i in range(array.ndim)]
        line = cast("Array", np.arange(extent)).reshape(shape)
        if extent > 1 and bool(np.all(array == line)):
            return axis
    return None


GATHER_RULES = (gather_all, gather_grid)
