# SPDX-License-Identifier: Apache-2.0
"""Fusion: chains of elementwise, row and index-mapped operators become `Region` nodes and epilogues.

Three stages. Elementwise chains are merged first; then what follows a matmul, convolution or another anchor becomes
its epilogue; what is left merges into row regions (softmax, norms). A producer merges into its consumer when nothing
is computed twice that costs anything, and when all types stay what they were. Every candidate that does not merge
leaves a reason in the fusion report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlx.base.errors import TypeRuleError
from rlx.base.facts import Facts
from rlx.base.types import Shape, TensorType
from rlx.expr.body import Body, BodyBuilder, Scalar, canonical
from rlx.expr.index import AxisMap, IndexMap, broadcast_map
from rlx.expr.table import TABLE
from rlx.ir.builder import Rewriter
from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ops.region import Region, WithEpilogue
from rlx.passes.manager import PassContext

__all__ = ["FormRegions", "FuseEpilogues", "FuseRegions"]

_CHEAP = frozenset(
    {
        "const",
        "cast",
        "neg",
        "abs",
        "add",
        "sub",
        "mul",
        "max",
        "min",
        "select",
        "and",
        "or",
        "not",
        "xor",
    }
    | {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "fma",
        "floor",
        "ceil",
        "round",
        "trunc",
        "isnan",
        "isinf",
    }
)
_MAX_OPERANDS = 16
_MAX_INSTRS = 24
_MAX_ROW_STEPS = 2
"""Bounds of a region. Longer chains save no memory traffic worth having, and every distinct chain is a kernel to build:
without bounds a large graph has as many kernels as it has regions."""


@dataclass(frozen=True)
class FormRegions:
    """Every operator that declares a `region` becomes a one-operator `Region`.

    exp(x) -> region{exp}(x). Exact: the region's body is the operator's own.
    """

    name = "form-regions"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        with graph.facts.active():
            for node in list(graph.block.walk()):
                region_of = getattr(node.op, "region", None)
                if region_of is None or isinstance(node.op, Region) or _is_free_view(node):
                    continue
                if ctx.claims.prefers_kernel(node.op.name):
                    continue
                region = region_of(*(o.type if o is not None else None for o in node.operands))
                if region is not None:
                    _replace_with_region(rewriter, node, region)
        return rewriter.changed


def _is_free_view(node: Node) -> bool:
    """An aliasing operator costs nothing and stays."""
    return node.op.alias


def _replace_with_region(rewriter: Rewriter, node: Node, region: Region) -> None:
    present = [o for o in node.operands if o is not None]
    new = rewriter.before(node).emit_typed(region, present, [r.type for r in node.results])
    rewriter.replace_node(node, new.results)


@dataclass(frozen=True)
class FuseRegions:
    """Merge producers into consuming regions.

    region{g}(region{f}(x)) -> region{g after f}(x), where the producer has no other reader, or where its value can
    become one more result of the merged region. Exact: the same scalar operations in the same order per element.

    Attributes:
        rows: merge into and through row regions; False merges elementwise regions only.
    """

    rows: bool = True
    name = "fuse-regions"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        with graph.facts.active():
            for block in _blocks(graph.block):
                _Merger(rewriter, graph.facts, ctx, self.rows).run(block)
        return rewriter.changed


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for node in list(block):
        for region in node.regions:
            yield from _blocks(region)


class _Merger:
    def __init__(self, rewriter: Rewriter, facts: Facts, ctx: PassContext, rows: bool) -> None:
        self.rewriter = rewriter
        self.facts = facts
        self.ctx = ctx
        self.rows = rows
        self.order: dict[Node, int] = {}

    def run(self, block: Block) -> None:
        nodes = block.nodes()
        self.order = {node: i for i, node in enumerate(nodes)}
        self.results = set(block.results)
        for node in reversed(nodes):
            if node.block is block and isinstance(node.op, Region):
                self._absorb_all(node)

    def _absorb_all(self, consumer: Node) -> None:
        refused: set[Value] = set()
        while True:
            merged = None
            for index, operand in enumerate(consumer.operands):
                if operand is None or operand in refused or operand.producer is None:
                    continue
                if isinstance(operand.producer.op, Region):
                    merged = self._absorb(consumer, index, operand)
                    if merged is not None:
                        break
                    refused.add(operand)
            if merged is None:
                return
            consumer = merged
            refused.clear()  # what had another reader before may have none now

    def _absorb(self, consumer: Node, index: int, operand: Value) -> Node | None:
        producer = operand.producer
        assert producer is not None
        reason = self._refusal(consumer, operand, producer)
        if reason is None:
            plan = _merge(consumer, operand, self.facts, self._kept(consumer, producer))
            if isinstance(plan, str):
                reason = plan
            else:
                return self._replace(consumer, producer, plan)
        self.ctx.note(
            self.name_of(consumer),
            f"{producer.location} not merged into {consumer.location}: {reason}",
        )
        return None

    @staticmethod
    def name_of(node: Node) -> str:
        """The heading in the report."""
        del node
        return "fuse-regions"

    def _refusal(self, consumer: Node, operand: Value, producer: Node) -> str | None:
        """Return why the producer must stay, or None."""
        first, second = producer.op, consumer.op
        assert isinstance(first, Region)
        assert isinstance(second, Region)
        if producer.block is not consumer.block:
            return "they are in different blocks"
        if not self.rows and (first.row_axes or second.row_axes):
            return "row regions merge after epilogues"
        others = [u for r in producer.results for u in r.users if u is not consumer]
        shared = bool(others) or any(r in self.results for r in producer.results)
        if shared:
            if len(producer.results) == 1 and _only_moves(first.body) and not first.row_axes:
                return None  # reading through a map costs nothing, so duplicates are harmless
            if any(self.order[u] < self.order[consumer] for u in others if u in self.order):
                return "its value is read before the consumer"
            if any(u not in self.order for u in others):
                return "its value is read in another block"
        if _row_steps(first.body) + _row_steps(second.body) > _MAX_ROW_STEPS:
            return f"more than {_MAX_ROW_STEPS} reductions along the rows"
        if len(first.body.instrs) + len(second.body.instrs) > _MAX_INSTRS:
            return f"more than {_MAX_INSTRS} instructions"
        if len(set(producer.operands) | set(consumer.operands)) - 1 > _MAX_OPERANDS:
            return f"more than {_MAX_OPERANDS} operands"
        return None

    def _kept(self, consumer: Node, producer: Node) -> list[int]:
        """Indices of producer results that somebody else still needs."""
        assert isinstance(producer.op, Region)
        if (
            _only_moves(producer.op.body)
            and not producer.op.row_axes
            and len(producer.results) == 1
        ):
            return []
        return [
            i
            for i, r in enumerate(producer.results)
            if r in self.results or any(u is not consumer for u in r.users)
        ]

    def _replace(self, consumer: Node, producer: Node, plan: _Merged) -> Node:
        node = self.rewriter.before(consumer).emit_typed(plan.region, plan.operands, plan.types)
        node.location = consumer.location.joined(producer.location)
        self.order[node] = self.order[consumer]
        count = len(consumer.results)
        for position, kept in enumerate(plan.kept):
            old, new = producer.results[kept], node.results[count + position]
            self.rewriter.replace_value(old, new)
            if old in self.results:
                self.results.discard(old)
                self.results.add(new)
        for old, new in zip(consumer.results, node.results[:count], strict=True):
            self.rewriter.replace_value(old, new)
            if old in self.results:
                self.results.discard(old)
                self.results.add(new)
        self.rewriter.erase(consumer)
        if not any(r.uses or r in self.results for r in producer.results):
            self.rewriter.erase(producer)
        return node


@dataclass
class _Merged:
    region: Region
    operands: list[Value]
    types: list[TensorType]
    kept: list[int]


def _row_steps(body: Body) -> int:
    return sum(TABLE[i.op].is_row for i in body.instrs)


def _only_moves(body: Body) -> bool:
    return not body.instrs


def _same_shape(a: Shape, b: Shape, facts: Facts) -> bool:
    return len(a) == len(b) and all(facts.equal(x, y) is True for x, y in zip(a, b, strict=True))


def _merge(consumer: Node, operand: Value, facts: Facts, kept: list[int]) -> _Merged | str:
    """Return the merged region, or why the pair does not merge."""
    first, second = operand.producer.op, consumer.op  # pyright: ignore[reportOptionalMemberAccess]
    producer = operand.producer
    assert producer is not None
    assert isinstance(first, Region)
    assert isinstance(second, Region)
    frame = _frame(first, second, consumer, operand, facts)
    if isinstance(frame, str):
        return frame
    shape, row_axes = frame
    if kept and not (
        _same_shape(first.shape, shape, facts)
        and (not first.row_axes or first.row_axes == row_axes)
    ):
        return "its value is also read elsewhere and has another iteration space"
    if kept and any(
        second.map_of(p) is not None
        for p, v in enumerate(consumer.operands)
        if v in producer.results
    ):
        return "its value is also read elsewhere, in another order"
    readers = [p for p, value in enumerate(consumer.operands) if value in producer.results]
    if any(second.map_of(p) != second.map_of(readers[0]) for p in readers):
        return "it is read through two different index maps"
    sources = _sources(consumer, producer, second.map_of(readers[0]), shape, facts)
    body, order = canonical(_joined_body(first, second, consumer, producer, sources, kept))
    sources.reorder(order)
    region = Region(body, shape, sources.map_tuple(), row_axes)
    try:
        types = region.infer(*(v.type for v in sources.values))
    except TypeRuleError as error:
        return f"the merged region has no type: {error}"
    wanted = [r.type for r in consumer.results] + [producer.results[k].type for k in kept]
    for have, want in zip(types, wanted, strict=True):
        if have.dtype is not want.dtype or not _same_shape(have.shape, want.shape, facts):
            return f"a result would become {have} instead of {want}"
    return _Merged(region, sources.values, wanted, kept)


def _sources(
    consumer: Node, producer: Node, read: IndexMap | None, shape: Shape, facts: Facts
) -> _Sources:
    """Return the operands of both, with how the merged space reads them."""
    first, second = producer.op, consumer.op
    assert isinstance(first, Region)
    assert isinstance(second, Region)
    sources = _Sources(len(shape))
    for position, value in enumerate(consumer.operands):
        assert value is not None
        if value not in producer.results:
            lifted = _lifted(second.map_of(position), value, second.shape, shape, facts)
            sources.add(("c", position), value, lifted)
    for position, value in enumerate(producer.operands):
        assert value is not None
        mapped = first.map_of(position)
        if not first.row_axes:
            mapped = _through(mapped, value.type.shape, first.shape, read, shape, facts)
        sources.add(("p", position), value, mapped)
    return sources


def _frame(
    first: Region, second: Region, consumer: Node, operand: Value, facts: Facts
) -> tuple[Shape, int] | str:
    """Return the iteration space and row axes of the merged region, or why there is none."""
    maps = {second.map_of(i) for i, v in enumerate(consumer.operands) if v is operand}
    plain = maps == {None}
    if first.row_axes:
        if not plain:
            return "a row region is read through an index map"
        if second.row_axes not in (0, first.row_axes):
            return "the rows have different ranks"
        if _same_shape(first.shape, second.shape, facts):
            return first.shape, first.row_axes
        lead = len(first.shape) - first.row_axes
        tail = (*first.shape[:lead], *([1] * first.row_axes))
        if not second.row_axes and _same_shape(second.shape, tail, facts):
            return first.shape, first.row_axes
        return "the row regions have different iteration spaces"
    if plain and _same_shape(operand.type.shape, second.shape, facts):
        return second.shape, second.row_axes
    if not _is_cheap(first.body):
        return "it is broadcast, sliced or moved, and costs too much to compute again per element"
    if not plain and second.row_axes:
        return "a row region would read it through an index map"
    moved = next(iter(maps))
    if moved is not None and not _keeps_inner(moved):
        return "it would be read with a stride along the innermost axis"
    return second.shape, second.row_axes


def _is_cheap(body: Body) -> bool:
    return len(body.instrs) <= 4 and all(i.op in _CHEAP for i in body.instrs)


def _keeps_inner(mapped: IndexMap) -> bool:
    last = mapped.axes[-1] if mapped.axes else None
    inner = [a for a in mapped.axes if a.axis == mapped.rank - 1]
    return not inner or (last is not None and inner == [last] and last.step == 1)


def _lifted(
    mapped: IndexMap | None, value: Value, old: Shape, new: Shape, facts: Facts
) -> IndexMap | None:
    """Return a consumer operand's map in the merged space (which may have longer rows than the consumer's)."""
    if mapped is None or _same_shape(old, new, facts):
        return mapped
    axes = tuple(
        AxisMap(None, a.start) if a.axis is not None and old[a.axis] == 1 else a
        for a in mapped.axes
    )
    return _simplified(IndexMap(len(new), axes), value.type.shape)


def _through(
    inner: IndexMap | None,
    operand: Shape,
    inner_space: Shape,
    outer: IndexMap | None,
    space: Shape,
    facts: Facts,
) -> IndexMap | None:
    """Return how the merged space reads a producer's operand: its own map after the consumer's read of the result."""
    if outer is None and _same_shape(inner_space, space, facts):
        return inner
    first = inner or broadcast_map(operand, len(inner_space))
    second = outer or broadcast_map(inner_space, len(space))
    axes: list[AxisMap] = []
    for axis in first.axes:
        if axis.axis is None:
            axes.append(axis)
            continue
        via = second.axes[axis.axis]
        axes.append(AxisMap(via.axis, axis.start + via.start * axis.step, axis.step * via.step))
    return _simplified(IndexMap(len(space), tuple(axes)), operand)


def _simplified(mapped: IndexMap, operand: Shape) -> IndexMap | None:
    """Return None where the map is plain broadcasting."""
    return None if mapped == broadcast_map(operand, mapped.rank) else mapped


class _Sources:
    """The merged region's operands: equal (value, map) pairs are read once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.values: list[Value] = []
        self.maps: list[IndexMap | None] = []
        self.index: dict[tuple[str, int], int] = {}

    def add(self, key: tuple[str, int], value: Value, mapped: IndexMap | None) -> None:
        for position, known in enumerate(self.values):
            if known is value and self.maps[position] == mapped:
                self.index[key] = position
                return
        self.index[key] = len(self.values)
        self.values.append(value)
        self.maps.append(mapped)

    def reorder(self, order: Sequence[int]) -> None:
        self.values = [self.values[i] for i in order]
        self.maps = [self.maps[i] for i in order]

    def map_tuple(self) -> tuple[IndexMap | None, ...]:
        return tuple(self.maps) if any(m is not None for m in self.maps) else ()


def _joined_body(
    first: Region,
    second: Region,
    consumer: Node,
    producer: Node,
    sources: _Sources,
    kept: Sequence[int],
) -> Body:
    builder = BodyBuilder([v.type.dtype for v in sources.values])
    inner = builder.inline(
        first.body, [builder.input(sources.index["p", i]) for i in range(len(producer.operands))]
    )
    args: list[Scalar] = []
    for position, value in enumerate(consumer.operands):
        if value in producer.results:
            args.append(inner[producer.results.index(value)])
        else:
            args.append(builder.input(sources.index["c", position]))
    outer = builder.inline(second.body, args)
    return builder.finish(*outer, *(inner[k] for k in kept))


@dataclass(frozen=True)
class FuseEpilogues:
    """An elementwise region that is the only reader of an anchor's result becomes the anchor's epilogue.

    region{f}(matmul(a, b), bias) -> with_epilogue{matmul, f}(a, b, bias). Exact: the anchor's result is rounded to
    its dtype before the body, as it was in memory.
    """

    name = "fuse-epilogues"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Apply to all blocks; return whether anything changed."""
        rewriter = Rewriter(graph.facts)
        with graph.facts.active():
            for node in list(graph.block.walk()):
                if node.block is not None and isinstance(node.op, Region):
                    reason = _attach(rewriter, node, graph.facts, ctx)
                    if reason:
                        ctx.note(self.name, f"{node.location}: {reason}")
        return rewriter.changed


def _attach(rewriter: Rewriter, node: Node, facts: Facts, ctx: PassContext) -> str:
    region = node.op
    assert isinstance(region, Region)
    reason = ""
    if region.row_axes or len(node.results) != 1:
        return ""
    for index, operand in enumerate(node.operands):
        assert operand is not None
        anchor = operand.producer
        if (
            anchor is None
            or anchor.block is not node.block
            or anchor.op.name not in ctx.claims.epilogue_anchors
        ):
            continue
        reason = _epilogue_refusal(region, node, index, anchor, facts)
        if not reason:
            _emit_epilogue(rewriter, node, region, index, anchor)
            return ""
    return reason


def _epilogue_refusal(region: Region, node: Node, index: int, anchor: Node, facts: Facts) -> str:
    value = node.operands[index]
    assert value is not None
    block = anchor.block
    assert block is not None
    if region.may_fail():
        return f"what follows {anchor.location} may fail, and then names its own node"
    if len(anchor.results) != 1 or value.users != [node] or any(r is value for r in block.results):
        return f"{anchor.location} has other readers"
    if region.map_of(index) is not None or not _same_shape(value.type.shape, region.shape, facts):
        return f"the result of {anchor.location} is moved or broadcast"
    for position, other in enumerate(node.operands):
        assert other is not None
        if other is value:
            continue
        if region.map_of(position) is not None:
            return f"an operand of the epilogue of {anchor.location} is read through an index map"
        if not _row_or_full(other.type.shape, region.shape, facts):
            return f"an operand {other.type} of the epilogue of {anchor.location} is neither full, per column, nor one"
    return ""


def _row_or_full(shape: Shape, space: Shape, facts: Facts) -> bool:
    """True for the whole space, one value per last-axis element, one per row, or a single value."""
    if all(d == 1 for d in shape):
        return True
    if len(shape) == len(space) and all(
        facts.equal(a, b) is True for a, b in zip(shape[:-1], space[:-1], strict=True)
    ):
        return True
    return all(d == 1 for d in shape[:-1]) and facts.equal(shape[-1], space[-1]) is True


def _emit_epilogue(
    rewriter: Rewriter, node: Node, region: Region, index: int, anchor: Node
) -> None:
    value = node.operands[index]
    extras = [o for o in node.operands if o is not value and o is not None]
    builder = BodyBuilder([region.body.inputs[index], *(e.type.dtype for e in extras)])
    args = [
        builder.input(0 if operand is value or operand is None else 1 + extras.index(operand))
        for operand in node.operands
    ]
    body = builder.finish(*builder.inline(region.body, args))
    op = WithEpilogue(anchor.op, len(anchor.operands), body)
    fused = rewriter.before(node).emit_typed(
        op, [*anchor.operands, *extras], [r.type for r in node.results]
    )
    fused.location = anchor.location.joined(node.location)
    rewriter.replace_node(node, fused.results)
    rewriter.erase(anchor)
