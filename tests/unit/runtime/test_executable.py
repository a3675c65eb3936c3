# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array
from rlx.ops.elementwise import div, floor_mod
from rlx.ops.indexing import gather
from rlx.ops.matmul import matmul
from rlx.ops.movement import concat
from rlx.ops.norm import softmax
from rlx.ops.reduce import reduce_max, reduce_sum

_DEVICES = ("reference", "cpu")


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _scale(dtype: str = "f32", shape: tuple[int | str, ...] = ("N", 3)) -> rlx.Graph:
    with rlx.Graph("scale") as g:
        x = g.input("x", shape, dtype)
        g.output("y", x + x)
    return g


def _two() -> rlx.Graph:
    with rlx.Graph("two") as g:
        a = g.input("first", ["N", 3])
        b = g.input("second", ["N", 3])
        g.output("sum", a + b)
        g.output("difference", a - b)
    return g


def _ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


# -- names, dtypes, shapes ---------------------------------------------------------------------------------------------


def test_an_unknown_name_suggests_the_closest_and_lists_all(device: str) -> None:
    run = rlx.compile(_two(), device)
    with pytest.raises(
        rlx.UsageError, match=r"'frist'.*'first'.*first: f32\[N,3\]; second: f32\[N,3\]"
    ):
        run.run({"frist": _ones(1, 3), "second": _ones(1, 3)})


def test_a_missing_name_is_named_with_its_type(device: str) -> None:
    run = rlx.compile(_two(), device)
    with pytest.raises(rlx.UsageError, match=r"missing inputs: second: f32\[N,3\]"):
        run.run({"first": _ones(1, 3)})
    with pytest.raises(rlx.UsageError, match=r"missing inputs: second"):
        run(_ones(1, 3))


def test_an_input_cannot_be_given_twice_or_too_often(device: str) -> None:
    run = rlx.compile(_two(), device)
    with pytest.raises(rlx.UsageError, match="'first' is given by position and by name"):
        run(_ones(1, 3), first=_ones(1, 3))
    with pytest.raises(rlx.UsageError, match=r"takes 2 input\(s\) \(.*\), not 3"):
        run(_ones(1, 3), _ones(1, 3), _ones(1, 3))


def test_another_dtype_is_refused_and_the_cast_is_named(device: str) -> None:
    run = rlx.compile(_scale(), device)
    with pytest.raises(
        rlx.UsageError, match=r"x: f32\[N,3\] got dtype float64.*astype\('float32'\)"
    ):
        run(np.ones((1, 3)))
    with pytest.raises(rlx.UsageError, match="got dtype int64"):
        run(np.ones((1, 3), np.int64))


def test_another_rank_or_extent_is_refused(device: str) -> None:
    run = rlx.compile(_scale(), device)
    with pytest.raises(rlx.UsageError, match=r"x: f32\[N,3\] got an array of rank 1, shape \[3\]"):
        run(_ones(3))
    with pytest.raises(rlx.UsageError, match=r"got shape \[2, 4\]; extent 3 of axis 1 is fixed"):
        run(_ones(2, 4))
    two = rlx.compile(_two(), device)
    with pytest.raises(
        rlx.UsageError, match=r"second: f32\[N,3\] got shape \[5, 3\], but N is 2 in input 'first'"
    ):
        two(_ones(2, 3), _ones(5, 3))
    assert run(_ones(2, 3)).shape == (2, 3), "a refused call leaves it usable"


# -- what it takes -------------------------------------------------------------------------------------------------


class _Dlpack:
    """Has `__dlpack__` only."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class _HasArray:
    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del dtype, copy
        return self._array


def _same(array: Array) -> Any:
    return array


def _strided(array: Array) -> Any:
    return np.repeat(array, 2, axis=1)[:, ::2]


def _reversed_twice(array: Array) -> Any:
    return array[::-1][::-1]


def _read_only(array: Array) -> Any:
    return np.broadcast_to(array, array.shape)


def _as_list(array: Array) -> Any:
    return array.tolist()


_CONVERSIONS: list[Any] = [
    _same,
    np.asfortranarray,
    _strided,
    _reversed_twice,
    _read_only,
    _as_list,
    _Dlpack,
    _HasArray,
    memoryview,
]


@pytest.mark.parametrize(
    "convert",
    _CONVERSIONS,
    ids=[
        "array",
        "fortran",
        "strided",
        "reversed",
        "read-only",
        "list",
        "dlpack",
        "array-protocol",
        "buffer",
    ],
)
def test_inputs_of_every_kind_give_the_same(convert: Callable[[Array], Any], device: str) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(rlx.compile(_scale(), device)(convert(x)), x + x)


def test_python_numbers_take_the_declared_dtype_if_that_loses_nothing(device: str) -> None:
    whole = rlx.compile(_scale("i32", ()), device)
    assert whole(21) == 42
    with pytest.raises(rlx.UsageError, match=r"x: i32\[\] got Python data of dtype float64"):
        whole(1.5)
    with pytest.raises(rlx.UsageError, match="cannot hold"):
        whole(1 << 40)
    real = rlx.compile(_scale("f32", ()), device)
    assert real(1.5) == 3
    with pytest.raises(rlx.UsageError, match="pass numbers"):
        real("text")


@pytest.mark.parametrize(
    "dtype", ["f16", "bf16", "f32", "f64", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"]
)
def test_every_dtype_goes_in_and_out(dtype: str, device: str) -> None:
    run = rlx.compile(_scale(dtype), device)
    numpy = np.dtype(ml_dtypes.bfloat16) if dtype == "bf16" else run.inputs[0].dtype.numpy
    x = np.array([[1, 2, 3]]).astype(numpy)
    y = run(x)
    assert y.dtype == numpy
    np.testing.assert_array_equal(y.astype(np.float64), [[2, 4, 6]])


def test_a_narrow_graph_rounds_after_every_operator(device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", [3], "f16")
        g.output("y", (x + 1.0) - 1.0)
    x = np.array([1e-3, 0.5, 2049], np.float16)
    want = ((x + np.float16(1)).astype(np.float16) - np.float16(1)).astype(np.float16)
    np.testing.assert_array_equal(rlx.compile(g, device)(x), want)


# -- what it gives -------------------------------------------------------------------------------------------------


def test_outputs_are_fresh_writable_and_own_their_memory(device: str) -> None:
    run = rlx.compile(_scale(), device)
    first = run(_ones(2, 3))
    kept = first.copy()
    second = run(_ones(2, 3) * 5)
    np.testing.assert_array_equal(first, kept)
    assert first.flags.owndata
    assert first.flags.writeable
    assert first.flags.c_contiguous
    assert not np.shares_memory(first, second)
    first[:] = -1
    np.testing.assert_array_equal(second, 10)


def test_an_output_that_is_an_input_is_a_copy(device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N"])
        g.output("same", x)
        g.output("again", x)
    x = np.arange(3, dtype=np.float32)
    found = rlx.compile(g, device).run({"x": x})
    np.testing.assert_array_equal(found["same"], x)
    assert not np.shares_memory(found["same"], x)
    assert not np.shares_memory(found["same"], found["again"])


def test_inputs_are_not_kept_and_not_changed(device: str) -> None:
    run = rlx.compile(_two(), device)
    x, y = _ones(4, 3), _ones(4, 3) * 2
    results = run.run({"first": x, "second": y})
    np.testing.assert_array_equal(x, 1)
    np.testing.assert_array_equal(y, 2)
    watched = weakref.ref(x)
    del x, y
    gc.collect()
    assert watched() is None
    np.testing.assert_array_equal(results["sum"], 3)


def test_one_output_is_an_array_and_several_are_a_named_tuple(device: str) -> None:
    assert isinstance(rlx.compile(_scale(), device)(_ones(1, 3)), np.ndarray)
    found = rlx.compile(_two(), device)(_ones(1, 3), second=_ones(1, 3))
    np.testing.assert_array_equal(found.sum, 2)
    np.testing.assert_array_equal(found.difference, 0)


def test_output_types_are_known_with_bounds_or_after_a_call(device: str) -> None:
    run = rlx.compile(_scale(), device)
    with pytest.raises(
        rlx.UsageError, match=r"after the first call, `warmup`, or with dims=\{'N': ...\}"
    ):
        _ = run.outputs
    assert str(run.warmup({"x": (2, 3)}).outputs[0]) == "y: f32[N,3]"
    assert str(rlx.compile(_scale(), device, dims={"N": 4}).outputs[0]) == "y: f32[N,3]"


# -- extents -------------------------------------------------------------------------------------------------------


def test_one_program_serves_all_extents_and_grows(device: str) -> None:
    run = rlx.compile(_scale(), device, dims={"N": 4})
    for n in (4, 1, 3, 5, 100, 7, 1000, 1):
        np.testing.assert_array_equal(run(_ones(n, 3)), np.full((n, 3), 2))
    assert run.variants == 1


def test_memory_grows_with_a_larger_call_and_only_then() -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 64])
        w = g.param("w", np.eye(64, dtype=np.float32))
        g.output("y", softmax(matmul(softmax(matmul(x, w)), w)))
    run = rlx.compile(g, dims={"N": 8})
    before = run.memory()
    assert before.weights >= 64 * 64 * 4
    assert before.arena >= 8 * 64 * 4
    run(_ones(8, 64))
    assert run.memory() == before, "known before the first run"
    run(_ones(9, 64))
    assert run.memory().arena >= 2 * before.arena_lower_bound
    assert run.variants == 1


def test_a_call_that_breaks_what_a_graph_was_built_under_is_refused(device: str) -> None:
    with rlx.Graph() as g:
        a, b = g.input("a", ["N"]), g.input("b", ["M"])
        g.ir.facts.hints = {"N": 3, "M": 3}
        g.output("y", a + b)
    run = rlx.compile(g, device)
    np.testing.assert_array_equal(run(_ones(3), _ones(3)), [2, 2, 2])
    np.testing.assert_array_equal(run(_ones(5), _ones(5)), np.full(5, 2))
    assert run.variants == 1
    with pytest.raises(rlx.UsageError, match=r"built assuming N == M \(broadcast"):
        run(_ones(5), _ones(2))
    np.testing.assert_array_equal(run(_ones(3), _ones(3)), [2, 2, 2])


def test_zero_extents_are_a_variant_of_their_own(device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", "M"])
        g.output("same", x * 2.0)
        g.output("sum", reduce_sum(x, [0], False))
        g.output("max", reduce_max(x, [0], False))
        g.output("twice", concat([x, x], 0))
    run = rlx.compile(g, device)
    assert run.run({"x": _ones(2, 3)})["twice"].shape == (4, 3)
    found = run.run({"x": _ones(0, 3)})
    assert found["same"].shape == (0, 3)
    assert found["twice"].shape == (0, 3)
    np.testing.assert_array_equal(found["sum"], np.zeros(3))
    np.testing.assert_array_equal(found["max"], np.full(3, -np.inf))
    assert run.variants == 2
    assert run.run({"x": _ones(2, 3)})["twice"].shape == (4, 3)
    assert run.run({"x": _ones(0, 7)})["max"].shape == (7,)
    assert run.variants == 2
    assert run.run({"x": _ones(4, 0)})["sum"].shape == (0,)
    assert run.variants == 3


def test_the_number_of_variants_is_bounded(device: str) -> None:
    """Whether an extent is 0 is an assumption; four extents make more of them than are kept."""
    names = "abcd"
    with rlx.Graph("four") as g:
        for name in names:
            g.output(f"{name}2", g.input(name, [name]) * 2)
    run = rlx.compile(g, device)

    def call(choice: int, extent: int) -> None:
        given = {n: _ones(extent if choice >> i & 1 else 0) for i, n in enumerate(names)}
        for name, found in run.run(given).items():
            np.testing.assert_array_equal(found, given[name[0]] * 2)

    for choice in range(8):
        call(choice, 2)
    for _ in range(2):
        with pytest.raises(rlx.UsageError, match="four was compiled 8 times for different"):
            call(8, 2)
        assert run.variants == 8
        for choice in range(8):  # what there is serves on
            call(choice, 5)


def test_more_extents_than_bindings_are_kept(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("rlx.runtime.executable._MAX_BINDINGS", 3)
    run = rlx.compile(_scale(), device, dims={"N": 8})
    for n in (1, 2, 3, 4, 5, 1, 5, 2, 8, 1):
        np.testing.assert_array_equal(run(_ones(n, 3)), np.full((n, 3), 2))
    assert run.variants == 1


def test_intermediate_values_beyond_4_gib_are_addressed_in_64_bits() -> None:
    """Three values of 2 GiB at the bound; a call of few rows touches a few pages of them.

    Cut to 32 bits, the address of the third would be that of the first.
    """
    with rlx.Graph("large") as g:
        a = softmax(g.input("x", ["N", 2], "f16"))
        b = softmax(a * 2.0)
        c = softmax(b * 3.0)
        g.output("y", a * 10.0 + b * 100.0 + c * 1000.0)
    x = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float16)
    with rlx.compile(g, dims={"N": 1 << 29}, threads=1) as run:
        assert run.memory().arena == 6 << 30
        np.testing.assert_allclose(run(x), rlx.compile(g, "reference")(x), rtol=2**-9)


# -- errors in the data --------------------------------------------------------------------------------------------


def test_an_index_out_of_range_names_the_place_and_leaves_it_usable(device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", [3])
        i = g.input("i", ["N"], "i64")
        g.output("y", gather(x, i))
    run = rlx.compile(g, device)
    x = np.array([5, 6, 7], np.float32)
    with pytest.raises(rlx.ExecutionError, match=r"out.*range|outside") as raised:
        run(x, np.array([0, 3]))
    assert "gather" in str(raised.value)
    assert "test_executable.py" in str(raised.value), "the line that made the node"
    np.testing.assert_array_equal(run(x, np.array([-1, 0])), [7, 5])


@pytest.mark.parametrize("divide", [div, floor_mod])
def test_integer_division_by_zero_is_an_error(divide: Callable[..., Any], device: str) -> None:
    with rlx.Graph() as g:
        a, b = g.input("a", ["N"], "i32"), g.input("b", ["N"], "i32")
        g.output("y", divide(a, b))
    run = rlx.compile(g, device)
    with pytest.raises(rlx.ExecutionError, match="zero"):
        run(np.array([1, 2], np.int32), np.array([1, 0], np.int32))
    assert run(np.array([7, 2], np.int32), np.array([2, 1], np.int32)).shape == (2,)


# -- threads, the end ----------------------------------------------------------------------------------------------


def test_many_threads_may_call_one_executable(device: str) -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N", 16])
        w = g.param("w", np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16))
        g.output("y", softmax(matmul(x, w)))
    run = rlx.compile(g, device)
    inputs = [
        np.random.default_rng(i).standard_normal((i + 1, 16)).astype(np.float32) for i in range(8)
    ]
    want = [run(x) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        same = [run(inputs[index]).tobytes() == want[index].tobytes() for _ in range(20)]
        wrong.extend(index for one in same if not one)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_closed_executable_refuses_and_closing_twice_is_fine(device: str) -> None:
    with rlx.compile(_scale(), device) as run:
        run(_ones(1, 3))
    with pytest.raises(rlx.UsageError, match="scale is closed"):
        run(_ones(1, 3))
    run.close()


def test_the_text_of_an_executable_names_model_device_and_inputs(device: str) -> None:
    text = repr(rlx.compile(_scale(), device))
    assert "scale" in text
    assert device in text
    assert "x: f32[N,3]" in text
