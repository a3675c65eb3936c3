# SPDX-License-Identifier: Apache-2.0
"""From the records of an ONNX file to a graph of rlx operators."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.base.diagnostics import Location, did_you_mean
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ModelError, RlxError, UnsupportedOpError, UsageError
from rlx.base.rng import RNG_INPUT, stream_number
from rlx.base.types import TensorType
from rlx.frontends.onnx.folding import MAX_KNOWN, FoldingBuilder, drop_unused
from rlx.frontends.onnx.graph import (
    AttributeRef,
    AttributeValue,
    Function,
    FunctionKey,
    Graph,
    Model,
    Node,
    TensorSpec,
    ValueInfo,
)
from rlx.frontends.onnx.registry import Call, ObjectArray, dtype_of, find
from rlx.frontends.onnx.support import check_supported
from rlx.frontends.onnx.tensor import Encoding, SparseTensor, Tensor
from rlx.ir.graph import Block, Value
from rlx.ir.graph import Graph as IrGraph
from rlx.ops.random import rng_fold, rng_input
from rlx.ops.spec import building

__all__ = ["MAX_CONSTANT_INTEGERS", "Frame", "ImportedModel", "Importer", "Scope", "import_model"]

MAX_CONSTANT_INTEGERS = 8192
"""Integer and bool tensors up to this size are constants; larger ones are weights, and so are matrices of bytes."""

_RESERVED = frozenset({"floordiv", "mod", "min", "max"})  # functions of extent expressions
_OVERRIDABLE_SINCE = 4  # earlier IR versions list every initialiser among the inputs


@dataclass(frozen=True)
class ImportedModel:
    """A graph and what the file called its parts.

    Attributes:
        graph: the program; its params are the file's weights, views of the mapped file if possible.
        symbols: symbol name -> the file's text for the extent, or `input[axis]` if it has none.
        output_shapes: output name -> the extents that the file declares (nothing checks them), or
            None.
        source: where the model came from.
    """

    graph: IrGraph
    symbols: Mapping[str, str]
    output_shapes: Mapping[str, tuple[int | str | None, ...] | None]
    source: str


def import_model(
    model: Model,
    *,
    hints: Mapping[str, int] | None = None,
    uppers: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> ImportedModel:
    """Return the graph of an ONNX model.

    Args:
        model: what `load_model` returned.
        hints: extents of the first call by symbol (or by the file's own name of it), for decisions
            that the symbols alone do not make; each one made is a guard of the graph.
        uppers: largest extents that memory is planned for, by the same names.
        shapes: shapes of inputs, where the file does not say the rank or a caller wants fixed
            extents.

    Raises:
        UnsupportedOpError: the model uses something that rlx does not run; all of it is listed.
        ModelError: the model is wrong, or the rank of an input is not known.
        TypeRuleError: an operator does not accept its operands.
        UndecidedError: a decision needs a hint that was not given.
        UsageError: a name in `hints`, `uppers` or `shapes` is not one of the model's.
    """
    check_supported(model)
    importer = Importer(model)
    importer.add_inputs(shapes or {})
    importer.set_facts(hints or {}, uppers or {})
    importer.run()
    declared = {
        info.name: info.type.shape if isinstance(info.type, TensorSpec) else None
        for info in model.graph.outputs
    }
    return ImportedModel(importer.graph, importer.symbols, declared, model.source)


@dataclass(eq=False)
class Frame:
    """A block that is being filled, and the values that it captured from the block around it."""

    builder: FoldingBuilder
    parent: Frame | None = None
    captured: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Value of the enclosing frame -> parameter of this block."""
    constants: dict[int, Value] = field(default_factory=dict[int, Value])
    """Identity of a tensor of the file -> its constant in this block."""
    repeats: bool = False
    """A run may execute the block more than once."""
    iteration: Value | None = None
    """Number of the iteration, i64 of rank 0, where the block has such a parameter."""

    def count_iterations(self) -> Value:
        """Return the iteration's number, as a new last parameter if there is none; its owner moves it into place."""
        if self.iteration is None:
            self.iteration = self.builder.block.add_parameter(TensorType(DType.I64, ()))
        return self.iteration


@dataclass(eq=False)
class Scope:
    """The names of one ONNX graph or function body."""

    frame: Frame
    opsets: Mapping[str, int]
    parent: Scope | None = None
    names: dict[str, Value | Tensor | SparseTensor] = field(
        default_factory=dict[str, Value | Tensor | SparseTensor]
    )
    arguments: Mapping[str, AttributeValue] | None = None
    """Attributes of the call, inside a function."""
    path: str = ""
    """Outputs of the calls and owners of bodies around: what tells equal names of different scopes apart."""


class Importer:
    """The state of one import."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.graph = IrGraph(model.graph.name or "graph")
        self.known: dict[Value, ObjectArray] = {}
        self.symbols: dict[str, str] = {}
        self._symbol_of: dict[str, str] = {}
        self._params: dict[int, Value] = {}
        root = Frame(FoldingBuilder(self.graph.block, self.graph.facts, self.known))
        self.root = Scope(root, model.opsets)
        self._stamp = _file_stamp(model.source)
        self._reported: RlxError | None = None

    # Inputs and facts.

    def add_inputs(self, shapes: Mapping[str, Sequence[int | str | None]]) -> None:
        """Create the inputs; those with a default value become params."""
        graph = self.model.graph
        names = [info.name for info in graph.inputs if info.name not in graph.initializers]
        for name in shapes:
            if name not in names:
                raise UsageError(f"the model has no input {name!r}.{did_you_mean(name, names)}")
        self._bind_initializers(self.root, graph)
        for info in graph.inputs:
            if info.name in graph.initializers:
                continue
            if info.name == RNG_INPUT:
                raise ModelError(f"{self.model.source}: an input is named {RNG_INPUT!r}; rename it")
            self.root.names[info.name] = self.graph.add_input(
                info.name, self._input_type(info, shapes.get(info.name))
            )

    def _input_type(self, info: ValueInfo, shape: Sequence[int | str | None] | None) -> TensorType:
        where = f"{self.model.source}: input {info.name!r}"
        if not isinstance(info.type, TensorSpec):
            raise ModelError(
                f"{where} has no type; add one to the file (onnx.shape_inference does)"
            )
        dtype = dtype_of(info.type.dtype)
        declared = info.type.shape
        if dtype is None:
            raise UnsupportedOpError(
                f"{where} has element type {info.type.dtype.name}, which rlx does not have"
            )
        if shape is None and declared is None:
            raise ModelError(
                f"{where} has no shape, not even a rank; declare one in the file, with names for "
                "the extents that vary"
            )
        if shape is not None and declared is not None and len(shape) != len(declared):
            raise UsageError(
                f"{where} has rank {len(declared)}, but shapes gives {len(shape)} extents"
            )
        extents = declared if shape is None else tuple(shape)
        assert extents is not None
        return TensorType(
            dtype, tuple(self._extent(e, info.name, axis) for axis, e in enumerate(extents))
        )

    def _extent(self, extent: int | str | None, name: str, axis: int) -> Dim:
        if isinstance(extent, int):
            return extent
        # A text such as "?" names nothing: two of them are two extents.
        named = extent is not None and any(c.isalnum() for c in extent)
        text = extent if named and extent is not None else f"{name}[{axis}]"
        if text not in self._symbol_of:
            wanted = _identifier(text if named else f"{name}_{axis}")
            chosen, number = wanted, 2
            while chosen in self.symbols:
                chosen, number = f"{wanted}_{number}", number + 1
            self._symbol_of[text] = chosen
            self.symbols[chosen] = text
        return symbol(self._symbol_of[text])

    def set_facts(self, hints: Mapping[str, int], uppers: Mapping[str, int]) -> None:
        """Enter hints and bounds, by symbol or by the file's name for it."""
        for what, given, target in (
            ("hints", hints, self.graph.facts.hints),
            ("uppers", uppers, self.graph.facts.uppers),
        ):
            for name, value in given.items():
                chosen = name if name in self.symbols else self._symbol_of.get(name)
                if chosen is None:
                    hint = did_you_mean(name, [*self.symbols, *self._symbol_of])
                    raise UsageError(f"{what}: the model has no symbolic extent {name!r}.{hint}")
                target[chosen] = value

    # Weights and constants.

    def _bind_initializers(self, scope: Scope, graph: Graph) -> None:
        listed = {info.name for info in graph.inputs}
        for name, tensor in graph.initializers.items():
            scope.names[name] = tensor
            overridable = (
                name in listed
                and self.model.ir_version >= _OVERRIDABLE_SINCE
                and scope is self.root
            )
            if (
                overridable and tensor.dtype.name not in _WHOLE
            ):  # extents stay constants, or no shape would be known
                scope.names[name] = self._param(tensor, name)

    def _param(self, tensor: Tensor | SparseTensor, name: str) -> Value:
        found = self._params.get(id(tensor))
        if found is None:
            unique, number = name or "weight", 2
            while unique in self.graph.params:
                unique, number = f"{name}_{number}", number + 1
            data = tensor.array()
            inside = isinstance(tensor, Tensor) and tensor.encoding is not Encoding.EXTERNAL
            identity = (*self._stamp, unique) if self._stamp and inside else ()
            found = self.graph.add_param(
                unique, data, TensorType(DType.of(data.dtype), tensor.shape), identity
            )
            self._params[id(tensor)] = found
        return found

    def tensor(self, tensor: Tensor | SparseTensor, frame: Frame, name: str) -> Value:
        """Return a tensor of the file as a value of a frame: a small one as a constant."""
        size = int(np.prod(tensor.shape, dtype=np.int64))
        narrow = len(tensor.shape) > 1 and tensor.dtype.name in _BYTES
        whole = tensor.dtype.name in _WHOLE and not narrow
        limit = MAX_CONSTANT_INTEGERS if whole else MAX_KNOWN
        if size > limit or id(tensor) in self._params:
            return self._bring(self._param(tensor, name), self.root.frame, frame)
        if id(tensor) not in frame.constants:
            constant = frame.constants[id(tensor)] = frame.builder.literal(tensor.array())
            if frame is self.root.frame:  # branches may use a name twice
                constant.name = constant.name or name
        return frame.constants[id(tensor)]

    # Names.

    def lookup(self, name: str, scope: Scope) -> Value:
        """Return what a name means, as a value of the scope's own block (captured if need be)."""
        found: Scope | None = scope
        while found is not None and name not in found.names:
            found = found.parent
        if found is None:
            raise ModelError(
                f"{self.model.source}: the name {name!r} is not defined where it is used"
            )
        held = found.names[name]
        if not isinstance(held, Value):
            return self.tensor(held, scope.frame, name)
        return self._bring(held, found.frame, scope.frame)

    def _bring(self, value: Value, source: Frame, target: Frame) -> Value:
        if source is target:
            return value
        assert target.parent is not None, "a value is used outside the block that defines it"
        outer = self._bring(value, source, target.parent)
        inner = target.captured.get(outer)
        if inner is None:
            known = self.known.get(outer)
            if known is not None:  # written again inside, so that it stays known there
                inner = target.builder.knowledge(known, outer.type.dtype)
            else:
                inner = target.builder.block.add_parameter(outer.type, outer.name)
            target.captured[outer] = inner
        return inner

    # Random numbers.

    def rng(self, scope: Scope, name: str, seed: int | None) -> Value:
        """Return the key of a node's random numbers, one per iteration of the loops around it.

        Args:
            scope: where the node stands.
            name: of its first output, which no other node of its graph has.
            seed: replaces the executable's; equal seeds then give equal numbers, whatever the names.
        """
        frame = scope.frame
        key = self._bring(rng_input(self.graph), self.root.frame, frame)
        number = stream_number(scope.path + name) if seed is None else 0
        key = rng_fold(key, number, seed)
        frames: list[Frame] = []
        around: Frame | None = frame
        while around is not None:
            frames.append(around)
            around = around.parent
        for outer in reversed(frames):
            if outer.repeats:
                key = rng_fold(key, self._bring(outer.count_iterations(), outer, frame))
        return key

    # Nodes.

    def run(self) -> None:
        """Import the main graph."""
        self.nodes(self.model.graph.nodes, self.root)
        results = [self.lookup(info.name, self.root) for info in self.model.graph.outputs]
        self.graph.block.results = results
        self.graph.output_names = [info.name for info in self.model.graph.outputs]
        drop_unused(self.graph.block, self.graph.facts)
        guards = {(g.left, g.relation, g.right): g for g in reversed(self.graph.facts.guards)}
        self.graph.facts.guards[:] = reversed(guards.values())  # each once, with its first reason

    def nodes(self, nodes: Iterable[Node], scope: Scope) -> None:
        """Import nodes in order."""
        for node in nodes:
            location = Location(node.name or _made(node), self.model.source)
            builder = scope.frame.builder
            with builder.at(location), building(builder):
                self._node(node, scope)

    def _node(self, node: Node, scope: Scope) -> None:
        operands = [self.lookup(name, scope) if name else None for name in node.inputs]
        attributes = _resolve(node, scope)
        function = self.model.functions.get(FunctionKey(node.domain, node.op_type, node.overload))
        if function is not None:
            results = self._call(function, operands, attributes, scope, _inside(node, scope))
        else:
            results = self._map(node, operands, attributes, scope)
        for index, name in enumerate(node.outputs):
            if not name:
                continue
            value = results[index] if index < len(results) else None
            if value is None:
                raise UnsupportedOpError(
                    f"{self.model.source}: {node.label}: rlx does not make output {index}"
                )
            if value.producer is not None and not value.name:
                value.name = name
            if value.producer is not None and not value.name:
                value.name = name
            scope.names[name] = value

    def _map(
        self,
        node: Node,
        operands: list[Value | None],
        attributes: Mapping[str, AttributeValue],
        scope: Scope,
    ) -> Sequence[Value | None]:
        version = scope.opsets[node.domain]
        mapping = find(node.domain, node.op_type, version)
        assert mapping is not None, "check_supported let it pass"
        control = _Control(self, scope, _inside(node, scope))
        call = Call(node, version, attributes, operands, self.known.get, control)
        with scope.frame.builder.facts.active():
            try:
                found = mapping.function(call)
            except RlxError as error:
                where = str(scope.frame.builder.location)
                if error is self._reported or where in str(error):  # it names its node already
                    self._reported = error
                    raise
                text = str(error).removeprefix(f"{node.label}: ")
                self._reported = type(error)(f"{self.model.source}: {node.label}: {text}")
                raise self._reported from error
            except (ValueError, IndexError, OverflowError, ZeroDivisionError) as error:
                # A file may combine operands and attributes in ways that no mapping checks for.
                self._reported = ModelError(
                    f"{self.model.source}: {node.label}: operands and attributes do not fit together "
                    f"({type(error).__name__}: {error})"
                )
                raise self._reported from error
        return (found,) if isinstance(found, Value) else found

    def _call(
        self,
        function: Function,
        operands: list[Value | None],
        attributes: Mapping[str, AttributeValue],
        scope: Scope,
        path: str,
    ) -> list[Value | None]:
        """Import the body of a function in place of a call of it."""
        given = {**function.defaults, **attributes}
        inner = Scope(scope.frame, function.opsets, None, {}, given, path)
        absent = set(function.inputs[len(operands) :])
        for name, value in zip(function.inputs, operands, strict=False):
            if value is None:
                absent.add(name)
            else:
                inner.names[name] = value
        self.nodes(
            [_without(node, absent) for node in function.nodes] if absent else function.nodes, inner
        )
        return [self.lookup(name, inner) if name else None for name in function.outputs]

    # Bodies.

    def inline(self, graph: Graph, scope: Scope, path: str) -> list[Value]:
        """Import a body into the block of the scope; return its results."""
        inner = Scope(scope.frame, scope.opsets, scope, {}, scope.arguments, path)
        self._bind_initializers(inner, graph)
        self.nodes(graph.nodes, inner)
        return [self.lookup(info.name, inner) for info in graph.outputs]

    def region(
        self,
        graph: Graph,
        scope: Scope,
        path: str,
        parameters: Sequence[TensorType],
        *,
        repeats: bool = False,
        counted: bool = False,
    ) -> Frame:
        """Import a body as a block with these first parameters; captures follow as more.

        Args:
            graph: the body.
            scope: of the node that owns it.
            path: `Scope.path` of the body.
            parameters: types of the inputs.
            repeats: a run may execute it more than once.
            counted: the first parameter is the number of the iteration.
        """
        frame = Frame(FoldingBuilder(Block(), self.graph.facts, self.known), scope.frame)
        frame.builder.location = scope.frame.builder.location
        frame.repeats = repeats
        inner = Scope(frame, scope.opsets, scope, {}, scope.arguments, path)
        if len(graph.inputs) != len(parameters):
            raise ModelError(
                f"body {graph.name!r} takes {len(graph.inputs)} inputs, "
                f"but {len(parameters)} are given"
            )
        self._bind_initializers(inner, graph)
        for info, type_ in zip(graph.inputs, parameters, strict=True):
            inner.names[info.name] = frame.builder.block.add_parameter(type_, info.name)
        if counted:
            frame.iteration = frame.builder.block.parameters[0]
        self.nodes(graph.nodes, inner)
        frame.builder.block.results = [self.lookup(info.name, inner) for info in graph.outputs]
        return frame


@dataclass(frozen=True)
class _Control:
    """What mappings of control flow may ask of the importer."""

    importer: Importer
    scope: Scope
    path: str

    def inline(self, graph: Graph) -> list[Value]:
        return self.importer.inline(graph, self.scope, self.path)

    def region(self, graph: Graph, parameters: Sequence[TensorType] = (), **options: bool) -> Frame:
        return self.importer.region(graph, self.scope, self.path, parameters, **options)

    def rng(self, node: Node, seed: int | None) -> Value:
        return self.importer.rng(self.scope, _first_output(node), seed)

    def region_from(self, make: Callable[[], Sequence[Value]], location: str) -> Frame:
        """Return a region without captures whose results `make` emits, all at one location."""
        importer = self.importer
        builder = FoldingBuilder(Block(), importer.graph.facts, importer.known)
        with builder.at(Location(location, importer.model.source)), building(builder):
            builder.block.results = list(make())
        return Frame(builder, self.scope.frame)

    def tensor(self, tensor: Tensor | SparseTensor, name: str) -> Value:
        return self.importer.tensor(tensor, self.scope.frame, name)


_BYTES = frozenset({"INT8", "UINT8", "INT4", "UINT4"})
_WHOLE = frozenset(
    {
        "UINT8",
        "INT8",
        "UINT16",
        "INT16",
        "INT32",
        "INT64",
        "BOOL",
        "UINT32",
        "UINT64",
        "UINT4",
        "INT4",
    }
)


def _identifier(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "d"
    if name[0].isdigit():
        name = f"d{name}"
    return f"{name}_" if name in _RESERVED or keyword.iskeyword(name) else name


def _made(node: Node) -> str:
    return f"{node.op_type} -> {_first_output(node)}"


def _first_output(node: Node) -> str:
    return next((name for name in node.outputs if name), "")


def _inside(node: Node, scope: Scope) -> str:
    """Return the path of what stands inside a node: a function's body, a branch."""
    return f"{scope.path}{_first_output(node)}/"


def _file_stamp(source: str) -> tuple[Any, ...]:
    """Return what identifies the file's bytes across processes, or () if there is no file."""
    try:
        status = Path(source).stat()
    except (OSError, ValueError):
        return ()
    return ("onnx", os.path.realpath(source), status.st_size, status.st_mtime_ns, status.st_ino)


def _resolve(node: Node, scope: Scope) -> Mapping[str, AttributeValue]:
    """Return the attributes with references replaced by what the call gave (absent: left out)."""
    if not any(isinstance(v, AttributeRef) for v in node.attributes.values()):
        return node.attributes
    given = scope.arguments or {}
    out: dict[str, AttributeValue] = {}
    for name, value in node.attributes.items():
        if not isinstance(value, AttributeRef):
            out[name] = value
        elif value.name in given:
            out[name] = given[value.name]
    return out


def _without(node: Node, absent: set[str]) -> Node:
    """Return a node of a function body with operands left out that the call left out."""
    if not absent.intersection(node.inputs):
        return node
    return replace(node, inputs=tuple("" if name in absent else name for name in node.inputs))
