# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import numpy as np
import pytest

from rlx.base.diagnostics import Location
from rlx.base.dims import Dim, ceildiv, dim_max, dim_min, symbol
from rlx.base.dtypes import DType
from rlx.base.facts import Facts, Guard
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.kernel.program import (
    DimArg,
    NodeInfo,
    Program,
    Slot,
    SlotArg,
    SlotKind,
    Thunk,
    ThunkKind,
    ValueInfo,
    Weight,
)
from rlx.kernel.saved import (
    DimReader,
    DimWriter,
    NotSavableError,
    program_from_data,
    program_to_data,
)
from rlx.ops.norm import LayerNorm

_N, _M, _ZERO = symbol("N"), symbol("M"), symbol("step", lower=0)


@pytest.mark.parametrize(
    "dim",
    [
        3,
        -1,
        _N,
        _ZERO * 4 + 1,
        _N * _M * 4 - _N,
        (_N + 3) // 4,
        ceildiv(_N * 2, 64),
        (_N + 1) % 8,
        dim_min(_N, _M + 2),
        dim_max(_N // 2, ceildiv(_M, 3), 7),
        (_N * _N) // (_M + 1),
    ],
)
def test_extents_read_back_as_themselves(dim: Dim) -> None:
    write = DimWriter()
    data = json.loads(json.dumps(write(dim)))
    assert DimReader(write.symbols)(data) == dim


def test_a_name_with_two_meanings_is_not_savable() -> None:
    write = DimWriter()
    write(_N)
    with pytest.raises(NotSavableError, match="two lower bounds"):
        write(symbol("N", lower=0) + 1)


def _program() -> Program:
    info = NodeInfo("add", "f32[N], f32[N]", "'sum'", ("sum", "bias"), _N * 2)
    program = Program("p", Facts(guards=[Guard(_N, "==", _M, "add")], equalities={"M": _N}))
    kinds = (SlotKind.INPUT, SlotKind.WEIGHT, SlotKind.WEIGHT, SlotKind.ARENA, SlotKind.OUTPUT)
    program.slots = [Slot(k, _N * 4) for k in kinds] + [Slot(SlotKind.VIEW, 4, root=0)]
    program.inputs, program.outputs = [0], [4]
    program.weights = {1: Weight("w"), 2: Weight(data=np.array([1, 2], np.float32))}
    program.thunks = [
        Thunk(
            ThunkKind.CALL,
            (SlotArg(0), SlotArg(3, writes=True), DimArg(_N), DimArg(8)),
            "rlx_add_0",
            chunks=ceildiv(_N, 64),
            node=info,
            inplace=((0, 3),),
            scratch=_N,
            may_fail=True,
        ),
        Thunk(ThunkKind.BIND, (SlotArg(5), SlotArg(0), DimArg(_ZERO), DimArg(4)), node=info),
        Thunk(ThunkKind.SET_DIM, (DimArg(_ZERO),), immediate=-3),
        Thunk(ThunkKind.JUMP, target=1),
    ]
    program.loops = [(1, 3)]
    program.values = [ValueInfo(3, DType.F32, (_N, 2), "sum"), ValueInfo(4, DType.F32, (_N,))]
    return program


def test_a_program_reads_back_as_itself() -> None:
    program = _program()
    write = DimWriter()
    data, constants = program_to_data(program, write)
    back = program_from_data(json.loads(json.dumps(data)), constants, DimReader(write.symbols))
    assert back.thunks == program.thunks
    assert back.slots == program.slots
    assert (back.name, back.inputs, back.outputs, back.loops) == ("p", [0], [4], [(1, 3)])
    assert back.values == program.values
    assert back.facts.guards == program.facts.guards
    assert back.facts.equalities == program.facts.equalities
    assert back.weights[1] == Weight("w")
    assert back.weights[2].data is constants[0]


def _reread(program: Program) -> Program:
    write = DimWriter()
    data, constants = program_to_data(program, write)
    return program_from_data(json.loads(json.dumps(data)), constants, DimReader(write.symbols))


def test_an_operator_of_the_host_is_written_with_its_types() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.F32, (_N, 4)))
    builder = Builder(graph.block, graph.facts)
    with builder.at(Location("my node", "model.onnx")):
        builder.emit(LayerNorm(), x, None, None)
    node = graph.block.nodes()[0]
    program = _program()
    program.thunks.append(Thunk(ThunkKind.HOST, host=node))
    back = _reread(program).thunks[-1].host
    assert back is not None
    assert back.op == node.op
    assert [None if o is None else o.type for o in back.operands] == [x.type, None, None]
    assert [r.type for r in back.results] == [r.type for r in node.results]
    assert back.location == node.location


def test_registered_operators_need_a_version() -> None:
    program = _program()
    program.custom["example.clip"] = ""
    with pytest.raises(NotSavableError, match=r"without a version: example\.clip"):
        program_to_data(program, DimWriter())
    program.custom["example.clip"] = "1"
    with pytest.raises(ValueError, match=r"example\.clip is not registered with version '1'"):
        _reread(program)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("thunks", 0, 1, 0, 0), 6),
        (("inputs", 0), -1),
        (("thunks", 3, 8), 9),
        (("slots", 5, 2), 77),
    ],
)
def test_indices_beyond_the_tables_are_refused(where: tuple[str | int, ...], value: int) -> None:
    write = DimWriter()
    data, constants = program_to_data(_program(), write)
    data = json.loads(json.dumps(data))
    place = data
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    with pytest.raises(IndexError):
        program_from_data(data, constants, DimReader(write.symbols))
