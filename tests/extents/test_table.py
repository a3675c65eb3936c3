# SPDX-License-Identifier: Apache-2.0
"""Symbolic extents: operator x axis. One executable at many extents computes what a program of that extent would.

Every row is an operator with a symbolic axis. One executable, planned for `_BOUND`, runs all of `_EXTENTS`; at each of
them its results are equal, bit for bit, to those of a fresh program whose extents are numbers. Dead memory is poisoned,
so what lies beyond the active part cannot hide. Where the static program refuses an extent (a window longer than the
signal), so does the symbolic one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.base import config
from rlx.base.dims import Dim, ceildiv, floordiv
from rlx.base.dtypes import DType
from rlx.base.errors import RlxError
from rlx.base.numeric import Array
from rlx.ir.builder import Builder
from rlx.ir.graph import Block, Value
from rlx.ops.attention import attention
from rlx.ops.control import Scan
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.elementwise import add, gelu, mul, tanh, where
from rlx.ops.leaf import constant, dim_tensor
from rlx.ops.matmul import einsum, matmul
from rlx.ops.pool import Pool
from rlx.ops.quant import DequantizeLinear, QuantizeLinear
from rlx.ops.resize import Resize
from rlx.ops.rnn import GRU, LSTM, RNN
from rlx.ops.signal import DFT, STFT, Frame
from rlx.ops.spec import building, current_builder, emit, emit_one

_BOUND = 37
_EXTENTS = (37, 1, 2, 16, 17, 61, 0, 33, 37)
"""The bound, one, below and at vector lengths, over the bound, none, and the bound again."""


@dataclass(frozen=True)
class Input:
    """One input of a row.

    Attributes:
        shape: "N" is the symbolic extent.
        dtype: of its elements.
        fill: `normal`, `index` (of an axis of extent `limit`), `bool`, or `length` (0 to `limit`).
        limit: "N" or a number.
    """

    shape: tuple[int | str, ...]
    dtype: str = "f32"
    fill: str = "normal"
    limit: int | str = 0


@dataclass(frozen=True)
class Row:
    """One operator with one symbolic axis."""

    name: str
    inputs: tuple[Input, ...]
    build: Callable[..., Any]
    transform: bool = False
    """Computed by another algorithm where the extent is known: equal but for the rounding errors of a transform."""

    def __str__(self) -> str:
        return self.name


ROWS: list[Row] = []


def row(
    name: str, *inputs: Input | tuple[int | str, ...], transform: bool = False
) -> Callable[[Callable[..., Any]], None]:
    """Add a row; the decorated function gets the graph and the inputs' values."""

    def declare(build: Callable[..., Any]) -> None:
        made = tuple(i if isinstance(i, Input) else Input(i) for i in inputs)
        ROWS.append(Row(name, made, build, transform))

    return declare


def weight(g: rlx.Graph, *shape: int) -> Value:
    name = f"w{len(g.ir.params)}"
    rng = np.random.default_rng(len(g.ir.params))
    return g.param(name, (rng.standard_normal(shape) * 0.3).astype(np.float32))


def _data(spec: Input, n: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    shape = tuple(n if d == "N" else int(d) for d in spec.shape)
    limit = n if spec.limit == "N" else int(spec.limit)
    numpy = DType.of(spec.dtype).numpy
    if spec.fill == "index":
        return rng.integers(-limit, max(limit, 1 - limit), shape).astype(numpy)
    if spec.fill == "length":
        return rng.integers(0, limit + 1, shape).astype(numpy)
    if spec.fill == "bool":
        return rng.integers(0, 2, shape).astype(numpy)
    return np.asarray(rng.standard_normal(shape)).astype(numpy)


def _graph(case: Row, n: int | None) -> rlx.Graph:
    with rlx.Graph(case.name) as g:
        values: list[Value] = []
        for index, spec in enumerate(case.inputs):
            shape = [n if d == "N" and n is not None else d for d in spec.shape]
            values.append(g.input(f"x{index}", shape, spec.dtype))
        found: Any = case.build(g, *values)
        results = cast("tuple[Value, ...]", found if isinstance(found, tuple) else (found,))
        for index, value in enumerate(results):
            g.output(f"y{index}", value)
    return g


def _static(case: Row, n: int, arrays: list[Array]) -> list[Array] | RlxError:
    try:
        with rlx.compile(_graph(case, n), threads=1) as m:
            return list(m.run(arrays).values())
    except RlxError as error:
        return error


# -- elementwise ---------------------------------------------------------------------------------------------------


@row("elementwise-rows", ("N", 5), (5,))
def _(g: rlx.Graph, x: Value, y: Value) -> Value:
    return gelu(x * y + 1.0)


@row("elementwise-columns", (3, "N"), ("N",), (3, 1))
def _(g: rlx.Graph, x: Value, y: Value, z: Value) -> Value:
    return tanh(x * y) / (z * z + 1.0)


@row("elementwise-middle", (2, "N", 3), ("N", 1))
def _(g: rlx.Graph, x: Value, y: Value) -> Value:
    return x - y


@row("elementwise-all", ("N", "N"), ("N",))
def _(g: rlx.Graph, x: Value, y: Value) -> Value:
    return x * y


@row("where", ("N", 4), Input(("N", 1), "bool", "bool"))
def _(g: rlx.Graph, x: Value, c: Value) -> Value:
    return where(c, x, constant(-1.0))


@row("narrow-floats", Input(("N", 5), "bf16"), Input((5,), "bf16"))
def _(g: rlx.Graph, x: Value, y: Value) -> Value:
    return ops.softmax(x * y, 0)


@row("quantise", ("N", 6))
def _(g: rlx.Graph, x: Value) -> Value:
    scale, zero = constant(0.05), constant(3, DType.I8)
    q = emit_one(QuantizeLinear(to=DType.I8), x, scale, zero)
    return emit_one(DequantizeLinear(), q, scale, zero)


@row("random", ("N", 3))
def _(g: rlx.Graph, x: Value) -> Value:
    return x + ops.random_normal(g.rng("noise"), x.type.shape)


# -- reductions ----------------------------------------------------------------------------------------------------

_REDUCTIONS = "sum mean max min prod sumsq l1 l2 logsumexp".split()
for _kind in _REDUCTIONS:
    for _name, _shape, _axes in (
        ("over", ("N", 5), (0,)),
        ("over-last", (5, "N"), (1,)),
        ("beside", ("N", 5), (1,)),
        ("middle", (3, "N", 4), (1,)),
        ("both", ("N", 4, "N"), (0, 2)),
    ):

        @row(f"reduce-{_kind}-{_name}", _shape)
        def _(g: rlx.Graph, x: Value, kind: str = _kind, axes: tuple[int, ...] = _axes) -> Value:
            reduce: Any = getattr(ops, f"reduce_{kind}")
            return reduce(x, axes)


for _name, _shape, _axis in (
    ("over", ("N", 5), 0),
    ("over-last", (5, "N"), 1),
    ("beside", ("N", 5), 1),
    ("middle", (3, "N", 4), 1),
):

    @row(f"softmax-{_name}", _shape)
    def _(g: rlx.Graph, x: Value, axis: int = _axis) -> tuple[Value, ...]:
        return ops.softmax(x, axis), ops.log_softmax(x, axis)

    @row(f"arg-reduce-{_name}", _shape)
    def _(g: rlx.Graph, x: Value, axis: int = _axis) -> tuple[Value, ...]:
        return ops.arg_max(x, axis), ops.arg_min(x, axis, keepdims=False, select_last=True)

    @row(f"cumsum-{_name}", _shape)
    def _(g: rlx.Graph, x: Value, axis: int = _axis) -> tuple[Value, ...]:
        return ops.cum_sum(x, axis), ops.cum_sum(x, axis, exclusive=True, reverse=True)


@row("top-k-over", ("N", 3))
def _(g: rlx.Graph, x: Value) -> Any:
    return ops.top_k(x, 2, 0)


@row("top-k-all", (3, "N"))
def _(g: rlx.Graph, x: Value) -> Any:
    return ops.top_k(x, x.type.shape[1], 1, largest=False)


@row("top-k-beside", ("N", 9))
def _(g: rlx.Graph, x: Value) -> Any:
    return ops.top_k(x, 4, 1)


# -- norms ---------------------------------------------------------------------------------------------------------


@row("layer-norm-batch", ("N", 33))
def _(g: rlx.Graph, x: Value) -> Value:
    return ops.layer_norm(x, weight(g, 33), weight(g, 33))


@row("layer-norm-residual", ("N", 4, 12), ("N", 4, 12))
def _(g: rlx.Graph, x: Value, y: Value) -> tuple[Value, Value]:
    total = x + y
    return ops.layer_norm(total, weight(g, 12), weight(g, 12)), total


@row("layer-norm-over", (4, "N"), ("N",))
def _(g: rlx.Graph, x: Value, scale: Value) -> Value:
    return ops.layer_norm(x, scale)


@row("rms-norm-batch", (2, "N", 16))
def _(g: rlx.Graph, x: Value) -> Value:
    return ops.rms_norm(x, weight(g, 16))


@row("rms-norm-over", (4, "N"))
def _(g: rlx.Graph, x: Value) -> Value:
    return ops.rms_norm(x)


for _name, _shape in (("batch", ("N", 6, 5)), ("space", (2, 6, "N")), ("plane", (1, 6, "N", 3))):

    @row(f"instance-norm-{_name}", _shape)
    def _(g: rlx.Graph, x: Value) -> Value:
        return ops.instance_norm(x, weight(g, 6), weight(g, 6))

    @row(f"group-norm-{_name}", _shape)
    def _(g: rlx.Graph, x: Value) -> Value:
        return ops.group_norm(x, 3)

    @row(f"batch-norm-{_name}", _shape)
    def _(g: rlx.Graph, x: Value) -> Value:
        variance = mul(weight(g, 6), weight(g, 6))
        return ops.batch_norm(x, weight(g, 6), weight(g, 6), weight(g, 6), variance)


# -- movement ------------------------------------------------------------------------------------------------------


@row("transpose", (3, "N", 5))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    return ops.transpose(x, (1, 0, 2)), ops.transpose(x, (2, 1, 0)), ops.transpose(x, (0, 2, 1))


@row("reshape", ("N", 4, 3))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    n = x.type.shape[0]
    flat = ops.reshape(x, (n * 12,))
    return flat + 1.0, ops.reshape(ops.transpose(x, (1, 0, 2)), (4, n * 3))


@row("heads", (2, "N", 12))
def _(g: rlx.Graph, x: Value) -> Value:
    n = x.type.shape[1]
    return ops.transpose(ops.reshape(x, (2, n, 3, 4)), (0, 2, 1, 3))


@row("concat-along", (3, "N"), (3, 2), (3, "N"))
def _(g: rlx.Graph, *xs: Value) -> Value:
    return ops.concat(xs, 1)


@row("concat-rows", ("N", 4), (1, 4))
def _(g: rlx.Graph, *xs: Value) -> Value:
    return ops.concat([*xs, xs[0]], 0)


@row("concat-beside", ("N", 4), ("N", 3))
def _(g: rlx.Graph, *xs: Value) -> Value:
    return ops.concat(xs, 1)


@row("split-along", (3, "N"))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    n = x.type.shape[1]
    half = floordiv(n, 2)
    return tuple(part + 1.0 for part in ops.split(x, (half, n - half), 1))


@row("split-rows", ("N", 3))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    n = x.type.shape[0]
    part = ceildiv(n, 3)
    first, rest = ops.split(x, (part, n - part), 0)
    return first * 2.0, rest


@row("split-beside", ("N", 7))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    return tuple(part * 2.0 for part in ops.split(x, (3, 4), 1))


@row("slice-along", (3, "N"))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    n = x.type.shape[1]
    return (
        ops.slice_axis(x, 1, 0, floordiv(n, 2)),
        ops.slice_axis(x, 1, floordiv(n, 3), n - floordiv(n, 3)),
        ops.slice_axis(x, 1, 0, ceildiv(n, 2), 2),
    )


@row("slice-rows", ("N", 5))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    n = x.type.shape[0]
    return (
        ops.slice_axis(x, 0, floordiv(n, 2), n - floordiv(n, 2)) + 1.0,
        ops.slice_axis(x, 0, n - 1, 1),
    )


@row("flip", (3, "N"), ("N", 2))
def _(g: rlx.Graph, x: Value, y: Value) -> tuple[Value, ...]:
    return ops.flip(x, 1), ops.flip(y, 0)


for _mode in ("constant", "edge", "reflect"):

    @row(f"pad-{_mode}", (2, "N", 4))
    def _(g: rlx.Graph, x: Value, mode: str = _mode) -> tuple[Value, ...]:
        return ops.pad(x, (0, 1, 2), (0, 0, 1), mode), ops.pad(x, (1, 0, 0), (0, 0, 3), mode)


@row("pad-to-the-bound", (2, "N"))
def _(g: rlx.Graph, x: Value) -> Value:
    return ops.pad(x, (0, 0), (0, x.type.shape[1]))


@row("tile", ("N", 3))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    return ops.tile(x, (2, 3)), ops.tile(x, (1, x.type.shape[0]))


@row("expand", ("N", 1))
def _(g: rlx.Graph, x: Value) -> Value:
    return ops.expand(x, (4, x.type.shape[0], 3)) * 2.0


@row("trilu", ("N", "N"))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    return ops.trilu(x), ops.trilu(x, upper=False, k=1)


@row("range-and-size", ("N", 2))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    n = x.type.shape[0]
    return ops.arange(n * 2), dim_tensor((n, n * 3 + 1), (2,))


# -- indexing ------------------------------------------------------------------------------------------------------


@row("gather-from", ("N", 5), Input((7,), "i64", "index", "N"))
def _(g: rlx.Graph, x: Value, i: Value) -> Value:
    return ops.gather(x, i, 0)


@row("gather-by", (9, 5), Input((2, "N"), "i32", "index", 9))
def _(g: rlx.Graph, x: Value, i: Value) -> tuple[Value, ...]:
    return ops.gather(x, i, 0), ops.gather(weight(g, 4, 9), i, 1)


@row("gather-beside", ("N", 9, 2), Input((3,), "i64", "index", 9))
def _(g: rlx.Graph, x: Value, i: Value) -> Value:
    return ops.gather(x, i, 1)


@row(
    "gather-elements",
    ("N", 5),
    Input(("N", 5), "i64", "index", "N"),
    Input(("N", 3), "i64", "index", 5),
)
def _(g: rlx.Graph, x: Value, i: Value, j: Value) -> tuple[Value, ...]:
    return ops.gather_elements(x, i, 0), ops.gather_elements(x, j, 1)


@row("gather-nd", (4, "N", 3), Input((6, 2), "i64", "index", 1))
def _(g: rlx.Graph, x: Value, i: Value) -> Value:
    return ops.gather_nd(x, i)


@row("gather-nd-batch", ("N", 4, 3), Input(("N", 2, 1), "i64", "index", 4))
def _(g: rlx.Graph, x: Value, i: Value) -> Value:
    return ops.gather_nd(x, i, 1)


@row(
    "scatter-elements",
    ("N", 5),
    Input((2, 5), "i64", "index", "N"),
    (2, 5),
    Input(("N", 2), "i64", "index", 5),
    ("N", 2),
)
def _(g: rlx.Graph, x: Value, i: Value, u: Value, j: Value, v: Value) -> tuple[Value, ...]:
    return (
        ops.scatter_elements(x, i, u, 0, "add"),
        ops.scatter_elements(x, j, v, 1, "max"),
    )


@row("scatter-nd", ("N", 3), Input((4, 1), "i64", "index", "N"), (4, 3))
def _(g: rlx.Graph, x: Value, i: Value, u: Value) -> Value:
    return ops.scatter_nd(x, i, u, "add")


@row("one-hot", Input(("N",), "i64", "index", 6))
def _(g: rlx.Graph, i: Value) -> Value:
    return ops.one_hot(i, constant([0.0, 1.0]), 6)


# -- products ------------------------------------------------------------------------------------------------------


@row("matmul-rows", ("N", 24))
def _(g: rlx.Graph, x: Value) -> Value:
    return gelu(matmul(x, weight(g, 24, 40)) + weight(g, 40))


@row("matmul-batch", (2, "N", 24))
def _(g: rlx.Graph, x: Value) -> Value:
    return matmul(x, weight(g, 24, 7))


@row("matmul-rows-and-columns", (5, "N"), ("N", 6))
def _(g: rlx.Graph, a: Value, b: Value) -> Value:
    return matmul(a, b)


@row("matmul-columns", (5, 8), (8, "N"))
def _(g: rlx.Graph, a: Value, b: Value) -> Value:
    return matmul(a, b) + 1.0


@row("matmul-batches", ("N", 3, 4), ("N", 4, 5))
def _(g: rlx.Graph, a: Value, b: Value) -> Value:
    return matmul(a, b)


@row("matmul-square", ("N", "N"), ("N", "N"))
def _(g: rlx.Graph, a: Value, b: Value) -> Value:
    return matmul(a, b)


@row("vector-matmul", ("N",), ("N", 5))
def _(g: rlx.Graph, a: Value, b: Value) -> Value:
    return matmul(a, b)


@row("einsum", (2, "N", 6), (2, 6, 4))
def _(g: rlx.Graph, a: Value, b: Value) -> Value:
    return einsum("bnk,bkm->mnb", a, b)


# -- attention -----------------------------------------------------------------------------------------------------


@row("attention-batch", ("N", 2, 5, 8), ("N", 2, 7, 8), ("N", 2, 7, 8))
def _(g: rlx.Graph, q: Value, k: Value, v: Value) -> Value:
    return attention(q, k, v)


@row("attention-self", (2, 2, "N", 8), (2, 2, "N", 8), (2, 2, "N", 8))
def _(g: rlx.Graph, q: Value, k: Value, v: Value) -> tuple[Value, ...]:
    return attention(q, k, v), attention(q, k, v, causal="upper_left")


@row("attention-keys", (1, 4, 3, 8), (1, 2, "N", 8), (1, 2, "N", 4))
def _(g: rlx.Graph, q: Value, k: Value, v: Value) -> Value:
    return attention(q, k, v)


@row("attention-queries", (1, 2, "N", 8), (1, 2, 5, 8), (1, 2, 5, 8))
def _(g: rlx.Graph, q: Value, k: Value, v: Value) -> Value:
    return attention(q, k, v, softcap=3.0)


@row(
    "attention-mask",
    (2, 2, "N", 8),
    (2, 2, "N", 8),
    (2, 2, "N", 8),
    Input((2, 1, 1, "N"), "bool", "bool"),
    ("N", "N"),
)
def _(g: rlx.Graph, q: Value, k: Value, v: Value, keep: Value, bias: Value) -> tuple[Value, ...]:
    return attention(q, k, v, keep, masked_row="zeros"), attention(q, k, v, bias)


@row("attention-past", (1, 2, 3, 8), (1, 2, "N", 8), (1, 2, "N", 8), (1, 2, 3, 8), (1, 2, 3, 8))
def _(g: rlx.Graph, q: Value, pk: Value, pv: Value, k: Value, v: Value) -> tuple[Value, ...]:
    keys, values = ops.concat([pk, k], 2), ops.concat([pv, v], 2)
    return attention(q, keys, values, causal="bottom_right"), keys


@row("attention-recognised", ("N", 6, 16), Input(("N", 1, 1, 6), "bool", "bool"))
def _(g: rlx.Graph, x: Value, keep: Value) -> Value:
    n = x.type.shape[0]

    def heads(y: Value) -> Value:
        return ops.transpose(ops.reshape(matmul(y, weight(g, 16, 16)), (n, 6, 2, 8)), (0, 2, 1, 3))

    scores = matmul(heads(x), ops.transpose(heads(x), (0, 1, 3, 2))) * 0.35
    p = ops.softmax(where(keep, scores, constant(-1e9)))
    mixed = ops.reshape(ops.transpose(matmul(p, heads(x)), (0, 2, 1, 3)), (n, 6, 16))
    return mixed + x


# -- windows -------------------------------------------------------------------------------------------------------


def _conv(x: Value, w: Value, b: Value | None = None, **options: Any) -> Value:
    space = x.type.rank - 2
    defaults: dict[str, Any] = {
        "strides": (1,) * space,
        "dilations": (1,) * space,
        "pads": ((0, 0),) * space,
    }
    return emit_one(Conv(**{**defaults, **options}), x, w, b)


@row("conv1d-length", (1, 3, "N"))
def _(g: rlx.Graph, x: Value) -> tuple[Value, ...]:
    return (
        _conv(x, weight(g, 8, 3, 3), weight(g, 8), pads=((1, 1),)),
        _conv(x, weight(g, 4, 3, 5), strides=(2,), pads=((4, 0),)),
        _conv(x, weight(g, 4, 3, 2), dilations=(3,), pads=((3, 3),)),
    )


@row("conv1d-valid", (2, 4, "N"))
def _(g: rlx.Graph, x: Value) -> Value:
    return _conv(x, weight(g, 8, 4, 5))


@row("conv2d-batch", ("N", 8, 6, 6))
def _(g: rlx.Graph, x: Value) -> Value:
    return ops.relu(_conv(x, weight(g, 16, 8, 3, 3), weight(g, 16), pads=((1, 1), (1, 1))))


@row("conv2d-height", (1, 8, "N", 5))
def _(g: rlx.Graph, x: Value) -> Value:
    return _conv(x, weight(g, 16, 8, 3, 3), strides=(2, 1), pads=((1, 1), (0, 1)))


@row("conv2d-width", (2, 4, 3, "N"))
def _(g: rlx.Graph, x: Value) -> Value:
    return _conv(x, weight(g, 6, 2, 2, 3), groups=2, pads=((1, 0), (1, 1)))


@row("conv2d-plane", (1, 16, "N", "N"))
def _(g: rlx.Graph, x: Value) -> Value:
    y = _conv(x, weight(g, 16, 16, 1, 1), weight(g, 16))
    return y + x


@row("conv2d-depthwise", (1, 8, "N", 7))
def _(g: rlx.Graph, x: Value) -> Value:
    return _conv(x, weight(g, 8, 1, 3, 3), groups=8, pads=((1, 1), (1, 1)))


@row("conv-transpose", (1, 4, "N"), ("N", 4, 5))
def _(g: rlx.Graph, x: Value, y: Value) -> tuple[Value, ...]:
    op = ConvTranspose((2,), (1,), ((1, 0),), (1,))
    return emit_one(op, x, weight(g, 4, 3, 4), None), emit_one(op, y, weight(g, 4, 3, 4), None)


for _kind in ("max", "avg"):

    @row(f"pool-{_kind}-length", (2, 3, "N"))
    def _(g: rlx.Graph, x: Value, kind: Any = _kind) -> tuple[Value, ...]:
        n = x.type.shape[2]
        same = Pool(kind, (3,), (1,), (1,), ((1, 1),), (n,))
        half = Pool(kind, (3,), (2,), (1,), ((1, 1),), (floordiv(n - 1, 2) + 1,))
        return emit_one(same, x), emit_one(half, x)

    @row(f"pool-{_kind}-batch", ("N", 3, 4, 6))
    def _(g: rlx.Graph, x: Value, kind: Any = _kind) -> Value:
        return emit_one(Pool(kind, (2, 2), (2, 2), (1, 1), ((0, 0), (0, 0)), (2, 3)), x)


for _mode in ("nearest", "linear", "cubic"):

    @row(f"resize-{_mode}-length", (1, 2, "N"))
    def _(g: rlx.Graph, x: Value, mode: Any = _mode) -> tuple[Value, ...]:
        n = x.type.shape[2]
        whole = (None, None, None)
        return (
            emit_one(Resize((1, 2, n * 2), whole, mode), x),
            emit_one(Resize((1, 2, ceildiv(n, 2)), whole, mode, "asymmetric"), x),
            emit_one(Resize((1, 2, 9), whole, mode, "align_corners"), x),
        )

    @row(f"resize-{_mode}-batch", ("N", 2, 4, 5))
    def _(g: rlx.Graph, x: Value, mode: Any = _mode) -> Value:
        n = x.type.shape[0]
        return emit_one(Resize((n, 2, 8, 3), (None,) * 4, mode), x)


# -- sequences -----------------------------------------------------------------------------------------------------


def _layer(g: rlx.Graph, gates: int, directions: int = 1) -> tuple[Value, Value, Value]:
    return (
        weight(g, directions, gates * 6, 5),
        weight(g, directions, gates * 6, 6),
        weight(g, directions, gates * 12),
    )


for _layer_op, _gates, _states in ((LSTM, 4, 3), (GRU, 3, 1), (RNN, 1, 1)):
    _label = _layer_op.__name__.lower()

    @row(f"{_label}-length", ("N", 3, 5))
    def _(
        g: rlx.Graph, x: Value, op: Any = _layer_op, gates: int = _gates, rest: int = _states
    ) -> Any:
        return emit(op(6), x, *_layer(g, gates), *[None] * (1 + rest))

    @row(f"{_label}-batch", (4, "N", 5))
    def _(
        g: rlx.Graph, x: Value, op: Any = _layer_op, gates: int = _gates, rest: int = _states
    ) -> Any:
        return emit(op(6), x, *_layer(g, gates), *[None] * (1 + rest))

    @row(f"{_label}-lengths", ("N", 3, 5), Input((3,), "i32", "length", "N"))
    def _(
        g: rlx.Graph,
        x: Value,
        lens: Value,
        op: Any = _layer_op,
        gates: int = _gates,
        rest: int = _states,
    ) -> Any:
        both = op(6, "bidirectional")
        return emit(both, x, *_layer(g, gates, 2), lens, *[None] * rest)

    @row(f"{_label}-batch-lengths", (4, "N", 5), Input(("N",), "i32", "length", 4))
    def _(
        g: rlx.Graph,
        x: Value,
        lens: Value,
        op: Any = _layer_op,
        gates: int = _gates,
        rest: int = _states,
    ) -> Any:
        return emit(op(6, "reverse"), x, *_layer(g, gates), lens, *[None] * rest)


@row("scan", ("N", 3), (3,))
def _(g: rlx.Graph, x: Value, start: Value) -> Any:
    block = Block()
    state, item = block.add_parameter(start.type), block.add_parameter(start.type)
    with building(Builder(block, g.ir.facts)):
        following = tanh(add(state, item))
        block.results = [following, following * 2.0]
    trip: Dim = x.type.shape[0]
    return current_builder().emit(Scan(trip, 1, 1), start, x, regions=(block,))


# -- signals -------------------------------------------------------------------------------------------------------


@row("dft-batch", ("N", 16, 1))
def _(g: rlx.Graph, x: Value) -> Value:
    return emit_one(DFT(1, False, True, 16), x)


@row("dft-length", (2, "N", 1), transform=True)
def _(g: rlx.Graph, x: Value) -> Value:
    return emit_one(DFT(1, False, False, x.type.shape[1]), x)


@row("stft-length", (1, "N"))
def _(g: rlx.Graph, x: Value) -> Value:
    return emit_one(STFT(4, 8), x, None)


@row("frame-length", (2, "N"))
def _(g: rlx.Graph, x: Value) -> Value:
    return emit_one(Frame(5, 2), x)


# -- the test ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_one_program_serves_every_extent(case: Row) -> None:
    problems: list[str] = []
    with config.override(RLX_CHECK=True), rlx.compile(_graph(case, None), dims={"N": _BOUND}) as m:
        for step, n in enumerate(_EXTENTS):
            seed = zlib.crc32(f"{case.name} {step}".encode())
            arrays = [_data(spec, n, seed + i) for i, spec in enumerate(case.inputs)]
            want = _static(case, n, arrays)
            m.rng = rlx.RngPolicy()
            try:
                got: Sequence[Array] | RlxError = list(m.run(arrays).values())
            except RlxError as error:
                got = error
            problems += [f"N = {n}: {text}" for text in _differences(case, got, want)]
        free = [v for v in m._variants if not v.program.signature.fixed]  # pyright: ignore[reportPrivateUsage]
    assert not problems, "\n".join(problems)
    assert len(free) == 1, "one program serves every extent but 0"


def _differences(
    case: Row, got: Sequence[Array] | RlxError, want: Sequence[Array] | RlxError
) -> list[str]:
    if isinstance(got, RlxError) or isinstance(want, RlxError):
        same = isinstance(got, RlxError) and isinstance(want, RlxError)
        return [] if same else [f"symbolic gave {got!r}, static {want!r}"]
    out: list[str] = []
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            out.append(f"output {index} is {a.dtype}{a.shape}, static {b.dtype}{b.shape}")
        elif not (_same_but_for_nan(a, b) or (case.transform and _same_transform(a, b))):
            wide = [np.asarray(v).astype(np.float64) for v in (a, b)]
            worst = float(np.nanmax(np.abs(wide[0] - wide[1]))) if a.size else 0.0
            out.append(f"output {index} differs by {worst:.3g}")
    return out


def _same_but_for_nan(a: Array, b: Array) -> bool:
    """Return whether both have NaN at the same places and equal bits elsewhere."""
    if a.tobytes() == b.tobytes():
        return True
    if a.dtype.kind != "f":
        return False
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all()) and a[~nan].tobytes() == b[~nan].tobytes()


def _same_transform(a: Array, b: Array) -> bool:
    """Return whether both are one transform, each off by log2(n) roundings of its norm (Higham, section 24.1)."""
    n = a.shape[1]
    norm = np.sqrt((b.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    return bool((np.abs(a - b) <= 2 * np.log2(n + 1) * 2.0**-24 * norm.max(initial=0.0)).all())


def _two_extents(batch: int | str, length: int | str) -> rlx.Graph:
    with rlx.Graph("two") as g:
        x = g.input("x", [batch, length, 8])
        n, s = x.type.shape[:2]
        heads = ops.transpose(ops.reshape(matmul(x, weight(g, 8, 8)), (n, s, 2, 4)), (0, 2, 1, 3))
        p = ops.softmax(matmul(heads, ops.transpose(heads, (0, 1, 3, 2))))
        mixed = ops.reshape(ops.transpose(matmul(p, heads), (0, 2, 1, 3)), (n, s, 8))
        g.output("mixed", mixed + ops.reduce_mean(x, (1,)))
        g.output("over-batch", ops.reduce_sum(x, (0,)))
        g.output(
            "turned", ops.concat([ops.transpose(x, (1, 0, 2)), ops.transpose(x, (1, 0, 2))], 1)
        )
        g.output("rows", ops.reshape(x, (n * s, 8)) * 2.0)
    return g


def test_two_extents_vary_independently() -> None:
    """The inner of two active extents moves every row of the outer one."""
    rng = np.random.default_rng(0)
    dims = {"B": 5, "S": 37}
    with config.override(RLX_CHECK=True), rlx.compile(_two_extents("B", "S"), dims=dims) as m:
        for batch, length in ((5, 37), (5, 3), (2, 37), (1, 1), (7, 2), (3, 50), (5, 37)):
            x = rng.standard_normal((batch, length, 8), np.float32)
            want = rlx.compile(_two_extents(batch, length)).run([x])
            for name, found in m.run([x]).items():
                assert found.shape == want[name].shape
                assert found.tobytes() == want[name].tobytes(), (name, batch, length)
        assert m.variants == 1


# -- what no type rule can decide ----------------------------------------------------------------------------------

_BEYOND: dict[str, tuple[tuple[int | str, ...], Callable[[Value], Value], int]] = {
    "slice": (("N", 4), lambda x: ops.slice_axis(x, 0, 5, 3), 8),
    "slice-fused": (("N", 4), lambda x: ops.slice_axis(x, 0, 5, 2, 2) + 1.0, 8),
    "slice-from-the-end": (
        ("N", 4),
        lambda x: ops.slice_axis(x, 0, x.type.shape[0] - 5, 3) * 2.0,
        5,
    ),
    "slice-view": (
        ("N", 4),
        lambda x: ops.softmax(ops.slice_axis(x + 1.0, 0, 5, 3)),
        8,
    ),
    "split": (("N", 4), lambda x: ops.split(x, (5, x.type.shape[0] - 5), 0)[0] + 1.0, 5),
    "window": (
        (1, 3, "N"),
        lambda x: ops.reduce_sum(_conv(x, constant(np.ones((2, 3, 5), np.float32))), (2,)),
        4,
    ),
}
"""name -> (shape, operator, least extent it is defined for)"""


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", _BEYOND)
def test_extents_that_do_not_fit_are_refused_when_they_come(name: str, device: str) -> None:
    """Whether a slice lies inside shows in a run; it never reads beyond, and the executable stays usable."""
    shape, build, least = _BEYOND[name]
    with rlx.Graph("g") as g:
        g.output("y", build(g.input("x", list(shape))))
    with rlx.compile(g, device, dims={"N": 16}) as m:

        def run(n: int) -> Array:
            return m(np.ones([n if d == "N" else int(d) for d in shape], np.float32))

        for _ in range(2):
            with pytest.raises(rlx.ExecutionError):
                run(least - 1)
            assert np.isfinite(run(least)).all()


def test_no_elements_are_a_slice_of_anything() -> None:
    with rlx.Graph("g") as g:
        x = g.input("x", ["N", 4])
        g.output("y", ops.slice_axis(x, 0, 5, x.type.shape[0] - 5) + 1.0)
    with rlx.compile(g, dims={"N": 16}) as m:
        assert m(np.ones((5, 4), np.float32)).shape == (0, 4)
        assert m(np.ones((7, 4), np.float32)).shape == (2, 4)
