# SPDX-License-Identifier: Apache-2.0
"""Real models: recorded outputs on both backends, and other lengths of one compiled program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array
from rlx.testing import zoo

pytestmark = pytest.mark.zoo

# Extents that the model itself fixes although the file gives them names.
_FIXED = {
    "silero_vad_op15": ("sequence",),
    "silero_vad_op16": ("input_1",),
    "silero_vad_op18_ifless": ("sequence",),
    "silero_vad_half": ("sequence",),
    "silero_vad_v4": ("sequence",),
    "khmersm_ext_data": ("batch",),
    "ppocr_v4_rec": ("x_2",),
    "ppocr_v2_cls": ("x_2", "x_3"),
    "ppocr_v4_det_480x640": ("p2o_DynamicDimension_1", "p2o_DynamicDimension_2"),
}
# What these models use is not run yet; the message names all of it.
_REFUSED = {
    "ddddocr_crnn_int8": ("DynamicQuantizeLSTM",),
    "piper_joe_vits": ("NonZero",),
}


def _cases() -> list[object]:
    return [
        pytest.param(c, id=c.name, marks=[] if c.ci else [pytest.mark.slow])
        for c in zoo.cases()
        if c.name not in _REFUSED
    ]


@pytest.mark.parametrize("case", _cases())
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_recorded_outputs(case: zoo.Case, device: str) -> None:
    inputs, _ = zoo.golden(case)
    with rlx.load(zoo.path(case), device=device) as model:
        assert zoo.failures(case, model.run(inputs)) == []
        assert zoo.failures(case, model.run(inputs)) == [], "a second run"
        assert model.variants == 1


@pytest.mark.parametrize("case", _cases())
def test_other_lengths(case: zoo.Case) -> None:
    """One compiled program serves other extents, as the reference backend computes them."""
    inputs, _ = zoo.golden(case)
    with (
        rlx.load(zoo.path(case)) as model,
        rlx.load(zoo.path(case), device="reference") as reference,
    ):
        free = _extents(case, model, inputs)
        if not free:
            pytest.skip("the model has no symbolic extent")
        model.run(inputs)
        for seed, change in enumerate((_shorter, _longer)):
            given = _inputs(
                model, inputs, {name: change(extent) for name, extent in free.items()}, seed
            )
            found, expected = model.run(given), reference.run(given)
            assert list(found) == list(expected)
            for name, want in expected.items():
                _assert_close(case, name, found[name], want)
        assert model.variants == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_not_run_is_named_at_load(name: str) -> None:
    with pytest.raises(rlx.UnsupportedOpError) as raised:
        rlx.load(zoo.path(zoo.case(name)))
    for operator in _REFUSED[name]:
        assert operator in str(raised.value)


def _shorter(extent: int) -> int:
    return max(2, extent * 2 // 3)


def _longer(extent: int) -> int:
    return extent + max(1, extent // 5)


def _extents(case: zoo.Case, model: rlx.Executable, inputs: Mapping[str, Array]) -> dict[str, int]:
    """Return the golden's value of every extent that may change."""
    return {
        dim: extent
        for spec in model.inputs
        for dim, extent in zip(spec.shape, inputs[spec.name].shape, strict=True)
        if isinstance(dim, str) and dim not in _FIXED.get(case.name, ())
    }


def _inputs(
    model: rlx.Executable, inputs: Mapping[str, Array], extents: Mapping[str, int], seed: int
) -> dict[str, Array]:
    """Return random data like the golden's: integers in its range, floats of its spread, lengths up to the extent."""
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for spec in model.inputs:
        like = inputs[spec.name]
        shape = tuple(
            extents.get(dim, extent) if isinstance(dim, str) else dim
            for dim, extent in zip(spec.shape, like.shape, strict=True)
        )
        if not any(isinstance(dim, str) for dim in spec.shape):
            made[spec.name] = like
        elif spec.name.endswith(("lens", "lengths")):
            longest = max(e for n, e in extents.items() if "batch" not in n)
            made[spec.name] = rng.integers(
                max(1, longest // 2), longest, shape, like.dtype, endpoint=True
            )
        elif like.dtype.kind in "iub":
            made[spec.name] = rng.integers(
                int(like.min()), int(like.max()), shape, np.int64, endpoint=True
            )
            made[spec.name] = made[spec.name].astype(like.dtype)
        else:
            made[spec.name] = (rng.standard_normal(shape) * like.std() + like.mean()).astype(
                like.dtype
            )
    return made


def _assert_close(case: zoo.Case, name: str, found: Array, want: Array) -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape), name
    if want.dtype.kind == "f":
        np.testing.assert_allclose(found, want, rtol=case.rtol, atol=case.atol, err_msg=name)
    else:
        np.testing.assert_array_equal(found, want, err_msg=name)
