# SPDX-License-Identifier: Apache-2.0
"""Runs the lowering of a graph by hand: chunks of launches are called through ctypes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.abi import CTX, Emitted
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.jit import Library, compile_all
from rlx.backends.cpu.lowerer import CpuLowerer
from rlx.base.dims import evaluate
from rlx.base.numeric import Array
from rlx.ir.graph import Graph
from rlx.kernel.program import DimArg, Program, SlotArg, SlotKind, ThunkKind
from rlx.kernel.schedule import schedule

_NO_ERROR = (1 << 63) - 1
_SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _guarded(nbytes: int) -> Array:
    """Return bytes that end where no access is allowed: touching what follows ends the process."""
    size = -(-nbytes // _PAGE) * _PAGE
    block = np.frombuffer(mmap.mmap(-1, size + _PAGE), np.uint8)
    assert _LIBC.mprotect(block.ctypes.data + size, _PAGE, 0) == 0
    out = block[size - nbytes : size]
    out[:] = 0xFF  # as floats NaN: shows what is read before it is written
    return out


class LoweredGraph:
    """A graph lowered once; `run` computes it in two ways of splitting chunks that must agree."""

    def __init__(self, graph: Graph, isa: Isa) -> None:
        self.graph = graph
        with graph.facts.active():
            self.program: Program = schedule(graph, CpuLowerer(isa, "error"))
        kernels: dict[str, Emitted] = {
            t.kernel.symbol: t.kernel for t in self.program.thunks if t.kind is ThunkKind.CALL
        }
        texts = (unit.text for kernel in kernels.values() for unit in kernel.units())
        objects = compile_all(texts, isa)
        self.library = Library(objects, list(kernels), isa)

    def run(
        self, inputs: Mapping[str, Array], constants: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return the outputs; all chunks at once, and one by one backwards, must agree."""
        env: dict[str, int] = {}
        for value in self.graph.inputs:
            for dim, extent in zip(value.type.shape, inputs[value.name].shape, strict=True):
                if not isinstance(dim, int) and str(dim).isidentifier():
                    env[str(dim)] = extent
        params = {n: p.data for n, p in self.graph.params.items() if p.data is not None} | dict(
            constants or {}
        )
        first = self._run(env, inputs, params, split=False)
        second = self._run(env, inputs, params, split=True)
        for name, array in first.items():
            assert array.tobytes() == second[name].tobytes(), (
                f"{name} depends on how chunks are split"
            )
        return first

    def _run(
        self,
        env: dict[str, int],
        inputs: Mapping[str, Array],
        params: Mapping[str, Array],
        *,
        split: bool,
    ) -> dict[str, Array]:
        buffers = [_guarded(evaluate(slot.nbytes, env)) for slot in self.program.slots]
        for index, value in zip(self.program.inputs, self.graph.inputs, strict=True):
            buffers[index][:] = np.frombuffer(inputs[value.name].tobytes(), np.uint8)
        for index, weight in self.program.weights.items():
            data = params[weight.name] if weight.data is None else weight.data
            buffers[index][:] = np.frombuffer(data.tobytes(), np.uint8)
        position = 0
        while position < len(self.program.thunks):
            thunk = self.program.thunks[position]
            position += 1
            if thunk.kind is ThunkKind.CALL:
                self._launch(thunk, env, buffers, split=split)
            elif thunk.kind is ThunkKind.BIND:
                target, root = (a.slot for a in thunk.args[:2] if isinstance(a, SlotArg))
                offset, factor = self._extents(thunk, env)
                buffers[target] = buffers[root][offset * factor :]
            elif thunk.kind in (ThunkKind.SET_DIM, ThunkKind.ADD_DIM):
                (counter,) = (str(a.dim) for a in thunk.args if isinstance(a, DimArg))
                before = env[counter] if thunk.kind is ThunkKind.ADD_DIM else 0
                env[counter] = before + thunk.immediate
            else:
                assert thunk.kind in (ThunkKind.JUMP, ThunkKind.JUMP_GE), thunk
                extents = self._extents(thunk, env)
                if thunk.kind is ThunkKind.JUMP or extents[0] >= extents[1]:
                    position = thunk.target
        out: dict[str, Array] = {}
        for name, value, index in zip(
            self.graph.output_names, self.graph.outputs, self.program.outputs, strict=True
        ):
            shape = tuple(evaluate(d, env) for d in value.type.shape)
            out[name] = buffers[index].view(value.type.dtype.numpy).reshape(shape)
        assert all(self.program.slots[i].kind is SlotKind.OUTPUT for i in self.program.outputs)
        return out

    @staticmethod
    def _extents(thunk: Any, env: Mapping[str, int]) -> list[int]:
        return [evaluate(a.dim, env) for a in thunk.args if isinstance(a, DimArg)]

    def _launch(
        self, thunk: Any, env: dict[str, int], buffers: list[Array], *, split: bool
    ) -> None:
        dims: list[int] = []
        args: list[int] = []
        for arg in thunk.args:
            if isinstance(arg, SlotArg):
                args.append(arg.slot)
            else:
                args.append(len(dims))
                dims.append(evaluate(arg.dim, env))
        pointers = np.array([b.ctypes.data for b in buffers], np.uint64)
        dim_table = np.array([*dims, 0], np.int64)
        arg_table = np.array(args, np.int64)
        scratch = _guarded(-(-evaluate(thunk.scratch, env) // 64) * 64)
        ctx = np.zeros(16, np.uint64)
        ctx[CTX.SLOTS], ctx[CTX.DIMS] = pointers.ctypes.data, dim_table.ctypes.data
        ctx[CTX.SCRATCH], ctx[CTX.SCRATCH_STRIDE] = scratch.ctypes.data, scratch.size
        ctx[CTX.ERROR] = _NO_ERROR
        function = _SIGNATURE(self.library.address(thunk.kernel.symbol))
        chunks = evaluate(thunk.chunks, env)
        ranges = [(i, i + 1) for i in reversed(range(chunks))] if split else [(0, chunks)]
        for begin, end in ranges:
            function(ctx.ctypes.data, arg_table.ctypes.data, begin, end, 0)
        assert ctx[CTX.ERROR] == _NO_ERROR


@pytest.fixture(scope="session")
def lower_graph() -> Callable[[Graph, Isa], LoweredGraph]:
    """Lower a graph for an instruction set; no node may need the host."""
    return LoweredGraph
