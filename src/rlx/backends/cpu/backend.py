# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: LLVM IR compiled in this process, run by one native dispatcher over a thunk table."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.backends.cpu.claims import cpu_claims
from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.protocol import CompiledGraph, CompileOptions
from rlx.base import config
from rlx.base.errors import DeviceError
from rlx.base.store import Store, default_store
from rlx.base.target import Claims, Target
from rlx.ir.graph import Graph

__all__ = ["CpuBackend"]


class _Objects:
    """The disk store as the compiler's object cache."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, key: str) -> bytes | None:
        found = self._store.get("object", key)
        return None if found is None else bytes(found)

    def put(self, key: str, data: bytes) -> None:
        self._store.put("object", key, data)


class CpuBackend:
    """Compiles for the instruction set of this machine (or the level `RLX_CPU_ISA` restricts it to)."""

    name = "cpu"

    def targets(self) -> Sequence[Target]:
        """Return this machine, or nothing where it lacks the baseline."""
        try:
            isa = host_isa()
        except DeviceError:
            return ()
        from rlx.backends.cpu.quota import available_cpus

        text = f"{platform.machine()} {isa.name}, {available_cpus()} CPUs"
        return (Target("cpu", isa.triple, isa.features, text),)

    def claims(self, target: Target) -> Claims:
        """Return what has kernels here."""
        del target
        return cpu_claims(self._isa())

    def passes(self, target: Target) -> Sequence[Any]:
        """Return the weight packing passes."""
        del target
        from rlx.backends.cpu.passes import cpu_passes

        return cpu_passes(self._isa())

    def compile(self, graph: Graph, target: Target, options: CompileOptions) -> CompiledGraph:
        """Schedule, build and link a graph."""
        del target
        from rlx.backends.cpu.abi import Emitted
        from rlx.backends.cpu.jit import compile_all
        from rlx.backends.cpu.lowerer import CpuLowerer
        from rlx.backends.cpu.program import CpuProgram
        from rlx.backends.cpu.quota import available_cpus
        from rlx.kernel.schedule import schedule

        isa = self._isa()
        lowerer = CpuLowerer(isa, options.host_ops)
        with graph.facts.active():
            program = schedule(graph, lowerer)
        store = default_store()
        cache = None if store is None else _Objects(store)
        kernels: dict[str, str] = {}
        for thunk in program.thunks:
            if isinstance(thunk.kernel, Emitted):
                kernels[thunk.kernel.symbol] = thunk.kernel.text
                thunk.kernel = thunk.kernel.symbol
        objects = compile_all(kernels.values(), isa, cache)
        threads = options.threads or config.THREADS.get() or available_cpus()
        report = [(name, how, count) for (name, how), count in sorted(lowerer.dispatch.items())]
        return CpuProgram(program, objects, isa, threads, report, cache)

    def describe(self, target: Target) -> Mapping[str, Any]:
        """Return the instruction set, caches and LLVM version."""
        import llvmlite.binding as llvm

        isa = self._isa()
        version = ".".join(map(str, llvm.llvm_version_info))
        features = " ".join(sorted(target.features))
        return {
            "isa": isa.name,
            "llvm": version,
            "caches": (isa.l1d, isa.l2, isa.l3),
            "features": features,
        }

    @staticmethod
    def _isa() -> Isa:
        return host_isa()
