# SPDX-License-Identifier: Apache-2.0
"""What several sub-commands need: making inputs for a model, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.runtime.executable import Executable, TensorSpec

__all__ = ["check_dims", "console", "make_inputs", "parse_dims", "show_table"]

console = Console()


def parse_dims(items: Sequence[str]) -> dict[str, int]:
    """Return {"batch": 4} for ["batch=4"].

    Raises:
        UsageError: an item is not NAME=NUMBER.
    """
    out: dict[str, int] = {}
    for item in items:
        name, sep, value = item.partition("=")
        if not name or not sep or not value.isdecimal():
            raise UsageError(f"--dim takes NAME=NUMBER, not {item!r}")
        out[name] = int(value)
    return out


def check_dims(model: Executable, dims: Mapping[str, int]) -> None:
    """Check that the model's inputs have these symbolic extents.

    Raises:
        UsageError: one of them they do not have.
    """
    known = sorted({d for spec in model.inputs for d in spec.shape if isinstance(d, str)})
    for name in dims:
        if name not in known:
            raise UsageError(
                f"--dim {name}: the symbolic extents of the model are {', '.join(known) or 'none'}"
            )


def make_inputs(
    model: Executable, files: Sequence[Path], dims: Mapping[str, int], seed: int
) -> dict[str, Array]:
    """Return inputs read from .npy and .npz files, and random ones for the rest.

    Args:
        model: whose inputs to make.
        files: ``.npz`` files with arrays by input name, or ``NAME.npy`` files.
        dims: extents for symbolic dims of random inputs; others are 1.
        seed: of the random numbers.

    Raises:
        UsageError: a file has another format or names no input, or the model has no such dim.
    """
    given: dict[str, Array] = {}
    for file in files:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                given.update(
                    {
                        n.removeprefix("in::"): archive[n]
                        for n in archive.files
                        if not n.startswith("out::")
                    }
                )
        elif file.suffix == ".npy":
            given[file.stem] = np.load(file, allow_pickle=False)
        else:
            raise UsageError(f"inputs are .npy or .npz files, not {file}")
    known = {spec.name for spec in model.inputs}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UsageError(
            f"the files hold {', '.join(unknown)}; the model's inputs are {', '.join(sorted(known))}"
        )
    check_dims(model, dims)
    generator = np.random.default_rng(seed)
    sizes = dict(dims)
    for spec in model.inputs:
        if spec.name in given:
            for extent, name in zip(given[spec.name].shape, spec.shape, strict=False):
                if isinstance(name, str):
                    sizes.setdefault(name, extent)
    return {s.name: given.get(s.name, _random(s, sizes, generator)) for s in model.inputs}


def _random(spec: TensorSpec, sizes: Mapping[str, int], generator: np.random.Generator) -> Array:
    shape = tuple(d if isinstance(d, int) else sizes.get(d, 1) for d in spec.shape)
    if spec.dtype.is_float:
        return generator.standard_normal(shape).astype(spec.dtype.numpy)
    if spec.dtype.is_integer:
        return generator.integers(0, 2, shape).astype(spec.dtype.numpy)
    return (generator.random(shape) < 0.5).astype(spec.dtype.numpy)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns after the first are aligned to the right where they hold numbers."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(r[index], int | float) for r in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, int) else escape(str(v)) for v in row))
    console.print(table)
