# SPDX-License-Identifier: Apache-2.0
"""Seeing through reshapes, transposes and slices: which axes of an earlier value a value's axes are.

An axis is a list of atoms; an atom is (a part of) one axis of the base, read as ``start + step * i``. Reshape regroups
atoms, Transpose permutes axes, Slice shifts them. A chain that ends with one atom (or none) per axis reads its base
through an `IndexMap`, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlx.base.dims import Dim, product
from rlx.base.facts import Facts
from rlx.base.types import Shape
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.graph import Node, Value
from rlx.ops.leaf import Constant
from rlx.ops.movement import Reshape, Slice, Transpose

__all__ = ["Access", "scalar_constant", "trace_access"]


@dataclass(frozen=True)
class _Atom:
    """One base axis: element i of it is ``start + step * i``; `extent` of them."""

    axis: int
    extent: Dim
    start: Dim = 0
    step: int = 1


@dataclass(frozen=True)
class Access:
    """A value as a read of a base value.

    Attributes:
        base: where the bytes come from.
        map: how the value's axes index the base.
        nodes: the movement nodes between them, from the value upward.
    """

    base: Value
    map: IndexMap
    nodes: tuple[Node, ...]


def scalar_constant(value: Value | None) -> float | None:
    """Return the number a one-element Constant holds, else None."""
    if value is None or value.producer is None or not isinstance(value.producer.op, Constant):
        return None
    array = value.producer.op.data.array
    return float(array.reshape(-1)[0]) if array.size == 1 else None


def trace_access(value: Value, facts: Facts) -> Access:
    """Return the value as a read of the earliest value that one index map reaches (possibly itself)."""
    chain: list[Node] = []
    bases = [value]
    while True:
        producer = bases[-1].producer
        if producer is None or not isinstance(producer.op, Reshape | Transpose | Slice):
            break
        source = producer.operands[0]
        assert source is not None
        chain.append(producer)
        bases.append(source)
    for depth in range(len(chain), 0, -1):
        found = _forward(bases[depth], chain[:depth], facts)
        if found is not None:
            return Access(bases[depth], found, tuple(chain[:depth]))
    rank = value.type.rank
    return Access(value, IndexMap(rank, tuple(AxisMap(i) for i in range(rank))), ())


def _forward(base: Value, chain: list[Node], facts: Facts) -> IndexMap | None:
    axes: list[list[_Atom]] = [[_Atom(i, d)] for i, d in enumerate(base.type.shape)]
    fixed: dict[int, Dim] = {}
    for node in reversed(chain):
        step = _apply(node, axes, fixed, facts)
        if step is None:
            return None
        axes = step
    mapped: dict[int, AxisMap] = {axis: AxisMap(None, start) for axis, start in fixed.items()}
    for position, atoms in enumerate(axes):
        if len(atoms) > 1:
            return None
        for atom in atoms:
            mapped[atom.axis] = AxisMap(position, atom.start, atom.step)
    return IndexMap(len(axes), tuple(mapped.get(i, AxisMap(None)) for i in range(base.type.rank)))


def _apply(
    node: Node, axes: list[list[_Atom]], fixed: dict[int, Dim], facts: Facts
) -> list[list[_Atom]] | None:
    op = node.op
    if isinstance(op, Transpose):
        return [axes[p] for p in op.perm]
    if isinstance(op, Slice):
        return _slice(op, axes, node)
    return _reshape(axes, node.result.type.shape, fixed, facts)


def _slice(op: Slice, axes: list[list[_Atom]], node: Node) -> list[list[_Atom]] | None:
    source = node.operands[0]
    assert source is not None
    out: list[list[_Atom]] = []
    for position, atoms in enumerate(axes):
        start, size, step = op.starts[position], op.sizes[position], op.steps[position]
        if start == 0 and step == 1 and size == source.type.shape[position]:
            out.append(atoms)
        elif len(atoms) == 1:
            (atom,) = atoms
            out.append(
                [
                    replace(
                        atom,
                        extent=size,
                        start=atom.start + start * atom.step,
                        step=atom.step * step,
                    )
                ]
            )
        else:
            return None
    return out


def _reshape(
    axes: list[list[_Atom]], shape: Shape, fixed: dict[int, Dim], facts: Facts
) -> list[list[_Atom]] | None:
    """Regroup the atoms so that their extents multiply to the new shape; atoms of extent 1 become fixed."""
    queue: list[_Atom] = []
    for atom in (a for group in axes for a in group):
        if atom.extent == 1:
            fixed[atom.axis] = atom.start
        else:
            queue.append(atom)
    out: list[list[_Atom]] = []
    for extent in shape:
        group: list[_Atom] = []
        if extent != 1:
            while queue and facts.equal(product(a.extent for a in group), extent) is not True:
                group.append(queue.pop(0))
            if facts.equal(product(a.extent for a in group), extent) is not True:
                return None
        out.append(group)
    return out if not queue else None
