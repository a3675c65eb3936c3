# SPDX-License-Identifier: Apache-2.0
"""What a device is and what its backend takes, as data: all that passes see of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Claims", "Target"]


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
class Claims:
    """What a backend takes.

    Attributes:
        ops: names of operators that it compiles; empty means all of them.
        epilogue_anchors: operators whose kernels take an elementwise epilogue.
        kernels: operators that have a kernel of their own, better than the region they could be
            expressed as.
        layouts: (operator, axis order such as ``nhwc``) for operators that want another one than
            the default.
    """

    ops: frozenset[str] = frozenset()
    epilogue_anchors: frozenset[str] = frozenset()
    kernels: frozenset[str] = frozenset()
    layouts: tuple[tuple[str, str], ...] = ()

    def supports(self, op_name: str) -> bool:
        """Return whether the backend compiles this operator."""
        return not self.ops or op_name in self.ops

    def prefers_kernel(self, op_name: str) -> bool:
        """Return whether the operator should stay itself instead of becoming part of a region."""
        return op_name in self.kernels

    def layout_of(self, op_name: str) -> str:
        """Return the axis order an operator wants, or an empty string for the default."""
        return next((order for name, order in self.layouts if name == op_name), "")
