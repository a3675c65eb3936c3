# SPDX-License-Identifier: Apache-2.0
"""Memory access of a function under construction: element alignment only, masked tails, atomics."""

from __future__ import annotations

from rlx.backends.cpu.arithmetic import Arithmetic
from rlx.backends.cpu.lltypes import I1, I8, I32, I64, PTR, VOID, Type, int_type, vec
from rlx.backends.cpu.value import Operand, Value
from rlx.base.errors import BuildError

__all__ = ["MemoryAccess"]

_STACK_LIMIT = 8 << 10
"""Bytes one function may reserve with `alloca`; kernels must stay below 16 KB with what the compiler spills."""


class MemoryAccess(Arithmetic):
    """Loads, stores, gathers, scatters, stack, atomics."""

    # Memory

    def offset(self, pointer: Value, index: Operand, elem: Type = I8) -> Value:
        """Return the pointer `index` elements of type `elem` further (default: bytes)."""
        if isinstance(index, int) and index == 0:
            return pointer
        at = index if isinstance(index, Value) else self.i64(int(index))
        kind = PTR.with_lanes(at.type.lanes)
        text = f"getelementptr {elem.scalar.text}, ptr {pointer.text}, {at.type.text} {at.text}"
        return self.emit(kind, text)

    def load(self, kind: Type, pointer: Value, index: Operand = 0) -> Value:
        """Load a value `index` elements after the pointer."""
        at = self.offset(pointer, index, kind)
        return self.emit(kind, f"load {kind.text}, ptr {at.text}, align {kind.itemsize}")

    def store(self, value: Value, pointer: Value, index: Operand = 0) -> None:
        """Store a value `index` elements after the pointer."""
        at = self.offset(pointer, index, value.type)
        self.line(
            f"store {value.type.text} {value.text}, ptr {at.text}, align {value.type.itemsize}"
        )

    def tail_mask(self, count: Value, kind: Type) -> Value:
        """Return the mask of the first `count` lanes (i64; <= 0 gives none, >= lanes all) for vectors of `kind`."""
        lane_kind = int_type(min(max(kind.bits, 8), 64), kind.lanes)
        limit = self.trunc(self.smin(self.smax(count, 0), kind.lanes), lane_kind.scalar)
        return self.iota(lane_kind).ult(limit)

    def load_masked(
        self, kind: Type, pointer: Value, mask: Value, index: Operand = 0, fill: Operand = 0
    ) -> Value:
        """Load the lanes of the mask; inactive lanes give `fill` and their bytes are not touched."""
        at, other = self.offset(pointer, index, kind), self.lift(fill, kind)
        name = f"llvm.masked.load.{kind.mangled}.p0"
        self.module.declare(name, kind, (PTR, mask.type, kind))
        text = (
            f"call {kind.text} @{name}(ptr align {kind.itemsize} {at.text}, "
            f"{mask.type.text} {mask.text}, {kind.text} {other.text})"
        )
        return self.emit(kind, text)

    def store_masked(self, value: Value, pointer: Value, mask: Value, index: Operand = 0) -> None:
        """Store the lanes of the mask; the bytes of the others are not touched."""
        kind = value.type
        at = self.offset(pointer, index, kind)
        name = f"llvm.masked.store.{kind.mangled}.p0"
        self.module.declare(name, VOID, (kind, PTR, mask.type))
        self.line(
            f"call void @{name}({kind.text} {value.text}, ptr align {kind.itemsize} {at.text}, "
            f"{mask.type.text} {mask.text})"
        )

    def gather(
        self,
        kind: Type,
        pointer: Value,
        indices: Value,
        mask: Value | None = None,
        fill: Operand = 0,
    ) -> Value:
        """Load lane i from `indices[i]` elements after the pointer; inactive lanes give `fill`, untouched."""
        at = self.offset(pointer, indices, kind)
        active = self.const(1, vec(I1, kind.lanes)) if mask is None else mask
        other = self.lift(fill, kind)
        name = f"llvm.masked.gather.{kind.mangled}.{at.type.mangled}"
        self.module.declare(name, kind, (at.type, active.type, kind))
        text = (
            f"call {kind.text} @{name}({at.type.text} align {kind.itemsize} {at.text}, "
            f"{active.type.text} {active.text}, {kind.text} {other.text})"
        )
        return self.emit(kind, text)

    def scatter(
        self, value: Value, pointer: Value, indices: Value, mask: Value | None = None
    ) -> None:
        """Store lane i to `indices[i]` elements after the pointer, in lane order."""
        kind = value.type
        at = self.offset(pointer, indices, kind)
        active = self.const(1, vec(I1, kind.lanes)) if mask is None else mask
        name = f"llvm.masked.scatter.{kind.mangled}.{at.type.mangled}"
        self.module.declare(name, VOID, (kind, at.type, active.type))
        self.line(
            f"call void @{name}({kind.text} {value.text}, {at.type.text} align {kind.itemsize} {at.text}, "
            f"{active.type.text} {active.text})"
        )

    def alloca(self, kind: Type, count: int = 1) -> Value:
        """Reserve stack for `count` elements in the entry block, aligned to 64 bytes.

        Raises:
            BuildError: the function would reserve more than 8 KB.
        """
        self._stack += kind.itemsize * max(kind.lanes, 1) * count
        if self._stack > _STACK_LIMIT:
            raise BuildError(
                f"{self.name} reserves {self._stack} bytes of stack, more than {_STACK_LIMIT}; use scratch"
            )
        with self.at_entry():
            return self.emit(PTR, f"alloca {kind.text}, i64 {count}, align 64")

    def memcpy(self, target: Value, source: Value, size: Operand) -> None:
        """Copy `size` bytes between ranges that do not overlap."""
        self.call("memcpy", target, source, self.lift(size, I64), result=PTR)

    def memset(self, target: Value, byte: Operand, size: Operand) -> None:
        """Set `size` bytes."""
        self.call("memset", target, self.lift(byte, I32), self.lift(size, I64), result=PTR)

    def prefetch(self, pointer: Value, level: int = 1) -> None:
        """Ask for the cache line at the pointer (any address) into cache level 1, 2 or 3."""
        self.module.declare("llvm.prefetch.p0", VOID, (PTR, I32, I32, I32))
        self.line(f"call void @llvm.prefetch.p0(ptr {pointer.text}, i32 0, i32 {4 - level}, i32 1)")

    # Atomics (naturally aligned integers)

    def atomic_load(self, kind: Type, pointer: Value, order: str = "acquire") -> Value:
        """Load atomically."""
        return self.emit(
            kind, f"load atomic {kind.text}, ptr {pointer.text} {order}, align {kind.itemsize}"
        )

    def atomic_store(self, value: Value, pointer: Value, order: str = "release") -> None:
        """Store atomically."""
        kind = value.type
        self.line(
            f"store atomic {kind.text} {value.text}, ptr {pointer.text} {order}, align {kind.itemsize}"
        )

    def atomic_rmw(self, op: str, pointer: Value, value: Value, order: str = "acq_rel") -> Value:
        """Read, apply `op` (add, sub, xchg, and, or, min, umin, ...) and write atomically; returns the old value."""
        text = f"atomicrmw {op} ptr {pointer.text}, {value.type.text} {value.text} {order}, align {value.type.itemsize}"
        return self.emit(value.type, text)

    def compare_exchange(
        self, pointer: Value, expected: Value, desired: Value
    ) -> tuple[Value, Value]:
        """Replace `expected` by `desired` atomically; returns the old value and whether it was replaced (i1)."""
        kind = expected.type.text
        pair = self.fresh("pair")
        self.line(
            f"%{pair} = cmpxchg ptr {pointer.text}, {kind} {expected.text}, {kind} {desired.text} acq_rel acquire, "
            f"align {expected.type.itemsize}"
        )
        old = self.emit(expected.type, f"extractvalue {{ {kind}, i1 }} %{pair}, 0")
        return old, self.emit(I1, f"extractvalue {{ {kind}, i1 }} %{pair}, 1")

    def pause(self) -> None:
        """Tell the core that this is a spin loop."""
        if self.isa.is_x86:
            self.intrinsic("x86.sse2.pause")
        else:
            self.intrinsic("aarch64.hint", 1)
