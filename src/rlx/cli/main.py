# SPDX-License-Identifier: Apache-2.0
"""The `rlx` command: one function per sub-command, each in its own module."""

from __future__ import annotations

import faulthandler
import logging
import sys
from typing import Annotated

import typer

import rlx
from rlx.cli import bench, cache, check, demo, devices, inspect, opt, package, profile, run

__all__ = ["app", "main"]

app = typer.Typer(
    name="rlx",
    help="Compile and run machine-learning models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("inspect")(inspect.inspect)
app.command("profile")(profile.profile)
app.command("check")(check.check)
app.command("bisect")(check.bisect)
app.command("bench")(bench.bench)
app.command("devices")(devices.devices)
app.command("opt")(opt.opt)
app.command("cache")(cache.cache)
app.command("package")(package.package)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(rlx.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--log", help="Show what rlx does (INFO log).")] = False,
) -> None:
    """Compile and run machine-learning models."""
    del version
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s"
    )


def main() -> None:
    """Run the command line; errors of rlx print as one message, without a traceback."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    try:
        app(standalone_mode=True)
    except rlx.RlxError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        for note in getattr(error, "__notes__", ()):
            typer.secho(f"  {note}", err=True)
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that may not be written to
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
