# SPDX-License-Identifier: Apache-2.0
"""What several sub-commands need: making inputs for a model, and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import rlx
from rlx.base.allocation import out_of_memory
from rlx.base.dims import LIMIT
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.cli.arrays import read_arrays
from rlx.runtime.executable import Executable, TensorSpec

__all__ = [
    "PACKAGE",
    "Precision",
    "check_dims",
    "console",
    "make_inputs",
    "open_model",
    "parse_dims",
    "show_table",
]

console = Console()
PACKAGE = ".rlxp"
"""What the names of packages end in."""


Precision: TypeAlias = Annotated[
    str | None,
    typer.Option(help="What to compute in: f32 (by default), f16, bf16, mixed-f16, mixed-bf16."),
]


def open_model(
    path: Path,
    device: str,
    threads: int | None = None,
    dims: Mapping[str, int] | None = None,
    precision: str | None = None,
) -> Executable:
    """Return a model from an ONNX file, or from a package if the name says so; arguments as for `rlx.load`.

    Raises:
        UsageError: there is a precision for a package.
    """
    if path.suffix != PACKAGE:
        return rlx.load(path, device, threads=threads, dims=dims, precision=precision or "f32")
    if precision is not None:
        raise UsageError(
            f"{path.name} holds compiled programs: give --precision to `rlx package` when it is made"
        )
    return rlx.open(path, device, threads=threads, dims=dims)


def parse_dims(items: Sequence[str]) -> dict[str, int]:
    """Return {"batch": 4} for ["batch=4"].

    Raises:
        UsageError: an item is not NAME=NUMBER, or a name is there twice.
    """
    out: dict[str, int] = {}
    for item in items:
        name, sep, value = item.partition("=")
        if not name or not sep or not value.isdecimal():
            raise UsageError(f"--dim takes NAME=NUMBER, not {item!r}")
        if name in out:
            raise UsageError(f"--dim gives {name} twice")
        if len(value) > len(str(LIMIT)) or int(value) > LIMIT:
            raise UsageError(f"--dim {item}: extents are at most {LIMIT}")
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
        UsageError: a file has another format or names no input, an input is there twice, or the model has no such dim.
        OutOfMemoryError: random inputs would be too large.
    """
    given: dict[str, Array] = {}
    for file in files:
        for name, array in read_arrays(file).items():
            if name.startswith("out::"):
                continue
            if given.setdefault(name.removeprefix("in::"), array) is not array:
                raise UsageError(
                    f"input {name.removeprefix('in::')!r} is given twice, again by {file}"
                )
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
            given[spec.name] = _typed(spec, given[spec.name])
            for extent, name in zip(given[spec.name].shape, spec.shape, strict=False):
                if isinstance(name, str) and sizes.setdefault(name, extent) != extent:
                    raise UsageError(
                        f"input {spec} is given with {name} = {extent}, but {name} is {sizes[name]} by --dim or "
                        "another input"
                    )
    return {
        s.name: given[s.name] if s.name in given else _random(s, sizes, generator)
        for s in model.inputs
    }


def _typed(spec: TensorSpec, array: Array) -> Array:
    """Return an array as read from a file; files name bf16 and fp8 only as so many bytes."""
    wanted = spec.dtype.numpy
    opaque = array.dtype.kind == "V" and array.dtype.names is None
    return array.view(wanted) if opaque and array.dtype.itemsize == wanted.itemsize else array


def _random(spec: TensorSpec, sizes: Mapping[str, int], generator: np.random.Generator) -> Array:
    shape = tuple(d if isinstance(d, int) else sizes.get(d, 1) for d in spec.shape)
    try:
        if spec.dtype.is_float:
            return generator.standard_normal(shape).astype(spec.dtype.numpy)
        if spec.dtype.is_integer:
            return generator.integers(0, 2, shape).astype(spec.dtype.numpy)
        return (generator.random(shape) < 0.5).astype(spec.dtype.numpy)
    except (MemoryError, ValueError) as error:  # a ValueError: more than an address can say
        raise out_of_memory(f"random input {spec}", 8 * math.prod(shape), sizes) from error


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns after the first are aligned to the right where they hold numbers."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(r[index], int | float) for r in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, int) else escape(str(v)) for v in row))
    console.print(table)
