# SPDX-License-Identifier: Apache-2.0
"""Where the results of one call go: new arrays, the caller's buffers, or nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from rlx.base.allocation import allocate
from rlx.base.diagnostics import did_you_mean
from rlx.base.dlpack import from_dlpack
from rlx.base.errors import RlxError, UsageError
from rlx.base.numeric import Array
from rlx.runtime.inputs import TensorSpec

__all__ = ["Bound", "Discarded", "Request"]

_FEW = 32

Bound: TypeAlias = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of every output under the extents of one call."""


class Discarded:
    """Memory for outputs that nobody reads, kept from call to call."""

    def __init__(self) -> None:
        self._bytes: dict[int, Array] = {}

    def array(self, position: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array for the output at a position; its content means nothing."""
        nbytes = math.prod(shape) * dtype.itemsize
        kept = self._bytes.get(position)
        if kept is None or kept.nbytes < nbytes:
            kept = self._bytes[position] = allocate(
                f"output {position}", (nbytes,), np.dtype(np.uint8)
            )
        return kept[:nbytes].view(dtype).reshape(shape)

    def clear(self) -> None:
        """Give the memory back."""
        self._bytes.clear()


@dataclass(slots=True)
class Request:
    """What a caller of `run` wants beside all outputs in new arrays.

    Attributes:
        outputs: names of the outputs to hand out, in this order; None means all.
        out: buffers by name, or one (or None) for each output handed out.
    """

    outputs: Sequence[str] | None = None
    out: Mapping[str, Any] | Sequence[Any] | None = None

    def targets(
        self,
        specs: Sequence[TensorSpec],
        bound: Bound,
        inputs: Mapping[str, Array],
        discarded: Discarded,
    ) -> tuple[list[Array], dict[str, Any]]:
        """Return an array for every output of the model, and what the caller gets by name.

        Args:
            specs: the outputs.
            bound: their shapes and dtypes in this call.
            inputs: the arrays that will be read.
            discarded: for the outputs that are not handed out.

        Raises:
            UsageError: a name is unknown, or a buffer cannot take its output.
        """
        positions = self._positions(specs)
        buffers = self._buffers(list(positions))
        written: dict[str, Array] = {}
        targets: list[Array] = []
        handed: dict[str, Any] = dict.fromkeys(positions)
        for position, (spec, (shape, dtype)) in enumerate(zip(specs, bound, strict=True)):
            given = buffers.get(spec.name)
            if given is not None:
                target = written[spec.name] = _buffer(spec, given, shape, dtype)
                handed[spec.name] = given
            elif spec.name in handed:
                target = handed[spec.name] = allocate(f"output {spec.name}", shape, dtype)
            else:
                target = discarded.array(position, shape, dtype)
            targets.append(target)
        _check_disjoint(written, inputs)
        return targets, handed

    def _positions(self, specs: Sequence[TensorSpec]) -> dict[str, int]:
        known = {spec.name: position for position, spec in enumerate(specs)}
        if self.outputs is None:
            return known
        if isinstance(self.outputs, str):
            raise UsageError(f"outputs is a list of names: outputs=[{self.outputs!r}]")
        if not isinstance(self.outputs, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"outputs is a list of names, not {self.outputs!r}")
        positions: dict[str, int] = {}
        for name in self.outputs:
            if name in positions:
                raise UsageError(f"output {name!r} is asked for twice")
            if name not in known:
                raise _unknown(name, specs)
            positions[name] = known[name]
        return positions

    def _buffers(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Return the given buffers by the name of their output."""
        out = self.out
        if out is None:
            return {}
        if isinstance(out, Mapping):
            for name in out:
                if name not in names:
                    hint = did_you_mean(name, names)
                    raise UsageError(
                        f"out has a buffer for {name!r}, which is no output of this call.{hint} "
                        f"The outputs are {', '.join(names)}"
                    )
            return out
        if not isinstance(out, Sequence) or isinstance(out, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError("out is a dict by name or a list with a buffer for each output")
        if len(out) != len(names):
            raise UsageError(
                f"out has {len(out)} buffers for {len(names)} outputs ({', '.join(names)}); "
                f"None stands for a new array"
            )
        return dict(zip(names, out, strict=True))


def _unknown(name: str, specs: Sequence[TensorSpec]) -> UsageError:
    listed = "; ".join(map(str, specs))
    hint = did_you_mean(name, [s.name for s in specs])
    return UsageError(f"unknown output {name!r}.{hint} The outputs are {listed}")


def _view(spec: TensorSpec, given: Any) -> Array:
    """Return an array over the memory of a caller's buffer."""
    if isinstance(given, np.ndarray):
        return cast("Array", given)
    if not hasattr(given, "__dlpack__"):
        raise UsageError(
            f"the buffer for output {spec} is a {type(given).__name__}; it takes NumPy arrays and objects with "
            f"__dlpack__, whose memory is written in place"
        )
    try:
        return from_dlpack(given)
    except RlxError:
        raise
    except Exception as error:  # whatever another library raises: it is about this buffer
        raise UsageError(f"the buffer for output {spec} is not accessible: {error}") from error


def _buffer(spec: TensorSpec, given: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a caller's buffer as an array that kernels may write to."""
    array = _view(spec, given)
    problem = None
    if array.dtype != dtype:
        problem = f"has dtype {array.dtype} instead of {dtype}"
    elif array.shape != shape:
        problem = f"has shape {list(array.shape)}, this call gives {list(shape)}"
    elif not array.flags.c_contiguous:
        problem = f"has strides {array.strides}; it must be C-contiguous"
    elif not array.flags.writeable:
        problem = "is read-only"
    elif not array.flags.aligned:
        problem = f"is not aligned to its elements of {dtype.itemsize} bytes"
    if problem is not None:
        raise UsageError(f"the buffer for output {spec} {problem}")
    return array


def _check_disjoint(written: Mapping[str, Array], inputs: Mapping[str, Array]) -> None:
    """Refuse buffers that share bytes with one another or with an input.

    Kernels write an output as soon as they can, while inputs and other outputs are still read.
    """
    arrays = [*written.values()]
    if len(arrays) * (len(arrays) + len(inputs)) <= _FEW:  # then looking at each pair is faster
        others = [*inputs.values()]
        if not any(
            np.may_share_memory(a, b) for i, a in enumerate(arrays) for b in (*arrays[:i], *others)
        ):
            return
    spans: list[tuple[int, int, bool, str]] = []
    for name, array in written.items():
        spans.append((*_span(array), True, f"the buffer for output {name!r}"))
    for name, array in inputs.items():
        spans.append((*_span(array), False, f"input {name!r}"))
    spans.sort(key=lambda span: span[:2])
    last: tuple[int, int, bool, str] | None = None  # of all so far, the one that reaches furthest
    last_written: tuple[int, int, bool, str] | None = None
    for span in spans:
        start, stop, writes, what = span
        if start == stop:
            continue
        other = last if writes else last_written
        if other is not None and start < other[1]:
            first, second = (what, other[3]) if writes else (other[3], what)
            raise UsageError(
                f"{first} and {second} share memory; give the output memory of its own"
            )
        if last is None or stop > last[1]:
            last = span
        if writes and (last_written is None or stop > last_written[1]):
            last_written = span


def _span(array: Array) -> tuple[int, int]:
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes
