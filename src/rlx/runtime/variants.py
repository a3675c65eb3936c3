# SPDX-License-Identifier: Apache-2.0
"""The programs of one model: one for all extents, and more where an assumption does not hold or single values pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.protocol import Backend, CompileOptions
from rlx.base.errors import OutOfMemoryError, UsageError
from rlx.base.pages import give_back
from rlx.base.rng import RNG_INPUT
from rlx.base.target import Target
from rlx.runtime.cache import MAX_VARIANTS, ProgramCache
from rlx.runtime.entry import Signature
from rlx.runtime.params import Params
from rlx.runtime.program import Program, Variant
from rlx.runtime.source import Source, defaults_of, param_reader

if TYPE_CHECKING:
    from rlx.runtime.entry import Restored

__all__ = ["Maker", "Variants"]

_LOG = getLogger("rlx")


@dataclass(frozen=True)
class Maker:
    """What compiles a model, for what, and how."""

    backend: Backend
    target: Target
    options: CompileOptions


class Variants:
    """The programs that a model was compiled to, the most recently used one first.

    Not safe for several threads: the executable's lock is held.

    Args:
        source: the model.
        maker: what compiles it.
        weights: its params, which the programs read.
        changed: called when a program has come or gone: what followed from the old ones is void.
    """

    def __init__(
        self, source: Source, maker: Maker, weights: Params, changed: Callable[[], None]
    ) -> None:
        self._source = source
        self._maker = maker
        self._weights = weights
        self._changed = changed
        self._variants: list[Variant] = []

    def __len__(self) -> int:
        return len(self._variants)

    def __iter__(self) -> Iterator[Variant]:
        return iter(list(self._variants))

    @property
    def latest(self) -> Variant:
        """The one that was used last; there must be one."""
        return self._variants[0]

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, env: Mapping[str, int], *, special: bool = True) -> Variant:
        """Return what runs with these extents, compiled if need be, with the weights of this moment.

        Args:
            env: the value of every symbol.
            special: whether a program for their single values comes first.

        Raises:
            UsageError: there are as many programs as there may be, or the model cannot have these extents.
        """
        fitting = [
            v
            for v in self._variants
            if v.program.signature.fits(env) and (special or not v.program.signature.is_special)
        ]
        saved = () if self._source.saved is None else self._source.saved.special
        ranks = [s.rank for s in saved if s.fits(env)]
        if fitting:
            variant = min(fitting, key=lambda v: v.program.signature.rank)
            if variant.program.signature.rank <= min(ranks, default=variant.program.signature.rank):
                self._weights.refresh(variant.program.weights)
                if variant is not self._variants[0]:
                    # At once: their number is asked for without the lock.
                    self._variants = [variant, *(v for v in self._variants if v is not variant)]
                return variant
        general = sum(not v.program.signature.is_special for v in self._variants)
        if general >= MAX_VARIANTS and not saved:
            raise UsageError(
                f"{self._source.name} was compiled {MAX_VARIANTS} times for different assumptions about its extents; "
                f"give fixed extents with dims= (now {dict(env)})"
            )
        fixed = {name: value for name, value in env.items() if value < 1}
        variant = self.compile(env, fixed, is_call=True)
        self._weights.refresh(variant.program.weights)
        return variant

    def grow(self, variant: Variant, env: Mapping[str, int]) -> None:
        """Plan memory of a program so that it holds these extents, with room to grow if there is."""
        grown = {
            n: max(env[n], 2 * variant.uppers[n])
            for n in variant.uppers
            if env[n] > variant.uppers[n]
        }
        if grown or not variant.is_planned:
            uppers = {**variant.uppers, **grown}
            try:
                variant.program.compiled.plan(uppers)
            except OutOfMemoryError:  # room to grow is a wish
                uppers = {n: max(env[n], u) for n, u in variant.uppers.items()}
                variant.program.compiled.plan(uppers)
            # Not before the plan holds: what interrupts it leaves the old bounds.
            variant.uppers, variant.is_planned = uppers, True

    def check_room(self, fixed: Mapping[str, int]) -> None:
        """Raise a UsageError if no program for single values of extents can be added.

        Args:
            fixed: the values.
        """
        name = self._source.name
        special = [v for v in self._variants if v.program.signature.is_special]
        if self._source.saved is not None:
            raise UsageError(
                f"{name} comes from a package, which holds programs but not the model; specialize the model before it "
                "is saved"
            )
        if any(v.program.signature.fixed == fixed for v in special):
            raise UsageError(f"{name} has a program for {dict(fixed)} already")
        if len(special) >= MAX_VARIANTS:
            raise UsageError(
                f"{name} has {MAX_VARIANTS} programs for single values of extents, which is the most"
            )

    # -- coming and going --------------------------------------------------------------------------------------------

    def compile(
        self,
        env: Mapping[str, int],
        fixed: Mapping[str, int],
        *,
        is_call: bool = False,
        exact: bool = False,
    ) -> Variant:
        """Add a program, compiled or found in the cache.

        Args:
            env: the extents to begin with.
            fixed: those of them that stay what they are.
            is_call: whether the model must have these extents; else they are guesses.
            exact: whether it is for single values, which the cache does not keep.

        Raises:
            UsageError: the model cannot have these extents.
        """
        source = self._source
        uppers = {n: max(v, source.uppers.get(n, 0)) for n, v in env.items() if n not in fixed}
        program = None if exact else self._restore(env, fixed, uppers)
        if program is None:
            cache = None if exact or source.changed() else source.cache
            program = self._build(env, fixed, uppers, cache, is_call=is_call)
        variant = Variant(program, uppers)
        self._variants.insert(0, variant)
        if len(self._variants) > 1:
            guards = "; ".join(map(str, program.signature.guards)) or f"extents {dict(fixed)}"
            count = len(self._variants)
            _LOG.info("%s: compiled variant %d for %s (%s)", source.name, count, dict(env), guards)
        self._changed()
        return variant

    def _restore(
        self, env: Mapping[str, int], fixed: Mapping[str, int], uppers: Mapping[str, int]
    ) -> Program | None:
        """Return a program for these extents from the cache or the package."""
        source, started = self._source, perf_counter()
        found: Restored | None = None
        if source.saved is not None:
            found = source.saved.restore(env)
        elif source.cache is not None:
            found = source.cache.restore(env, param_reader(source.build, env, fixed))
        if found is None:
            return None
        self._weights.declare(found.params)
        bound = self._weights.bind(found.compiled, found.plan, found.derived)
        found.compiled.plan(uppers)
        seconds = {"cache": perf_counter() - started}
        return Program(found.compiled, found.signature, bound, found.report, seconds)

    def _build(
        self,
        env: Mapping[str, int],
        fixed: Mapping[str, int],
        uppers: Mapping[str, int],
        cache: ProgramCache | None,
        *,
        is_call: bool,
    ) -> Program:
        """Compile a program for these extents and keep it in a cache."""
        from rlx.runtime.compile import compile_graph

        source, maker = self._source, self._maker
        graph = source.build(env, fixed)
        broken = [g for g in graph.facts.guards if is_call and not g.holds(dict(env))]
        if broken:  # a graph built by hand keeps the assumptions it was built under
            raise UsageError(
                f"{source.name} was built assuming {broken[0]}, which {dict(env)} does not meet"
            )
        graph.facts.uppers = dict(uppers)
        params = defaults_of(graph)
        self._weights.declare(params if cache is None else cache.identified(params, source.files()))
        for param in graph.params.values():
            param.data = None
        made = compile_graph(graph, maker.backend, maker.target, maker.options)
        made.compiled.plan(uppers)
        values = zip(graph.output_names, graph.outputs, strict=True)
        outputs = [(n, v.type.dtype, v.type.shape) for n, v in values]
        names = [v.name for v in graph.inputs]
        rng = names.index(RNG_INPUT) if RNG_INPUT in names else -1
        signature = Signature(outputs, list(graph.facts.guards), dict(fixed), list(uppers), rng)
        bound = self._weights.bind(made.compiled, made.weight_plan())
        if self._weights.is_pristine:
            self._weights.refresh(bound)
            if cache is not None and not source.changed():
                cache.save(
                    made.compiled,
                    signature,
                    source.interface,
                    self._weights,
                    bound,
                    source.files(),
                    made.report,
                )
            for (
                view
            ) in source.files().values():  # what was read there is packed, or will be read again
                give_back(np.frombuffer(view, np.uint8))
        return Program(made.compiled, signature, bound, made.report, made.seconds, made.graph)

    def adopt(self, others: Variants) -> None:
        """Add programs of the same code as those of another executable, whose lock is held."""
        for variant in others:
            program = variant.program
            compiled = program.compiled.clone()
            weights = self._weights.twin(program.weights, compiled)
            twin = replace(program, compiled=compiled, weights=weights)
            self._variants.append(Variant(twin, dict(variant.uppers), is_planned=False))
        self._changed()

    def trim(self) -> None:
        """Give back memory that the next run plans again; bounds that grew begin anew."""
        for variant in self._variants:
            variant.program.compiled.trim()
            variant.is_planned = False
            variant.uppers = {n: self._source.uppers.get(n, 1) for n in variant.uppers}

    def drop(self, variant: Variant) -> None:
        """Close a program and forget it."""
        self._variants.remove(variant)
        self._changed()
        self._weights.release(variant.program.weights)
        variant.program.compiled.close()

    def clear(self) -> None:
        """Close all programs and forget them."""
        for variant in self:
            self.drop(variant)
