# SPDX-License-Identifier: Apache-2.0
"""The map for Linux `perf`: its addresses are those of the functions it names."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from rlx.backends.cpu.elf import elf_symbols
from rlx.backends.cpu.isa import host_isa
from rlx.backends.cpu.jit import Library, compile_text
from rlx.backends.cpu.perf_map import map_path
from rlx.base.config import override
from rlx.base.errors import BuildError

_TEXT = """
define internal i64 @inner(i64 %x) noinline {
  %y = mul i64 %x, 3
  ret i64 %y
}
define i64 @t_outer(i64 %x) {
  %y = call i64 @inner(i64 %x)
  %z = add i64 %y, 1
  ret i64 %z
}
"""


@pytest.fixture
def lines() -> Iterator[dict[str, tuple[int, int]]]:
    """Link the unit with the knob set; yield name -> (address, size)."""
    isa = host_isa()
    path = map_path()
    before = path.stat().st_size if path.exists() else 0
    with override(RLX_PERF=True):
        library = Library([compile_text(_TEXT, isa)], ["t_outer"], isa)
    found = [line.split() for line in path.read_text()[before:].splitlines()]
    yield {name: (int(at, 16), int(size, 16)) for at, size, name in found}
    library.close()
    if not before:
        path.unlink()


def test_every_function_is_named_at_its_address(lines: dict[str, tuple[int, int]]) -> None:
    assert set(lines) == {"t_outer", "t_outer:inner"}
    assert lines["t_outer"][0] != lines["t_outer:inner"][0]
    for name, want in (("t_outer", 22), ("t_outer:inner", 21)):
        address, size = lines[name]
        assert size > 0
        assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(7) == want


def test_nothing_is_written_without_the_knob() -> None:
    isa = host_isa()
    before = map_path().exists()
    Library([compile_text(_TEXT, isa)], ["t_outer"], isa).close()
    assert map_path().exists() == before


def test_symbols_of_another_format() -> None:
    with pytest.raises(BuildError, match="expected an ELF64 little-endian object"):
        list(elf_symbols(b"MZ" + bytes(100)))
