# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.base.errors import UsageError
from rlx.cli.arrays import check_target, read_arrays, write_arrays


def test_arrays_come_back_under_any_name(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "file": np.arange(3),
        "allow_pickle": np.float32(2),
        "a/b c": np.zeros((0, 2)),
        "args": np.ones((2, 2), bool),
    }
    write_arrays(tmp_path / "a.npz", arrays)
    found = read_arrays(tmp_path / "a.npz")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    with np.load(tmp_path / "a.npz") as archive:
        assert set(archive.files) == set(arrays)
    np.save(tmp_path / "b.npy", np.arange(4))
    assert read_arrays(tmp_path / "b.npy")["b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("x.npz", b"", "No data|is empty"),
        ("x.npy", b"", "No data|is empty"),
        ("x.npy", b"text", "no array of numbers"),
        ("x.npz", b"PK\x03\x04 cut", "not a zip file"),
        ("x.npy", b"\x93NUMPY\x01\x00", "EOF|header"),
        ("x.txt", b"1 2", r"\.npy or \.npz files"),
    ],
)
def test_files_that_hold_no_arrays(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=reason):
        read_arrays(tmp_path / name)


def test_files_that_are_not_there_or_hold_objects(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_arrays(tmp_path / "absent.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(UsageError, match="folder"):
        read_arrays(tmp_path / "folder.npz")
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(UsageError, match="pickles"):
        read_arrays(tmp_path / "o.npy")


def test_targets_are_checked_before_there_is_anything_to_write(tmp_path: Path) -> None:
    check_target(tmp_path / "a.npz")
    with pytest.raises(UsageError, match=r"\.npz file"):
        check_target(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="there is no folder"):
        check_target(tmp_path / "absent" / "a.npz")
    (tmp_path / "taken.npz").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        write_arrays(tmp_path / "taken.npz", {"x": np.arange(3)})
