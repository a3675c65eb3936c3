# SPDX-License-Identifier: Apache-2.0
"""Fair side-by-side measurement: processes, statistics, and the facts a number needs beside it.

Every library runs in processes of its own (thread pools of two libraries in one process disturb
each other), the processes of the libraries alternate, so drift of the machine hits all of them, and
medians are compared. The interval of a ratio is a bootstrap over processes and over the runs inside
each.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import queue
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Options",
    "Plan",
    "Result",
    "Workload",
    "describe",
    "largest_difference",
    "machine",
    "markdown",
    "mean_ratio",
    "measure",
    "measure_all",
    "options",
    "parse",
    "parser",
    "ratio",
    "versions",
    "write_json",
]

Arrays: TypeAlias = dict[str, NDArray[Any]]
HERE = Path(__file__).parent
UNAVAILABLE = 3  # worker.UNAVAILABLE; importing the worker would import its engines


@dataclass(frozen=True)
class Workload:
    """A model on one set of inputs.

    Attributes:
        name: the row's label.
        model: the ONNX file.
        inputs: arrays by input name.
        threads: threads each library may use.
        models: engine -> another file, for engines that do not read ONNX.
        group: workloads of one group count as one in a mean; empty: it stands alone.
    """

    name: str
    model: Path
    inputs: Mapping[str, NDArray[Any]]
    threads: int
    models: Mapping[str, Path] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True)
class Plan:
    """How often to measure.

    Attributes:
        kind: what the worker measures, see worker.py.
        processes: processes per engine.
        runs: least number of timed runs in a process.
        seconds: go on until this much time has passed.
        warmup_seconds: untimed runs before.
        python: engine -> interpreter, for engines installed elsewhere.
        environment: added to the workers' environment.
        jobs: rounds measured at the same time, each on CPUs of its own.
    """

    kind: str = "time"
    processes: int = 3
    runs: int = 30
    seconds: float = 0.5
    warmup_seconds: float = 1.0
    python: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    jobs: int = 1


@dataclass
class Result:
    """What one engine did on one workload.

    Attributes:
        answers: one per process, as the worker wrote them.
        outputs: of the first process, in the model's order.
        note: why there is no answer, or "".
        difference: largest difference of its outputs to those of the engine that is compared with; NaN if none.
    """

    answers: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[NDArray[Any]] = field(default_factory=list)
    note: str = ""
    difference: float = math.nan

    @property
    def seconds(self) -> list[NDArray[Any]]:
        """Timed runs, one array per process."""
        return [np.array(answer["seconds"]) for answer in self.answers]

    def median(self, *path: str) -> float:
        """Return the median over processes of the number at `path`, or of the run times."""
        if not self.answers:
            return float("nan")
        if not path:
            return float(np.median([np.median(times) for times in self.seconds]))
        return float(np.median([answer[path[0]] for answer in self.answers]))


def measure(workload: Workload, engines: Sequence[str], plan: Plan) -> dict[str, Result]:
    """Run every engine `plan.processes` times, alternating; return what each of them answered."""
    return measure_all([workload], engines, plan)[0]


def measure_all(
    workloads: Sequence[Workload],
    engines: Sequence[str],
    plan: Plan,
    done: Callable[[Workload, dict[str, Result]], None] = lambda workload, results: None,
) -> list[dict[str, Result]]:
    """Measure several workloads, `plan.jobs` at a time; return the answers in their order.

    A round is one process of every engine on one workload, one after the other on the same CPUs.
    Rounds that run at the same time have CPUs of their own, so what they share (caches, memory,
    clock) disturbs all engines alike.

    Args:
        workloads: what to measure.
        engines: names from engines.py.
        plan: how often.
        done: called with each workload as it is finished.
    """
    all_results = [{engine: Result() for engine in engines} for _ in workloads]
    free: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for cpus in _cpu_sets(plan.jobs, max((w.threads for w in workloads), default=1)):
        free.put(cpus)
    finished = [0] * len(workloads)

    def run_round(task: tuple[int, int]) -> int:
        index, turn = task
        workload, results = workloads[index], all_results[index]
        cpus = free.get()
        try:
            with tempfile.TemporaryDirectory(prefix="rlx-bench-") as name:
                folder = Path(name)
                np.savez(folder / "inputs.npz", **dict(workload.inputs))
                # In another order every time, so that no engine always runs after the same other one.
                for engine in random.Random(f"{index} {turn}").sample(engines, len(engines)):
                    if not results[engine].note:
                        _run_worker(workload, engine, plan, cpus, folder, results[engine])
        finally:
            free.put(cpus)
        return index

    tasks = itertools.product(range(len(workloads)), range(plan.processes))
    with ThreadPoolExecutor(plan.jobs) as pool:
        for index in pool.map(run_round, tasks):
            finished[index] += 1
            if finished[index] == plan.processes:
                done(workloads[index], all_results[index])
    return all_results


def _cpu_sets(jobs: int, each: int) -> list[list[int]]:
    """Return disjoint sets of CPUs for rounds that run at the same time; one job may use all."""
    if jobs == 1:
        return [[]]
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < jobs * each:
        raise SystemExit(
            f"{jobs} jobs of {each} threads need {jobs * each} CPUs, found {len(cpus)}"
        )
    return [cpus[i * each : (i + 1) * each] for i in range(jobs)]


def _run_worker(
    workload: Workload,
    engine: str,
    plan: Plan,
    cpus: Sequence[int],
    folder: Path,
    result: Result,
) -> None:
    outputs = folder / f"{engine}.npz"
    answer = folder / "answer.json"
    request = {
        "kind": plan.kind,
        "engine": engine,
        "model": str(workload.models.get(engine, workload.model)),
        "inputs": str(folder / "inputs.npz"),
        "threads": workload.threads,
        "cpus": list(cpus),
        "runs": plan.runs,
        "seconds": plan.seconds,
        "warmup_seconds": plan.warmup_seconds,
        "outputs": "" if result.outputs else str(outputs),
        "answer": str(answer),
    }
    (folder / "request.json").write_text(json.dumps(request))
    answer.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(workload.threads), **plan.environment}
    done = subprocess.run(
        [plan.python.get(engine, sys.executable), HERE / "worker.py", folder / "request.json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        word = "not available" if done.returncode == UNAVAILABLE else "failed"
        if done.returncode < 0:
            word = f"died of {signal.Signals(-done.returncode).name}"
        result.note = f"{word}: {last}"
        return
    result.answers.append(json.loads(answer.read_text()))
    if not result.outputs and outputs.exists():
        with np.load(outputs) as arrays:
            result.outputs = [arrays[name] for name in sorted(arrays.files)]


def ratio(peer: Result, ours: Result) -> tuple[float, float, float]:
    """Return (peer median / our median, lower, upper bound of its bootstrap 95% interval)."""
    return mean_ratio([(peer, ours)], ["the only group"])


def mean_ratio(
    pairs: Sequence[tuple[Result, Result]],
    groups: Sequence[str],
    cap: float = math.inf,
    samples: int = 2000,
) -> tuple[float, float, float]:
    """Return the mean of peer median / our median with its bootstrap 95% interval.

    Args:
        pairs: (peer, ours).
        groups: of each pair; the geometric mean of every group counts once in the geometric mean.
        cap: what a single ratio counts at most.
        samples: of the bootstrap.
    """
    generator = np.random.default_rng(0)
    members = [np.flatnonzero([g == name for g in groups]) for name in dict.fromkeys(groups)]

    def mean(ratios: NDArray[Any]) -> NDArray[Any]:
        logs = np.log(np.minimum(ratios, cap))
        return np.exp(np.mean([logs[m].mean(axis=0) for m in members], axis=0))

    draws = [
        _resampled(a, generator, samples) / _resampled(b, generator, samples) for a, b in pairs
    ]
    low, high = np.percentile(mean(np.array(draws)), [2.5, 97.5])
    middle = mean(np.array([a.median() / b.median() for a, b in pairs]))
    return float(middle), float(low), float(high)


def _resampled(result: Result, generator: np.random.Generator, samples: int) -> NDArray[Any]:
    """Return medians of medians of runs drawn from every process, over processes drawn likewise."""
    processes = result.seconds
    medians = np.stack(
        [np.median(generator.choice(runs, (samples, len(runs))), axis=1) for runs in processes]
    )
    chosen = generator.integers(len(processes), size=(len(processes), samples))
    return np.median(np.take_along_axis(medians, chosen, axis=0), axis=0)


def largest_difference(a: Sequence[NDArray[Any]], b: Sequence[NDArray[Any]]) -> float:
    """Return max |a - b| over all outputs; NaN if their number or a shape differs."""
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return float("nan")
    differences = (
        np.max(np.abs(x.astype(np.float64) - y.astype(np.float64)), initial=0.0)
        for x, y in zip(a, b, strict=True)
    )
    return float(max(differences, default=0.0))


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: processor, cores, governor, system, date."""
    return {
        "processor": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _first_line(path: str) -> str:
    file = Path(path)
    return file.read_text().strip() if file.exists() else "unknown"


def _commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: first column left-aligned, the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def versions(results: Iterable[Mapping[str, Result]]) -> dict[str, str]:
    """Return engine -> version of its library, over all results."""
    return {
        engine: result.answers[0]["version"]
        for group in results
        for engine, result in group.items()
        if result.answers
    }


def describe(facts: Mapping[str, Any], found: Mapping[str, str]) -> str:
    """Return the line that stands above a table: machine, versions, commit, date."""
    libraries = ", ".join(f"{engine} {version}" for engine, version in found.items())
    return (
        f"{facts['processor']}, {facts['cores']} cores, governor {facts['governor']}, "
        f"Python {facts['python']}; {libraries}; commit {facts['commit']}, {facts['date']}"
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


class Options(argparse.Namespace):
    """The options all benchmarks share; a script's own ones are further attributes."""

    engines: list[str]
    processes: int
    python: dict[str, str]


def parser(doc: str, engines: Sequence[str], processes: int = 3) -> argparse.ArgumentParser:
    """Return a parser with the shared options; `doc` is the script's docstring."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--engines", nargs="+", default=list(engines), help="libraries to measure")
    made.add_argument("--processes", type=int, default=processes, help="per engine and workload")
    made.add_argument("--peers-python", help="interpreter that has the other libraries")
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> Options:
    """Read the command line with a parser made by `parser`."""
    found = made.parse_args(arguments, namespace=Options())
    others = [engine for engine in found.engines if engine != "rlx"]
    found.python = dict.fromkeys(others, found.peers_python) if found.peers_python else {}
    return found


def options(doc: str, engines: Sequence[str], processes: int = 3) -> Options:
    """Read the command line of a script that has only the shared options."""
    return parse(parser(doc, engines, processes))
