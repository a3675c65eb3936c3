# SPDX-License-Identifier: Apache-2.0
"""A short form of `benchmarks/leaks.py`, and that it would find a leak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[3] / "benchmarks" / "leaks.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments", [("--cycles=100", "--shapes=0"), ("--cycles=0", "--shapes=1500")], ids=str
)
def test_memory_does_not_grow(arguments: tuple[str, str]) -> None:
    done = _run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_leak_of_a_few_kilobytes_per_round_is_found() -> None:
    done = _run("--cycles=0", "--shapes=1500", "--leak=16384")
    assert done.returncode == 1, done.stdout + done.stderr


_BIG = """
import gc, sys, numpy as np, rlx
from pathlib import Path
from rlx.ops.matmul import matmul

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

def model(rows):
    with rlx.Graph("big") as g:
        x = g.input("x", ["N", 2048])
        w = np.ones((2048, 4096), np.float32)  # 32 MiB
        g.output("y", matmul(matmul(x, g.param("w", w)), g.param("v", w.T.copy())))
    run = rlx.compile(g, threads=1)
    run(np.ones((rows, 2048), np.float32))
    return run

model(2).close()  # what stays for good is there now
marks = [resident()]
run = model(4096)  # 64 MiB between the two products
marks.append(resident())
run.trim()
marks.append(resident())
run.close()
marks.append(resident())
print(*(round(m - marks[0]) for m in marks))
"""


def test_trim_gives_the_arena_back_and_close_everything() -> None:
    done = subprocess.run([sys.executable, "-c", _BIG], capture_output=True, text=True, check=True)
    _, used, trimmed, closed = map(int, done.stdout.split())
    assert used > 110, done.stdout  # 64 MiB of weights once, 64 MiB of arena
    assert used < 170, done.stdout
    assert used - trimmed > 50, done.stdout
    assert closed < 8, done.stdout
