# SPDX-License-Identifier: Apache-2.0
"""The text form of a graph (`.rir`), printer side, and content hashes.

::

    graph "scale" {
      symbol N >= 1 <= 512
      input %x: f32[N,3]
      param %w: f32[3] = dense<f32[3]: 1.0, 2.0, 3.0>
      %0 = mul(%x, %w) : f32[N,3] @ "/scale/Mul"
      %1 = slice(%0) {starts=(0, 0), sizes=(<N>, 2), steps=(1, 1)} : f32[N,2]
      return %1 as "y"
    }

A value is called by its name where that is unique, else by a number. What follows `@` is where a
node came from: its name, its file or line, and after `with` the names of nodes whose work it does
too. Attributes that have their default are left out. Extents that are not plain integers stand in
angle brackets. A node's regions follow it in braces. Numbers print so that they parse back to the
same bits; arrays print as numbers where those determine the bits, else in hexadecimal.
`rlx.ir.parse` reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from rlx.base.diagnostics import UNKNOWN
from rlx.base.dims import Dim, DimExpr, Symbol
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.graph import Block, Graph, Node, Param, Value
from rlx.ir.op import Op

__all__ = [
    "AttributeForm",
    "attribute_form",
    "content_hash",
    "format_array",
    "print_graph",
    "registered_forms",
]


@dataclass(frozen=True)
class AttributeForm:
    """How attributes of one class are written, for classes that this layer does not know.

    Attributes:
        cls: the class.
        tag: the word in front.
        show: attribute -> text, or an array (printed as dense data); None prints the fields of a
            dataclass.
        parse: the way back.
    """

    cls: type[Any]
    tag: str
    show: Callable[[Any], str | Array] | None = None
    parse: Callable[[Any], Any] | None = None


_BY_CLASS: dict[type[Any], AttributeForm] = {}
_BY_TAG: dict[str, AttributeForm] = {}


def attribute_form(
    cls: type[Any],
    tag: str,
    show: Callable[[Any], str | Array] | None = None,
    parse: Callable[[Any], Any] | None = None,
) -> None:
    """Declare how attributes of a class are printed and parsed. See `AttributeForm`."""
    form = AttributeForm(cls, tag, show, parse)
    _BY_CLASS[cls] = form
    _BY_TAG[tag] = form


def registered_forms() -> dict[str, AttributeForm]:
    """Return the declared attribute forms by tag; other threads may declare more meanwhile."""
    return _BY_TAG.copy()


def print_graph(graph: Graph, *, locations: bool = True, elide_above: int | None = None) -> str:
    """Return the text of a graph.

    Args:
        graph: what to print.
        locations: print where nodes came from.
        elide_above: leave out the data of arrays with more elements than this; such a text parses
            only where the data belongs to a param. None prints everything.

    Raises:
        UsageError: an attribute is of a class that no text form was declared for.
    """
    return "\n".join(_Printer(graph, locations=locations, elide_above=elide_above).lines()) + "\n"


def content_hash(graph: Graph) -> str:
    """Return the sha256 (hexadecimal) of what a graph computes.

    Constants count by value and params by name and type; names of other values, locations, bounds
    and hints do not.
    """
    printer = _Printer(graph, locations=False, elide_above=None, canonical=True)
    digest = hashlib.sha256()
    for line in printer.lines():
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


# -- arrays ---------------------------------------------------------------------------------------


def format_array(array: Array, elide_above: int | None = None) -> str:
    """Return ``dense<dtype[shape]: ...>``: numbers if they determine the bits, else hexadecimal."""
    dtype = DType.of(array.dtype)
    head = f"{dtype}[{','.join(map(str, array.shape))}]"
    if elide_above is not None and array.size > elide_above:
        return f"dense<{head}: elided>"
    if array.size == 0:
        return f"dense<{head}:>"
    if array.size <= 16 and not dtype.is_complex:
        numbers = [_number(v, dtype) for v in array.reshape(-1)]
        if array_from_numbers(numbers, dtype).tobytes() == np.ascontiguousarray(array).tobytes():
            return f"dense<{head}: {', '.join(numbers)}>"
    little = (
        np.ascontiguousarray(array).view(np.uint8)
        if array.ndim
        else array.reshape(1).view(np.uint8)
    )
    return f"dense<{head}: 0x{little.tobytes().hex()}>"


def array_from_numbers(numbers: Iterable[str], dtype: DType) -> Array:
    """Return a rank 1 array of the numbers that `format_array` printed.

    Raises:
        ValueError: one is no number of the dtype.
    """
    if dtype is DType.BOOL:
        words = {"true": True, "false": False}
        return np.array([words[n] if n in words else bool(int(n)) for n in numbers], np.bool_)
    if dtype.is_float:
        wide = np.array([float(n) for n in numbers], np.float64)
        with np.errstate(all="ignore"):
            # A shortest f32 decimal is read as f64 and rounded once more; only decimals that
            # survive it are printed.
            return (wide if dtype is DType.F64 else wide.astype(np.float32)).astype(dtype.numpy)
    return np.array(
        [int(n) for n in numbers], np.uint64 if dtype is DType.U64 else np.int64
    ).astype(dtype.numpy)


def _number(value: Any, dtype: DType) -> str:
    if dtype is DType.BOOL:
        return "true" if value else "false"
    return (
        repr(float(str(value))) if dtype.is_float else str(int(value))
    )  # str is the shortest of the element's dtype


# -- attributes -----------------------------------------------------------------------------------


class AttributePrinter:
    """Prints attributes, types and extents; collects the symbols it meets."""

    def __init__(self, elide_above: int | None = None) -> None:
        self.elide_above = elide_above
        self.symbols: dict[str, int] = {}
        self._ops: dict[Op, str] = {}
        self._types: dict[TensorType, str] = {}

    def dim(self, value: Dim) -> str:
        """Return an extent as in shapes."""
        if isinstance(value, DimExpr):
            self._collect(value)
        return str(value)

    def _collect(self, value: Dim) -> None:
        if isinstance(value, DimExpr):
            for monomial, _ in value.terms:
                for atom in monomial:
                    if isinstance(atom, Symbol):
                        self.symbols[atom.name] = atom.lower
                    else:
                        for arg in atom.args:
                            self._collect(arg)

    def type(self, value: TensorType) -> str:
        """Return a tensor type."""
        text = self._types.get(value)
        if text is None:
            text = f"{value.dtype}[{','.join(self.dim(d) for d in value.shape)}]"
            self._types[value] = text
        return text

    def op_fields(self, op: Op) -> str:
        """Return the attributes of an operator in braces, or nothing if all have their defaults."""
        fields = self._fields(op)
        return f" {{{', '.join(fields)}}}" if fields else ""

    def attribute(self, value: Any) -> str:
        """Return an attribute.

        Raises:
            UsageError: its class has no text form.
        """
        if isinstance(value, np.generic):
            value = cast("Any", value).item()
        return self._simple(value) or self._compound(value)

    def _compound(self, value: Any) -> str:
        if isinstance(value, tuple):
            items = cast("tuple[Any, ...]", value)
            return f"({', '.join(map(self.attribute, items))}{',' if len(items) == 1 else ''})"
        form = _BY_CLASS.get(cast("type[Any]", type(value)))
        if form is not None:
            return self._formed(form, value)
        if isinstance(value, Op):
            return f"@{value.name}{{{', '.join(self._fields(value))}}}"
        raise UsageError(
            f"attribute {value!r} of class {type(value).__name__} has no text form; declare "
            "one with attribute_form"
        )

    def _simple(self, value: Any) -> str | None:
        match value:
            case None:
                text = "none"
            case bool():
                text = "true" if value else "false"
            case int() | float():
                text = repr(value)
            case str():
                text = json.dumps(value)
            case DimExpr():
                text = f"<{self.dim(value)}>"
            case DType():
                text = value.value
            case TensorType():
                text = self.type(value)
            case _:
                text = None
        return text

    def _formed(self, form: AttributeForm, value: Any) -> str:
        if form.show is None:
            return f"{form.tag}{{{', '.join(self._fields(value))}}}"
        shown = form.show(value)
        if isinstance(shown, str):
            return f"{form.tag}{json.dumps(shown)}"
        return f"{form.tag} {format_array(shown, self.elide_above)}"

    def _fields(self, value: Any) -> list[str]:
        out: list[str] = []
        for field in dataclasses.fields(value):
            found = getattr(value, field.name)
            if not is_default(found, field.default):
                out.append(f"{field.name}={self.attribute(found)}")
        return out


def is_default(value: Any, default: Any) -> bool:
    """Return whether an attribute is its default to the bit (0.0 is not -0.0, 1 is not True)."""
    return value is default or (
        type(value) is type(default) and value == default and repr(value) == repr(default)
    )


# -- graphs ---------------------------------------------------------------------------------------

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


class _Printer:
    def __init__(
        self, graph: Graph, *, locations: bool, elide_above: int | None, canonical: bool = False
    ) -> None:
        self.graph = graph
        self.locations = locations
        self.canonical = canonical
        self.attributes = AttributePrinter(elide_above)
        self.ids: dict[Value, str] = {}
        self.names = Counter[str]() if canonical else Counter(v.name for v in _all_values(graph))

    def lines(self) -> Iterator[str]:
        body = [
            *self._leaves(),
            *self._block(self.graph.block, "  "),
            *self._outputs(),
            *self._facts(),
        ]
        name = "" if self.canonical else f" {json.dumps(self.graph.name)}"
        yield f"graph{name} {{"
        yield from self._symbols()
        yield from body
        yield "}"

    def _symbols(self) -> Iterator[str]:
        facts = self.graph.facts
        names = (
            self.attributes.symbols
            if self.canonical
            else {**self.attributes.symbols, **_unused_symbols(facts)}
        )
        for name in sorted(names):
            lower = self.attributes.symbols.get(name, 1)
            line = f"  symbol {name} >= {lower}"
            if not self.canonical:
                line += f" <= {facts.uppers[name]}" if name in facts.uppers else ""
                line += f" hint {facts.hints[name]}" if name in facts.hints else ""
            yield line

    def _facts(self) -> Iterator[str]:
        facts, dim = self.graph.facts, self.attributes.dim
        for name, extent in facts.equalities.items():
            yield f"  equal {name} = <{dim(extent)}>"
        for guard in facts.guards:
            told = guard.reason and not self.canonical
            because = f" because {json.dumps(guard.reason)}" if told else ""
            yield f'  guard <{dim(guard.left)}> "{guard.relation}" <{dim(guard.right)}>{because}'

    def _leaves(self) -> Iterator[str]:
        for value in self.graph.inputs:
            yield f"  input {self._define(value)}: {self.attributes.type(value.type)}"
        for name, param in self.graph.params.items():
            head = f"  param {self._define(param.value, name)}"
            data = "" if self.canonical else self._data(param)
            yield f"{head}: {self.attributes.type(param.value.type)}{data}"
        for state in self.graph.states:
            init = format_array(state.init, self.attributes.elide_above)
            yield (
                f"  state {json.dumps(state.name)} {self._define(state.value)}: "
                f"{self.attributes.type(state.value.type)} = {init}"
            )

    def _data(self, param: Param) -> str:
        text = ""
        if param.data is not None:
            text += f" = {format_array(param.data, self.attributes.elide_above)}"
        if param.identity:
            text += f" identity {self.attributes.attribute(param.identity)}"
        return text

    def _outputs(self) -> Iterator[str]:
        for state in self.graph.states:
            yield f"  next {json.dumps(state.name)} = {self.ids[state.next]}"

    def _block(self, block: Block, indent: str) -> Iterator[str]:
        for node in block:
            yield from self._node(node, indent)
        if block is self.graph.block:
            named = zip(self.graph.outputs, self.graph.output_names, strict=True)
            shown = [f"{self.ids[v]} as {json.dumps(n)}" for v, n in named]
        else:
            shown = [self.ids[v] for v in block.results]
        yield f"{indent}return {', '.join(shown)}".rstrip()

    def _node(self, node: Node, indent: str) -> Iterator[str]:
        operands = ", ".join("none" if o is None else self.ids[o] for o in node.operands)
        results = ", ".join(self._define(r) for r in node.results)
        types = ", ".join(self.attributes.type(r.type) for r in node.results)
        fields = self.attributes.op_fields(node.op)
        line = f"{indent}{results} = {node.op.name}({operands}){fields} : {types}"
        if self.locations and node.location != UNKNOWN:
            line += f" @ {json.dumps(node.location.name)}"
            line += f" {json.dumps(node.location.source)}" if node.location.source else ""
            parts = ", ".join(map(json.dumps, node.location.parts))
            line += f" with {parts}" if parts else ""
        if not node.regions:
            yield line
            return
        yield line + " {"
        for region in node.regions:
            parameters = ", ".join(
                f"{self._define(p)}: {self.attributes.type(p.type)}" for p in region.parameters
            )
            yield f"{indent}  region({parameters}) {{"
            yield from self._block(region, indent + "    ")
            yield f"{indent}  }}"
        yield f"{indent}}}"

    def _define(self, value: Value, key: str | None = None) -> str:
        """Return how a value is introduced, and remember what it is called from here on."""
        number = f"%{len(self.ids)}"
        if self.canonical:
            self.ids[value] = number
            named = value.name if key is None else key
            is_leaf = value.producer is None and value.block is self.graph.block
            return f"{number} as {json.dumps(named)}" if is_leaf else number
        if value.name and self.names[value.name] == 1:
            plain = _IDENTIFIER.fullmatch(value.name)
            self.ids[value] = f"%{value.name}" if plain else f"%{json.dumps(value.name)}"
        else:
            self.ids[value] = number
        text = self.ids[value]
        if key is not None and key != value.name:
            text += f" key {json.dumps(key)}"
        if value.name and text == number:
            text += f" as {json.dumps(value.name)}"
        return text


def _unused_symbols(facts: Any) -> dict[str, int]:
    return dict.fromkeys((*facts.uppers, *facts.hints), 1)


def _all_values(graph: Graph) -> Iterator[Value]:
    yield from (p.value for p in graph.params.values())
    yield from (s.value for s in graph.states)
    yield from _block_values(graph.block)


def _block_values(block: Block) -> Iterator[Value]:
    yield from block.parameters
    for node in block:
        yield from node.results
        for region in node.regions:
            yield from _block_values(region)
