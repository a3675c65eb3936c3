# SPDX-License-Identifier: Apache-2.0
"""Programs as plain data and back: what a program cache keeps.

The data is what JSON holds (lists, dicts, numbers, text), with extents as text; constants are a list of arrays
beside it. Kernels are named by symbol. An operator that the host runs is the text of a graph that holds it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx.base.dims import Dim, DimExpr, parse_dim, symbol, symbol_atoms
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.facts import Facts, Guard
from rlx.base.numeric import Array
from rlx.kernel.program import (
    Arg,
    DimArg,
    NodeInfo,
    Program,
    Slot,
    SlotArg,
    SlotKind,
    StateSlots,
    Thunk,
    ThunkKind,
    ValueInfo,
    Weight,
)

if TYPE_CHECKING:
    from rlx.ir.graph import Node

__all__ = ["DimReader", "DimWriter", "NotSavableError", "program_from_data", "program_to_data"]

_Json: TypeAlias = dict[str, Any]


class NotSavableError(UsageError):
    """A program has a part that only this process can hold."""


class DimWriter:
    """Extents as JSON: an int, or the text of an expression.

    Attributes:
        symbols: least value of every symbol written so far, which the text does not say.
    """

    def __init__(self) -> None:
        self.symbols: dict[str, int] = {}
        self._known: dict[DimExpr, str] = {}

    def __call__(self, dim: Dim) -> int | str:
        """Return the JSON form of an extent.

        Raises:
            NotSavableError: the text would be read as another expression.
        """
        if not isinstance(dim, DimExpr):
            return dim
        found = self._known.get(dim)
        if found is None:
            for atom in symbol_atoms(dim):
                if self.symbols.setdefault(atom.name, atom.lower) != atom.lower:
                    raise NotSavableError(f"extent {atom.name} has two lower bounds")
            found = self._known[dim] = str(dim)
            if parse_dim(found, self._symbol) != dim:
                raise NotSavableError(f"extent expression {found} does not read back as itself")
        return found

    def _symbol(self, name: str) -> Dim:
        return symbol(name, self.symbols[name])


class DimReader:
    """The inverse of `DimWriter`."""

    def __init__(self, symbols: dict[str, int]) -> None:
        self._symbols = symbols
        self._known: dict[str, Dim] = {}

    def __call__(self, data: int | str) -> Dim:
        """Return the extent of a JSON form."""
        if isinstance(data, int):
            return data
        found = self._known.get(data)
        if found is None:
            found = self._known[data] = parse_dim(
                data, lambda name: symbol(name, self._symbols[name])
            )
        return found


def program_to_data(program: Program, dims: DimWriter) -> tuple[_Json, list[Array]]:
    """Return a program as JSON data and the arrays of its constants.

    Args:
        program: what to write; its kernels are symbols.
        dims: shared with whatever else goes into the same file.

    Raises:
        NotSavableError: it has registered operators without a version, or attributes without a text form.
    """
    unversioned = [name for name, version in program.custom.items() if not version]
    if unversioned:
        raise NotSavableError(f"registered operators without a version: {', '.join(unversioned)}")
    nodes: dict[int, tuple[int, NodeInfo]] = {}  # by identity: two nodes may look the same
    thunks = [_thunk_to_data(t, nodes, dims) for t in program.thunks]
    constants: list[Array] = []
    weights: list[tuple[int, str]] = []
    for slot, weight in program.weights.items():
        weights.append((slot, weight.name))
        if weight.data is not None:
            constants.append(weight.data)
    facts = program.facts
    distinct = dict.fromkeys((v.dtype, v.shape) for v in program.values)
    types = {kind: index for index, kind in enumerate(distinct)}  # values have few types
    data: _Json = {
        "name": program.name,
        "slots": [[s.kind.value, dims(s.nbytes), s.root] for s in program.slots],
        "nodes": [
            [
                n.op,
                n.operands,
                n.location,
                n.names,
                None if n.flops is None else dims(n.flops),
            ]
            for _, n in nodes.values()
        ],
        "types": [[dtype.value, [dims(d) for d in shape]] for dtype, shape in types],
        "values": [[v.slot, types[v.dtype, v.shape], v.name] for v in program.values],
        "thunks": thunks,
        "inputs": program.inputs,
        "outputs": program.outputs,
        "weights": weights,
        "constants": [slot for slot, w in program.weights.items() if w.data is not None],
        "loops": program.loops,
        "states": [
            [s.name, [dims(d) for d in s.shape], s.slot, s.following, s.aliases]
            for s in program.states
        ],
        "custom": program.custom,
        "guards": [[dims(g.left), g.relation, dims(g.right), g.reason] for g in facts.guards],
        "equalities": {name: dims(d) for name, d in facts.equalities.items()},
    }
    return data, constants


def program_from_data(data: _Json, constants: Sequence[Array], dims: DimReader) -> Program:
    """Return the program that `program_to_data` wrote.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the data is not of that form, or a registered operator has another
            version now.
        ParseError: an operator that the host runs does not exist here.
    """
    _check_versions(data["custom"])
    facts = Facts(
        guards=[
            Guard(dims(a), relation, dims(b), reason) for a, relation, b, reason in data["guards"]
        ],
        equalities={name: dims(d) for name, d in data["equalities"].items()},
    )
    nodes = [
        NodeInfo(op, operands, where, tuple(names), None if flops is None else dims(flops))
        for op, operands, where, names, flops in data["nodes"]
    ]
    types = [(DType.of(dtype), tuple([dims(d) for d in s])) for dtype, s in data["types"]]
    values = dict(zip(data["constants"], constants, strict=True))
    program = Program(
        data["name"],
        facts,
        slots=[Slot(SlotKind(kind), dims(nbytes), root) for kind, nbytes, root in data["slots"]],
        thunks=[_thunk_from_data(row, nodes, dims) for row in data["thunks"]],
        inputs=data["inputs"],
        outputs=data["outputs"],
        weights={slot: Weight(name, values.get(slot)) for slot, name in data["weights"]},
        loops=[(first, last) for first, last in data["loops"]],
        custom=data["custom"],
        values=[
            ValueInfo(slot, types[kind][0], types[kind][1], name)
            for slot, kind, name in data["values"]
        ],
        states=[
            StateSlots(name, tuple([dims(d) for d in shape]), slot, following, tuple(aliases))
            for name, shape, slot, following, aliases in data["states"]
        ],
    )
    _check_indices(program)
    return program


def _thunk_to_data(
    thunk: Thunk, nodes: dict[int, tuple[int, NodeInfo]], dims: DimWriter
) -> list[Any]:
    return [
        thunk.kind.value,
        [[a.slot, int(a.writes)] if isinstance(a, SlotArg) else dims(a.dim) for a in thunk.args],
        thunk.kernel,
        dims(thunk.chunks),
        _node_index(thunk.node, nodes),
        thunk.inplace,
        dims(thunk.scratch),
        int(thunk.may_fail),
        thunk.target,
        thunk.immediate,
        None if thunk.host is None else _host_to_text(thunk.host),
    ]


def _node_index(node: NodeInfo | None, nodes: dict[int, tuple[int, NodeInfo]]) -> int:
    return -1 if node is None else nodes.setdefault(id(node), (len(nodes), node))[0]


def _thunk_from_data(row: list[Any], nodes: Sequence[NodeInfo], dims: DimReader) -> Thunk:
    kind, args, kernel, chunks, node, inplace, scratch, may_fail, target, immediate, host = row
    info: NodeInfo | None = None if int(node) < 0 else nodes[int(node)]
    return Thunk(
        ThunkKind(kind),
        tuple([_arg_from_data(a, dims) for a in args]),
        kernel,
        dims(chunks),
        info,
        None if host is None else _host_from_text(host),
        _pairs(inplace),
        dims(scratch),
        bool(may_fail),
        target=target,
        immediate=immediate,
    )


# Operators and the graph are imported only for programs that need them: the others start without.


def _check_versions(custom: dict[str, str]) -> None:
    if not custom:
        return
    import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
    from rlx.ops.custom import custom_version

    for name, version in custom.items():
        if custom_version(name) != version:
            raise ValueError(f"operator {name} is not registered with version {version!r}")


def _host_to_text(node: Node) -> str:
    from rlx.ir.builder import Builder
    from rlx.ir.graph import Graph
    from rlx.ir.text import print_graph

    graph = Graph("host")
    operands = [
        None if o is None else graph.add_input(f"x{i}", o.type) for i, o in enumerate(node.operands)
    ]
    builder = Builder(graph.block, graph.facts)
    with builder.at(node.location):
        copied = builder.emit_typed(node.op, operands, [r.type for r in node.results])
    graph.set_outputs({f"y{i}": value for i, value in enumerate(copied.results)})
    try:
        return print_graph(graph)
    except UsageError as error:
        raise NotSavableError(str(error)) from error


def _host_from_text(text: str) -> Node:
    import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (the parser looks operators up)
    from rlx.ir.parse import parse_graph

    (node,) = parse_graph(text).block
    return node


def _pairs(data: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple([(int(a), int(b)) for a, b in data])


def _arg_from_data(data: list[int] | int | str, dims: DimReader) -> Arg:
    return SlotArg(data[0], bool(data[1])) if isinstance(data, list) else DimArg(dims(data))


def _check_indices(program: Program) -> None:
    """Raise IndexError if a thunk names a slot or a thunk that is not there: native code would follow it."""
    slots, thunks = len(program.slots), len(program.thunks)
    named = [a.slot for t in program.thunks for a in t.args if isinstance(a, SlotArg)]
    named += [v.slot for v in program.values]
    named += [*program.inputs, *program.outputs, *program.weights]
    named += [s.root for s in program.slots if s.root is not None]
    named += [i for s in program.states for i in (s.slot, s.following, *s.aliases)]
    if any(not 0 <= slot < slots for slot in named):
        raise IndexError("a slot of the program does not exist")
    if any(not -1 <= t.target <= thunks for t in program.thunks):
        raise IndexError("a thunk of the program jumps to nowhere")
