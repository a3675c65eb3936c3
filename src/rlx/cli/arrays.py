# SPDX-License-Identifier: Apache-2.0
"""Arrays in files: .npz and .npy, without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlx.base.errors import UsageError
from rlx.base.numeric import Array

__all__ = ["check_target", "read_arrays", "write_arrays"]


def read_arrays(file: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file by name, or the one of NAME.npy as NAME.

    Raises:
        UsageError: the file has another format, is damaged, or holds Python objects.
    """
    if file.suffix not in (".npz", ".npy"):
        raise UsageError(f"inputs are .npy or .npz files, not {file}")
    try:
        with file.open("rb") as stream:  # NumPy would leave it open where it finds no archive
            loaded: Any = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {file.stem: cast("Array", loaded)}
            with loaded as archive:
                return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error) or "it is empty"
        if "pickle" in reason:
            reason = "it is no array of numbers; Python objects (pickles) are not read"
        raise UsageError(f"cannot read arrays from {file}: {reason}") from error


def check_target(file: Path, what: str = "outputs are", suffix: str = ".npz") -> None:
    """Check, before there is anything to write, that a file can be written.

    Args:
        file: to be written.
        what: goes into it; begins the message.
        suffix: that its name must have.

    Raises:
        UsageError: its name has another suffix, or its folder is not there.
    """
    if file.suffix != suffix:
        raise UsageError(f"{what} written to a {suffix} file, not {file}")
    if not file.parent.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {file.parent}")


def write_arrays(file: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an .npz file, under any names (`np.savez` takes some names for its own arguments).

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error}") from error
