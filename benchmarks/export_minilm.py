# SPDX-License-Identifier: Apache-2.0
"""Write all-MiniLM-L6-v2 (f32) as an ONNX file with symbolic batch and sequence.

Usage: python benchmarks/export_minilm.py [OUT.onnx]      needs the `bench` extra.

Without OUT the file goes where `rlx.testing.zoo` looks for the case "minilm_l6_fp32".
Inputs ids, mask, type: i64[B,S]; output last_hidden_state: f32[B,S,384].
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import minilm_torch
from rlx.testing import zoo

INPUTS = ("ids", "mask", "type")


def export(out: Path) -> None:
    """Write the model to `out`, after checking the module against the recorded outputs.

    Raises:
        SystemExit: the module does not compute the recorded outputs.
    """
    case = zoo.case("minilm_l6_fp32")
    model = minilm_torch.load(zoo.weights(case), fused_attention=False)
    inputs, _ = zoo.golden(case)
    arguments = tuple(torch.from_numpy(inputs[name]) for name in INPUTS)
    with torch.inference_mode():
        wrong = zoo.failures(case, {"last_hidden_state": model(*arguments).numpy()})
    if wrong:
        raise SystemExit("\n".join(wrong))
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("S", max=minilm_torch.POSITIONS)}
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        model,
        arguments,
        out,
        input_names=list(INPUTS),
        output_names=["last_hidden_state"],
        opset_version=18,
        dynamic_shapes=(axes, axes, axes),
        dynamo=True,
        external_data=False,
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else zoo.export_path(zoo.case("minilm_l6_fp32"))
    export(target)
    print(target)
