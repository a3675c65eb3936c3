# SPDX-License-Identifier: Apache-2.0
"""How graph nodes become kernel launches on the CPU: the registry of lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from rlx.backends.cpu.isa import Isa
from rlx.expr.body import Body
from rlx.ir.graph import Node, Value
from rlx.ir.op import Op
from rlx.kernel.schedule import LoweringContext
from rlx.ops.region import WithEpilogue

__all__ = ["Lowering", "lowering", "lowerings_of", "split_epilogue"]

Lowering: TypeAlias = Callable[[Node, LoweringContext, Isa], "bool | None"]
_LOWERINGS: dict[type[Op], list[Lowering]] = {}
_Decorated = TypeVar("_Decorated", bound=Lowering)


def lowering(*operators: type[Op]) -> Callable[[_Decorated], _Decorated]:
    """Register a function as the lowering of operator classes.

    It emits launches into the context, or returns False (having emitted nothing) for a case it does not handle; then
    the lowering registered before it is tried, and at last the operator's reference runs on the host.
    """

    def register(function: _Decorated) -> _Decorated:
        for operator in operators:
            _LOWERINGS.setdefault(operator, []).insert(0, function)
        return function

    return register


def lowerings_of(operator: type[Op]) -> Sequence[Lowering]:
    """Return the lowerings of an operator class in the order in which they are tried."""
    found = _LOWERINGS.get(operator)
    if found is None:  # registered operators: their base class has one
        found = _LOWERINGS.get(operator.__base__ or operator, ())
    return found


def split_epilogue(
    node: Node,
) -> tuple[Op, tuple[Value | None, ...], Body | None, tuple[Value, ...]]:
    """Return (anchor operator, its operands, epilogue body or None, further operands of the epilogue)."""
    op = node.op
    if not isinstance(op, WithEpilogue):
        return op, node.operands, None, ()
    extras = tuple(v for v in node.operands[op.anchor_operands :] if v is not None)
    return op.anchor, node.operands[: op.anchor_operands], op.body, extras
