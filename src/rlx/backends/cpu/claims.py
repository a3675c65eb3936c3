# SPDX-License-Identifier: Apache-2.0
"""What the CPU backend takes natively. Operators not listed are decomposed; those without either run on the host."""

from __future__ import annotations

from dataclasses import replace

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.ops import PRODUCT_DTYPES
from rlx.base.dtypes import DType
from rlx.base.target import Claims, Limit

__all__ = ["cpu_claims"]

_OPS = frozenset(
    "constant dim_tensor region with_epilogue matmul conv conv_transpose pool resize attention gather gather_elements "
    "gather_nd scatter_elements scatter_nd write_rows concat pad range cumsum top_k arg_reduce lstm gru rnn frame stft "
    "dft tile if scan loop reshape slice rng_fold random_bits random_uniform random_normal".split()
)


_HALVES = ((DType.F16, DType.F32), (DType.BF16, DType.F32))
_BYTES = (
    (DType.I8, DType.I32),
    (DType.I16, DType.I32),
    (DType.U8, DType.U32),
    (DType.U16, DType.U32),
)
_PRODUCTS = Limit(PRODUCT_DTYPES, (*_HALVES, *_BYTES))
_TRANSFORMS = Limit(frozenset({DType.F32, DType.F64}), _HALVES)
_LIMITS = {
    "matmul": replace(_PRODUCTS, rank=2),
    "conv": _PRODUCTS,
    "conv_transpose": _PRODUCTS,
    "attention": Limit(frozenset({DType.F32}), _HALVES),
    "dft": _TRANSFORMS,
    "stft": _TRANSFORMS,
}


_INTEGER = frozenset({"quantized_matmul", "quantized_conv", "integer_matmul", "integer_conv"})
_CHANNELS_LAST = ("conv", "conv_transpose", "pool", "quantized_conv", "integer_conv")


def cpu_claims(isa: Isa) -> Claims:
    """Return the claims for an instruction set."""
    integer = _INTEGER if isa.has_vnni else frozenset[str]()
    return Claims(
        ops=_OPS | integer,
        limits=tuple(_LIMITS.items()),
        epilogue_anchors=frozenset({"matmul", "conv", "conv_transpose"}) | integer,
        layouts=tuple((name, "nhwc") for name in _CHANNELS_LAST),
    )
