# SPDX-License-Identifier: Apache-2.0
"""Which ONNX operators are mapped, and what a mapping function is given.

A mapping function takes a `Call` and returns the results as Values, in the order of the ONNX
outputs. It is declared with `@onnx_op`, which also states every attribute it understands, so that
unknown ones are refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from rlx.base.dims import Dim, DimExpr
from rlx.base.dtypes import DType
from rlx.base.errors import ModelError, UnsupportedOpError, UsageError
from rlx.base.types import TensorType
from rlx.frontends.onnx.graph import AttributeValue, Graph, Node
from rlx.frontends.onnx.tensor import ElementType
from rlx.ir.graph import Value
from rlx.ops.dims import Ratio

__all__ = [
    "MAX_OPSET",
    "MIN_OPSET",
    "Call",
    "Mapped",
    "OpMapping",
    "Operands",
    "dtype_of",
    "find",
    "mapped_ops",
    "onnx_op",
    "unmap_op",
]

MIN_OPSET = 7
"""Before version 7 operators broadcast by an attribute; the onnx package converts such files."""
MAX_OPSET = 28
"""The newest version that the mappings were written against (ONNX 1.23)."""

Mapped = Value | Sequence[Value | None]
MappingFunction = Callable[["Call"], Mapped]
Function = TypeVar("Function", bound=MappingFunction)
Text = TypeVar("Text", bound=str)
ObjectArray = npt.NDArray[np.object_]
"""An array of integers, extents, floats or bools: what is known about a small tensor."""
Operands = Sequence[Value | None]


@dataclass(frozen=True, slots=True)
class OpMapping:
    """One row of the table: how an operator is imported from an opset version on.

    Attributes:
        function: makes the nodes.
        since: the first version it holds for.
        attributes: names it understands.
        only: attributes that may have these values and no others (others mean features rlx lacks).
        outputs: how many outputs it can make.
    """

    function: MappingFunction
    since: int
    attributes: frozenset[str]
    only: Mapping[str, tuple[AttributeValue, ...]]
    outputs: int


_TABLE: dict[tuple[str, str], list[OpMapping]] = {}


def onnx_op(
    name: str,
    attributes: str = "",
    *,
    since: int = 1,
    only: Mapping[str, tuple[AttributeValue, ...]] | None = None,
    outputs: int = 1,
    domain: str = "",
) -> Callable[[Function], Function]:
    """Declare a mapping function.

    Args:
        name: the operator.
        attributes: the names it understands, separated by spaces (those in `only` are added).
        since: the first opset version of this form; a later form has a larger number.
        only: values that some attributes must have.
        outputs: number of outputs that it can make.
        domain: operator set; the default one by default.
    """
    limits = dict(only or {})
    known = frozenset((*attributes.split(), *limits))

    def declare(function: Function) -> Function:
        rows = _TABLE.setdefault((domain, name), [])
        if any(row.since == since for row in rows):
            raise ValueError(f"{name} is mapped twice since version {since}")
        rows.append(OpMapping(function, since, known, limits, outputs))
        rows.sort(key=lambda row: row.since)
        return function

    return declare


def find(domain: str, name: str, version: int) -> OpMapping | None:
    """Return the mapping of an operator in an opset version, or None."""
    rows = [row for row in _TABLE.get((domain, name), ()) if row.since <= version]
    return rows[-1] if rows else None


def unmap_op(domain: str, name: str) -> None:
    """Take an operator out of the table."""
    _TABLE.pop((domain, name), None)


def mapped_ops() -> Mapping[tuple[str, str], Sequence[OpMapping]]:
    """Return all mappings by (domain, name); other threads may add more meanwhile."""
    return _TABLE.copy()


def dtype_of(element: ElementType) -> DType | None:
    """Return the dtype of an ONNX element type, or None (strings, fp8 fnuz, fp4, 2 bits)."""
    if element in (ElementType.UNDEFINED, ElementType.STRING):
        return None
    try:
        return DType.of(element.numpy)
    except UsageError:
        return None


@dataclass(slots=True)
class Call:
    """One ONNX node while it is imported.

    Attributes:
        node: the node of the file.
        opset: version of its operator set.
        attributes: its attributes, references to a calling function's attributes resolved.
        operands: its operands; None where left out.
        known: what is known about small operands before a run, by Value.
        control: the importer, for operators with bodies.
    """

    node: Node
    opset: int
    attributes: Mapping[str, AttributeValue]
    operands: Operands
    known: Callable[[Value], ObjectArray | None]
    control: Any = field(default=None, repr=False)

    # Operands.

    def value(self, index: int) -> Value:
        """Return an operand that must be there.

        Raises:
            ModelError: it is left out.
        """
        found = self.maybe(index)
        if found is None:
            raise ModelError(f"{self.node.label}: input {index} is missing")
        return found

    def maybe(self, index: int) -> Value | None:
        """Return an operand, or None where it is left out."""
        return self.operands[index] if index < len(self.operands) else None

    def values(self, first: int = 0) -> list[Value]:
        """Return all operands from `first` on, none of which may be left out."""
        return [self.value(i) for i in range(first, len(self.operands))]

    def type_of(self, index: int) -> TensorType:
        """Return the type of an operand that must be there."""
        return self.value(index).type

    def wants(self, output: int) -> bool:
        """Return whether something reads this output."""
        return output < len(self.node.outputs) and bool(self.node.outputs[output])

    def known_array(self, index: int) -> ObjectArray | None:
        """Return what is known of an operand, None if it is left out or only known in a run."""
        value = self.maybe(index)
        return None if value is None else self.known(value)

    def dims(self, index: int, what: str) -> tuple[Dim, ...]:
        """Return the elements of an operand that says extents.

        Args:
            index: the operand.
            what: what it says, for messages: ``the shape``.

        Raises:
            UnsupportedOpError: they depend on the data of a run.
        """
        if self.maybe(index) is None:
            raise self.wrong(f"{what} (input {index}) is missing")
        array = self.known_array(index)
        if array is None:
            raise self.refuse(
                f"{what} (input {index}, {self.node.inputs[index]!r}) depends on the data of a "
                "run; rlx needs it to follow from the shapes of the inputs"
            )
        return tuple(self._dim(element, what) for element in array.reshape(-1))

    def _dim(self, element: Any, what: str) -> Dim:
        if isinstance(element, DimExpr):
            return element
        if isinstance(element, Ratio):
            raise self.refuse(f"{what} holds {element}, which is not whole for all extents")
        if int(element) != element:
            raise ModelError(f"{self.node.label}: {what} holds {element}, not a whole number")
        return int(element)

    def integers(self, index: int, what: str) -> tuple[int, ...]:
        """Return the elements of an operand that must be the same numbers in every run.

        Raises:
            UnsupportedOpError: one of them depends on a symbolic extent or on data.
        """
        out: list[int] = []
        for dim in self.dims(index, what):
            if not isinstance(dim, int):
                raise self.refuse(
                    f"{what} (input {index}) is {dim}, which is not the same number in every run"
                )
            out.append(dim)
        return tuple(out)

    def integer(self, index: int, what: str) -> int:
        """Return the only element of such an operand."""
        found = self.integers(index, what)
        if len(found) != 1:
            raise ModelError(f"{self.node.label}: {what} must have one element, not {len(found)}")
        return found[0]

    def floats(self, index: int, what: str) -> tuple[float, ...]:
        """Return the elements of an operand that must be known numbers.

        Raises:
            UnsupportedOpError: they depend on a symbolic extent or on data.
        """
        array = self.known_array(index)
        if array is None or any(isinstance(x, DimExpr | Ratio) for x in array.reshape(-1)):
            raise self.refuse(
                f"{what} (input {index}, {self.node.inputs[index]!r}) is not a constant"
            )
        return tuple(float(x) for x in array.reshape(-1))

    # Attributes.

    def has(self, name: str) -> bool:
        """Return whether the node has an attribute."""
        return name in self.attributes

    def get_int(self, name: str, default: int | None = None) -> int:
        """Return an INT attribute."""
        return cast("int", self._attribute(name, (int,), default))

    def get_flag(self, name: str, *, default: bool = False) -> bool:
        """Return an INT attribute that means yes or no."""
        return bool(self.get_int(name, int(default)))

    def get_float(self, name: str, default: float | None = None) -> float:
        """Return a FLOAT attribute."""
        return float(cast("float", self._attribute(name, (float, int), default)))

    def get_string(self, name: str, default: str | None = None) -> str:
        """Return a STRING attribute."""
        return cast("str", self._attribute(name, (str,), default))

    def get_choice(self, name: str, choices: Iterable[Text], default: Text | None = None) -> Text:
        """Return a STRING attribute that must be one of these."""
        found = self.get_string(name, default)
        allowed = tuple(choices)
        for text in allowed:
            if text == found:
                return text
        shown = ", ".join(allowed)
        raise self.refuse(f"attribute {name!r} is {found!r}; supported are {shown}")

    def get_ints(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return an INTS attribute."""
        return tuple(cast("Sequence[int]", self._attribute(name, (tuple,), default)))

    def get_floats(self, name: str, default: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return a FLOATS attribute."""
        return tuple(map(float, cast("Sequence[float]", self._attribute(name, (tuple,), default))))

    def get_strings(self, name: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return a STRINGS attribute."""
        return tuple(cast("Sequence[str]", self._attribute(name, (tuple,), default)))

    def get_graph(self, name: str) -> Graph:
        """Return a GRAPH attribute."""
        return cast("Graph", self._attribute(name, (Graph,), None))

    def get_dtype(self, name: str, default: DType | None = None) -> DType:
        """Return the dtype that an INT attribute names by its element type."""
        if name not in self.attributes and default is not None:
            return default
        number = self.get_int(name)
        try:
            found = dtype_of(ElementType(number))
        except ValueError:
            found = None
        if found is None:
            raise self.refuse(
                f"attribute {name!r} names element type {number}, which rlx does not have"
            )
        return found

    def _attribute(self, name: str, types: tuple[type, ...], default: Any) -> Any:
        value = self.attributes.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"{self.node.label}: attribute {name!r} is missing")
            return default
        if not isinstance(value, types):
            raise ModelError(
                f"{self.node.label}: attribute {name!r} is {value!r}, "
                f"not of type {types[0].__name__}"
            )
        return value

    # Errors.

    def refuse(self, why: str) -> UnsupportedOpError:
        """Return the error that says why rlx does not run this node."""
        return UnsupportedOpError(f"{self.node.label}: {why}")

    def wrong(self, why: str) -> ModelError:
        """Return the error that says what is wrong with this node."""
        return ModelError(f"{self.node.label}: {why}")
