# SPDX-License-Identifier: Apache-2.0
"""`rlx profile MODEL`: where the time of a run goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rlx.base.errors import UsageError
from rlx.cli.arrays import check_target
from rlx.cli.common import Precision, console, make_inputs, open_model, parse_dims

__all__ = ["profile"]


def profile(  # noqa: PLR0913, PLR0917  (every parameter is an option of the command)
    model: Annotated[Path, typer.Argument(help="An ONNX file, or a package (.rlxp).")],
    inputs: Annotated[
        list[Path] | None, typer.Option("--input", "-i", help=".npz, or NAME.npy")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="Extent of random inputs, NAME=NUMBER.")
    ] = None,
    device: Annotated[str, typer.Option(help="One of `rlx devices`.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads; all by default.")] = None,
    runs: Annotated[int, typer.Option(help="Times are medians over so many runs.")] = 20,
    by: Annotated[
        str, typer.Option(help="A row per `node`, `thunk` (kernel launch) or `op`.")
    ] = "node",
    top: Annotated[int, typer.Option(help="Rows of the table.")] = 20,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    seed: Annotated[int, typer.Option(help="Of random inputs.")] = 0,
    precision: Precision = None,
) -> None:
    """Time every kernel of a model: time, share, bytes, operations, threads."""
    if by not in ("node", "thunk", "op"):
        raise UsageError(f"--by is node, thunk or op, not {by!r}")
    if trace is not None:
        check_target(trace, "a trace is", ".json")
    with open_model(model, device, threads, precision=precision) as loaded:
        arrays = make_inputs(loaded, inputs or [], parse_dims(dim or []), seed)
        found = loaded.profile(arrays, runs=runs)
    if trace is not None:
        found.save_trace(trace)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    console.print(found.text(by, top), highlight=False, markup=False, soft_wrap=True)
    if trace is not None:
        console.print(f"wrote {trace}; open it in ui.perfetto.dev", highlight=False, markup=False)
