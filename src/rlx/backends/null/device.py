# SPDX-License-Identifier: Apache-2.0
"""A device that keeps books: real bytes, no kernels, an error for every broken rule of `rlx.backends.device`.

Work is done as late as the rules allow: copies take place when the host waits for them. A caller that relies on more
than the rules promise sees wrong bytes or gets an error, always and not only on a busy machine.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rlx.backends.device import Buffer, Event, Stream
from rlx.backends.null.order import Access, Ledger, Party
from rlx.base.allocation import allocate
from rlx.base.errors import DeviceError, UsageError
from rlx.base.numeric import Array

__all__ = ["NullBuffer", "NullDevice", "NullEvent", "NullRecording", "NullStream"]

_Bytes: TypeAlias = npt.NDArray[np.uint8]


class _Allocation:
    def __init__(self, device: NullDevice, nbytes: int, number: int) -> None:
        self.device = device
        self.data: _Bytes = allocate("a buffer", (nbytes,), np.dtype(np.uint8), zeros=True)
        self.ledger = Ledger()
        self.name = f"buffer {number}"
        self.is_free = False


class NullBuffer:
    """Implements `Buffer`."""

    def __init__(self, allocation: _Allocation, offset: int, nbytes: int) -> None:
        self.allocation = allocation
        self.offset = offset
        self.nbytes = nbytes

    def range(self, offset: int, nbytes: int) -> NullBuffer:
        """Return a part of it."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise UsageError(
                f"bytes {offset} to {offset + nbytes} are not within {self.allocation.name}, which has {self.nbytes}"
            )
        return NullBuffer(self.allocation, self.offset + offset, nbytes)

    def free(self) -> None:
        """Give the allocation back."""
        allocation = self.allocation
        if allocation.is_free:
            raise DeviceError(f"{allocation.name} is freed twice")
        if self.nbytes != allocation.data.nbytes:
            raise DeviceError(f"a range of {allocation.name} is freed; free the whole buffer")
        pending = allocation.ledger.pending(allocation.device.host)
        if pending is not None:
            raise DeviceError(
                f"{allocation.name} is freed while {pending.what} on {pending.party.name} may still use it; "
                f"wait for that first"
            )
        allocation.is_free = True
        allocation.data = np.empty(0, np.uint8)
        allocation.device.forget(allocation)

    @property
    def data(self) -> _Bytes:
        """The bytes, as they are once all work that was waited for is done."""
        return self.allocation.data[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True)
class _Work:
    """One piece of work: what it touches, and what it does when its time has come."""

    what: str
    reads: Sequence[NullBuffer] = ()
    writes: Sequence[NullBuffer] = ()
    act: Callable[[], None] | None = None


class NullEvent:
    """Implements `Event`."""

    def __init__(self, stream: NullStream, position: int) -> None:
        self.stream = stream
        self.position = position
        self.known = dict(stream.party.known)

    def done(self) -> bool:
        """Do one piece of the work and return whether it was the last; so polling gets there."""
        if self.stream.ended < self.position:
            self.stream.advance()
        if self.stream.ended < self.position:
            return False
        self.stream.device.host.learn(self.known)
        return True

    def wait(self) -> None:
        """Do the work, and let the host know."""
        self.stream.check_waitable()
        self.stream.run_until(self.position)
        self.stream.device.host.learn(self.known)


class NullStream:
    """Implements `Stream` and `RecordingStream`."""

    def __init__(self, device: NullDevice, number: int) -> None:
        self.device = device
        self.party = Party(f"stream {number}")
        self.ended = 0
        self._work: list[Callable[[], None]] = []
        self._recorded: list[Callable[[], _Work]] | None = None
        self._closed = False

    @property
    def records(self) -> bool:
        """Whether it records work instead of doing it."""
        return self._recorded is not None

    # -- work --------------------------------------------------------------------------------------------------------

    def upload(self, target: Buffer, source: Array) -> None:
        """Copy an array to the device, when the stream gets there."""
        into, data = self._own(target), _host_bytes(source)
        _check_sizes(into.nbytes, data.nbytes)

        def work() -> _Work:
            told = zlib.crc32(data.data)

            def act() -> None:
                if zlib.crc32(data.data) != told:
                    raise DeviceError(
                        "the source of an upload was changed before the stream had passed it; wait for an event first"
                    )
                into.data[:] = data

            return _Work("an upload", writes=(into,), act=act)

        self._enqueue(work)

    def download(self, target: Array, source: Buffer) -> None:
        """Copy bytes into an array, when the stream gets there; until then it holds 0xFF."""
        out, data = self._own(source), _host_bytes(target)
        _check_sizes(data.nbytes, out.nbytes)
        if not target.flags.writeable:
            raise DeviceError("the target of a download is read-only")

        def work() -> _Work:
            data[:] = 0xFF

            def act() -> None:
                data[:] = out.data

            return _Work("a download", reads=(out,), act=act)

        self._enqueue(work)

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy bytes within the device."""
        into, out = self._own(target), self._own(source)
        _check_sizes(into.nbytes, out.nbytes)
        if into.allocation is out.allocation and abs(into.offset - out.offset) < into.nbytes:
            raise DeviceError(f"a copy within {into.allocation.name} overlaps itself")

        def act() -> None:
            into.data[:] = out.data

        self._enqueue(lambda: _Work("a copy", (out,), (into,), act))

    def launch(self, what: str, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """Enter a kernel in the books; it computes nothing."""
        work = _Work(what, [self._own(b) for b in reads], [self._own(b) for b in writes])
        self._enqueue(lambda: work)

    # -- order -------------------------------------------------------------------------------------------------------

    def record(self) -> NullEvent:
        """Return the event of what was enqueued so far."""
        self._check_open()
        if self._recorded is not None:
            raise DeviceError(f"{self.party.name} records work: events of it are not supported")
        self.party.learn(self.device.host.known)
        return NullEvent(self, self.ended + len(self._work))

    def wait_for(self, event: Event) -> None:
        """Order what comes after an event."""
        self._check_open()
        if not isinstance(event, NullEvent) or event.stream.device is not self.device:
            raise DeviceError("an event of another device cannot be waited for")
        if self._recorded is not None:
            raise DeviceError(f"{self.party.name} records work: it cannot wait for other work")
        self._work.append(lambda: event.stream.run_until(event.position))
        self.party.learn(event.known)

    def synchronize(self) -> None:
        """Do all the work, and let the host know."""
        self._check_open()
        self.check_waitable()
        self.record().wait()

    def close(self) -> None:
        """Do all the work and end the stream."""
        if not self._closed:
            self.synchronize()
            self._closed = True
            self.device.streams.remove(self)

    def check_waitable(self) -> None:
        """Raise while the stream records."""
        if self._recorded is not None:
            raise DeviceError(f"the host cannot wait for {self.party.name} while it records work")

    def advance(self) -> None:
        """Do the next piece of work."""
        work = self._work.pop(0)
        self.ended += 1
        work()

    def run_until(self, position: int) -> None:
        """Do the work up to a position."""
        while self.ended < position:
            self.advance()

    # -- recording ---------------------------------------------------------------------------------------------------

    def begin_recording(self) -> None:
        """Keep what is enqueued from here on."""
        self._check_open()
        if self._recorded is not None:
            raise DeviceError(f"{self.party.name} records work already")
        self._recorded = []

    def end_recording(self) -> NullRecording:
        """Return what was kept."""
        self._check_open()
        if self._recorded is None:
            raise DeviceError(f"{self.party.name} does not record work; call begin_recording first")
        recorded, self._recorded = self._recorded, None
        return NullRecording(self.device, recorded)

    def replay(self, recorded: Sequence[Callable[[], _Work]]) -> None:
        """Enqueue recorded work."""
        self._check_open()
        if self._recorded is not None:
            raise DeviceError(f"{self.party.name} records work: recordings do not nest")
        for work in recorded:
            self._enqueue(work)

    # -- checks ------------------------------------------------------------------------------------------------------

    def _enqueue(self, make: Callable[[], _Work]) -> None:
        self._check_open()
        if self._recorded is not None:
            self._recorded.append(make)
            return
        work = make()
        self.party.learn(self.device.host.known)
        step = self.party.step()
        for buffers, writes in ((work.reads, False), (work.writes, True)):
            for buffer in buffers:
                self._check_live(buffer)
                start, stop = buffer.offset, buffer.offset + buffer.nbytes
                buffer.allocation.ledger.enter(
                    Access(start, stop, writes, self.party, step, work.what)
                )
        self._work.append(work.act or _nothing)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"{self.party.name} is closed")

    def _own(self, buffer: Buffer) -> NullBuffer:
        if not isinstance(buffer, NullBuffer) or buffer.allocation.device is not self.device:
            raise DeviceError("a buffer of another device cannot be used here")
        self._check_live(buffer)
        return buffer

    @staticmethod
    def _check_live(buffer: NullBuffer) -> None:
        if buffer.allocation.is_free:
            raise DeviceError(f"{buffer.allocation.name} is used after it was freed")


class NullRecording:
    """Implements `Recording`."""

    def __init__(self, device: NullDevice, work: Sequence[Callable[[], _Work]]) -> None:
        self._device = device
        self._work = work
        self._closed = False

    def replay(self, stream: Stream) -> None:
        """Enqueue the work again, with all checks."""
        if self._closed:
            raise DeviceError("the recording is closed")
        if not isinstance(stream, NullStream) or stream.device is not self._device:
            raise DeviceError("a recording is replayed on a stream of its own device")
        stream.replay(self._work)

    def close(self) -> None:
        """Forget the work."""
        self._closed = True
        self._work = ()


class NullDevice:
    """Implements `Device`.

    Attributes:
        host: the party of whoever calls.
        streams: those that are open.
    """

    def __init__(self) -> None:
        self.host = Party("the host")
        self.streams: list[NullStream] = []
        self._live: set[_Allocation] = set()
        self._numbers = itertools.count()

    @property
    def allocated(self) -> int:
        """Bytes in buffers that are not free."""
        return sum(a.data.nbytes for a in self._live)

    def allocate(self, nbytes: int) -> NullBuffer:
        """Return a buffer."""
        if nbytes < 0:
            raise UsageError(f"a buffer has at least 0 bytes, not {nbytes}")
        allocation = _Allocation(self, nbytes, next(self._numbers))
        self._live.add(allocation)
        return NullBuffer(allocation, 0, nbytes)

    def stream(self) -> NullStream:
        """Return a new stream."""
        self.streams.append(NullStream(self, next(self._numbers)))
        return self.streams[-1]

    def forget(self, allocation: _Allocation) -> None:
        """Take an allocation that was freed off the books."""
        self._live.remove(allocation)

    def close(self) -> None:
        """Do all work and give everything back."""
        for stream in list(self.streams):
            stream.close()
        for allocation in list(self._live):
            NullBuffer(allocation, 0, allocation.data.nbytes).free()


def _nothing() -> None:
    """What a kernel computes here."""


def _host_bytes(array: Array) -> _Bytes:
    if not array.flags.c_contiguous:
        raise DeviceError(f"an array on the host with strides {array.strides} is not C-contiguous")
    return array.reshape(-1).view(np.uint8)


def _check_sizes(target: int, source: int) -> None:
    if target != source:
        raise DeviceError(f"a copy of {source} bytes to {target} bytes")
