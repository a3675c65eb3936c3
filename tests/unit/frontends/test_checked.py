# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlx.base.errors import ModelError, UsageError
from rlx.frontends.checked import Home, SideFiles, map_file, map_source, window


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
    assert Home(folder).find("sub/w", "t") == expected
    assert Home(tmp_path / "alias").find("./sub//w", "t") == expected
    assert Home.given(tmp_path / "alias").find("sub/w", "t") == expected


def _hub(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folder of a snapshot in a cache laid out as by the Hugging Face hub, and the folder of the files."""
    repository = tmp_path / "hub" / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0f1e"
    blobs.mkdir(parents=True)
    (snapshot / "onnx").mkdir(parents=True)
    for name, blob in (("model.onnx", "aa"), ("model.onnx_data", "bb")):
        (blobs / blob).write_bytes(blob.encode())
        (snapshot / "onnx" / name).symlink_to(f"../../../blobs/{blob}")
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot, blobs


@pytest.mark.parametrize("inner", ["", "onnx"])
def test_links_into_the_files_of_the_same_repository_of_a_hub_cache(
    tmp_path: Path, inner: str
) -> None:
    snapshot, blobs = _hub(tmp_path)
    (tmp_path / "alias").symlink_to(snapshot)
    for folder in (snapshot / inner, tmp_path / "alias" / inner):
        for home in (Home.of_model(folder / "model.onnx"), Home.given(folder)):
            assert home.find("model.onnx_data", "t") == (blobs / "bb").resolve()


@pytest.mark.parametrize("target", ["secret", "hub/models--org--other/blobs/cc", "hub/token"])
def test_links_of_a_hub_cache_that_lead_elsewhere(tmp_path: Path, target: str) -> None:
    snapshot, blobs = _hub(tmp_path)
    (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / target).write_text("secret")
    (snapshot / "direct").symlink_to(tmp_path / target)
    (blobs / "hop").symlink_to(tmp_path / target)
    (snapshot / "twice").symlink_to("../../blobs/hop")
    (blobs / "sub").mkdir()
    (blobs / "sub" / "w").touch()
    (snapshot / "deeper").symlink_to("../../blobs/sub/w")
    for home in (Home.of_model(snapshot / "model.onnx"), Home.given(snapshot)):
        for location in ("direct", "twice", "deeper"):
            with pytest.raises(ModelError, match="leads out of"):
                home.find(location, "t")


def test_a_folder_that_only_looks_like_a_hub_cache(tmp_path: Path) -> None:
    """The files have to lie in the repository itself, wherever its parts claim to be."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "w").touch()
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0f1e"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "blobs").symlink_to(tmp_path / "private")
    (snapshot / "model.onnx").touch()
    (snapshot / "w").symlink_to("../../blobs/w")
    with pytest.raises(ModelError, match="leads out of"):
        Home.of_model(snapshot / "model.onnx").find("w", "t")


def test_links_to_a_model_and_to_the_data_beside_it(tmp_path: Path) -> None:
    real, here = tmp_path / "real", tmp_path / "here"
    (real / "sub").mkdir(parents=True)
    here.mkdir()
    for name in ("model.onnx", "w", "sub/w"):
        (real / name).touch()
    (here / "model.onnx").symlink_to("../real/model.onnx")
    (here / "w").symlink_to("../real/w")
    (here / "deep").symlink_to("../real/sub/w")
    (here / "own.onnx").touch()
    linked = Home.of_model(here / "model.onnx")
    assert linked.find("w", "t") == (real / "w").resolve()
    with pytest.raises(ModelError, match="leads out of"):
        linked.find("deep", "t")
    for home in (Home.of_model(here / "own.onnx"), Home.given(here)):
        with pytest.raises(ModelError, match="leads out of"):
            home.find("w", "t")


def test_data_is_looked_up_beside_the_link_and_not_beside_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "model.onnx").touch()
    (tmp_path / "real" / "w").touch()
    (tmp_path / "model.onnx").symlink_to("real/model.onnx")
    with pytest.raises(ModelError, match="pass folder="):
        Home.of_model(tmp_path / "model.onnx").find("w", "t")
    assert Home.given(tmp_path / "real").find("w", "t") == (tmp_path / "real" / "w").resolve()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "absent"):
        with pytest.raises(UsageError, match=r"folder=.*is no folder"):
            Home.given(tmp_path / name)


def test_sibling_with_the_folder_as_prefix_is_outside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model2").touch()
    (tmp_path / "model" / "link").symlink_to("../model2")
    with pytest.raises(ModelError, match="leads out of"):
        Home(tmp_path / "model").find("link", "t")


@pytest.mark.parametrize(("offset", "length"), [(0, 4), (3, 1), (-1, 1), (0, -1), (1 << 70, 0)])
def test_window_outside(offset: int, length: int) -> None:
    with pytest.raises(ModelError, match="the file has 3"):
        window(memoryview(b"abc"), offset, length, "t")


def test_window_inside() -> None:
    assert window(memoryview(b"abc"), 1, 2, "t") == b"bc"
    assert window(memoryview(b"abc"), 3, 0, "t") == b""


def test_side_files_share_one_map(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    files = SideFiles(Home(tmp_path))
    assert files.read("w", "t").obj is files.read("./w", "t").obj
    assert files.opened() == {"w": b"abc"}
    with pytest.raises(ModelError, match="pass folder="):
        SideFiles(None).read("w", "t")
