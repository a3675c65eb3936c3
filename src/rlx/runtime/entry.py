# SPDX-License-Identifier: Apache-2.0
"""A compiled program as plain data, for the cache and for packages: what JSON holds, and arrays beside it.

Nothing here is trusted when it is read back: whatever is not of the form that was written raises one of `BROKEN`, and
kernels see no index, offset or shape that was not checked against what it points into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.protocol import CompiledGraph
from rlx.base.dims import Dim, parse_dim, symbol, symbol_atoms
from rlx.base.dtypes import DType
from rlx.base.errors import RlxError
from rlx.base.facts import Guard
from rlx.base.numeric import Array
from rlx.base.store import ALIGNMENT
from rlx.runtime.weight_plan import Default, Recipe, WeightPlan

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

__all__ = [
    "BROKEN",
    "PACKAGE_MAGIC",
    "Restored",
    "Signature",
    "array_from_bytes",
    "described",
    "parts",
    "plan_from_data",
    "plan_to_data",
    "signature_from_data",
    "signature_to_data",
]

PACKAGE_MAGIC = b"rlxpack"
"""What a package begins with."""
BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RlxError)
"""What reading data of another form raises."""


@dataclass(frozen=True)
class Signature:
    """What runs of a program look like from outside.

    Attributes:
        outputs: name, dtype and shape of every output in order.
        guards: what must hold for the extents of a call.
        fixed: extents it was compiled for.
        free: the other symbols; each is at least 1.
        rng: position among the program's inputs of the key of its random numbers, -1 without any.
    """

    outputs: Sequence[tuple[str, DType, tuple[Dim, ...]]]
    guards: Sequence[Guard] = ()
    fixed: Mapping[str, int] = field(default_factory=dict[str, int])
    free: Sequence[str] = ()
    rng: int = -1

    @property
    def is_special(self) -> bool:
        """Whether it is for single values of extents; programs for extents of 0 are not optional."""
        return any(value > 0 for value in self.fixed.values())

    @property
    def rank(self) -> tuple[int, list[tuple[str, int]]]:
        """Sorts programs that may all run with some extents: the one for most single values first."""
        return -len(self.fixed), sorted(self.fixed.items())

    def fits(self, env: Mapping[str, int]) -> bool:
        """Return whether a program may run with these extents."""
        if any(env[name] != value for name, value in self.fixed.items()):
            return False
        if any(env[name] < 1 for name in self.free):
            return False
        return all(g.holds(dict(env)) for g in self.guards)


@dataclass(frozen=True)
class Restored:
    """A program that was found.

    Attributes:
        compiled: ready to be planned; its weights are not set.
        signature: as it was saved.
        report: remarks of the passes.
        plan: what weights it reads.
        params: the model's params.
        derived: the computed weights, as they follow from those.

    Raises:
        KeyError: the plan reads a param that the model does not have, or a computed weight is missing.
    """

    compiled: CompiledGraph
    signature: Signature
    report: list[str]
    plan: WeightPlan
    params: Mapping[str, Default]
    derived: Mapping[str, Array]

    def __post_init__(self) -> None:
        for what, names, known in (
            ("param", self.plan.needed(), self.params),
            ("computed weight", iter(self.derived), self.plan.recipes),
        ):
            unknown = [n for n in names if n not in known]
            if unknown:
                raise KeyError(f"{what} {unknown[0]!r} is not there")


# -- weights -----------------------------------------------------------------------------------------------------------


def described(array: Array) -> list[Any]:
    """Return dtype and shape of an array as JSON data."""
    return [DType.of(array.dtype).value, list(array.shape)]


def array_from_bytes(data: memoryview, dtype: str, shape: Sequence[int], offset: int) -> Array:
    """Return the array that lies at an offset of some bytes, as a view of them.

    Raises:
        ValueError: it does not.
    """
    kind = DType.of(dtype).numpy
    extents = [int(d) for d in shape]
    if any(d < 0 for d in extents) or offset < 0:
        raise ValueError("a negative extent or offset")
    count = prod(extents)
    if count == 0:
        return np.empty(extents, kind)
    return np.frombuffer(data, kind, count, offset).reshape(extents)


def parts(payload: memoryview, start: int, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Iterate parts that lie one after the other from `start` on, each at a multiple of `ALIGNMENT`.

    Raises:
        ValueError: one lies beyond the end.
    """
    for size in sizes:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        if not 0 <= size <= len(payload) - start:
            raise ValueError("a part lies beyond the end")
        yield payload[start : start + size]
        start += size


def plan_to_data(plan: WeightPlan) -> dict[str, Any]:
    """Return what a program reads as JSON data, the param program as text."""
    from rlx.ir.text import print_graph
    from rlx.runtime.recipes import part

    text = ""
    if plan.recipes:
        text = print_graph(part(plan.graph(), plan.recipes), locations=False)
    recipes = {n: [r.key, list(r.sources), list(r.kept)] for n, r in plan.recipes.items()}
    return {"own": list(plan.own), "recipes": recipes, "program": text}


def plan_from_data(data: Mapping[str, Any], prepare: Callable[[], object]) -> WeightPlan:
    """Return what `plan_to_data` wrote; the text is parsed when something has to be computed.

    Args:
        data: JSON data.
        prepare: imports the operators that the text may name.
    """
    recipes = {
        str(name): Recipe(str(key), _names(sources), _names(kept))
        for name, (key, sources, kept) in data["recipes"].items()
    }
    return WeightPlan(_names(data["own"]), recipes, partial(_parse, str(data["program"]), prepare))


def _names(items: Sequence[Any]) -> tuple[str, ...]:
    return tuple([str(i) for i in items])


def _parse(text: str, prepare: Callable[[], object]) -> Graph:
    import_module("rlx.ops")  # declares the operators
    from rlx.ir.parse import parse_graph
    from rlx.ir.verify import verify

    prepare()
    graph = parse_graph(text)
    verify(graph)
    return graph


# -- signatures --------------------------------------------------------------------------------------------------------


def signature_to_data(signature: Signature) -> dict[str, Any]:
    """Return a signature as JSON data."""
    dims = [d for _, _, shape in signature.outputs for d in shape]
    dims += [d for g in signature.guards for d in (g.left, g.right)]
    return {
        "symbols": {s.name: s.lower for d in dims for s in symbol_atoms(d)},
        "outputs": [[n, t.value, [_text(d) for d in shape]] for n, t, shape in signature.outputs],
        "guards": [[_text(g.left), g.relation, _text(g.right), g.reason] for g in signature.guards],
        "fixed": dict(signature.fixed),
        "free": list(signature.free),
        "rng": signature.rng,
    }


def signature_from_data(head: Mapping[str, Any]) -> Signature:
    """Return what `signature_to_data` wrote."""
    lowers = head["symbols"]

    def dim(data: int | str) -> Dim:
        return (
            data
            if isinstance(data, int)
            else parse_dim(data, lambda name: symbol(name, lowers[name]))
        )

    outputs = [(n, DType.of(t), tuple([dim(d) for d in shape])) for n, t, shape in head["outputs"]]
    guards = [Guard(dim(a), relation, dim(b), reason) for a, relation, b, reason in head["guards"]]
    return Signature(outputs, guards, head["fixed"], head["free"], head["rng"])


def _text(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)
