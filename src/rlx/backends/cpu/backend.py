# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: LLVM IR compiled in this process, run by one native dispatcher over a thunk table."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.backends.device import Device
from rlx.backends.host import HostMemory
from rlx.backends.protocol import CompiledGraph, CompileOptions, SavedGraph, StateMemory
from rlx.base import config
from rlx.base.dtypes import DType
from rlx.base.errors import DeviceError
from rlx.base.store import Store, default_store
from rlx.base.target import Claims, Target

if TYPE_CHECKING:
    from rlx.backends.lanes import Lane
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
        from rlx.backends.cpu.claims import cpu_claims

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
        from rlx.kernel.schedule import schedule

        isa = self._isa()
        lowerer = CpuLowerer(isa, options.host_ops)
        with graph.facts.active():
            program = schedule(graph, lowerer)
        cache = _object_cache()
        texts: dict[str, None] = {}
        for thunk in program.thunks:
            if isinstance(thunk.kernel, Emitted):
                texts |= dict.fromkeys(unit.text for unit in thunk.kernel.units())
                thunk.kernel = thunk.kernel.symbol
        objects = compile_all(texts, isa, cache)
        report = [(name, how, count) for (name, how), count in sorted(lowerer.dispatch.items())]
        return CpuProgram(program, objects, isa, _threads(options), report, cache)

    def state_memory(self, nbytes: int, target: Target) -> StateMemory:
        """Return memory for a state, in huge pages where it fills them; what is never written is never backed."""
        del target
        from rlx.backends.cpu.buffers import huge_bytes

        return HostMemory(huge_bytes(nbytes))

    def lane(self, target: Target) -> Lane:
        """Return a lane that native code serves."""
        del target
        from rlx.backends.cpu.dispatch import native
        from rlx.backends.cpu.lane import CpuLane

        return CpuLane(native(self._isa(), _object_cache()).lane_code)

    def fingerprint(self, target: Target) -> str:
        """Return the instruction set with its cache sizes, the compiler's version, and a hash of rlx's own code."""
        del target
        import llvmlite  # without its binding, which takes 50 ms

        isa = self._isa()
        caches = (isa.l1d, isa.l2, isa.l3)  # kernels are tiled for them
        host = f"{isa.name} {isa.triple} {isa.cpu} {isa.feature_string} {caches}"
        return f"{host} llvmlite {llvmlite.__version__} code {_code()}"

    def save(self, compiled: Any) -> SavedGraph | None:
        """Return the schedule, the machine code and the constants of a program without host operators."""
        from rlx.kernel.saved import DimWriter, NotSavableError, program_to_data

        dims = DimWriter()
        try:
            program, constants = program_to_data(compiled.program, dims)
        except NotSavableError:
            return None
        data = {
            "program": program,
            "symbols": dims.symbols,
            "dispatch": compiled.dispatch,
            "objects": len(compiled.objects),
            "constants": [[DType.of(c.dtype).value, c.shape] for c in constants],
        }
        return SavedGraph(data, [*compiled.objects, *constants])

    def restore(self, saved: SavedGraph, target: Target, options: CompileOptions) -> CompiledGraph:
        """Return a saved program, linked again."""
        if any(row[0] == "host" for row in saved.data["program"]["thunks"]):
            self.passes(target)  # imports this backend's own operators, which may be among them
        from rlx.backends.cpu.program import CpuProgram
        from rlx.kernel.saved import DimReader, program_from_data

        data, count = saved.data, saved.data["objects"]
        constants = [
            np.frombuffer(blob, DType.of(dtype).numpy).reshape(shape)
            for (dtype, shape), blob in zip(data["constants"], saved.blobs[count:], strict=True)
        ]
        program = program_from_data(data["program"], constants, DimReader(data["symbols"]))
        objects = [bytes(blob) for blob in saved.blobs[:count]]
        dispatch = [(name, how, number) for name, how, number in data["dispatch"]]
        return CpuProgram(
            program, objects, self._isa(), _threads(options), dispatch, _object_cache()
        )

    def device(self, target: Target) -> Device:
        """Return the host's memory and the caller's thread."""
        del target
        from rlx.backends.host_device import HostDevice

        return HostDevice()

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


@cache
def _code() -> str:
    """Return a hash of the sources that saved programs rely on: the native ABI, the form of schedules, packed layouts.

    Two states of a checkout have one version.
    """
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*.py"), *(folder.parents[1] / "kernel").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _object_cache() -> _Objects | None:
    """Return where objects are kept; nowhere under a knob that wants to see every kernel compiled."""
    store = default_store()
    return None if store is None or config.DUMP.get() else _Objects(store)


def _threads(options: CompileOptions) -> int:
    from rlx.backends.cpu.quota import available_cpus

    return options.threads or config.THREADS.get() or available_cpus()
