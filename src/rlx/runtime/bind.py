# SPDX-License-Identifier: Apache-2.0
"""Outputs that feed inputs: a model without state becomes one with state.

The graph is changed before it is compiled: the input becomes a state and the output, or rows of it written into the old
value, what the state is next. So no value travels through the caller, rows are written in place, and programs are
cached like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from rlx.base.diagnostics import did_you_mean
from rlx.base.dims import Dim, evaluate, lone_symbol, symbols_of
from rlx.base.dtypes import DType
from rlx.base.errors import ModelError, RlxError, UsageError
from rlx.base.types import Shape, TensorType, normalize_axis
from rlx.ir.builder import Builder
from rlx.ir.clone import clone_graph
from rlx.runtime.state import DeclaredState, Snapshot

if TYPE_CHECKING:
    from rlx.base.facts import Facts
    from rlx.ir.graph import Graph, Value
    from rlx.runtime.executable import Executable
    from rlx.runtime.source import Source

__all__ = ["Feeds", "RowFeed", "bind_source", "remembered"]

_GUESSES = 64


@dataclass(frozen=True)
class RowFeed:
    """Rows of an output go into a state, at a position that an input gives.

    For caches: the state is `[batch, capacity, row]`, the output `[batch, n, row]`, and n rows from `position` on are
    written in place by every run.

    Attributes:
        state: name of the input that becomes the state.
        position: name of an i32 or i64 input, one number or one for each entry of the batch; it is added (i64) if the
            model has none of that name.
        axis: along which rows are counted.
        ring: positions count modulo the capacity.
        row: feed only this row of the output; it may count from the end.
        per_entry: a position that is added is one number for each entry of axis 0.
    """

    state: str
    position: str
    axis: int = 1
    ring: bool = False
    row: int | None = None
    per_entry: bool = False


Feeds: TypeAlias = "Mapping[str, str | RowFeed]"
"""Output -> the input it feeds."""


def remembered(
    recipe: tuple[Callable[..., Executable], tuple[Any, ...]],
    feeds: Sequence[Feeds],
    snapshot: Snapshot,
) -> Executable:
    """Return the executable that a recipe makes, with outputs feeding inputs and with values of its states."""
    make, arguments = recipe
    made = make(*arguments)
    for bound in feeds:
        made.bind_state(bound)
    made.state.restore(snapshot)
    return made


def bind_source(source: Source, feeds: Feeds, outputs: Sequence[str] | None = None) -> Source:
    """Return a source whose inputs named by the feeds are states.

    Args:
        source: what is changed.
        feeds: output -> input.
        outputs: names of the outputs, if they are known.

    Raises:
        UsageError: an output or input is not there, an input is fed twice, or the programs come from a package.
    """
    _check_feeds(feeds)
    if source.saved is not None:
        raise UsageError(
            f"the programs of {source.name} are compiled: bind its state before it is saved"
        )
    for output in feeds if outputs is not None else ():
        _check_output(source, output, outputs or ())
    rows = {o: f if isinstance(f, RowFeed) else None for o, f in feeds.items()}
    names = {o: f.state if isinstance(f, RowFeed) else f for o, f in feeds.items()}
    known = [n for n, _, _ in source.inputs]
    for name in names.values():
        if name not in known:
            raise UsageError(
                f"{source.name} has no input {name!r} to be fed; it has {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
        if list(names.values()).count(name) > 1:
            raise UsageError(
                f"input {name!r} of {source.name} is fed by two outputs: {dict(feeds)}"
            )
    bound = [i for i in source.inputs if i[0] in names.values()]
    inputs = [i for i in source.inputs if i[0] not in names.values()]
    for feed in rows.values():
        if feed is not None and all(feed.position != n for n, _, _ in inputs):
            shape = next(s for n, _, s in bound if n == feed.state)
            inputs.append((feed.position, DType.I64, shape[:1] if feed.per_entry else ()))
    given = {s for _, _, shape in inputs for d in shape for s in symbols_of(d)}
    free = frozenset(s for _, _, shape in bound for d in shape for s in symbols_of(d)) - given
    free -= source.uppers.keys()
    states = [DeclaredState(n, t, s, np.zeros((), t.numpy), free) for n, t, s in bound]
    binder = _Binder(source, names, rows, inputs, free)
    cache = None if source.cache is None else source.cache.variant(repr(sorted(feeds.items())))
    return replace(
        source,
        inputs=inputs,
        build=binder.build,
        cache=cache,
        states=[*source.states, *states],
        feeds=(*source.feeds, dict(feeds)),
    )


@dataclass(frozen=True)
class _Binder:
    """Builds graphs of a source with its feeds in them.

    Attributes:
        source: builds graphs without them.
        names: output -> input that becomes a state.
        rows: output -> which rows it feeds, or None for all of the state.
        inputs: that are left.
        free: extents that only the new states have; each follows from the value the state takes.
    """

    source: Source
    names: Mapping[str, str]
    rows: Mapping[str, RowFeed | None]
    inputs: Sequence[tuple[str, DType, Shape]]
    free: frozenset[str]

    def build(self, hints: Mapping[str, int], fixed: Mapping[str, int]) -> Graph:
        """Return a new graph; see `Source.build`.

        An extent that no input gives any more has no hint. It is guessed, and then has to come out of the graph again
        as the extent of the fed output.
        """
        failure: RlxError | None = None
        for guess in self._guesses({**hints, **fixed}):
            try:
                return self._tied(self.source.build({**hints, **guess}, fixed), guess)
            except (ModelError, UsageError) as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _guesses(self, hints: Mapping[str, int]) -> Iterator[dict[str, int]]:
        shapes = [shape for _, _, shape in self.inputs if shape]
        dims = [s[0] for s in shapes] + [d for s in shapes for d in s[1:]]
        values = list(dict.fromkeys([*(evaluate(d, hints) for d in dims), 1]))
        every = itertools.product(values, repeat=len(self.free))
        for chosen in itertools.islice(every, _GUESSES):
            yield dict(zip(sorted(self.free), chosen, strict=True))

    def _tied(self, graph: Graph, guess: Mapping[str, int]) -> Graph:
        for output in self.names:
            _check_output(self.source, output, graph.output_names)
        solved: dict[str, Dim] = {}
        with graph.facts.active():
            for output, name in self.names.items():
                value = graph.outputs[graph.output_names.index(output)]
                state = next(v for v in graph.inputs if v.name == name)
                self._match(graph, output, value, state, solved)
        if guess.keys() - solved.keys():
            missing = min(guess.keys() - solved.keys())
            raise UsageError(
                f"nothing gives the extent {missing} of a state of {self.source.name}; bound it with "
                f"dims={{{missing!r}: ...}}"
            )
        graph = clone_graph(graph, solved) if solved else graph
        for name in solved:
            graph.facts.hints.pop(name, None)
        self._bind(graph)
        return graph

    def _match(
        self, graph: Graph, output: str, value: Value, state: Value, solved: dict[str, Dim]
    ) -> None:
        """Check that an output fits what it feeds, and find out what free extents are."""
        feed, facts = self.rows[output], graph.facts
        what = f"output {output}: {value.type} cannot feed input {state.name}: {state.type}"
        if value.type.dtype is not state.type.dtype or value.type.rank != state.type.rank:
            raise UsageError(f"{what}: dtype and rank have to be equal")
        rows = -1 if feed is None else normalize_axis(feed.axis, state.type.rank)
        for axis, (have, want) in enumerate(zip(value.type.shape, state.type.shape, strict=True)):
            name = lone_symbol(want)
            if axis == rows:
                continue
            if name in self.free:
                found = self._solve(facts, name, have, want)
                if found is not None:
                    solved.setdefault(name, found)
                    continue
                if have == want:  # perhaps another axis or state tells
                    continue
            elif facts.assume_equal(have, want, f"axis {axis} of {what}"):
                continue
            hint = "" if feed is not None else "; rows of a cache are fed with RowFeed"
            raise UsageError(f"{what}: extents {have} and {want} of axis {axis} differ{hint}")

    def _solve(self, facts: Facts, name: str, have: Dim, want: Dim) -> Dim | None:
        """Return a free extent by those of the inputs: what it is assumed equal to, else what the output has."""
        known = {lone_symbol(d): d for _, _, shape in self.inputs for d in shape}
        equal = [known[n] for n, d in facts.equalities.items() if d == want and n in known]
        for found in (facts.canon(want), *equal, facts.canon(have)):
            if name not in symbols_of(found) and evaluate(found, facts.hints) == facts.hints[name]:
                return found
        return None

    def _bind(self, graph: Graph) -> None:
        for output, name in self.names.items():
            value = next(v for v in graph.inputs if v.name == name)
            graph.block.parameters.remove(value)
            init = np.zeros((), value.type.dtype.numpy)
            graph.make_state(name, value, init).next = self._next(graph, output, value)
        kept = zip(graph.output_names, graph.outputs, strict=True)
        graph.set_outputs({n: v for n, v in kept if n not in self.names})
        for index, value in enumerate(graph.inputs):
            value.index = index

    def _next(self, graph: Graph, output: str, state: Value) -> Value:
        from rlx.ops import building, slice_axis, write_rows

        value, feed = graph.outputs[graph.output_names.index(output)], self.rows[output]
        if feed is None:
            return value
        axis = normalize_axis(feed.axis, state.type.rank)
        position = next((v for v in graph.inputs if v.name == feed.position), None)
        if position is None:
            shape = state.type.shape[:1] if feed.per_entry else ()
            position = graph.add_input(feed.position, TensorType(DType.I64, shape))
        with building(Builder(graph.block, graph.facts)):
            if feed.row is not None:
                extent = value.type.shape[axis]
                start = feed.row if feed.row >= 0 else extent + feed.row
                value = slice_axis(value, axis, start, 1)
            return write_rows(state, value, position, axis, ring=feed.ring)


def _check_output(source: Source, output: str, known: Sequence[str]) -> None:
    if output not in known:
        raise UsageError(
            f"{source.name} has no output {output!r}; it has {', '.join(known)}."
            f"{did_you_mean(output, known)}"
        )


def _check_feeds(feeds: Any) -> None:
    if not isinstance(feeds, Mapping) or not feeds:
        raise UsageError(f"feeds are a mapping of outputs to inputs or RowFeeds, not {feeds!r}")
    for output, feed in cast("Mapping[Any, Any]", feeds).items():
        if not isinstance(output, str) or not isinstance(feed, str | RowFeed):
            raise UsageError(f"an output feeds an input by name, or a RowFeed, not {feed!r}")
