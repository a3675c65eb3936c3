# SPDX-License-Identifier: Apache-2.0
"""Operators that a program registers at run time: a NumPy function with a type rule, kernels if there are any.

A registered operator is an ordinary one (text form, type rule, reference) with three differences: nothing folds, merges
or moves it, since its function may have effects; it may raise whatever it likes; and its name can be given up again.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, RlxError, TypeRuleError, UsageError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType
from rlx.ir.graph import Value
from rlx.ir.op import Op, lookup_op, register_op, registered_ops, unregister_op
from rlx.ops.spec import emit

__all__ = ["Attribute", "Custom", "CustomOperator", "HostKernel", "NativeKernel", "custom_version"]

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_REQUIRED: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Attribute:
    """A keyword-only parameter of a registered function.

    Attributes:
        name: of the parameter.
        kind: `int`, `float`, `bool`, `str` or `DType`; of the elements if `many`.
        many: it is a tuple of them.
        default: `inspect.Parameter.empty` if it must be given.
    """

    name: str
    kind: type[Any]
    many: bool = False
    default: Any = _REQUIRED

    def convert(self, value: Any) -> Any:
        """Return a value as the attribute keeps it.

        Raises:
            UsageError: it is of another type.
        """
        if not self.many:
            return self._one(value)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(value)
        return tuple(self._one(v) for v in cast("Sequence[Any]", value))

    def _one(self, value: Any) -> Any:
        if self.kind is DType:
            return DType.of(value)
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, np.generic):
            value = cast("Any", value).item()
        if not isinstance(value, self.kind) or (self.kind is int and isinstance(value, bool)):
            raise self._wrong(value)
        return value

    def _wrong(self, value: Any) -> UsageError:
        kind = f"tuple of {self.kind.__name__}" if self.many else self.kind.__name__
        return UsageError(f"attribute {self.name!r} is a {kind}, not {value!r}")


@dataclass(frozen=True)
class HostKernel:
    """Python that writes results into views of the program's own memory."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class NativeKernel:
    """Python that emits a kernel for one combination of types and attributes.

    Attributes:
        build: emits; what it is given is the backend's matter.
        chunks: (types, attributes) -> into how many independent parts a run may be split; None: one.
    """

    build: Callable[..., Any]
    chunks: Callable[..., Dim] | None = None


@dataclass(frozen=True)
class Custom(Op):
    """Base of registered operators; each has a class of its own, whose fields are its attributes."""

    foldable = False
    precision_class = OpClass.FIXED
    operator: ClassVar[CustomOperator]

    def values(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {a.name: getattr(self, a.name) for a in self.operator.attributes}

    def infer(self, *types: TensorType | None) -> Any:  # noqa: D102
        return self.operator.infer_types(types, self.values())

    def reference(self, *arrays: Array | None) -> Any:  # noqa: D102
        return self.operator.function(*arrays, **self.values())

    def may_fail(self, *types: Any) -> bool:  # noqa: D102
        del types
        return True

    def run_on(
        self,
        kernel: HostKernel,
        operands: Sequence[Array | None],
        results: Sequence[Array],
        where: str,
    ) -> None:
        """Run a host kernel on views; what it raises passes through with the node's name as a note.

        Raises:
            ExecutionError: it returned something instead of writing its results.
        """
        out: Any = results[0] if len(results) == 1 else tuple(results)
        for operand in operands:
            if operand is not None:
                operand.flags.writeable = False
        try:
            returned = kernel.function(*operands, out=out, **self.values())
        except Exception as error:
            error.add_note(f"in {where}")
            raise
        if returned is not None and returned is not out:
            raise ExecutionError(
                f"{where}: the kernel returned a {type(returned).__name__}; it has to write into `out`"
            )

    def __reduce__(self) -> Any:
        return _rebuild, (self.name, self.values())


def _rebuild(name: str, attributes: Mapping[str, Any]) -> Custom:
    return _lookup(name).op(**attributes)


def _lookup(name: str) -> CustomOperator:
    found = lookup_op(name)
    if found is None or not issubclass(found, Custom):
        raise UsageError(f"operator {name!r} is not registered here; run its `rlx.op` first")
    return found.operator


def custom_version(name: str) -> str | None:
    """Return the stamp of a registered operator, None if there is none of that name."""
    found = lookup_op(name)
    return found.operator.stamp if found is not None and issubclass(found, Custom) else None


@dataclass(eq=False)
class CustomOperator:
    """A registered operator: call it on values of a graph; add kernels and a gradient.

    Attributes:
        name: with a namespace, such as ``example.scale``.
        function: its NumPy meaning.
        rule: its type rule.
        version: changes whenever its meaning or a kernel does; empty: programs with it are not kept on disk.
        operands: names of its operands; one that may be left out ends in `?`, a variadic one in `*`.
        attributes: its keyword-only parameters.
        kernels: by backend.
        gradient: makes the gradients of the operands out of operands, results and results' gradients.
        cleanup: what else has to go when the name is given up.
        op: the class of its nodes' operators.
    """

    name: str
    function: Callable[..., Any]
    rule: Callable[..., Any]
    version: str = ""
    operands: tuple[str, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    kernels: dict[str, HostKernel | NativeKernel] = field(
        default_factory=dict[str, HostKernel | NativeKernel]
    )
    gradient: Callable[..., Any] | None = None
    cleanup: Callable[[], None] | None = None
    op: type[Custom] = field(init=False)

    def __post_init__(self) -> None:
        self.__doc__ = inspect.getdoc(self.function)
        self.operands, self.attributes = _parameters(self.name, self.function)
        fields = [
            (a.name, Any, dataclasses.field(default=a.default))
            if a.default is not _REQUIRED
            else (a.name, Any)
            for a in sorted(self.attributes, key=lambda a: a.default is not _REQUIRED)
        ]
        title = "".join(part.title() for part in re.split(r"[._]", self.name))
        namespace = {
            "__doc__": self.__doc__ or f"The registered operator {self.name}.",
            "__module__": self.function.__module__,
            "operands": self.operands,
            "operator": self,
        }
        made = dataclasses.make_dataclass(
            title, fields, bases=(Custom,), frozen=True, namespace=namespace
        )
        made.__module__ = self.function.__module__  # Python 3.12 and later set it to this module
        self.op = cast("type[Custom]", made)

    @property
    def stamp(self) -> str:
        """What compiled programs depend on: the version and which kernels there are; empty without a version."""
        kernels = [f"{backend}={type(k).__name__}" for backend, k in sorted(self.kernels.items())]
        return " ".join([self.version, *kernels]) if self.version else ""

    # -- registration ------------------------------------------------------------------------------------------------

    def register(self, *, replace: bool = False) -> None:
        """Enter the operator under its name.

        Raises:
            UsageError: the name has no namespace, or is taken.
        """
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is no name of an operator; give it a namespace, such as 'example.scale'"
            )
        space = self.name.partition(".")[0]
        own = {
            n.partition(".")[0] for n, c in registered_ops().items() if not issubclass(c, Custom)
        }
        if space in own | {"cpu", "cuda", "metal", "rlx"}:
            raise UsageError(
                f"the namespace {space!r} of {self.name!r} is rlx's own; choose another"
            )
        known = lookup_op(self.name)
        if known is not None and not replace:
            raise UsageError(
                f"operator {self.name!r} is registered already, by {known.__module__}; choose another name, "
                "call its `unregister()` first, or pass replace=True"
            )
        if known is not None:
            cast("type[Custom]", known).operator.unregister()
        register_op(self.op, self.name)

    def unregister(self) -> None:
        """Give up the name. Graphs and executables that have the operator keep it.

        Raises:
            UsageError: it is not registered (any more).
        """
        if lookup_op(self.name) is not self.op:
            raise UsageError(f"operator {self.name!r} is not registered, or replaced by another")
        unregister_op(self.name)
        if self.cleanup is not None:
            self.cleanup()

    def kernel(self, backend: str) -> Callable[[_Function], _Function]:
        """Register the decorated function as what a backend runs instead of the reference.

        It is called with one view per operand (None where left out), `out` (a view, or a tuple of them if there are
        several results) and the attributes. Views lie in the program's own memory, in the dtypes of the graph: those
        of operands are read-only, and all of them mean nothing once it has returned.
        """

        def declare(function: _Function) -> _Function:
            self._add(backend, HostKernel(function))
            return function

        return declare

    def native_kernel(
        self, backend: str = "cpu", *, chunks: Callable[..., Dim] | None = None
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function as the emitter of a backend's kernel.

        Args:
            backend: for ``cpu`` see `rlx.backends.cpu.kernels.custom`.
            chunks: (types of the operands, attributes) -> extent: into how many parts a run may be split.
        """

        def declare(function: _Function) -> _Function:
            self._add(backend, NativeKernel(function, chunks))
            return function

        return declare

    def vjp(self, function: _Function) -> _Function:
        """Register the decorated function as the gradient.

        It is called while a graph is built, with the operands, `results` and `gradients` (tuples of values) and the
        attributes, and returns a gradient per operand (None where there is none).
        """
        self.gradient = function
        return function

    def _add(self, backend: str, kernel: HostKernel | NativeKernel) -> None:
        if backend in self.kernels:
            raise UsageError(f"operator {self.name!r} has a kernel for {backend!r} already")
        self.kernels[backend] = kernel

    # -- use ---------------------------------------------------------------------------------------------------------

    def __call__(self, *operands: Value | None, **attributes: Any) -> Any:
        """Add a node to the graph being built; return its result, or a tuple of them.

        Raises:
            UsageError: attributes are missing, unknown or of another type.
            TypeRuleError: the operands are not accepted.
        """
        results = emit(self.make(attributes), *operands)
        return results[0] if len(results) == 1 else results

    def make(self, attributes: Mapping[str, Any]) -> Custom:
        """Return the operator with these attributes."""
        known = {a.name: a for a in self.attributes}
        unknown = [name for name in attributes if name not in known]
        missing = [n for n, a in known.items() if a.default is _REQUIRED and n not in attributes]
        if unknown or missing:
            what = f"has no attribute {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
            listed = ", ".join(known) or "none"
            raise UsageError(f"operator {self.name} {what}; its attributes are {listed}")
        return self.op(**{name: known[name].convert(v) for name, v in attributes.items()})

    def infer_types(
        self, types: Sequence[TensorType | None], attributes: Mapping[str, Any]
    ) -> tuple[TensorType, ...]:
        """Return the result types by the registered rule.

        Raises:
            TypeRuleError: the rule raised, or gave no types.
        """
        self._check_count(types)
        try:
            found: Any = self.rule(*types, **attributes)
        except RlxError:
            raise
        except Exception as error:
            raise TypeRuleError(f"its type rule raised {type(error).__name__}: {error}") from error
        results = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
        if not results or not all(isinstance(r, TensorType) for r in results):
            raise TypeRuleError(
                f"its type rule returned {found!r}, not an rlx.TensorType or a tuple of them"
            )
        return results

    def _check_count(self, types: Sequence[TensorType | None]) -> None:
        variadic = bool(self.operands) and self.operands[-1].endswith("*")
        needed = [n for n in self.operands if n[-1] not in "*?"]
        if len(types) < len(needed) or (len(types) > len(self.operands) and not variadic):
            raise TypeRuleError(f"takes ({', '.join(self.operands)}), not {len(types)} operands")
        for name, given in zip(self.operands, types, strict=False):
            if given is None and not name.endswith("?"):
                raise TypeRuleError(f"operand {name!r} may not be left out")

    def __reduce__(self) -> Any:
        return _lookup, (self.name,)

    def __repr__(self) -> str:
        return f"<CustomOperator {self.name}({', '.join(self.operands)})>"


# -- what a function's parameters say ------------------------------------------------------------------------------


def _parameters(
    name: str, function: Callable[..., Any]
) -> tuple[tuple[str, ...], tuple[Attribute, ...]]:
    operands: list[str] = []
    attributes: list[Attribute] = []
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise UsageError(f"the annotations of operator {name!r} cannot be read: {error}") from error
    for p in inspect.signature(function).parameters.values():
        match p.kind:
            case p.KEYWORD_ONLY:
                attributes.append(_attribute(name, p, hints.get(p.name)))
            case p.VAR_POSITIONAL:
                operands.append(f"{p.name}*")
            case p.VAR_KEYWORD:
                raise UsageError(f"operator {name!r}: attributes have names; **{p.name} has none")
            case _ if p.default is p.empty:
                operands.append(p.name)
            case _ if p.default is None:
                operands.append(f"{p.name}?")
            case _:
                raise UsageError(
                    f"operator {name!r}: operand {p.name!r} has the default {p.default!r}; an operand may only default "
                    "to None, and attributes are keyword-only parameters"
                )
    return tuple(operands), tuple(attributes)


_KINDS = (int, float, bool, str, DType)


def _attribute(name: str, parameter: inspect.Parameter, hint: Any) -> Attribute:
    default: Any = parameter.default
    if hint is None and default is not _REQUIRED:
        hint = cast("Any", type(default))
    many = typing.get_origin(hint) is tuple
    args = typing.get_args(hint)
    kind: Any = args[0] if many and len(args) == 2 and args[1] is Ellipsis else hint
    if kind not in _KINDS or (many and kind is DType):
        raise UsageError(
            f"operator {name!r}: attribute {parameter.name!r} needs an annotation int, float, bool, str, DType, or a "
            f"tuple such as tuple[int, ...]; found {hint!r}"
        )
    found = Attribute(parameter.name, kind, many, default)
    return (
        found
        if default is _REQUIRED
        else dataclasses.replace(found, default=found.convert(default))
    )
