# SPDX-License-Identifier: Apache-2.0
"""Building a graph by hand: operators on values inside a `with` block."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.api.arguments import array_of, check_name, check_value, dtype_of, shape_of
from rlx.base.diagnostics import Location
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array, cast
from rlx.base.rng import RNG_INPUT, stream_number
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph as IrGraph
from rlx.ir.graph import State, Value
from rlx.ir.op import Op
from rlx.ops.random import rng_fold, rng_input
from rlx.ops.spec import building

__all__ = ["Graph"]

_ADVICE = "give extents that are always equal one name, and write a number where {symbol} is always the same"


class Graph:
    """A graph under construction.

    Example:
        >>> import numpy as np, rlx
        >>> with rlx.Graph("scale") as g:
        ...     x = g.input("x", ["N", 3])
        ...     g.output("y", x * 2 + 1)
        >>> rlx.compile(g)(np.ones((1, 3), np.float32))
        array([[3., 3., 3.]], dtype=float32)
    """

    def __init__(self, name: str = "graph") -> None:
        self.ir = IrGraph(name)
        self.ir.facts.advice = _ADVICE
        self._outputs: dict[str, Value] = {}
        self._streams: set[str] = set()
        self._states: dict[Value, State] = {}
        self._building: building | None = None

    def __enter__(self) -> Self:
        if self._building is not None:
            raise UsageError(f"the graph {self.ir.name!r} is being built already")
        self._building = building(_LocatingBuilder(self.ir.block, self.ir.facts))
        self._building.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._building is not None
        self._building.__exit__(*exc)
        self._building = None

    def input(
        self, name: str, shape: list[int | str] | tuple[int | str, ...], dtype: Any = "f32"
    ) -> Value:
        """Add an input; strings in the shape name symbolic extents.

        Raises:
            UsageError: the name is taken or no text, or the shape or the dtype is none.
        """
        self._check_new(name)
        return self.ir.add_input(name, TensorType(dtype_of(name, dtype), shape_of(name, shape)))

    def param(
        self,
        name: str,
        data: Any = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: Any = "f32",
    ) -> Value:
        """Add a weight, with its value or with only a shape and a dtype: `Executable.set_param` gives it a value then.

        Raises:
            UsageError: the name is taken or no text, there is neither data nor a shape (or both), or the data is no
                array.
        """
        self._check_new(name)
        if (data is None) == (shape is None):
            raise UsageError(f"param {name!r} takes either data or a shape (with a dtype)")
        if shape is not None:
            extents = shape_of(name, shape)
            if not all(isinstance(d, int) for d in extents):
                raise UsageError(f"param {name!r} has a symbolic extent: {list(shape)}")
            return self.ir.add_param(name, None, TensorType(dtype_of(name, dtype), extents))
        array = array_of(name, data)
        return self.ir.add_param(name, array, TensorType(DType.of(array.dtype), array.shape))

    def rng(self, stream: str) -> Value:
        """Return a key of random numbers, for one draw such as `rlx.ops.random_normal(key, shape)`.

        The numbers follow from the executable's seed, the number of the run and the stream's name, so they stay the
        same whatever else is added to the graph.

        Raises:
            UsageError: the stream has been used: two draws of one key would be equal.
        """
        if stream in self._streams:
            raise UsageError(
                f"the graph has a random stream {stream!r} already; two would be equal"
            )
        self._streams.add(stream)
        return rng_fold(rng_input(self.ir), stream_number(stream))

    def state(
        self,
        name: str,
        shape: list[int | str] | tuple[int | str, ...],
        dtype: Any = "f32",
        init: Any = 0,
    ) -> Value:
        """Add a value that persists between runs; `set_next` says what it becomes.

        Args:
            name: what `Executable.state` knows it by.
            shape: extents; strings name symbolic ones.
            dtype: of its elements.
            init: what it is before the first run and after a reset: a number, or an array that broadcasts to the
                shape.

        Returns:
            Its value at the beginning of a run.

        Raises:
            UsageError: the name is taken, or the initial value does not fit the dtype or the shape.
        """
        self._check_new(name)
        type_ = TensorType(dtype_of(name, dtype), shape_of(name, shape))
        value = self.ir.add_state(name, type_, _initial(name, type_, init)).value
        self._states[value] = self.ir.states[-1]
        return value

    def set_next(self, state: Value, value: Value) -> None:
        """Declare what a state becomes when a run has ended well; the last declaration counts.

        Raises:
            UsageError: the first argument is not what `state` returned, or the types differ.
        """
        known = self._states.get(state)
        if known is None:
            raise UsageError(f"{state!r} is not a state of this graph: pass what `state` returned")
        check_value(value, self.ir.block, f"the next value of state {known.name!r}")
        if value.type != state.type and not self._equal(value.type, state.type):
            raise UsageError(f"state {known.name!r} is {state.type}, it cannot become {value.type}")
        known.next = value

    def output(self, name: str, value: Value) -> None:
        """Declare an output.

        Raises:
            UsageError: the name is taken by another output or no text, or the value is none of this graph.
        """
        check_name(name)
        check_value(value, self.ir.block, f"output {name!r}")
        if name in self._outputs:
            raise UsageError(f"the graph has an output {name!r} already")
        self._outputs[name] = value
        self.ir.set_outputs(self._outputs)

    def name(self, name: str, value: Value) -> Value:
        """Give a computed value a name, by which taps and reports call it; return the value.

        Raises:
            UsageError: the name is taken by an input or param.
        """
        self._check_new(name)
        check_value(value, self.ir.block, f"what is called {name!r}")
        value.name = name
        return value

    def _equal(self, a: TensorType, b: TensorType) -> bool:
        return (
            a.dtype is b.dtype
            and a.rank == b.rank
            and all(map(self.ir.facts.equal, a.shape, b.shape))
        )

    def _check_new(self, name: str) -> None:
        check_name(name)
        leaves = [v.name for v in self.ir.inputs] + [s.name for s in self.ir.states]
        if name == RNG_INPUT or name in leaves or name in self.ir.params:
            raise UsageError(f"the graph has an input, param or state {name!r} already")


def _initial(name: str, type_: TensorType, init: Any) -> Array:
    given = np.asarray(init)
    if given.dtype != type_.dtype.numpy:
        if isinstance(init, np.ndarray | np.generic) or not _is_exact(given, type_.dtype):
            raise UsageError(
                f"state {name!r} is {type_}, its initial value is {given.dtype}; pass an array of the state's dtype"
            )
        given = _converted(name, given, type_)
    shape = (*[1] * (type_.rank - given.ndim), *given.shape)
    if len(shape) != type_.rank or any(
        have not in (1, want) for have, want in zip(shape, type_.shape, strict=True)
    ):
        raise UsageError(
            f"state {name!r} is {type_}, its initial value of shape {list(given.shape)} does not broadcast to it"
        )
    return np.array(given)


def _is_exact(given: Array, dtype: DType) -> bool:
    """Return whether plain Python numbers have the same values in a dtype, up to rounding of floats."""
    if given.dtype.kind not in "biufc" or (given.dtype.kind == "c") > dtype.is_complex:
        return False
    if dtype.is_float or dtype.is_complex:
        return True
    return bool(np.array_equal(given, cast(given, dtype)))


def _converted(name: str, given: Array, type_: TensorType) -> Array:
    held = cast(given, type_.dtype, saturate=False)
    if not np.array_equal(np.isfinite(given), np.isfinite(held)):
        raise UsageError(
            f"state {name!r} is {type_}, its initial value is outside the range of {type_.dtype}"
        )
    return held


class _LocatingBuilder(Builder):
    """Gives every node the Python line of the caller outside rlx as its location."""

    def emit_typed(
        self, op: Op, operands: Sequence[Value | None], *args: Any, **kwargs: Any
    ) -> Any:
        for index, operand in enumerate(operands):
            if operand is not None:
                check_value(operand, self.block, f"operand {index} of {op.name}")
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (documented)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rlx."):
            frame = frame.f_back
        with self.at(Location(source=f"{frame.f_code.co_filename}:{frame.f_lineno}")):
            return super().emit_typed(op, operands, *args, **kwargs)
