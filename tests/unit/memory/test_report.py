# SPDX-License-Identifier: Apache-2.0
"""Memory by tensor, and the picture of the arena."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest

import rlx
from rlx.backends.protocol import MemoryReport
from rlx.ir.parse import parse_graph
from rlx.memory.report import Placement

_TEXT = """graph "small" {
  input %x: f32[N,64]
  param %w: f32[64,64] = dense<f32[64,64]: elided>
  %a = matmul(%x, %w) @ "first"
  %b = softmax(%a) {axis=1} @ "soft & \\"rows\\""
  %c = matmul(%b, %w) @ "second"
  %d = softmax(%c) {axis=1} @ "third"
  %e = matmul(%d, %w) @ "last"
  return %e as "y"
}"""


@pytest.fixture(params=["cpu", "null"])
def memory(request: pytest.FixtureRequest) -> MemoryReport:
    graph = rlx.Graph()
    graph.ir = parse_graph(_TEXT.replace(" = dense<f32[64,64]: elided>", ""))
    import numpy as np

    graph.ir.params["w"].data = np.zeros((64, 64), np.float32)
    return rlx.compile(graph, request.param, dims={"N": 16}).memory()


def _arena(memory: MemoryReport) -> Sequence[Placement]:
    return [t for t in memory.tensors if t.kind == "arena"]


def test_tensors_lie_in_the_arena_and_apart_while_they_live(memory: MemoryReport) -> None:
    tensors = _arena(memory)
    assert {t.name for t in tensors} >= {"a", "b", "c", "d"} or len(tensors) >= 2
    assert all(t.offset >= 0 and t.first <= t.last for t in tensors)
    assert max(t.offset + t.nbytes for t in tensors) <= memory.arena
    for index, one in enumerate(tensors):
        for other in tensors[index + 1 :]:
            together = one.first < other.last and other.first < one.last
            overlap = (
                one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes
            )
            assert not (together and overlap), (one, other)


def test_weights_are_told_apart(memory: MemoryReport) -> None:
    weights = [t for t in memory.tensors if t.kind == "weight"]
    assert sum(t.nbytes for t in weights) == memory.weights
    assert sum(s.nbytes for s in memory.top(100, "weight")) == memory.weights


def test_the_most_bytes_by_operator_and_type(memory: MemoryReport) -> None:
    top = memory.top(100)
    assert sum(s.nbytes for s in top) == sum(t.nbytes for t in _arena(memory))
    assert sum(s.count for s in top) == len(_arena(memory))
    assert [s.nbytes for s in top] == sorted((s.nbytes for s in top), reverse=True)
    assert any(s.type == "f32[N,64]" for s in top)
    assert memory.top(1) == top[:1]
    with pytest.raises(rlx.UsageError, match="'heap'"):
        memory.top(3, "heap")


def test_the_picture_has_a_rectangle_per_tensor_where_it_lies(memory: MemoryReport) -> None:
    space = {"s": "http://www.w3.org/2000/svg"}
    root = ElementTree.fromstring(memory.picture('a <model> & "more"'))
    assert root.findtext("s:title", "", space) == 'a <model> & "more"'
    frame = root.find("s:rect", space)
    assert frame is not None
    left, top, width, height = (float(frame.attrib[k]) for k in ("x", "y", "width", "height"))
    groups = root.findall("s:g", space)
    tensors = _arena(memory)
    assert len(groups) == len(tensors)
    steps = max(t.last for t in tensors) + 1
    for group, tensor in zip(groups, tensors, strict=True):
        box = group.find("s:rect", space)
        assert box is not None
        x, y, w, h = (float(box.attrib[k]) for k in ("x", "y", "width", "height"))
        assert x == pytest.approx(left + width * tensor.first / steps, abs=0.01)
        assert w == pytest.approx(width * (tensor.last - tensor.first + 1) / steps, abs=0.01)
        assert h == pytest.approx(height * tensor.nbytes / memory.arena, abs=0.01)
        low = top + height - height * tensor.offset / memory.arena
        assert y + h == pytest.approx(low, abs=0.02)
        assert f"{tensor.nbytes:,} bytes at {tensor.offset:,}" in group.findtext(
            "s:title", "", space
        )


def test_plain_data(memory: MemoryReport) -> None:
    data: dict[str, Any] = json.loads(json.dumps(memory.to_json()))
    assert data["arena"] == memory.arena
    assert [t["name"] for t in data["tensors"]] == [t.name for t in memory.tensors]


def test_a_device_without_a_plan_has_no_picture() -> None:
    with pytest.raises(rlx.UsageError, match="does not say"):
        MemoryReport(arena=10).picture()
    assert "<svg" in MemoryReport().picture()


def test_the_report_of_a_model() -> None:
    graph = rlx.Graph()
    graph.ir = parse_graph(
        _TEXT.replace("param %w: f32[64,64] = dense<f32[64,64]: elided>", "input %w: f32[64,64]")
    )
    run = rlx.compile(graph, dims={"N": 16})
    report = run.report()
    data = json.loads(json.dumps(report.to_json()))
    assert data["inputs"] == ["x: f32[N,64]", "w: f32[64,64]"]
    assert data["outputs"] == ["y: f32[N,64]"]
    assert (data["model"], data["device"]) == ("small", "cpu")
    assert {(d["op"], d["how"], d["nodes"]) for d in data["dispatch"]} == set(
        run.program.compiled.dispatch
    )
    assert data["memory"]["arena"] == run.memory().arena
    text = str(report)
    assert "small on cpu" in text
    assert "y: f32[N,64]" in text
    names = {n for f in report.fused for n in f.nodes}
    assert names <= {"first", 'soft & "rows"', "second", "third", "last"}
