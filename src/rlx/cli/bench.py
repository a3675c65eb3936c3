# SPDX-License-Identifier: Apache-2.0
"""`rlx bench MODEL`: time a model, alone or beside other engines, one process per engine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import rlx
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.cli.arrays import write_arrays
from rlx.cli.common import console, make_inputs, parse_dims, show_table

__all__ = ["bench"]

_ENGINES = ("rlx", "onnxruntime", "openvino")


def bench(  # noqa: PLR0913, PLR0917  (every parameter is an option of the command)
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    vs: Annotated[str, typer.Option(help="Engines to compare with: onnxruntime,openvino.")] = "",
    inputs: Annotated[
        list[Path] | None, typer.Option("--input", "-i", help=".npz, or NAME.npy")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="Extent of random inputs, NAME=NUMBER.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of every engine.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Processes per engine, interleaved.")] = 3,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time per process after a second of warm-up.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of random inputs.")] = 0,
) -> None:
    """Time a model: median and spread per engine, and the largest difference of its outputs to rlx's."""
    engines = ["rlx", *(e.strip() for e in vs.split(",") if e.strip())]
    unknown = [e for e in engines if e not in _ENGINES]
    if unknown:
        raise UsageError(f"unknown engine {unknown[0]!r}; known are {', '.join(_ENGINES)}")
    if len(set(engines)) != len(engines):
        raise UsageError(f"--vs {vs}: every engine is measured once, and rlx always")
    with rlx.load(model) as loaded:
        arrays = make_inputs(loaded, inputs or [], parse_dims(dim or []), seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "inputs.npz"
        write_arrays(job, arrays)
        runs: dict[str, list[dict[str, Any]]] = {e: [] for e in engines}
        with console.status("measuring"):
            for turn in range(processes):
                for engine in engines if turn % 2 == 0 else reversed(engines):
                    output = Path(folder) / f"{engine}.npz"
                    runs[engine].append(_measure(engine, model, job, output, threads, seconds))
        rows = [_row(e, runs[e], runs["rlx"], Path(folder)) for e in engines]
    columns = (
        "engine",
        "version",
        "median ms",
        "p10 ms",
        "p90 ms",
        "time / rlx",
        "largest difference",
    )
    show_table(f"{model.name}, {threads} thread(s), {processes} processes each", columns, rows)


def _measure(
    engine: str, model: Path, job: Path, output: Path, threads: int, seconds: float
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "rlx.cli.bench_worker",
        engine,
        str(model),
        str(job),
        str(output),
    ]
    command += [str(threads), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own module)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UsageError(f"{engine} could not run {model.name}: {last[0]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _row(
    engine: str, own: list[dict[str, Any]], ours: list[dict[str, Any]], folder: Path
) -> tuple[str, ...]:
    times = sorted(t for run in own for t in run["ms"])
    median = _quantile(times, 0.5)
    base = _quantile(sorted(t for run in ours for t in run["ms"]), 0.5)
    difference = (
        "-"
        if engine == "rlx"
        else f"{_difference(folder / 'rlx.npz', folder / f'{engine}.npz'):.3g}"
    )
    faster = "-" if engine == "rlx" else f"{median / base:.2f}x"
    return (
        engine,
        own[0]["version"],
        f"{median:.3f}",
        f"{_quantile(times, 0.1):.3f}",
        f"{_quantile(times, 0.9):.3f}",
        faster,
        difference,
    )


def _quantile(ordered: list[float], fraction: float) -> float:
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def _difference(first: Path, second: Path) -> float:
    worst = 0.0
    with np.load(first, allow_pickle=False) as a, np.load(second, allow_pickle=False) as b:
        for name in a.files:
            left: Array = a[name].astype(np.float64)
            right: Array = b[name].astype(np.float64)
            if left.size:
                worst = max(worst, float(np.nanmax(np.abs(left - right))))
    return worst
