# SPDX-License-Identifier: Apache-2.0
"""What a model takes: names, dtypes and shapes, and how the arrays of one call are matched to them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from rlx.base.allocation import allocate
from rlx.base.convert import convert_exactly
from rlx.base.diagnostics import did_you_mean
from rlx.base.dims import LIMIT, Dim, evaluate, lone_symbol, symbols_of
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.foreign import as_array
from rlx.base.numeric import Array

__all__ = ["Declared", "Inputs", "TensorSpec"]

Declared: TypeAlias = Sequence[tuple[str, DType, tuple[Dim, ...]]]
"""Name, dtype and shape (static or symbolic) of tensors, in order."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of an input or output; symbolic extents are given as text."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def of(cls, declared: Declared) -> list[TensorSpec]:
        """Return the specs of declared tensors."""
        return [
            cls(n, d, tuple(e if isinstance(e, int) else str(e) for e in s)) for n, d, s in declared
        ]


_FIT = 0x1 | 0x100
"""Bits of `ndarray.flags.num`: C-contiguous, and every element at a multiple of its size."""


class Matched(list[Array]):
    """The arrays of one call, in the order of the inputs that they were matched to.

    Attributes:
        inputs: these inputs. An executable has others once states are bound.
    """

    __slots__ = ("inputs",)

    def __init__(self, inputs: Inputs, arrays: Iterable[Array] = ()) -> None:
        super().__init__(arrays)
        self.inputs = inputs


class Inputs:
    """The declared inputs of a model.

    Args:
        model: its name, for messages.
        declared: the inputs in order.

    Attributes:
        specs: the inputs as users see them.
        names: their names.
    """

    def __init__(self, model: str, declared: Declared) -> None:
        self._model = model
        self._declared = declared
        self.specs = TensorSpec.of(declared)
        self.names = [name for name, _, _ in declared]
        self._dtypes = [dtype.numpy for _, dtype, _ in declared]

    def match(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Matched:
        """Return the arrays of a call; see `given` and `arrays`."""
        return self.arrays(self.given(inputs))

    # -- names -------------------------------------------------------------------------------------------------------

    def given(self, inputs: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """Return the objects given by name, or all of them by position, in order.

        Raises:
            UsageError: as `by_name`, or their number is wrong.
        """
        if not isinstance(inputs, (list, tuple)):
            if type(inputs) is dict or isinstance(inputs, Mapping):
                return self.by_name(cast("Mapping[str, Any]", inputs))
            raise UsageError(
                f"run takes inputs by name in a dict, or all of them in a list, not a {type(inputs).__name__}"
            )
        if len(inputs) != len(self.names):
            raise UsageError(
                f"{self._model} takes {len(self.names)} input(s) ({', '.join(self.names)}), not {len(inputs)}"
            )
        return list(inputs)

    def by_name(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Return the given objects in order.

        Raises:
            UsageError: a name is unknown or missing.
        """
        try:
            given = [inputs[n] for n in self.names]
        except KeyError:
            given = None
        if given is None or len(inputs) != len(self.names):
            raise self._name_error(inputs)
        return given

    def mixed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the objects given by position and by keyword in order.

        Raises:
            UsageError: as `by_name`, or there are too many, or one is given twice.
        """
        if len(args) > len(self.names):
            raise UsageError(
                f"{self._model} takes {len(self.names)} input(s) ({', '.join(self.names)}), not {len(args)}"
            )
        given = dict(zip(self.names, args, strict=False))
        twice = [n for n in kwargs if n in given]
        if twice:
            raise UsageError(f"input {twice[0]!r} is given by position and by name")
        return self.by_name({**given, **kwargs})

    def _name_error(self, inputs: Mapping[str, Any]) -> UsageError:
        for name in inputs:
            if name not in self.names:
                listed = "; ".join(map(str, self.specs))
                return UsageError(
                    f"unknown input {name!r}.{did_you_mean(name, self.names)} The inputs are {listed}"
                )
        missing = [str(s) for s in self.specs if s.name not in inputs]
        return UsageError(f"missing inputs: {'; '.join(missing)}")

    # -- arrays ------------------------------------------------------------------------------------------------------

    def arrays(self, given: Sequence[Any]) -> Matched:
        """Return C-contiguous arrays of the declared dtypes; the given ones where they are that.

        Raises:
            UsageError: an object is not of the declared dtype.
        """
        arrays = Matched(self)
        for item, dtype in zip(given, self._dtypes, strict=True):
            ok = type(item) is np.ndarray and item.dtype == dtype and item.flags.num & _FIT == _FIT
            arrays.append(item if ok else self._accept(len(arrays), item))
        return arrays

    def _accept(self, position: int, given: Any) -> Array:
        """Convert one input to a C-contiguous array of the declared dtype, or say why not."""
        spec, dtype = self.specs[position], self._dtypes[position]
        array = as_array(given, f"input {spec}")
        plain = not issubclass(type(given), np.generic | np.ndarray)
        if plain and not hasattr(given, "__dlpack__") and not hasattr(given, "__array__"):
            array = _from_python(spec, array)
        if array.dtype != dtype:
            raise UsageError(
                f"input {spec} got dtype {array.dtype}; convert it with .astype({dtype.name!r})"
            )
        if not array.flags.aligned:
            return array.copy()
        return np.ascontiguousarray(array).reshape(array.shape)

    def zeros(self, shapes: Mapping[str, Sequence[int]], uppers: Mapping[str, int]) -> Matched:
        """Return arrays of zeros, of these shapes where given, else with these values of the symbols.

        Raises:
            UsageError: neither gives the shape of an input, or a name or a shape is wrong.
            OutOfMemoryError: they are too large.
        """
        if not isinstance(shapes, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"warmup takes shapes by name in a dict, not a {type(shapes).__name__}"
            )
        for name in shapes:
            if name not in self.names:
                raise UsageError(
                    f"warmup: {self._model} has no input {name!r}.{did_you_mean(name, self.names)}"
                )
        arrays = Matched(self)
        for spec, (name, dtype, shape) in zip(self.specs, self._declared, strict=True):
            if name in shapes:
                extents = _shape(spec, shapes[name])
            else:
                try:
                    extents = tuple(evaluate(d, uppers) for d in shape)
                except KeyError as error:
                    raise UsageError(
                        f"warmup needs the shape of input {name!r}: {spec.shape}"
                    ) from error
            arrays.append(allocate(f"input {spec}", extents, dtype.numpy, zeros=True))
        return arrays

    # -- shapes ------------------------------------------------------------------------------------------------------

    def environment(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Return the value of every symbol, given the shapes of all inputs.

        Raises:
            UsageError: a shape is not of the declared form, or a symbol would have two values.
        """
        env: dict[str, int] = {}
        origin: dict[str, str] = {}
        later: list[tuple[TensorSpec, Dim, int]] = []
        for spec, (_, _, declared), shape in zip(self.specs, self._declared, shapes, strict=True):
            _check_form(spec, declared, shape)
            for axis, (dim, extent) in enumerate(zip(declared, shape, strict=True)):
                if isinstance(dim, int):
                    if dim != extent:
                        raise UsageError(
                            f"input {spec} got shape {list(shape)}; extent {dim} of axis {axis} is fixed"
                        )
                elif (name := lone_symbol(dim)) is not None:
                    if env.setdefault(name, extent) != extent:
                        raise UsageError(
                            f"input {spec} got shape {list(shape)}, but {name} is {env[name]} in input {origin[name]!r}"
                        )
                    origin.setdefault(name, spec.name)
                else:
                    later.append((spec, dim, extent))
        for spec, dim, extent in later:
            if evaluate(dim, env) != extent:
                raise UsageError(
                    f"input {spec} got extent {extent} where {dim} is {evaluate(dim, env)}"
                )
        return env

    def symbols(self) -> set[str]:
        """Return the symbols in the shapes."""
        return {s for _, _, shape in self._declared for d in shape for s in symbols_of(d)}


def _check_form(spec: TensorSpec, declared: Sequence[Dim], shape: tuple[int, ...]) -> None:
    if len(declared) != len(shape):
        raise UsageError(f"input {spec} got an array of rank {len(shape)}, shape {list(shape)}")
    if any(e > LIMIT and not isinstance(d, int) for d, e in zip(declared, shape, strict=True)):
        raise UsageError(
            f"input {spec} got shape {list(shape)}; symbolic extents are at most {LIMIT}"
        )


def _shape(spec: TensorSpec, given: Any) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(extent) for extent in given)
    except TypeError:
        extents = (-1,)
    if any(extent < 0 for extent in extents):
        raise UsageError(f"warmup: {given!r} is no shape of input {spec}")
    return extents


def _from_python(spec: TensorSpec, array: Array) -> Array:
    """Plain Python numbers and lists take the declared dtype if that loses nothing."""
    wanted = spec.dtype.numpy
    if array.dtype.kind in "SU":
        raise UsageError(
            f"input {spec} got text; pass numbers or an array of {wanted} (`run` takes inputs first, then the names of "
            "outputs)"
        )
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise UsageError(
            f"input {spec} got {array.dtype} data; pass numbers or an array of {wanted}"
        )
    if np.can_cast(array.dtype, wanted, "same_kind"):
        return convert_exactly(array, spec.dtype, f"input {spec.name}")
    raise UsageError(
        f"input {spec} got Python data of dtype {array.dtype}, which {wanted} cannot hold"
    )
