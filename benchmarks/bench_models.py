# SPDX-License-Identifier: Apache-2.0
"""Real models, rlx beside its peers.

Usage: python benchmarks/bench_models.py minilm|zoo [options]      needs the `bench` extra.

Prints one Markdown table per thread count and writes every measured run as JSON.
`minilm` is a sentence encoder at lengths 16, 128, 512 and batches 1, 8; `zoo` is every case of
`rlx.testing.zoo`. The ratio column is the best peer's median over rlx's: above 1, rlx is faster.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import common
from rlx.base.errors import RlxError
from rlx.testing import zoo

ONNX_ENGINES = ("rlx", "onnxruntime", "openvino", "openvino_static")
TORCH_ENGINES = ("torch", "torch_compile")
CAP = 3.0
"""What a single case counts at most in the first of the two means."""
SUITES = {"minilm": (*ONNX_ENGINES, *TORCH_ENGINES), "zoo": ONNX_ENGINES}


def minilm_workloads(options: common.Options) -> Iterator[common.Workload]:
    """Random token ids, nothing padded: every engine does all the work."""
    case = zoo.case("minilm_l6_fp32")
    weights = zoo.weights(case)
    random = np.random.default_rng(0)
    shapes = itertools.product(options.threads, options.batches, options.lengths)
    for threads, batch, length in shapes:
        ids = random.integers(1000, 30000, (batch, length))
        inputs = {"ids": ids, "mask": np.ones_like(ids), "type": np.zeros_like(ids)}
        yield common.Workload(
            name=f"minilm {batch} x {length}",
            model=zoo.path(case),
            inputs=inputs,
            threads=threads,
            models=dict.fromkeys(TORCH_ENGINES, weights),
        )


def zoo_workloads(options: common.Options) -> Iterator[common.Workload]:
    """The recorded inputs of each case; a case whose model cannot be had is named and left out."""
    for threads, case in itertools.product(options.threads, zoo.cases()):
        chosen = case.name in options.cases if options.cases else case.row is not None
        if not chosen:
            continue
        try:
            model = zoo.path(case)
        except RlxError as error:
            print(f"{case.name} left out: {error}", file=sys.stderr)
            continue
        inputs = zoo.golden(case)[0]
        yield common.Workload(case.name, model, inputs, threads, group=f"row {case.row}")


WORKLOADS = {"minilm": minilm_workloads, "zoo": zoo_workloads}
Rows = list[tuple[common.Workload, dict[str, common.Result]]]


def best_peer(results: Mapping[str, common.Result], reference: str) -> str | None:
    """Return the engine other than `reference` with the smallest median, or None if none ran."""
    ran = [engine for engine, result in results.items() if result.answers and engine != reference]
    return min(ran, key=lambda engine: results[engine].median(), default=None)


def row(
    workload: common.Workload, results: Mapping[str, common.Result], reference: str
) -> list[str]:
    """Return the cells of one table row."""
    times = [_milliseconds(result.median()) for result in results.values()]
    peer, ours = best_peer(results, reference), results[reference]
    ratio = "-"
    if peer is not None and ours.answers:
        value, low, high = common.ratio(results[peer], ours)
        ratio = f"**{value:.2f}** ({low:.2f}-{high:.2f})"
    differences = [
        f"{common.largest_difference(ours.outputs, result.outputs):.1e}"
        if ours.outputs and result.outputs
        else "-"
        for engine, result in results.items()
        if engine != reference
    ]
    return [workload.name, *times, peer or "-", ratio, *differences]


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.3g}"


def table(rows: Rows, engines: Sequence[str], reference: str, threads: int) -> str:
    """Return the Markdown table of all rows with that thread count, and what did not run."""
    mine = [(workload, results) for workload, results in rows if workload.threads == threads]
    header = ["model", *(f"{engine} ms" for engine in engines), "best peer"]
    header += [f"best peer / {reference} (95%)"]
    header += [f"diff to {engine}" for engine in engines if engine != reference]
    text = [f"### {threads} thread{'s' if threads > 1 else ''}", ""]
    text.append(common.markdown(header, (row(w, r, reference) for w, r in mine)))
    found = [
        (workload, (results[peer], results[reference]))
        for workload, results in mine
        if (peer := best_peer(results, reference)) is not None and results[reference].answers
    ]
    if found:
        text += ["", *_summary(*zip(*found, strict=True))]
    notes = {f"{w.name}: {e} {r.note}" for w, group in mine for e, r in group.items() if r.note}
    return "\n".join([*text, "", *(f"- {note}" for note in sorted(notes))])


def _summary(
    workloads: Sequence[common.Workload], pairs: Sequence[tuple[common.Result, common.Result]]
) -> list[str]:
    ratios = [peer.median() / ours.median() for peer, ours in pairs]
    groups = [w.group or w.name for w in workloads]
    lines: list[str] = []
    for cap in (CAP, math.inf):
        mean, low, high = common.mean_ratio(pairs, groups, cap)
        count = f"no case above {cap:g}" if cap < math.inf else "every case as it is"
        lines.append(
            f"Geometric mean of {len(set(groups))} rows, {count}: "
            f"**{mean:.2f}** ({low:.2f}-{high:.2f}).  "
        )
    ahead = sum(value > 1 for value in ratios)
    lines.append(f"Ahead in {ahead} of {len(ratios)}, the least {min(ratios):.2f}.")
    return lines


def parse(arguments: Sequence[str] | None = None) -> common.Options:
    """Read the command line."""
    parser = common.parser(__doc__, ())
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--reference", default="rlx", help="engine the others are compared with")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--cases", nargs="+", help="names of zoo cases; default: the twelve rows")
    parser.add_argument("--runs", type=int, default=30, help="least timed runs in a process")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before timing")
    parser.add_argument(
        "--jobs", type=int, default=1, help="measured at once, on CPUs of their own"
    )
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/SUITE.json")
    options = common.parse(parser, arguments)
    options.engines = options.engines or list(SUITES[options.suite])
    if options.reference not in options.engines:
        parser.error(f"--reference {options.reference} is not among the engines")
    return options


def main() -> None:
    """Measure, print the tables, write the JSON."""
    options = parse()
    plan = common.Plan(
        processes=options.processes,
        runs=options.runs,
        warmup_seconds=options.warmup,
        python=options.python,
        jobs=options.jobs,
    )
    facts = common.machine()
    workloads = list(WORKLOADS[options.suite](options))

    def show(workload: common.Workload, results: dict[str, common.Result]) -> None:
        cells = row(workload, results, options.reference)
        print(" | ".join([str(workload.threads), *cells]), file=sys.stderr)

    measured = common.measure_all(workloads, options.engines, plan, show)
    rows: Rows = list(zip(workloads, measured, strict=True))
    found = common.versions(results for _, results in rows)
    print(common.describe(facts, found) + "\n")
    for threads in options.threads:
        print(table(rows, options.engines, options.reference, threads) + "\n")
    content = {
        "machine": facts,
        "versions": found,
        "plan": {
            "processes": plan.processes,
            "runs": plan.runs,
            "warmup": plan.warmup_seconds,
            "jobs": plan.jobs,
        },
        "rows": [
            {
                "name": workload.name,
                "threads": workload.threads,
                "engines": {
                    engine: {"note": r.note, "seconds": [s.tolist() for s in r.seconds]}
                    for engine, r in results.items()
                },
            }
            for workload, results in rows
        ],
    }
    default = common.HERE / "results" / f"{options.suite}.json"
    common.write_json(options.json or default, content)


if __name__ == "__main__":
    main()
