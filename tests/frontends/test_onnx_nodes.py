# SPDX-License-Identifier: Apache-2.0
"""The node tests of the onnx package: import, evaluate by the reference meaning, compare."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import numpy as np
import pytest

onnx: Any = pytest.importorskip("onnx")
node_tests: Any = pytest.importorskip("onnx.backend.test.case.node")

from rlx.base.dtypes import DType  # noqa: E402
from rlx.base.errors import RlxError, UsageError  # noqa: E402
from rlx.base.rng import RNG_INPUT  # noqa: E402
from rlx.frontends.onnx.importer import import_model  # noqa: E402
from rlx.frontends.onnx.model import load_model  # noqa: E402
from rlx.frontends.onnx.registry import mapped_ops  # noqa: E402
from rlx.ops.evaluate import evaluate  # noqa: E402

RTOL, ATOL = 1e-3, 1e-5

# Operands that say extents or axes. In rlx they follow from the model, so these tests give them as
# initialisers.
STRUCTURAL: dict[str, tuple[int, ...]] = {
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "AffineGrid": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **{
        f"Reduce{kind}": (1,)
        for kind in (
            "L1",
            "L2",
            "LogSum",
            "LogSumExp",
            "Max",
            "Mean",
            "Min",
            "Prod",
            "Sum",
            "SumSquare",
        )
    },
}

# name pattern -> why rlx does not run the case
EXCLUDED: dict[str, str] = {
    r"test_attention_.*qk_matmul.*(?<!_expanded)": "scores are no output of a fused attention",
    r"test_attention_[34]d_.*(causal|padded_kv)_bf16(_expanded)?": (
        "the expected values round intermediate results to bf16 at other places, one unit apart"
    ),
    r"test_attention_local_window_gqa_rank4_mask": "the scores of a fused attention, in f64",
    r"test_attention_4d_causal_fp16_expanded": "the same, in f16",
    r"test_training_dropout(_default)?(_mask)?": "the expected mask is one of NumPy's generator",
    r"test_bernoulli.*": "the expected values are those of NumPy's generator",
    r"test_batchnorm_.*_training_mode": "training",
    r"test_loop11": "the body slices by the iteration number: its extents depend on data",
    r"test_maxpool_with_argmax_.*": "indices of maxima are not an output of Pool",
    r"test_not_[234]d": "version 1 of the operator set",
    r"test_resize_.*antialias": "antialiasing",
    r"test_resize_tf_crop_and_resize.*": "cropping by a region of interest",
    r"test_scan_sum": "Scan of version 8, which had a batch axis",
}


@functools.cache
def _cases() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in node_tests.collect_testcases(None)}


def _supported_types(case: Any) -> bool:
    for inputs, outputs in case.data_sets:
        arrays: list[Any] = [*inputs, *outputs]
        for array in arrays:
            if not isinstance(array, np.ndarray | np.generic):
                return False
            try:
                DType.of(array.dtype.name)  # pyright: ignore[reportUnknownMemberType]
            except UsageError:
                return False
    return True


def _operators(graph: Any) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for node in graph.node:
        found.add((node.domain, node.op_type))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found |= _operators(attribute.g)
    return found


def _excluded(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in EXCLUDED)


@functools.cache
def _runnable() -> tuple[str, ...]:
    """Return the cases whose operators are all mapped and whose dtypes rlx has."""
    known = mapped_ops().keys()
    return tuple(
        name
        for name, case in _cases().items()
        if _operators(case.model.graph) <= known and _supported_types(case)
    )


def _structural(case: Any) -> set[str]:
    """Return the inputs of a case that say extents; an expanded case has those of the plain one."""
    plain = _cases().get(case.name.removesuffix("_expanded"), case)
    named = {
        node.input[index]
        for node in plain.model.graph.node
        for index in STRUCTURAL.get(node.op_type, ())
        if index < len(node.input)
    }
    return named & {info.name for info in case.model.graph.input}


def _with_initializers(case: Any, inputs: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Return the model with structural operands, taken out of `inputs`, as initialisers."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    names = _structural(case)
    for name in sorted(names):
        array = np.asarray(inputs.pop(name))
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    kept = [info for info in model.graph.input if info.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def run_case(case: Any) -> None:
    for arrays, expected in case.data_sets:
        given = [info.name for info in case.model.graph.input]
        inputs = {name: np.asarray(a) for name, a in zip(given, arrays, strict=True)}
        model = _with_initializers(case, inputs)
        shapes = {name: a.shape for name, a in inputs.items()}
        graph = import_model(load_model(model), shapes=shapes).graph
        found = evaluate(graph, {**inputs, RNG_INPUT: np.zeros(4, np.uint32)})
        for info, want in zip(case.model.graph.output, expected, strict=True):
            got = found[info.name]
            want = np.asarray(want)  # noqa: PLW2901
            assert got.dtype == want.dtype, f"{info.name}: {got.dtype}, expected {want.dtype}"
            assert got.shape == want.shape, f"{info.name}: {got.shape}, expected {want.shape}"
            if DType.of(want.dtype).is_float or want.dtype.kind == "c":
                wide = np.complex128 if want.dtype.kind == "c" else np.float64
                np.testing.assert_allclose(
                    got.astype(wide), want.astype(wide), rtol=RTOL, atol=ATOL
                )
            else:
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", [name for name in _runnable() if not _excluded(name)])
def test_node(name: str) -> None:
    run_case(_cases()[name])


@pytest.mark.parametrize("pattern", EXCLUDED)
def test_every_exclusion_is_needed(pattern: str) -> None:
    names = [name for name in _runnable() if re.fullmatch(pattern, name)]
    assert names, f"no case is called {pattern}"
    for name in names:
        with pytest.raises((RlxError, AssertionError)):
            run_case(_cases()[name])
