# SPDX-License-Identifier: Apache-2.0
"""Products get 8-bit operands: quantise and dequantise around activations, stored integers for weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder, Rewriter
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.evaluate import run_op
from rlx.ops.leaf import Constant, Literal
from rlx.ops.matmul import MatMul
from rlx.ops.quant import DequantizeLinear, QuantizeLinear
from rlx.passes.canonicalize import Canonicalize
from rlx.passes.captures import Captures
from rlx.passes.cse import Cse
from rlx.passes.dce import Dce
from rlx.passes.manager import Entry, PassContext, Pipeline
from rlx.quantization.ranges import Range, scale_and_zero

__all__ = ["OPS", "Selection", "activations", "clean", "quantize_graph"]

OPS = ("matmul", "conv", "conv_transpose")
"""Operators whose operands can be quantised."""


@dataclass(frozen=True)
class Selection:
    """Which nodes to quantise.

    Attributes:
        ops: names of operators, some of `OPS`.
        exclude: patterns (``*`` and ``?``) of node names to leave alone.

    Raises:
        UsageError: an operator cannot be quantised.
    """

    ops: tuple[str, ...] = OPS
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.ops if name not in OPS]
        if unknown:
            raise UsageError(f"cannot quantise {', '.join(unknown)}; ops are {', '.join(OPS)}")

    def nodes(self, graph: Graph) -> list[Node]:
        """Return the chosen products of an f32 activation and an f32 weight, outside of control flow."""
        used: set[str] = set()
        params = graph.param_values()
        found = [n for n in graph.block if self._takes(n, params, used)]
        unused = [p for p in self.exclude if p not in used]
        if unused:
            raise UsageError(
                f"exclude={unused} matches no {' or '.join(self.ops)} node; their names are "
                f"{', '.join(sorted(_name(n) for n in graph.block if n.op.name in self.ops)) or 'none'}"
            )
        return found

    def _takes(self, node: Node, params: set[Value], used: set[str]) -> bool:
        if node.op.name not in self.ops:
            return False
        matching = [p for p in self.exclude if fnmatchcase(_name(node), p)]
        used.update(matching)
        x, w = node.operands[:2]
        assert x is not None
        assert w is not None
        f32 = x.type.dtype is DType.F32 and w.type.dtype is DType.F32
        return not matching and f32 and _is_weight(w, params) and not _is_weight(x, params)


def _name(node: Node) -> str:
    return node.location.name or str(node.location)


def clean(graph: Graph) -> Graph:
    """Bring a graph into the spelling that calibration and quantisation agree on; return it."""
    steps = (Captures(), Canonicalize(), Cse(), Dce())
    Pipeline(tuple(Entry(s, "one spelling") for s in steps)).run(graph, PassContext())
    return graph


def activations(graph: Graph, selection: Selection) -> dict[str, Value]:
    """Return what the chosen nodes read beside weights, by a name that another copy of the graph has as well."""
    names = dict(_named(graph))
    wanted = {n.operands[0]: None for n in selection.nodes(graph)}
    return {names[v]: v for v in wanted if v is not None}


def _named(graph: Graph) -> Iterator[tuple[Value, str]]:
    taken: set[str] = set()
    values = [*graph.inputs, *(r for n in graph.block for r in n.results)]
    for index, value in enumerate(values):
        name = value.name
        if not name or name in taken:
            origin = value.producer.op.name if value.producer is not None else "value"
            name = f"{origin}#{index}"
        taken.add(name)
        yield value, name


def quantize_graph(
    graph: Graph,
    selection: Selection,
    ranges: Mapping[str, Range] | None,
    dtype: DType,
    *,
    per_channel: bool = True,
) -> int:
    """Quantise the operands of the chosen nodes, in place; return how many nodes there were.

    Args:
        graph: as `clean` leaves it.
        selection: which nodes.
        ranges: of their activations, by the names of `activations`; None quantises weights only.
        dtype: of activations, u8 (both ends of a range) or i8 (symmetric). Weights are symmetric i8.
        per_channel: a scale for every output channel of a weight instead of one for all.

    Raises:
        UsageError: an activation has no range.
    """
    nodes = selection.nodes(graph)
    rewriter = Rewriter(graph.facts)
    weights: dict[tuple[Value, int | None], Value] = {}
    narrowed: dict[Value, Value] = {}
    names = {v: n for n, v in activations(graph, selection).items()}
    missing = [n for n in names.values() if ranges is not None and n not in ranges]
    if missing:
        raise UsageError(
            f"the calibration has no range for {', '.join(missing)}; calibrate this model with the same options"
        )
    for node in nodes:
        x, w = node.operands[:2]
        assert x is not None
        assert w is not None
        axis = _channel_axis(node) if per_channel else None
        if (w, axis) not in weights:
            weights[w, axis] = _quantized_weight(graph, w, axis)
        if ranges is not None:
            if x not in narrowed:
                narrowed[x] = _quantized(graph, x, ranges[names[x]], dtype)
            rewriter.set_operand(node, 0, narrowed[x])
        rewriter.set_operand(node, 1, weights[w, axis])
    clean(graph)
    used = {v for n in graph.block.walk() for v in n.operands} | set(graph.outputs)
    for name in [n for n, p in graph.params.items() if p.value not in used]:
        del graph.params[name]
    return len(nodes)


def _channel_axis(node: Node) -> int | None:
    """Return the axis of a weight that runs along the channels of the result; None if it has none of its own."""
    match node.op:
        case MatMul():
            w = node.operands[1]
            assert w is not None
            return 1 if w.type.rank == 2 else None
        case Conv():
            return 0
        case ConvTranspose(groups=1):
            return 1
        case _:
            return None


def _is_weight(value: Value, params: set[Value]) -> bool:
    """Return whether a value follows from params and constants alone, and from at least one param."""
    producer = value.producer
    if producer is None:
        return value in params
    if producer.regions or isinstance(producer.op, Constant):
        return False
    fixed = [v for v in producer.operands if v is not None and not _is_constant(v)]
    return bool(fixed) and all(_is_weight(v, params) for v in fixed)


def _is_constant(value: Value) -> bool:
    return value.producer is not None and isinstance(value.producer.op, Constant)


def _array(graph: Graph, value: Value) -> Array:
    producer = value.producer
    if producer is None:
        data = next(p.data for p in graph.params.values() if p.value is value)
        if data is None:
            raise UsageError(f"param {value.name!r} has no data to quantise")
        return data
    operands = [None if v is None else _array(graph, v) for v in producer.operands]
    return run_op(producer.op, operands)[value.index]


def _quantized_weight(graph: Graph, value: Value, axis: int | None) -> Value:
    """Return the dequantised form of a weight that is stored as i8."""
    data = np.asarray(_array(graph, value), np.float32)
    if not np.isfinite(data).all():
        raise UsageError(f"weight {value.name!r} has NaNs or infinities; exclude its node")
    others = tuple(i for i in range(data.ndim) if i != axis)
    largest = np.abs(data).max(axis=others if axis is not None else None, initial=0.0)
    scale = np.maximum(largest / np.float32(127), 0).astype(np.float32)
    scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))
    spread = scale if axis is None else np.expand_dims(scale, others)
    integers = np.clip(np.rint(data / spread), -127, 127).astype(np.int8)
    name = _free_name(graph, value.name or "weight")
    stored = graph.add_param(f"{name}.i8", integers, TensorType(DType.I8, integers.shape))
    scales = graph.add_param(f"{name}.scale", scale, TensorType(DType.F32, scale.shape))
    builder = Builder(graph.block, graph.facts, graph.block.first)
    return builder.emit_one(DequantizeLinear(axis=axis), stored, scales)


def _free_name(graph: Graph, name: str) -> str:
    found, number = name, 2
    while f"{found}.i8" in graph.params or f"{found}.scale" in graph.params:
        found, number = f"{name}.{number}", number + 1
    return found


def _quantized(graph: Graph, value: Value, chosen: Range, dtype: DType) -> Value:
    """Return a value quantised and dequantised again."""
    scale, zero = scale_and_zero(chosen, dtype)
    before = graph.block.first if value.producer is None else value.producer.next
    builder = Builder(graph.block, graph.facts, before)
    if value.producer is not None:
        builder.location = value.producer.location
    scales = builder.emit_one(Constant(Literal(np.asarray(scale, np.float32))))
    zeros = builder.emit_one(Constant(Literal(np.asarray(zero, dtype.numpy))))
    narrow = builder.emit_one(QuantizeLinear(to=dtype), value, scales, zeros)
    return builder.emit_one(DequantizeLinear(), narrow, scales, zeros)
