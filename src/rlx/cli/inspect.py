# SPDX-License-Identifier: Apache-2.0
"""`rlx inspect MODEL`: inputs, outputs, operators, memory, what fused and what did not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import rlx
from rlx.cli.common import check_dims, console, parse_dims, show_table
from rlx.runtime.executable import Executable

__all__ = ["inspect"]


def inspect(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    device: Annotated[str, typer.Option(help="One of `rlx devices`.")] = "cpu",
    dim: Annotated[
        list[str] | None, typer.Option(help="Upper bound of an extent, NAME=NUMBER.")
    ] = None,
    fusion: Annotated[
        bool, typer.Option("--fusion", help="Also list every candidate that did not fuse.")
    ] = False,
) -> None:
    """Show what a model is and what rlx makes of it."""
    dims = parse_dims(dim or [])
    with rlx.load(model, device=device, dims=dims) as loaded:
        check_dims(loaded, dims)
        names = {d for s in loaded.inputs for d in s.shape if isinstance(d, str)}
    missing = sorted(names - set(dims))
    with rlx.load(model, device=device, dims={**dims, **dict.fromkeys(missing, 1)}) as loaded:
        show_table(
            "Inputs",
            ("name", "dtype", "shape"),
            [(s.name, s.dtype, list(s.shape)) for s in loaded.inputs],
        )
        if missing:
            console.print(
                f"extents without a bound are taken as 1 here: {', '.join(missing)} (use --dim)"
            )
        _show_compiled(loaded, fusion=fusion)


def _show_compiled(loaded: Executable, *, fusion: bool) -> None:
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
