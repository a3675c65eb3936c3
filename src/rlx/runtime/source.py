# SPDX-License-Identifier: Apache-2.0
"""Where the programs of an executable come from: a model file, a graph, or a package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.base.rng import RNG_INPUT
from rlx.runtime.cache import ProgramCache
from rlx.runtime.entry import Restored, Signature
from rlx.runtime.inputs import Declared
from rlx.runtime.state import DeclaredState, states_of
from rlx.runtime.weight_plan import Default

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.runtime.bind import Feeds
    from rlx.runtime.executable import Executable

__all__ = [
    "Recipe",
    "Saved",
    "Source",
    "closed_build",
    "defaults_of",
    "graph_source",
    "param_reader",
]

Recipe: TypeAlias = "Callable[[Executable], tuple[Callable[..., Executable], tuple[Any, ...]]]"


@dataclass(frozen=True)
class Saved:
    """Programs of a package.

    Attributes:
        signature: of the first one.
        restore: extents -> a program that may run with them, if there is one; the most special one.
        special: signatures of programs for single values of extents.
    """

    signature: Signature
    restore: Callable[[Mapping[str, int]], Restored | None]
    special: Sequence[Signature] = ()


@dataclass
class Source:
    """Where programs come from: a model file or a graph.

    Attributes:
        name: for messages.
        inputs: names, dtypes and shapes (static or symbolic) of the inputs in order.
        build: (hints, fixed) -> a new graph. Hints give a value for every symbol; extents in `fixed` become static.
        uppers: bounds the user gave for symbols.
        cache: where compiled programs are kept between processes, if anywhere.
        interface: what the front end wants kept beside them.
        files: the mapped files of the model by location (None: the model itself), once it was read; weights may be
            views of them.
        changed: whether one of them was replaced since, so that nothing made of it is what the file now says.
        params: its weights, if they are at hand; handed over to the executable.
        read_params: reads them from the model.
        saved: programs that were compiled earlier; there are no others then.
        recipe: gives what makes an equal executable in another process, as `object.__reduce__` does.
        states: what persists between runs.
        feeds: which outputs feed inputs, in the order in which they were bound.
    """

    name: str
    inputs: Declared
    build: Callable[[Mapping[str, int], Mapping[str, int]], Graph]
    uppers: dict[str, int]
    cache: ProgramCache | None = None
    interface: Mapping[str, Any] = field(default_factory=dict[str, Any])
    files: Callable[[], Mapping[str | None, memoryview]] = dict[str | None, memoryview]
    changed: Callable[[], bool] = bool
    params: dict[str, Default] = field(default_factory=dict[str, Default])
    read_params: Callable[[], Mapping[str, Default]] = dict[str, Default]
    saved: Saved | None = None
    recipe: Recipe | None = None
    states: Sequence[DeclaredState] = ()
    feeds: tuple[Feeds, ...] = ()


def graph_source(graph: Graph, uppers: Mapping[str, int] | None = None) -> Source:
    """Return a graph, which stays untouched, as a source of programs.

    Args:
        graph: what every program is a copy of.
        uppers: bounds of symbols.
    """
    from rlx.ir.clone import clone_graph

    params = defaults_of(graph)
    template = clone_graph(graph)
    for param in template.params.values():
        param.data = None  # the executable has it, and forgets it once it is packed

    def build(hints: Mapping[str, int], fixed: Mapping[str, int]) -> Graph:
        copied = clone_graph(template, dict(fixed))
        copied.facts.hints = dict(hints)
        return copied

    inputs = [(v.name, v.type.dtype, v.type.shape) for v in graph.inputs if v.name != RNG_INPUT]
    return Source(
        graph.name, inputs, build, dict(uppers or {}), params=params, states=states_of(graph)
    )


def defaults_of(graph: Graph) -> dict[str, Default]:
    """Return the params of a graph, with the data they have there."""
    return {
        name: Default(
            param.value.type.dtype,
            tuple([int(d) for d in param.value.type.shape]),
            None if param.data is None else partial(_same, param.data),
        )
        for name, param in graph.params.items()
    }


def param_reader(
    build: Callable[[Mapping[str, int], Mapping[str, int]], Graph],
    env: Mapping[str, int],
    fixed: Mapping[str, int],
) -> Callable[[str], Array]:
    """Return what reads params by name; the model is imported once, for these extents, when the first is read."""
    params: dict[str, Default] = {}

    def read(name: str) -> Array:
        if not params:
            params.update(defaults_of(build(env, fixed)))
        load = params[name].load
        assert load is not None
        return load()

    return read


def _same(array: Array) -> Array:
    return array


def closed_build(hints: Mapping[str, int], fixed: Mapping[str, int]) -> Graph:
    """Stand in for `Source.build` where nothing may be compiled any more."""
    raise UsageError(f"a closed executable builds no graph for {dict(hints)}, {dict(fixed)}")
