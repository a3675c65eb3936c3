# SPDX-License-Identifier: Apache-2.0
"""Kernels that a registered operator brings: a Python function that emits LLVM IR with the builder of this backend.

    @scale.native_kernel("cpu", chunks=lambda x, *, factor: x.shape[0])
    def _(k: Kernel, x: Tensor, *, out: Tensor, factor: float) -> None: ...

The function is called once per combination of dtypes, ranks, attributes and instruction set, with the kernel under
construction, a `Tensor` per operand (None where left out), `out` (a `Tensor`, or a tuple of them) and the attributes.
The kernel does the chunks `k.begin` to `k.end`; extents are i64 values of the run. It may touch nothing outside its
operands and results, and has to write every element of the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.backends.cpu.abi import Kernel, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.lowering import lowering
from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.base.errors import BuildError, RlxError
from rlx.base.types import TensorType
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.custom import Custom, NativeKernel

__all__ = ["Kernel", "Tensor", "lower_custom"]


@dataclass(frozen=True)
class Tensor:
    """An operand or result while a kernel is emitted: dense and row-major.

    Attributes:
        pointer: to its first element.
        dtype: of its elements; `rlx.backends.cpu.emit` loads and stores them.
        shape: an i64 value per axis.
    """

    pointer: Value
    dtype: DType
    shape: tuple[Value, ...]


@lowering(Custom)
def lower_custom(node: Node, ctx: LoweringContext, isa: Isa) -> bool | None:
    """Emit the kernel of an operator that has one for this backend; False if it has none."""
    op = node.op
    assert isinstance(op, Custom)
    kernel = op.operator.kernels.get("cpu")
    if not isinstance(kernel, NativeKernel):
        return False
    present = [v for v in node.operands if v is not None]
    args: list[Arg] = [SlotArg(ctx.slot(v)) for v in present]
    args += [SlotArg(ctx.slot(r), writes=True) for r in node.results]
    args += [DimArg(d) for v in (*present, *node.results) for d in v.type.shape]
    types = [None if v is None else v.type for v in node.operands]
    module = Module(isa)
    try:
        with module.kernel("custom", len(args)) as k:
            tensors = iter(_tensors(k, [v.type for v in (*present, *node.results)]))
            operands = [None if v is None else next(tensors) for v in node.operands]
            results = tuple(next(tensors) for _ in node.results)
            out: Any = results[0] if len(results) == 1 else results
            kernel.build(k, *operands, out=out, **op.values())
        chunks: Dim = 1 if kernel.chunks is None else kernel.chunks(*types, **op.values())
        emitted = finish(module)
    except RlxError:
        raise
    except Exception as error:
        raise BuildError(
            f"the native kernel of {op.name} at node {node.location} raised {type(error).__name__}: {error}"
        ) from error
    ctx.launch(emitted, args, chunks, may_fail=True)
    return None


def _tensors(k: Kernel, types: list[TensorType]) -> list[Tensor]:
    """Return the operands and results, whose slots come first among the arguments and whose extents follow."""
    out: list[Tensor] = []
    extent = len(types)
    for index, kind in enumerate(types):
        shape = tuple(k.dim(extent + axis) for axis in range(kind.rank))
        extent += kind.rank
        out.append(Tensor(k.slot(index), kind.dtype, shape))
    return out
