# SPDX-License-Identifier: Apache-2.0
"""How long until the first result: import, cold start, warm start.

Usage: python benchmarks/startup.py [--case NAME] [--engines ...] [--processes 9]

`import` is the library's import once NumPy is in. A cold start begins with an empty cache folder
(rlx's on-disk cache; other engines have none by default), a warm start with the one that a cold
start left. Medians over processes, model files in the page cache.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence

import common
from rlx.base.config import CACHE_DIR
from rlx.testing import zoo


def measure_starts(
    workload: common.Workload, options: common.Options
) -> tuple[dict[str, common.Result], dict[str, common.Result]]:
    """Return (cold, warm) answers; every cold process is followed by a warm one on its cache."""
    cold = {engine: common.Result() for engine in options.engines}
    warm = {engine: common.Result() for engine in options.engines}
    for _ in range(options.processes):
        with tempfile.TemporaryDirectory(prefix="rlx-bench-cache-") as folder:
            plan = common.Plan(
                kind="startup",
                processes=1,
                python=options.python,
                environment={CACHE_DIR.name: folder},
            )
            for results in (cold, warm):
                _merge(results, common.measure(workload, options.engines, plan))
    return cold, warm


def _merge(into: Mapping[str, common.Result], new: Mapping[str, common.Result]) -> None:
    for engine, result in new.items():
        into[engine].answers += result.answers
        into[engine].note = into[engine].note or result.note


def row(engine: str, cold: common.Result, warm: common.Result) -> Sequence[str]:
    """Return the cells of one engine."""
    numbers = [cold.median("import")]
    for result in (cold, warm):
        numbers += [result.median("load"), result.median("first_run")]
    cells = ["-" if math.isnan(n) else f"{n * 1e3:.1f}" for n in numbers]
    return [engine, *cells, cold.note or "-"]


def main() -> None:
    """Measure and print the table."""
    parser = common.parser(__doc__, ("rlx", "onnxruntime", "openvino"), processes=9)
    parser.add_argument("--case", default="minilm_l6_int8_b4", help="a case of the zoo")
    options = common.parse(parser)
    case = zoo.case(options.case)
    workload = common.Workload(case.name, zoo.path(case), zoo.golden(case)[0], threads=1)
    cold, warm = measure_starts(workload, options)
    print(common.describe(common.machine(), common.versions([cold])) + "\n")
    print(f"{case.name}, milliseconds, median of {options.processes} processes\n")
    header = ["engine", "import", "cold load", "cold first run", "warm load", "warm first run"]
    rows = [row(engine, cold[engine], warm[engine]) for engine in options.engines]
    print(common.markdown([*header, "note"], rows))


if __name__ == "__main__":
    main()
