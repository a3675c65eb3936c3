# SPDX-License-Identifier: Apache-2.0
"""What the CPU backend takes natively. Operators not listed are decomposed; those without either run on the host."""

from __future__ import annotations

from rlx.backends.cpu.isa import Isa
from rlx.base.target import Claims

__all__ = ["cpu_claims"]

_OPS = frozenset(
    "constant dim_tensor region with_epilogue matmul conv conv_transpose pool resize attention gather gather_elements "
    "gather_nd scatter_elements scatter_nd write_rows concat pad range cumsum top_k arg_reduce lstm gru rnn frame stft "
    "dft tile if scan loop reshape slice rng_fold random_bits random_uniform random_normal".split()
)


def cpu_claims(isa: Isa) -> Claims:
    """Return the claims for an instruction set."""
    integer = frozenset({"quantized_matmul"}) if isa.has_vnni else frozenset[str]()
    return Claims(
        ops=_OPS | integer,
        epilogue_anchors=frozenset({"matmul", "conv", "conv_transpose"}) | integer,
        layouts=(("conv", "nhwc"), ("conv_transpose", "nhwc"), ("pool", "nhwc")),
    )
