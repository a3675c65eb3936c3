# SPDX-License-Identifier: Apache-2.0
"""Which node made the first NaN or infinity of a run.

After every node its results are scanned. A node is guilty if a result has such an element and no operand has one: what
merely passes them on (a mask of -inf, a NaN in the caller's data) is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from rlx.backends.protocol import CompiledGraph, Run, WatchableGraph, watchable
from rlx.base import config
from rlx.base.dims import evaluate
from rlx.base.errors import ExecutionError, UsageError
from rlx.base.numeric import Array
from rlx.kernel.program import NodeInfo, Program, SlotKind, ThunkKind, ValueInfo

__all__ = ["FiniteCheck", "checked_run"]

_MODES: Mapping[str, bool | None] = {
    "": None,
    "0": None,
    "off": None,
    "1": True,
    "on": True,
    "nan": False,
}

_OUTSIDE = (SlotKind.INPUT, SlotKind.WEIGHT, SlotKind.STATE)
"""What no thunk of this run need have written."""


def checked_run(compiled: CompiledGraph, run: Run) -> Run:
    """Return how to run a compiled graph: as it is, or with the check that `RLX_NAN_CHECK` asks for.

    Args:
        compiled: what is looked into.
        run: runs it.

    Raises:
        UsageError: the knob has another value, or the device cannot be watched.
    """
    text = config.NAN_CHECK.get()
    if text not in _MODES:
        raise UsageError(f"RLX_NAN_CHECK is 1 (NaN and infinities), nan, or 0, not {text!r}")
    infinities = _MODES[text]
    if infinities is None:
        return run
    check = FiniteCheck(watchable(compiled, "RLX_NAN_CHECK"), infinities=infinities)
    return lambda inputs, outputs, env: check.run(lambda: run(inputs, outputs, env))


@dataclass(frozen=True)
class _Group:
    """Neighbouring thunks of one node: its results are whole behind the last one."""

    node: NodeInfo
    last: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def _groups(program: Program) -> Iterator[_Group]:
    thunks = program.thunks
    start = 0
    while start < len(thunks):
        stop = start + 1
        while stop < len(thunks) and thunks[stop].node is thunks[start].node:
            stop += 1
        inside = range(start, stop)
        runs = [i for i in inside if thunks[i].kind in (ThunkKind.CALL, ThunkKind.HOST)]
        writes = dict.fromkeys(s for i in runs for s in thunks[i].writes())
        reads = dict.fromkeys(s for i in runs for s in thunks[i].reads() if s not in writes)
        if runs:
            node = thunks[start].node or NodeInfo("the program")
            yield _Group(node, runs[-1], tuple(reads), tuple(writes))
        start = stop


class FiniteCheck:
    """Watches runs of a program for the first node that makes a NaN (or an infinity).

    Args:
        compiled: what runs.
        infinities: whether they count.
    """

    def __init__(self, compiled: WatchableGraph, *, infinities: bool = True) -> None:
        self._compiled = compiled
        self._infinities = infinities
        self._program = compiled.program
        self._groups = {g.last: g for g in _groups(compiled.program)}
        self._types = {
            v.slot: v
            for v in reversed(compiled.program.values)
            if v.dtype.is_float or v.dtype.is_complex
        }
        self._clean: dict[int, bool] = {}
        self._ranges: dict[int, str] = {}

    def run(self, run: Callable[[], None]) -> None:
        """Run once.

        Raises:
            ExecutionError: names the node, and says what its operands were.
        """
        self._clean.clear()
        self._ranges.clear()
        with self._compiled.watched(self._after, self._groups):
            run()

    def _after(self, thunk: int) -> None:
        group = self._groups[thunk]
        bad: tuple[ValueInfo, Array] | None = None
        for slot in group.writes:
            value = self._types.get(slot)
            if value is None:
                continue
            array = self._array(value)
            clean = self._is_clean(array)
            root = self._program.root(slot)
            self._clean[root] = clean and (root == slot or self._clean.get(root, True))
            self._ranges[slot] = _range(array)
            if not clean and bad is None:
                bad = value, array
        if bad is not None and all(self._slot_is_clean(s) for s in group.reads):
            raise ExecutionError(self._message(group, *bad))

    def _array(self, value: ValueInfo) -> Array:
        env = self._compiled.extents()
        return self._compiled.view(
            value.slot, value.dtype, tuple(evaluate(d, env) for d in value.shape)
        )

    def _is_clean(self, array: Array) -> bool:
        found = np.isfinite(array).all() if self._infinities else not np.isnan(array).any()
        return bool(found)

    def _slot_is_clean(self, slot: int) -> bool:
        """Return whether an operand had no such element; arrays of the caller and weights are looked at only now."""
        root = self._program.root(slot)
        if root not in self._clean:
            value = self._types.get(root)
            outside = self._program.slots[root].kind in _OUTSIDE
            self._clean[root] = value is None or not outside or self._is_clean(self._array(value))
        return self._clean[root]

    def _message(self, group: _Group, value: ValueInfo, array: Array) -> str:
        nan, inf = int(np.isnan(array).sum()), int(np.isinf(array).sum())
        wrong = ~np.isfinite(array) if self._infinities else np.isnan(array)
        first = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), array.shape)]
        what = " and ".join(f"{n} {w}" for n, w in ((nan, "NaN"), (inf, "Inf")) if n)
        shown = f"{value.dtype}{list(array.shape)}" + (f" {value.name!r}" if value.name else "")
        operands = "; ".join(self._operand(s) for s in group.reads) or "none"
        also = f" (it does the work of {', '.join(map(repr, group.node.names))})"
        return (
            f"{group.node}{also if len(group.node.names) > 1 else ''} made {what} of {prod(array.shape)} elements "
            f"in its result {shown}, the first at {first}. Its operands: {operands}"
        )

    def _operand(self, slot: int) -> str:
        value = next((v for v in self._program.values if v.slot == slot), None)
        if value is None:
            return "a buffer of its own"
        outside = self._program.slots[self._program.root(slot)].kind in _OUTSIDE
        found = self._ranges.get(slot) or self._ranges.get(self._program.root(slot))
        if found is None and outside and self._program.root(slot) == slot:
            found = _range(self._array(value))
        name = f"{value.name!r} " if value.name else ""
        return f"{name}{value} {found or ''}".rstrip()


def _range(array: Array) -> str:
    """Return the range of the numbers in an array, and how many are none."""
    wide = array if array.dtype.kind in "biuc" else array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    if wide.dtype.kind == "c":
        finite = np.abs(finite)
    odd = array.size - finite.size
    if finite.size == 0:
        return "empty" if array.size == 0 else "without a finite element"
    text = f"in [{float(finite.min()):.6g}, {float(finite.max()):.6g}]"
    return f"{text} but for {odd} that are not finite" if odd else text
