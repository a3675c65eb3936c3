# SPDX-License-Identifier: Apache-2.0
"""The weights of an executable: their values and versions, and what its programs compute from them.

Values are cells (`rlx.runtime.cells`). A weight that a program derives from params is computed anew exactly when one of
the cells it was computed from was replaced, and only when a run needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.backends.protocol import AdoptingGraph, CompiledGraph
from rlx.base.convert import convert_exactly
from rlx.base.diagnostics import did_you_mean
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.base.foreign import as_array
from rlx.base.numeric import Array
from rlx.runtime.cells import Cell, Derived, find_derived, pooled, take_out
from rlx.runtime.weight_plan import Default, ParamSpec, WeightPlan

__all__ = ["BoundWeights", "Params"]


@dataclass(eq=False)
class BoundWeights:
    """A compiled program and the weights it was pointed at.

    Attributes:
        compiled: the backend's part.
        plan: what it reads.
        own: the cell behind every param it reads as it is.
        derived: the computed weights.
        seen: the number of changes when this was up to date.
    """

    compiled: CompiledGraph
    plan: WeightPlan
    own: dict[str, Cell] = field(default_factory=dict[str, Cell])
    derived: dict[str, Derived] = field(default_factory=dict[str, Derived])
    seen: int = -1

    def use(self, name: str, derived: Derived) -> None:
        """Point a computed weight at a value that one more program was counted for."""
        self.unuse(name)
        self.derived[name] = derived
        self.compiled.set_weight(name, derived.array)

    def unuse(self, name: str) -> None:
        """Forget the value of a computed weight."""
        old = self.derived.pop(name, None)
        if old is not None:
            old.unuse()


class Params:
    """The params of one executable. Its lock is the executable's: the caller holds it.

    Args:
        model: for messages.
        defaults: reads what the model says about its params, when somebody asks before a program is there.

    Attributes:
        changes: how often a param was replaced.
        computed: how many derived weights were computed so far.
    """

    def __init__(self, model: str, defaults: Callable[[], Mapping[str, Default]]) -> None:
        self._model = model
        self._defaults = defaults
        self._known: dict[str, Default] = {}
        self._declared = False
        self._cells: dict[str, Cell] = {}
        self._versions: dict[str, int] = {}
        self._initial: dict[str, int] = {}
        self.changes = 0
        self.computed = 0

    # -- what there is -----------------------------------------------------------------------------------------------

    def declare(self, params: Mapping[str, Default]) -> None:
        """Enter params that a program of the model brought; those known already stay as they are."""
        self._declared = True
        for name, param in params.items():
            if name not in self._known:
                self._known[name] = replace(param, load=None)  # the cell has it
                self._cells[name] = Cell(load=param.load, identity=param.identity)
                self._versions[name] = 0
                self._initial[name] = self._cells[name].serial

    def specs(self) -> dict[str, ParamSpec]:
        """Return all params by name, in the model's order."""
        self._ensure()
        return {
            n: ParamSpec(n, p.dtype, p.shape, self._versions[n], self._cells[n].has_value)
            for n, p in self._known.items()
        }

    def get(self, name: str) -> Array:
        """Return a copy of a param's value."""
        self._find(name)
        cell = self._cells[name]
        if not cell.has_value:
            raise UsageError(f"param {name!r} of {self._model} has no value; set it first")
        return np.array(cell.array(), order="C", copy=True)

    @property
    def is_declared(self) -> bool:
        """Whether it is known which params there are."""
        return self._declared

    @property
    def is_pristine(self) -> bool:
        """Whether every param has the value that the model gave it."""
        return all(c.serial == self._initial[n] and c.has_value for n, c in self._cells.items())

    def values(self, names: Iterable[str]) -> dict[str, Array]:
        """Return the data of params, not copied."""
        return {n: self._cells[n].array() for n in names}

    def at_hand(self) -> dict[str, Array | None]:
        """Return the data of all params as far as it lies in memory or in a mapped file."""
        return {n: c.at_hand for n, c in self._cells.items()}

    def known(self) -> Mapping[str, Default]:
        """Return the params as the model has them."""
        self._ensure()
        return self._known

    def _ensure(self) -> None:
        if not self._declared:
            self.declare(self._defaults())

    def _find(self, name: str) -> Default:
        self._ensure()
        found = self._known.get(name)
        if found is None:
            count = len(self._known)
            raise UsageError(
                f"{self._model} has no param {name!r}.{did_you_mean(name, self._known)} It has {count}, listed in "
                "`params`; small constants of a model are part of its code and cannot be set"
            )
        return found

    # -- changing values ---------------------------------------------------------------------------------------------

    def checked(self, name: str, value: Any, *, adopt: bool = False) -> Cell:
        """Return a cell for a param with a new value, which is not in place yet.

        Args:
            name: of the param.
            value: an array of its shape; of any dtype whose values it can hold.
            adopt: keep the array itself if it is read-only and already right, instead of a copy.

        Raises:
            UsageError: there is no such param, or the shape or a value does not fit.
        """
        param = self._find(name)
        shown = f"param {name!r} of {self._model}"
        array = as_array(value, shown)
        self.check_shape(name, array.shape)
        fits = array.dtype == param.dtype.numpy and array.flags.c_contiguous and array.flags.aligned
        if adopt and fits and not array.flags.writeable:
            return Cell(array)
        return Cell(convert_exactly(array, param.dtype, shown), owned=True)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a UsageError if a param has another shape, or does not exist."""
        param = self._find(name)
        if shape != param.shape:
            raise UsageError(
                f"param {name!r} of {self._model} is {param.dtype}{list(param.shape)}, got shape {list(shape)}"
            )

    def replace(self, cells: Mapping[str, Cell]) -> None:
        """Put new cells in place of old ones."""
        for name, cell in cells.items():
            self._cells[name].release()
            self._cells[name] = cell
            self._versions[name] += 1
        self.changes += 1

    def from_bytes(self, name: str, data: Any, dtype: Any) -> Array:
        """Return the array that bytes of a dtype are, in the shape of a param.

        Raises:
            UsageError: there is no such param, or the bytes are not as many as its elements take.
        """
        param, kind = self._find(name), DType.of(dtype)
        view = memoryview(data).cast("B")
        count = int(np.prod(param.shape, dtype=np.int64))
        if len(view) != count * kind.itemsize:
            raise UsageError(
                f"param {name!r} of {self._model} is {param.dtype}{list(param.shape)}: {count} elements of {kind} are "
                f"{count * kind.itemsize} bytes, got {len(view)}"
            )
        return np.frombuffer(view, np.uint8).view(kind.numpy).reshape(param.shape)

    def set_range(self, name: str, start: int, value: Any) -> None:
        """Replace rows of a param, from `start` on along its first axis."""
        param = self._find(name)
        shown = f"param {name!r} of {self._model}"
        array = as_array(value, shown)
        if not param.shape:
            raise UsageError(f"{shown} has rank 0 and so no rows; use set_param")
        if array.ndim != len(param.shape) or array.shape[1:] != param.shape[1:]:
            wanted = ", ".join(["rows", *map(str, param.shape[1:])])
            raise UsageError(
                f"rows of {shown}, {param.dtype}{list(param.shape)}, are [{wanted}], got {list(array.shape)}"
            )
        try:
            start = operator.index(start)
        except TypeError:
            raise UsageError(f"the first row of {shown} is a whole number, not {start!r}") from None
        stop = start + array.shape[0]
        if not 0 <= start <= stop <= param.shape[0]:
            raise UsageError(f"{shown} has rows 0 to {param.shape[0]}, not {start} to {stop}")
        rows = convert_exactly(array, param.dtype, shown)
        old = self._cells[name]
        if not old.has_value:
            raise UsageError(f"{shown} has no value yet; set all of it first")
        alone = old.owners == 1 and old.owned
        data = old.array()  # read back from the packed weight, it is an array of its own
        if not alone or not data.flags.writeable:
            data = data.copy()
        data[start:stop] = rows
        self.replace({name: Cell(data, owned=True)})

    def adopt(self, other: Params, *, copy: bool) -> None:
        """Take over all values of another executable, after checking that they fit."""
        mine, theirs = self.specs(), other.specs()
        _check_same(self._model, mine, other._model, theirs)
        cells: dict[str, Cell] = {}
        for name in mine:
            cell = other._cells[name]
            if copy:
                cells[name] = self.checked(name, cell.array(), adopt=True)
            else:
                cells[name] = cell.hold()
        self.replace(cells)

    def clone(self) -> Params:
        """Return the params of a clone, which holds the same cells."""
        twin = Params(self._model, self._defaults)
        twin._known, twin._declared = dict(self._known), self._declared
        twin._cells = {n: c.hold() for n, c in self._cells.items()}
        twin._versions, twin._initial = dict(self._versions), dict(self._initial)
        return twin

    def close(self) -> None:
        """Let go of all values."""
        for cell in self._cells.values():
            cell.release()
        self._cells.clear()
        self._known.clear()

    # -- what kernels read -------------------------------------------------------------------------------------------

    def bind(
        self,
        compiled: CompiledGraph,
        plan: WeightPlan,
        derived: Mapping[str, Array] | None = None,
    ) -> BoundWeights:
        """Return a program whose weights are kept up to date by `refresh`.

        Args:
            compiled: the backend's part.
            plan: what it reads.
            derived: weights computed earlier from the params as the model has them.
        """
        bound = BoundWeights(compiled, plan)
        for name, array in (derived or {}).items():
            recipe = plan.recipes[name]
            serials = tuple([self._initial[s] for s in recipe.sources])
            bound.use(name, pooled(recipe.key, Derived(serials, array)))
        return bound

    def twin(self, bound: BoundWeights, compiled: CompiledGraph) -> BoundWeights:
        """Return the same for another compiled graph, that of a clone."""
        copy = BoundWeights(compiled, bound.plan, {}, {}, -1)
        for name, derived in bound.derived.items():
            derived.use()
            copy.use(name, derived)
        return copy

    def release(self, bound: BoundWeights) -> None:
        """Let go of the weights of a program that is closed."""
        for name in list(bound.derived):
            bound.unuse(name)
        bound.own.clear()

    def refresh(self, bound: BoundWeights) -> None:
        """Point a program at the current values, computing what depends on a changed param and nothing else.

        Raises:
            UsageError: a param has no value.
        """
        if bound.seen == self.changes:
            return
        plan = bound.plan
        missing = [n for n in plan.needed() if not self._cells[n].has_value]
        if missing:
            listed = ", ".join(map(repr, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise UsageError(
                f"{self._model} has params without a value: {listed}; set them with set_param before a run"
            )
        stale = self._find_stale(bound)
        fresh = [n for n in plan.own if bound.own.get(n) is not self._cells[n]]
        if not bound.own and not bound.derived:
            self._place_all(bound, stale, fresh)
        else:
            for name, serials in stale.items():
                self._recompute(bound, name, serials)
            for name in fresh:
                self._cells[name].secure()
                bound.compiled.set_weight(name, self._cells[name].array())
        for name in fresh:
            bound.own[name] = self._cells[name]
        self._drop_originals(bound, stale)
        bound.seen = self.changes

    def _find_stale(self, bound: BoundWeights) -> dict[str, tuple[int, ...]]:
        """Return the serials of the derived weights that nobody has computed yet; point the others at what there is."""
        stale: dict[str, tuple[int, ...]] = {}
        for name, recipe in bound.plan.recipes.items():
            serials = tuple([self._cells[s].serial for s in recipe.sources])
            old = bound.derived.get(name)
            if old is not None and old.serials == serials:
                continue
            known = find_derived(recipe.key, serials)
            if known is None:
                stale[name] = serials
            else:
                bound.use(name, known)
        return stale

    def _place_all(
        self, bound: BoundWeights, stale: Mapping[str, tuple[int, ...]], fresh: list[str]
    ) -> None:
        """Compute all derived weights of a new program, and let the backend choose where they lie."""
        recipes = bound.plan.recipes
        data = self._compute(bound.plan, stale)
        cells = {n: self._cells[n] for n in fresh}
        for name, cell in cells.items():
            if not cell.owned and cell.array().flags.writeable:
                data[name] = cell.array()  # the caller's: copied below
        placed = _placed(bound.compiled, data)
        for name, serials in stale.items():
            derived = Derived(serials, placed[name], owned=placed[name].flags.writeable)
            bound.use(name, pooled(recipes[name].key, derived))
        for name, cell in cells.items():
            if name in placed:
                cell.place(placed[name])
            bound.compiled.set_weight(name, cell.array())

    def _recompute(self, bound: BoundWeights, name: str, serials: tuple[int, ...]) -> None:
        """Compute one derived weight anew, in the place of the old one if nobody else reads that."""
        recipe = bound.plan.recipes[name]
        (array,) = self._compute(bound.plan, [name]).values()
        old = bound.derived.get(name)
        sources = [self._cells[s] for s in recipe.sources]
        readers = [] if old is None else [c for c in sources if c.reads(old)]
        if old is not None and take_out(recipe.key, old, readers):
            for cell in readers:
                cell.place(cell.array())
            np.copyto(old.array, array)
            array = old.array
        elif any(np.may_share_memory(array, c.array()) for c in sources):  # a reshape is no copy
            array = array.copy()
        bound.use(name, pooled(recipe.key, Derived(serials, array, owned=array.flags.writeable)))

    def _compute(self, plan: WeightPlan, names: Iterable[str]) -> dict[str, Array]:
        from rlx.runtime.recipes import compute

        wanted = list(names)
        if not wanted:
            return {}
        sources = {s for n in wanted for s in plan.recipes[n].sources}
        self.computed += len(wanted)
        values = self.values(sources)
        return compute(plan.graph(), wanted, values)

    def _drop_originals(self, bound: BoundWeights, names: Iterable[str]) -> None:
        """Forget params that kernels read in packed form only: `get` reads them back from there."""
        read = set(bound.plan.own)
        for name in names:
            recipe, derived = bound.plan.recipes[name], bound.derived[name]
            for source in recipe.sources:
                cell = self._cells[source]
                cell.secure()
                if source in recipe.kept and source not in read and not cell.reads(derived):
                    cell.drop(derived, _reader(bound.plan, name, source, derived))


def _reader(plan: WeightPlan, name: str, source: str, derived: Derived) -> Callable[[], Array]:
    """Return a function that reads a param back from a derived weight."""

    def read() -> Array:
        from rlx.runtime.recipes import part, recover

        return recover(part(plan.graph(), [name]), derived.array, source)

    return read


def _placed(compiled: CompiledGraph, data: dict[str, Array]) -> dict[str, Array]:
    """Return arrays where the backend likes them best; they are this module's own."""
    if isinstance(compiled, AdoptingGraph):
        return compiled.adopt_weights(data)
    return {n: a.copy() if a.flags.writeable else a for n, a in data.items()}


def _check_same(
    mine: str, own: Mapping[str, ParamSpec], theirs: str, other: Mapping[str, ParamSpec]
) -> None:
    """Raise a UsageError that lists all differences between two sets of params."""
    wrong = [f"{n!r} is only in {mine}" for n in own if n not in other]
    wrong += [f"{n!r} is only in {theirs}" for n in other if n not in own]
    for name, spec in own.items():
        found = other.get(name)
        if found is not None and (found.dtype, found.shape) != (spec.dtype, spec.shape):
            wrong.append(f"{spec} is {found} in {theirs}")
        elif found is not None and not found.has_value:
            wrong.append(f"{name!r} has no value in {theirs}")
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise UsageError(
            f"the params of {theirs} do not fit {mine}, nothing was changed: {'; '.join(wrong[:8])}{more}"
        )
