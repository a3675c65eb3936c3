# SPDX-License-Identifier: Apache-2.0
"""The operators. Importing this package registers all of them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

GROUPS = (
    "leaf",
    "region",
    "elementwise",
    "movement",
    "reduce",
    "norm",
    "indexing",
    "matmul",
    "conv",
    "pool",
    "resize",
    "rnn",
    "signal",
    "quant",
    "attention",
    "control",
)

for _group in GROUPS:
    if find_spec(f"rlx.ops.{_group}") is not None:
        import_module(f"rlx.ops.{_group}")
