# SPDX-License-Identifier: Apache-2.0
"""Profiles count what ran, know what it took, and write traces that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import rlx
import rlx.backends.cpu.kernels  # pyright: ignore[reportUnusedImport]  (registers the lowerings)
from rlx.backends.cpu import lowering
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ir.parse import parse_graph
from rlx.ops.reduce import TopK
from rlx.runtime.profile import Profile

_F32 = np.float32


def executable(text: str, device: str = "cpu", **options: Any) -> rlx.Executable:
    graph = rlx.Graph("small")
    graph.ir = parse_graph(text)
    return rlx.compile(graph, device, **options)


def numbers(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(_F32)


_TEXT = """graph "small" {
  input %x: f32[N,64]
  input %w: f32[64,64]
  %a = matmul(%x, %w) @ "first"
  %b = exp(%a) @ "chained"
  %s = softmax(%b) {axis=1} @ "rows"
  %v, %i = top_k(%s) {k=3, axis=1} @ "best"
  %c = matmul(%s, %w) @ "second"
  return %c as "y", %v as "v"
}"""


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    kernels = lowering._LOWERINGS  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(kernels, TopK, [])  # so the host runs it
    with override(RLX_CACHE="off"):
        run = executable(_TEXT, dims={"N": 32}, threads=1)
    return run.profile({"x": numbers(16, 64), "w": numbers(64, 64)}, runs=4, warmup=1)


def test_a_row_per_node_with_what_it_takes(profile: Profile) -> None:
    rows = {r.name: r for r in profile.rows("node")}
    assert {r.op for r in rows.values()} >= {"matmul", "top_k"}
    assert all(r.calls >= 1 and r.ns > 0 and r.threads == 1 for r in rows.values())
    second = rows["second"]
    assert second.flops == 2 * 16 * 64 * 64
    assert second.gflops == pytest.approx(second.flops / second.ns)
    (best,) = [r for r in rows.values() if r.op == "top_k"]
    assert best.flops is None
    assert best.gflops is None
    assert best.nbytes == 4 * 16 * 64 + (4 + 8) * 16 * 3
    assert best.gbytes_per_second == pytest.approx(best.nbytes / best.ns)
    done = {n for r in rows.values() for n in r.nodes}
    assert done == {"first", "chained", "rows", "best", "second"}
    assert list(rows.values()) == sorted(rows.values(), key=lambda r: -r.ns)


def test_rows_by_launch_and_by_operator_add_up(profile: Profile) -> None:
    totals = {by: sum(r.calls for r in profile.rows(by)) for by in ("thunk", "node", "op")}
    spans = [s for run in profile.spans for s in run]
    assert set(totals.values()) == {len(spans) / 4}
    nbytes = {sum(r.nbytes for r in profile.rows(by)) for by in ("thunk", "node", "op")}
    assert len(nbytes) == 1
    assert {r.op for r in profile.rows("op")} == {r.op for r in profile.rows("node")}
    with pytest.raises(rlx.UsageError, match="not 'kernel'"):
        profile.rows(cast("Any", "kernel"))


def test_times_lie_inside_their_run_and_in_order(profile: Profile) -> None:
    assert len(profile.runs) == len(profile.spans) == 4
    borders: list[int] = []
    for (began, ended), spans in zip(profile.runs, profile.spans, strict=True):
        borders += [began, *(t for s in spans for t in (s.began, s.ended)), ended]
    assert borders == sorted(borders)
    assert 0 < profile.outside < profile.ns
    assert sum(r.share for r in profile.rows()) <= 1.5  # medians of parts need not add up


def test_nodes_that_look_the_same_are_two() -> None:
    with rlx.Graph("twins") as g:
        x = g.input("x", [8, 8])
        g.output("y", (x @ x) @ x)
    for _ in range(2):  # compiled, and from the cache
        rows = rlx.compile(g).profile({"x": numbers(8, 8)}, runs=2).rows()
        assert [r.flops for r in rows] == [2 * 8**3] * 2
        (row,) = rlx.compile(g).profile({"x": numbers(8, 8)}, runs=2).rows("op")
        assert row.flops == 4 * 8**3


def test_loops_count_every_iteration_and_launches_of_none_count_too() -> None:
    run = executable(
        """graph {
          input %start: f32[4,4]
          input %xs: f32[T,4,4]
          %last, %all = scan(%start, %xs) {carried=1, scan_inputs=1, trip=<T>} {
            region(%u: f32[4,4], %x: f32[4,4]) {
              %t = matmul(%u, %x) @ "product"
              return %t, %t
            }
          }
          return %last as "last", %all as "all"
        }""",
        dims={"T": 3000},
    )
    inputs = {"start": np.eye(4, dtype=_F32), "xs": numbers(2500, 4, 4) / 4}
    profile = run.profile(inputs, runs=3)
    (row,) = [r for r in profile.rows() if r.name == "product"]
    assert row.calls >= 2500
    assert row.flops == 2500 * 2 * 4 * 4 * 4
    np.testing.assert_array_equal(run.run(inputs)["all"], run.tap("all", inputs))


def test_text_and_json(profile: Profile) -> None:
    text = str(profile)
    assert text.startswith("small on cpu, 1 thread(s), N=16: ")
    assert "second" in text
    assert "outside of kernels" in text
    assert "more" in profile.text("thunk", top=1)
    data = json.loads(json.dumps(profile.to_json()))
    assert data["extents"] == {"N": 16}
    assert [r["name"] for r in data["by_node"]] == [r.name for r in profile.rows()]
    assert data["ns"] == profile.ns


def test_a_trace_is_of_the_format_that_perfetto_reads(profile: Profile, tmp_path: Path) -> None:
    profile.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    schema = json.loads((Path(__file__).parent / "trace.schema.json").read_text())
    assert errors(trace, schema) == []
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    runs = [e for e in events if e["cat"] == "run"]
    assert [e["name"] for e in runs] == ["run 0", "run 1", "run 2", "run 3"]
    kernels = [e for e in events if e["cat"] != "run"]
    assert len(kernels) == sum(map(len, profile.spans))
    for event in kernels:  # nested in a run, on a track of their own
        inside = [
            r
            for r in runs
            if r["ts"] - 1e-3 <= event["ts"]
            and event["ts"] + event["dur"] <= r["ts"] + r["dur"] + 1e-3
        ]
        assert len(inside) == 1
        assert inside[0]["tid"] != event["tid"]
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"} >= {"runs"}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"traceEvents": {}},
        {"traceEvents": [{"name": "a", "ph": "X", "ts": 0, "dur": 1, "pid": 1, "tid": 1}]},
        {
            "traceEvents": [
                {"name": "n", "cat": "", "ph": "X", "ts": -1, "dur": 1, "pid": 1, "tid": 1}
            ]
        },
        {"traceEvents": [], "displayTimeUnit": "us"},
        {"traceEvents": [], "more": 1},
    ],
)
def test_the_schema_refuses_what_is_no_trace(wrong: dict[str, Any]) -> None:
    schema = json.loads((Path(__file__).parent / "trace.schema.json").read_text())
    assert errors(wrong, schema)


def errors(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """Return what is wrong with a value by the keywords of JSON Schema that the schema uses."""
    unknown = set(schema) - {
        "$comment", "type", "required", "properties", "additionalProperties", "items", "enum", "oneOf", "minimum"
    }  # fmt: skip
    assert not unknown, unknown
    if "oneOf" in schema:
        matches = [s for s in schema["oneOf"] if not errors(value, s, where)]
        return [] if len(matches) == 1 else [f"{where}: {len(matches)} forms fit {value}"]
    kinds = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int}
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return [f"{where}: {value!r} is no {schema['type']}"]
    found: list[str] = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is not one of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where}: {value} is below {schema['minimum']}")
    if isinstance(value, list) and "items" in schema:
        for item in cast("list[Any]", value):
            found += errors(item, schema["items"], f"{where}[]")
    if isinstance(value, dict):
        found += _errors_of_fields(cast("dict[str, Any]", value), schema, where)
    return found


def _errors_of_fields(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = [f"{where}: no {n}" for n in schema.get("required", ()) if n not in value]
    for name, item in value.items():
        if name in known:
            found += errors(item, known[name], f"{where}.{name}")
        elif rest is False:
            found.append(f"{where}: unknown {name}")
        elif isinstance(rest, dict):
            found += errors(item, cast("dict[str, Any]", rest), f"{where}.{name}")
    return found


@pytest.mark.parametrize(("runs", "warmup"), [(0, 0), (1, -1)])
def test_numbers_of_runs_that_make_no_sense(runs: int, warmup: int) -> None:
    run = executable(_TEXT, dims={"N": 4})
    with pytest.raises(rlx.UsageError, match="at least 1 run"):
        run.profile({"x": numbers(4, 64), "w": numbers(64, 64)}, runs, warmup)


def test_a_device_that_cannot_be_watched_says_so() -> None:
    run = executable(_TEXT, "reference", dims={"N": 4})
    with pytest.raises(rlx.UsageError, match="profile looks between kernels"):
        run.profile({"x": numbers(4, 64), "w": numbers(64, 64)})
