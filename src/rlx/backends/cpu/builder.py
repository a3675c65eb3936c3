# SPDX-License-Identifier: Apache-2.0
"""A typed builder of textual LLVM IR: values with operators, structured control flow, masked memory access.

What it holds for all emitted code:

- The text is a function of the calls alone: the same calls give the same bytes.
- Loads and stores assume element alignment only. Tails go through `load_masked` and `store_masked`, which touch no
  byte of an inactive lane.
- No fast-math flag, no contraction: `a * b + c` rounds twice, `fma` once, on every target.
- No operation with undefined results: shifts select 0 when the amount reaches the width, division guards its
  divisor, float to integer conversion saturates.
- Arithmetic on `half` and `bfloat` is refused: narrow floats are computed in f32 (`rlx.backends.cpu.vmath` converts).
- Target intrinsics go through `Function.intrinsic`, which knows the features each one needs.

Comparison operators `< <= > >=` are ordered for floats (false with a NaN) and signed for integers; unsigned
comparisons are the methods `ult`, `ule`, `ugt`, `uge`. Equality is `eq` and `ne`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlx.backends.cpu.abi import Emitted, Kernel
from rlx.backends.cpu.function import Function, IfElse, Loop, While
from rlx.backends.cpu.lltypes import VOID, Type, literal
from rlx.backends.cpu.value import Number, Operand, Value

if TYPE_CHECKING:
    from rlx.backends.cpu.isa import Isa

__all__ = ["Function", "IfElse", "Loop", "Module", "Number", "Operand", "Value", "While"]


class Module:
    """One unit of emitted code.

    Args:
        isa: the target; it decides which intrinsics exist.
    """

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self._functions: list[str] = []
        self._declared: dict[str, str] = {}
        self._tables: dict[str, str] = {}
        self._names: set[str] = set()
        self.exports: list[tuple[str, str]] = []
        """Placeholder and form of every symbol whose name depends on the finished text."""
        self.needs: list[Emitted] = []

    def declare(self, name: str, result: Type, args: tuple[Type, ...]) -> None:
        """Declare an external function or intrinsic."""
        if name not in self._declared:
            self._declared[name] = (
                f"declare {result.text} @{name}({', '.join(a.text for a in args)})"
            )

    def unique(self, hint: str) -> str:
        """Return a global name not used yet in this module."""
        name, count = hint, 1
        while name in self._names:
            count += 1
            name = f"{hint}.{count}"
        self._names.add(name)
        return name

    @contextmanager
    def function(
        self,
        hint: str,
        params: Sequence[tuple[str, Type]],
        result: Type = VOID,
        *,
        exported: bool = False,
    ) -> Generator[Function]:
        """Emit a function; internal unless exported. Its name is the hint, made unique in this module."""
        name = self.unique(hint)
        linkage = "" if exported else "internal "
        text = ", ".join(f"{kind.text} %{arg}" for arg, kind in params)
        fn = Function(
            self, name, result, params, f"define {linkage}{result.text} @{name}({text}) #0 {{"
        )
        yield fn
        self._functions.append(fn.render())

    def table(self, hint: str, numbers: Sequence[Number], elem: Type) -> str:
        """Add a constant array (once) and return its name, for `Function.address_of`."""
        body = ", ".join(f"{elem.text} {literal(n, elem)}" for n in numbers)
        value = f"[{len(numbers)} x {elem.text}] [{body}]"
        if value not in self._tables:
            self._tables[value] = self.unique(hint)
        return self._tables[value]

    @contextmanager
    def kernel(self, hint: str, nargs: int) -> Generator[Kernel]:
        """Emit a kernel of the native ABI; its symbol is known after `finish`. See `rlx.backends.cpu.abi`."""
        kernel = Kernel(self, hint, nargs)
        yield kernel
        self._functions.append(kernel.render())

    @contextmanager
    def shared(self, hint: str, params: Sequence[tuple[str, Type]]) -> Generator[Function]:
        """Emit a function for other units, which declare that they need this one; `finish` names it."""
        name = self.export(hint)
        text = ", ".join(f"{kind.text} %{arg}" for arg, kind in params)
        fn = Function(self, name, VOID, params, f"define void @{name}({text}) #0 {{")
        yield fn
        self._functions.append(fn.render())

    def export(self, form: str) -> str:
        """Return a placeholder for the symbol that `finish` makes of a form."""
        placeholder = f"$export{len(self.exports)}$"
        self.exports.append((placeholder, form))
        return placeholder

    def need(self, unit: Emitted) -> None:
        """Have a unit linked with this one, whose code may then call its symbols by name."""
        self.needs.append(unit)

    def body(self) -> str:
        """Return the text with placeholders for kernel symbols."""
        declared = [self._declared[name] for name in sorted(self._declared)]
        attributes = 'attributes #0 = { nounwind "frame-pointer"="all" }\n'
        tables = [
            f"@{name} = private unnamed_addr constant {value}, align 64"
            for value, name in self._tables.items()
        ]
        return "\n".join([*tables, *declared, *self._functions, attributes])
