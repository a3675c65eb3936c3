# SPDX-License-Identifier: Apache-2.0
"""`rlx.calibrate` and `rlx.quantize`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx.api.graph import Graph
from rlx.api.io import choose
from rlx.base.dims import symbols_of
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.ir.clone import clone_graph
from rlx.quantization.calibration import Calibration
from rlx.quantization.ranges import METHODS, Histogram, Method
from rlx.quantization.rewrite import OPS, Selection, activations, clean, quantize_graph
from rlx.runtime.executable import Executable
from rlx.runtime.inputs import Inputs
from rlx.runtime.source import Source, graph_source

if TYPE_CHECKING:
    from rlx.ir.graph import Graph as IrGraph

__all__ = ["calibrate", "quantize"]

_AT_ONCE = 16
"""Activations that one run of a calibration gives out: more would take more memory, fewer more compiles."""


def calibrate(  # noqa: PLR0913  (options by keyword)
    model: Any,
    data: Sequence[Mapping[str, Any]],
    *,
    method: Method = "minmax",
    percentile: float = 99.99,
    ops: Sequence[str] = OPS,
    exclude: Sequence[str] = (),
    device: str = "cpu",
    folder: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Run a model on sample data and return the ranges of the activations that `quantize` would quantise.

    Args:
        model: what `load` takes, or an `rlx.Graph`.
        data: inputs of representative runs, as for `Executable.run`.
        method: `minmax` for all that was seen, `percentile` to leave out the outermost values on either side, `mse`
            for the range with the least squared error.
        percentile: for that method, how many per cent of the values lie below the upper end (and above the lower).
        ops: operators to quantise, of `matmul`, `conv`, `conv_transpose`.
        exclude: patterns of names of nodes to leave alone.
        device: where the model runs.
        folder: as for `load`.

    Raises:
        UsageError: an argument is wrong, or an activation was not finite; the message names it.
        ModelError: as `load`.
    """
    if method not in METHODS:
        raise UsageError(f"method is one of {', '.join(METHODS)}, not {method!r}")
    if not 50 < percentile <= 100:
        raise UsageError(f"percentile is above 50 and at most 100, not {percentile}")
    if isinstance(data, Mapping):
        raise UsageError(
            "data is a list with the inputs of several runs, not those of one: [{...}]"
        )
    samples = list(data)
    if not samples:
        raise UsageError("calibration needs the inputs of at least one run")
    source = _source(model, folder)
    inputs = Inputs(source.name, source.inputs)
    arrays = inputs.arrays(inputs.given(samples[0]))
    extents = inputs.environment([a.shape for a in arrays])
    graph = clean(source.build(extents, {}))
    selection = _selection(ops, exclude)
    seen = {name: Histogram() for name in activations(graph, selection)}
    for start in range(0, len(seen), _AT_ONCE):
        copied = clone_graph(graph)  # whose values come in the same order, some without their names
        values = dict(zip(seen, activations(copied, selection).values(), strict=True))
        names = list(seen)[start : start + _AT_ONCE]
        copied.set_outputs({name: values[name] for name in names})
        _observe(copied, samples, seen, device)
    empty = [name for name, found in seen.items() if not found.total]
    if empty:
        raise UsageError(
            f"calibration of {', '.join(map(repr, empty))}: all samples are empty there, so there is no range; give "
            "samples with elements, or exclude the nodes that read it"
        )
    ranges = {name: found.range(method, percentile) for name, found in seen.items()}
    return Calibration(ranges, extents)


def _observe(
    graph: IrGraph,
    samples: Sequence[Mapping[str, Any]],
    seen: Mapping[str, Histogram],
    device: str,
) -> None:
    """Run a graph on the samples and count what its outputs were."""
    backend, target, options = choose(device)
    with Executable(graph_source(graph), backend, target, options) as run:
        for sample in samples:
            for name, array in run.run(sample).items():
                try:
                    seen[name].add(array)
                except UsageError as error:
                    raise UsageError(f"calibration of {name!r}: {error}") from error


def quantize(  # noqa: PLR0913  (options by keyword)
    model: Any,
    calibration: Calibration | None = None,
    *,
    activation_dtype: str = "u8",
    per_channel: bool = True,
    ops: Sequence[str] = OPS,
    exclude: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Graph:
    """Return a graph whose products read 8-bit operands; `rlx.compile` runs it.

    Weights are stored as i8, symmetric, rounded to nearest even. Activations are quantised and dequantised in front of
    the product; where the device has a kernel for it the product is computed in integers.

    Args:
        model: what `load` takes, or an `rlx.Graph`.
        calibration: ranges of activations from `calibrate` with the same `ops` and `exclude`; None quantises weights
            only.
        activation_dtype: `u8` (both ends of a range are used) or `i8` (symmetric).
        per_channel: a scale for every output channel of a weight instead of one for all.
        ops: operators to quantise, of `matmul`, `conv`, `conv_transpose`.
        exclude: patterns of names of nodes to leave alone.
        dims: values of symbolic extents, where the model cannot be read without them. A calibration knows them.
        folder: as for `load`.

    Raises:
        UsageError: an argument is wrong, nothing is left to quantise, or the calibration is of another model.
        ModelError: as `load`.
    """
    if activation_dtype not in ("u8", "i8"):
        raise UsageError(f"activation_dtype is 'u8' or 'i8', not {activation_dtype!r}")
    source = _source(model, folder, dims)
    extents = dict(source.uppers)
    if calibration is not None:
        known = {s for _, _, shape in source.inputs for d in shape for s in symbols_of(d)}
        foreign = sorted(calibration.extents.keys() - known)
        if foreign:
            raise UsageError(
                f"the calibration is of another model: {source.name} has no extent {foreign[0]!r}; calibrate this one"
            )
        extents.update(calibration.extents)
    graph = clean(source.build(extents, {}))
    count = quantize_graph(
        graph,
        _selection(ops, exclude),
        None if calibration is None else calibration.ranges,
        DType.of(activation_dtype),
        per_channel=per_channel,
    )
    if not count:
        raise UsageError(
            f"{graph.name} has no {' or '.join(ops)} of an f32 activation and an f32 weight to quantise"
        )
    made = Graph(graph.name)
    made.ir = graph
    return made


def _selection(ops: Sequence[str], exclude: Sequence[str]) -> Selection:
    for what, given in (("ops", ops), ("exclude", exclude)):
        if isinstance(given, str):
            raise UsageError(f"{what} is a list: {what}=[{given!r}]")
    return Selection(tuple(ops), tuple(exclude))


def _source(
    model: Any, folder: str | os.PathLike[str] | None, dims: Mapping[str, int] | None = None
) -> Source:
    if isinstance(model, Graph):

        def build(hints: Mapping[str, int], fixed: Mapping[str, int]) -> IrGraph:
            del hints  # the graph was built without
            return clone_graph(model.ir, fixed)

        # Unlike an executable's, the copies keep the data of the weights: it is what is quantised.
        return replace(graph_source(model.ir, dims), build=build)
    from rlx.api.onnx import onnx_source
    from rlx.frontends.onnx.source import open_model

    backend, target, options = choose("reference")  # compiles nothing here, so nothing is cached
    return onnx_source(open_model(model, folder), dims or {}, backend, target, options)
