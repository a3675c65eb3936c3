# SPDX-License-Identifier: Apache-2.0
"""The host as a device: buffers are memory of this process, and work is done when it is enqueued.

For backends whose kernels run on the CPU. It keeps the rules of `rlx.backends.device` by being stricter: there is no
time between enqueuing and being done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rlx.backends.device import Buffer, Event, Stream
from rlx.backends.protocol import CompiledGraph
from rlx.base.allocation import allocate
from rlx.base.dims import evaluate
from rlx.base.dtypes import DType
from rlx.base.errors import DeviceError, UsageError
from rlx.base.numeric import Array
from rlx.kernel.program import Program

__all__ = [
    "HostBuffer",
    "HostDevice",
    "HostEvent",
    "HostRecording",
    "HostStream",
    "enqueue_on_host",
    "host_buffer",
    "host_stream",
]

_ALIGNMENT = 256


class HostBuffer:
    """Bytes of this process; implements `Buffer` and `MappedBuffer`.

    Args:
        data: the bytes.
        owner: the allocation it is a range of, if it is one.
    """

    def __init__(self, data: npt.NDArray[np.uint8], owner: HostBuffer | None = None) -> None:
        self._data: npt.NDArray[np.uint8] | None = data
        self._owner = owner

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes.

        Raises:
            DeviceError: they are free.
        """
        if self._data is None or (self._owner is not None and self._owner._data is None):
            raise DeviceError("a buffer is used after it was freed")
        return self._data

    @property
    def nbytes(self) -> int:
        """How many there are."""
        return self.data.nbytes

    def range(self, offset: int, nbytes: int) -> HostBuffer:
        """Return a part of it."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise UsageError(
                f"bytes {offset} to {offset + nbytes} are not within a buffer of {self.nbytes}"
            )
        return HostBuffer(self.data[offset : offset + nbytes], self._owner or self)

    def free(self) -> None:
        """Give the memory back; arrays made by `array` keep it alive."""
        if self._owner is not None:
            raise DeviceError("a range of a buffer is freed; free the whole buffer")
        if self._data is None:
            raise DeviceError("a buffer is freed twice")
        self._data = None

    def array(self, dtype: DType, shape: Sequence[int]) -> Array:
        """Return an array over the first bytes."""
        wanted = math.prod(shape) * dtype.itemsize
        return self.range(0, wanted).data.view(dtype.numpy).reshape(shape)


class HostEvent:
    """Implements `Event`: all that was enqueued is done."""

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class HostStream:
    """Implements `Stream` and `RecordingStream`."""

    def __init__(self) -> None:
        self._recorded: list[Callable[[], None]] | None = None
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Do a piece of work, or record it."""
        self._check_open()
        if self._recorded is None:
            work()
        else:
            self._recorded.append(work)

    def upload(self, target: Buffer, source: Array) -> None:
        """Copy an array into a buffer."""
        self._copy(host_buffer(target), _bytes_of(source))

    def download(self, target: Array, source: Buffer) -> None:
        """Copy a buffer into an array."""
        if not target.flags.writeable:
            raise DeviceError("the target of a download is read-only")
        self._copy(_bytes_of(target), host_buffer(source))

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy a buffer into another."""
        into, out = host_buffer(target), host_buffer(source)
        if np.may_share_memory(into.data, out.data):
            raise DeviceError("a copy within a buffer overlaps itself")
        self._copy(into, out)

    def _copy(self, target: HostBuffer, source: HostBuffer) -> None:
        if target.nbytes != source.nbytes:
            raise DeviceError(f"a copy of {source.nbytes} bytes to {target.nbytes} bytes")
        self.submit(lambda: np.copyto(target.data, source.data))

    def record(self) -> HostEvent:
        """Return an event that has happened."""
        self._check_open()
        if self._recorded is not None:
            raise DeviceError("a stream that records work has no events")
        return HostEvent()

    def wait_for(self, event: Event) -> None:
        """Return at once: what the event stands for is done."""
        self._check_open()
        if not isinstance(event, HostEvent):
            raise DeviceError("an event of another device cannot be waited for")
        if self._recorded is not None:
            raise DeviceError("a stream that records work cannot wait for other work")

    def synchronize(self) -> None:
        """Return at once."""
        self._check_open()
        if self._recorded is not None:
            raise DeviceError("the host cannot wait for a stream while it records work")

    def close(self) -> None:
        """End the stream."""
        if not self._closed:
            self.synchronize()
            self._closed = True

    def begin_recording(self) -> None:
        """Keep what is enqueued from here on."""
        self._check_open()
        if self._recorded is not None:
            raise DeviceError("the stream records work already")
        self._recorded = []

    def end_recording(self) -> HostRecording:
        """Return what was kept."""
        self._check_open()
        if self._recorded is None:
            raise DeviceError("the stream does not record work; call begin_recording first")
        recorded, self._recorded = self._recorded, None
        return HostRecording(recorded)

    def replay(self, work: Sequence[Callable[[], None]]) -> None:
        """Do recorded work."""
        self._check_open()
        if self._recorded is not None:
            raise DeviceError("the stream records work: recordings do not nest")
        for piece in work:
            piece()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the stream is closed")


class HostRecording:
    """Implements `Recording`."""

    def __init__(self, work: Sequence[Callable[[], None]]) -> None:
        self._work: Sequence[Callable[[], None]] | None = work

    def replay(self, stream: Stream) -> None:
        """Do the work again."""
        if self._work is None:
            raise DeviceError("the recording is closed")
        host_stream(stream).replay(self._work)

    def close(self) -> None:
        """Forget the work."""
        self._work = None


class HostDevice:
    """Implements `Device`."""

    def allocate(self, nbytes: int) -> HostBuffer:
        """Return a buffer, all zeros."""
        if nbytes < 0:
            raise UsageError(f"a buffer has at least 0 bytes, not {nbytes}")
        block = allocate("a buffer", (nbytes + _ALIGNMENT,), np.dtype(np.uint8), zeros=True)
        start = -int(block.ctypes.data) % _ALIGNMENT
        return HostBuffer(block[start : start + nbytes])

    def stream(self) -> HostStream:
        """Return a new stream."""
        return HostStream()

    def close(self) -> None:
        """Return: memory goes with its buffers."""


def host_buffer(buffer: Buffer) -> HostBuffer:
    """Return a buffer that is one of the host's.

    Raises:
        DeviceError: it is another device's, or free.
    """
    if not isinstance(buffer, HostBuffer):
        raise DeviceError("a buffer of another device cannot be used here")
    _ = buffer.data
    return buffer


def host_stream(stream: Stream) -> HostStream:
    """Return a stream that is one of the host's.

    Raises:
        DeviceError: it is another device's.
    """
    if not isinstance(stream, HostStream):
        raise DeviceError("a stream of another device cannot be used here")
    return stream


def enqueue_on_host(
    compiled: CompiledGraph,
    program: Program,
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    env: Mapping[str, int],
    stream: Stream,
) -> None:
    """Do or record a run of a program whose kernels take the host's memory; see `EnqueuingGraph.enqueue`.

    Raises:
        DeviceError: a buffer is too small, or another device's.
    """
    given, slots = [*inputs, *outputs], [*program.inputs, *program.outputs]
    for position, (buffer, slot) in enumerate(zip(given, slots, strict=True)):
        wanted = evaluate(program.slots[slot].nbytes, env)
        if host_buffer(buffer).nbytes < wanted:
            raise DeviceError(
                f"buffer {position} of a run has {buffer.nbytes} bytes, the run needs {wanted} there"
            )
    buffers, extents, count = [host_buffer(b) for b in given], dict(env), len(inputs)

    def run() -> None:
        data = [b.data for b in buffers]
        compiled.run(data[:count], data[count:], extents)

    host_stream(stream).submit(run)


def _bytes_of(array: Array) -> HostBuffer:
    if not array.flags.c_contiguous:
        raise DeviceError(f"an array on the host with strides {array.strides} is not C-contiguous")
    return HostBuffer(array.reshape(-1).view(np.uint8))
