# SPDX-License-Identifier: Apache-2.0
"""Who may touch which bytes when: the order of work on streams, by vector clocks.

The host and every stream are *parties*. Each counts its own steps and knows, of every other party, up to which step
that one is done before anything the party does next. Two accesses to the same bytes, one of them a write, are in order
if the party of the second knew the step of the first.

Source: Lamport, Time, clocks and the ordering of events in a distributed system, 1978; Mattern, Virtual time and global
states of distributed systems, 1989.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlx.base.errors import DeviceError

__all__ = ["Access", "Ledger", "Party"]


class Party:
    """The host, or a stream.

    Attributes:
        name: for messages.
        steps: how many it has made.
        known: what it knows of others, itself included.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self.known: dict[Party, int] = {}

    def step(self) -> int:
        """Return the number of the next step, and make it."""
        self.steps += 1
        self.known[self] = self.steps
        return self.steps

    def learn(self, known: Mapping[Party, int]) -> None:
        """Know what another one knows."""
        for party, step in known.items():
            if step > self.known.get(party, 0):
                self.known[party] = step

    def knows(self, access: Access) -> bool:
        """Return whether an access comes before whatever this party does next."""
        return self.known.get(access.party, 0) >= access.step


@dataclass(frozen=True)
class Access:
    """Somebody reads or writes bytes.

    Attributes:
        start: first byte.
        stop: end, exclusive.
        writes: whether it writes.
        party: who.
        step: when.
        what: for messages.
    """

    start: int
    stop: int
    writes: bool
    party: Party
    step: int
    what: str


@dataclass
class Ledger:
    """The accesses to one allocation that later ones may have to be ordered after."""

    _accesses: list[Access] = field(default_factory=list[Access])

    def enter(self, new: Access) -> None:
        """Enter an access by a party that has made its step.

        Raises:
            DeviceError: it is not ordered after one that touches the same bytes.
        """
        kept: list[Access] = []
        for old in self._accesses:
            meets = old.start < new.stop and new.start < old.stop
            if meets and (old.writes or new.writes) and not new.party.knows(old):
                raise DeviceError(
                    f"{new.what} on {new.party.name} may come before {old.what} on {old.party.name} is done, and both "
                    f"use the same bytes; make one wait for an event of the other"
                )
            covered = new.start <= old.start and old.stop <= new.stop
            # What comes after the new access comes after what that one was ordered after.
            if not (covered and new.party.knows(old) and (new.writes or not old.writes)):
                kept.append(old)
        self._accesses = [*kept, new]

    def pending(self, party: Party) -> Access | None:
        """Return an access that the party does not know to be over."""
        return next((a for a in self._accesses if not party.knows(a)), None)
