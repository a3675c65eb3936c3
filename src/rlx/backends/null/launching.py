# SPDX-License-Identifier: Apache-2.0
"""Runs of a program on the null device: one launch per thunk, with the bytes it touches.

Branches and bodies of loops are entered once each, and a view counts as the whole of what it is a view of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.backends.device import Buffer, DeviceMemory, Event, Stream
from rlx.backends.null.device import NullBuffer, NullDevice, NullStream
from rlx.backends.protocol import StateMemory
from rlx.base.dims import evaluate
from rlx.base.errors import DeviceError, UsageError
from rlx.base.numeric import Array
from rlx.kernel.program import Program, Thunk, ThunkKind
from rlx.memory.plan import Plan

__all__ = ["Launcher"]


class Launcher:
    """What a program has on a device: arena and weights, from its first run to `release`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._device: NullDevice | None = None
        self._arena: NullBuffer | None = None
        self._weights: dict[int, NullBuffer] | None = None
        self._last: Event | None = None

    def enqueue(
        self,
        plan: Plan,
        weights: Mapping[str, Array],
        states: Mapping[str, StateMemory],
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        env: Mapping[str, int],
        stream: Stream,
    ) -> None:
        """Enqueue the launches of one run."""
        if not isinstance(stream, NullStream):
            raise DeviceError(
                f"the null device has streams of its own, not {type(stream).__name__}"
            )
        if self._device not in (None, stream.device):
            raise DeviceError("the program's weights are on another opening of the null device")
        self._device = stream.device
        if self._arena is None:
            self._arena = stream.device.allocate(plan.arena)
        if self._weights is None:
            self._weights = self._upload(stream.device, weights)
        places: dict[int, Buffer] = dict(self._weights)
        for slot, offset in plan.offsets.items():
            places[slot] = self._arena.range(offset, plan.sizes[slot])
        given = (*zip(self._program.inputs, inputs, strict=True),)
        given += (*zip(self._program.outputs, outputs, strict=True),)
        for slot, buffer in given:
            places[slot] = buffer.range(0, evaluate(self._program.slots[slot].nbytes, env))
        places |= self._states(states, env)
        for thunk in self._program.thunks:
            self._launch(thunk, places, stream)
        if not stream.records:
            self._last = stream.record()

    def _states(
        self, states: Mapping[str, StateMemory], env: Mapping[str, int]
    ) -> dict[int, Buffer]:
        """Return where the slots of states lie."""
        places: dict[int, Buffer] = {}
        for slots in self._program.states:
            memory = states.get(slots.name)
            if not isinstance(memory, DeviceMemory):
                raise DeviceError(f"state {slots.name!r} has no memory on the null device")
            buffer = memory.buffer.range(0, evaluate(self._program.slots[slots.slot].nbytes, env))
            places |= dict.fromkeys((slots.slot, *slots.aliases), buffer)
        return places

    def _launch(self, thunk: Thunk, places: Mapping[int, Buffer], stream: NullStream) -> None:
        if thunk.kind is ThunkKind.CALL and thunk.chunks != 0:
            reads = [places[self._program.root(slot)] for slot in thunk.reads()]
            writes = [places[self._program.root(slot)] for slot in thunk.writes()]
            stream.launch(str(thunk.kernel), reads, writes)

    def _upload(self, device: NullDevice, params: Mapping[str, Array]) -> dict[int, NullBuffer]:
        """Return the weights in buffers of their own. The host waits, so that runs may be recorded."""
        missing = [
            w.name for w in self._program.weights.values() if w.name and w.name not in params
        ]
        if missing:
            raise UsageError(f"{self._program.name}: weights {', '.join(missing)} are not set")
        stream = device.stream()
        buffers: dict[int, NullBuffer] = {}
        for slot, weight in self._program.weights.items():
            data = params[weight.name] if weight.data is None else weight.data
            buffers[slot] = device.allocate(data.nbytes)
            stream.upload(buffers[slot], data)
        stream.close()
        return buffers

    def forget_weights(self) -> None:
        """Upload weights anew at the next run."""
        self._wait()
        for buffer in (self._weights or {}).values():
            buffer.free()
        self._weights = None

    def release(self) -> None:
        """Give everything back once the last run that was not recorded is done."""
        self.forget_weights()
        if self._arena is not None:
            self._arena.free()
        self._arena = self._device = None

    def _wait(self) -> None:
        if self._last is not None:
            self._last.wait()
            self._last = None
