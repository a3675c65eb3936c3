# SPDX-License-Identifier: Apache-2.0
"""How much memory several processes take that run one model at the same time.

Usage: python benchmarks/sharing.py [--case NAME] [--processes 4] [--modes ...] [--python PATH]

All processes load the model and run it, and are measured while all of them are alive: the proportional set size (pages
that several processes share count in parts, so the sum over processes is what the machine gives), and the unique set
size (pages that nobody else has). Linux only.

    nothing       rlx and its compiler are imported, no model is loaded
    package       rlx.open of a package: weights are pages of its file
    cache         rlx.load, with the packed weights in rlx's cache on disk
    no cache      rlx.load, every process packs for itself
    onnxruntime   ONNX Runtime on its defaults, in the Python of --python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MODES = ("nothing", "package", "cache", "no cache", "onnxruntime")


def child(mode: str, model: str, inputs: str) -> None:
    """Load and run, say so, and stay until standard input ends."""
    with np.load(inputs) as archive:
        arrays = {name: archive[name] for name in archive.files}
    kept: Any = None
    if mode == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        kept = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        kept.run(None, arrays)
    else:
        import llvmlite.binding  # noqa: F401  (what a process with rlx has anyway)

        import rlx

        if mode != "nothing":
            kept = (rlx.open if mode == "package" else rlx.load)(model, threads=1)
            kept.run(arrays)
    print("ready", flush=True)
    sys.stdin.read()


def memory(process: int) -> dict[str, int]:
    """Return PSS, USS and RSS of a process in bytes."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"pss": found["Pss"], "uss": private, "rss": found["Rss"]}


def measure(
    mode: str, files: tuple[Path, Path], count: int, folder: Path, python: str
) -> list[dict[str, int]]:
    """Return the memory of so many processes that are alive together; none if the mode is not available.

    Args:
        mode: one of `MODES`.
        files: the model and its inputs.
        count: of processes.
        folder: of the cache.
        python: the interpreter.
    """
    environment = {**os.environ, "RLX_CACHE_DIR": str(folder)}
    if mode == "no cache":
        environment["RLX_CACHE"] = "off"
    command = [python, __file__, "--child", mode, *map(str, files)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        for _ in range(count)
    ]
    try:
        ready = [p.stdout.readline() for p in processes if p.stdout is not None]
        return [memory(p.pid) for p in processes] if all(ready) else []
    finally:
        for process in processes:
            process.communicate()


def main() -> None:
    """Measure and print the table."""
    import common  # not in the processes that are measured
    import rlx
    from rlx.testing import zoo

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", default="minilm_l6_int8_b4", help="a case of the zoo")
    parser.add_argument("--model", type=Path, help="an ONNX file instead, with --inputs")
    parser.add_argument("--inputs", type=Path, help="an .npz of its inputs")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--python", default=sys.executable, help="the Python with other libraries")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    options = parser.parse_args()
    case = zoo.case(options.case)
    model = options.model or zoo.path(case)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="rlx-bench-") as name:
        folder, inputs = Path(name), options.inputs or Path(name, "inputs.npz")
        if options.inputs is None:
            np.savez(inputs, **zoo.golden(case)[0])
        with np.load(inputs) as archive:
            arrays = {n: archive[n] for n in archive.files}
        sizes = prepare(model, arrays, folder)
        for mode in options.modes:
            path = folder / "model.rlxp" if mode == "package" else model
            python = options.python if mode == "onnxruntime" else sys.executable
            found = measure(mode, (path, inputs), options.processes, folder, python)
            rows.append([mode, *row(found)])
    print(common.describe(common.machine(), {"rlx": rlx.__version__}) + "\n")
    print(
        f"{model.name}, {options.processes} processes, weights as kernels read them {mib(sizes)}; MiB\n"
    )
    print(common.markdown(["mode", "PSS of all", "PSS each", "USS each", "RSS each"], rows))


def prepare(model: Path, arrays: dict[str, Any], folder: Path) -> int:
    """Fill the cache and write the package, in a process of its own; return the bytes of weights."""
    inputs = folder / "arrays.npz"
    np.savez(inputs, **arrays)
    code = (
        "import sys, numpy as np, rlx, json\n"
        "with np.load(sys.argv[2]) as a: arrays = dict(a)\n"
        "m = rlx.load(sys.argv[1], threads=1)\n"
        "m.run(arrays)\n"
        "m.save(sys.argv[3])\n"
        "print(json.dumps(m.memory().weights))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(inputs), str(folder / "model.rlxp")],
        env={**os.environ, "RLX_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(json.loads(done.stdout))


def row(found: list[dict[str, int]]) -> list[str]:
    """Return the cells of one mode."""
    if not found:
        return ["-"] * 4
    total = sum(f["pss"] for f in found)
    means = [sum(f[k] for f in found) / len(found) for k in ("pss", "uss", "rss")]
    return [mib(total), *map(mib, means)]


def mib(nbytes: float) -> str:
    """Return bytes as MiB."""
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:5])
    else:
        main()
