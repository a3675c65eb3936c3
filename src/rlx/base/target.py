# SPDX-License-Identifier: Apache-2.0
"""What a device is and what its backend takes, as data: all that passes see of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.base.dtypes import DType
from rlx.base.types import TensorType

__all__ = ["Claims", "Limit", "Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """One device that programs are compiled for.

    Attributes:
        name: what `device=` accepts, unique within the process.
        triple: the code generator's target triple; empty where there is none.
        features: instruction set or capability names that code may rely on.
        description: one line for people.
        properties: capability numbers as (name, value) pairs: cache sizes, lanes, shared bytes.
    """

    name: str
    triple: str = ""
    features: frozenset[str] = frozenset()
    description: str = ""
    properties: tuple[tuple[str, int], ...] = ()

    def number(self, name: str, default: int = 0) -> int:
        """Return a capability number, or the default where the target does not state it."""
        return dict(self.properties).get(name, default)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a backend takes of an operator whose own rule allows more.

    Attributes:
        dtypes: of the first operand.
        wider: (dtype, dtype it is computed in instead): operands are converted, and the result is converted back.
            For floats that rounds once, as the meaning does; for integers it is right where results only depend
            on the low bits of the operands (sums of products).
        rank: least rank of every operand.
    """

    dtypes: frozenset[DType]
    wider: tuple[tuple[DType, DType], ...] = ()
    rank: int = 0

    def takes(self, types: Sequence[TensorType | None]) -> bool:
        """Return whether operands of these types are taken as they are."""
        present = [t for t in types if t is not None]
        return present[0].dtype in self.dtypes and all(t.rank >= self.rank for t in present)

    def wider_than(self, dtype: DType) -> DType | None:
        """Return the dtype that stands in for one that is not taken, None if there is none."""
        return dict(self.wider).get(dtype)


@dataclass(frozen=True, slots=True)
class Claims:
    """What a backend takes.

    Attributes:
        ops: names of operators that it compiles; empty means all of them.
        limits: (operator, limit) for operators of which it does not take every case.
        epilogue_anchors: operators whose kernels take an elementwise epilogue.
        kernels: operators that have a kernel of their own, better than the region they could be
            expressed as.
        layouts: (operator, axis order such as ``nhwc``) for operators that want another one than
            the default.
    """

    ops: frozenset[str] = frozenset()
    limits: tuple[tuple[str, Limit], ...] = ()
    epilogue_anchors: frozenset[str] = frozenset()
    kernels: frozenset[str] = frozenset()
    layouts: tuple[tuple[str, str], ...] = ()

    def supports(self, op_name: str) -> bool:
        """Return whether the backend compiles this operator."""
        return not self.ops or op_name in self.ops

    def limit_of(self, op_name: str) -> Limit | None:
        """Return the limit of an operator, None where all of its cases are taken."""
        return next((limit for name, limit in self.limits if name == op_name), None)

    def prefers_kernel(self, op_name: str) -> bool:
        """Return whether the operator should stay itself instead of becoming part of a region."""
        return op_name in self.kernels

    def layout_of(self, op_name: str) -> str:
        """Return the axis order an operator wants, or an empty string for the default."""
        return next((order for name, order in self.layouts if name == op_name), "")
