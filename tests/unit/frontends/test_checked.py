# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlx.base.errors import ModelError, UsageError
from rlx.frontends.checked import SideFiles, contained_path, map_file, map_source, window


def test_map_file_is_read_only_and_outlives_the_name(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    view = map_file(path)
    path.unlink()
    assert view == b"abc"
    assert view.readonly


def test_map_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert len(map_file(tmp_path / "f")) == 0


def test_map_file_refuses_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in [tmp_path / "pipe", tmp_path, Path("/dev/zero")]:
        with pytest.raises(ModelError, match="not a regular file"):
            map_file(path)
    with pytest.raises(OSError, match="link"):
        map_file(tmp_path / "link")


def test_map_source_follows_links_and_blames_the_caller(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("f")
    assert map_source(tmp_path / "link", "a model") == b"abc"
    for name in ["absent", "", "f/x", "nul\0"]:
        with pytest.raises(UsageError, match="as a model"):
            map_source(tmp_path / name, "a model")


def test_contained_path(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "w").touch()
    (tmp_path / "alias").symlink_to("real")
    expected = (folder / "sub" / "w").resolve()
    assert contained_path(folder, "sub/w", "t") == expected
    assert contained_path(tmp_path / "alias", "./sub//w", "t") == expected


def test_sibling_with_the_folder_as_prefix_is_outside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model2").touch()
    (tmp_path / "model" / "link").symlink_to("../model2")
    with pytest.raises(ModelError, match="leads out of"):
        contained_path(tmp_path / "model", "link", "t")


@pytest.mark.parametrize(("offset", "length"), [(0, 4), (3, 1), (-1, 1), (0, -1), (1 << 70, 0)])
def test_window_outside(offset: int, length: int) -> None:
    with pytest.raises(ModelError, match="the file has 3"):
        window(memoryview(b"abc"), offset, length, "t")


def test_window_inside() -> None:
    assert window(memoryview(b"abc"), 1, 2, "t") == b"bc"
    assert window(memoryview(b"abc"), 3, 0, "t") == b""


def test_side_files_share_one_map(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    files = SideFiles(tmp_path)
    assert files.read("w", "t").obj is files.read("./w", "t").obj
    with pytest.raises(ModelError, match="pass folder="):
        SideFiles(None).read("w", "t")
