# SPDX-License-Identifier: Apache-2.0
"""What the CPU backend knows of a processor: instruction set, vector shape, caches.

Only the feature set is believed. LLVM's guess of the processor's *name* follows the model number, which virtual
machines misreport, so it is never used.
"""

from __future__ import annotations

import hashlib
import platform
import struct
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path

from rlx.base import config
from rlx.base.dtypes import DType
from rlx.base.errors import DeviceError, UsageError
from rlx.base.store import default_store

__all__ = ["Isa", "generic_isa", "host_isa"]

_V3 = frozenset(
    {
        "64bit",
        "avx",
        "avx2",
        "bmi",
        "bmi2",
        "cmov",
        "cx16",
        "cx8",
        "f16c",
        "fma",
        "fxsr",
        "lzcnt",
        "mmx",
        "movbe",
        "popcnt",
        "sahf",
        "sse",
        "sse2",
        "sse3",
        "sse4.1",
        "sse4.2",
        "ssse3",
        "xsave",
        "crc32",
    }
)
"""x86-64-v3 in LLVM's spelling: the least an x86 host must have."""
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_KEEP_V4 = frozenset(
    {
        "avx512bf16",
        "avx512bitalg",
        "avx512fp16",
        "avx512ifma",
        "avx512vbmi",
        "avx512vbmi2",
        "avx512vnni",
        "avx512vpopcntdq",
        "amx-tile",
        "amx-bf16",
        "amx-int8",
        "avxvnni",
        "gfni",
        "vaes",
        "vpclmulqdq",
        "pclmul",
    }
)
"""Extensions beyond v4 that some kernel may use; others are dropped so that cached objects serve more machines."""
_NEON = frozenset(("neon",))
_KEEP_NEON = frozenset(
    ["neon", "fp-armv8", "dotprod", "i8mm", "bf16", "fullfp16", "lse", "aes", "crc"]
)
_FALLBACK_CACHES = {1: 32 << 10, 2: 512 << 10, 3: 8 << 20}
_LEVELS = {"v3": 3, "v4": 4}


@dataclass(frozen=True)
class Isa:
    """A code generation target.

    Attributes:
        name: `v4` (AVX-512), `v3` (AVX2, FMA, F16C) or `neon`.
        triple: LLVM target triple.
        features: LLVM feature names that code may rely on.
        l1d: bytes of level 1 data cache of one core.
        l2: bytes of level 2 cache of one core.
        l3: bytes of the level 3 cache that the first core sees (0 when there is none).
    """

    name: str
    triple: str
    features: frozenset[str]
    l1d: int = _FALLBACK_CACHES[1]
    l2: int = _FALLBACK_CACHES[2]
    l3: int = _FALLBACK_CACHES[3]

    @property
    def is_x86(self) -> bool:
        """True on x86-64."""
        return self.name != "neon"

    @property
    def vector_bits(self) -> int:
        """Bits of one vector register."""
        return {"v4": 512, "v3": 256, "neon": 128}[self.name]

    @property
    def vector_registers(self) -> int:
        """Number of architectural vector registers."""
        return 16 if self.name == "v3" else 32

    def lanes(self, dtype: DType) -> int:
        """Return how many elements fit one vector register, by the size of one element in memory."""
        return self.vector_bits // (8 * dtype.itemsize)

    @property
    def has_avx512(self) -> bool:
        """True with AVX-512 F, BW, CD, DQ and VL."""
        return self.name == "v4"

    @property
    def has_f16c(self) -> bool:
        """True with hardware f16 <-> f32 conversion (x86)."""
        return "f16c" in self.features

    @property
    def has_vnni(self) -> bool:
        """True with 512-bit u8 x s8 dot products (AVX512-VNNI)."""
        return "avx512vnni" in self.features

    @property
    def has_avx_vnni(self) -> bool:
        """True with 256-bit u8 x s8 dot products in VEX encoding (AVX-VNNI)."""
        return "avxvnni" in self.features

    @property
    def has_bf16(self) -> bool:
        """True with bf16 conversion and dot products (AVX512-BF16)."""
        return "avx512bf16" in self.features

    @property
    def has_amx(self) -> bool:
        """True with AMX tiles in int8 and bf16 (the process must still ask the kernel for permission)."""
        return self.features >= {"amx-tile", "amx-int8", "amx-bf16"}

    @property
    def cpu(self) -> str:
        """LLVM's processor name: the plain architecture level, everything else comes from `features`."""
        return {"v4": "x86-64-v4", "v3": "x86-64-v3", "neon": "generic"}[self.name]

    @property
    def feature_string(self) -> str:
        """The features as LLVM takes them, sorted."""
        return ",".join(f"+{feature}" for feature in sorted(self.features))

    def has(self, *features: str) -> bool:
        """Return whether all of these LLVM features are there."""
        return self.features.issuperset(features)

    def restricted(self, level: str) -> Isa:
        """Return this processor as one of a lower level (`v3` on an AVX-512 host); the caches stay.

        Raises:
            UsageError: the level is unknown, or higher than this processor's.
        """
        if level not in _LEVELS:
            raise UsageError(
                f"unknown instruction set level {level!r}; known are {', '.join(_LEVELS)}"
            )
        if not self.is_x86 or _LEVELS[level] > _LEVELS[self.name]:
            raise UsageError(f"this processor is {self.name}, it cannot run level {level}")
        allowed = _V3 if level == "v3" else _V4 | _KEEP_V4
        return replace(self, name=level, features=self.features & allowed)


def _cache_bytes(text: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * scale


def _caches(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[int, int]:
    """Read level -> bytes of the data and unified caches of the first core; levels not listed keep a fallback."""
    found: dict[int, int] = {}
    for folder in sorted(root.glob("index*")):
        try:
            if (folder / "type").read_text().strip() == "Instruction":
                continue
            level = int((folder / "level").read_text())
            found[level] = _cache_bytes((folder / "size").read_text().strip())
        except (OSError, ValueError):
            continue  # a container may hide single files; the fallback stays
    if found:
        return {1: _FALLBACK_CACHES[1], 2: _FALLBACK_CACHES[2], 3: 0, **found}
    return dict(_FALLBACK_CACHES)


def _x86(triple: str, features: frozenset[str], caches: dict[int, int]) -> Isa:
    missing = sorted(_V3 - features - {"64bit", "cx8", "cmov", "fxsr", "mmx"})
    if missing:
        raise DeviceError(
            f"this processor lacks {', '.join(missing)}; the CPU backend needs x86-64-v3 (AVX2, FMA, F16C; "
            f"processors since 2013). Use the reference backend instead."
        )
    level, kept = (
        ("v4", _V4 | _KEEP_V4) if features >= _V4 - {"64bit"} else ("v3", _V3 | {"avxvnni"})
    )
    return Isa(level, triple, features & kept, caches[1], caches[2], caches[3])


def _host() -> tuple[str, frozenset[str]]:
    """Return LLVM's name of this system and the features it finds in the processor.

    What LLVM found is kept on disk: asking it means loading it, which takes longer than opening a package.
    """
    key, store = _host_key(), default_store()
    known = store.get("host", key) if store is not None and key else None
    if known is not None:
        triple, *found = bytes(known).decode().split()
        return triple, frozenset(found)
    import llvmlite.binding as llvm

    triple = llvm.get_process_triple()
    features = sorted(name for name, present in llvm.get_host_cpu_features().items() if present)
    if store is not None and key:
        store.put("host", key, " ".join([triple, *features]).encode())
    return triple, frozenset(features)


def _host_key() -> str:
    """Return a hash of what the system says about the processor, and of LLVM's version; empty where it says nothing."""
    import llvmlite  # without its binding

    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            first = list(takewhile(str.strip, file))
    except OSError:
        return ""
    lasting = [line for line in first if not line.startswith(("cpu MHz", "bogomips", "BogoMIPS"))]
    parts = [llvmlite.__version__, platform.machine(), struct.calcsize("P"), *lasting]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _detected() -> Isa:
    triple, features = _host()
    arch = triple.split("-", maxsplit=1)[0]
    if arch in ("x86_64", "amd64"):
        return _x86(triple, features, _caches())
    if arch in ("aarch64", "arm64"):
        caches = _caches()
        return Isa("neon", triple, (features & _KEEP_NEON) | _NEON, caches[1], caches[2], caches[3])
    raise DeviceError(
        f"the CPU backend knows x86-64 and AArch64, this process is {triple}; use the reference backend"
    )


def host_isa() -> Isa:
    """Return the processor of this process, restricted by RLX_CPU_ISA when that is set.

    Raises:
        DeviceError: the processor is below x86-64-v3 or ARMv8-A; the message names what is missing.
        UsageError: RLX_CPU_ISA names a level this processor does not have.
    """
    level = config.CPU_ISA.get()
    return _detected().restricted(level) if level else _detected()


def generic_isa(name: str) -> Isa:
    """Return a plain processor of a level (`v3`, `v4`, `neon`) to compile for, on Linux, whatever the host is.

    Raises:
        UsageError: the level is unknown.
    """
    known = {"v3": _V3, "v4": _V4, "neon": _NEON}
    if name not in known:
        raise UsageError(f"unknown instruction set level {name!r}; known are {', '.join(known)}")
    arch = "aarch64" if name == "neon" else "x86_64"
    return Isa(name, f"{arch}-unknown-linux-gnu", known[name])
