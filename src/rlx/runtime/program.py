# SPDX-License-Identifier: Apache-2.0
"""What an executable holds of each compiled variant, and of each set of input shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.lanes import Job, LaneGraph
from rlx.backends.protocol import CompiledGraph, Run
from rlx.base.allocation import out_of_memory
from rlx.base.numeric import Array
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
        names: of the outputs.
        result_type: named tuple of the outputs.
        laned: `compiled`, if a call does nothing but run it and its backend has lanes.
    """

    run: Run
    env: dict[str, int]
    outputs: Bound
    compiled: CompiledGraph
    plain: Run
    names: list[str]
    result_type: Any
    laned: LaneGraph | None

    def new_outputs(self) -> list[Array]:
        """Return arrays for the outputs of a run.

        Raises:
            OutOfMemoryError: there is no room for them.
        """
        try:
            return [np.empty(shape, dtype) for shape, dtype in self.outputs]
        except (MemoryError, ValueError) as error:  # a ValueError: more than an address can say
            wanted = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.outputs)
            raise out_of_memory("outputs", wanted, self.env) from error

    def job(self, arrays: Sequence[Array]) -> tuple[Job, dict[str, Any]] | None:
        """Return a run as a job of a lane, and its outputs by name; None if it cannot be one.

        Raises:
            OutOfMemoryError: there is no room for outputs.
        """
        if self.laned is None:
            return None
        outputs = self.new_outputs()
        job = self.laned.job(arrays, outputs, self.env)
        return None if job is None else (job, dict(zip(self.names, outputs, strict=True)))
