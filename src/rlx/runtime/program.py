# SPDX-License-Identifier: Apache-2.0
"""What an executable holds of each compiled variant, and of each set of input shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any

import numpy as np

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
    """

    run: Run
    env: dict[str, int]
    outputs: Bound
    compiled: CompiledGraph
    plain: Run
    names: list[str]
    result_type: Any

    def new_outputs(self, *, touched: bool = False) -> list[Array]:
        """Return arrays for the outputs of a run.

        Args:
            touched: their pages are there, so that whoever writes to them need not wait for the system.

        Raises:
            OutOfMemoryError: there is no room for them.
        """
        try:
            outputs = [np.empty(shape, dtype) for shape, dtype in self.outputs]
        except (MemoryError, ValueError) as error:  # a ValueError: more than an address can say
            wanted = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.outputs)
            raise out_of_memory("outputs", wanted, self.env) from error
        for array in outputs if touched else ():
            if array.nbytes >= 2 * PAGESIZE:
                array.reshape(-1).view(np.uint8)[::PAGESIZE] = 0
        return outputs
