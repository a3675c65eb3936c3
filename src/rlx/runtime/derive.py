# SPDX-License-Identifier: Apache-2.0
"""Other programs of the same model: with other outputs, for taps of what is fused away and for bisection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UsageError
from rlx.ir.graph import Graph, Value
from rlx.runtime.taps import named_values

__all__ = ["Build", "Choose", "derived", "exposing"]

Build: TypeAlias = Callable[[Mapping[str, int], Mapping[str, int]], Graph]
"""(hints, fixed) -> a new graph; see `Source.build`."""

Choose: TypeAlias = Callable[[Graph], Mapping[str, Value]]
"""From a graph before all passes to its new outputs by name."""


def derived(build: Build, choose: Choose | None) -> Build:
    """Return how to build the same model with other outputs."""

    def changed(hints: Mapping[str, int], fixed: Mapping[str, int]) -> Graph:
        graph = build(hints, fixed)
        if choose is not None:
            graph.set_outputs(dict(choose(graph)))
        return graph

    return changed


def exposing(names: Sequence[str]) -> Choose:
    """Return a choice of the graph's own outputs and further values or nodes, each under the name given.

    The choice raises a UsageError for a name that the graph does not have.
    """

    def choose(graph: Graph) -> dict[str, Value]:
        known = named_values(graph)
        chosen = dict(zip(graph.output_names, graph.outputs, strict=True))
        for name in names:
            if name not in known:
                raise UsageError(
                    f"{graph.name} has no value or node {name!r}.{did_you_mean(name, known)} Values inside of branches "
                    "and loops cannot be exposed"
                )
            chosen[name] = known[name]
        return chosen

    return choose
