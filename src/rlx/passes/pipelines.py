# SPDX-License-Identifier: Apache-2.0
"""Which passes run, in which order, and why. The order lives nowhere else."""

from __future__ import annotations

from typing import Any

from rlx.base.precision import FULL, PrecisionPolicy
from rlx.base.target import Claims
from rlx.passes.attention import RecognizeAttention
from rlx.passes.canonicalize import Canonicalize
from rlx.passes.captures import Captures
from rlx.passes.cse import Cse
from rlx.passes.dce import Dce
from rlx.passes.decompose import Decompose
from rlx.passes.fold import Fold
from rlx.passes.fuse import FormRegions, FuseEpilogues, FuseRegions
from rlx.passes.gather import GatherStored
from rlx.passes.hoist import Hoist
from rlx.passes.layout import ChannelsLast, SinkTransposes
from rlx.passes.lift import LiftParamWork
from rlx.passes.manager import Entry, Pipeline, parse_passes
from rlx.passes.precision import ApplyPrecision
from rlx.passes.quantized import CentreWeights, RecognizeQuantizedProducts
from rlx.passes.states import LateStateWrites
from rlx.passes.widen import Widen

__all__ = ["OPTIONAL", "PASSES", "default_pipeline", "pipeline_from_text"]

_CLEAN = (
    Entry(Captures(), "rules see one block at a time, so constants have to be in it"),
    Entry(Canonicalize(), "rewrites and folds exactly, so that patterns below have one spelling"),
    Entry(Cse(), "the importer and decompositions repeat constants and shape arithmetic"),
    Entry(Dce(), "what folding and merging left behind must not count as a reader"),
)

_RECOGNISE = (
    Entry(
        RecognizeQuantizedProducts(),
        "needs the integer weights, before they are dequantised once and for all",
    ),
    Entry(CentreWeights(), "corrections for zero points can still be hoisted and fused"),
    Entry(GatherStored(), "needs the narrow table, before its wide form is computed once and kept"),
    Entry(
        RecognizeAttention(), "needs softmax and matmul as operators, before they decompose or fuse"
    ),
)

_HOIST = (
    Entry(
        Hoist(),
        "dequantised and transposed weights are computed once; later passes see plain params",
    ),
)

_LOWER = (
    Entry(
        Widen(),
        "narrow operands are converted where they come from: once for weights, else in a region",
    ),
    Entry(Decompose(), "what the target has no kernel for becomes operators that it has"),
    Entry(Canonicalize(), "decompositions leave scalars to fold and reshapes to merge"),
    Entry(Cse(), "decompositions repeat themselves"),
    Entry(Dce(), "only live readers may stop the passes below"),
    Entry(
        Hoist(), "factors that decompositions derive from weights (batch norm) are computed once"
    ),
)

_LAYOUT = (
    Entry(ChannelsLast(), "convolution kernels read channels last"),
    Entry(
        SinkTransposes(),
        "the transposes around them meet and cancel, before fusion hides them in regions",
    ),
    Entry(Canonicalize(), "transposes that met are merged"),
    Entry(Hoist(), "transposed weights are transposed once"),
    Entry(Dce(), "only live readers may stop fusion"),
)

_FUSE = (
    Entry(FormRegions(), "one vocabulary for elementwise, row and moving operators"),
    Entry(FuseRegions(rows=False), "elementwise chains are whole before an anchor takes them"),
    Entry(FuseEpilogues(), "a matmul or convolution takes its chain before a norm can"),
    Entry(FuseRegions(), "softmax, norms and what is around them become one kernel each"),
    Entry(Cse(), "regions that became equal are computed once"),
    Entry(Dce(), "merged producers are gone"),
)


_ORDER = (Entry(LateStateWrites(), "the last order of nodes decides what can be done in place"),)


def _precision(policy: PrecisionPolicy) -> tuple[Entry, ...]:
    if not policy.narrows:
        return ()
    return (
        Entry(
            ApplyPrecision(policy),
            "operators are still whole, and what follows from weights alone is already f32",
        ),
        Entry(Canonicalize(), "casts of constants are folded"),
        Entry(Hoist(), "weights are narrowed once"),
        Entry(Dce(), "the f32 weights are unread"),
    )


def default_pipeline(claims: Claims, precision: PrecisionPolicy = FULL) -> Pipeline:
    """Return the passes for a target that makes these claims and for a precision policy.

    A target that runs every operator as it is (it claims no set of operators) gets no layouts and
    no fusion.
    """
    narrowed = _precision(precision)
    if not claims.ops:
        once = Entry(Hoist(), "what follows from weights alone runs once per version")
        return Pipeline((*_CLEAN, once, *narrowed, *_ORDER))
    return Pipeline((*_CLEAN, *_RECOGNISE, *_HOIST, *narrowed, *_LOWER, *_LAYOUT, *_FUSE, *_ORDER))


PASSES: dict[str, type[Any]] = {
    cls.name: cls
    for cls in (
        ApplyPrecision,
        Canonicalize,
        Captures,
        CentreWeights,
        ChannelsLast,
        Cse,
        Dce,
        Decompose,
        Fold,
        FormRegions,
        FuseEpilogues,
        FuseRegions,
        GatherStored,
        Hoist,
        LateStateWrites,
        LiftParamWork,
        RecognizeAttention,
        RecognizeQuantizedProducts,
        SinkTransposes,
        Widen,
    )
}
"""Pass classes by the name that the command line and dumps use."""


OPTIONAL = frozenset(PASSES) - {
    cls.name for cls in (ApplyPrecision, Captures, Decompose, FormRegions, LateStateWrites)
}
"""Passes that only make a program better: it computes the same without them."""


def pipeline_from_text(text: str) -> Pipeline:
    """Return the pipeline that a text such as ``canonicalize,cse,dce`` describes.

    Raises:
        UsageError: unknown pass or option.
    """
    return parse_passes(text, PASSES)
