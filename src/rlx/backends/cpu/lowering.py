# SPDX-License-Identifier: Apache-2.0
"""How graph nodes become kernel launches on the CPU: the registry of lowerings and the scheduler's `Lowerer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from rlx.backends.cpu.isa import Isa
from rlx.base.dims import Dim
from rlx.base.errors import UnsupportedOpError
from rlx.expr.body import Body
from rlx.ir.graph import Node, Value
from rlx.ir.op import Op
from rlx.kernel.program import SlotArg, Thunk, ThunkKind
from rlx.kernel.schedule import LoweringContext
from rlx.ops.region import WithEpilogue

__all__ = ["CpuLowerer", "Lowering", "has_lowering", "lowering", "split_epilogue"]

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


def has_lowering(operator: type[Op]) -> bool:
    """Return whether any lowering is registered for an operator class."""
    return operator in _LOWERINGS


def split_epilogue(node: Node) -> tuple[Op, tuple[Value | None, ...], Body | None, tuple[Value, ...]]:
    """Return (anchor operator, its operands, epilogue body or None, further operands of the epilogue)."""
    op = node.op
    if not isinstance(op, WithEpilogue):
        return op, node.operands, None, ()
    extras = tuple(v for v in node.operands[op.anchor_operands :] if v is not None)
    return op.anchor, node.operands[: op.anchor_operands], op.body, extras


class CpuLowerer:
    """Lowers nodes for one instruction set.

    Attributes:
        dispatch: (operator, how) -> number of nodes, for the dispatch report.
    """

    def __init__(self, isa: Isa, host_ops: str) -> None:
        self.isa = isa
        self.host_ops = host_ops
        self.dispatch: Counter[tuple[str, str]] = Counter()

    def lower(self, node: Node, ctx: LoweringContext) -> None:
        """Emit the launches of a node.

        Raises:
            UnsupportedOpError: only the host could run it and the caller refused host operators.
        """
        op = node.op
        anchor = op.anchor if isinstance(op, WithEpilogue) else op
        for function in _LOWERINGS.get(type(anchor), ()):
            if function(node, ctx, self.isa) is not False:
                self.dispatch[_label(op), "kernel"] += 1
                return
        if self.host_ops == "error":
            types = ", ".join(str(o.type) for o in node.operands if o is not None)
            raise UnsupportedOpError(f"{op.name}({types}) at node {node.location} has no CPU kernel")
        self.dispatch[_label(op), "host"] += 1
        args = [SlotArg(ctx.slot(o)) for o in node.operands if o is not None]
        results = [SlotArg(ctx.slot(r), writes=True) for r in node.results]
        ctx.append(Thunk(ThunkKind.HOST, (*args, *results), may_fail=True))

    def copy(self, ctx: LoweringContext, source: int, target: int, nbytes: Dim) -> None:
        """Emit a copy of bytes."""
        from rlx.backends.cpu.kernels.copy import copy_bytes  # noqa: PLC0415  (kernels import this module)

        copy_bytes(ctx, self.isa, source, target, nbytes)


def _label(op: Op) -> str:
    return f"{op.anchor.name}+epilogue" if isinstance(op, WithEpilogue) else op.name
