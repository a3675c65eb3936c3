# SPDX-License-Identifier: Apache-2.0
"""How much memory a loaded model holds that no other process can share.

Usage: python benchmarks/memory.py [--cases NAME ...] [--engines ...]

Growth of the process's anonymous resident memory over what it was after the library's import.
Weights that stay mapped from the model file do not count; copies and packed weights do. Linux only.
"""

from __future__ import annotations

import numpy as np

import common
from rlx.testing import zoo

CASES = ("minilm_l3_fp32_b4", "minilm_l6_int8_b4", "ddddocr_crnn_fp32", "mobilenet_v2")
MARKS = ("load", "first run", "20 more runs")


def growth(result: common.Result) -> list[str]:
    """Return MiB over the mark before load, per later mark; medians over processes."""
    if not result.answers:
        return ["-"] * len(MARKS)
    marks = np.median([answer["anonymous"] for answer in result.answers], axis=0)
    return [f"{(mark - marks[0]) / 2**20:.1f}" for mark in marks[1:]]


def main() -> None:
    """Measure and print the table."""
    parser = common.parser(__doc__, ("rlx", "onnxruntime", "openvino"))
    parser.add_argument("--cases", nargs="+", default=CASES, help="cases of the zoo")
    options = common.parse(parser)
    plan = common.Plan(kind="memory", processes=options.processes, python=options.python)
    groups, rows = [], []
    for case in map(zoo.case, options.cases):
        model = zoo.path(case)
        workload = common.Workload(case.name, model, zoo.golden(case)[0], threads=1)
        groups.append(common.measure(workload, options.engines, plan))
        size = f"{model.stat().st_size / 2**20:.1f}"
        rows += [[case.name, size, e, *growth(r), r.note or "-"] for e, r in groups[-1].items()]
    print(common.describe(common.machine(), common.versions(groups)) + "\n")
    header = ["model", "file MiB", "engine", *(f"after {mark} MiB" for mark in MARKS), "note"]
    print(common.markdown(header, rows))


if __name__ == "__main__":
    main()
