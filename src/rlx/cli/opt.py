# SPDX-License-Identifier: Apache-2.0
"""`rlx opt FILE.rir`: run passes on a graph in text form and print the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlx.backends.registry import get_backend
from rlx.base.errors import ParseError, UsageError
from rlx.cli.common import console
from rlx.ir.parse import parse_graph
from rlx.ir.text import print_graph
from rlx.passes.manager import PassContext, parse_passes
from rlx.passes.pipelines import PASSES, default_pipeline

__all__ = ["opt"]


def opt(
    file: Annotated[Path, typer.Argument(help="A .rir file, or - for standard input.")],
    passes: Annotated[
        str, typer.Option("--passes", "-p", help="For example fold,cse,fuse-regions{rows=false}.")
    ] = "",
    device: Annotated[str, typer.Option(help="Whose claims the passes see.")] = "cpu",
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print why candidates did not fuse.")
    ] = False,
    dump_after: Annotated[
        Path | None, typer.Option(help="Folder for the graph after every pass.")
    ] = None,
) -> None:
    """Run passes on a graph in text form; without -p the default pipeline."""
    graph = parse_graph(_read(file))
    backend = get_backend(device)
    claims = backend.claims(backend.targets()[0])
    context = PassContext(claims=claims, verify=True, dump=dump_after)
    pipeline = parse_passes(passes, PASSES) if passes else default_pipeline(claims)
    pipeline.run(graph, context)
    typer.echo(print_graph(graph))
    if explain:
        for line in context.report:
            console.print(line, highlight=False, markup=False)


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot open {str(file)!r} as a graph: {error}") from error
    except UnicodeDecodeError as error:
        raise ParseError(f"{file} is not a graph in text form: {error}") from error
