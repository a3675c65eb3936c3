# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto, helper

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ops.matmul import matmul
from rlx.ops.norm import softmax
from rlx.runtime.slots import SlotRecord


def _chain(steps: int = 6) -> rlx.Graph:
    """Return products that cannot be fused, so that every one is stored, in bytes used again and again."""
    random = np.random.default_rng(0)
    with rlx.Graph("chain") as g:
        x = g.input("x", ["N", 16])
        for i in range(steps):
            w = g.param(f"w{i}", random.standard_normal((16, 16)).astype(np.float32))
            x = softmax(matmul(x, w))
        g.output("y", x)
    return g


def _x(n: int) -> Array:
    return np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)


def _arena(slots: list[SlotRecord]) -> list[SlotRecord]:
    return [s for s in slots if s.kind == "arena" and s.array is not None]


@pytest.fixture(autouse=True)
def values_that_stay() -> Iterator[None]:
    """The check of memory plans fills values as they die."""
    with override(RLX_CHECK=False):
        yield


def test_under_the_check_of_plans_no_intermediate_value_is_intact() -> None:
    with override(RLX_CHECK=True), rlx.compile(_chain(), dims={"N": 8}) as m:
        m.run([_x(8)])
        slots = _arena(m.slots())
        assert slots
        assert not any(s.intact for s in slots)


def test_slots_hold_what_the_run_computed() -> None:
    with rlx.Graph("two") as g:
        x = g.input("x", ["N", 16])
        h = matmul(x, g.param("w", np.eye(16, dtype=np.float32) * 2))
        h.name = "hidden"
        g.output("y", matmul(softmax(h), g.param("v", np.eye(16, dtype=np.float32))))
        g.output("z", h)
    m = rlx.compile(g, dims={"N": 8})
    m.run([_x(5)])
    slots = m.slots()
    kinds = {s.kind for s in slots}
    assert {"input", "weight", "output"} <= kinds
    assert sorted(s.name for s in slots if s.kind == "output") == ["hidden", "y", "z"]
    for slot in slots:
        if slot.kind in ("input", "output"):
            assert (slot.offset, slot.array) == (None, None), "the caller has them"
        elif slot.array is not None:
            assert slot.array.shape == slot.shape
            assert slot.array.dtype == slot.dtype.numpy
    found = [s for s in _arena(slots) if s.intact and s.shape == (5, 16)]
    want = np.exp(_x(5) * 2 - (_x(5) * 2).max(1, keepdims=True))
    want /= want.sum(1, keepdims=True)
    assert any(np.allclose(s.array, want, atol=1e-6) for s in found if s.array is not None)


def test_intact_values_equal_those_of_taps_and_others_were_overwritten() -> None:
    g = _chain()
    names: list[str] = []
    for node in g.ir.block:
        node.result.name = f"value{len(names)}"
        names.append(node.result.name)
    m = rlx.compile(g, dims={"N": 8})
    m.run([_x(8)])
    slots = {s.name: s for s in _arena(m.slots())}
    held = {n: (s.intact, s.array.copy()) for n, s in slots.items() if s.array is not None}
    assert len(held) >= 4
    assert any(intact for intact, _ in held.values())
    assert not all(intact for intact, _ in held.values()), "six values in the bytes of two"
    for name, (intact, content) in held.items():
        tapped = m.tap(name, [_x(8)])
        if intact:
            assert content.tobytes() == tapped.tobytes(), name


def test_views_are_zero_copy_and_lie_at_their_offsets() -> None:
    m = rlx.compile(_chain(), dims={"N": 8})
    m.run([_x(8)])
    first, again = _arena(m.slots()), _arena(m.slots())
    for a, b in zip(first, again, strict=True):
        assert a.array is not None
        assert b.array is not None
        assert np.shares_memory(a.array, b.array)
    base = {
        s.array.__array_interface__["data"][0] - s.offset
        for s in first
        if s.array is not None and s.offset is not None
    }
    assert len(base) == 1, "all in one arena"
    for slot in first:
        assert slot.offset is not None
        assert slot.array is not None
        assert 0 <= slot.offset <= m.memory().arena - slot.array.nbytes


def test_shapes_are_those_of_the_last_run_or_the_bounds() -> None:
    m = rlx.compile(_chain(), dims={"N": 8})
    assert {s.shape for s in _arena(m.slots())} == {(8, 16)}
    for n in (3, 100, 5):
        m.run([_x(n)])
        assert {s.shape for s in _arena(m.slots())} == {(n, 16)}
    m.trim()
    assert {s.shape for s in _arena(m.slots())} == {(8, 16)}
    unknown = rlx.compile(_chain())
    with pytest.raises(rlx.UsageError, match="compiled on the first call"):
        unknown.slots()


def test_a_view_outlives_plans_runs_and_the_executable() -> None:
    m = rlx.compile(_chain(), dims={"N": 8})
    m.run([_x(8)])
    slot = next(s for s in _arena(m.slots()) if s.intact)
    assert slot.array is not None
    content = slot.array.copy()
    m.run([_x(1000)])  # a new arena; the old one stays, for the view
    np.testing.assert_array_equal(slot.array, content)
    m.close()
    watched = weakref.ref(m)
    del m
    gc.collect()
    assert watched() is None
    np.testing.assert_array_equal(slot.array, content)


def test_a_run_does_not_take_views_of_the_memory_it_works_in() -> None:
    m = rlx.compile(_chain(), dims={"N": 8})
    want = m.run([_x(8)])["y"]
    slot = next(s for s in _arena(m.slots()) if s.shape == (8, 16))
    assert slot.array is not None
    with pytest.raises(rlx.UsageError, match="view of the executable's own memory"):
        m.run([slot.array])
    with pytest.raises(rlx.UsageError, match="view of the executable's own memory"):
        m.run([_x(8)], out=[slot.array])
    with pytest.raises(rlx.UsageError, match="view of the executable's own memory"):
        m.run([_x(8)], out=[slot.array.reshape(-1).reshape(8, 16)])
    m.run([slot.array.copy()])
    assert m.run([_x(8)])["y"].tobytes() == want.tobytes()


def test_weights_are_shown_read_only() -> None:
    m = rlx.compile(_chain(), dims={"N": 8})
    m.run([_x(8)])
    weights = [s for s in m.slots() if s.kind == "weight" and s.array is not None]
    assert weights
    for slot in weights:
        assert slot.array is not None
        assert slot.intact
        with pytest.raises(ValueError, match="read-only"):
            slot.array[...] = 0


def test_a_view_slot_lies_where_the_last_iteration_put_it() -> None:
    kinds = TensorProto
    row = [helper.make_tensor_value_info(n, kinds.FLOAT, [16]) for n in ("s", "x", "t", "o")]
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        row[:2],
        row[2:],
    )
    nodes = [
        helper.make_node("Softmax", ["xs"], ["rows"]),
        helper.make_node("Scan", ["s0", "rows"], ["last", "sums"], body=body, num_scan_inputs=1),
        helper.make_node("Softmax", ["sums"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("s0", kinds.FLOAT, [16]),
            helper.make_tensor_value_info("xs", kinds.FLOAT, [8, 16]),
        ],
        [helper.make_tensor_value_info("y", kinds.FLOAT, [8, 16])],
    )
    opsets = [helper.make_opsetid("", 18)]
    m = rlx.load(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    (row_slot,) = [s for s in m.slots() if s.kind == "view"]
    assert row_slot.array is None, "no run has put it anywhere"
    m(np.zeros(16, np.float32), _x(8))
    found = {s.name: s for s in m.slots()}
    rows = np.exp(_x(8))
    rows /= rows.sum(1, keepdims=True)
    for name, want in (("rows", rows), ("x", rows[-1]), ("sums", np.cumsum(rows, axis=0))):
        assert found[name].intact
        array = found[name].array
        assert array is not None
        np.testing.assert_allclose(array, want, rtol=1e-5)
    assert found["x"].offset == (found["rows"].offset or 0) + 7 * 64


def test_a_device_without_such_memory_says_so() -> None:
    m = rlx.compile(_chain(), "reference", dims={"N": 8})
    with pytest.raises(rlx.UsageError, match="chain has no slots"):
        m.slots()
