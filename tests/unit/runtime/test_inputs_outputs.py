# SPDX-License-Identifier: Apache-2.0
"""What one call of `run` takes and where its results go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.dlpack import dlpack
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.ops.elementwise import cast, div, equal, where
from rlx.ops.movement import concat, reshape, slice_axis, transpose


@pytest.fixture(params=("reference", "cpu"))
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _two() -> rlx.Graph:
    with rlx.Graph("two") as g:
        a, b = g.input("a", ["N", 3]), g.input("b", ["N", 3])
        g.output("sum", a + b)
        g.output("difference", a - b)
        g.output("product", a * b)
    return g


def _data(n: int = 2) -> dict[str, Array]:
    a = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
    return {"a": a, "b": a + 10}


def _empty(n: int = 2) -> Array:
    return np.full((n, 3), np.nan, np.float32)


# -- inputs by position --------------------------------------------------------------------------------------------


def test_inputs_by_position_are_those_by_name(device: str) -> None:
    m = rlx.compile(_two(), device)
    named, placed = m.run(_data()), m.run(list(_data().values()))
    assert list(named) == list(placed) == ["sum", "difference", "product"]
    for name, value in named.items():
        np.testing.assert_array_equal(value, placed[name])
    with pytest.raises(rlx.UsageError, match=r"two takes 2 input\(s\) \(.*\), not 3"):
        m.run([*_data().values(), _empty()])
    with pytest.raises(rlx.UsageError, match="in a dict, or all of them in a list, not a ndarray"):
        m.run(_data()["a"])  # pyright: ignore[reportArgumentType]


# -- some outputs ---------------------------------------------------------------------------------------------------


def test_some_outputs_come_in_the_order_asked_for(device: str) -> None:
    m = rlx.compile(_two(), device)
    want = m.run(_data())
    found = m.run(_data(), ["product", "sum"])
    assert list(found) == ["product", "sum"]
    for name, value in found.items():
        np.testing.assert_array_equal(value, want[name])
        assert value.flags.owndata
    assert m.run(_data(), []) == {}


def test_an_output_handed_out_survives_calls_that_do_not_ask_for_it(device: str) -> None:
    m = rlx.compile(_two(), device)
    kept = m.run(_data(), ["sum"])["sum"]
    before = kept.copy()
    m.run(_data(5), ["product"])
    m.run({"a": _data()["b"], "b": _data()["b"]}, ["product"])
    np.testing.assert_array_equal(kept, before)


def test_an_unknown_output_suggests_the_closest(device: str) -> None:
    m = rlx.compile(_two(), device)
    with pytest.raises(
        rlx.UsageError, match=r"'prodct'\. Did you mean 'product'\?.*sum: f32\[N,3\]"
    ):
        m.run(_data(), ["prodct"])
    with pytest.raises(rlx.UsageError, match="'sum' is asked for twice"):
        m.run(_data(), ["sum", "sum"])
    with pytest.raises(rlx.UsageError, match=r"a list of names: outputs=\['sum'\]"):
        m.run(_data(), "sum")


# -- the caller's buffers ---------------------------------------------------------------------------------------------


def test_results_are_written_into_the_callers_buffers(device: str) -> None:
    m = rlx.compile(_two(), device)
    want = m.run(_data())
    buffers = {"product": _empty(), "sum": _empty()}
    found = m.run(_data(), out=buffers)
    assert list(found) == ["sum", "difference", "product"]
    for name, value in found.items():
        np.testing.assert_array_equal(value, want[name])
        assert (value is buffers.get(name)) == (name in buffers)
    listed = [None, _empty(), None]
    found = m.run(_data(), out=listed)
    assert found["difference"] is listed[1]
    picked = m.run(_data(), ["product"], [buffers["product"]])
    assert picked == {"product": buffers["product"]}


def test_a_buffer_of_another_library_is_written_and_returned(device: str) -> None:
    m = rlx.compile(_two(), device)

    class Tensor:
        def __init__(self) -> None:
            self.memory = _empty()

        def __dlpack__(self, **options: Any) -> Any:
            return self.memory.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.memory.__dlpack_device__()

    tensor = Tensor()
    assert m.run(_data(), out={"sum": tensor})["sum"] is tensor
    np.testing.assert_array_equal(tensor.memory, _data()["a"] + _data()["b"])


def _unwritable() -> Array:
    array = _empty()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            {"sum": _empty(3)},
            r"output sum: f32\[N,3\] has shape \[3, 3\], this call gives \[2, 3\]",
        ),
        ({"sum": np.empty((2, 3))}, "has dtype float64 instead of float32"),
        ({"sum": np.empty((3, 2), np.float32).T}, "must be C-contiguous"),
        ({"sum": _unwritable()}, "is read-only"),
        ({"sum": [[0.0] * 3] * 2}, "is a list"),
        ({"sun": _empty()}, "'sun', which is no output of this call. Did you mean 'sum'"),
        ([_empty()], r"out has 1 buffers for 3 outputs \(sum, difference, product\)"),
        (_empty(), "a dict by name or a list"),
    ],
)
def test_a_buffer_that_cannot_take_its_output_is_refused(
    out: Any, message: str, device: str
) -> None:
    m = rlx.compile(_two(), device)
    with pytest.raises(rlx.UsageError, match=message):
        m.run(_data(), out=out)
    np.testing.assert_array_equal(m.run(_data())["sum"], _data()["a"] + _data()["b"])


def test_a_buffer_for_an_output_that_is_not_returned_is_refused(device: str) -> None:
    m = rlx.compile(_two(), device)
    with pytest.raises(rlx.UsageError, match="'sum', which is no output of this call"):
        m.run(_data(), ["product"], {"sum": _empty()})


def test_memory_that_is_read_or_written_for_something_else_is_refused(device: str) -> None:
    m = rlx.compile(_two(), device)
    block = np.zeros((6, 3), np.float32)
    inputs = {"a": block[:2], "b": _data()["b"]}
    with pytest.raises(rlx.UsageError, match="output 'sum' and input 'a' share memory"):
        m.run(inputs, out={"sum": block[:2]})
    with pytest.raises(rlx.UsageError, match="share memory"):
        m.run(inputs, out={"sum": block[1:3]})
    with pytest.raises(rlx.UsageError, match="share memory"):
        m.run(_data(), out={"sum": block[:2], "product": block[1:3]})
    with pytest.raises(rlx.UsageError, match="share memory"):  # also around one between them
        m.run({"a": block[2:4], "b": block[2:4]}, out={"sum": block[:2], "product": block[1:3]})
    found = m.run(inputs, out={"sum": block[2:4], "product": block[4:]})
    np.testing.assert_array_equal(found["sum"], inputs["b"])
    both = m.run({"a": block[:2], "b": block[:2]}, out={"sum": block[4:]})
    np.testing.assert_array_equal(both["sum"], 0)


def test_outputs_that_are_inputs_constants_views_or_twice_the_same_fill_their_buffers(
    device: str,
) -> None:
    with rlx.Graph() as g:
        x = g.input("x", [4, 3])
        w = g.param("w", np.arange(100, dtype=np.float32))
        y = x * 2
        g.output("input", x)
        g.output("reshaped", reshape(x, (12,)))
        g.output("rows", slice_axis(y, 0, 1, 2))
        g.output("param", w)
        g.output("y", y)
        g.output("again", y)
        g.output("constant", reshape(y, (12,)) * 0 + 5)
    m = rlx.compile(g, device)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    want = m.run([x])
    out = [np.full(a.shape, np.nan, a.dtype) for a in want.values()]
    found = m.run([x], out=out)
    for buffer, (name, value) in zip(out, found.items(), strict=True):
        assert value is buffer
        np.testing.assert_array_equal(value, want[name])
    np.testing.assert_array_equal(found["rows"], 2 * x[1:3])
    np.testing.assert_array_equal(found["again"], 2 * x)
    np.testing.assert_array_equal(x, np.arange(12).reshape(4, 3))


@pytest.mark.parametrize("dtype", ["bool", "i8", "f16", "bf16", "i16", "f32", "f64", "i64"])
def test_nothing_is_written_beside_a_buffer(dtype: str) -> None:
    """Copies, movement, arithmetic, comparisons and conversions end at the last byte of what they write."""
    with rlx.Graph() as g:
        x = g.input("x", ["N", 3], dtype)
        g.output("same", x)
        g.output("turned", transpose(x, (1, 0)))
        g.output("joined", concat([x, x], 1))
        g.output("chosen", where(equal(x, x), x, x))
        g.output("equal", equal(x, x))
        g.output("half", cast(x, "f16"))
        g.output("byte", cast(x, "u8"))
    m, reference = rlx.compile(g), rlx.compile(g, "reference")
    for n in (1, 2, 5, 7, 33):
        x = (np.arange(3 * n).reshape(n, 3) % 100).astype(DType.of(dtype).numpy)
        want = reference.run([x])
        blocks = {k: np.full(v.size + 2, 77).astype(v.dtype) for k, v in want.items()}
        before = {k: block.tobytes() for k, block in blocks.items()}
        m.run([x], out={k: blocks[k][1:-1].reshape(v.shape) for k, v in want.items()})
        for k, v in want.items():
            size = v.itemsize
            assert blocks[k].tobytes() == before[k][:size] + v.tobytes() + before[k][-size:], k


def test_a_failing_run_leaves_buffers_and_executable_usable(device: str) -> None:
    with rlx.Graph() as g:
        a, b = g.input("a", [3], "i32"), g.input("b", [3], "i32")
        g.output("y", div(a, b))
    m = rlx.compile(g, device)
    buffer = np.zeros(3, np.int32)
    with pytest.raises(rlx.ExecutionError, match="division by zero"):
        m.run([np.ones(3, np.int32), np.array([1, 0, 1], np.int32)], out=[buffer])
    m.run([np.full(3, 6, np.int32), np.array([1, 2, 3], np.int32)], out=[buffer])
    np.testing.assert_array_equal(buffer, [6, 3, 2])


def test_empty_outputs_take_empty_buffers(device: str) -> None:
    m = rlx.compile(_two(), device)
    found = m.run(_data(0), out={"sum": _empty(0), "product": _empty(0)})
    assert found["difference"].shape == (0, 3)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def _bits(dtype: DType) -> Array:
    """Return [2, 35] elements of all kinds of bits, those of numbers that f32 does not hold among them."""
    if dtype is DType.BOOL:
        return np.arange(70).reshape(2, 35) % 3 == 0
    if dtype in (DType.I4, DType.U4):
        low = -8 if dtype is DType.I4 else 0
        return (np.arange(70) % 16 + low).astype(np.int8).astype(dtype.numpy).reshape(2, 35)
    random = np.random.default_rng(0)
    data = random.integers(0, 256, 70 * dtype.itemsize, dtype=np.uint8).view(dtype.numpy)
    if dtype.is_narrow_float:  # the reference computes in f32, where signalling NaNs become quiet
        with np.errstate(invalid="ignore"):
            data = np.where(np.isnan(data), data.astype(np.float32).astype(data.dtype), data)
    return data.reshape(2, 35)


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_every_dtype_passes_bit_for_bit(dtype: DType, device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 35], dtype)
        g.output("same", x)
        g.output("turned", transpose(x, (1, 0)))
    m = rlx.compile(g, device)
    x = _bits(dtype)
    same, turned = np.empty_like(x), np.empty((35, 2), x.dtype)
    for given in (x, x.copy(order="F")):
        m.run([given], out=[same, turned])
        queued = m.run_async([given])
        runs = [m.run([given]), queued.result(), *m.run_pipelined([[given], [given]])]
        for found in (same, *(results["same"] for results in runs)):
            assert found.dtype == dtype.numpy
            assert found.tobytes() == x.tobytes()
        for found in (turned, *(results["turned"] for results in runs)):
            assert found.tobytes() == np.ascontiguousarray(x.T).tobytes()


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F8E4M3, DType.F8E5M2], ids=str)
def test_narrow_floats_pass_by_dlpack(dtype: DType, device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 35], dtype)
        g.output("turned", transpose(x, (1, 0)))
    m = rlx.compile(g, device)
    x = _bits(dtype)
    buffer = np.empty((35, 2), x.dtype)
    m.run([dlpack(x)], out=[dlpack(buffer)])
    assert buffer.tobytes() == np.ascontiguousarray(x.T).tobytes()


def test_a_symbolic_extent_beyond_its_limit_is_refused() -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 0])
        g.output("y", x + 1)
    huge = np.empty((2**31, 0), np.float32)
    with rlx.compile(g) as m, pytest.raises(rlx.UsageError, match="at most 2147483647"):
        m.run({"x": huge})
