# SPDX-License-Identifier: Apache-2.0
"""Does memory come back? Resident memory over many compile-run-close cycles, and over many different extents.

Usage: python benchmarks/leaks.py [--cycles 10000] [--shapes 10000] [--leak BYTES]

Each part warms up for a tenth of its rounds and then compares the resident memory of the process (the mean over a tenth
of the rounds) at the end with that at the start; more than 2 % is a leak and ends with exit status 1. `--leak` leaves
so many bytes behind per round, to see that a leak would be found. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rlx
from rlx.ops.matmul import matmul
from rlx.ops.norm import softmax

LIMIT = 0.02
"""Growth of resident memory that counts as none."""
LONGEST = 12_000
"""Rows of the largest call: its memory is there from the start, so that only what is kept per shape can grow."""
_WEIGHTS = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def resident() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def model() -> rlx.Executable:
    """Return a freshly compiled model with a packed weight, a plain one, and two kernels."""
    with rlx.Graph("leaks") as g:
        x = g.input("x", ["N", 64])
        w, b = g.param("w", _WEIGHTS), g.param("b", _WEIGHTS[0])
        g.output("y", softmax(matmul(x, w) + b))
    return rlx.compile(g)


def cycle(_: int) -> None:
    """Compile, run, clone, set a weight, run, close."""
    run = model()
    x = np.ones((3, 64), np.float32)
    run(x)
    twin = run.clone()
    twin.set_param("w", _WEIGHTS)
    twin(x)
    run.close()
    twin.close()


def shapes() -> Callable[[int], None]:
    """Return a function that runs one model on the extent of a round, each a different one."""
    run = model()
    run(np.ones((LONGEST, 64), np.float32))
    data = np.ones((LONGEST, 64), np.float32)
    order = np.random.default_rng(1).permutation(LONGEST) + 1

    def call(index: int) -> None:
        run(data[: order[index % LONGEST]])

    return call


def growth(name: str, work: Callable[[int], None], rounds: int, leak: int) -> float:
    """Return the relative growth of resident memory over the rounds after a warm-up, and print it."""
    kept: list[bytearray] = []
    part, marks = max(rounds // 10, 1), list[int]()
    began = time.perf_counter()
    for index in range(rounds + part):
        work(index)
        if leak:
            kept.append(bytearray(leak))
        if index >= part and index % max(part // 10, 1) == 0:
            marks.append(resident())
    tenth = max(len(marks) // 10, 1)
    first, last = (sum(m) / len(m) for m in (marks[:tenth], marks[-tenth:]))
    seconds = time.perf_counter() - began
    grown = last / first - 1
    print(
        f"{name}: {rounds} rounds in {seconds:.0f} s, resident {first / 2**20:.1f} MiB, then {last / 2**20:.1f} MiB: "
        f"{grown:+.2%}"
    )
    return grown


def main() -> None:
    """Measure and print; exit status 1 if memory grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=10_000)
    parser.add_argument("--leak", type=int, default=0)
    options = parser.parse_args()
    found: list[float] = []
    if options.cycles:
        found.append(growth("compile, run, close", cycle, options.cycles, options.leak))
    if options.shapes:
        found.append(growth("different extents", shapes(), options.shapes, options.leak))
    sys.exit(any(f > LIMIT for f in found))


if __name__ == "__main__":
    main()
