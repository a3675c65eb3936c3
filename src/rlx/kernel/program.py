# SPDX-License-Identifier: Apache-2.0
"""The program: a table of thunks over slots and extents.

A slot is a pointer a backend fills in before a run; a thunk names a kernel and indexes slots and extents. Everything
a run does is in the table, control flow included, so the schedule is data and code does not depend on it. Nothing
here refers to the graph it came from (but for operators the host runs), so a program can outlive the process:
`rlx.kernel.saved` turns it into text and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.base.facts import Facts
from rlx.base.numeric import Array
from rlx.base.types import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Node

__all__ = [
    "Arg",
    "DimArg",
    "NodeInfo",
    "Program",
    "Slot",
    "SlotArg",
    "SlotKind",
    "StateSlots",
    "Thunk",
    "ThunkKind",
    "ValueInfo",
    "Weight",
]


class SlotKind(Enum):
    """Where the bytes of a slot live."""

    ARENA = "arena"  # planned offset in the executable's arena
    WEIGHT = "weight"  # a param, a derived param or a constant
    INPUT = "input"  # the caller's array
    OUTPUT = "output"  # a fresh array of the caller, or `out=`
    STATE = "state"  # persists between runs
    VIEW = "view"  # a run-time offset into another slot, set by a BIND thunk


@dataclass(slots=True)
class Slot:
    """One operand buffer.

    Attributes:
        kind: where it lives.
        nbytes: its size; an expression over the symbols.
        root: for a VIEW, the slot it points into.
    """

    kind: SlotKind
    nbytes: Dim
    root: int | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """What a WEIGHT slot holds: a param, which the owner of the program points at its data, or a constant.

    Attributes:
        name: of the param; empty for a constant.
        data: of the constant.
    """

    name: str = ""
    data: Array | None = None


class ValueInfo(NamedTuple):
    """What a slot holds: the key to looking at it. Several values may share a slot (reshapes, carries of loops).

    Attributes:
        slot: where it lies.
        dtype: of the elements.
        shape: dense, row-major.
        name: in the source model; empty if it has none there.
    """

    slot: int
    dtype: DType
    shape: Shape
    name: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots that share the memory of a state.

    Attributes:
        name: of the state.
        shape: its extents.
        slot: holds its value when a run begins.
        following: holds its next value when a run ends: `slot` itself (the value was copied there, or did not
            change), or the last of the aliases.
        aliases: further slots of the same bytes, written when nobody reads the old value any more.
    """

    name: str
    shape: Shape
    slot: int
    following: int
    aliases: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What errors and reports say about the node a thunk came from.

    Attributes:
        op: name of the operator.
        operands: their types as text, comma separated.
        location: name in the model, file or Python line.
        names: of the nodes of the source model whose work it does, or else their sources; its own comes first.
        flops: floating-point operations of one execution; None where nobody counted.
    """

    op: str
    operands: str = ""
    location: str = ""
    names: tuple[str, ...] = ()
    flops: Dim | None = None

    def __str__(self) -> str:
        return f"{self.op}({self.operands}) at node {self.location}"


@dataclass(frozen=True, slots=True)
class SlotArg:
    """A kernel argument that is a pointer."""

    slot: int
    writes: bool = False


@dataclass(frozen=True, slots=True)
class DimArg:
    """A kernel argument that is an i64 extent, stride, count or offset."""

    dim: Dim


Arg: TypeAlias = SlotArg | DimArg


class ThunkKind(Enum):
    """What the dispatcher does with a thunk."""

    CALL = "call"  # run `kernel` over `chunks` chunks
    JUMP = "jump"  # continue at `target`
    JUMP_UNLESS = (
        "jump_unless"  # continue at `target` if the bool in the first slot argument is false
    )
    JUMP_GE = "jump_ge"  # continue at `target` if the first extent argument >= the second
    SET_DIM = "set_dim"  # extent args[0] = immediate
    ADD_DIM = "add_dim"  # extent args[0] += immediate
    BIND = "bind"  # slot args[0] = slot args[1] + extent args[2] * extent args[3] bytes
    HOST = "host"  # Python runs the node's reference on views


@dataclass(slots=True)
class Thunk:
    """One step.

    Attributes:
        kind: what to do.
        args: kernel arguments in the kernel's order.
        kernel: backend-specific, for CALL.
        chunks: number of independent chunks the kernel may be split into.
        node: where it came from, for errors and reports.
        host: for HOST, the node whose operator Python runs.
        inplace: pairs (operand slot, result slot) the kernel allows to be the same bytes.
        scratch: bytes each participant needs beside the slots.
        may_fail: the kernel may record an error.
        copies: it does nothing but copy the operand of `inplace` to the result: where they are the same bytes there
            is nothing to do. Known while a program is scheduled.
        target: index of the thunk to continue at, for jumps.
        immediate: for SET_DIM and ADD_DIM.
    """

    kind: ThunkKind
    args: tuple[Arg, ...] = ()
    kernel: Any = None
    chunks: Dim = 1
    node: NodeInfo | None = None
    host: Node | None = None
    inplace: tuple[tuple[int, int], ...] = ()
    scratch: Dim = 0
    may_fail: bool = False
    copies: bool = False
    target: int = -1
    immediate: int = 0

    def reads(self) -> Iterator[int]:
        """Iterate the slots this thunk reads."""
        for position, arg in enumerate(self.args):
            if (
                isinstance(arg, SlotArg)
                and not arg.writes
                and not (self.kind is ThunkKind.BIND and position == 0)
            ):
                yield arg.slot

    def writes(self) -> Iterator[int]:
        """Iterate the slots this thunk writes."""
        for arg in self.args:
            if isinstance(arg, SlotArg) and arg.writes:
                yield arg.slot


@dataclass
class Program:
    """Thunks in order, the slots they use, and which slots belong to inputs, outputs, weights and states.

    Attributes:
        loops: (first, last) thunk of every loop body, innermost after outermost.
        custom: the registered operators in it and their versions.
        values: the values of the graph that have slots.
        states: the slots of what persists between runs.
    """

    name: str
    facts: Facts
    slots: list[Slot] = field(default_factory=list[Slot])
    thunks: list[Thunk] = field(default_factory=list[Thunk])
    inputs: list[int] = field(default_factory=list[int])
    outputs: list[int] = field(default_factory=list[int])
    weights: dict[int, Weight] = field(default_factory=dict[int, Weight])
    loops: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    custom: dict[str, str] = field(default_factory=dict[str, str])
    values: list[ValueInfo] = field(default_factory=list[ValueInfo])
    states: list[StateSlots] = field(default_factory=list[StateSlots])

    def root(self, slot: int) -> int:
        """Return the slot whose bytes a view points into (the slot itself if it is no view)."""
        while (root := self.slots[slot].root) is not None:
            slot = root
        return slot
