# SPDX-License-Identifier: Apache-2.0
"""What an executable holds of each compiled variant, and of each set of input shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx.backends.protocol import CompiledGraph, Run
from rlx.runtime.entry import Signature
from rlx.runtime.outputs import Bound
from rlx.runtime.params import BoundWeights

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

__all__ = ["Binding", "Program", "Variant"]


@dataclass
class Program:
    """One compiled variant of a model.

    Attributes:
        compiled: the backend's part.
        signature: outputs, and the assumptions about extents.
        weights: what it reads of the params, and in which version.
        report: why things fused or did not, by pass.
        seconds: how long each stage took.
        graph: after all passes; None if the program came from the cache.
    """

    compiled: CompiledGraph
    signature: Signature
    weights: BoundWeights
    report: list[str] = field(default_factory=list[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    graph: Graph | None = None


@dataclass(eq=False)
class Variant:
    """A program, the bounds it is planned for, and whether its memory is planned now."""

    program: Program
    uppers: dict[str, int]
    is_planned: bool = True


@dataclass
class Binding:
    """Everything that follows from the shapes of one call.

    Attributes:
        run: what a call does.
        env: the values of the symbols.
        outputs: shapes and dtypes.
        compiled: what runs in the end.
        plain: what a call does if nothing is checked meanwhile.
    """

    run: Run
    env: dict[str, int]
    outputs: Bound
    compiled: CompiledGraph
    plain: Run
