# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run goes: per kernel launch, node and operator, as a table, JSON or a trace.

Native code writes the clock after every kernel, so Python is not between the measured intervals. What the program does
around them (binding arrays, control flow, coming back for signals) is the row `outside`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Literal

from rlx.backends.protocol import Span, WatchableGraph
from rlx.base.dims import Dim, evaluate
from rlx.base.errors import UsageError
from rlx.kernel.program import NodeInfo, Program, Thunk

__all__ = ["Profile", "Row", "measure"]

_NO_NODE = NodeInfo("the program")
By = Literal["thunk", "node", "op"]


@dataclass(frozen=True)
class Row:
    """One line of a profile. Numbers are per run.

    Attributes:
        name: of the launch, node or operator.
        op: the operator; for several of them, how many.
        nodes: names of the model's nodes whose work it is.
        kernel: the kernel's symbol; for several of them, how many.
        calls: kernel launches; a node may take several.
        ns: nanoseconds, the median over the runs.
        share: of the median run's time, 0 to 1.
        nbytes: of operands and results, each counted once per call.
        flops: floating-point operations; None where nobody counted.
        threads: most threads that could take part.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    kernel: str
    calls: float
    ns: float
    share: float
    nbytes: int
    flops: int | None
    threads: int

    @property
    def gbytes_per_second(self) -> float:
        """How fast operands and results were moved, in 1e9 bytes per second."""
        return self.nbytes / self.ns if self.ns else 0.0

    @property
    def gflops(self) -> float | None:
        """Speed in 1e9 operations per second."""
        return self.flops / self.ns if self.flops is not None and self.ns else None


@dataclass(frozen=True)
class Profile:
    """The times of some runs of one program.

    Attributes:
        model: its name.
        device: what ran it.
        threads: most threads of a run.
        extents: the values of the symbols.
        runs: (began, ended) of every run in nanoseconds.
        spans: what ran in it, per run.
        program: the thunks that the spans number.
    """

    model: str
    device: str
    threads: int
    extents: Mapping[str, int]
    runs: Sequence[tuple[int, int]]
    spans: Sequence[Sequence[Span]]
    program: Program

    @property
    def ns(self) -> float:
        """Nanoseconds of the median run."""
        return median(ended - began for began, ended in self.runs)

    @property
    def outside(self) -> float:
        """Nanoseconds of the median run outside of kernels and host operators."""
        return median(
            ended - began - sum(s.ended - s.began for s in spans)
            for (began, ended), spans in zip(self.runs, self.spans, strict=True)
        )

    def rows(self, by: By = "node") -> list[Row]:
        """Return the table, the slowest first.

        Args:
            by: what a row stands for: a `thunk` (one launch in the schedule), a `node` (all its launches), or an `op`
                (all nodes of that operator).

        Raises:
            UsageError: `by` is something else.
        """
        keys: dict[str, Callable[[int, NodeInfo], Any]] = {
            "thunk": lambda index, _: index,
            "node": lambda _, node: id(node),  # equal descriptions may be of several nodes
            "op": lambda _, node: node.op,
        }
        if by not in keys:
            raise UsageError(f"a profile is by 'thunk', 'node' or 'op', not {by!r}")
        thunks = self.program.thunks
        groups: dict[Any, list[int]] = {}
        for index in sorted(self._counts):
            key = keys[by](index, thunks[index].node or _NO_NODE)
            groups.setdefault(key, []).append(index)
        rows = [self._row(by, members) for members in groups.values()]
        return sorted(rows, key=lambda r: -r.ns)

    def _row(self, by: By, members: Sequence[int]) -> Row:
        thunks = [self.program.thunks[i] for i in members]
        nodes = list(dict.fromkeys(t.node or _NO_NODE for t in thunks))
        ops = list(dict.fromkeys(n.op for n in nodes))
        kernels = list(dict.fromkeys(str(t.kernel or "host") for t in thunks))
        calls = {i: self._counts[i] / len(self.runs) for i in members}
        ns = median(sum(times.get(i, 0) for i in members) for times in self._times)
        first = nodes[0].names[0] if nodes[0].names else nodes[0].op
        names = {"thunk": f"{members[0]} {first}", "node": first, "op": ops[0]}
        return Row(
            name=names[by],
            op=_some(ops, "operators"),
            nodes=tuple(dict.fromkeys(n for node in nodes for n in node.names)),
            kernel=_some(kernels, "kernels"),
            calls=sum(calls.values()),
            ns=ns,
            share=ns / self.ns,
            nbytes=round(
                sum(self._nbytes(t) * calls[i] for i, t in zip(members, thunks, strict=True))
            ),
            flops=self._flops(members, calls, whole=by != "thunk"),
            threads=max(self._participants(t) for t in thunks),
        )

    @cached_property
    def _counts(self) -> Counter[int]:
        """How often each thunk ran, in all runs together."""
        return Counter(s.thunk for spans in self.spans for s in spans)

    @cached_property
    def _times(self) -> list[dict[int, int]]:
        """Per run the nanoseconds of every thunk."""
        found: list[dict[int, int]] = []
        for spans in self.spans:
            times: dict[int, int] = {}
            for span in spans:
                times[span.thunk] = times.get(span.thunk, 0) + span.ended - span.began
            found.append(times)
        return found

    @cached_property
    def _launches(self) -> Counter[int]:
        """How many kernel launches every node has in the schedule, by its identity."""
        return Counter(id(t.node) for t in self.program.thunks if t.kernel is not None)

    def _at(self, dim: Dim) -> int | None:
        try:
            return evaluate(dim, self.extents)
        except KeyError:  # it changes during a run
            return None

    def _nbytes(self, thunk: Thunk) -> int:
        slots = {*thunk.reads(), *thunk.writes()}
        return sum(self._at(self.program.slots[s].nbytes) or 0 for s in slots)

    def _participants(self, thunk: Thunk) -> int:
        chunks = self._at(thunk.chunks)
        return max(1, min(self.threads, chunks if chunks is not None else self.threads))

    def _flops(
        self, members: Sequence[int], calls: Mapping[int, float], *, whole: bool
    ) -> int | None:
        """Return the operations of the nodes, once per execution; of a launch only if it is all of its node."""
        counts: dict[int, tuple[Dim, float]] = {}
        for index in members:
            node = self.program.thunks[index].node
            if node is None or node.flops is None or (not whole and self._launches[id(node)] > 1):
                return None
            known = counts.get(id(node), (node.flops, 0.0))[1]
            counts[id(node)] = node.flops, max(known, calls[index])
        total = 0.0
        for flops, count in counts.values():
            once = self._at(flops)
            if once is None:
                return None
            total += once * count
        return round(total)

    # -- output ------------------------------------------------------------------------------------------------------

    def text(self, by: By = "node", top: int = 20) -> str:
        """Return the slowest rows as a table for people."""
        rows = self.rows(by)
        head = ("us", "%", "calls", "GB/s", "GFLOP/s", "thr", "operator", by)
        lines = [head, *(_cells(r, listed=by != "op") for r in rows[:top])]
        rest = rows[top:]
        if rest:
            ns = sum(r.ns for r in rest)
            lines.append((_us(ns), _percent(ns / self.ns), "", "", "", "", "", f"{len(rest)} more"))
        outside = self.outside
        lines.append(
            (_us(outside), _percent(outside / self.ns), "", "", "", "", "", "outside of kernels")
        )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = [
            "  ".join(
                cell.ljust(width) if i > 5 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        extents = ", ".join(f"{n}={v}" for n, v in self.extents.items() if not n.startswith("_"))
        title = (
            f"{self.model} on {self.device}, {self.threads} thread(s){f', {extents}' if extents else ''}: "
            f"{self.ns / 1e6:.3f} ms a run (median of {len(self.runs)})"
        )
        return "\n".join([title, *table])

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> dict[str, Any]:
        """Return everything but the single spans, for programs."""
        return {
            "model": self.model,
            "device": self.device,
            "threads": self.threads,
            "extents": dict(self.extents),
            "runs": len(self.runs),
            "ns": self.ns,
            "outside_ns": self.outside,
            **{f"by_{by}": [_row_data(r) for r in self.rows(by)] for by in ("thunk", "node", "op")},
        }

    def trace(self) -> dict[str, Any]:
        """Return the runs as a trace in the Chrome format, which ui.perfetto.dev and chrome://tracing open."""
        events: list[dict[str, Any]] = [
            _named("process_name", 0, f"rlx: {self.model}"),
            _named("thread_name", 1, "runs"),
            _named("thread_name", 2, f"kernels on {self.device}"),
        ]
        origin = self.runs[0][0]
        for number, ((began, ended), spans) in enumerate(zip(self.runs, self.spans, strict=True)):
            events.append(_event(f"run {number}", "run", 1, (began, ended), origin, {}))
            for span in spans:
                thunk = self.program.thunks[span.thunk]
                node = thunk.node or _NO_NODE
                detail = {
                    "thunk": span.thunk,
                    "kernel": str(thunk.kernel or "host"),
                    "operands": node.operands,
                    "node": node.location,
                    "nodes": list(node.names),
                    "bytes": self._nbytes(thunk),
                }
                name = node.names[0] if node.names else node.op
                events.append(
                    _event(
                        f"{node.op} {name}", node.op, 2, (span.began, span.ended), origin, detail
                    )
                )
        other = {"model": self.model, "device": self.device, "threads": str(self.threads)}
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

    def save_trace(self, path: str | Path) -> None:
        """Write the trace to a `.json` file for ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")


def measure(
    compiled: WatchableGraph, run: Callable[[], None], runs: int, warmup: int
) -> tuple[list[tuple[int, int]], list[list[Span]]]:
    """Run some times; return when each run began and ended, and what ran in it.

    Raises:
        UsageError: the numbers of runs make no sense.
    """
    if runs < 1 or warmup < 0:
        raise UsageError(
            f"a profile takes at least 1 run and 0 to warm up, not {runs} and {warmup}"
        )
    for _ in range(warmup):
        run()
    times: list[tuple[int, int]] = []
    with compiled.watched(timed=True) as spans:
        for _ in range(runs):
            began = perf_counter_ns()
            run()
            times.append((began, perf_counter_ns()))
    parts: list[list[Span]] = [[] for _ in times]
    position = 0
    for span in spans:
        while span.began > times[position][1]:
            position += 1
        parts[position].append(span)
    return times, parts


def _some(items: Sequence[str], what: str) -> str:
    return items[0] if len(items) == 1 else f"{len(items)} {what}"


def _row_data(row: Row) -> dict[str, Any]:
    speeds = {"gbytes_per_second": row.gbytes_per_second, "gflops": row.gflops}
    return {**asdict(row), "nodes": list(row.nodes), **speeds}


def _us(ns: float) -> str:
    return f"{ns / 1e3:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _cells(row: Row, *, listed: bool) -> tuple[str, ...]:
    more = row.nodes[1:] if listed else ()
    rest = f" (with {_listed(more)})" if more else ""
    return (
        _us(row.ns),
        _percent(row.share),
        f"{row.calls:g}",
        f"{row.gbytes_per_second:.1f}",
        "" if row.gflops is None else f"{row.gflops:.1f}",
        str(row.threads),
        row.op,
        f"{row.name}{rest}",
    )


def _listed(names: Iterable[str], most: int = 3) -> str:
    known = list(names)
    more = f", {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}


def _event(
    name: str,
    category: str,
    thread: int,
    times: tuple[int, int],
    origin: int,
    detail: dict[str, Any],
) -> dict[str, Any]:
    """Return a complete event; times are microseconds."""
    began, ended = times
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": (began - origin) / 1e3,
        "dur": (ended - began) / 1e3,
        "pid": 1,
        "tid": thread,
        "args": detail,
    }
