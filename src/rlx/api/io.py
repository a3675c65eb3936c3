# SPDX-License-Identifier: Apache-2.0
"""`rlx.load`, `rlx.compile` and `rlx.devices`."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.backends.protocol import Backend, CompileOptions
from rlx.backends.registry import backend_names, get_backend
from rlx.base import config
from rlx.base.diagnostics import did_you_mean
from rlx.base.dims import LIMIT, symbols_of
from rlx.base.errors import DeviceError, UsageError
from rlx.base.precision import OpClass, PrecisionPolicy
from rlx.base.rng import RngPolicy
from rlx.base.target import Target
from rlx.runtime.cache import graph_cache
from rlx.runtime.entry import PACKAGE_MAGIC
from rlx.runtime.executable import Executable
from rlx.runtime.source import graph_source

if TYPE_CHECKING:
    from rlx.api.graph import Graph

__all__ = ["Device", "check_names", "checked_dims", "choose", "compile", "devices", "load"]


@dataclass(frozen=True)
class Device:
    """A place where models run."""

    name: str
    description: str


def devices() -> list[Device]:
    """Return the devices found on this machine, as accepted by `device=`.

    Example:
        >>> import rlx
        >>> "cpu" in [d.name for d in rlx.devices()]
        True
    """
    found: list[Device] = []
    for name in backend_names():
        for index, target in enumerate(get_backend(name).targets()):
            found.append(Device(name if index == 0 else f"{name}:{index}", target.description))
    return found


def load(  # noqa: PLR0913  (options, by keyword)
    model: Any,
    device: str = "cpu",
    *,
    threads: int | None = None,
    precision: str | PrecisionPolicy = "f32",
    dims: Mapping[str, int] | None = None,
    host_ops: str = "allow",
    folder: str | os.PathLike[str] | None = None,
    rng: RngPolicy | None = None,
) -> Executable:
    """Load an ONNX model and return an object that runs it.

    Args:
        model: a path, the bytes of a file, a binary file object, or an `onnx.ModelProto`.
        device: one of `rlx.devices()`.
        threads: most CPU threads a run may use; all available ones by default.
        precision: what operators on f32 values compute in: `f32`, `f16`, `bf16`, `mixed-f16`, `mixed-bf16`, or an
            `rlx.PrecisionPolicy`. f16 and bf16 models run as they are stored.
        dims: upper bounds of symbolic extents by name. With bounds for all of them the model is compiled here;
            otherwise by the first call (or `warmup`). A larger call later grows the bounds without a recompile.
        host_ops: `allow` or `error`, for operators that have no kernel on the device.
        folder: where the model's external data lies; by default next to the file. A model that is not given by path
            needs it if it has such data.
        rng: seed of random numbers; the default is the same for every executable, `RngPolicy.fresh()` never is.

    Raises:
        ModelError: the file is malformed or uses something rlx does not run; the message lists all of it.
        UsageError: an argument is wrong.
        DeviceError: there is no such device.
    """
    from rlx.api.onnx import onnx_source
    from rlx.api.pickling import model_recipe
    from rlx.frontends.onnx.source import open_model

    backend, target, options = choose(device, threads, precision, host_ops)
    # Imported by whoever has a graph; loading a model does not need it. Another thread may be importing it.
    graph = getattr(sys.modules.get("rlx.api.graph"), "Graph", None)
    if graph is not None and isinstance(model, graph):
        raise UsageError(
            "rlx.load takes ONNX models; rlx.compile takes an rlx.Graph, such as rlx.quantize gives"
        )
    opened = open_model(model, folder)
    if bytes(opened.data[: len(PACKAGE_MAGIC)]) == PACKAGE_MAGIC:
        raise UsageError(
            f"{opened.name} is a package of compiled programs, not a model: rlx.open opens it, and rlx run, inspect "
            "and profile take it"
        )
    source = onnx_source(opened, checked_dims(dims), backend, target, options)
    given = {"threads": threads, "precision": precision, "dims": dims, "host_ops": host_ops}
    source.recipe = model_recipe(
        load,
        opened,
        device,
        {**given, "folder": None if folder is None else Path(folder).absolute()},
    )
    return Executable(source, backend, target, options, rng)


def compile(  # noqa: A001  (the verb users expect, as in re.compile)
    graph: Graph,
    device: str = "cpu",
    *,
    threads: int | None = None,
    precision: str | PrecisionPolicy = "f32",
    dims: Mapping[str, int] | None = None,
    host_ops: str = "allow",
    rng: RngPolicy | None = None,
) -> Executable:
    """Compile a graph built with `rlx.Graph` and return an object that runs it. Arguments as for `load`."""
    from rlx.api.graph import Graph
    from rlx.api.pickling import graph_recipe

    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"rlx.compile takes an rlx.Graph, not a {type(graph).__name__}; rlx.load takes files"
        )
    backend, target, options = choose(device, threads, precision, host_ops)
    ir = graph.ir
    bounds = checked_dims(dims)
    leaves = [*ir.inputs, *(s.value for s in ir.states)]
    names = {s for v in leaves for d in v.type.shape for s in symbols_of(d)}
    check_names(bounds, names, ir.name)
    source = graph_source(ir, bounds)
    source.cache = graph_cache(ir, backend, target, options)
    given = {"threads": threads, "precision": precision, "dims": dims, "host_ops": host_ops}
    source.recipe = graph_recipe(compile, source, dict(ir.facts.hints), device, given)
    return Executable(source, backend, target, options, rng)


def choose(
    device: str,
    threads: int | None = None,
    precision: str | PrecisionPolicy = "f32",
    host_ops: str = "allow",
) -> tuple[Backend, Target, CompileOptions]:
    """Return what the arguments of `load` mean.

    Raises:
        UsageError: an argument is wrong.
        DeviceError: there is no such device.
    """
    policy = PrecisionPolicy.of(precision)
    _check_excepted(policy)
    if host_ops not in ("allow", "error"):
        raise UsageError(f"host_ops is 'allow' or 'error', not {host_ops!r}")
    if threads is None:
        config.THREADS.get()  # complains about a wrong value before anything is compiled
    else:
        threads = _whole("threads", threads, "a number of CPU threads")
    if not isinstance(device, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"device is a name such as 'cpu', not {device!r}")
    name, colon, index = device.partition(":")
    backend = get_backend(name)
    targets = backend.targets()
    valid = not colon or (index.isascii() and index.isdecimal())
    position = int(index or 0) if valid else -1
    if not 0 <= position < len(targets):
        raise DeviceError(
            f"no device {device!r}; this machine has {', '.join(d.name for d in devices())}"
        )
    return backend, targets[position], CompileOptions(threads, policy, host_ops)


def _check_excepted(policy: PrecisionPolicy) -> None:
    """Refuse exceptions of a policy that would never apply."""
    excepted = dict(policy.ops)
    if not excepted:
        return
    import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the operators)
    from rlx.ir.op import registered_ops

    known = registered_ops()
    for name in excepted:
        if name not in known:
            raise UsageError(
                f"precision excepts {name!r}, which is no operator of rlx.{did_you_mean(name, known)}"
            )
        if known[name].precision_class is OpClass.FIXED:
            raise UsageError(
                f"precision excepts {name!r}, which keeps its dtypes under every policy; leave it out"
            )


def _whole(what: str, value: Any, meaning: str) -> int:
    """Return a positive number of any type that is whole; bool is not."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if not 1 <= number <= LIMIT:
        raise UsageError(f"{what} is {meaning}, a whole number from 1 to {LIMIT}, not {value!r}")
    return number


def checked_dims(dims: Mapping[str, int] | None) -> dict[str, int]:
    """Return bounds by symbol.

    Raises:
        UsageError: one is no positive whole number.
    """
    if dims is not None and not isinstance(dims, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"dims is a dict of upper bounds by name, not a {type(dims).__name__}")
    return {n: _whole(f"dims[{n!r}]", v, "an upper bound") for n, v in (dims or {}).items()}


def check_names(bounds: Mapping[str, int], names: set[str], model: str) -> None:
    """Raise a UsageError if a bound is for no extent of the model."""
    for name in bounds:
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise UsageError(
                f"{model} has no extent {name!r}; it has {known}.{did_you_mean(name, names)}"
            )
