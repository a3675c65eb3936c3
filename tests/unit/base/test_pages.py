# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlx.base.numeric import Array
from rlx.base.pages import bring_pages, give_back, write_parts
from rlx.frontends.checked import map_file


def _resident_file_bytes() -> int:
    """Return resident bytes of mapped files."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(x.split()[1]) for x in text.splitlines() if x.startswith("RssFile")) * 1024


def test_pages_of_a_mapped_file_are_given_back_and_stay_readable(tmp_path: Path) -> None:
    data = np.arange(4 << 20, dtype=np.float32)  # 16 MiB
    data.tofile(tmp_path / "w.bin")
    view = map_file(tmp_path / "w.bin")
    array = np.frombuffer(view[4:-4], np.float32).reshape(2, -1)
    total = float(array.sum(dtype=np.float64))
    before = _resident_file_bytes()
    assert give_back(array)
    assert before - _resident_file_bytes() > 15 << 20
    assert float(array.sum(dtype=np.float64)) == total
    assert give_back(array[:0])


def _new_memory(nbytes: int) -> Array:
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _resident_anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(x.split()[1]) for x in text.splitlines() if x.startswith("RssAnon")) * 1024


@pytest.mark.skipif(
    not hasattr(os, "uname") or [int(n) for n in os.uname().release.split(".")[:2]] < [5, 14],
    reason="Linux 5.14 is the first that can",
)
def test_pages_are_brought_and_what_is_in_them_stays() -> None:
    region = _new_memory(3 << 20)
    region[5000:300_000] = 7
    before = _resident_anonymous_bytes()
    bring_pages(region[100:-100])
    assert _resident_anonymous_bytes() - before > 2 << 20
    assert region[5000:300_000].min() == 7
    assert not region[300_000:].any()


def test_pages_of_small_strided_and_huge_arrays_are_left_alone() -> None:
    region = _new_memory(32 << 20)
    before = _resident_anonymous_bytes()
    for array in (region[:5000], region[: 2 << 20 : 2], region, region[:0]):
        bring_pages(array)
    assert _resident_anonymous_bytes() - before < 1 << 20


def test_memory_that_is_no_mapped_file_is_left_alone() -> None:
    owned = np.ones(1 << 20)
    anonymous = np.frombuffer(memoryview(mmap.mmap(-1, 1 << 20)), np.uint8)
    anonymous[:] = 7
    constant = np.frombuffer(bytes(range(256)) * 64, np.uint8)
    for array in (owned, owned[5:], anonymous, constant):
        copy = array.copy()
        assert not give_back(array)
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("most", [None, 1, 7, 4096])
def test_parts_are_written_in_order_whatever_a_call_takes(
    most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [bytes([i % 251]) * (i % 5) for i in range(3000)] + [b"x" * 70_000, b"", b"end"]
    if most is not None:  # a call may write less than it was given

        def writes(descriptor: int, some: Sequence[bytes | memoryview]) -> int:
            return os.write(descriptor, b"".join(bytes(p) for p in some)[:most])

        monkeypatch.setattr("os.writev", writes)
        parts = [parts[i] for i in range(0, len(parts), 100)]
    path = tmp_path / "parts"
    with path.open("xb", buffering=0) as file:
        file.write(b"head")
        write_parts(file, [memoryview(p) for p in parts])
        assert file.tell() == 4 + sum(map(len, parts))
    assert path.read_bytes() == b"head" + b"".join(parts)
