# SPDX-License-Identifier: Apache-2.0
"""What the JIT reads of the object files that LLVM writes: their symbols."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from rlx.base.errors import BuildError

__all__ = ["ElfSymbol", "elf_symbols"]

_SYMTAB = 2  # section type
_FUNCTION = 2  # symbol type
_GLOBAL = 1  # symbol binding


class ElfSymbol(NamedTuple):
    """One entry of an object's symbol table.

    Attributes:
        name: the symbol.
        is_function: whether it names code.
        is_global: whether other objects see it.
        section: index of the section that defines it; 0 for an undefined symbol.
        offset: first byte, from the start of its section.
        size: in bytes.
    """

    name: str
    is_function: bool
    is_global: bool
    section: int
    offset: int
    size: int

    @property
    def is_exported(self) -> bool:
        """Whether it is code that this object defines and others may call."""
        return self.is_function and self.is_global and self.section != 0


def elf_symbols(data: bytes) -> Iterator[ElfSymbol]:
    """Iterate the symbols of an ELF64 little-endian object.

    Raises:
        BuildError: the object has another format.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise BuildError(f"expected an ELF64 little-endian object, found bytes {data[:6]!r}")
    offset, entry, count = struct.unpack_from("<Q10xHH", data, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry) for i in range(count)]
    for _, kind, _, _, start, size, link, _, _, width in sections:
        if kind != _SYMTAB:
            continue
        strings = sections[link][4]
        for at in range(start + width, start + size, width):  # the first symbol is the null symbol
            name, info, _, section, value, length = struct.unpack_from("<IBBHQQ", data, at)
            begin = strings + name
            text = data[begin : data.index(b"\0", begin)].decode()
            is_function = info & 15 == _FUNCTION
            yield ElfSymbol(text, is_function, info >> 4 == _GLOBAL, section, value, length)
