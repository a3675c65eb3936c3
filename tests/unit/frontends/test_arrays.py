# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import random
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx import ParseError, RlxError, UsageError
from rlx.base.dtypes import DType
from rlx.frontends.arrays import open_arrays

_W = np.arange(12, dtype=np.float32).reshape(3, 4)


def _safetensors(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def _entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]} | changes}


def _npz(**arrays: Any) -> bytes:
    out = BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _write(tmp_path: Path, name: str, data: bytes) -> Path:
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def test_arrays_of_safetensors_are_views_of_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.safetensors", _safetensors(_entry(), _W.tobytes()))
    found = open_arrays(path)["w"]
    assert (found.dtype, found.shape) == (DType.F32, (3, 4))
    array = found.load()
    np.testing.assert_array_equal(array, _W)
    assert not array.flags.owndata
    assert not array.flags.writeable


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_npz(tmp_path: Path, save: Any) -> None:
    arrays: dict[str, Any] = {
        "w": _W,
        "fortran": np.asfortranarray(_W),
        "swapped": _W.astype(">f4"),
        "scalar": np.float64(3),
        "none": np.zeros((0, 5), np.int8),
        "flags": _W > 3,
    }
    save(tmp_path / "a.npz", **arrays)
    found = open_arrays(tmp_path / "a.npz")
    assert set(found) == set(arrays)
    for name, expected in arrays.items():
        assert found[name].shape == np.shape(expected)
        np.testing.assert_array_equal(found[name].load(), expected)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        _safetensors(b"{}", length=1 << 62),
        _safetensors(b"{}", length=3),
        _safetensors(b"not json"),
        _safetensors(b"[" * 100_000),
        _safetensors([1]),
        _safetensors({"w": 3}),
        _safetensors({"w": {}}),
        _safetensors(_entry(dtype="Q9"), bytes(48)),
        _safetensors(_entry(dtype=["F32"]), bytes(48)),
        _safetensors(_entry(shape=[3, -4]), bytes(48)),
        _safetensors(_entry(shape=[3, 4.0]), bytes(48)),
        _safetensors(_entry(shape="34"), bytes(48)),
        _safetensors(_entry(shape=[1 << 62, 1 << 62]), bytes(48)),
        _safetensors(_entry(data_offsets=[0, 44]), bytes(48)),
        _safetensors(_entry(data_offsets=[4, 52]), bytes(48)),
        _safetensors(_entry(data_offsets=[48, 0]), bytes(48)),
        _safetensors(_entry(data_offsets=[0]), bytes(48)),
        _safetensors(_entry(), bytes(47)),
    ],
)
def test_malformed_safetensors_are_parse_errors(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ParseError, match="bad"):
        open_arrays(_write(tmp_path, "bad.safetensors", data))


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    out = BytesIO()
    np.savez(out, w=np.array([{}], dtype=object))
    with pytest.raises(ParseError, match="only plain numbers"):
        open_arrays(_write(tmp_path, "a.npz", out.getvalue()))


def test_a_small_archive_that_stands_for_a_large_array_takes_no_memory(tmp_path: Path) -> None:
    header = BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("w.npy", header.getvalue())
    with pytest.raises(ParseError, match="bytes, but it has 0"):
        open_arrays(tmp_path / "a.npz")


def test_members_at_the_same_place_are_refused(tmp_path: Path) -> None:
    data = _npz(w=_W)
    end = data.rindex(b"PK\5\6")
    size, start = (int.from_bytes(data[end + i : end + i + 4], "little") for i in (12, 16))
    entry = data[start : start + size]
    tail = bytearray(data[end:])
    tail[8:10] = tail[10:12] = (2).to_bytes(2, "little")
    tail[12:16] = (2 * size).to_bytes(4, "little")
    path = _write(tmp_path, "twice.npz", data[:start] + entry + entry + bytes(tail))
    with pytest.raises(ParseError, match="at the same place"):
        open_arrays(path)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_mutated_files_raise_rlx_errors_only(tmp_path: Path, kind: str) -> None:
    good = _npz(w=_W, v=_W[0]) if kind == "npz" else _safetensors(_entry(), _W.tobytes())
    chance = random.Random(7)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.choice((0, 255, chance.randrange(256)))
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        path = _write(tmp_path, f"bad.{kind}", bytes(data))
        try:
            for array in open_arrays(path).values():
                array.load()
        except RlxError:
            pass


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.safetensors or \.npz"):
        open_arrays(_write(tmp_path, "w.pt", b""))
    with pytest.raises(UsageError, match="cannot open"):
        open_arrays(tmp_path / "none.npz")
