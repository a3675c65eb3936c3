# SPDX-License-Identifier: Apache-2.0
"""`rlx inspect MODEL`: inputs, outputs, operators, memory, what fused and what did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rlx.cli.arrays import check_target
from rlx.cli.common import Precision, check_dims, console, open_model, parse_dims, show_table
from rlx.runtime.executable import Executable

__all__ = ["inspect"]


def inspect(  # noqa: PLR0913, PLR0917  (every parameter is an option of the command)
    model: Annotated[Path, typer.Argument(help="An ONNX file, or a package (.rlxp).")],
    device: Annotated[str, typer.Option(help="One of `rlx devices`.")] = "cpu",
    dim: Annotated[
        list[str] | None, typer.Option(help="Upper bound of an extent, NAME=NUMBER.")
    ] = None,
    fusion: Annotated[
        bool, typer.Option("--fusion", help="Also list every candidate that did not fuse.")
    ] = False,
    arena: Annotated[
        Path | None, typer.Option(help="Write a picture of the arena over time to this .svg.")
    ] = None,
    top: Annotated[int, typer.Option(help="Rows of the list of the largest values.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    precision: Precision = None,
) -> None:
    """Show what a model is and what rlx makes of it."""
    if arena is not None:
        check_target(arena, "the picture is", ".svg")
    dims = parse_dims(dim or [])
    with open_model(model, device, dims=dims, precision=precision) as loaded:
        check_dims(loaded, dims)
        names = {d for s in loaded.inputs for d in s.shape if isinstance(d, str)}
    missing = sorted(names - set(dims))
    bounds = {**dims, **dict.fromkeys(missing, 1)}
    with open_model(model, device, dims=bounds, precision=precision) as loaded:
        if not loaded.variants:  # programs of a package are linked by the first run
            loaded.warmup()
        if arena is not None:
            arena.write_text(loaded.memory().picture(model.name), encoding="utf-8")
        if as_json:
            typer.echo(json.dumps({**loaded.report().to_json(), "taken_as_1": missing}, indent=1))
            return
        show_table(
            "Inputs",
            ("name", "dtype", "shape"),
            [(s.name, s.dtype, list(s.shape)) for s in loaded.inputs],
        )
        if loaded.state:
            show_table(
                "States",
                ("name", "dtype", "shape"),
                [(n, s.dtype, list(s.shape)) for n, s in loaded.state.items()],
            )
        if missing:
            console.print(
                f"extents without a bound are taken as 1 here: {', '.join(missing)} (use --dim)"
            )
        _show_compiled(loaded, fusion=fusion, top=top)
        if arena is not None:
            console.print(f"wrote {arena}", highlight=False, markup=False)


def _show_compiled(loaded: Executable, *, fusion: bool, top: int) -> None:
    program = loaded.program
    show_table(
        "Outputs",
        ("name", "dtype", "shape"),
        [(s.name, s.dtype, list(s.shape)) for s in loaded.outputs],
    )
    show_table(
        "Operators after passes", ("operator", "runs as", "nodes"), list(program.compiled.dispatch)
    )
    memory = loaded.memory()
    rows = [
        ("weights", memory.weights),
        ("arena", memory.arena),
        ("arena, lower bound", memory.arena_lower_bound),
        ("scratch", memory.scratch),
        ("state", memory.state),
    ]
    show_table("Memory", ("what", "bytes"), rows)
    largest = [(s.op, s.type, s.count, s.nbytes) for s in memory.top(top)]
    if largest:
        show_table("Largest values in the arena", ("operator", "type", "count", "bytes"), largest)
    show_table(
        "Compile time", ("stage", "seconds"), [(k, round(v, 3)) for k, v in program.seconds.items()]
    )
    if program.signature.guards:
        show_table("Guards", ("assumption",), [(str(g),) for g in program.signature.guards])
    if fusion:
        for line in program.report:
            console.print(line, highlight=False, markup=False)
    elif program.report:
        console.print(f"{len(program.report)} remarks on what did not fuse; --fusion lists them")
