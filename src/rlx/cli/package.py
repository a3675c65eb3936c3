# SPDX-License-Identifier: Apache-2.0
"""`rlx package MODEL -o FILE`: compile a model into one file that opens at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import rlx
from rlx.base.errors import UsageError
from rlx.cli.common import PACKAGE, Precision, check_dims, console, make_inputs, parse_dims

__all__ = ["package"]


def package(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The package; by default MODEL.rlxp.")
    ] = None,
    device: Annotated[str, typer.Option(help="One of `rlx devices`.")] = "cpu",
    dim: Annotated[
        list[str] | None,
        typer.Option(help="Extent to compile for first, NAME=NUMBER; others are 1."),
    ] = None,
    precision: Precision = None,
) -> None:
    """Compile a model and write it as a package for this kind of processor; `rlx run` and `rlx.open` take it."""
    path = output or model.with_suffix(PACKAGE)
    if path.suffix != PACKAGE:
        raise UsageError(f"the name of a package ends in {PACKAGE}, not {path.name!r}")
    dims = parse_dims(dim or [])
    with rlx.load(model, device, precision=precision or "f32") as loaded:
        check_dims(loaded, dims)
        with console.status(f"compiling {model.name}"):
            loaded.warmup({n: a.shape for n, a in make_inputs(loaded, [], dims, 0).items()})
        digest = loaded.save(path)
    console.print(f"wrote {path}, {path.stat().st_size:,} bytes\ndigest {digest}", highlight=False)
