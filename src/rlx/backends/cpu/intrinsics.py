# SPDX-License-Identifier: Apache-2.0
"""Target intrinsics with the features they need.

LLVM aborts the whole process when it has to select an intrinsic that the target lacks, so nothing reaches it
but through this table, which turns that into a Python error.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cpu.lltypes import BF16, F32, F64, I8, I16, I32, I64, PTR, VOID, Type, vec

__all__ = ["INTRINSICS", "Intrinsic"]


@dataclass(frozen=True)
class Intrinsic:
    """One target intrinsic: result, operands, features that must all be present.

    Attributes:
        result: type of the result (`void` for none).
        args: types of the operands, in order.
        requires: LLVM feature names.
        immediates: positions of operands that must be Python integers.
    """

    result: Type
    args: tuple[Type, ...]
    requires: frozenset[str]
    immediates: frozenset[int] = frozenset()


INTRINSICS: dict[str, Intrinsic] = {}
"""By name without the `llvm.` prefix."""


def _add(name: str, result: Type, args: tuple[Type, ...], requires: str, *immediates: int) -> None:
    INTRINSICS[name] = Intrinsic(result, args, frozenset(requires.split()), frozenset(immediates))


def _dot_products() -> None:
    for bits, feature in (
        (512, "avx512vnni"),
        (256, "avx512vnni avx512vl"),
        (128, "avx512vnni avx512vl"),
    ):
        acc, quads, pairs = vec(I32, bits // 32), vec(I8, bits // 8), vec(I16, bits // 16)
        for op in ("vpdpbusd", "vpdpbusds"):
            _add(f"x86.avx512.{op}.{bits}", acc, (acc, quads, quads), feature)
        for op in ("vpdpwssd", "vpdpwssds"):
            _add(f"x86.avx512.{op}.{bits}", acc, (acc, pairs, pairs), feature)
        bf16 = "avx512bf16" if bits == 512 else "avx512bf16 avx512vl"
        floats, halves = vec(F32, bits // 32), vec(BF16, bits // 16)
        _add(f"x86.avx512bf16.dpbf16ps.{bits}", floats, (floats, halves, halves), bf16)
    for bits, prefix, feature in (
        (128, "ssse3.pmadd.ub.sw.128", "ssse3"),
        (256, "avx2.pmadd.ub.sw", "avx2"),
    ):
        bytes_ = vec(I8, bits // 8)
        _add(f"x86.{prefix}", vec(I16, bits // 16), (bytes_, bytes_), feature)
    _add("x86.avx512.pmaddubs.w.512", vec(I16, 32), (vec(I8, 64), vec(I8, 64)), "avx512bw")
    _add("x86.sse2.pmadd.wd", vec(I32, 4), (vec(I16, 8), vec(I16, 8)), "sse2")
    _add("x86.avx2.pmadd.wd", vec(I32, 8), (vec(I16, 16), vec(I16, 16)), "avx2")
    _add("x86.avx512.pmaddw.d.512", vec(I32, 16), (vec(I16, 32), vec(I16, 32)), "avx512bw")
    for lanes in (2, 4):
        words, quads = vec(I32, lanes), vec(I8, 4 * lanes)
        for op in ("sdot", "udot"):
            _add(
                f"aarch64.neon.{op}.{words.mangled}.{quads.mangled}",
                words,
                (words, quads, quads),
                "dotprod",
            )


def _conversions() -> None:
    _add("x86.vcvtps2ph.128", vec(I16, 8), (vec(F32, 4), I32), "f16c", 1)
    _add("x86.vcvtps2ph.256", vec(I16, 8), (vec(F32, 8), I32), "f16c", 1)
    _add(
        "x86.avx512.mask.vcvtps2ph.512",
        vec(I16, 16),
        (vec(F32, 16), I32, vec(I16, 16), I16),
        "avx512f",
        1,
    )
    _add("x86.avx512bf16.cvtneps2bf16.512", vec(BF16, 16), (vec(F32, 16),), "avx512bf16")
    _add("x86.avx512bf16.cvtneps2bf16.256", vec(BF16, 8), (vec(F32, 8),), "avx512bf16 avx512vl")


def _floats() -> None:
    floats, doubles = vec(F32, 16), vec(F64, 8)
    _add("x86.avx512.mask.scalef.ps.512", floats, (floats, floats, floats, I16, I32), "avx512f", 4)
    _add(
        "x86.avx512.mask.scalef.pd.512", doubles, (doubles, doubles, doubles, I8, I32), "avx512f", 4
    )
    _add("x86.avx512.mask.getmant.ps.512", floats, (floats, I32, floats, I16, I32), "avx512f", 1, 4)
    _add("x86.avx512.mask.getexp.ps.512", floats, (floats, floats, I16, I32), "avx512f", 3)
    _add("x86.avx512.permvar.sf.512", floats, (floats, vec(I32, 16)), "avx512f")
    _add("x86.avx512.vpermi2var.ps.512", floats, (floats, vec(I32, 16), floats), "avx512f")
    _add("x86.avx2.permps", vec(F32, 8), (vec(F32, 8), vec(I32, 8)), "avx2")
    _add("x86.avx512.permvar.df.512", doubles, (doubles, vec(I64, 8)), "avx512f")


def _bytes() -> None:
    _add("x86.ssse3.pshuf.b.128", vec(I8, 16), (vec(I8, 16), vec(I8, 16)), "ssse3")
    _add("x86.avx2.pshuf.b", vec(I8, 32), (vec(I8, 32), vec(I8, 32)), "avx2")
    _add("x86.avx512.pshuf.b.512", vec(I8, 64), (vec(I8, 64), vec(I8, 64)), "avx512bw")
    _add("x86.avx512.permvar.qi.512", vec(I8, 64), (vec(I8, 64), vec(I8, 64)), "avx512vbmi")
    _add("aarch64.neon.tbl1.v16i8", vec(I8, 16), (vec(I8, 16), vec(I8, 16)), "neon")


def _system() -> None:
    _add("x86.sse2.pause", VOID, (), "sse2")
    _add("x86.sse.ldmxcsr", VOID, (PTR,), "sse")
    _add("x86.sse.stmxcsr", VOID, (PTR,), "sse")
    _add("aarch64.hint", VOID, (I32,), "neon", 0)
    _add("aarch64.get.fpcr", I64, (), "neon")
    _add("aarch64.set.fpcr", VOID, (I64,), "neon")


def _tiles() -> None:
    _add("x86.ldtilecfg", VOID, (PTR,), "amx-tile")
    _add("x86.tilerelease", VOID, (), "amx-tile")
    _add("x86.tilezero", VOID, (I8,), "amx-tile", 0)
    for op in ("tileloadd64", "tileloaddt164", "tilestored64"):
        _add(f"x86.{op}", VOID, (I8, PTR, I64), "amx-tile", 0)
    _add("x86.tdpbf16ps", VOID, (I8, I8, I8), "amx-bf16", 0, 1, 2)
    for op in ("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"):
        _add(f"x86.{op}", VOID, (I8, I8, I8), "amx-int8", 0, 1, 2)


_dot_products()
_conversions()
_floats()
_bytes()
_system()
_tiles()
