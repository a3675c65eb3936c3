# SPDX-License-Identifier: Apache-2.0
"""Arrays as callers have them: any order, alignment and type, and objects that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array

_X = np.arange(-6, 6, dtype=np.float32).reshape(4, 3)


class _Subclass(np.ndarray[Any, Any]):
    pass


def _read_only() -> Array:
    array = _X.copy()
    array.flags.writeable = False
    return array


def _unaligned() -> Array:
    array: Array = np.ndarray((4, 3), np.float32, bytearray(_X.nbytes + 1), 1)
    array[...] = _X
    assert not array.flags.aligned
    return array


@pytest.fixture(params=("reference", "cpu"))
def run(request: pytest.FixtureRequest) -> rlx.Executable:
    with rlx.Graph("twice") as g:
        g.output("y", g.input("x", ["N", 3]) * 2)
    return rlx.compile(g, request.param, threads=1)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(_X),
        np.ascontiguousarray(_X[::-1, ::-1])[::-1, ::-1],
        np.repeat(np.repeat(_X, 2, 0), 3, 1)[::2, ::3],
        np.broadcast_to(np.float32(2), (4, 3)),
        _read_only(),
        _unaligned(),
        _X.view(_Subclass),
        np.ma.masked_array(_X),
        np.ma.masked_array(_X, mask=False),
        memoryview(_X.copy().data),
        _X.tolist(),
        _X.astype(int).tolist(),
        [[np.float32(1), 2, 3.0]],
        _X[:0],
    ],
)
def test_arrays_of_every_kind(array: Any, run: rlx.Executable) -> None:
    plain = np.array(array, np.float32)
    found = run(array)
    np.testing.assert_array_equal(found, plain * 2)
    assert type(found) is np.ndarray


class _Raising:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("requires grad")


class _Abroad:
    def __dlpack__(self, **_: Any) -> Any:
        raise ValueError("unknown device")

    def __dlpack_device__(self) -> Any:
        raise ValueError("unknown device")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (_X.astype(">f4"), r"got dtype >f4; convert it with \.astype\('float32'\)"),
        (_X.astype(object), "got dtype object"),
        (_X.astype(np.float64), "got dtype float64"),
        (_X > 0, "got dtype bool"),
        (np.zeros((4, 3), "i4,f4"), "got dtype"),
        (np.ma.masked_array(_X, mask=_X < 0), r"masked array.*fill them with \.filled"),
        (None, "got object data"),
        ("abc", "got text; pass numbers"),
        ({}, "got object data"),
        (1.5, "array of rank 0"),
        (np.float32(1), "array of rank 0"),
        ([[1, 2, 3], [1, 2]], "a list that gives no array"),
        ([[1e300, 0, 0]], "which cannot hold 1e.300"),
        ([[2**24 + 1, 0, 0]], "which cannot hold 16777217"),
        (_Raising(), "a _Raising that gives no array: requires grad"),
        (_Abroad(), "a _Abroad that gives no array: unknown device"),
    ],
)
def test_what_is_refused(given: Any, message: str, run: rlx.Executable) -> None:
    with pytest.raises(rlx.UsageError, match=f"(?s)input x.*{message}"):
        run(given)
    np.testing.assert_array_equal(run(_X), _X * 2)


def test_names_that_are_no_text(run: rlx.Executable) -> None:
    odd: Any
    for odd in ({1: _X}, {"x": _X, 1: _X}):
        with pytest.raises(rlx.UsageError, match="unknown input 1"):
            run.run(odd)
    odd = [1]
    with pytest.raises(rlx.UsageError, match="unknown output 1"):
        run.run({"x": _X}, odd)
    odd = 5
    with pytest.raises(rlx.UsageError, match="outputs is a list of names, not 5"):
        run.run({"x": _X}, odd)
    for odd in (5, "y", np.empty_like(_X)):
        with pytest.raises(rlx.UsageError, match="out is a dict by name or a list"):
            run.run({"x": _X}, out=odd)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [(_unaligned(), "not aligned"), (_Abroad(), "not accessible: unknown device")],
)
def test_buffers_that_cannot_be_written(buffer: Any, message: str, run: rlx.Executable) -> None:
    with pytest.raises(rlx.UsageError, match=f"buffer for output y.*{message}"):
        run.run({"x": _X}, out={"y": buffer})


@pytest.mark.parametrize("shape", [2, "ab", (2.5, 3), None, ("n", 3), (-1, 3)])
def test_shapes_to_warm_up_for(shape: Any, run: rlx.Executable) -> None:
    with pytest.raises(rlx.UsageError, match="is no shape of input x"):
        run.warmup({"x": shape})
    wrong: Any = 5
    with pytest.raises(rlx.UsageError, match="warmup takes shapes by name"):
        run.warmup(wrong)
    rows: Any = np.int64(2)
    run.warmup({"x": (rows, 3)})
    assert run.variants == 1


def test_a_rank_0_weight_that_is_computed_stays_of_rank_0() -> None:
    with rlx.Graph() as g:
        w = g.param("w", np.float32(3))
        g.output("y", g.input("x", ["N"]) * (w + w))
    for device in ("reference", "cpu"):
        np.testing.assert_array_equal(rlx.compile(g, device)(np.ones(2, np.float32)), [6, 6])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            np.ma.masked_array(np.ones(3, np.float32), mask=[False, True, False]),
            "got a masked array",
        ),
        ([[1], [1, 2]], "a list that gives no array"),
        (_Raising(), "a _Raising that gives no array: requires grad"),
        (None, "got shape"),
    ],
)
def test_what_is_no_value_of_a_weight(value: Any, message: str) -> None:
    with rlx.Graph("g") as g:
        g.output("y", g.input("x", ["N", 3]) * g.param("w", np.ones(3, np.float32)))
    run = rlx.compile(g, threads=1)
    with pytest.raises(rlx.UsageError, match=f"param 'w' of g.*{message}"):
        run.set_param("w", value)
    np.testing.assert_array_equal(run(_X), _X)


def test_weights_come_from_executables(run: rlx.Executable) -> None:
    odd: Any
    for odd in ("model.onnx", None):
        with pytest.raises(rlx.UsageError, match="taken from an executable, not from a"):
            run.share_weights_from(odd)
        with pytest.raises(rlx.UsageError, match="taken from an executable, not from a"):
            run.copy_params_from(odd)
