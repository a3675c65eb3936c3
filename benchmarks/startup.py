# SPDX-License-Identifier: Apache-2.0
"""How long until the first result: import, cold start, warm start.

Usage: python benchmarks/startup.py [--case NAME] [--engines ...] [--processes 9]

`import` is the library's import once NumPy is in. A cold start begins with an empty cache folder
(rlx's on-disk cache; other engines have none by default), a warm start with the one that a cold
start left. A package is what `Executable.save` wrote, opened with the cache folder of a warm start.
Medians over processes, model files in the page cache, Python files compiled (one process that is
not counted sees to both). For rlx the sums are compared with what the project promises: an import
of 40 ms, a cold start of 2 s, a warm start of 250 ms, a package opened in 50 ms and its first
result after 150 ms.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import common
import rlx
from rlx.base.config import CACHE_DIR
from rlx.testing import zoo

PROMISES = {
    "import": 0.040,
    "cold start": 2.0,
    "warm start": 0.250,
    "package open": 0.050,
    "package start": 0.150,
}
"""Seconds; a start is load (or open) plus first run."""


def measure_starts(
    workload: common.Workload, options: common.Options
) -> tuple[dict[str, common.Result], dict[str, common.Result], common.Result, Mapping[str, int]]:
    """Return the answers, and the bytes rlx cached by kind.

    They are those of cold starts, of the warm starts that follow them, and of rlx from a package.
    """
    cold = {engine: common.Result() for engine in options.engines}
    packaged = {"rlx": common.Result()}
    warm = {engine: common.Result() for engine in options.engines}
    cached: Mapping[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="rlx-bench-bytecode-") as bytecode:
        package = save_package(workload, Path(bytecode))
        for number in range(options.processes + 1):
            with tempfile.TemporaryDirectory(prefix="rlx-bench-cache-") as folder:
                environment = {
                    CACHE_DIR.name: folder,
                    "PYTHONDONTWRITEBYTECODE": "",
                    "PYTHONPYCACHEPREFIX": bytecode,
                }
                plan = common.Plan(
                    kind="startup", processes=1, python=options.python, environment=environment
                )
                for results in (cold, warm):
                    new = common.measure(workload, options.engines, plan)
                    if number:
                        _merge(results, new)
                if "rlx" in options.engines:
                    new = common.measure(package, ["rlx"], plan)
                    if number:
                        _merge(packaged, new)
                cached = _sizes(Path(folder))
    return cold, warm, packaged["rlx"], cached


def save_package(workload: common.Workload, folder: Path) -> common.Workload:
    """Return the same workload from a package in a folder."""
    path = folder / "model.rlxp"
    with rlx.load(workload.model, threads=workload.threads) as model:
        model.run(workload.inputs)
        model.save(path)
    return replace(workload, models={"rlx": path})


def _merge(into: Mapping[str, common.Result], new: Mapping[str, common.Result]) -> None:
    for engine, result in new.items():
        into[engine].answers += result.answers
        into[engine].note = into[engine].note or result.note


def _sizes(folder: Path) -> dict[str, int]:
    kinds = sorted(p for p in (folder / "store").glob("*") if p.is_dir())
    return {k.name: sum(f.stat().st_size for f in k.rglob("*") if f.is_file()) for k in kinds}


def row(engine: str, cold: common.Result, warm: common.Result) -> Sequence[str]:
    """Return the cells of one engine."""
    numbers = [cold.median("import")]
    for result in (cold, warm):
        numbers += [result.median("load"), result.median("first_run")]
    cells = ["-" if math.isnan(n) else f"{n * 1e3:.1f}" for n in numbers]
    return [engine, *cells, cold.note or "-"]


def promises(
    cold: common.Result, warm: common.Result, packaged: common.Result
) -> list[Sequence[str]]:
    """Return what rlx promises, what was measured (the median of the sums), and whether it holds."""
    measured = {
        "import": cold.median("import"),
        "cold start": cold.median("load") + cold.median("first_run"),
        "warm start": warm.median("load") + warm.median("first_run"),
        "package open": packaged.median("load"),
        "package start": packaged.median("load") + packaged.median("first_run"),
    }
    return [
        [name, f"{limit * 1e3:.0f}", f"{measured[name] * 1e3:.1f}", str(measured[name] <= limit)]
        for name, limit in PROMISES.items()
    ]


def main() -> None:
    """Measure and print the tables."""
    parser = common.parser(__doc__, ("rlx", "onnxruntime", "openvino"), processes=9)
    parser.add_argument("--case", default="minilm_l6_int8_b4", help="a case of the zoo")
    options = common.parse(parser)
    case = zoo.case(options.case)
    workload = common.Workload(case.name, zoo.path(case), zoo.golden(case)[0], threads=1)
    cold, warm, packaged, cached = measure_starts(workload, options)
    print(common.describe(common.machine(), common.versions([cold])) + "\n")
    print(f"{case.name}, milliseconds, median of {options.processes} processes\n")
    header = ["engine", "import", "cold load", "cold first run", "warm load", "warm first run"]
    rows = [row(engine, cold[engine], warm[engine]) for engine in options.engines]
    print(common.markdown([*header, "note"], rows))
    if "rlx" in options.engines:
        rows = promises(cold["rlx"], warm["rlx"], packaged)
        print("\n" + common.markdown(["rlx", "at most", "measured", "holds"], rows))
        sizes = [[kind, f"{nbytes:,}"] for kind, nbytes in cached.items()]
        print("\n" + common.markdown(["cached", "bytes"], sizes))


if __name__ == "__main__":
    main()
