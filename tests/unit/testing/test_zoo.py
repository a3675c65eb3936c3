# SPDX-License-Identifier: Apache-2.0
import dataclasses
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlx.base.config import override
from rlx.base.errors import UsageError
from rlx.testing import zoo

PACKAGE = "some-model==1.0"
MODEL = b"the bytes of a model"
DATA = b"external data"


def _case(**changes: object) -> zoo.Case:
    plain = zoo.Case(
        name="some",
        row=None,
        source="pypi",
        package=PACKAGE,
        member="pkg/model.onnx",
        files={
            "pkg/model.onnx": hashlib.sha256(MODEL).hexdigest(),
            "pkg/model.onnx.data": hashlib.sha256(DATA).hexdigest(),
        },
        noise=0.0,
        atol=1e-3,
        rtol=1e-3,
        ci=False,
    )
    return dataclasses.replace(plain, **changes)


def _wheel(file: Path, prefix: str = "", model: bytes = MODEL) -> Path:
    with zipfile.ZipFile(file, "w") as out:
        out.writestr(f"{prefix}pkg/other.onnx", b"something else")
        out.writestr(f"{prefix}pkg/model.onnx", model)
        out.writestr(f"{prefix}pkg/model.onnx.data", DATA)
    return file


def _sdist(file: Path) -> Path:
    with tarfile.open(file, "w:gz") as out:
        for name, content in (("model.onnx", MODEL), ("model.onnx.data", DATA)):
            entry = tarfile.TarInfo(f"some-1.0/src/pkg/{name}")
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    return file


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> zoo.Case:
    case = _case()
    monkeypatch.setattr(zoo, "cases", lambda: (case,))
    return case


def _data_wheel(file: Path) -> Path:
    return _wheel(file, "some-1.0.data/purelib/")


@pytest.mark.parametrize("make", [_wheel, _data_wheel, _sdist])
def test_archive_gives_the_model_and_its_external_data(
    make: Callable[[Path], Path], one_case: zoo.Case, tmp_path: Path
) -> None:
    with override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        zoo.add_archive(make(tmp_path / "archive"), PACKAGE)
        found = zoo.path(one_case)
    assert found.read_bytes() == MODEL
    assert found.with_name("model.onnx.data").read_bytes() == DATA
    assert sorted(f.name for f in found.parent.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_changed_bytes_are_refused_and_leave_nothing_behind(
    one_case: zoo.Case, tmp_path: Path
) -> None:
    archive = _wheel(tmp_path / "a.whl", model=b"other bytes")
    with override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        with pytest.raises(UsageError, match="sha256"):
            zoo.add_archive(archive, one_case.package)
        assert [f for f in (tmp_path / "cache").rglob("*") if f.is_file()] == []


def test_archive_without_the_model_is_an_error(one_case: zoo.Case, tmp_path: Path) -> None:
    archive = tmp_path / "a.whl"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("pkg/readme", b"")
    with (
        override(RLX_CACHE_DIR=str(tmp_path / "cache")),
        pytest.raises(UsageError, match=r"does not hold pkg/model\.onnx, pkg/model\.onnx\.data"),
    ):
        zoo.add_archive(archive, one_case.package)


def test_file_that_is_no_archive_is_an_error(one_case: zoo.Case, tmp_path: Path) -> None:
    file = tmp_path / "a.whl"
    file.write_bytes(b"not an archive")
    with pytest.raises(UsageError, match="neither a zip nor a tar"):
        zoo.add_archive(file, one_case.package)


def test_unknown_names_are_errors() -> None:
    with pytest.raises(UsageError, match="Did you mean 'basic_pitch'"):
        zoo.case("basic_pich")
    with pytest.raises(UsageError, match="no case of the zoo"):
        zoo.add_archive(Path("a.whl"), "unknown==1")


def test_export_case_names_its_script(tmp_path: Path) -> None:
    with (
        override(RLX_CACHE_DIR=str(tmp_path)),
        pytest.raises(UsageError, match=r"export_mobilenet\.py"),
    ):
        zoo.path(zoo.case("mobilenet_v2"))


def test_table_covers_the_twelve_rows_and_every_file_is_pinned() -> None:
    cases = zoo.cases()
    assert {c.row for c in cases if c.row is not None} == set(range(1, 13))
    assert len({c.name for c in cases}) == len(cases)
    assert all(c.files for c in cases)
    assert all(c.member in c.files for c in cases if c.source != "export")
    assert all(c.atol >= c.noise for c in cases)
    assert {c.row for c in cases if c.ci} == {1, 3, 6, 7, 12}


@pytest.mark.parametrize("case", zoo.cases(), ids=str)
def test_every_case_has_recorded_inputs_and_outputs(case: zoo.Case) -> None:
    inputs, outputs = zoo.golden(case)
    assert inputs
    assert outputs
    assert zoo.failures(case, outputs) == []


def test_failures_names_each_output_that_is_off(tmp_path: Path) -> None:
    wanted = {
        "a": np.array([1.0, np.nan, np.inf], np.float32),
        "b": np.array([1, 2]),
        "c": np.zeros((2, 3), np.float32),
        "d": np.zeros(2, np.float32),
    }
    np.savez(tmp_path / "some.npz", **{f"out::{n}": a for n, a in wanted.items()})  # pyright: ignore[reportArgumentType]
    case = _case()
    assert zoo.failures(case, wanted, tmp_path) == []
    found = {
        "a": np.array([1.1, np.nan, np.inf], np.float32),
        "b": np.array([1, 3]),
        "c": np.zeros((3, 2), np.float32),
    }
    text = zoo.failures(case, found, tmp_path)
    assert [t.split("output ")[1][:3] for t in text] == ["'a'", "'b'", "'c'", "'d'"]
    assert "off in 1 of 3 elements, largest difference 0.1" in text[0]
    assert "differs in 1 of 2" in text[1]
    assert "float32[3, 2], expected float32[2, 3]" in text[2]
    assert "missing" in text[3]


def test_missing_recordings_say_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="RLX_GOLDENS"):
        zoo.golden(_case(), tmp_path)
