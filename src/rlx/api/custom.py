# SPDX-License-Identifier: Apache-2.0
"""`rlx.op`: operators that a program registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before its modules)
from rlx.base.dtypes import DType
from rlx.base.errors import UsageError
from rlx.ops.custom import Attribute, CustomOperator

__all__ = ["op"]


def op(
    name: str,
    *,
    infer: Callable[..., Any],
    onnx: tuple[str, str] | None = None,
    version: str = "",
    replace: bool = False,
) -> Callable[[Callable[..., Any]], CustomOperator]:
    """Register the decorated NumPy function as an operator.

    Its positional parameters are operands (one that defaults to None may be left out, `*xs` takes any number), its
    keyword-only ones attributes: int, float, bool, str, `rlx.DType`, or a tuple such as `tuple[int, ...]`. It returns
    an array, or a tuple of them. f16 and bf16 arrive widened to f32; results are rounded to the type rule's dtypes.

    Args:
        name: with a namespace, such as ``example.scale``.
        infer: the type rule: (an `rlx.TensorType` per operand, attributes) -> type of the result, or a tuple of them.
            An exception says what is not accepted.
        onnx: (domain, operator) of the ONNX nodes that mean this operator; their attributes have the same names.
        version: to be changed whenever the meaning or a kernel changes; compiled programs with the operator are kept on
            disk only if it has one.
        replace: take the place of an operator of that name, as when a cell of a notebook runs again.

    Raises:
        UsageError: the name or the ONNX operator is taken, or a parameter is of no such kind.

    Example:
        >>> import numpy as np, rlx
        >>> @rlx.op("example.double", infer=lambda x: x)
        ... def double(x):
        ...     return x + x
        >>> with rlx.Graph() as g:
        ...     g.output("y", double(g.input("x", [2])))
        >>> rlx.compile(g)(np.float32([1, 2]))
        array([2., 4.], dtype=float32)
        >>> double.unregister()
    """

    def declare(function: Callable[..., Any]) -> CustomOperator:
        operator = CustomOperator(name, function, infer, version)
        if onnx is not None:
            _check_domain(onnx)
        operator.register(replace=replace)
        if onnx is not None:
            try:
                _map(operator, *onnx)
            except UsageError:
                operator.unregister()
                raise
        return operator

    return declare


def _check_domain(onnx: tuple[str, str]) -> None:
    domain, name = onnx
    if domain in ("", "ai.onnx") or not name:
        raise UsageError(f"onnx is (domain, operator) in a domain of your own, not {onnx!r}")


def _map(operator: CustomOperator, domain: str, name: str) -> None:
    """Enter the mapping of an ONNX operator; it goes when the operator is unregistered."""
    from rlx.frontends.onnx.registry import Call, Mapped, mapped_ops, onnx_op, unmap_op

    if (domain, name) in mapped_ops():
        raise UsageError(f"ONNX operator {domain}::{name} is mapped already")

    def mapping(call: Call) -> Mapped:
        given = {a.name: _read(call, a) for a in operator.attributes if call.has(a.name)}
        for index in range(len(call.operands), _required(operator)):
            call.value(index)  # raises: it is missing
        return operator(*call.operands, **given)

    names = " ".join(a.name for a in operator.attributes)
    onnx_op(name, names, domain=domain, outputs=1 << 20)(mapping)
    operator.cleanup = lambda: unmap_op(domain, name)


def _required(operator: CustomOperator) -> int:
    return sum(name[-1] not in "*?" for name in operator.operands)


def _read(call: Any, attribute: Attribute) -> Any:
    single = {
        int: call.get_int,
        float: call.get_float,
        bool: call.get_flag,
        str: call.get_string,
        DType: call.get_dtype,
    }
    several = {
        int: call.get_ints,
        bool: call.get_ints,
        float: call.get_floats,
        str: call.get_strings,
    }
    found = (several if attribute.many else single)[attribute.kind](attribute.name)
    return tuple(map(bool, found)) if attribute.many and attribute.kind is bool else found
