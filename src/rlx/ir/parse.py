# SPDX-License-Identifier: Apache-2.0
"""Reads the text form of a graph (`.rir`); `rlx.ir.text` describes and prints it.

Operators and attribute classes are found by name, so the modules that declare them have to be
imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from rlx.base.diagnostics import UNKNOWN, Location, did_you_mean
from rlx.base.dims import Dim, parse_dim, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ParseError, RlxError
from rlx.base.facts import Guard
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Block, Graph, Node, Value
from rlx.ir.op import Op, lookup_op, registered_ops
from rlx.ir.text import array_from_numbers, registered_forms

__all__ = ["parse_array", "parse_graph"]


def parse_graph(text: str) -> Graph:
    """Return the graph of a text.

    Result types may be left out; they are then inferred.

    Raises:
        ParseError: the text is not well formed, or names an operator, attribute or value that does
            not exist; the message gives line and column.
        TypeRuleError: an inferred operator does not accept its operands.
    """
    return _Parser(text).graph()


# -- tokens ---------------------------------------------------------------------------------------

_DTYPES = {d.value: d for d in DType}
_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s|//[^\n]*)+)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<value>%(?:[A-Za-z_][\w.]*|\d+|"(?:[^"\\\n]|\\.)*"))
    | (?P<dense>dense<[^<>]*>)
    | (?P<type>[a-z]\w*\[[^\[\]]*\])
    | (?P<relation>>=|<=)
    | (?P<dim><[^<>\n]*>)
    | (?P<number>-inf|-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)
    | (?P<word>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
    | (?P<mark>[{}()=,:@])
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    offset: int


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ParseError(f"{_where(text, position)}: unexpected character {text[position]!r}")
        kind = cast("str", match.lastgroup)
        if kind != "space":
            yield _Token(kind, match.group(), position)
        position = match.end()
    yield _Token("end", "end of text", len(text))


def _where(text: str, offset: int) -> str:
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}"


# -- arrays ---------------------------------------------------------------------------------------

_DENSE = re.compile(r"dense<(\w+)\[([\d,]*)\]:\s*(.*)>", re.DOTALL)


def parse_array(text: str) -> Array | None:
    """Return the array of a ``dense<...>`` text, None if its data was left out.

    Raises:
        ValueError: the text is not well formed, or has another number of elements than its shape.
    """
    match = _DENSE.fullmatch(text)
    if match is None or match[1] not in _DTYPES:
        raise ValueError(f"{text[:40]!r} is not an array")
    dtype, shape = _DTYPES[match[1]], tuple(int(d) for d in match[2].split(",") if d)
    data = match[3].strip()
    if data == "elided":
        return None
    if data.startswith("0x"):
        flat = np.frombuffer(bytes.fromhex(data[2:]), np.uint8).copy().view(dtype.numpy)
    else:
        flat = array_from_numbers([n.strip() for n in data.split(",") if n.strip()], dtype)
    return flat.reshape(shape)


# -- graphs ---------------------------------------------------------------------------------------


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.position = 0
        self.symbols: dict[str, Dim] = {}
        self.types: dict[str, TensorType] = {}
        self.result = Graph()
        self.state_next: list[tuple[str, _Token]] = []

    # tokens

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def fail(self, message: str, token: _Token | None = None) -> NoReturn:
        raise ParseError(f"{_where(self.text, (token or self.token).offset)}: {message}")

    def take(self, kind: str) -> _Token:
        token = self.token
        if token.kind != kind:
            self.fail(f"expected a {kind}, found {token.text!r}")
        self.position += 1
        return token

    def accept(self, text: str) -> bool:
        if self.token.text == text and self.token.kind in ("mark", "word", "relation"):
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}, found {self.token.text!r}")

    def string(self) -> str:
        token = self.take("string")
        try:
            return cast("str", json.loads(token.text))
        except ValueError as error:
            self.fail(f"{token.text} is not a string: {error}", token)

    def integer(self) -> int:
        token = self.take("number")
        try:
            return int(token.text)
        except ValueError:
            self.fail(f"expected an integer, found {token.text}", token)

    def separated(self, closing: str) -> Iterator[None]:
        """Yield per item of a comma-separated list up to the closing mark (one may end it)."""
        while not self.accept(closing):
            yield
            if not self.accept(","):
                self.expect(closing)
                return

    # extents and types

    def symbol(self, name: str) -> Dim:
        found = self.symbols.get(name)
        if found is None:
            found = self.symbols[name] = symbol(name)
        return found

    def dim_text(self, text: str, token: _Token) -> Dim:
        try:
            return parse_dim(text, self.symbol)
        except RlxError as error:
            self.fail(str(error), token)

    def dim(self) -> Dim:
        token = self.take("dim")
        return self.dim_text(token.text[1:-1], token)

    def type(self) -> TensorType:
        token = self.take("type")
        found = self.types.get(token.text)
        if found is None:
            name, _, inner = token.text[:-1].partition("[")
            if name not in _DTYPES:
                self.fail(f"unknown dtype {name!r}.{did_you_mean(name, _DTYPES)}", token)
            shape = tuple(self.dim_text(d, token) for d in _split_top(inner))
            found = self.types[token.text] = TensorType(_DTYPES[name], shape)
        return found

    def array(self) -> Array | None:
        token = self.take("dense")
        try:
            return parse_array(token.text)
        except ValueError as error:
            self.fail(str(error), token)

    # attributes

    def fields(self) -> dict[str, Any]:
        """Parse ``name=value, ...}``; the opening brace is already taken."""
        out: dict[str, Any] = {}
        for _ in self.separated("}"):
            name = self.take("word")
            if name.text in out:
                self.fail(f"attribute {name.text!r} is given twice", name)
            self.expect("=")
            out[name.text] = self.attribute()
        return out

    def attribute(self) -> Any:
        token = self.token
        match token.kind:
            case "number":
                self.position += 1
                return float(token.text) if re.search(r"[.eEn]", token.text) else int(token.text)
            case "string":
                return self.string()
            case "dim":
                return self.dim()
            case "type":
                return self.type()
            case "word":
                return self.word()
            case _:
                return self.composite()

    def composite(self) -> Any:
        """Parse a tuple or an operator as an attribute."""
        if self.accept("("):
            return tuple(self.attribute() for _ in self.separated(")"))
        if not self.accept("@"):
            self.fail(f"expected an attribute, found {self.token.text!r}")
        name = self.take("word")
        self.expect("{")
        return self.op(name, self.fields())

    def word(self) -> Any:
        token = self.take("word")
        if token.text in _WORDS:
            return _WORDS[token.text]
        if token.text in _DTYPES:
            return _DTYPES[token.text]
        form = registered_forms().get(token.text)
        if form is None:
            self.fail(
                f"unknown attribute {token.text!r}.{did_you_mean(token.text, registered_forms())}",
                token,
            )
        if form.parse is None:
            self.expect("{")
            return self.build(form.cls, self.fields(), token)
        payload = self.array() if self.token.kind == "dense" else self.string()
        if payload is None:
            self.fail("the data was left out of this text, so it cannot be parsed", token)
        return self.build(form.parse, {}, token, payload)

    def build(
        self, make: Callable[..., Any], fields: dict[str, Any], token: _Token, *args: Any
    ) -> Any:
        try:
            return make(*args, **fields)
        except (TypeError, ValueError, RlxError) as error:
            self.fail(f"{token.text}: {error}", token)

    def op(self, name: _Token, fields: dict[str, Any]) -> Op:
        cls = lookup_op(name.text)
        if cls is None:
            self.fail(
                f"unknown operator {name.text!r}.{did_you_mean(name.text, registered_ops())}", name
            )
        return self.build(cls, fields, name)

    # the graph

    def graph(self) -> Graph:
        graph = self.result
        self.expect("graph")
        if self.token.kind == "string":
            graph.name = self.string()
        self.expect("{")
        scope: dict[str, Value] = {}
        items: dict[str, Callable[[dict[str, Value]], None]] = {
            "symbol": self.symbol_line,
            "input": self.input_line,
            "param": self.param_line,
            "state": self.state_line,
            "next": self.next_line,
            "equal": self.equal_line,
            "guard": self.guard_line,
            "return": self.return_line,
        }
        while not self.accept("}"):
            item = items.get(self.token.text) if self.token.kind == "word" else None
            if item is not None:
                self.position += 1
                item(scope)
            elif self.token.kind == "value" or self.token.text == "=":
                self.node(graph.block, scope)
            else:
                self.fail(f"expected a node, {', '.join(items)} or '}}', found {self.token.text!r}")
        self.take("end")
        for name, token in self.state_next:
            next(s for s in graph.states if s.name == name).next = self.lookup(token, scope)
        return graph

    def symbol_line(self, _: dict[str, Value]) -> None:
        name = self.take("word").text
        lower = self.integer() if self.accept(">=") else 1
        self.symbols[name] = symbol(name, lower)
        if self.accept("<="):
            self.result.facts.uppers[name] = self.integer()
        if self.accept("hint"):
            self.result.facts.hints[name] = self.integer()

    def definition(self, scope: dict[str, Value]) -> tuple[_Token, str, str | None]:
        """Parse how a value is introduced; return token, name, and a param's key if it differs."""
        token = self.take("value")
        if token.text in scope:
            self.fail(f"{token.text} is defined twice in this block", token)
        ident = token.text[1:]
        name = (
            ""
            if ident.isdigit()
            else cast("str", json.loads(ident))
            if ident.startswith('"')
            else ident
        )
        key = self.string() if self.accept("key") else None
        return token, self.string() if self.accept("as") else name, key

    def typed(self, scope: dict[str, Value]) -> tuple[_Token, str, TensorType]:
        token, name, _ = self.definition(scope)
        self.expect(":")
        return token, name, self.type()

    def input_line(self, scope: dict[str, Value]) -> None:
        token, name, type_ = self.typed(scope)
        scope[token.text] = self.result.add_input(name, type_)

    def param_line(self, scope: dict[str, Value]) -> None:
        token, name, key = self.definition(scope)
        self.expect(":")
        type_ = self.type()
        data = self.array() if self.accept("=") else None
        identity = self.attribute() if self.accept("identity") else ()
        value = self.result.add_param(name if key is None else key, data, type_, identity)
        value.name = name
        scope[token.text] = value

    def state_line(self, scope: dict[str, Value]) -> None:
        name = self.string()
        token, value_name, type_ = self.typed(scope)
        self.expect("=")
        init = self.array()
        if init is None:
            self.fail(
                "the initial value of a state was left out of this text, so it cannot be parsed",
                token,
            )
        value = self.result.add_state(name, type_, init).value
        value.name = value_name
        scope[token.text] = value

    def next_line(self, scope: dict[str, Value]) -> None:
        del scope  # the value may be defined further down
        token = self.token
        name = self.string()
        if all(s.name != name for s in self.result.states):
            self.fail(f"there is no state {name!r}", token)
        self.expect("=")
        self.state_next.append((name, self.take("value")))

    def equal_line(self, _: dict[str, Value]) -> None:
        name = self.take("word").text
        self.expect("=")
        self.result.facts.equalities[name] = self.dim()

    def guard_line(self, _: dict[str, Value]) -> None:
        left = self.dim()
        relation = self.string()
        right = self.dim()
        self.result.facts.guards.append(
            Guard(left, relation, right, self.string() if self.accept("because") else "")
        )

    def return_line(self, scope: dict[str, Value]) -> None:
        outputs: dict[str, Value] = {}
        while self.token.kind == "value":
            value = self.lookup(self.take("value"), scope)
            name = self.string() if self.accept("as") else value.name or f"output{len(outputs)}"
            if name in outputs:
                self.fail(f"there are two outputs called {name!r}")
            outputs[name] = value
            if not self.accept(","):
                break
        self.result.set_outputs(outputs)

    def lookup(self, token: _Token, scope: dict[str, Value]) -> Value:
        value = scope.get(token.text)
        if value is None:
            self.fail(
                f"{token.text} is not defined in this block{did_you_mean(token.text, scope) or ''}",
                token,
            )
        return value

    # nodes

    def node(self, block: Block, scope: dict[str, Value]) -> None:
        results = [self.definition(scope) for _ in self.separated("=")]
        name = self.take("word")
        self.expect("(")
        operands = [self.operand(scope) for _ in self.separated(")")]
        op = self.op(name, self.fields() if self.has_fields() and self.accept("{") else {})
        types = self.types_of_results()
        location = self.location()
        regions = self.regions() if self.accept("{") else ()
        builder = Builder(block, self.result.facts)
        with builder.at(location):
            if types is None:
                node = self.inferred(builder, op, operands, regions)
            else:
                node = builder.emit_typed(op, operands, types, regions)
        if len(node.results) != len(results):
            self.fail(
                f"{name.text} has {len(node.results)} results, {len(results)} are named", name
            )
        for (token, given, _), value in zip(results, node.results, strict=True):
            value.name = given
            scope[token.text] = value

    def has_fields(self) -> bool:
        """Return whether a brace that follows opens attributes and not regions."""
        following = self.tokens[self.position + 1 : self.position + 3]
        return [t.text for t in following] != ["region", "("]

    def inferred(
        self, builder: Builder, op: Op, operands: list[Value | None], regions: tuple[Block, ...]
    ) -> Node:
        builder.emit(op, *operands, regions=regions)
        assert builder.block.last is not None
        return builder.block.last

    def operand(self, scope: dict[str, Value]) -> Value | None:
        return None if self.accept("none") else self.lookup(self.take("value"), scope)

    def types_of_results(self) -> list[TensorType] | None:
        if not self.accept(":"):
            return None
        types: list[TensorType] = []
        while self.token.kind == "type":
            types.append(self.type())
            if not self.accept(","):
                break
        return types

    def location(self) -> Location:
        if not self.accept("@"):
            return UNKNOWN
        name = self.string()
        source = self.string() if self.token.kind == "string" else ""
        parts: list[str] = []
        if self.accept("with"):
            parts.append(self.string())
            while self.accept(","):
                parts.append(self.string())
        return Location(name, source, tuple(parts))

    def regions(self) -> tuple[Block, ...]:
        out: list[Block] = []
        while not self.accept("}"):
            self.expect("region")
            self.expect("(")
            block, scope = Block(), dict[str, Value]()
            for _ in self.separated(")"):
                token, name, type_ = self.typed(scope)
                scope[token.text] = block.add_parameter(type_, name)
            self.expect("{")
            while not self.accept("return"):
                self.node(block, scope)
            while self.token.kind == "value":
                block.results.append(self.lookup(self.take("value"), scope))
                if not self.accept(","):
                    break
            self.expect("}")
            out.append(block)
        return tuple(out)


_WORDS: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
    "nan": float("nan"),
}


def _split_top(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts: list[str] = []
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]] if text.strip() else []
