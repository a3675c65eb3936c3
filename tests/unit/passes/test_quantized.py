# SPDX-License-Identifier: Apache-2.0
"""Products of dequantised operands become integer products, or say why not."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.numeric import Array
from rlx.base.target import Claims
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.passes.dce import Dce
from rlx.passes.manager import PassContext
from rlx.passes.quantized import CentreWeights, RecognizeQuantizedProducts

_CLAIMS = Claims(ops=frozenset({"quantized_matmul", "matmul"}))
_TEXT = """graph {
  input %a: u8[5,4]
  input %r: f32[]
  param %w: i8[4,2] = dense<i8[4,2]: 1, -2, 3, -4, 5, -6, 127, -128>
  param %as: f32[] = dense<f32[]: 0.5>
  param %az: u8[] = dense<u8[]: 128>
  param %ws: f32[2] = dense<f32[2]: 0.25, 2.0>
  param %one: f32[] = dense<f32[]: 0.25>
  %wz = constant() {data=literal dense<i8[2]: 0, 0>}
  %x = dequantize_linear(%a, %as, %az) {axis=none, block=0, to=f32}
  %v = dequantize_linear(%w, %ws, %wz) {axis=1, block=0, to=f32}
  %y = matmul(%x, %v)
  return %y as "y"
}"""


def _run(
    text: str,
    claims: Claims = _CLAIMS,
    step: CentreWeights | RecognizeQuantizedProducts = RecognizeQuantizedProducts(),  # noqa: B008
) -> tuple[Graph, list[str]]:
    """Return the graph after a pass, which gives equal results (all are exact), and reasons."""
    plain, graph, context = parse_graph(text), parse_graph(text), PassContext(claims=claims)
    step.run(graph, context)
    Dce().run(graph, context)
    verify(graph)
    chance = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for value in plain.inputs:
        shape = [int(str(d)) for d in value.type.shape]
        inputs[value.name] = chance.integers(1, 100, shape).astype(value.type.dtype.numpy)
    want, got = evaluate(plain, inputs)["y"], evaluate(graph, inputs)["y"]
    assert got.tobytes() == want.tobytes()
    return graph, context.report


def _names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.block if n.op.name not in ("constant", "reshape")]


_COLUMNS = "dequantize_linear(%w, %ws, %wz) {axis=1,"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("%a, %as, %az", "%a, %as"),
        ("%a, %as, %az", "%a, %r, %az"),
        ("%w, %ws, %wz", "%w, %ws"),
        (_COLUMNS, "dequantize_linear(%w, %one) {axis=none,"),
        ("input %a: u8[5,4]", "input %a: u8[2,5,4]"),
        ("%as: f32[] = dense<f32[]: 0.5>", "%as: f32[1,1] = dense<f32[1,1]: 0.5>"),
    ],
)
def test_a_product_with_a_weight_is_recognised(old: str, new: str) -> None:
    text = _TEXT.replace(old, new)
    if "f32[1,1]" in new:
        text = text.replace("%az: u8[] = dense<u8[]: 128>", "%az: u8[1,1] = dense<u8[1,1]: 128>")
    graph, reasons = _run(text)
    assert _names(graph) == ["quantized_matmul"]
    assert not reasons


_WEIGHT = "param %w: i8[4,2] = dense<i8[4,2]: 1, -2, 3, -4, 5, -6, 127, -128>"
_DATA = "dense<i8[4,2]: 1, -2, 3, -4, 5, -6, 127, -128>"


def test_unsigned_weights_around_128_are_recognised() -> None:
    text = _TEXT.replace(_WEIGHT, "param %w: u8[4,2] = dense<u8[4,2]: 1, 2, 3, 4, 5, 6, 0, 255>")
    graph, reasons = _run(text.replace("dense<i8[2]: 0, 0>", "dense<u8[2]: 128, 128>"))
    assert "quantized_matmul" in _names(graph)
    assert not reasons


def test_weights_that_are_constants_are_recognised() -> None:
    text = _TEXT.replace(f"  {_WEIGHT}\n", "").replace(
        "  %wz =", f"  %w = constant() {{data=literal {_DATA}}}\n  %wz ="
    )
    assert _names(_run(text)[0]) == ["quantized_matmul"]


def test_transposed_weights_are_recognised() -> None:
    text = _TEXT.replace("%w: i8[4,2] = dense<i8[4,2]", "%w: i8[2,4] = dense<i8[2,4]")
    text = text.replace("{axis=1,", "{axis=0,").replace("matmul(%x, %v)", "matmul(%x, %t)")
    text = text.replace("  %y =", "  %t = transpose(%v) {perm=(1, 0)}\n  %y =")
    assert _names(_run(text)[0]) == ["transpose", "quantized_matmul"]


def test_signed_operands_are_recognised() -> None:
    text = _TEXT.replace("a: u8", "a: i8").replace(
        "az: u8[] = dense<u8[]: 128>", "az: i8[] = dense<i8[]: -3>"
    )
    assert _names(_run(text)[0]) == ["quantized_matmul"]


def test_weights_that_branches_capture_are_recognised() -> None:
    head, rest = _TEXT.split("  %wz = constant")
    body = "%wz = constant" + rest.split("return")[0]
    parameters = "%a: u8[5,4], %w: i8[4,2], %as: f32[], %az: u8[], %ws: f32[2]"
    text = f"""{head}
      input %c: bool[]
      %y = if(%c, %a, %w, %as, %az, %ws) {{
        region({parameters}) {{
          {body}
          return %y
        }}
        region({parameters}) {{
          {body}
          return %y
        }}
      }}
      return %y as "y"
    }}"""
    graph, _ = _run(text)
    (branch,) = [n for n in graph.block if n.regions]
    for region in branch.regions:
        assert "quantized_matmul" in [n.op.name for n in region]
        assert "matmul" not in [n.op.name for n in region]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "param %w: i8[4,2] = dense<i8[4,2]: 1, -2, 3, -4, 5, -6, 127, -128>",
            "input %w: i8[4,2]",
            "computed at run time",
        ),
        ("dense<i8[2]: 0, 0>", "dense<i8[2]: 0, 1>", "its zero points are not all 0"),
        (_COLUMNS, "dequantize_linear(%w, %r) {axis=none,", "scale is computed at run time"),
        ("param %w: i8[4,2]", "param %w: u8[4,2]", "its zero points are not all 0"),
    ],
)
def test_what_is_no_integer_product_leaves_a_reason(old: str, new: str, reason: str) -> None:
    text = _TEXT.replace(old, new)
    assert text != _TEXT
    if "u8[4,2]" in new:
        text = text.replace(
            "dense<i8[4,2]: 1, -2, 3, -4, 5, -6, 127, -128>",
            "dense<u8[4,2]: 1, 2, 3, 4, 5, 6, 7, 255>",
        )
        text = text.replace("dense<i8[2]", "dense<u8[2]")
    graph, reasons = _run(text)
    assert _names(graph) == ["dequantize_linear", "dequantize_linear", "matmul"]
    assert any(reason in line for line in reasons), reasons


def test_sums_that_may_leave_i32_are_refused() -> None:
    zeros = np.zeros(65_794 * 2, np.int8)
    text = _TEXT.replace("u8[5,4]", "u8[1,65794]").replace("i8[4,2]", "i8[65794,2]")
    text = text.replace("1, -2, 3, -4, 5, -6, 127, -128", ", ".join(map(str, zeros)))
    graph, reasons = _run(text)
    assert "matmul" in _names(graph)
    assert any("sums of 65794 products may leave i32" in line for line in reasons), reasons


def test_scales_along_the_rows_are_refused() -> None:
    text = _TEXT.replace(
        "%w: i8[4,2] = dense<i8[4,2]: 1, -2, 3, -4, 5, -6, 127, -128>",
        "%w: i8[2,2] = dense<i8[2,2]: 1, 2, 3, 4>",
    )
    text = text.replace("u8[5,4]", "u8[5,2]").replace("axis=1", "axis=0")
    graph, reasons = _run(text)
    assert "quantized_matmul" not in _names(graph)
    assert any("not per column" in line for line in reasons)


def test_a_target_without_the_kernel_keeps_the_graph() -> None:
    graph, reasons = _run(_TEXT, Claims(ops=frozenset({"matmul"})))
    assert "quantized_matmul" not in _names(graph)
    assert not reasons


_CONV = """graph {
  input %a: u8[2,4,3,5]
  param %w: i8[2,4,1,1] = dense<i8[2,4,1,1]: 1, -2, 3, -4, 5, -6, 127, -128>
  param %k: i8[2,1,3,3] = dense<i8[2,1,3,3]: 1, -2, 3, 4, -5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9>
  param %as: f32[] = dense<f32[]: 0.5>
  param %az: u8[] = dense<u8[]: 128>
  param %ws: f32[2] = dense<f32[2]: 0.25, 2.0>
  param %b: f32[2] = dense<f32[2]: 1.0, -3.0>
  %x = dequantize_linear(%a, %as, %az) {axis=none, block=0, to=f32}
  %v = dequantize_linear(%w, %ws) {axis=0, block=0, to=f32}
  %y = conv(%x, %v, %b) {strides=(1, 1), dilations=(1, 1), pads=((0, 0), (0, 0)), groups=1}
  return %y as "y"
}"""
_CONV_CLAIMS = Claims(ops=frozenset({"quantized_conv", "matmul", "conv"}))


@pytest.mark.parametrize("bias", ["%x, %v, %b", "%x, %v"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("strides=(1, 1)", "strides=(2, 2)"),
        ("pads=((0, 0), (0, 0))", "pads=((0, 2), (1, 0))"),
        ("linear(%w, %ws) {axis=0", "linear(%k, %ws) {axis=0"),
    ],
)
def test_a_convolution_with_a_weight_is_recognised(old: str, new: str, bias: str) -> None:
    text = _CONV.replace(old, new).replace("%x, %v, %b", bias)
    if "%k" in new:
        text = text.replace("u8[2,4,3,5]", "u8[2,1,3,5]")
    graph, reasons = _run(text, _CONV_CLAIMS)
    names = _names(graph)
    assert "quantized_conv" in names
    assert not {"conv", "dequantize_linear"} & set(names)
    assert not reasons


@pytest.mark.parametrize(("channels", "recognised"), [(1, True), (2, False)])
def test_groups_are_whole_quads_or_single_channels(channels: int, recognised: bool) -> None:
    numbers = ", ".join("1" for _ in range(2 * channels))
    text = _CONV.replace("linear(%w, %ws) {axis=0", "linear(%g, %ws) {axis=0").replace(
        "  %x = ",
        f"  param %g: i8[2,{channels},1,1] = dense<i8[2,{channels},1,1]: {numbers}>\n  %x = ",
    )
    text = text.replace("u8[2,4,3,5]", f"u8[2,{2 * channels},3,5]").replace("groups=1", "groups=2")
    graph, reasons = _run(text, _CONV_CLAIMS)
    assert ("quantized_conv" in _names(graph)) is recognised
    assert any("its groups have 2 for 2 filters" in r for r in reasons) is not recognised


def test_a_target_without_integer_convolutions_keeps_them() -> None:
    graph, reasons = _run(_CONV, _CLAIMS)
    assert "quantized_conv" not in _names(graph)
    assert not reasons


_INTEGER = """graph {
  input %a: u8[5,4]
  input %az: u8[]
  param %w: u8[4,2] = dense<u8[4,2]: 1, 2, 3, 4, 5, 6, 127, 255>
  param %z: u8[2] = dense<u8[2]: 128, 7>
  %wz = constant() {data=literal dense<u8[]: 128>}
  %y = integer_matmul(%a, %az, %w, %z)
  return %y as "y"
}"""
_INTEGER_CLAIMS = Claims(ops=frozenset({"integer_matmul", "integer_conv", "matmul", "conv"}))


def _centred(text: str) -> tuple[Graph, list[str]]:
    return _run(text, _INTEGER_CLAIMS, CentreWeights())


@pytest.mark.parametrize(
    ("zeros", "corrected"),
    [("%z", True), ("%wz", False), ("none", True)],
)
def test_weights_become_signed_and_lose_their_zero_points(zeros: str, corrected: bool) -> None:
    graph, _ = _centred(_INTEGER.replace("%w, %z", "%w" if zeros == "none" else f"%w, {zeros}"))
    (product,) = [n for n in graph.block if n.op.name == "integer_matmul"]
    w, zero = (*product.operands, None)[2:4]
    assert w is not None
    assert (str(w.type.dtype), zero) == ("i8", None)
    assert ("reduce" in _names(graph)) is corrected


def test_signed_weights_around_zero_stay() -> None:
    text = _INTEGER.replace("%w: u8[4,2] = dense<u8[4,2]", "%w: i8[4,2] = dense<i8[4,2]")
    graph, _ = _centred(text.replace("255", "-1").replace("%w, %z", "%w"))
    assert _names(graph) == ["integer_matmul"]


def test_products_of_two_activations_are_wide_ones() -> None:
    text = _INTEGER.replace(
        "param %w: u8[4,2] = dense<u8[4,2]: 1, 2, 3, 4, 5, 6, 127, 255>", "input %w: u8[4,2]"
    )
    assert "integer_matmul" not in _names(_centred(text)[0])


@pytest.mark.parametrize(
    ("zero", "groups", "kept"), [("%wz", 1, True), ("%z", 1, False), ("%wz", 2, True)]
)
def test_convolutions_keep_no_zero_points(zero: str, groups: int, kept: bool) -> None:
    window = "strides=(1, 1), dilations=(1, 1), pads=((1, 0), (0, 1))"
    text = f"""graph {{
      input %a: u8[2,{groups},3,5]
      param %w: u8[2,1,3,2] = dense<u8[2,1,3,2]: 1, 2, 3, 4, 5, 6, 127, 255, 9, 8, 7, 0>
      param %z: u8[2] = dense<u8[2]: 128, 7>
      %wz = constant() {{data=literal dense<u8[]: 128>}}
      %y = integer_conv(%a, none, %w, {zero}) {{{window}, groups={groups}}}
      return %y as "y"
    }}"""
    graph, _ = _centred(text)
    assert ("integer_conv" in _names(graph)) is kept
