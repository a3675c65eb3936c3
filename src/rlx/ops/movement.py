# SPDX-License-Identifier: Apache-2.0
"""Moving elements: reshape, transpose, slice, pad, join, repeat. All exact, for any dtype.

No operator takes a shape as an operand: shapes are attributes whose extents may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from rlx.base.dims import Dim, floordiv, less_equal, product
from rlx.base.dtypes import NUMERIC, DType
from rlx.base.errors import ExecutionError, TypeRuleError
from rlx.base.facts import current_facts
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import Shape, TensorType, normalize_axes, normalize_axis, require_equal
from rlx.expr.body import Body
from rlx.expr.index import AxisMap, IndexMap, range_margins
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops import elementwise as ew
from rlx.ops.leaf import constant
from rlx.ops.region import Region
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = [
    "Concat",
    "Expand",
    "Pad",
    "Range",
    "Reshape",
    "Slice",
    "Tile",
    "Transpose",
    "Trilu",
    "arange",
    "concat",
    "depth_to_space",
    "expand",
    "flatten",
    "flip",
    "pad",
    "reshape",
    "slice",
    "slice_axis",
    "space_to_depth",
    "split",
    "squeeze",
    "tile",
    "transpose",
    "trilu",
    "unsqueeze",
]


def _extents(shape: Shape) -> tuple[int, ...]:
    return tuple(int(d) for d in shape)


def _moves(dtype: DType) -> Body:
    """Return the body that writes what it reads."""
    return Body((dtype,), (), (0,))


# -- reshape
# -----------------------------------------------------------------------------------------


@op("reshape")
@dataclass(frozen=True)
class Reshape(Op):
    """The same elements in row-major order under another shape. No copy.

    Attributes:
        shape: the new shape; its product equals the number of elements.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    alias = True
    keeps_elements = True
    shape: Shape
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 3, 4)),), {"shape": (6, 4)}),
        Sample((Operand((1, 1)),), {"shape": ()}),
        Sample((Operand((2, 0)),), {"shape": (0, 5)}),
        Sample((Operand((2, 3)),), {"shape": (4, 2)}, error="elements"),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        for dim in self.shape:
            if isinstance(dim, int) and dim < 0:
                raise TypeRuleError(f"the shape {self.shape} has a negative extent")
        have, want = x.elements, product(self.shape)
        if have != want and not current_facts().assume_equal(have, want, f"reshape of {x}"):
            raise TypeRuleError(f"{x} has {have} elements, the shape {self.shape} has {want}")
        return x.with_shape(self.shape)

    def reference(self, x: Array) -> Array:  # noqa: D102
        return x.reshape(_extents(self.shape))


def reshape(x: Value, shape: Sequence[Dim]) -> Value:
    """Return x under another shape of as many elements."""
    wanted = tuple(shape)
    return x if wanted == x.type.shape else emit_one(Reshape(wanted), x)


def squeeze(x: Value, axes: Sequence[int]) -> Value:
    """Return x without the axes, whose extents must be 1.

    Raises:
        TypeRuleError: an extent is not 1.
    """
    gone = normalize_axes(axes, x.type.rank)
    for axis in gone:
        require_equal(x.type.shape[axis], 1, f"squeeze of axis {axis} of {x.type}")
    return reshape(x, tuple(d for i, d in enumerate(x.type.shape) if i not in gone))


def unsqueeze(x: Value, axes: Sequence[int]) -> Value:
    """Return x with axes of extent 1 added; `axes` count in the result."""
    rank = x.type.rank + len(axes)
    added = normalize_axes(axes, rank)
    rest = iter(x.type.shape)
    return reshape(x, tuple(1 if i in added else next(rest) for i in range(rank)))


def flatten(x: Value, axis: int = 1) -> Value:
    """Return x as a matrix: the axes before `axis` become rows, the others columns."""
    if axis != x.type.rank:
        axis = normalize_axis(axis, x.type.rank)
    return reshape(x, (product(x.type.shape[:axis]), product(x.type.shape[axis:])))


# -- transpose and expand
# ----------------------------------------------------------------------------


@op("transpose")
@dataclass(frozen=True)
class Transpose(Op):
    """Axes in another order: axis j of the result is axis perm[j] of x."""

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    keeps_elements = True
    perm: tuple[int, ...]
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 3, 17)),), {"perm": (2, 0, 1)}),
        Sample((Operand((33, 17)),), {"perm": (1, 0)}),
        Sample((Operand(()),), {"perm": ()}),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if sorted(self.perm) != list(range(x.rank)):
            raise TypeRuleError(f"perm {self.perm} is no order of the {x.rank} axes of {x}")
        return x.with_shape(tuple(x.shape[p] for p in self.perm))

    def reference(self, x: Array) -> Array:  # noqa: D102
        return np.asarray(x.transpose(self.perm), order="C")

    def region(self, x: TensorType) -> Region:
        """Return the move as an index map."""
        axes = tuple(AxisMap(self.perm.index(axis)) for axis in range(x.rank))
        return Region(_moves(x.dtype), self.infer(x).shape, (IndexMap(x.rank, axes),))


def transpose(x: Value, perm: Sequence[int] | None = None) -> Value:
    """Return x with its axes in another order; reversed by default."""
    rank = x.type.rank
    order = (
        tuple(reversed(range(rank)))
        if perm is None
        else tuple(normalize_axis(p, rank) for p in perm)
    )
    return x if order == tuple(range(rank)) else emit_one(Transpose(order), x)


@op("expand")
@dataclass(frozen=True)
class Expand(Op):
    """x broadcast (NumPy rules) to a shape."""

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    shape: Shape
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((3, 1)),), {"shape": (2, 3, 17)}),
        Sample((Operand(()),), {"shape": (4,)}),
        Sample((Operand((1,)),), {"shape": (0,)}),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        lead = len(self.shape) - x.rank
        if lead < 0:
            raise TypeRuleError(f"{x} has more axes than the shape {self.shape}")
        for have, want in zip(x.shape, self.shape[lead:], strict=True):
            if have not in (1, want):
                require_equal(have, want, f"expand of {x} to {self.shape}")
        return x.with_shape(self.shape)

    def reference(self, x: Array) -> Array:  # noqa: D102
        return np.asarray(np.broadcast_to(x, _extents(self.shape)), order="C")

    def region(self, x: TensorType) -> Region:
        """Return the broadcast as a region that writes what it reads."""
        return Region(_moves(x.dtype), self.shape)


def expand(x: Value, shape: Sequence[Dim]) -> Value:
    """Return x broadcast to a shape."""
    wanted = tuple(shape)
    return x if wanted == x.type.shape else emit_one(Expand(wanted), x)


# -- slices
# ------------------------------------------------------------------------------------------


@op("slice")
@dataclass(frozen=True)
class Slice(Op):
    """Element i of an axis is element start + step * i of that axis of x.

    Attributes:
        starts: first index per axis.
        sizes: extent of the result per axis.
        steps: distance per axis, not 0; negative ones go backward.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    starts: tuple[Dim, ...]
    sizes: Shape
    steps: tuple[int, ...]
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((4, 17)),), {"starts": (1, 2), "sizes": (2, 5), "steps": (1, 3)}),
        Sample((Operand((4, 17)),), {"starts": (3, 16), "sizes": (4, 17), "steps": (-1, -1)}),
        Sample((Operand((4, 17)),), {"starts": (0, 0), "sizes": (0, 17), "steps": (1, 1)}),
        Sample((Operand((4,)),), {"starts": (2,), "sizes": (3,), "steps": (1,)}, error="outside"),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if not len(self.starts) == len(self.sizes) == len(self.steps) == x.rank:
            raise TypeRuleError(
                f"starts, sizes and steps need one entry for each of the {x.rank} axes of {x}"
            )
        for axis, (start, size, step) in enumerate(
            zip(self.starts, self.sizes, self.steps, strict=True)
        ):
            self._check(axis, x.shape[axis], start, size, step)
        return x.with_shape(self.sizes)

    def _check(self, axis: int, extent: Dim, start: Dim, size: Dim, step: int) -> None:
        if step == 0:
            raise TypeRuleError(f"the step of axis {axis} is 0")
        if less_equal(0, size) is False:
            raise TypeRuleError(f"the size {size} of axis {axis} is negative")
        if less_equal(size, 0) is True:
            return
        last = start + (size - 1) * step
        canon = current_facts().canon
        for index in (start, last):
            low = less_equal(0, canon(index))
            high = less_equal(canon(index + 1), canon(extent))
            # Only what is outside for every value of the symbols is refused; sizes may be 0 for
            # some.
            if (low is False or high is False) and less_equal(1, size) is True:
                raise TypeRuleError(
                    f"index {index} of axis {axis} is outside an extent of {extent}"
                )

    def margins(self, shape: Shape) -> list[Dim]:
        """Return what may not be negative for an operand of this shape; what never is, is left out."""
        return [
            margin
            for extent, start, size, step in zip(
                shape, self.starts, self.sizes, self.steps, strict=True
            )
            for margin in range_margins(extent, start, size, step)
        ]

    def reference(self, x: Array) -> Array:  # noqa: D102
        index: list[Any] = []
        if self.margins(x.shape):
            raise ExecutionError(
                f"sizes {self.sizes} from {self.starts} on, steps {self.steps}, reach outside of {list(x.shape)}"
            )
        for start, size, step in zip(self.starts, self.sizes, self.steps, strict=True):
            first, count = int(start), int(size)
            end = first + step * count
            index.append(np.s_[first : end if end >= 0 else None : step] if count else np.s_[0:0])
        return np.asarray(x[tuple(index)], order="C")

    def region(self, x: TensorType) -> Region:
        """Return the move as an index map."""
        axes = tuple(
            AxisMap(i, a, s) for i, (a, s) in enumerate(zip(self.starts, self.steps, strict=True))
        )
        return Region(_moves(x.dtype), self.sizes, (IndexMap(x.rank, axes),))


def slice(  # noqa: A001
    x: Value, starts: Sequence[Dim], sizes: Sequence[Dim], steps: Sequence[int] | None = None
) -> Value:
    """Return `sizes` elements per axis from `starts` on; steps are 1 by default."""
    strides = (1,) * x.type.rank if steps is None else tuple(steps)
    first, extents = tuple(starts), tuple(sizes)
    whole = extents == x.type.shape and all(s == 0 for s in first) and all(s == 1 for s in strides)
    return x if whole else emit_one(Slice(first, extents, strides), x)


def slice_axis(x: Value, axis: int, start: Dim, size: Dim, step: int = 1) -> Value:
    """Return `size` elements along one axis from `start` on."""
    axis = normalize_axis(axis, x.type.rank)
    starts: list[Dim] = [0] * x.type.rank
    sizes, steps = list(x.type.shape), [1] * x.type.rank
    starts[axis], sizes[axis], steps[axis] = start, size, step
    return slice(x, starts, sizes, steps)


def flip(x: Value, axis: int) -> Value:
    """Return x reversed along an axis."""
    extent = x.type.shape[normalize_axis(axis, x.type.rank)]
    return x if extent in (0, 1) else slice_axis(x, axis, extent - 1, extent, -1)


def split(x: Value, sizes: Sequence[Dim], axis: int = 0) -> tuple[Value, ...]:
    """Return consecutive parts of x along an axis.

    Raises:
        TypeRuleError: the sizes do not sum to the extent.
    """
    axis = normalize_axis(axis, x.type.rank)
    total: Dim = 0
    parts: list[Value] = []
    for size in sizes:
        parts.append(slice_axis(x, axis, total, size))
        total = total + size
    require_equal(
        total, x.type.shape[axis], f"split of axis {axis} of {x.type} into {tuple(sizes)}"
    )
    return tuple(parts)


# -- joining
# -----------------------------------------------------------------------------------------


@op("concat")
@dataclass(frozen=True)
class Concat(Op):
    """The operands one after the other along an axis; all other extents are equal."""

    precision_class = OpClass.MOVEMENT

    operands = ("x*",)
    keeps_elements = True
    axis: int
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 3)), Operand((2, 5)), Operand((2, 0))), {"axis": 1}),
        Sample((Operand((2, 3)), Operand((1, 3))), {"axis": 0}),
        Sample((Operand((2, 0)), Operand((2, 0))), {"axis": 1}),
        Sample((Operand((2, 3)), Operand((2, 4))), {"axis": 0}, error="differ"),
    )

    def infer(self, *types: TensorType) -> TensorType:  # noqa: D102
        if not types:
            raise TypeRuleError("needs at least one operand")
        first = types[0]
        axis = normalize_axis(self.axis, first.rank)
        shape = list(first.shape)
        for other in types[1:]:
            if other.dtype is not first.dtype or other.rank != first.rank:
                raise TypeRuleError(f"{first} and {other} have different dtypes or ranks")
            for i, dim in enumerate(other.shape):
                shape[i] = (
                    shape[i] + dim
                    if i == axis
                    else require_equal(shape[i], dim, f"concat, axis {i}")
                )
        return first.with_shape(shape)

    def reference(self, *arrays: Array) -> Array:  # noqa: D102
        return np.concatenate(arrays, axis=self.axis)


def concat(values: Sequence[Value], axis: int = 0) -> Value:
    """Return the values one after the other along an axis."""
    if len(values) == 1:
        return values[0]
    rank = values[0].type.rank if values else 0
    return emit_one(Concat(normalize_axis(axis, rank)), *values)


PadMode = Literal["constant", "reflect", "edge", "wrap"]


@op("pad")
@dataclass(frozen=True)
class Pad(Op):
    """x with elements added at both ends of every axis.

    Attributes:
        before: number of elements in front, per axis, >= 0.
        after: number of elements at the end.
        mode: `constant` (the operand `value`, 0 where absent), `edge` (the outermost element),
            `reflect` (mirrored without repeating the edge), `wrap` (the other end).
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x", "value?")
    before: tuple[Dim, ...]
    after: tuple[Dim, ...]
    mode: PadMode = "constant"
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((3, 4)), Operand(())), {"before": (1, 0), "after": (0, 2)}),
        Sample((Operand((3, 4)), None), {"before": (1, 2), "after": (2, 1), "mode": "reflect"}),
        Sample((Operand((3, 4)), None), {"before": (1, 2), "after": (2, 5), "mode": "edge"}),
        Sample((Operand((3, 4)), None), {"before": (1, 2), "after": (2, 1), "mode": "wrap"}),
        Sample((Operand((0, 2)), None), {"before": (1, 0), "after": (0, 1)}),
        Sample(
            (Operand((3,)), None),
            {"before": (3,), "after": (0,), "mode": "reflect"},
            error="reflect",
        ),
    )

    def infer(self, x: TensorType, value: TensorType | None = None) -> TensorType:  # noqa: D102
        if not len(self.before) == len(self.after) == x.rank:
            raise TypeRuleError(
                f"before and after need one entry for each of the {x.rank} axes of {x}"
            )
        if self.mode not in ("constant", "reflect", "edge", "wrap"):
            raise TypeRuleError(f"mode {self.mode!r} is none of constant, reflect, edge, wrap")
        if value is not None and (value.rank or value.dtype is not x.dtype):
            raise TypeRuleError(f"the value must be {x.dtype}[], not {value}")
        for axis, (extent, a, b) in enumerate(zip(x.shape, self.before, self.after, strict=True)):
            for count in (a, b):
                self._check(axis, extent, count)
        return x.with_shape(
            tuple(a + d + b for d, a, b in zip(x.shape, self.before, self.after, strict=True))
        )

    def _check(self, axis: int, extent: Dim, count: Dim) -> None:
        if less_equal(0, count) is False:
            raise TypeRuleError(f"padding of {count} at axis {axis} is negative; use a slice")
        limit = {"constant": None, "edge": None, "reflect": extent - 1, "wrap": extent}[self.mode]
        if limit is not None and less_equal(count, limit) is False and count != 0:
            raise TypeRuleError(
                f"{self.mode} padding of {count} exceeds {limit} at axis {axis} of extent {extent}"
            )
        if self.mode == "edge" and extent == 0 and count != 0:
            raise TypeRuleError(f"edge padding of axis {axis}, which is empty")

    def reference(self, x: Array, value: Array | None = None) -> Array:  # noqa: D102
        width = [(int(a), int(b)) for a, b in zip(self.before, self.after, strict=True)]
        if self.mode != "constant":
            return np.pad(x, width, mode=self.mode)
        shape = tuple(a + d + b for d, (a, b) in zip(x.shape, width, strict=True))
        fill = np.zeros((), x.dtype) if value is None else value
        out = np.empty(shape, x.dtype)
        out[...] = fill
        out[tuple(np.s_[a : a + d] for d, (a, _) in zip(x.shape, width, strict=True))] = x
        return out

    def decompose(self, x: Value, value: Value | None = None) -> Value:
        """Return x with parts joined to it, axis by axis."""
        for axis in range(x.type.rank):
            front = self._part(x, axis, self.before[axis], value, front=True)
            back = self._part(x, axis, self.after[axis], value, front=False)
            x = concat([p for p in (front, x, back) if p is not None], axis)
        return x

    def _part(
        self, x: Value, axis: int, count: Dim, value: Value | None, *, front: bool
    ) -> Value | None:
        if count == 0:
            return None
        extent = x.type.shape[axis]
        shape = tuple(count if i == axis else d for i, d in enumerate(x.type.shape))
        if self.mode == "constant":
            return expand(value if value is not None else constant(0, x.type.dtype), shape)
        if self.mode == "edge":
            return expand(slice_axis(x, axis, 0 if front else extent - 1, 1), shape)
        if self.mode == "wrap":
            return slice_axis(x, axis, extent - count if front else 0, count)
        return slice_axis(x, axis, count if front else extent - 2, count, -1)


def pad(
    x: Value,
    before: Sequence[Dim],
    after: Sequence[Dim],
    mode: str = "constant",
    value: Value | None = None,
) -> Value:
    """Return x with elements added at both ends of every axis. See `Pad`."""
    first, last = tuple(before), tuple(after)
    if all(d == 0 for d in (*first, *last)):
        return x
    return emit_one(Pad(first, last, mode), x, value)  # pyright: ignore[reportArgumentType]


@op("tile")
@dataclass(frozen=True)
class Tile(Op):
    """x repeated along every axis."""

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    repeats: tuple[Dim, ...]
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 3)),), {"repeats": (2, 3)}),
        Sample((Operand((2, 3)),), {"repeats": (1, 0)}),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if len(self.repeats) != x.rank:
            raise TypeRuleError(
                f"repeats {self.repeats} need one entry for each of the {x.rank} axes of {x}"
            )
        if any(less_equal(0, r) is False for r in self.repeats):
            raise TypeRuleError(f"repeats {self.repeats} are negative")
        return x.with_shape(tuple(d * r for d, r in zip(x.shape, self.repeats, strict=True)))

    def reference(self, x: Array) -> Array:  # noqa: D102
        return np.tile(x, _extents(self.repeats)) if self.repeats else x

    def decompose(self, x: Value) -> Value:
        """Return x broadcast along a new axis before each repeated one."""
        before: list[Dim] = []
        after: list[Dim] = []
        for extent, count in zip(x.type.shape, self.repeats, strict=True):
            if count != 1:
                before.append(1)
                after.append(count)
            before.append(extent)
            after.append(extent)
        return reshape(expand(reshape(x, before), after), self.infer(x.type).shape)


def tile(x: Value, repeats: Sequence[Dim]) -> Value:
    """Return x repeated along every axis."""
    counts = tuple(repeats)
    return (
        x
        if all(r == 1 for r in counts) and len(counts) == x.type.rank
        else emit_one(Tile(counts), x)
    )


# -- blocks, triangles, ranges
# -----------------------------------------------------------------------


def depth_to_space(x: Value, block: int, mode: str = "DCR") -> Value:
    """Return [N, C, H, W] as [N, C / block^2, H * block, W * block].

    Args:
        x: the tensor.
        block: extent of a block.
        mode: `DCR`: a channel is (row, column, depth); `CRD`: (depth, row, column).
    """
    n, c, h, w = x.type.shape
    depth = floordiv(c, block * block)
    if mode == "DCR":
        parts = transpose(reshape(x, (n, block, block, depth, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        parts = transpose(reshape(x, (n, depth, block, block, h, w)), (0, 1, 4, 2, 5, 3))
    return reshape(parts, (n, depth, h * block, w * block))


def space_to_depth(x: Value, block: int) -> Value:
    """Return [N, C, H, W] as [N, C * block^2, H / block, W / block].

    A channel is (row, column, depth).
    """
    n, c, h, w = x.type.shape
    rows, columns = floordiv(h, block), floordiv(w, block)
    parts = transpose(reshape(x, (n, c, rows, block, columns, block)), (0, 3, 5, 1, 2, 4))
    return reshape(parts, (n, c * block * block, rows, columns))


@op("trilu")
@dataclass(frozen=True)
class Trilu(Op):
    """The upper or lower triangle of the last two axes, 0 elsewhere.

    Attributes:
        upper: keep where column - row >= k; otherwise where column - row <= k.
        k: the diagonal; 0 is the main one.
    """

    precision_class = OpClass.MOVEMENT

    operands = ("x",)
    upper: bool = True
    k: int = 0
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand((2, 3, 5)),), {}),
        Sample((Operand((5, 3)),), {"upper": False, "k": -1}),
        Sample((Operand((0, 3)),), {"k": 1}),
    )

    def infer(self, x: TensorType) -> TensorType:  # noqa: D102
        if x.rank < 2:
            raise TypeRuleError(f"needs at least two axes, not {x}")
        if x.dtype not in NUMERIC and x.dtype is not DType.BOOL:
            raise TypeRuleError(f"does not accept {x.dtype}; cast first")
        return x

    def reference(self, x: Array) -> Array:  # noqa: D102
        return np.where(self._mask(*x.shape[-2:]), x, np.zeros((), x.dtype))

    def _mask(self, rows: int, columns: int) -> Array:
        distance = np.arange(columns) - np.arange(rows)[:, None]
        return distance >= self.k if self.upper else distance <= self.k

    def decompose(self, x: Value) -> Value:
        """Return x selected by the comparison of its row and column numbers."""
        rows, columns = x.type.shape[-2:]
        row, column = unsqueeze(arange(rows), (1,)), arange(columns)
        shifted = ew.add(row, constant(self.k, DType.I64))
        keep = (ew.greater_equal if self.upper else ew.less_equal)(column, shifted)
        return ew.where(keep, x, constant(0, x.type.dtype))


def trilu(x: Value, upper: bool = True, k: int = 0) -> Value:
    """Return the upper or lower triangle of the last two axes."""
    return emit_one(Trilu(upper, k), x)


@op("range")
@dataclass(frozen=True)
class Range(Op):
    """[start, start + delta, start + 2 delta, ...], `size` numbers; start and delta have rank 0."""

    operands = ("start", "delta")
    size: Dim
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((Operand(()), Operand(())), {"size": 17}),
        Sample((Operand(()), Operand(())), {"size": 0}),
    )

    def infer(self, start: TensorType, delta: TensorType) -> TensorType:  # noqa: D102
        if start.rank or delta.rank or start.dtype is not delta.dtype or start.dtype not in NUMERIC:
            raise TypeRuleError("start and delta must be numbers of one dtype and rank 0")
        if less_equal(0, self.size) is False:
            raise TypeRuleError(f"size {self.size} is negative")
        return start.with_shape((self.size,))

    def reference(self, start: Array, delta: Array) -> Array:  # noqa: D102
        with np.errstate(all="ignore"):
            return start + np.arange(int(self.size)).astype(start.dtype) * delta


def arange(size: Dim, dtype: DType = DType.I64) -> Value:
    """Return [0, 1, ..., size - 1]."""
    return emit_one(Range(size), constant(0, dtype), constant(1, dtype))
