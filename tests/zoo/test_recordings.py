# SPDX-License-Identifier: Apache-2.0
"""Recorded outputs that are less accurate than their tolerance: the error is in the recording.

Two speech front ends were recorded with an engine whose f32 Fourier transform is off by more than the tolerance
where the spectrum is small and a logarithm follows. Evaluating the same graph in f64 shows by how much, and that rlx
in f32 agrees with f64 well within the tolerance.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlx.base.numeric import Array
from rlx.frontends.onnx.importer import Importer, import_model
from rlx.frontends.onnx.model import load_model
from rlx.ops.evaluate import evaluate
from rlx.testing import zoo


def _evaluate(case: zoo.Case, *, exact: bool) -> dict[str, Array]:
    inputs, _ = zoo.golden(case)
    model = load_model(zoo.path(case))
    interface = Importer(model)
    interface.add_inputs({})
    hints = {
        str(dim): extent
        for value in interface.graph.inputs
        for dim, extent in zip(value.type.shape, inputs[value.name].shape, strict=True)
        if not isinstance(dim, int)
    }
    graph = import_model(model, hints=hints).graph
    weights = {name: param.data for name, param in graph.params.items() if param.data is not None}
    return evaluate(graph, inputs, weights, exact=exact)


@pytest.mark.parametrize("case", [c for c in zoo.cases() if c.recording_error], ids=str)
def test_the_recording_is_off_and_rlx_is_not(case: zoo.Case) -> None:
    truth, ours = _evaluate(case, exact=True), _evaluate(case, exact=False)
    _, recorded = zoo.golden(case)
    off: dict[str, float] = {}
    for name, want in recorded.items():
        if want.dtype.kind != "f":
            continue
        allowed = case.atol + case.rtol * np.abs(truth[name])
        assert (np.abs(ours[name] - truth[name]) <= allowed).all()
        off[name] = float(np.max(np.abs(want - truth[name]) - case.rtol * np.abs(truth[name])))
    # The allowance is what is needed and not much more.
    worst = max(off.values())
    assert case.atol < worst <= case.recording_error + case.atol <= worst * 1.5
