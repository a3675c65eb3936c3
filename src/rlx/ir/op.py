# SPDX-License-Identifier: Apache-2.0
"""The interface every operator implements.

An operator is a frozen dataclass whose fields are its attributes. So attributes are typed, hashable (CSE), printed
and parsed without further code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlx.base.precision import OpClass

__all__ = ["Op", "lookup_op", "register_op", "registered_ops", "unregister_op"]


@dataclass(frozen=True)
class Op:
    """One operator with its attributes.

    Class attributes describe what holds for every instance; subclasses override what differs.

    Attributes:
        name: the name in the text form; set by `register_op`.
        operands: names of the operands, in order. A trailing ``*`` marks a variadic last one, a trailing ``?`` one
            that may be absent.
        alias: the result is the first operand's bytes under another type (reshape and friends).
        may_fail: the kernel may raise for some data (integer division, index out of range); such a node is never
            speculated, and if folding it raises it stays.
        precision_class: how it takes part in a precision policy.
        keeps: names of float operands whose dtype a precision policy leaves alone.
        foldable: constant operands give a constant result by the reference meaning.
        keeps_elements: every element of every operand stands in the result, unchanged; the rest of the result is
            zero. So `reference` works on elements of any kind.
    """

    name: ClassVar[str] = ""
    operands: ClassVar[tuple[str, ...]] = ()
    alias: ClassVar[bool] = False
    foldable: ClassVar[bool] = True
    keeps_elements: ClassVar[bool] = False
    precision_class: ClassVar[OpClass] = OpClass.FIXED
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def label(self) -> str:
        """What reports call this instance: the name, unless it wraps another operator."""
        return self.name

    def infer(self, *operands: Any, **_: Any) -> Any:
        """Return the result type, or a tuple of them, from the operand types (None where absent).

        Raises:
            TypeRuleError: the operands are not accepted.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no type rule")

    def reference(self, *operands: Any, **_: Any) -> Any:
        """Return the result array, or a tuple of them, from operand arrays: the NumPy meaning.

        Narrow floats arrive widened to f32 (or f64) and the evaluator rounds results to their declared dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no reference")

    def flops(self, operands: Any, results: Any) -> Any:
        """Return how many floating-point operations one run takes (an extent), or None if nobody counted.

        A multiply-add counts twice. Given are the sequences of the operands' and the results' types.
        """
        del operands, results

    def keeps_dtype(self, index: int) -> bool:
        """Return whether a precision policy leaves the dtype of an operand alone."""
        if not self.keeps:
            return False
        names = [name.rstrip("?*") for name in self.operands]
        return names[min(index, len(names) - 1)] in self.keeps

    def may_fail(self, *operands: Any) -> bool:
        """Return whether a run may raise for some data, given the operand types."""
        del operands
        return False


_REGISTRY: dict[str, type[Op]] = {}


def register_op(cls: type[Op], name: str) -> None:
    """Enter an operator class under its text name."""
    known = _REGISTRY.get(name)
    if known is not None and known is not cls and known.__module__ != cls.__module__:
        raise ValueError(
            f"operator {name!r} is declared in {known.__module__} and in {cls.__module__}"
        )
    cls.name = name
    _REGISTRY[name] = cls


def unregister_op(name: str) -> None:
    """Take a name out of the table; nothing happens if it is not there."""
    _REGISTRY.pop(name, None)


def lookup_op(name: str) -> type[Op] | None:
    """Return the operator class of a name, or None."""
    return _REGISTRY.get(name)


def registered_ops() -> Mapping[str, type[Op]]:
    """Return all operators by name (import `rlx.ops` first); other threads may register more meanwhile."""
    return _REGISTRY.copy()
