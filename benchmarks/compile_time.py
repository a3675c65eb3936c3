# SPDX-License-Identifier: Apache-2.0
"""How compile time grows: a generated graph of matmuls, elementwise chains and norms over 64 distinct shapes.

Usage: python benchmarks/compile_time.py [NODES ...]      (default: 5000 20000)

Prints per size: seconds in passes, in the backend and in memory planning, the number of distinct kernels, and the
arena beside its lower bound. The scalars are random, so a compiler that puts values into code shows it here.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from rlx.backends.protocol import CompileOptions
from rlx.backends.registry import get_backend
from rlx.base.dtypes import DType
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.memory.plan import plan_memory
from rlx.ops.elementwise import add, gelu, mul, relu, sigmoid
from rlx.ops.leaf import constant
from rlx.ops.matmul import matmul
from rlx.ops.norm import LayerNorm, Softmax
from rlx.ops.spec import building, emit_one
from rlx.runtime.compile import compile_graph


def generate(nodes: int, seed: int = 0) -> Graph:
    """Return a graph of about `nodes` nodes: 64 towers of different width that take turns."""
    rng = np.random.default_rng(seed)
    graph = Graph(f"generated{nodes}")
    widths = [16 + 4 * i for i in range(64)]
    towers: list[Value] = [graph.add_input(f"x{w}", TensorType(DType.F32, (8, w))) for w in widths]
    with building(Builder(graph.block, graph.facts)):
        count = 0
        while count < nodes:
            at = int(rng.integers(64))
            x, width = towers[at], widths[at]
            match int(rng.integers(4)):
                case 0:
                    data = (rng.standard_normal((width, width)) / width).astype(np.float32)
                    w = graph.add_param(f"w{count}", data, TensorType(DType.F32, (width, width)))
                    y = relu(add(matmul(x, w), constant(float(rng.standard_normal()))))
                    count += 4
                case 1:
                    y = mul(sigmoid(add(x, constant(float(rng.standard_normal())))), x)
                    count += 4
                case 2:
                    y = add(gelu(x), mul(x, constant(float(rng.standard_normal()))))
                    count += 4
                case _:
                    y = emit_one(LayerNorm(-1, 1e-5), add(x, emit_one(Softmax(-1), x)), None, None)
                    count += 3
            towers[at] = y
    graph.set_outputs({f"y{w}": t for w, t in zip(widths, towers, strict=True)})
    return graph


def measure(nodes: int) -> dict[str, float | int]:
    """Compile one generated graph and return what it took."""
    backend = get_backend("cpu")
    graph = generate(nodes)
    total = len(graph.block.nodes())
    started = time.perf_counter()
    program = compile_graph(graph, backend, backend.targets()[0], CompileOptions(threads=1))
    compiled = time.perf_counter()
    plan = plan_memory(program.compiled.program, {})  # pyright: ignore[reportAttributeAccessIssue]
    planned = time.perf_counter()
    thunks = program.compiled.program.thunks  # pyright: ignore[reportAttributeAccessIssue]
    kernels = {t.kernel for t in thunks if t.kernel is not None}
    return {
        "nodes": total,
        "thunks": len(thunks),
        "kernels": len(kernels),
        "passes_seconds": round(program.seconds["passes"], 2),
        "backend_seconds": round(program.seconds["backend"], 2),
        "total_seconds": round(compiled - started, 2),
        "plan_seconds": round(planned - compiled, 3),
        "arena_over_lower_bound": round(plan.arena / max(plan.lower_bound, 1), 4),
    }


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["5000", "20000"]:
        print(json.dumps(measure(int(argument))), flush=True)
