# SPDX-License-Identifier: Apache-2.0
"""ONNX operators as rlx operators, by group. Importing this fills the table of `registry`."""

from rlx.frontends.onnx.ops import (
    attention,
    control,
    convolution,
    elementwise,
    indexing,
    leaf,
    matmul,
    movement,
    norm,
    quant,
    random,
    reduce,
    resize,
    rnn,
    signal,
)

__all__ = [
    "attention",
    "control",
    "convolution",
    "elementwise",
    "indexing",
    "leaf",
    "matmul",
    "movement",
    "norm",
    "quant",
    "random",
    "reduce",
    "resize",
    "rnn",
    "signal",
]
