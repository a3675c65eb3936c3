# SPDX-License-Identifier: Apache-2.0
"""`rlx check MODEL` and `rlx bisect MODEL`: whether, and where, two ways to run a model part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

import rlx
from rlx.base.numeric import Array
from rlx.cli.common import console, make_inputs, parse_dims, read_arrays, show_table

__all__ = ["bisect", "check"]

_PLAIN = "reference,passes=off"
_Model: TypeAlias = Annotated[Path, typer.Argument(help="An ONNX file.")]
_Inputs: TypeAlias = Annotated[
    list[Path] | None, typer.Option("--input", "-i", help=".npz, or NAME.npy")
]
_Dims: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="Extent of random inputs, NAME=NUMBER.")
]
_Left: TypeAlias = Annotated[
    str,
    typer.Option(
        help="A device, then isa=, threads=, skip=PASS+PASS or passes=off, separated by commas."
    ),
]
_Right: TypeAlias = Annotated[str, typer.Option(help="What it is compared with, likewise.")]
_Against: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Stored in this .npz, in place of --left: outputs, for bisect values between too."
    ),
]
_Tolerance: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Largest difference over the largest magnitude; by default by dtype."),
]
_Seed: TypeAlias = Annotated[int, typer.Option(help="Of random inputs.")]


def check(  # noqa: PLR0913, PLR0917  (every parameter is an option of the command)
    model: _Model,
    inputs: _Inputs = None,
    dim: _Dims = None,
    left: _Left = _PLAIN,
    right: _Right = "cpu",
    against: _Against = None,
    tolerance: _Tolerance = None,
    seed: _Seed = 0,
) -> None:
    """Compare the outputs of a model run in two ways; status 1 if they differ."""
    from rlx.testing import Setting  # brings the whole compiler along
    from rlx.testing import check as compare

    second = Setting.parse(right)
    first = Setting.parse(left) if against is None else _stored(against)
    with rlx.load(model) as loaded:
        arrays = make_inputs(loaded, inputs or [], parse_dims(dim or []), seed)
        found = compare(loaded, arrays, first, second, tolerance)
    name = str(first) if isinstance(first, Setting) else str(against)
    if not found:
        console.print(f"{name} and {second} agree", highlight=False, markup=False)
        return
    rows = [(d.name, f"{d.error:.3g}", d.what) for d in found]
    show_table(f"{name} and {second} differ", ("output", "error", "what"), rows)
    raise typer.Exit(1)


def bisect(  # noqa: PLR0913, PLR0917  (every parameter is an option of the command)
    model: _Model,
    inputs: _Inputs = None,
    dim: _Dims = None,
    left: _Left = _PLAIN,
    right: _Right = "cpu",
    against: _Against = None,
    tolerance: _Tolerance = None,
    seed: _Seed = 0,
) -> None:
    """Find the first node where two ways to run a model part; status 1 if there is one."""
    from rlx.testing import Setting
    from rlx.testing import bisect as find_node

    second = Setting.parse(right)
    first = Setting.parse(left) if against is None else _stored(against)
    with rlx.load(model) as loaded:
        arrays = make_inputs(loaded, inputs or [], parse_dims(dim or []), seed)
        found = find_node(loaded, arrays, first, second, tolerance)
    if found is None:
        name = str(first) if isinstance(first, Setting) else str(against)
        console.print(f"{name} and {second} agree", highlight=False, markup=False)
        return
    console.print(str(found), highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1)


def _stored(path: Path) -> Mapping[str, Array]:
    """Return arrays by output name; names with the prefix `in::` are inputs, `out::` is left off."""
    arrays = read_arrays(path)
    return {n.removeprefix("out::"): a for n, a in arrays.items() if not n.startswith("in::")}
