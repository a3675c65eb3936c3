# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
from rlx.base.errors import CompileError, PassError, UsageError
from rlx.base.target import Claims
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.passes.dce import Dce
from rlx.passes.manager import Entry, PassContext, Pipeline, parse_passes
from rlx.passes.pipelines import OPTIONAL, PASSES, default_pipeline, pipeline_from_text

TEXT = 'graph { input %x: f32[2] %a = neg(%x) %y = abs(%x) return %y as "y" }'


@dataclass(frozen=True)
class _Needs:
    count: int = 3
    deep: bool = True
    scale: float = 1.0
    name = "needs"
    requires = ("canonical",)

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        del graph
        ctx.note(self.name, f"count {self.count}")
        return False


@dataclass(frozen=True)
class _Breaks:
    name = "breaks"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        del ctx
        graph.inputs[0].uses.clear()
        return True


@dataclass(frozen=True)
class _Raises:
    name = "raises"

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        raise CompileError("no")


_KNOWN = {"needs": _Needs, "breaks": _Breaks, "raises": _Raises, "dce": Dce}


def test_a_pipeline_runs_in_order_and_accounts_for_time(tmp_path: Path) -> None:
    ctx = PassContext(verify=True, dump=tmp_path / "dump")
    assert Pipeline((Entry(Dce(), "first"), Entry(Dce(), "again"))).run(parse_graph(TEXT), ctx)
    assert set(ctx.seconds) == {"input", "dce"}
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names == ["00-input.rir", "01-dce.rir", "02-dce.rir"]
    assert "neg" not in (tmp_path / "dump" / "01-dce.rir").read_text(encoding="utf-8")


def test_a_property_that_nothing_ensures_is_refused() -> None:
    with pytest.raises(UsageError, match="needs requires 'canonical'"):
        Pipeline((Entry(_Needs(), "why"),))


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    ctx = PassContext(verify=True)
    with pytest.raises(PassError, match="after pass breaks"):
        Pipeline((Entry(_Breaks(), "why"),)).run(parse_graph(TEXT), ctx)


def test_a_pass_that_raises_is_named_in_the_notes() -> None:
    with pytest.raises(CompileError) as caught:
        Pipeline((Entry(_Raises(), "why"),)).run(parse_graph(TEXT), PassContext())
    assert caught.value.__notes__ == ["in pass raises"]


def test_options_are_parsed_by_type_and_printed_back() -> None:
    known = {"needs": _Needs, "dce": Dce, "canonicalize": PASSES["canonicalize"]}
    text = "canonicalize,needs{count=7,deep=false,scale=0.5},dce"
    pipeline = parse_passes(text, known)
    assert str(pipeline) == text
    assert list(pipeline)[1] == _Needs(7, False, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dcee", "unknown pass 'dcee'. Did you mean 'dce'"),
        ("dce{", "missing '}'"),
        ("dce dce", "unknown pass 'dce dce'"),
        ("dce{} dce", "expected ','"),
        ("dce{x=1}", "has no option 'x'"),
        ("needs{count=many}", "is a int, not 'many'"),
        ("needs{deep=maybe}", "is a bool, not 'maybe'"),
    ],
)
def test_texts_that_are_no_pipeline_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_passes(text, _KNOWN)


def test_notes_are_kept_once_and_in_order() -> None:
    ctx = PassContext()
    for text in ("b", "a", "b"):
        ctx.note("p", text)
    assert ctx.report == ["p: b", "p: a"]


def test_every_entry_of_the_default_pipelines_has_a_reason_and_a_name() -> None:
    for claims in (Claims(), Claims(ops=frozenset({"region"}))):
        pipeline = default_pipeline(claims)
        assert all(e.reason for e in pipeline.entries)
        assert all(PASSES[step.name] is type(step) for step in pipeline)
        assert str(pipeline_from_text(str(pipeline))) == str(pipeline)


def test_claims_answer_what_passes_ask() -> None:
    claims = Claims(
        ops=frozenset({"conv"}),
        kernels=frozenset({"conv"}),
        layouts=(("conv", "nhwc"),),
    )
    assert claims.supports("conv")
    assert not claims.supports("pool")
    assert Claims().supports("pool")
    assert claims.prefers_kernel("conv")
    assert claims.layout_of("conv") == "nhwc"
    assert claims.layout_of("pool") == ""


def test_passes_can_be_left_out_by_name() -> None:
    whole = pipeline_from_text("canonicalize,cse,dce,cse")
    assert str(whole.without({"cse", "hoist"})) == "canonicalize,dce"
    assert str(whole) == "canonicalize,cse,dce,cse"
    assert "decompose" not in OPTIONAL < set(PASSES)
