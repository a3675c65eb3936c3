# SPDX-License-Identifier: Apache-2.0
"""Instruction sets: restriction, knob, refusal."""

from __future__ import annotations

import pytest

from rlx.backends.cpu.isa import generic_isa, host_isa
from rlx.base import config
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError


def test_shapes_of_the_levels() -> None:
    v4, v3, neon = (generic_isa(name) for name in ("v4", "v3", "neon"))
    assert [isa.lanes(DType.F32) for isa in (v4, v3, neon)] == [16, 8, 4]
    assert [isa.vector_registers for isa in (v4, v3, neon)] == [32, 16, 32]
    assert v4.lanes(DType.I8) == 64
    assert v3.has("fma", "f16c", "avx2")
    assert not v3.has_avx512


def test_restriction_removes_features_and_keeps_the_caches() -> None:
    v3 = generic_isa("v4").restricted("v3")
    assert v3.features == generic_isa("v3").features
    assert v3.l2 == generic_isa("v4").l2
    with pytest.raises(UsageError, match="cannot run level v4"):
        v3.restricted("v4")
    with pytest.raises(UsageError, match="unknown instruction set level"):
        v3.restricted("v5")


def test_the_knob_restricts_the_host() -> None:
    if not host_isa().is_x86:
        pytest.skip("levels are an x86 notion")
    with config.override(RLX_CPU_ISA="v3"):
        assert host_isa().name == "v3"


def test_only_believed_features_reach_llvm() -> None:
    isa = host_isa()
    assert isa.feature_string.split(",") == sorted(f"+{name}" for name in isa.features)
    assert isa.l1d >= 8 << 10
    assert isa.l2 >= isa.l1d
