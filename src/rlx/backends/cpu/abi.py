# SPDX-License-Identifier: Apache-2.0
"""Kernels of the native ABI: `void kernel(ptr ctx, ptr args, i64 begin, i64 end, i64 tid)`.

A kernel does chunks `begin` to `end` (exclusive). What a chunk computes depends on its index and the extents only,
so results do not depend on how the chunks are split over threads. `args` holds i64 indices: of a buffer in
`ctx.slots`, or of an extent in `ctx.dims`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx.backends.cpu.function import Function
from rlx.backends.cpu.lltypes import I64, PTR, VOID, Type
from rlx.backends.cpu.words import CTX, Failure
from rlx.base.errors import BuildError

if TYPE_CHECKING:
    from rlx.backends.cpu.builder import Module
    from rlx.backends.cpu.value import Operand, Value

__all__ = ["CTX", "Emitted", "Failure", "Kernel", "finish"]


@dataclass(frozen=True)
class Emitted:
    """Finished text.

    Attributes:
        symbols: symbols of what it exports, in the order they were emitted.
        text: LLVM IR, ready for `rlx.backends.cpu.jit`.
        needs: other units whose symbols it calls.
    """

    symbols: tuple[str, ...]
    text: str
    needs: tuple[Emitted, ...] = ()

    def units(self) -> Iterator[Emitted]:
        """Iterate this unit and every one that it needs, directly or not; some may come repeatedly."""
        yield self
        for unit in self.needs:
            yield from unit.units()

    @property
    def symbol(self) -> str:
        """The symbol of the only kernel."""
        if len(self.symbols) != 1:
            raise BuildError(f"expected one kernel, found {self.symbols}")
        return self.symbols[0]


_PARAMS = (("ctx", PTR), ("args", PTR), ("begin", I64), ("end", I64), ("tid", I64))
_FORM = re.compile(r"[a-z][a-z0-9_]*")


class Kernel(Function):
    """A kernel under construction: a `Function` with the operands of the ABI.

    Attributes:
        form: the middle part of its symbol `rlx_<form>_<key8>`.
        ctx: the context pointer.
        begin: first chunk, i64.
        end: one past the last chunk, i64.
        tid: participant number, i64.
    """

    def __init__(self, module: Module, form: str, nargs: int) -> None:
        if not _FORM.fullmatch(form):
            raise BuildError(
                f"kernel form {form!r} must be lower case letters, digits and underscores"
            )
        name = module.export(form)
        params = ", ".join(f"{kind.text} %{name}" for name, kind in _PARAMS)
        super().__init__(
            module,
            name,
            VOID,
            _PARAMS,
            f"define void @{name}({params}) #0 {{",
        )
        self.form = form
        self.nargs = nargs
        self.ctx, self._args, self.begin, self.end, self.tid = self.args
        self._words: dict[int, Value] = {}
        self._indices: dict[int, Value] = {}
        self._slots: dict[int, Value] = {}
        self._dims: dict[int, Value] = {}
        self._scratch: Value | None = None

    def _word(self, word: CTX, kind: Type) -> Value:
        if word not in self._words:
            with self.at_entry():
                self._words[word] = self.load(kind, self.offset(self.ctx, 8 * word))
        return self._words[word]

    def _index(self, argument: int) -> Value:
        if not 0 <= argument < self.nargs:
            raise BuildError(
                f"kernel {self.form} has {self.nargs} arguments, {argument} was asked for"
            )
        if argument not in self._indices:
            with self.at_entry():
                self._indices[argument] = self.load(I64, self._args, argument)
        return self._indices[argument]

    def slot(self, argument: int) -> Value:
        """Return the buffer pointer that argument names; loaded once, at entry."""
        if argument not in self._slots:
            base, index = self._word(CTX.SLOTS, PTR), self._index(argument)
            with self.at_entry():
                self._slots[argument] = self.load(PTR, base, index)
        return self._slots[argument]

    def dim(self, argument: int) -> Value:
        """Return the extent (i64) that argument names; loaded once, at entry."""
        if argument not in self._dims:
            base, index = self._word(CTX.DIMS, PTR), self._index(argument)
            with self.at_entry():
                self._dims[argument] = self.load(I64, base, index)
        return self._dims[argument]

    def scratch(self) -> Value:
        """Return this participant's scratch block (its size comes from the plan)."""
        if self._scratch is None:
            base, stride = self._word(CTX.SCRATCH, PTR), self._word(CTX.SCRATCH_STRIDE, I64)
            with self.at_entry():
                self._scratch = self.offset(base, self.tid * stride)
        return self._scratch

    def fail(self, kind: Failure, flat_index: Operand) -> None:
        """Record a failure of the element `flat_index`; of several the least index is kept, then the least kind."""
        code = self.lift(flat_index, I64) * 256 + int(kind)
        self.atomic_rmw("min", self.offset(self.ctx, 8 * CTX.ERROR), code, "monotonic")

    def fail_where(self, mask: Value, kind: Failure, flat_index: Operand, stride: int = 1) -> None:
        """Record a failure when any lane of the mask is set; lane i stands for element flat_index + i * stride."""
        with self.if_(self.any(mask)):
            at = self.lift(flat_index, I64)
            if mask.type.lanes:
                # A 64-bit integer holds every mask: vectors have at most 64 lanes.
                bits = self.resize(self.mask_bits(mask), I64, signed=False)
                at = at + self.count_trailing_zeros(bits) * stride
            self.fail(kind, at)


def finish(module: Module) -> Emitted:
    """Name the exports of a module and return its text.

    The symbol is `rlx_<form>_<key8>`; key8 is the first 8 digits of the SHA-256 of the text, so equal code has equal
    names and different code in one program does not collide.
    """
    text = module.body()
    key = hashlib.sha256(text.encode()).hexdigest()[:8]
    symbols: list[str] = []
    for index, (placeholder, form) in enumerate(module.exports):
        suffix = f"_{index}" if len(module.exports) > 1 else ""
        symbols.append(f"rlx_{form}{suffix}_{key}")
        text = text.replace(placeholder, symbols[-1])
    return Emitted(tuple(symbols), text, tuple(module.needs))
