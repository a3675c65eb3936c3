# SPDX-License-Identifier: Apache-2.0
"""What is known about weights without their values: params as a model declares them, and what a program reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx.base.dtypes import DType
from rlx.base.numeric import Array

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

__all__ = ["Default", "ParamSpec", "Recipe", "WeightPlan"]


@dataclass(frozen=True)
class ParamSpec:
    """What `Executable.params` says about one param.

    Attributes:
        name: in the model.
        dtype: of its elements.
        shape: always static.
        version: 0 for the model's own value; every change makes it one more.
        has_value: False until a param that was declared without data is set.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    version: int
    has_value: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Default:
    """A param as its model has it.

    Attributes:
        dtype: of its elements.
        shape: static.
        load: returns its data (an array that is writable may be changed by whoever gave it); None: it has none.
        identity: equal only for equal data that never changes, such as a place in a file; None: unknown.
    """

    dtype: DType
    shape: tuple[int, ...]
    load: Callable[[], Array] | None
    identity: Hashable = None


@dataclass(frozen=True)
class Recipe:
    """How one derived weight follows from a model's own params.

    Attributes:
        key: sha256 over the computation, the names and the types of the params; not their data.
        sources: the params it is computed from.
        kept: those of them whose elements all stand in it unchanged, so `recover` finds them.
    """

    key: str
    sources: tuple[str, ...]
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightPlan:
    """What the kernels of one program read.

    Attributes:
        own: params that are read as they are.
        recipes: weights that are computed, by name.
        graph: returns the param program that computes them; called when something has to be computed.
    """

    own: tuple[str, ...]
    recipes: Mapping[str, Recipe]
    graph: Callable[[], Graph]

    def needed(self) -> Iterator[str]:
        """Iterate all params the program depends on, each once."""
        names = dict.fromkeys(self.own)
        names.update(dict.fromkeys(s for r in self.recipes.values() for s in r.sources))
        return iter(names)
