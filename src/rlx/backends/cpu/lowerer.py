# SPDX-License-Identifier: Apache-2.0
"""The scheduler's `Lowerer` for the CPU: tries the registered lowerings, at last runs a node on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import rlx.backends.cpu.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.check import launch_check
from rlx.backends.cpu.kernels.copy import copy_bytes  # the package registers every lowering
from rlx.backends.cpu.lowering import lowerings_of
from rlx.base.dims import Dim
from rlx.base.errors import UnsupportedOpError
from rlx.ir.graph import Node
from rlx.kernel.program import SlotArg, Thunk, ThunkKind
from rlx.kernel.schedule import LoweringContext
from rlx.ops.custom import Custom, HostKernel
from rlx.ops.region import WithEpilogue

__all__ = ["CpuLowerer"]


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
        for function in lowerings_of(type(anchor)):
            if function(node, ctx, self.isa) is not False:
                self.dispatch[op.label, "kernel"] += 1
                return
        how = "host"
        if isinstance(op, Custom) and isinstance(op.operator.kernels.get("cpu"), HostKernel):
            how = "python"  # that is its kernel
        elif self.host_ops == "error":
            types = ", ".join(str(o.type) for o in node.operands if o is not None)
            raise UnsupportedOpError(
                f"{op.name}({types}) at node {node.location} has no CPU kernel"
            )
        self.dispatch[op.label, how] += 1
        args = [SlotArg(ctx.slot(o)) for o in node.operands if o is not None]
        results = [SlotArg(ctx.slot(r), writes=True) for r in node.results]
        ctx.append(Thunk(ThunkKind.HOST, (*args, *results), may_fail=True, host=node))

    def copy(self, ctx: LoweringContext, source: int, target: int, nbytes: Dim) -> None:
        """Emit a copy of bytes."""
        copy_bytes(ctx, self.isa, source, target, nbytes)

    def check(self, ctx: LoweringContext, margins: Sequence[Dim]) -> None:
        """Emit a check of extents."""
        launch_check(ctx, self.isa, margins)
