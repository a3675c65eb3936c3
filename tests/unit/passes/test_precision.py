# SPDX-License-Identifier: Apache-2.0
"""Operators compute in the dtype of the policy, with as few casts as that needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

import rlx
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError, UsageError
from rlx.base.precision import NARROW, OpClass, PrecisionPolicy
from rlx.base.types import TensorType
from rlx.ir.builder import Builder, infer_types
from rlx.ir.graph import Graph
from rlx.ir.op import Op, registered_ops
from rlx.ir.parse import parse_graph
from rlx.ir.verify import verify
from rlx.ops.evaluate import evaluate
from rlx.ops.spec import Operand
from rlx.passes.manager import PassContext
from rlx.passes.precision import ApplyPrecision
from rlx.testing.samples import samples_of

_MLP = """graph {
  input %x: f32[3,8]
  param %w: f32[8,8]
  param %v: f32[8,4]
  %a = matmul(%x, %w)
  %b = tanh(%a)
  %c = transpose(%b) {perm=(1, 0)}
  %d = transpose(%c) {perm=(1, 0)}
  %e = matmul(%d, %v)
  %f = softmax(%e) {axis=-1}
  return %f as "y"
}"""


def _apply(text: str, policy: str | PrecisionPolicy) -> tuple[Graph, list[str]]:
    graph, context = parse_graph(text), PassContext()
    ApplyPrecision(policy).run(graph, context)
    verify(graph)
    return graph, context.report


def _dtypes(graph: Graph) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in graph.block.walk():
        if node.op.name not in ("cast", "constant"):
            found.setdefault(node.op.name, set()).add(str(node.results[0].type.dtype))
    return found


def _casts(graph: Graph) -> int:
    return Counter(n.op.name for n in graph.block.walk())["cast"]


def test_the_uniform_policy_narrows_all_but_inputs_and_outputs() -> None:
    graph, report = _apply(_MLP, "bf16")
    assert _dtypes(graph) == {n: {"bf16"} for n in ("matmul", "tanh", "transpose", "softmax")}
    assert [v.type.dtype for v in (*graph.inputs, *graph.outputs)] == [DType.F32, DType.F32]
    assert _casts(graph) == 4  # x, w and v on the way in, the result on the way out
    assert report == []


def test_the_mixed_policy_keeps_softmax_in_f32_and_the_rest_follows() -> None:
    graph, _ = _apply(_MLP, "mixed-f16")
    narrow = {n: {"f16"} for n in ("matmul", "tanh", "transpose")}
    assert _dtypes(graph) == {**narrow, "softmax": {"f32"}}
    assert _casts(graph) == 4  # x, w, v, and what softmax reads


def test_f32_changes_nothing() -> None:
    graph = parse_graph(_MLP)
    assert not ApplyPrecision("f32").run(graph, PassContext())
    assert _casts(graph) == 0


def test_an_operator_can_be_excepted_by_name() -> None:
    policy = PrecisionPolicy("f16", "f16", "f16", ops=(("tanh", DType.F32),))
    graph, _ = _apply(_MLP, policy)
    assert _dtypes(graph)["tanh"] == {"f32"}
    assert _dtypes(graph)["matmul"] == {"f16"}


def test_two_narrow_dtypes_meet_in_one_cast() -> None:
    graph, _ = _apply(_MLP, PrecisionPolicy("f16", "bf16", None))
    softmax = next(n for n in graph.block if n.op.name == "softmax")
    source = softmax.operands[0]
    assert source is not None
    assert source.producer is not None
    assert source.producer.op.name == "cast"
    inner = source.producer.operands[0]
    assert inner is not None
    assert (inner.type.dtype, source.type.dtype) == (DType.F16, DType.BF16)


def test_a_value_is_cast_once_for_all_its_readers() -> None:
    graph, _ = _apply(
        """graph {
  input %x: f32[4,4]
  %a = matmul(%x, %x)
  %b = matmul(%x, %a)
  %c = exp(%b)
  %d = sin(%b)
  %e = add(%c, %d)
  return %e as "y", %b as "z"
}""",
        PrecisionPolicy("f16", "f32", "f32"),
    )
    assert _casts(graph) == 2  # x into f16, %b back for exp, sin and the output


def test_a_constant_that_does_not_fit_keeps_its_operator_in_f32() -> None:
    text = """graph {
  input %x: f32[4]
  %mask = constant() {data=literal dense<f32[]: -1000000000.0>}
  %y = add(%x, %mask)
  return %y as "y"
}"""
    graph, report = _apply(text, "f16")
    assert _dtypes(graph) == {"add": {"f32"}}
    assert "cannot hold" in report[0]
    assert _dtypes(_apply(text, "bf16")[0]) == {"add": {"bf16"}}


def test_the_mask_of_attention_keeps_its_dtype() -> None:
    graph, _ = _apply(
        """graph {
  input %q: f32[1,2,3,4]
  input %m: f32[3,3]
  %y = attention(%q, %q, %q, %m) {scale=0.5}
  return %y as "y"
}""",
        "f16",
    )
    node = next(n for n in graph.block if n.op.name == "attention")
    assert [v.type.dtype.value for v in node.operands if v is not None] == ["f16"] * 3 + ["f32"]


def test_integers_and_indices_are_not_touched() -> None:
    graph, _ = _apply(
        """graph {
  input %x: f32[5,4]
  input %i: i64[3]
  %g = gather(%x, %i) {axis=0}
  %n = argreduce(%g) {axis=1, kind="max"}
  return %n as "n"
}""".replace("argreduce", _name_of("ArgReduce")),
        PrecisionPolicy("f16", "f16", "f16", "f16"),
    )
    assert graph.outputs[0].type.dtype is DType.I64
    gather = next(n for n in graph.block if n.op.name == "gather")
    assert gather.results[0].type.dtype is DType.F16
    assert gather.operands[1] is graph.inputs[1]


@pytest.mark.parametrize("policy", ["f16", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_positions_that_narrow_floats_do_not_hold_stay_exact(policy: str, device: str) -> None:
    """Indices, arg reductions, orders, comparisons and casts keep their own dtypes under any policy."""
    rows = 5000
    with rlx.Graph() as g:
        ids = g.input("ids", ["N"], "i64")
        x = g.input("x", [rows])
        table = g.param("table", np.arange(rows, dtype=np.float32)[:, None] % 128)
        g.output("row", rlx.ops.gather(table, ids))
        g.output("largest", rlx.ops.arg_max(x * 2.0, 0))
        g.output("order", rlx.ops.top_k(x * 2.0, 3)[1])
        g.output("above", x * 2.0 > 1.0)
        g.output("wide", rlx.ops.cast(ids, "f64") + 0.25)
    given = np.array([0, 2049, 4097, 4999, -1])
    x = np.zeros(rows, np.float32)
    x[[4097, 2049, 4999]] = 3, 2, 1
    with rlx.compile(g, device, precision=policy) as m:
        found = m.run([given, x])
    assert {k: v.dtype.name for k, v in found.items()} == {
        "row": "float32",
        "largest": "int64",
        "order": "int64",
        "above": "bool",
        "wide": "float64",
    }
    np.testing.assert_array_equal(found["row"][:, 0], given % rows % 128)
    assert int(found["largest"].item()) == 4097
    assert found["order"].tolist() == [4097, 2049, 4999]
    assert np.flatnonzero(found["above"]).tolist() == [2049, 4097, 4999]
    np.testing.assert_array_equal(found["wide"], given + 0.25)


def _name_of(cls: str) -> str:
    return next(n for n, c in registered_ops().items() if c.__name__ == cls)


def test_a_state_keeps_its_dtype() -> None:
    graph, _ = _apply(
        """graph {
  input %x: f32[4]
  state "h" %h: f32[4] = dense<f32[]: 0.0>
  %next = add(%h, %x)
  next "h" = %next
  return %next as "y"
}""",
        "bf16",
    )
    (state,) = graph.states
    assert _dtypes(graph) == {"add": {"bf16"}}
    assert state.next is graph.outputs[0]
    assert state.next.type.dtype is DType.F32


@dataclass(frozen=True)
class _OnlyF32(Op):
    name = "only_f32"
    operands = ("x",)
    precision_class = OpClass.COMPUTE

    def infer(self, x: TensorType) -> TensorType:
        if x.dtype is not DType.F32:
            raise TypeRuleError("needs f32")
        return x


def test_an_operator_without_the_dtype_stays_and_is_reported() -> None:
    graph, context = Graph(), PassContext()
    builder = Builder(graph.block, graph.facts)
    x = graph.add_input("x", TensorType(DType.F32, (4,)))
    graph.set_outputs({"y": builder.emit_one(_OnlyF32(), x)})
    ApplyPrecision("bf16").run(graph, context)
    assert _dtypes(graph) == {"only_f32": {"f32"}}
    assert context.report[0].startswith("apply-precision: only_f32 at ")
    assert "stays f32" in context.report[0]


def test_every_narrowable_operator_takes_both_narrow_dtypes() -> None:
    seen: set[str] = set()
    for name, cls in registered_ops().items():
        for sample in samples_of(cls) if cls.precision_class is not OpClass.FIXED else ():
            op = cls(**sample.attributes)
            try:
                infer_types(op, [_typed(o, DType.F32) for o in sample.operands])
            except TypeRuleError:
                continue
            seen.add(name)
            for dtype in NARROW:
                infer_types(op, [_typed(o, dtype) for o in sample.operands])
    assert {"matmul", "softmax", "dft", "resize", "erf"} <= seen


def _typed(operand: Operand | None, dtype: DType) -> TensorType | None:
    if operand is None:
        return None
    chosen = dtype if operand.dtype in (None, DType.F32) else operand.dtype
    assert chosen is not None
    return TensorType(chosen, tuple(operand.shape))


def test_results_are_those_of_the_narrow_operators() -> None:
    graph, _ = _apply(_MLP, "f16")
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    w = np.full((8, 8), 0.125, np.float16)
    v = np.full((8, 4), 0.25, np.float16)
    a = (x.astype(np.float16).astype(np.float32) @ w.astype(np.float32)).astype(np.float16)
    b = np.tanh(a.astype(np.float32)).astype(np.float16)
    e = (b.astype(np.float32) @ v.astype(np.float32)).astype(np.float16).astype(np.float32)
    p = np.exp(e - e.max(1, keepdims=True))
    want = (p / p.sum(1, keepdims=True)).astype(np.float16).astype(np.float32)
    for name, data in (("w", w), ("v", v)):
        graph.params[name].data = data.astype(np.float32)
    got = evaluate(graph, {"x": x})["y"]
    np.testing.assert_allclose(got, want, rtol=2**-10)
    assert np.array_equal(got, got.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("moved", ["%d", "%t"])
def test_products_of_dequantised_activations_stay_f32(moved: str) -> None:
    graph, _ = _apply(
        f"""graph {{
  input %x: u8[8,8]
  param %s: f32[]
  param %w: f32[8,4]
  %d = dequantize_linear(%x, %s, none) {{axis=none, block=0, to=f32}}
  %t = transpose(%d) {{perm=(1, 0)}}
  %a = matmul({moved}, %w)
  %b = tanh(%a)
  return %b as "y"
}}""",
        "bf16",
    )
    assert _dtypes(graph)["matmul"] == {"f32"}
    assert _dtypes(graph)["tanh"] == {"bf16"}


def test_weights_that_were_quantised_are_narrowed() -> None:
    graph, _ = _apply(
        """graph {
  input %x: f32[3,8]
  param %s: f32[]
  param %w: i8[8,4]
  %v = dequantize_linear(%w, %s, none) {axis=none, block=0, to=f32}
  %a = matmul(%x, %v)
  return %a as "y"
}""",
        "bf16",
    )
    assert _dtypes(graph)["matmul"] == {"bf16"}


def test_every_operator_on_floats_has_a_class() -> None:
    fixed = {n for n, c in registered_ops().items() if c.precision_class is OpClass.FIXED}
    assert not fixed & {"matmul", "conv", "attention", "softmax", "add", "reshape", "lstm"}
    assert {"cast", "constant", "quantize_linear", "dequantize_linear", "if", "loop"} <= fixed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("i8",), "precision of compute is one of f32, f16, bf16, not i8"),
        (("f32", "f64"), "precision of reduction"),
        (("f32", "f32", "f32", None, (("tanh", "f8e5m2"),)), "ops\\['tanh'\\]"),
    ],
)
def test_a_policy_says_what_it_takes(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PrecisionPolicy(*arguments)  # pyright: ignore[reportArgumentType]


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"mixed-bf16.*'mixed_bf16'.*mean 'mixed-bf16'"):
        PrecisionPolicy.of("mixed_bf16")
