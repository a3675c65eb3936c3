# SPDX-License-Identifier: Apache-2.0
"""Which float dtype each kind of operator computes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlx.base.diagnostics import did_you_mean
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError

__all__ = ["FULL", "NARROW", "OpClass", "PrecisionPolicy"]

NARROW = (DType.F16, DType.BF16)
"""What f32 values may be narrowed to."""


class OpClass(Enum):
    """How an operator takes part in a precision policy."""

    COMPUTE = "compute"  # products that accumulate: matmul, convolution, attention, recurrences
    REDUCTION = "reduction"  # sums over axes, softmax, norms
    ELEMENTWISE = "elementwise"
    MOVEMENT = "movement"  # moves or selects elements, computes none
    FIXED = "fixed"  # keeps its dtypes under every policy


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which dtype operators on f32 values compute in, by class.

    A class with a dtype takes it. A class without one (None) follows: its operators take a narrow dtype if all the
    f32 values they read were computed in it, and f32 otherwise. Inputs and outputs keep their declared dtypes,
    integers are never touched, sums accumulate in f32 whatever the dtype of the operands.

    Attributes:
        compute: of matmul, convolution, attention and recurrent layers.
        reduction: of sums, softmax and norms.
        elementwise: of arithmetic and functions of single elements.
        movement: of reshape, transpose, gather, pooling and what else moves or selects.
        ops: operator -> dtype, overriding the class; kept as sorted pairs.

    Raises:
        UsageError: a dtype is not f32, f16 or bf16.
    """

    compute: DType | str | None = DType.F32
    reduction: DType | str | None = DType.F32
    elementwise: DType | str | None = DType.F32
    movement: DType | str | None = None
    ops: Mapping[str, DType | str] | tuple[tuple[str, DType | str], ...] = ()

    def __post_init__(self) -> None:
        for kind in OpClass:
            if kind is not OpClass.FIXED and getattr(self, kind.value) is not None:
                object.__setattr__(self, kind.value, _dtype(kind.value, getattr(self, kind.value)))
        pairs = tuple(sorted((n, _dtype(f"ops[{n!r}]", d)) for n, d in dict(self.ops).items()))
        object.__setattr__(self, "ops", pairs)

    @classmethod
    def uniform(cls, dtype: DType | str) -> PrecisionPolicy:
        """Return the policy under which every class computes in one dtype."""
        found = _dtype("dtype", dtype)
        return cls(found, found, found, None)

    @classmethod
    def mixed(cls, dtype: DType | str) -> PrecisionPolicy:
        """Return the cautious policy: products in a narrow dtype, sums, softmax and norms in f32, the rest follows."""
        return cls(_dtype("dtype", dtype), DType.F32, None, None)

    @classmethod
    def of(cls, text: str | PrecisionPolicy) -> PrecisionPolicy:
        """Return a policy by name: `f32`, `f16`, `bf16`, `mixed-f16` or `mixed-bf16`.

        Raises:
            UsageError: there is no policy of that name.
        """
        if isinstance(text, PrecisionPolicy):
            return text
        if text not in _NAMED:
            raise UsageError(
                f"precision is one of {', '.join(_NAMED)} or an rlx.PrecisionPolicy, not {text!r}."
                f"{did_you_mean(str(text), _NAMED)}"
            )
        return _NAMED[text]

    @property
    def narrows(self) -> bool:
        """Whether any operator may leave f32."""
        chosen = (self.compute, self.reduction, self.elementwise, self.movement)
        return any(d in NARROW for d in (*chosen, *dict(self.ops).values()))

    def dtype_of(self, op: str, kind: OpClass) -> DType | None:
        """Return what an operator computes in; None if it follows what it reads."""
        dtype: Any = dict(self.ops).get(op)
        if dtype is not None:
            return dtype
        return DType.F32 if kind is OpClass.FIXED else getattr(self, kind.value)


def _dtype(name: str, value: DType | str) -> DType:
    known = {d.value: d for d in (DType.F32, *NARROW)}
    found = known.get(value.value if isinstance(value, DType) else value)
    if found is None:
        raise UsageError(f"precision of {name} is one of {', '.join(known)}, not {value}")
    return found


FULL = PrecisionPolicy()
"""Everything in f32."""
_NAMED = {
    "f32": FULL,
    "f16": PrecisionPolicy.uniform(DType.F16),
    "bf16": PrecisionPolicy.uniform(DType.BF16),
    "mixed-f16": PrecisionPolicy.mixed(DType.F16),
    "mixed-bf16": PrecisionPolicy.mixed(DType.BF16),
}
