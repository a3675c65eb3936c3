# SPDX-License-Identifier: Apache-2.0
"""`rlx run MODEL`: run a model once on files or random data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from rlx.cli.arrays import check_target, write_arrays
from rlx.cli.common import Precision, console, make_inputs, open_model, parse_dims, show_table

__all__ = ["run"]


def run(  # noqa: PLR0913, PLR0917  (every parameter is an option of the command)
    model: Annotated[Path, typer.Argument(help="An ONNX file, or a package (.rlxp).")],
    inputs: Annotated[
        list[Path] | None, typer.Option("--input", "-i", help=".npz, or NAME.npy")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all outputs to this .npz.")
    ] = None,
    device: Annotated[str, typer.Option(help="One of `rlx devices`.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads; all by default.")] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="Extent of random inputs, NAME=NUMBER.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of random inputs.")] = 0,
    precision: Precision = None,
) -> None:
    """Run a model once and print what comes out."""
    if output is not None:
        check_target(output)
    started = time.perf_counter()
    with open_model(model, device, threads, precision=precision) as loaded:
        arrays = make_inputs(loaded, inputs or [], parse_dims(dim or []), seed)
        with console.status(f"compiling {model.name}"):
            results = loaded.run(arrays)
        ready = time.perf_counter()
        results = loaded.run(arrays)
        ran = time.perf_counter()
        rows = [
            (name, str(a.dtype), "x".join(map(str, a.shape)) or "scalar", _summary(a))
            for name, a in results.items()
        ]
        show_table(f"{model.name} on {device}", ("output", "dtype", "shape", "values"), rows)
        console.print(
            f"load, compile and first run {ready - started:.2f} s; run {1e3 * (ran - ready):.3f} ms"
        )
    if output is not None:
        write_arrays(output, results)
        console.print(f"wrote {output}")


def _summary(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
    flat = array.reshape(-1)
    shown = ", ".join(f"{v:.6g}" if array.dtype.kind == "f" else str(v) for v in flat[:4])
    return shown + (", ..." if flat.size > 4 else "")
