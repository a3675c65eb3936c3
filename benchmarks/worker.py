# SPDX-License-Identifier: Apache-2.0
"""Measure one library on one workload, in a process of its own. Started by `common.measure`.

Usage: worker.py REQUEST.json      writes the answer to the path the request names.

What it measures (`kind`):
    time     seconds of each run after a warm-up
    startup  seconds from before the library's import to after it, after load, after the first run
    memory   anonymous memory (bytes) before load, after load, after the first run, after 20 more
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import engines

UNAVAILABLE = 3
"""Exit status for a library that is not installed here."""


def measure_time(request: dict[str, Any], inputs: engines.Arrays) -> dict[str, Any]:
    """Time single runs: at least `runs`, more until `seconds` have passed, at most 20,000."""
    run = _load(request, inputs)
    start = time.perf_counter()
    outputs = run()
    while time.perf_counter() - start < request["warmup_seconds"]:
        outputs = run()
    if request["outputs"]:
        # Positional names: an output may be called anything, also twice.
        arrays = [np.array(array) for array in outputs.values()]
        np.savez(request["outputs"], **{f"{i:04d}": a for i, a in enumerate(arrays)})
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < request["runs"] or (
        time.perf_counter() - start < request["seconds"] and len(seconds) < 20_000
    ):
        before = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - before)
    return {"seconds": seconds, "names": list(outputs)}


def measure_startup(request: dict[str, Any], inputs: engines.Arrays) -> dict[str, Any]:
    """Time the import of the library (NumPy is in), then load plus first run."""
    start = time.perf_counter()
    import_module(engines.PACKAGES.get(request["engine"], request["engine"]))
    imported = time.perf_counter()
    run = _load(request, inputs)
    loaded = time.perf_counter()
    run()
    end = time.perf_counter()
    return {"import": imported - start, "load": loaded - imported, "first_run": end - loaded}


def measure_memory(request: dict[str, Any], inputs: engines.Arrays) -> dict[str, Any]:
    """Read the process's anonymous memory as the model comes in; the library is imported before."""
    import_module(engines.PACKAGES.get(request["engine"], request["engine"]))
    marks = [anonymous_bytes()]
    run = _load(request, inputs)
    marks.append(anonymous_bytes())
    run()
    marks.append(anonymous_bytes())
    for _ in range(20):
        run()
    marks.append(anonymous_bytes())
    return {"anonymous": marks}


def anonymous_bytes() -> int:
    """Return this process's resident anonymous memory (Linux): mapped files do not count."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line `Anonymous:`")


def _load(request: dict[str, Any], inputs: engines.Arrays) -> engines.Run:
    return engines.ENGINES[request["engine"]](Path(request["model"]), inputs, request["threads"])


KINDS: dict[str, Callable[[dict[str, Any], engines.Arrays], dict[str, Any]]] = {
    "time": measure_time,
    "startup": measure_startup,
    "memory": measure_memory,
}


def main() -> int:
    """Answer the request named on the command line; return the exit status."""
    request = json.loads(Path(sys.argv[1]).read_text())
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])
    with np.load(request["inputs"]) as arrays:
        inputs = {name: arrays[name] for name in arrays.files}
    try:
        answer = KINDS[request["kind"]](request, inputs)
    except (engines.Unavailable, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    answer["version"] = engines.library_version(request["engine"])
    Path(request["answer"]).write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
