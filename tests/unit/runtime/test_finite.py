# SPDX-License-Identifier: Apache-2.0
"""The first node that makes a NaN or an infinity is named, and only that one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base.config import override
from rlx.base.numeric import Array
from rlx.ir.parse import parse_graph

_F32 = np.float32


def executable(text: str, device: str = "cpu", **options: Any) -> rlx.Executable:
    graph = rlx.Graph()
    graph.ir = parse_graph(text)
    return rlx.compile(graph, device, **options)


def numbers(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(_F32)


# Matmuls keep the steps apart; the division makes infinities where x has zeros, 0 * inf makes NaN.
_DIVIDES = """graph {
  input %x: f32[N,4]
  input %w: f32[4,4]
  %a = matmul(%x, %w) @ "before"
  %b = softmax(%a) {axis=1} @ "soft"
  %c = matmul(%b, %w) @ "third"
  %d = div(%x, %c) @ "guilty"
  %t = transpose(%d) {perm=(1, 0)} @ "moves"
  %e = matmul(%d, %w) @ "after"
  %u = matmul(%w, %t) @ "after too"
  return %e as "y", %u as "u"
}"""


@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_node_is_named_with_its_operands(rows: int) -> None:
    run = executable(_DIVIDES, dims={"N": 4})
    x, w = np.arange(4 * rows, dtype=_F32).reshape(rows, 4) - 7, np.zeros((4, 4), _F32)
    with pytest.raises(rlx.ExecutionError) as error:
        run.check_finite({"x": x, "w": w})
    text = str(error.value)
    assert "'guilty'" in text.partition(" made ")[0]
    zeros = int((x == 0).sum())
    assert f"{zeros} NaN and {x.size - zeros} Inf" in text or f"made {x.size} Inf" in text
    assert f"of {x.size} elements" in text
    assert f"'x' f32[N,4] in [{x.min():.6g}, {x.max():.6g}]" in text
    assert "in [0, 0]" in text


def test_a_run_without_any_gives_the_outputs() -> None:
    run = executable(_DIVIDES, dims={"N": 4})
    inputs = {"x": numbers(3, 4), "w": np.eye(4, dtype=_F32)}
    got, want = run.check_finite(inputs), run.run(inputs)
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_came_in_is_nobodys_fault(value: float) -> None:
    run = executable(_DIVIDES, dims={"N": 4})
    x = numbers(3, 4)
    x[1, 2] = value
    outputs = run.check_finite({"x": x, "w": np.eye(4, dtype=_F32)})
    assert not np.isfinite(outputs["y"]).all()


def test_infinities_need_not_count() -> None:
    run = executable(_DIVIDES, dims={"N": 4})
    inputs = {"x": np.ones((2, 4), _F32), "w": np.zeros((4, 4), _F32)}
    with pytest.raises(rlx.ExecutionError, match=r"'guilty'.* made 8 Inf of 8"):
        run.check_finite(inputs)
    with pytest.raises(rlx.ExecutionError, match=r"'after'.* made 8 NaN of 8.*without a finite"):
        run.check_finite(inputs, infinities=False)


_LOOP = """graph {
  input %start: f32[8,8]
  input %xs: f32[5,8,8]
  %last, %all = scan(%start, %xs) {carried=1, scan_inputs=1, trip=5} {
    region(%u: f32[8,8], %x: f32[8,8]) {
      %t = matmul(%u, %x) @ "product"
      %l = softmax(%t) {axis=1}
      %s = log(%x) @ "logarithm"
      %m = matmul(%s, %l)
      return %m, %s
    }
  }
  return %last as "last", %all as "all"
}"""


def test_in_a_loop() -> None:
    run = executable(_LOOP)
    inputs = {"start": np.eye(8, dtype=_F32), "xs": np.ones((5, 8, 8), _F32)}
    run.check_finite(inputs)
    inputs["xs"][3, 5, 1] = -1
    with pytest.raises(
        rlx.ExecutionError, match=r"'logarithm'.* made 1 NaN of 64 .*first at \[5, 1\]"
    ):
        run.check_finite(inputs)


_PARTS = """graph {
  input %x: f32[2,3]
  input %i: i64[2]
  %v, %p = top_k(%x) {k=2, axis=1} @ "host"
  %c = concat(%x, %v, %x) {axis=1} @ "joined"
  %z = scatter_elements(%c, %p, %v) {axis=1} @ "scattered"
  return %z as "y"
}"""


def test_results_that_several_launches_write_are_looked_at_when_they_are_whole() -> None:
    text = _PARTS.replace('  %z = scatter_elements(%c, %p, %v) {axis=1} @ "scattered"\n', "")
    run = executable(text.replace("return %z", "return %c").replace("  input %i: i64[2]\n", ""))
    with override(RLX_CHECK=True):  # buffers are full of NaN before every run
        checked = executable(
            text.replace("return %z", "return %c").replace("  input %i: i64[2]\n", "")
        )
    for each in (run, checked):
        got = each.check_finite({"x": numbers(2, 3)})["y"]
        assert np.isfinite(got).all()


@pytest.mark.parametrize(("knob", "node"), [("1", "guilty"), ("on", "guilty"), ("nan", "after")])
def test_the_knob_checks_every_run(knob: str, node: str) -> None:
    inputs = {"x": np.ones((2, 4), _F32), "w": np.zeros((4, 4), _F32)}
    with override(RLX_NAN_CHECK=knob):
        run = executable(_DIVIDES, dims={"N": 4})
        with pytest.raises(rlx.ExecutionError, match=f"'{node}'"):
            run.run(inputs)
        with pytest.raises(rlx.ExecutionError, match=f"'{node}'"):
            run.run_async(inputs).result()
        fine = {"x": np.ones((2, 4), _F32), "w": np.ones((4, 4), _F32)}
        assert np.isfinite(run.run(fine)["y"]).all()


def test_another_value_of_the_knob_is_refused() -> None:
    run = executable(_DIVIDES, dims={"N": 4})
    with override(RLX_NAN_CHECK="yes please"), pytest.raises(rlx.UsageError, match="yes please"):
        run.run({"x": numbers(2, 4), "w": numbers(4, 4)})


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_every_float_dtype(dtype: str) -> None:
    run = executable(
        f"""graph {{
          input %x: {dtype}[4,4]
          %a = matmul(%x, %x) @ "product"
          return %a as "y"
        }}"""
    )
    big = np.full((4, 4), 3e38 if dtype == "bf16" else 6e4 if dtype == "f16" else 1e200)
    x = big.astype(run.inputs[0].dtype.numpy)
    with pytest.raises(rlx.ExecutionError, match=rf"'product' made 16 Inf of 16 .*{dtype}\[4, 4\]"):
        run.check_finite({"x": x})
