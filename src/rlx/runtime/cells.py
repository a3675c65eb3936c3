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
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from rlx.base.numeric import Array
from rlx.base.pages import give_back
from rlx.runtime.forks import watch_forks

__all__ = ["Cell", "Derived", "find_derived", "pooled"]

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
        self._array = array
        self._load = load
        self._via: tuple[Derived, Callable[[], Array]] | None = None

    @property
    def has_value(self) -> bool:
        """Whether there is data."""
        return self._array is not None or self._load is not None or self._via is not None

    @property
    def at_hand(self) -> Array | None:
        """The data if it need not be read back."""
        return self._array

    def array(self) -> Array:
        """Return the data: at hand, from its file, or read back from the weight it was packed into."""
        if self._array is not None:
            return self._array
        if self._via is not None:
            return self._via[1]()
        assert self._load is not None
        self._array = self._load()
        return self._array

    def place(self, array: Array) -> None:
        """Keep this array, which nobody else changes, as the data."""
        self._leave()
        self._array, self._load, self.owned = array, None, True

    def secure(self) -> None:
        """Copy data that the caller could still change."""
        if not self.owned and self.has_value and self._via is None:
            array = self.array()
            if array.flags.writeable:
                self.place(array.copy())

    def drop(self, derived: Derived, read_back: Callable[[], Array]) -> None:
        """Forget data that takes memory, since it can be read back from a derived weight.

        Data in mapped files stays where it is; its pages are given back to the system, which has them in its cache.
        """
        if self._via is None and give_back(self.array()):
            return
        self._leave()
        self._array = self._load = None
        self._via = (derived, read_back)
        with _GUARD.lock:
            derived.read_by += 1

    def reads(self, derived: Derived) -> bool:
        """Return whether the data is in a derived weight only."""
        return self._via is not None and self._via[0] is derived

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
            self._leave()

    def _leave(self) -> None:
        if self._via is not None:
            with _GUARD.lock:
                self._via[0].read_by -= 1
            self._via = None


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

    def is_alone(self, readers: int) -> bool:
        """Return whether one program and so many cells are all that use the array, which may be overwritten."""
        with _GUARD.lock:
            return self.owned and self.users == 1 and self.read_by == readers


_POOL: WeakValueDictionary[tuple[str, tuple[int, ...]], Derived] = WeakValueDictionary()


def find_derived(key: str, serials: tuple[int, ...]) -> Derived | None:
    """Return what was computed by a recipe from these cells, if it is still in use."""
    return _POOL.get((key, serials))


def pooled(key: str, derived: Derived) -> Derived:
    """Return the one value of a recipe for these cells: what is in use already, or the new one."""
    with _GUARD.lock:
        return _POOL.setdefault((key, derived.serials), derived)
