# SPDX-License-Identifier: Apache-2.0
"""What a derived weight is computed from, how, and how to get the originals back out of it.

A param program computes all derived weights of a program. A recipe is the part of it behind one of them: its key is
equal for equal computations from params of equal names, in whatever program they occur, so that programs can share the
result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ir.text import content_hash
from rlx.ops.evaluate import evaluate
from rlx.runtime.weight_plan import Recipe

__all__ = ["compute", "make_recipes", "part", "recover", "recoverable"]

_RESULT = "result"


def make_recipes(graph: Graph) -> dict[str, Recipe]:
    """Return the recipe of every output of a param program."""
    parts = _Parts(graph)
    found: dict[str, Recipe] = {}
    for name in graph.output_names:
        piece = parts.take([name])
        piece.output_names = [_RESULT]
        kept = tuple(sorted(recoverable(piece)))
        found[name] = Recipe(content_hash(piece), tuple(sorted(piece.params)), kept)
    return found


def part(graph: Graph, names: Iterable[str]) -> Graph:
    """Return a new graph that computes only some outputs, from only the params they need; without data."""
    return _Parts(graph).take(list(names))


class _Parts:
    """Takes parts out of one param program."""

    def __init__(self, graph: Graph) -> None:
        self._name = graph.name
        self._outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
        self._own = {p.value: n for n, p in graph.params.items()}

    def take(self, names: Sequence[str]) -> Graph:
        """Return what computes these outputs."""
        piece = Graph(self._name)
        builder = Builder(piece.block, piece.facts)
        moved: dict[Value, Value] = {}
        stack = [self._outputs[n] for n in reversed(names)]
        while stack:
            value = stack[-1]
            if value in moved:
                stack.pop()
            elif value.producer is None:
                moved[value] = piece.add_param(self._own[value], None, value.type)
            elif missing := [
                o for o in value.producer.operands if o is not None and o not in moved
            ]:
                stack.extend(reversed(missing))
            else:
                node = value.producer
                operands = [None if o is None else moved[o] for o in node.operands]
                with builder.at(node.location):
                    copy = builder.emit_typed(node.op, operands, [r.type for r in node.results])
                moved.update(zip(node.results, copy.results, strict=True))
        piece.set_outputs({n: moved[self._outputs[n]] for n in names})
        return piece


def compute(graph: Graph, names: Iterable[str], params: Mapping[str, Array]) -> dict[str, Array]:
    """Return some outputs of a param program as C-contiguous arrays, computing nothing else.

    Args:
        graph: the param program.
        names: of the outputs.
        params: data of at least the params they need.
    """
    piece = part(graph, names)
    results = evaluate(piece, {n: params[n] for n in piece.params})
    return {n: np.asarray(a, order="C") for n, a in results.items()}


def recoverable(piece: Graph) -> set[str]:
    """Return the params whose elements all stand in the one output, moved but unchanged."""
    inside: dict[Value, set[str]] = {p.value: {n} for n, p in piece.params.items()}
    for node in piece.block:
        held = [inside.get(o, set[str]()) for o in node.operands if o is not None]
        for result in node.results:
            inside[result] = set[str]().union(*held) if node.op.keeps_elements else set()
    return inside.get(piece.outputs[0], set())


def recover(piece: Graph, derived: Array, name: str) -> Array:
    """Return a param from the weight derived from it, bit for bit.

    The operators between them only move elements, whatever these are: moving the numbers of the elements shows where
    each one went.

    Args:
        piece: computes the derived weight alone.
        derived: its value.
        name: one of `recoverable(piece)`.

    Raises:
        UsageError: the weight does not hold all elements of the param.
    """
    size = int(np.prod(_shape(piece.params[name].value), dtype=np.int64))
    kind = np.int32 if size < np.iinfo(np.int32).max else np.int64
    places: dict[Value, Array] = {}
    for known, param in piece.params.items():
        shape = _shape(param.value)
        numbers = np.arange(1, size + 1, dtype=kind) if known == name else np.zeros(1, kind)
        places[param.value] = numbers.reshape(shape) if known == name else _zeros(shape, kind)
    for node in piece.block:
        if node.op.keeps_elements:
            moved = node.op.reference(*(places[o] for o in node.operands if o is not None))
            places[node.result] = cast("Array", moved)
        else:
            places.update((r, _zeros(_shape(r), kind)) for r in node.results)
    flat = places[piece.outputs[0]].reshape(-1)
    (filled,) = np.nonzero(flat)
    target = np.empty(size, derived.dtype)
    sources = flat[filled] - 1
    if len(filled) < size or not _is_complete(sources, size):
        raise UsageError(f"param {name!r} cannot be read back from the weight computed from it")
    target[sources] = derived.reshape(-1)[filled]
    return target.reshape(_shape(piece.params[name].value))


def _is_complete(sources: Array, size: int) -> bool:
    seen = np.zeros(size, np.bool_)
    seen[sources] = True
    return bool(seen.all())


def _zeros(shape: tuple[int, ...], kind: type[np.int32 | np.int64]) -> Array:
    return np.broadcast_to(np.zeros((), kind), shape)


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(int(d) for d in value.type.shape)
