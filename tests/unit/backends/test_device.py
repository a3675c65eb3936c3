# SPDX-License-Identifier: Apache-2.0
"""Devices by the rules of `rlx.backends.device`: those every device keeps, and the null device's checks of each."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

import rlx
from rlx.backends.device import (
    Buffer,
    Device,
    DeviceBackend,
    DeviceMemory,
    EnqueuingGraph,
    Event,
    MappedBuffer,
    RecordingStream,
    Stream,
)
from rlx.backends.null.device import NullBuffer, NullDevice, NullStream
from rlx.backends.protocol import StatefulGraph
from rlx.backends.registry import get_backend
from rlx.base.dtypes import DType
from rlx.base.errors import DeviceError, UsageError
from rlx.base.numeric import Array
from rlx.ops.matmul import matmul
from rlx.ops.norm import softmax

_GIB = 1 << 30


@pytest.fixture(params=("cpu", "null"))
def device(request: pytest.FixtureRequest) -> Device:
    backend = get_backend(request.param)
    assert isinstance(backend, DeviceBackend)
    return backend.device(backend.targets()[0])


@pytest.fixture
def null() -> NullDevice:
    return NullDevice()


def _bytes(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def _recording(stream: Stream) -> RecordingStream:
    assert isinstance(stream, RecordingStream)
    return stream


# -- every device -----------------------------------------------------------------------------------------------------


def test_bytes_go_up_across_and_down(device: Device) -> None:
    stream = device.stream()
    a, b = device.allocate(1000), device.allocate(1000)
    sent, back = _bytes(1000), np.zeros(1000, np.uint8)
    stream.upload(a, sent)
    stream.copy(b, a)
    stream.download(back, b)
    stream.synchronize()
    np.testing.assert_array_equal(back, sent)
    a.free()
    b.free()
    device.close()


def test_any_dtype_and_shape_is_bytes(device: Device) -> None:
    stream = device.stream()
    sent = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    back = np.zeros((4, 6), np.float64)
    buffer = device.allocate(sent.nbytes)
    stream.upload(buffer, sent)
    stream.download(back, buffer)
    stream.synchronize()
    np.testing.assert_array_equal(back.reshape(-1), np.arange(24))


def test_ranges_share_the_bytes_of_their_buffer(device: Device) -> None:
    stream = device.stream()
    buffer = device.allocate(100)
    stream.upload(buffer, np.zeros(100, np.uint8))
    inner = buffer.range(10, 80).range(5, 20)
    assert inner.nbytes == 20
    stream.upload(inner, np.full(20, 7, np.uint8))
    back = np.zeros(100, np.uint8)
    stream.download(back, buffer)
    stream.synchronize()
    np.testing.assert_array_equal(np.flatnonzero(back == 7), np.arange(15, 35))
    for offset, nbytes in ((-1, 5), (90, 11), (101, 0), (0, -1), (1 << 63, 1)):
        with pytest.raises(UsageError, match="not within"):
            buffer.range(offset, nbytes)
    assert buffer.range(100, 0).nbytes == 0


def test_offsets_exceed_32_bits(device: Device) -> None:
    """The pages between are never touched, so this takes no memory."""
    stream = device.stream()
    buffer = device.allocate(5 * _GIB)
    far = buffer.range(4 * _GIB + 3, 100)
    sent, back, near = _bytes(100), np.zeros(100, np.uint8), np.ones(100, np.uint8)
    stream.upload(buffer.range(3, 100), np.zeros(100, np.uint8))
    stream.upload(far, sent)
    stream.download(near, buffer.range(3, 100))
    stream.download(back, buffer.range(4 * _GIB, 5000).range(3, 100))
    stream.synchronize()
    np.testing.assert_array_equal(back, sent)
    assert not near.any(), "an offset cut to 32 bits would have landed here"


def test_sizes_must_be_equal(device: Device) -> None:
    stream = device.stream()
    buffer = device.allocate(10)
    with pytest.raises(DeviceError, match="11 bytes to 10 bytes"):
        stream.upload(buffer, np.zeros(11, np.uint8))
    with pytest.raises(DeviceError, match="10 bytes to 9 bytes"):
        stream.download(np.zeros(9, np.uint8), buffer)
    with pytest.raises(DeviceError, match="5 bytes to 10 bytes"):
        stream.copy(buffer, device.allocate(5))
    with pytest.raises(DeviceError, match="overlaps"):
        stream.copy(buffer.range(0, 6), buffer.range(4, 6))


def test_arrays_on_the_host_are_contiguous_and_writable(device: Device) -> None:
    stream = device.stream()
    buffer = device.allocate(8)
    with pytest.raises(DeviceError, match="not C-contiguous"):
        stream.upload(buffer, np.zeros((4, 4), np.uint8)[:, :2])
    fixed = np.zeros(8, np.uint8)
    fixed.flags.writeable = False
    stream.upload(buffer, fixed)
    with pytest.raises(DeviceError, match="read-only"):
        stream.download(fixed, buffer)


def test_free_is_once_and_for_whole_buffers(device: Device) -> None:
    buffer = device.allocate(10)
    part = buffer.range(2, 5)
    with pytest.raises(DeviceError, match="free the whole buffer"):
        part.free()
    buffer.free()
    with pytest.raises(DeviceError, match="freed twice"):
        buffer.free()
    for stale, nbytes in ((buffer, 10), (part, 5)):
        with pytest.raises(DeviceError, match="used after it was freed"):
            device.stream().upload(stale, np.zeros(nbytes, np.uint8))


def test_there_is_not_more_memory_than_there_is(device: Device) -> None:
    with pytest.raises(rlx.OutOfMemoryError, match="a buffer"):
        device.allocate(1 << 62)
    with pytest.raises(UsageError, match="not -1"):
        device.allocate(-1)


def test_what_belongs_to_another_device_is_refused(device: Device) -> None:
    class Strange:
        nbytes = 4

    stream = device.stream()
    with pytest.raises(DeviceError, match="another device"):
        stream.upload(cast("Buffer", Strange()), np.zeros(4, np.uint8))
    with pytest.raises(DeviceError, match="another device"):
        stream.wait_for(cast("Event", Strange()))


def test_a_closed_stream_takes_nothing(device: Device) -> None:
    stream, buffer = device.stream(), device.allocate(4)
    stream.close()
    stream.close()
    with pytest.raises(DeviceError, match="is closed"):
        stream.upload(buffer, np.zeros(4, np.uint8))


def test_events_order_streams(device: Device) -> None:
    first, second = device.stream(), device.stream()
    buffer = device.allocate(100)
    back = np.zeros(100, np.uint8)
    first.upload(buffer, _bytes(100))
    second.wait_for(first.record())
    second.download(back, buffer)
    event = second.record()
    event.wait()
    assert event.done()
    np.testing.assert_array_equal(back, _bytes(100))


def test_polling_an_event_gets_there(device: Device) -> None:
    stream, buffer = device.stream(), device.allocate(10)
    back = np.zeros(10, np.uint8)
    stream.upload(buffer, _bytes(10))
    stream.download(back, buffer)
    event = stream.record()
    polls = 0
    while not event.done():
        polls += 1
        assert polls < 100
    np.testing.assert_array_equal(back, _bytes(10))
    buffer.free()


def test_a_recording_reads_what_is_there_at_its_replay(device: Device) -> None:
    stream = device.stream()
    a, b = device.allocate(10), device.allocate(10)
    sent, back = np.zeros(10, np.uint8), np.zeros(10, np.uint8)
    _recording(stream).begin_recording()
    stream.upload(a, sent)
    stream.copy(b, a)
    stream.download(back, b)
    recording = _recording(stream).end_recording()
    assert not back.any()
    for value in (3, 5):
        sent[:] = value
        recording.replay(stream)
        stream.synchronize()
        assert (back == value).all()
    other = device.stream()
    sent[:] = 9
    recording.replay(other)
    other.synchronize()
    assert (back == 9).all()
    recording.close()
    with pytest.raises(DeviceError, match="recording is closed"):
        recording.replay(stream)


def test_recording_is_begun_ended_and_never_nested(device: Device) -> None:
    stream, buffer = device.stream(), device.allocate(4)
    recorder = _recording(stream)
    with pytest.raises(DeviceError, match="call begin_recording first"):
        recorder.end_recording()
    recorder.begin_recording()
    with pytest.raises(DeviceError, match="records work already"):
        recorder.begin_recording()
    elsewhere = device.stream().record()
    for misuse in (stream.synchronize, stream.record, lambda: stream.wait_for(elsewhere)):
        with pytest.raises(DeviceError, match="record"):
            misuse()
    stream.upload(buffer, np.zeros(4, np.uint8))
    recording = recorder.end_recording()
    recorder.begin_recording()
    with pytest.raises(DeviceError, match="do not nest"):
        recording.replay(stream)
    recorder.end_recording()
    buffer.free()
    with pytest.raises(DeviceError, match="used after it was freed"):
        recording.replay(stream)


def test_memory_of_the_host_is_mapped() -> None:
    backend = get_backend("cpu")
    assert isinstance(backend, DeviceBackend)
    buffer = backend.device(backend.targets()[0]).allocate(64)
    assert isinstance(buffer, MappedBuffer)
    view = buffer.array(DType.F32, (4, 4))
    view[:] = 1.5
    part = buffer.range(16, 16)
    assert isinstance(part, MappedBuffer)
    np.testing.assert_array_equal(part.array(DType.F32, (4,)), np.full(4, 1.5))
    with pytest.raises(UsageError, match="not within"):
        buffer.array(DType.F64, (9,))
    assert not isinstance(NullDevice().allocate(4), MappedBuffer)


# -- what the null device notices -------------------------------------------------------------------------------------


def test_two_streams_on_the_same_bytes_need_an_event(null: NullDevice) -> None:
    first, second = null.stream(), null.stream()
    buffer = null.allocate(100)
    first.upload(buffer.range(0, 50), np.zeros(50, np.uint8))
    second.upload(buffer.range(50, 50), np.zeros(50, np.uint8))  # other bytes: no order needed
    with pytest.raises(DeviceError, match=r"a download on stream \d may come before an upload"):
        second.download(np.zeros(10, np.uint8), buffer.range(45, 10))
    second.wait_for(first.record())
    second.download(np.zeros(10, np.uint8), buffer.range(45, 10))
    with pytest.raises(DeviceError, match=r"an upload .* may come before a download"):
        first.upload(buffer.range(45, 5), np.zeros(5, np.uint8))
    first.download(np.zeros(5, np.uint8), buffer.range(45, 5))  # two reads: no order needed


def test_order_passes_through_others(null: NullDevice) -> None:
    a, b, c = null.stream(), null.stream(), null.stream()
    buffer = null.allocate(10)
    a.upload(buffer, np.zeros(10, np.uint8))
    b.wait_for(a.record())
    c.wait_for(b.record())
    c.upload(buffer, np.ones(10, np.uint8))
    with pytest.raises(DeviceError, match="may come before"):
        a.upload(buffer, np.zeros(10, np.uint8))
    c.synchronize()
    a.upload(buffer, np.zeros(10, np.uint8))  # the host knows, and enqueues after it does


def test_an_event_orders_only_what_was_before_it(null: NullDevice) -> None:
    a, b = null.stream(), null.stream()
    buffer = null.allocate(10)
    event = a.record()
    a.upload(buffer, np.zeros(10, np.uint8))
    b.wait_for(event)
    with pytest.raises(DeviceError, match="may come before"):
        b.download(np.zeros(10, np.uint8), buffer)


def test_a_buffer_in_use_is_not_freed(null: NullDevice) -> None:
    stream, buffer = null.stream(), null.allocate(10)
    stream.upload(buffer, np.zeros(10, np.uint8))
    with pytest.raises(DeviceError, match=r"an upload on stream .* may still use it"):
        buffer.free()
    stream.synchronize()
    assert null.allocated == 10
    buffer.free()
    assert null.allocated == 0


def test_the_source_of_an_upload_is_left_alone_until_it_is_done(null: NullDevice) -> None:
    stream, buffer = null.stream(), null.allocate(10)
    source = np.zeros(10, np.uint8)
    stream.upload(buffer, source)
    source[3] = 1
    with pytest.raises(DeviceError, match="source of an upload was changed"):
        stream.synchronize()
    stream.upload(buffer, source)
    stream.synchronize()
    source[3] = 2


def test_a_download_is_not_there_before_the_host_has_waited(null: NullDevice) -> None:
    stream, buffer = null.stream(), null.allocate(4)
    back = np.zeros(4, np.uint8)
    stream.upload(buffer, np.full(4, 5, np.uint8))
    stream.download(back, buffer)
    assert (back == 0xFF).all()
    stream.synchronize()
    assert (back == 5).all()


def test_closing_a_device_gives_everything_back(null: NullDevice) -> None:
    null.allocate(10)
    stream = null.stream()
    stream.upload(null.allocate(3), np.zeros(3, np.uint8))
    null.close()
    assert null.allocated == 0
    assert not null.streams


# -- runs on streams --------------------------------------------------------------------------------------------------


def _model() -> rlx.Graph:
    with rlx.Graph("model") as g:
        x = g.input("x", ["N", 16])
        w = g.param("w", np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16))
        h = softmax(matmul(x, w))
        g.output("y", matmul(h, w) + 1)
    return g


def test_a_run_on_buffers_equals_a_run_on_arrays() -> None:
    m = rlx.compile(_model(), dims={"N": 8}).warmup()
    compiled = m.program.compiled
    assert isinstance(compiled, EnqueuingGraph)
    device = cast("DeviceBackend", get_backend("cpu")).device(get_backend("cpu").targets()[0])
    stream = device.stream()
    block = device.allocate(1 << 16)
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    y = np.zeros((5, 16), np.float32)
    source, target = block.range(256, x.nbytes), block.range(4096, y.nbytes)
    stream.upload(source, x)
    compiled.enqueue([source], [target], {"N": 5}, stream)
    stream.download(y, target)
    stream.synchronize()
    assert y.tobytes() == m(x).tobytes()
    with pytest.raises(DeviceError, match="buffer 0 of a run has 320 bytes, the run needs 512"):
        compiled.enqueue([source], [target], {"N": 8}, stream)


def test_a_recorded_run_computes_again_at_every_replay() -> None:
    m = rlx.compile(_model(), dims={"N": 8}).warmup()
    compiled = m.program.compiled
    assert isinstance(compiled, EnqueuingGraph)
    device = cast("DeviceBackend", get_backend("cpu")).device(get_backend("cpu").targets()[0])
    stream = device.stream()
    source, target = device.allocate(8 * 64), device.allocate(8 * 64)
    x, y = np.zeros((8, 16), np.float32), np.zeros((8, 16), np.float32)
    _recording(stream).begin_recording()
    stream.upload(source, x)
    compiled.enqueue([source], [target], {"N": 8}, stream)
    stream.download(y, target)
    recording = _recording(stream).end_recording()
    for seed in range(3):
        x[:] = np.random.default_rng(seed).standard_normal((8, 16))
        recording.replay(stream)
        stream.synchronize()
        assert y.tobytes() == m(x).tobytes()


class _NullRun:
    """A program compiled for the null device, its device, and buffers for one run."""

    def __init__(self, n: int = 8) -> None:
        self.m = rlx.compile(_model(), "null", dims={"N": 8})
        compiled = self.m.program.compiled
        assert isinstance(compiled, EnqueuingGraph)
        self.compiled = compiled
        self.device = NullDevice()
        self.n = n
        self.x, self.y = self.device.allocate(n * 64), self.device.allocate(n * 64)

    def enqueue(self, stream: NullStream, x: NullBuffer | None = None) -> None:
        self.compiled.enqueue([x or self.x], [self.y], {"N": self.n}, stream)


def test_runs_of_one_program_must_be_ordered() -> None:
    run = _NullRun()
    a, b = run.device.stream(), run.device.stream()
    run.enqueue(a)
    with pytest.raises(DeviceError, match="may come before"):
        run.enqueue(b)
    b.wait_for(a.record())
    run.enqueue(b)


def test_inputs_are_not_overwritten_while_a_run_may_read_them() -> None:
    run = _NullRun()
    compute, copies = run.device.stream(), run.device.stream()
    data = np.zeros(run.x.nbytes, np.uint8)
    copies.upload(run.x, data)
    with pytest.raises(DeviceError, match="may come before an upload"):
        run.enqueue(compute)
    compute.wait_for(copies.record())
    run.enqueue(compute)
    with pytest.raises(DeviceError, match=r"an upload on stream .* may come before matmul"):
        copies.upload(run.x, data)
    other = run.device.allocate(run.x.nbytes)
    copies.upload(other, data)  # staged: the next run's inputs have a place of their own
    compute.wait_for(copies.record())
    run.enqueue(compute, other)


def test_a_run_needs_buffers_of_its_extents_on_its_device() -> None:
    run = _NullRun()
    stream = run.device.stream()
    with pytest.raises(UsageError, match="not within"):
        run.enqueue(stream, run.device.allocate(8))
    run.enqueue(stream)
    with pytest.raises(DeviceError, match="another opening"):
        run.enqueue(NullDevice().stream())


def test_states_are_buffers_that_every_run_writes() -> None:
    with rlx.Graph("sum") as g:
        x = g.input("x", ["N"])
        total = g.state("total", ["N"])
        g.set_next(total, total + x)
    compiled = rlx.compile(g, "null", dims={"N": 8}).program.compiled
    assert isinstance(compiled, EnqueuingGraph)
    assert isinstance(compiled, StatefulGraph)
    device = NullDevice()
    a, b, x = device.stream(), device.stream(), device.allocate(32)
    with pytest.raises(DeviceError, match="state 'total' has no memory on the null device"):
        compiled.enqueue([x], [], {"N": 8}, a)
    memory = DeviceMemory(device.allocate(32), a)
    sent, back = _bytes(32), np.zeros(32, np.uint8)
    memory.write(sent)
    compiled.set_state("total", memory)
    compiled.enqueue([x], [], {"N": 8}, a)
    with pytest.raises(DeviceError, match="may come before"):
        compiled.enqueue([x], [], {"N": 8}, b)
    b.wait_for(a.record())
    compiled.enqueue([x], [], {"N": 8}, b)
    with pytest.raises(DeviceError, match="a download on stream 0 may come before copy"):
        memory.read(back)
    a.wait_for(b.record())
    memory.read(back)
    assert back.tobytes() == sent.tobytes()  # launches of the null device compute nothing
    other = NullDevice()
    compiled.set_state("total", DeviceMemory(other.allocate(32), other.stream()))
    with pytest.raises(DeviceError):
        compiled.enqueue([x], [], {"N": 8}, b)


def test_memory_of_a_program_is_given_back_after_its_last_run() -> None:
    run = _NullRun()
    before = run.device.allocated
    stream = run.device.stream()
    run.enqueue(stream)
    assert run.device.allocated > before
    run.m.close()
    assert run.device.allocated == before


def test_a_recording_from_before_a_new_plan_is_refused() -> None:
    run = _NullRun()
    stream = run.device.stream()
    stream.begin_recording()
    run.enqueue(stream)
    recording = stream.end_recording()
    recording.replay(stream)
    recording.replay(stream)
    stream.synchronize()
    run.m.program.compiled.plan({"N": 64})
    with pytest.raises(DeviceError, match="used after it was freed"):
        recording.replay(stream)
