# SPDX-License-Identifier: Apache-2.0
"""`rlx.open`: compiled models from packages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.api.io import check_names, checked_dims, choose
from rlx.base.dims import symbols_of
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.frontends.checked import map_source
from rlx.runtime.executable import Executable
from rlx.runtime.package import Package
from rlx.runtime.source import Saved, Source

if TYPE_CHECKING:
    from rlx.base.rng import RngPolicy
    from rlx.ir.graph import Graph

__all__ = ["open"]


def open(  # noqa: A001  (the verb users expect)
    path: str | os.PathLike[str],
    device: str = "cpu",
    *,
    threads: int | None = None,
    dims: Mapping[str, int] | None = None,
    rng: RngPolicy | None = None,
    digest: str | None = None,
) -> Executable:
    """Open a package that `Executable.save` wrote and return an object that runs it. Nothing is compiled.

    The file is mapped: weights are used in place and shared by all processes that open it. It must not change
    meanwhile. A package holds machine code: open only those of people whose programs you would run, or give the digest.

    Args:
        path: of the package.
        device: where it runs; it was saved for one.
        threads: most CPU threads a run may use; all available ones by default.
        dims: upper bounds of symbolic extents by name, beside those it was saved with.
        rng: seed of random numbers.
        digest: what `save` returned; any other file is refused.

    Raises:
        ParseError: the file is no package, or damaged. Parts that are not needed at once are checked when they are.
        UsageError: it was saved by another version of rlx or for another processor, or has another digest.
        DeviceError: there is no such device.
    """
    file = Path(path)
    backend, target, options = choose(device, threads)
    package = Package(map_source(file, "a package"), repr(str(file)), backend, target, options)
    if digest is not None and digest.lower() != package.digest:
        raise UsageError(f"{str(file)!r} has the digest {package.digest}, not {digest}")
    inputs, uppers = package.interface()
    bounds = checked_dims(dims)
    states = package.states()
    shapes = [shape for _, _, shape in inputs] + [s.shape for s in states]
    check_names(bounds, {s for shape in shapes for d in shape for s in symbols_of(d)}, file.name)
    source = Source(
        str(package.head.get("name")),
        inputs,
        partial(_refuse, str(file)),
        {**uppers, **bounds},
        states=states,
        read_params=package.params,
        saved=Saved(package.signature(), package.restore, package.special()),
    )
    given = {"threads": threads, "dims": dims, "digest": package.digest}
    source.recipe = partial(_recipe, str(file.absolute()), device, given)
    return Executable(source, backend, target, options, rng)


def _refuse(path: str, hints: Mapping[str, int], fixed: Mapping[str, int]) -> Graph:
    extents = {**hints, **fixed}
    raise UsageError(
        f"{path!r} has no program for the extents {extents}, which break the assumptions of those it holds, and no "
        "graph to compile another one from; run the model with such extents before saving it, or load the model itself"
    )


def _recipe(path: str, device: str, options: Mapping[str, Any], m: Executable) -> Any:
    """Return how to open the package again in another process, with the weights that were set since."""
    changed = {n: m.get_param(n) for n, spec in m.params.items() if spec.version > 0}
    return _open_again, (path, device, {**options, "rng": m.rng}, changed)


def _open_again(
    path: str, device: str, options: Mapping[str, Any], changed: Mapping[str, Array]
) -> Executable:
    m = open(path, device, **options)
    if changed:
        m.load_params(changed, partial=True)
    return m
