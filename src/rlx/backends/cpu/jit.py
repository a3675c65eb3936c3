# SPDX-License-Identifier: Apache-2.0
"""Text to object code to addresses: LLVM's code generator and linker, without any middle-end pass.

The emitter writes SSA with explicit vectors and unrolling, so optimisation passes buy nothing and cost half of
the compile time. Objects may reference only the symbols of `ALLOWED`; they are checked before linking.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlx._version import __version__
from rlx.backends.cpu.elf import elf_symbols
from rlx.backends.cpu.perf_map import write_perf_map
from rlx.base import config
from rlx.base.errors import BuildError, UsageError

if TYPE_CHECKING:
    import llvmlite.binding as llvm

    from rlx.backends.cpu.isa import Isa

__all__ = [
    "ALLOWED",
    "UNIT_PREFIX",
    "Library",
    "ObjectCache",
    "assembly",
    "compile_all",
    "compile_text",
    "object_key",
    "undefined_symbols",
]

LIBM = (
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erfc exp2 expm1 fmod lgamma log10 log1p log2 pow sin "
    "sinh tan tgamma"
).split()
"""Double precision functions of the C library that f64 operators call."""
_LIBC = ["memcpy", "memmove", "memset", "clock_gettime", "sched_yield", "syscall"]
ALLOWED = frozenset(_LIBC + LIBM)
"""Every symbol that an object may leave undefined, beside those of other units."""
UNIT_PREFIX = "rlx_"
"""Symbols that units export begin with this."""

_LOCK = threading.Lock()
_LIBRARY_NUMBER = itertools.count()


class ObjectCache(Protocol):
    """Where compiled objects are kept between processes. `put` may drop what it likes."""

    def get(self, key: str) -> bytes | None:
        """Return the object stored under a key."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        ...


_SETTINGS = "opt2 pic small 1"
"""Part of the object key: changes when the way text becomes an object does."""


@dataclass(frozen=True)
class _Target:
    """LLVM's view of one Isa; its machine is used under the lock."""

    machine: llvm.TargetMachine
    layout: str


_TARGETS: dict[tuple[str, str, str], _Target] = {}


def _new_machine(isa: Isa) -> llvm.TargetMachine:
    import llvmlite.binding as llvm

    if isa.is_x86 and llvm.get_process_triple().startswith("x86_64"):
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(isa.triple).create_target_machine(
        cpu=isa.cpu, features=isa.feature_string, opt=2, reloc="pic", codemodel="small"
    )


def _target(isa: Isa) -> _Target:
    key = (isa.triple, isa.cpu, isa.feature_string)
    if key not in _TARGETS:
        machine = _new_machine(isa)
        _TARGETS[key] = _Target(machine, str(machine.target_data))
    return _TARGETS[key]


def object_key(text: str, isa: Isa) -> str:
    """Return the cache key of an object: SHA-256 over the text, the target, and the versions of LLVM and rlx."""
    import llvmlite.binding as llvm

    version = ".".join(map(str, llvm.llvm_version_info))
    parts = (text, isa.triple, isa.cpu, isa.feature_string, version, __version__, _SETTINGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _parsed(text: str, isa: Isa, target: _Target) -> llvm.ModuleRef:
    import llvmlite.binding as llvm

    try:
        module = llvm.parse_assembly(text, llvm.create_context())
        module.triple = isa.triple
        module.data_layout = target.layout
        module.verify()
    except RuntimeError as error:
        raise BuildError(
            f"LLVM rejects the emitted code: {_with_source(str(error), text)}"
        ) from error
    return module


def _with_source(message: str, text: str) -> str:
    """Add the offending line of the text when the message names one, with the function it is in."""
    found = re.search(r"<string>:(\d+):", message)
    if found is None:
        return message
    lines = text.splitlines()
    number = int(found.group(1))
    where = next((line for line in reversed(lines[:number]) if line.startswith("define")), "")
    return f"{message.strip()}\nin {where}\nline {number}: {lines[number - 1].strip()}"


def compile_text(text: str, isa: Isa, cache: ObjectCache | None = None) -> bytes:
    """Compile one unit of IR text to an object.

    Args:
        text: LLVM IR without triple and data layout.
        isa: the target.
        cache: where to look first and keep the result.

    Raises:
        BuildError: LLVM rejects the text, or the object needs a symbol that is not allowed.
    """
    key = object_key(text, isa) if cache is not None else ""
    if cache is not None and (stored := cache.get(key)) is not None:
        return stored
    with _LOCK:
        target = _target(isa)
        module = _parsed(text, isa, target)
        data = target.machine.emit_object(module)
    _check_symbols(data, text)
    _dump(text, isa)
    if cache is not None:
        cache.put(key, data)
    return data


def compile_all(texts: Iterable[str], isa: Isa, cache: ObjectCache | None = None) -> list[bytes]:
    """Compile units to objects, one each, equal texts once."""
    done: dict[str, bytes] = {}
    out: list[bytes] = []
    for text in texts:
        if text not in done:
            done[text] = compile_text(text, isa, cache)
        out.append(done[text])
    return out


def assembly(text: str, isa: Isa) -> str:
    """Return the assembly of a unit, for reading."""
    with _LOCK:
        target = _target(isa)
        return target.machine.emit_assembly(_parsed(text, isa, target))


def _dump(text: str, isa: Isa) -> None:
    folder = config.DUMP.get()
    if not folder:
        return
    names = re.findall(r"^define void @(rlx_\w+)", text, re.MULTILINE)
    stem = names[0] if names else f"unit_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / f"{stem}.{isa.name}.ll").write_text(text)
        (root / f"{stem}.{isa.name}.s").write_text(assembly(text, isa))
    except OSError as error:
        raise UsageError(f"{config.DUMP.name}={folder!r} cannot be written to: {error}") from error


def undefined_symbols(data: bytes) -> frozenset[str]:
    """Return the symbols an ELF64 little-endian object leaves undefined.

    Raises:
        BuildError: the object has another format.
    """
    return frozenset(s.name for s in elf_symbols(data) if s.section == 0)


def _check_symbols(data: bytes, text: str) -> None:
    # Symbols of other units are looked for when everything is linked.
    unknown = sorted(n for n in undefined_symbols(data) - ALLOWED if not n.startswith(UNIT_PREFIX))
    if unknown:
        names = ", ".join(re.findall(r"^define void @(rlx_\w+)", text, re.MULTILINE)) or "the unit"
        raise BuildError(
            f"{names} needs {', '.join(unknown)}, which rlx does not link; emit the operation from instructions "
            f"that the target has, or add the function to the allowlist"
        )


def _address(name: str) -> int:
    """Return the address of an allowed symbol of the C library or its mathematical part."""
    for library in (None, "libm.so.6"):
        try:
            function = getattr(ctypes.CDLL(library), name)
        except (AttributeError, OSError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    raise BuildError(f"the C library of this process has no function {name}")


class Library:
    """Objects linked into this process. One per program; the code is unmapped by `close`.

    Args:
        objects: object files; no two may define the same symbol.
        symbols: the symbols whose addresses are wanted.
        isa: the target the objects were compiled for.

    Raises:
        BuildError: a symbol is missing or not allowed, or the linker refuses.
    """

    def __init__(self, objects: Sequence[bytes], symbols: Iterable[str], isa: Isa) -> None:
        import llvmlite.binding as llvm

        _release_abandoned()
        builder = llvm.JITLibraryBuilder()
        needed: set[str] = set()
        defined: set[str] = set()
        for data in dict.fromkeys(objects):
            builder.add_object_img(data)
            found = list(elf_symbols(data))
            needed |= {s.name for s in found if s.section == 0}
            defined |= {s.name for s in found if s.is_exported}
        if missing := sorted(needed - ALLOWED - defined):
            raise BuildError(f"no object defines {', '.join(missing)}, which another one calls")
        # For perf every function must be found.
        names = list(dict.fromkeys([*symbols, *sorted(defined if config.PERF.get() else ())]))
        for name in sorted(needed & ALLOWED):
            builder.import_symbol(name, _address(name))
        for name in names:
            builder.export_symbol(name)
        with _LOCK:
            self._jit = llvm.create_lljit_compiler(_new_machine(isa), use_jit_link=isa.is_x86)
            try:
                self._tracker = builder.link(self._jit, f"rlx{next(_LIBRARY_NUMBER)}")
            except RuntimeError as error:
                self._jit.close()
                raise BuildError(f"linking {len(objects)} objects failed: {error}") from error
        self._owners = 1
        self._addresses: dict[str, int] = {name: self._tracker[name] for name in names}
        if config.PERF.get():
            write_perf_map(dict.fromkeys(objects), self._addresses)
        # Also runs when the object is collected, but not at interpreter exit: pool threads may still be in the code.
        self._release = weakref.finalize(self, _ABANDONED.append, (self._tracker, self._jit))
        self._release.atexit = False

    def address(self, symbol: str) -> int:
        """Return the address of a symbol asked for at link time.

        Raises:
            UsageError: the library is closed, or the symbol was not asked for.
        """
        if not self._release.alive:
            raise UsageError("this library is closed; its code is no longer in memory")
        if symbol not in self._addresses:
            raise UsageError(
                f"symbol {symbol!r} was not exported; exported are {', '.join(self._addresses)}"
            )
        return self._addresses[symbol]

    @property
    def addresses(self) -> Mapping[str, int]:
        """Every exported symbol with its address."""
        return dict(self._addresses)

    def share(self) -> Library:
        """Return the library for one more owner: `close` has to be called once more."""
        with _LOCK:
            self._owners += 1
        return self

    def close(self) -> None:
        """Remove the code from memory, if this is the last owner. Nothing may be running it, or call it afterwards."""
        with _LOCK:
            self._owners -= 1
            last = self._owners == 0
        if last:
            self._release()
        _release_abandoned()


_ABANDONED: deque[tuple[llvm.ResourceTracker, llvm.LLJIT]] = deque()
"""Code of libraries that are gone. The collector may run inside llvmlite, whose lock the same thread cannot take
again, so a finalizer only leaves it here and the next call that opens or closes a library unmaps it."""


def _release_abandoned() -> None:
    while True:
        try:
            tracker, jit = _ABANDONED.popleft()
        except IndexError:
            return
        with _LOCK:
            tracker.close()
            jit.close()
