# SPDX-License-Identifier: Apache-2.0
"""Real models, rlx beside its peers.

Usage: python benchmarks/bench_models.py minilm|zoo|int8 [options]      needs the `bench` extra.

Prints one Markdown table per thread count and writes every measured run as JSON, row by row; `--resume`
goes on with a file of an interrupted run.
`minilm` is a sentence encoder at lengths 16, 128, 512 and batches 1, 8; `zoo` is every case of
`rlx.testing.zoo`; `int8` is what export_int8.py wrote. The ratio column is the best peer's median over
rlx's: above 1, rlx is faster.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import common
import export_int8
from rlx.base.errors import RlxError
from rlx.testing import zoo

ONNX_ENGINES = ("rlx", "onnxruntime", "openvino", "openvino_static")
TORCH_ENGINES = ("torch", "torch_compile")
CAP = 3.0
"""What a single case counts at most in the first of the two means."""
SUITES = {"minilm": (*ONNX_ENGINES, *TORCH_ENGINES), "zoo": ONNX_ENGINES, "int8": ONNX_ENGINES}


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


def int8_workloads(options: common.Options) -> Iterator[common.Workload]:
    """Models that ONNX Runtime quantised."""
    for threads, name in itertools.product(options.threads, export_int8.SOURCES):
        path = export_int8.path(name)
        if not path.exists():
            raise SystemExit(f"{path} is not there: run export_int8.py")
        yield common.Workload(name, path, export_int8.inputs(name), threads)


WORKLOADS = {"minilm": minilm_workloads, "zoo": zoo_workloads, "int8": int8_workloads}
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
        "-" if math.isnan(result.difference) else f"{result.difference:.1e}"
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
    text += ["", *summary(mine, reference)]
    notes = {f"{w.name}: {e} {r.note}" for w, group in mine for e, r in group.items() if r.note}
    return "\n".join([*text, "", *(f"- {note}" for note in sorted(notes))])


def summary(rows: Rows, reference: str) -> list[str]:
    """Return the means of the ratios of rows, as lines."""
    found = [
        (workload.group or workload.name, (results[peer], results[reference]))
        for workload, results in rows
        if (peer := best_peer(results, reference)) is not None and results[reference].answers
    ]
    if not found:
        return []
    groups, pairs = zip(*found, strict=True)
    ratios = [peer.median() / ours.median() for peer, ours in pairs]
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
    parser.add_argument("--resume", action="store_true", help="keep the rows that file has")
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
    path = options.json or common.HERE / "results" / f"{options.suite}.json"
    known = read(path) if options.resume and path.exists() else {}

    def keep(workload: common.Workload, results: dict[str, common.Result]) -> None:
        ours = results[options.reference].outputs
        for result in results.values():
            if ours and result.outputs:
                result.difference = common.largest_difference(ours, result.outputs)
        known[workload.name, workload.threads] = results
        print(
            " | ".join([str(workload.threads), *row(workload, results, options.reference)]),
            file=sys.stderr,
        )
        write(path, facts, plan, known)

    missing = [w for w in workloads if (w.name, w.threads) not in known]
    common.measure_all(missing, options.engines, plan, keep)
    rows: Rows = [(w, known[w.name, w.threads]) for w in workloads]
    print(common.describe(facts, common.versions(known.values())) + "\n")
    for threads in options.threads:
        print(table(rows, options.engines, options.reference, threads) + "\n")
    if len(options.threads) > 1:
        print("\n".join(["### All", "", *summary(rows, options.reference)]))


Known = dict[tuple[str, int], dict[str, common.Result]]
"""Results by name and threads of the workload."""


def write(path: Path, facts: Mapping[str, Any], plan: common.Plan, known: Known) -> None:
    """Write what is measured so far."""
    content = {
        "machine": facts,
        "plan": {
            "processes": plan.processes,
            "runs": plan.runs,
            "warmup": plan.warmup_seconds,
            "jobs": plan.jobs,
        },
        "rows": [
            {
                "name": name,
                "threads": threads,
                "engines": {
                    engine: {"note": r.note, "difference": r.difference, "answers": r.answers}
                    for engine, r in results.items()
                },
            }
            for (name, threads), results in known.items()
        ],
    }
    common.write_json(path, content)


def read(path: Path) -> Known:
    """Read what `write` wrote."""
    return {
        (entry["name"], entry["threads"]): {
            engine: common.Result(r["answers"], [], r["note"], r["difference"])
            for engine, r in entry["engines"].items()
        }
        for entry in json.loads(path.read_text())["rows"]
    }


if __name__ == "__main__":
    main()
