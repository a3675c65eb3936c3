# SPDX-License-Identifier: Apache-2.0
"""Passes, pipelines and what they share.

A pass is a frozen dataclass; its fields are its options, which also is how the command line sets
them: ``fold,fuse-regions{rows=false}``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import PassError, RlxError, UsageError
from rlx.base.target import Claims
from rlx.ir.graph import Graph
from rlx.ir.text import print_graph
from rlx.ir.verify import verify
from rlx.passes.params import ParamProgram

__all__ = ["Entry", "Pass", "PassContext", "Pipeline", "parse_passes"]


class Pass(Protocol):
    """A transformation of a graph, in place.

    A pass may also state `requires` and `ensures`, tuples of property names: a pipeline is refused
    if a required property is not ensured by an earlier pass.
    """

    @property
    def name(self) -> str:
        """What reports, dumps and the command line call it."""
        ...

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Transform the graph; return whether anything changed.

        Raises:
            CompileError: the graph cannot be transformed.
        """
        ...


@dataclass
class PassContext:
    """What passes may know, and where they leave what they found out.

    Attributes:
        claims: what the backend takes.
        verify: check the graph after every pass.
        dump: folder that receives `NN-name.rir` after every pass; None for no dumps.
        report: why things fused or did not, one line each, in order; every line once.
        seconds: time spent by pass name.
        params: how derived weights follow from the model's own, filled by the hoisting pass.
    """

    claims: Claims = field(default_factory=Claims)
    verify: bool = False
    dump: Path | None = None
    report: list[str] = field(default_factory=list[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    params: ParamProgram = field(default_factory=ParamProgram)
    _noted: set[str] = field(default_factory=set[str], repr=False)
    _dumped: int = 0

    def note(self, name: str, text: str) -> None:
        """Add a line to the report under the name of a pass."""
        line = f"{name}: {text}"
        if line not in self._noted:
            self._noted.add(line)
            self.report.append(line)

    def finished(self, name: str, graph: Graph, seconds: float) -> None:
        """Account for a pass that ran; verify and dump the graph if that is wanted.

        Raises:
            PassError: the graph is not well formed any more.
        """
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            path = self.dump / f"{self._dumped:02d}-{name}.rir"
            path.write_text(print_graph(graph, elide_above=64), encoding="utf-8")
            self._dumped += 1
        if self.verify:
            try:
                verify(graph)
            except PassError as error:
                raise PassError(f"after pass {name}: {error}") from error


@dataclass(frozen=True)
class Entry:
    """A pass in a pipeline with the reason why it stands there."""

    step: Pass
    reason: str


@dataclass(frozen=True)
class Pipeline:
    """Passes in order.

    Raises:
        UsageError: a pass requires a property that no earlier one ensures.
    """

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        ensured: set[str] = set()
        for entry in self.entries:
            for needed in _property(entry.step, "requires"):
                if needed not in ensured:
                    raise UsageError(
                        f"pass {entry.step.name} requires {needed!r}, which no earlier pass ensures"
                    )
            ensured.update(_property(entry.step, "ensures"))

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        """Run all passes; return whether any changed the graph.

        Raises:
            CompileError: a pass failed; the message names it.
        """
        changed = False
        if ctx.verify:
            ctx.finished("input", graph, 0.0)
        for entry in self.entries:
            started = time.perf_counter()
            changed |= _run_one(entry.step, graph, ctx)
            ctx.finished(entry.step.name, graph, time.perf_counter() - started)
        return changed

    def without(self, names: Collection[str]) -> Pipeline:
        """Return the pipeline without the passes of these names."""
        return Pipeline(tuple(e for e in self.entries if e.step.name not in names))

    def __iter__(self) -> Iterator[Pass]:
        return (entry.step for entry in self.entries)

    def __str__(self) -> str:
        return ",".join(_show(step) for step in self)


def _property(step: Pass, which: str) -> Sequence[str]:
    return getattr(step, which, ())


def _run_one(step: Pass, graph: Graph, ctx: PassContext) -> bool:
    try:
        return step.run(graph, ctx)
    except RlxError as error:
        error.add_note(f"in pass {step.name}")
        raise


def _options(step: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, default) of the options of a pass."""
    for option in dataclasses.fields(step):
        if option.init:
            yield option.name, getattr(step, option.name, option.default), option.default


def _show(step: Pass) -> str:
    given = [f"{n}={str(v).lower()}" for n, v, default in _options(step) if v != default]
    return f"{step.name}{{{','.join(given)}}}" if given else step.name


def parse_passes(text: str, known: Mapping[str, type[Any]]) -> Pipeline:
    """Return the pipeline that a text such as ``fold,fuse-regions{rows=false}`` describes.

    Args:
        text: pass names separated by commas, options in braces.
        known: pass classes by name.

    Raises:
        UsageError: unknown pass or option, or a value of the wrong type.
    """
    entries: list[Entry] = []
    for name, options in _split(text):
        if name not in known:
            raise UsageError(
                f"unknown pass {name!r}.{did_you_mean(name, known)} "
                f"Known: {', '.join(sorted(known))}"
            )
        entries.append(Entry(_make(known[name], options), "asked for"))
    return Pipeline(tuple(entries))


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text between the braces) for every pass named."""
    rest = text.strip()
    while rest:
        end = min((i for i in (rest.find(","), rest.find("{")) if i >= 0), default=len(rest))
        name, options, rest = rest[:end].strip(), "", rest[end:]
        if rest.startswith("{"):
            options, closed, rest = rest[1:].partition("}")
            if not closed:
                raise UsageError(f"missing '}}' after the options of pass {name!r} in {text!r}")
            rest = rest.strip()
        if rest and not rest.startswith(","):
            raise UsageError(f"expected ',' before {rest!r} in {text!r}")
        rest = rest[1:].strip()
        yield name, options


_WORDS: Mapping[str, bool] = {"true": True, "false": False}


def _make(cls: type[Any], text: str) -> Pass:
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in fields:
            raise UsageError(f"pass {cls.name} has no option {name!r}.{did_you_mean(name, fields)}")
        kind = cast("type[Any]", type(fields[name].default))
        try:
            options[name] = _WORDS[value] if kind is bool else kind(value)
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"option {name} of pass {cls.name} is a {kind.__name__}, not {value!r}"
            ) from error
    return cls(**options)
