# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx.base import store as module
from rlx.base.config import override
from rlx.base.store import ALIGNMENT, OUTDATED, Store, default_store

_KEY = "ab" * 32
_MEGABYTE = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", 64 * _MEGABYTE)


def _file(store: Store, kind: str = "object", key: str = _KEY) -> Path:
    return store.folder / "v3" / kind / key[:2] / key[2:]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("size", [0, 1, 7, 32768, 100_001])
def test_what_is_put_comes_back(store: Store, size: int, quick: bool) -> None:
    data = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8).tobytes()
    assert store.put("object", _KEY, data, quick=quick)
    assert store.get("object", _KEY) == data
    assert store.get("program", _KEY) is None
    assert store.get("object", "cd" * 32) is None


def test_parts_lie_at_aligned_offsets(store: Store) -> None:
    parts = [
        b"abc",
        np.arange(5, dtype=np.float32),
        np.ones((2, 3), ml_dtypes.bfloat16),
        np.array(2.0),
    ]
    assert store.put("weights", _KEY, parts, quick=True)
    payload = store.get("weights", _KEY)
    assert payload is not None
    assert bytes(payload[:3]) == b"abc"
    assert np.frombuffer(payload, np.float32, 5, ALIGNMENT).tolist() == [0, 1, 2, 3, 4]
    mapped = np.frombuffer(payload, ml_dtypes.bfloat16, 6, 2 * ALIGNMENT)
    assert mapped.astype(np.float32).tolist() == [1] * 6
    assert mapped.__array_interface__["data"][0] % ALIGNMENT == 0
    assert np.frombuffer(payload, np.float64, 1, 3 * ALIGNMENT)[0] == 2


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("where", [0, 9, 20, 45, 60, 128, 5000, -1])
def test_a_flipped_bit_anywhere_is_found(
    store: Store, where: int, quick: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("object", _KEY, bytes(range(256)) * 500, quick=quick)
    path = _file(store)
    damaged = bytearray(path.read_bytes())
    damaged[where] ^= 16
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert store.get("object", _KEY) is None
    assert "damaged" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("keep", [0, 5, 100, 128, 40_000])
def test_a_cut_file_is_found(store: Store, keep: int, quick: bool) -> None:
    store.put("object", _KEY, b"\7" * 100_000, quick=quick)
    os.truncate(_file(store), keep)
    assert store.get("object", _KEY) is None


def test_blocks_that_changed_places_are_found(store: Store) -> None:
    store.put("object", _KEY, b"\1" * 32768 + b"\2" * 32768, quick=True)
    data = _file(store).read_bytes()
    _file(store).write_bytes(data[:128] + data[128 + 32768 :] + data[128 : 128 + 32768])
    assert store.get("object", _KEY) is None


def test_an_entry_under_another_name_is_not_taken(store: Store) -> None:
    store.put("object", _KEY, b"data")
    other = "cd" * 32
    _file(store, key=other).parent.mkdir()
    _file(store).rename(_file(store, key=other))
    assert store.get("object", other) is None


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 10 * _MEGABYTE)
    keys = [f"{i:02x}" * 32 for i in range(12)]
    for age, key in enumerate(keys):
        store.put("object", key, bytes(_MEGABYTE))
        os.utime(_file(store, key=key), (1000 + age, 1000 + age))
    assert store.get("object", keys[3]) is not None  # used now
    store.trim()
    left = {e.key for e in store.entries()}
    assert keys[3] in left
    assert keys[0] not in left
    assert sum(e.nbytes for e in store.entries()) <= store.limit


def test_writing_keeps_the_folder_within_its_limit(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 8 * _MEGABYTE)
    for i in range(40):
        store.put("object", f"{i:02x}" * 32, bytes(_MEGABYTE))
        assert sum(e.nbytes for e in store.entries()) <= store.limit + store.limit // 16 + _MEGABYTE


def test_an_entry_that_would_push_out_most_others_is_not_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", _MEGABYTE)
    store.put("object", _KEY, b"small")
    assert not store.put("weights", _KEY, bytes(600_000))
    assert store.get("object", _KEY) == b"small"


@pytest.mark.parametrize("limit", [0, 1])
def test_a_store_without_room_keeps_nothing(tmp_path: Path, limit: int) -> None:
    store = Store(tmp_path / "store", limit)
    assert not store.put("object", _KEY, b"small")
    assert store.get("object", _KEY) is None
    assert not list(store.entries())


def test_clear_removes_everything_and_counts(store: Store) -> None:
    for i in range(3):
        store.put("object", f"{i:02x}" * 32, b"x")
    assert store.clear() == 3
    assert store.entries() == []


@pytest.mark.parametrize("old", ["object/ab/cd", "v2/object/ab/cd", "v3/object/stray"])
def test_entries_of_other_formats_are_not_read_and_go_with_the_rest(
    store: Store, old: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("object", _KEY, b"x")
    path = store.folder / old
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"rlxstore2" + bytes(1000))
    os.utime(path, (1000, 1000))
    assert store.get("object", _KEY) == b"x"
    assert [e.kind for e in store.entries()] == ["object", OUTDATED]
    assert store.trim(limit=1000) == 1
    assert [e.kind for e in store.entries()] == ["object"]
    assert [p.name for p in store.folder.iterdir()] == ["v3"]
    assert store.clear() == 1
    assert caplog.text == ""


def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    store = Store(folder, _MEGABYTE)
    assert not store.put("object", _KEY, b"x")
    assert store.get("object", _KEY) is None
    assert caplog.text.count("nobody else may write") == 1


def test_a_folder_that_cannot_be_made_costs_only_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "store", _MEGABYTE)
    assert not store.put("object", _KEY, b"x")
    assert store.get("object", _KEY) is None
    assert "nothing is cached" in caplog.text


def test_a_disk_that_refuses_writes_costs_only_the_cache(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    store.put("object", _KEY, b"x")
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(module.os, "utime", refuse)
    assert not store.put("object", "cd" * 32, b"y")
    assert "Read-only" in caplog.text
    assert store.get("object", _KEY) == b"x"


def test_writers_and_readers_of_one_entry_never_see_half_of_it(store: Store) -> None:
    wrong: list[object] = []

    def write(value: int) -> None:
        for _ in range(20):
            store.put("object", _KEY, bytes([value]) * 50_000)

    def read() -> None:
        for _ in range(100):
            found = store.get("object", _KEY)
            if found is not None and (len(found) != 50_000 or len(set(bytes(found))) != 1):
                wrong.append(bytes(found[:8]))

    store.put("object", _KEY, bytes(50_000))
    threads = [threading.Thread(target=write, args=(v,)) for v in range(3)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [p.name for p in store.folder.rglob(".tmp*")] == []


def test_what_a_dead_writer_left_is_swept_up(store: Store) -> None:
    store.put("object", _KEY, b"x")
    old, new = _file(store).with_name(".tmpold"), _file(store).with_name(".tmpnew")
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    assert len(store.entries()) == 1
    assert not old.exists()
    assert new.exists()


def test_the_store_is_one_folder_of_the_cache_and_leaves_others_alone(tmp_path: Path) -> None:
    model = tmp_path / "zoo" / "package" / "model.onnx"
    model.parent.mkdir(parents=True)
    model.write_bytes(bytes(1000))
    with override(RLX_CACHE_DIR=str(tmp_path), RLX_CACHE_LIMIT=1000):
        store = default_store()
        assert store is not None
        store.put("object", _KEY, b"x")
        assert len(store.entries()) == 1
        store.clear()
    assert model.exists()
    with override(RLX_CACHE="off"):
        assert default_store() is None
