# SPDX-License-Identifier: Apache-2.0
"""Real recurrent models keep their state themselves: the same bits as when the caller carries it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array
from rlx.testing import zoo

pytestmark = pytest.mark.zoo

_VAD = {"stateN": "state"}
_LAYER = {"hn": "h", "cn": "c"}
_FEEDS = {
    "silero_vad_op15": _VAD,
    "silero_vad_op16": _VAD,
    "silero_vad_op18_ifless": _VAD,
    "silero_vad_half": _VAD,
    "silero_vad_ov": _VAD,
    "silero_vad_sequence": _LAYER,
    "silero_vad_v4": _LAYER,
}
_CHUNKS = 40


def _cases() -> list[object]:
    cases = [zoo.case(name) for name in _FEEDS]
    return [pytest.param(c, id=c.name, marks=[] if c.ci else [pytest.mark.slow]) for c in cases]


def _chunks(like: Array, batch: int) -> list[Array]:
    """Return chunks of noise that comes and goes, as speech does."""
    rng = np.random.default_rng(batch)
    shape = (batch, *like.shape[1:]) if like.shape[0] == 1 else like.shape
    return [
        (rng.standard_normal(shape) * 0.05 * (1 + np.sin(k))).astype(np.float32)
        for k in range(_CHUNKS)
    ]


def _by_hand(
    model: rlx.Executable,
    rest: Mapping[str, Array],
    chunks: list[Array],
    states: dict[str, Array],
    feeds: Mapping[str, str],
) -> list[dict[str, Array]]:
    results: list[dict[str, Array]] = []
    for chunk in chunks:
        found = model.run({**rest, **states, "input": chunk})
        states.update({state: found.pop(output) for output, state in feeds.items()})
        results.append(found)
    return results


@pytest.mark.parametrize("case", _cases())
def test_a_bound_state_equals_feeding_by_hand(case: zoo.Case) -> None:
    feeds, (inputs, _) = _FEEDS[case.name], zoo.golden(case)
    rest = {n: a for n, a in inputs.items() if n not in (*feeds.values(), "input")}
    with (
        rlx.load(zoo.path(case)) as plain,
        rlx.load(zoo.path(case)).bind_state(feeds) as bound,
    ):
        batched = isinstance(plain.inputs[0].shape[0], str) and case.name != "silero_vad_sequence"
        for batch in (1, 3) if batched else (1,):
            bound.state.reset()
            chunks = _chunks(inputs["input"], batch)
            zeros = {
                n: np.zeros((a.shape[0], batch, *a.shape[2:]), a.dtype)
                for n, a in inputs.items()
                if n in feeds.values()
            }
            expected = _by_hand(plain, rest, chunks, zeros, feeds)
            for chunk, want in zip(chunks, expected, strict=True):
                found = bound.run({**rest, "input": chunk})
                assert {n: a.tobytes() for n, a in found.items()} == {
                    n: a.tobytes() for n, a in want.items()
                }
            for name, last in zeros.items():
                assert bound.state[name].get().tobytes() == last.tobytes()
        assert bound.variants == 1


def test_a_detector_can_go_back_to_a_moment() -> None:
    case = zoo.case("silero_vad_op16")
    inputs, _ = zoo.golden(case)
    with rlx.load(zoo.path(case)).bind_state(_VAD) as model:
        chunks = _chunks(inputs["input"], 1)
        first = [model.run({"input": c, "sr": inputs["sr"]})["output"] for c in chunks[:20]]
        moment = model.state.snapshot()
        rest = [model.run({"input": c, "sr": inputs["sr"]})["output"] for c in chunks[20:]]
        model.state.restore(moment)
        again = [model.run({"input": c, "sr": inputs["sr"]})["output"] for c in chunks[20:]]
        assert [a.tobytes() for a in again] == [a.tobytes() for a in rest]
        model.state.reset()
        fresh = model.run({"input": chunks[0], "sr": inputs["sr"]})["output"]
        assert fresh.tobytes() == first[0].tobytes()
        assert len({a.tobytes() for a in (*first, *rest)}) > _CHUNKS // 2, "the state matters"
