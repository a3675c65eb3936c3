# SPDX-License-Identifier: Apache-2.0
"""How an operator is declared: `@op`, `@elementwise`, samples, and calling operators on values.

An operator is written once, in one file. From the declaration follow its text form, hashing, the documentation's
row, the conformance tests, its NumPy meaning where a body gives it, and the code every backend generates.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import TensorType, broadcast_shapes
from rlx.expr.body import Body, Scalar, trace
from rlx.expr.evaluate import evaluate_body
from rlx.ir.builder import Builder
from rlx.ir.graph import Value
from rlx.ir.op import Op, register_op

__all__ = [
    "ElementwiseDecl",
    "ElementwiseOp",
    "Operand",
    "Sample",
    "building",
    "current_builder",
    "elementwise",
    "emit",
    "emit_one",
    "op",
    "operands",
]

Declared = TypeVar("Declared", bound=type[Op])


@dataclass(frozen=True)
class Operand:
    """How the conformance suite makes one operand.

    Attributes:
        shape: static extents; the suite also makes them symbolic, zero and one where the rule allows.
        dtype: a fixed dtype, or None for "each dtype of the operator's domain".
        fill: `normal`, `positive`, `unit` (in (-1, 1)), `special` (NaN, infinities, zeros, denormals), `nonzero`,
            `bool`, `index` (integers in [-limit, limit)), `bits` (any integer of the dtype), `sorted`.
        limit: bound of `index`.
    """

    shape: tuple[int, ...]
    dtype: DType | None = None
    fill: str = "normal"
    limit: int = 0


@dataclass(frozen=True)
class Sample:
    """One conformance case: attributes, operands (None = absent), and the expected error text if it must fail."""

    operands: tuple[Operand | None, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    error: str = ""


def op(name: str) -> Callable[[Declared], Declared]:
    """Register a frozen dataclass as the operator `name`."""

    def register(cls: Declared) -> Declared:
        register_op(cls, name)
        return cls

    return register


_BUILDER: ContextVar[Builder | None] = ContextVar("rlx_builder", default=None)


class building:  # noqa: N801  (used like a function: `with building(builder):`)
    """Make a builder the one that operators called on values emit into."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def __enter__(self) -> Builder:
        self._token = _BUILDER.set(self._builder)
        return self._builder

    def __exit__(self, *_: object) -> None:
        _BUILDER.reset(self._token)


def current_builder() -> Builder:
    """Return the builder in effect.

    Raises:
        TypeRuleError: none is, so there is no graph to add to.
    """
    builder = _BUILDER.get()
    if builder is None:
        raise TypeRuleError(
            "no graph is being built here; use `with rlx.Graph(...)` or `building(builder)`"
        )
    return builder


def emit(op_: Op, *values: Value | None) -> tuple[Value, ...]:
    """Append a node to the graph being built and return its results."""
    return current_builder().emit(op_, *values)


def emit_one(op_: Op, *values: Value | None) -> Value:
    """Append a node with one result to the graph being built and return it."""
    return current_builder().emit_one(op_, *values)


def operands(count: int, first: str = "x") -> tuple[str, ...]:
    """Return positional operand names."""
    return tuple(f"{first}{i}" for i in range(count)) if count > 1 else (first,)


@dataclass(frozen=True)
class ElementwiseOp(Op):
    """Base of operators that compute one element from one element of each operand, with NumPy broadcasting."""

    precision_class = OpClass.ELEMENTWISE

    decl: ClassVar[ElementwiseDecl[Any]]
    region: ClassVar[Callable[..., Any]]
    """Returns the operator as a `Region` over its broadcast shape; set by `rlx.ops.region`."""

    def body(self, *dtypes: DType) -> Body:
        """Return what is computed per element, for operand dtypes."""
        attributes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return self.decl.trace(dtypes, attributes)

    def infer(self, *types: TensorType) -> TensorType:  # noqa: D102
        decl = self.decl
        dtypes = tuple(t.dtype for t in types)
        decl.check(dtypes)
        (result,) = self.body(*dtypes).result_types
        return TensorType(result, broadcast_shapes(*(t.shape for t in types)))

    def reference(self, *arrays: Array) -> Array:  # noqa: D102
        (result,) = evaluate_body(self.body(*(DType.of(a.dtype) for a in arrays)), arrays)
        return result

    def may_fail(self, *types: TensorType) -> bool:  # noqa: D102
        return any(
            i.op in ("div", "mod", "fmod") and i.dtype.is_integer for i in self._instrs(types)
        )

    def _instrs(self, types: Sequence[TensorType]) -> Iterable[Any]:
        return self.body(*(t.dtype for t in types)).instrs


Handle = TypeVar("Handle", Scalar, Value)


class ElementwiseDecl(Generic[Handle]):
    """An elementwise operator: call it on values to add a node, or on scalars inside another operator's body."""

    def __init__(
        self,
        function: Callable[..., Scalar],
        domain: frozenset[DType],
        samples: Sequence[Sample],
        mixed: tuple[int, ...],
    ) -> None:
        self.function = function
        self.domain = domain
        self.mixed = mixed
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        parameters = inspect.signature(function).parameters.values()
        self.arity = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        fields = [
            (p.name, Any, dataclasses.field(default=p.default))
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
        ]
        title = "".join(part.title() for part in self.__name__.split("_"))
        namespace = {"__doc__": function.__doc__, "decl": self, "__module__": function.__module__}
        if fields:
            cls = dataclasses.make_dataclass(
                title, fields, bases=(ElementwiseOp,), frozen=True, namespace=namespace
            )
            cls.__module__ = function.__module__  # Python 3.12 and later set it to this module
        else:  # inherits all a dataclass without fields needs; making one costs 0.5 ms for each of 70 operators
            cls = type(title, (ElementwiseOp,), namespace)
        self.op = cast("type[ElementwiseOp]", cls)
        self.op.operands = tuple(list(inspect.signature(function).parameters)[: self.arity])
        self.op.samples = tuple(samples)  # pyright: ignore[reportAttributeAccessIssue]
        register_op(self.op, self.__name__)
        self._traced: dict[Any, Body] = {}

    def check(self, dtypes: tuple[DType, ...]) -> None:
        """Raise TypeRuleError unless the operand dtypes are in the domain and agree."""
        if len(dtypes) != self.arity:
            raise TypeRuleError(f"takes {self.arity} operands, not {len(dtypes)}")
        agreeing = [d for i, d in enumerate(dtypes) if i not in self.mixed]
        for dtype in agreeing:
            if dtype not in self.domain:
                names = ", ".join(sorted(d.value for d in self.domain))
                raise TypeRuleError(f"does not accept {dtype}; accepts {names}")
            if dtype is not agreeing[0]:
                raise TypeRuleError(
                    f"operands have different dtypes: {', '.join(map(str, dtypes))}; cast first"
                )

    def trace(self, dtypes: tuple[DType, ...], attributes: dict[str, Any]) -> Body:
        """Return the body for operand dtypes and attributes."""
        key = (dtypes, tuple(attributes.items()))
        body = self._traced.get(key)
        if body is None:
            body = trace(lambda *xs: self.function(*xs, **attributes), dtypes)
            self._traced[key] = body
        return body

    def __call__(self, *args: Any, **attributes: Any) -> Any:
        """Apply to scalars (inside a body) or to values (adds a node)."""
        if any(isinstance(a, Scalar) for a in args):
            return self.function(*args, **attributes)
        return emit_one(self.op(**attributes), *args)


def elementwise(
    domain: frozenset[DType], *, samples: Sequence[Sample] = (), mixed: tuple[int, ...] = ()
) -> Callable[[Callable[..., Scalar]], ElementwiseDecl[Any]]:
    """Declare an elementwise operator by its scalar function.

    Positional parameters are operands, keyword-only parameters with defaults are attributes.

    Args:
        domain: dtypes its operands may have (all the same one).
        samples: conformance cases; the default is normal and special values in a few shapes.
        mixed: positions of operands whose dtype is free (a condition).
    """

    def declare(function: Callable[..., Scalar]) -> ElementwiseDecl[Any]:
        return ElementwiseDecl(function, domain, samples, mixed)

    return declare
