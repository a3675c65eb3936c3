# SPDX-License-Identifier: Apache-2.0
"""Values of weights: cells, each one value of one param, and what was derived from them.

A cell never changes while more than one executable holds it; setting a param puts another cell in its place. So
executables share weights by holding the same cells, and a change in one is never seen by another: copy on write, param
by param. What programs derive from params (packed, folded, dequantised) is known by its recipe and the serial numbers
of the cells it was computed from: equal ones are one array in the whole process. Cells that several executables made of
the same place in the same file have the same number, so what is packed of it is one array, too.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

from rlx.base.numeric import Array
from rlx.base.pages import give_back
from rlx.runtime.forks import watch_forks

__all__ = ["Cell", "Derived", "find_derived", "pooled", "take_out"]

_SERIALS = itertools.count()


class _Guard:
    """Guards the counts of owners and users, and the pool: cells are shared by executables with locks of their own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock: another thread of the parent may hold it, for ever."""
        self.lock = threading.Lock()


_GUARD = _Guard()


@dataclass(eq=False)
class _Number:
    """A serial number, which cells of one identity hold together."""

    value: int


_NUMBERS: WeakValueDictionary[Hashable, _Number] = WeakValueDictionary()


def _number_of(identity: Hashable) -> _Number:
    number = _Number(next(_SERIALS))
    if identity is None:
        return number
    with _GUARD.lock:
        return _NUMBERS.setdefault(identity, number)


class _Via(NamedTuple):
    """Where dropped data can be read back from."""

    derived: Derived
    read: Callable[[], Array]


class _Data(NamedTuple):
    """The data of a cell: at hand, or how to get it."""

    array: Array | None = None
    load: Callable[[], Array] | None = None
    via: _Via | None = None


class Cell:
    """One value of a param.

    Attributes:
        serial: no other cell of the process has it, but for those with the same identity.
        owners: executables that hold it.
    """

    def __init__(
        self,
        array: Array | None = None,
        *,
        load: Callable[[], Array] | None = None,
        owned: bool = False,
        identity: Hashable = None,
    ) -> None:
        self._number = _number_of(identity)
        self.serial = self._number.value
        self.owners = 1
        self.owned = owned
        # Replaced as a whole: another executable that holds the cell may read it at any time.
        self._data = _Data(array, load)

    @property
    def has_value(self) -> bool:
        """Whether there is data."""
        return any(part is not None for part in self._data)

    @property
    def at_hand(self) -> Array | None:
        """The data if it need not be read back."""
        return self._data.array

    def array(self) -> Array:
        """Return the data: at hand, from its file, or read back from the weight it was packed into."""
        array, load, via = self._data
        if array is not None:
            return array
        if via is not None:
            return via.read()
        assert load is not None
        array = load()
        with _GUARD.lock:
            if self._data.load is load:  # nobody dropped it meanwhile
                self._data = _Data(array, load)
        return array

    def place(self, array: Array) -> None:
        """Keep this array, which nobody else changes, as the data."""
        self.owned = True
        self._become(_Data(array))

    def secure(self) -> None:
        """Copy data that the caller could still change."""
        if not self.owned and self.has_value and self._data.via is None:
            array = self.array()
            if array.flags.writeable:
                self.place(array.copy())

    def drop(self, derived: Derived, read_back: Callable[[], Array]) -> None:
        """Forget data that takes memory, since it can be read back from a derived weight.

        Data in mapped files stays where it is; its pages are given back to the system, which has them in its cache.
        """
        if self._data.via is not None or not give_back(self.array()):
            self._become(_Data(via=_Via(derived, read_back)))

    def reads(self, derived: Derived) -> bool:
        """Return whether the data is in a derived weight only."""
        via = self._data.via
        return via is not None and via.derived is derived

    def hold(self) -> Cell:
        """One executable more holds it."""
        with _GUARD.lock:
            self.owners += 1
        return self

    def release(self) -> None:
        """One executable less holds it."""
        with _GUARD.lock:
            self.owners -= 1
            last = self.owners == 0
        if last:
            self._become(_Data())

    def _become(self, data: _Data) -> None:
        with _GUARD.lock:
            if data.via is not None:
                data.via.derived.read_by += 1
            if self._data.via is not None:
                self._data.via.derived.read_by -= 1
            self._data = data


@dataclass(eq=False)
class Derived:
    """A weight that was computed, shared by all programs that need it.

    Attributes:
        serials: of the cells it was computed from, in the order of the recipe's sources.
        array: the value, where kernels read it.
        owned: the array may be overwritten.
        users: programs whose kernels read it.
        read_by: cells whose data is only here.
    """

    serials: tuple[int, ...]
    array: Array
    owned: bool = False
    users: int = 0
    read_by: int = 0

    def use(self) -> None:
        """One program more reads it."""
        with _GUARD.lock:
            self.users += 1

    def unuse(self) -> None:
        """One program less reads it."""
        with _GUARD.lock:
            self.users -= 1


_POOL: WeakValueDictionary[tuple[str, tuple[int, ...]], Derived] = WeakValueDictionary()


def find_derived(key: str, serials: tuple[int, ...]) -> Derived | None:
    """Return what was computed by a recipe from these cells, for one more program, if it is still in use."""
    with _GUARD.lock:
        found = _POOL.get((key, serials))
        if found is not None:
            found.users += 1
        return found


def pooled(key: str, derived: Derived) -> Derived:
    """Return the one value of a recipe for these cells, for one more program: what is in use, or the new one."""
    with _GUARD.lock:
        chosen = _POOL.setdefault((key, derived.serials), derived)
        chosen.users += 1
        return chosen


def take_out(key: str, derived: Derived, readers: Sequence[Cell]) -> bool:
    """Return whether the array of a derived weight may be overwritten; then nobody finds the weight any more.

    Args:
        key: of its recipe.
        derived: one program of the caller reads it.
        readers: cells of the caller that read their data back from it.
    """
    with _GUARD.lock:
        alone = derived.owned and derived.users == 1 and derived.read_by == len(readers)
        alone = alone and all(cell.owners == 1 for cell in readers)
        if alone:
            _POOL.pop((key, derived.serials), None)
        return alone
