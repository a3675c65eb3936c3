# SPDX-License-Identifier: Apache-2.0
"""From a graph to a compiled graph: passes, param-only work, the backend."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.backends.protocol import Backend, CompiledGraph, CompileOptions
from rlx.base.config import VERIFY
from rlx.base.target import Claims, Target
from rlx.ir.graph import Graph
from rlx.passes.dce import Dce
from rlx.passes.fold import Fold
from rlx.passes.hoist import Hoist, ParamProgram
from rlx.passes.lift import LiftParamWork
from rlx.passes.manager import Entry, PassContext, Pipeline
from rlx.passes.pipelines import default_pipeline
from rlx.runtime.recipes import make_recipes, part
from rlx.runtime.weight_plan import WeightPlan

__all__ = ["Compiled", "compile_graph"]

_PACKED_GROWTH = 256
"""A packed layout may pad a narrow matrix to a whole panel."""


@dataclass
class Compiled:
    """A graph after all passes, and what the backend made of it.

    Attributes:
        graph: after all passes; its params are what the kernels read (derived params included).
        param_program: how derived params follow from the model's own.
        compiled: the backend's part.
        report: why things fused or did not, by pass.
        seconds: how long each stage took.
    """

    graph: Graph
    param_program: ParamProgram
    compiled: CompiledGraph
    report: list[str] = field(default_factory=list[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def weight_plan(self) -> WeightPlan:
        """Return which weights the backend's part reads, and how the computed ones follow from the model's own."""
        program = self.param_program.graph
        derived = [n for n in self.graph.params if n in self.param_program.results]
        own = tuple(n for n in self.graph.params if n not in self.param_program.results)
        program = part(program, derived)
        return WeightPlan(own, make_recipes(program), lambda: program)


def compile_graph(
    graph: Graph, backend: Backend, target: Target, options: CompileOptions
) -> Compiled:
    """Optimise a graph for a target and compile it. The graph is consumed.

    Raises:
        CompileError: a pass or the backend failed.
        UnsupportedOpError: the backend does not run an operator of the graph.
    """
    claims: Claims = backend.claims(target)
    context = PassContext(claims=claims, verify=VERIFY.get())
    started = time.perf_counter()
    default_pipeline(claims, options.precision).without(options.skip).run(graph, context)
    own = backend.passes(target)
    if own:
        after = (
            Entry(Fold(), "small weights are constants, and so are they packed"),
            Entry(LiftParamWork(), "also what they compute from the weights of branches"),
            Entry(Hoist(growth=_PACKED_GROWTH), "what they compute from weights is computed once"),
            Entry(Dce(), "what they replaced is unread"),
        )
        Pipeline((*own, *after)).run(graph, context)
    passed = time.perf_counter()
    compiled = backend.compile(graph, target, options)
    seconds = {"passes": passed - started, "backend": time.perf_counter() - passed}
    return Compiled(graph, context.params, compiled, context.report, seconds)
