# SPDX-License-Identifier: Apache-2.0
"""What a device is: memory, streams of work, events, recorded work.

A backend whose programs run elsewhere than in the caller's thread and memory implements `DeviceBackend` beside
`rlx.backends.protocol.Backend`, and its compiled graphs `EnqueuingGraph`. Recording (`RecordingStream`) and memory that
the host sees (`MappedBuffer`) are optional.

The rules, which the `null` device checks one by one:

- Work of one stream is done in order. Work of two streams has no order but what events give it: `record` on one,
  `wait_for` on the other. Work that is enqueued comes after everything the host has waited for.
- The host knows that work is done only once it has waited: by `Event.wait`, `Stream.synchronize`, or an `Event.done`
  that was True. Until then it neither changes an array that an upload reads, nor reads one that a download writes, nor
  frees a buffer.
- Two pieces of work that touch the same bytes, one of them writing, are ordered.
- Sizes and offsets are Python ints. They exceed 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.target import Target

__all__ = [
    "Buffer",
    "Device",
    "DeviceBackend",
    "DeviceMemory",
    "EnqueuingGraph",
    "Event",
    "MappedBuffer",
    "Recording",
    "RecordingStream",
    "Stream",
]


class Buffer(Protocol):
    """Bytes on a device: an allocation, or a range of one."""

    @property
    def nbytes(self) -> int:
        """How many there are."""
        ...

    def range(self, offset: int, nbytes: int) -> Buffer:
        """Return a part of it. The bytes are the same ones, and live as long as the allocation.

        Raises:
            UsageError: the part is not within the buffer.
        """
        ...

    def free(self) -> None:
        """Give the allocation back. No work that uses it may be under way; ranges are not freed.

        Raises:
            DeviceError: this is a range, or it is free already.
        """
        ...


@runtime_checkable
class MappedBuffer(Protocol):
    """A buffer whose bytes the host sees too (unified memory). The rules of order hold for the host as well."""

    def array(self, dtype: DType, shape: Sequence[int]) -> Array:
        """Return an array over the first bytes of the buffer, without a copy."""
        ...


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Return whether the work before it is done, without waiting."""
        ...

    def wait(self) -> None:
        """Make the host wait until the work before it is done.

        Raises:
            DeviceError: some of that work failed.
        """
        ...


class Stream(Protocol):
    """Work done in order. The methods enqueue and return at once, but for `synchronize`.

    Raises:
        DeviceError: (every method) the stream is closed, a buffer is free, or the sizes differ.
    """

    def upload(self, target: Buffer, source: Array) -> None:
        """Copy a C-contiguous array of as many bytes to the device."""
        ...

    def download(self, target: Array, source: Buffer) -> None:
        """Copy as many bytes from the device into a C-contiguous, writable array."""
        ...

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy as many bytes within the device. The two may not overlap."""
        ...

    def record(self) -> Event:
        """Return the event of all that was enqueued so far."""
        ...

    def wait_for(self, event: Event) -> None:
        """Let what is enqueued from here on begin after an event of any stream of this device."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for everything enqueued; see `Event.wait`."""
        ...

    def close(self) -> None:
        """Wait for everything enqueued and end the stream."""
        ...


class Recording(Protocol):
    """Work that was recorded once and can be enqueued again at the cost of one launch.

    It holds buffers and arrays, not values: every replay reads what is in them then. They live as long as it does.
    """

    def replay(self, stream: Stream) -> None:
        """Enqueue the work on a stream, which may be another than the one it was recorded on.

        Raises:
            DeviceError: the recording is closed, the stream records itself, or a buffer is free by now.
        """
        ...

    def close(self) -> None:
        """Give its resources back; replays under way end first."""
        ...


@runtime_checkable
class RecordingStream(Protocol):
    """A stream that can record. Between the two calls nothing runs, and the host cannot wait for the stream."""

    def begin_recording(self) -> None:
        """Record what is enqueued from here on instead of doing it.

        Raises:
            DeviceError: it records already.
        """
        ...

    def end_recording(self) -> Recording:
        """Return what was recorded since `begin_recording`.

        Raises:
            DeviceError: it does not record.
        """
        ...


class Device(Protocol):
    """One device, opened."""

    def allocate(self, nbytes: int) -> Buffer:
        """Return a buffer of any content, aligned to 256 bytes.

        Raises:
            OutOfMemoryError: there is no room.
        """
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def close(self) -> None:
        """Wait for all work and give everything back."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A backend with memory and work of its own."""

    def device(self, target: Target) -> Device:
        """Open a device; every call is one more opening of it."""
        ...


class DeviceMemory:
    """The bytes of a state on a device; a `rlx.backends.protocol.StateMemory`.

    Reading and writing wait for what the stream has to do before; runs on other streams are ordered by the caller.

    Attributes:
        buffer: what kernels are given.
    """

    def __init__(self, buffer: Buffer, stream: Stream) -> None:
        self.buffer = buffer
        self._stream = stream

    def read(self, target: Array) -> None:
        """Copy the bytes into an array of as many."""
        self._stream.download(target, self.buffer)
        self._stream.synchronize()

    def write(self, source: Array) -> None:
        """Replace the bytes by those of an array of as many."""
        self._stream.upload(self.buffer, source)
        self._stream.synchronize()


@runtime_checkable
class EnqueuingGraph(Protocol):
    """A compiled graph that runs on a stream. `CompiledGraph.run` is then staging around `enqueue`.

    Its arena and weights belong to it, and every run reads and writes its states, so two runs must be ordered, on
    whatever streams they are.
    """

    def enqueue(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        env: Mapping[str, int],
        stream: Stream,
    ) -> None:
        """Enqueue one run.

        Args:
            inputs: buffers of the backend's device in the graph's order, each at least as large as its input.
            outputs: likewise, to be filled.
            env: the value of every symbol, within the planned bounds.
            stream: of that device; it may record.

        Raises:
            DeviceError: as `Stream`.
            ExecutionError: the data broke a rule of an operator, if the device knows at once; else `Event.wait` raises.
        """
        ...
