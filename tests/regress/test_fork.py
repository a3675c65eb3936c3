# SPDX-License-Identifier: Apache-2.0
"""A child made by fork runs what the parent compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

# https://github.com/microsoft/onnxruntime/pull/31961
_PROGRAM = """
import os, sys
import numpy as np
import rlx
from rlx.ops.norm import softmax

with rlx.Graph() as g:
    x = g.input("x", ["N", 64])
    g.output("y", softmax(x * 2.0))
run = rlx.compile(g, threads=2)
x = np.random.default_rng(0).standard_normal((4000, 64)).astype(np.float32)
want = run(x)
child = os.fork()
if child == 0:
    same = run(x).tobytes() == want.tobytes()
    run.close()
    del run
    sys.exit(0 if same else 3)
status = os.waitpid(child, 0)[1]
assert run(x).tobytes() == want.tobytes()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_a_child_runs_and_frees_what_the_parent_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
