# SPDX-License-Identifier: Apache-2.0
"""Matrix products, and Einsum composed of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlx.base.dims import Dim, product
from rlx.base.dtypes import NUMERIC
from rlx.base.errors import TypeRuleError
from rlx.base.facts import current_facts
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.types import Shape, TensorType, broadcast_shapes, require_equal
from rlx.ir.graph import Value
from rlx.ir.op import Op
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = ["MatMul", "array_matmul", "einsum", "matmul", "product_flops"]


def array_matmul(a: Array, b: Array) -> Array:
    """Return `a @ b` in the dtype of the operands; sums of integers wrap.

    NumPy has no fast integer product, so integers go through f64 wherever every partial sum is
    exact there.
    """
    with np.errstate(all="ignore"):
        if a.dtype.kind not in "iu" or a.size == 0 or b.size == 0:
            return np.asarray(np.matmul(a, b))
        if a.shape[-1] * _magnitude(a) * _magnitude(b) < 2**53:
            exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
            return np.asarray(exact).astype(np.int64).astype(a.dtype)
        return np.asarray(np.matmul(a, b))


def product_flops(operands: Sequence[TensorType], results: Sequence[TensorType]) -> Dim:
    """Return the operations of a product that sums over the last axis of its first operand."""
    return results[0].elements * operands[0].shape[-1] * 2


def _magnitude(x: Array) -> int:
    return max(abs(int(x.min())), abs(int(x.max())))


def _f32(*shape: int) -> Operand:
    return Operand(shape)


@op("matmul")
@dataclass(frozen=True)
class MatMul(Op):
    """y[..., m, n] = sum over k of a[..., m, k] * b[..., k, n].

    a: [*batch, M, K], b: [*batch, K, N] -> [*batch, M, N]; the batch axes broadcast. As in NumPy a
        rank 1 operand is a
    row (a) or a column (b) and its axis is missing in the result. f16 and bf16 accumulate in f32;
    integers wrap, and the result has their dtype.
    """

    precision_class = OpClass.COMPUTE

    operands = ("a", "b")
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((_f32(5, 7), _f32(7, 3))),
        Sample((_f32(2, 5, 7), _f32(7, 3))),
        Sample((_f32(2, 1, 4, 6), _f32(3, 6, 5))),
        Sample((_f32(1, 33), _f32(33, 65))),
        Sample((_f32(0, 4), _f32(4, 3))),
        Sample((_f32(3, 0), _f32(0, 2))),
        Sample((_f32(7), _f32(7))),
        Sample((_f32(7), _f32(2, 7, 3))),
        Sample((_f32(2, 3, 7), _f32(7))),
        Sample((_f32(2, 3), _f32(4, 2)), error="contracted"),
    )

    def infer(self, a: TensorType, b: TensorType) -> TensorType:  # noqa: D102
        if a.dtype is not b.dtype or a.dtype not in NUMERIC:
            raise TypeRuleError(
                f"needs operands of one numeric dtype, found {a.dtype} and {b.dtype}; cast first"
            )
        if not a.rank or not b.rank:
            raise TypeRuleError(f"needs operands of rank 1 or more, found {a} and {b}")
        inner = b.shape[-2] if b.rank > 1 else b.shape[0]
        require_equal(a.shape[-1], inner, f"the contracted axes of {a} and {b}")
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
        rows = (a.shape[-2],) if a.rank > 1 else ()
        columns = (b.shape[-1],) if b.rank > 1 else ()
        return TensorType(a.dtype, (*batch, *rows, *columns))

    def reference(self, a: Array, b: Array) -> Array:  # noqa: D102
        return array_matmul(a, b)

    def flops(  # noqa: D102
        self, operands: Sequence[TensorType], results: Sequence[TensorType]
    ) -> Dim:
        return product_flops(operands, results)

    def decompose(self, a: Value, b: Value) -> Value | None:
        """Return the product of matrices for rank 1 operands; None where there are none."""
        return matmul(a, b) if 1 in (a.type.rank, b.type.rank) else None


def matmul(a: Value, b: Value) -> Value:
    """Return `a @ b` by NumPy's rules.

    A rank 1 operand is reshaped to a matrix, so backends see only matrices.

    Raises:
        TypeRuleError: an operand has rank 0, or the contracted extents differ.
    """
    from rlx.ops.movement import reshape

    if a.type.rank == 0 or b.type.rank == 0 or (a.type.rank > 1 and b.type.rank > 1):
        return emit_one(MatMul(), a, b)
    row, column = a.type.rank == 1, b.type.rank == 1
    left = reshape(a, (1, a.type.shape[0])) if row else a
    right = reshape(b, (b.type.shape[0], 1)) if column else b
    full = emit_one(MatMul(), left, right)
    batch, (m, n) = full.type.shape[:-2], full.type.shape[-2:]
    return reshape(full, (*batch, *(() if row else (m,)), *(() if column else (n,))))


# -- einsum ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """A value with one label per axis, all different."""

    value: Value
    labels: str

    def extent(self, label: str) -> Dim:
        return self.value.type.shape[self.labels.index(label)]


def einsum(equation: str, *values: Value) -> Value:
    """Return the sum of products that an Einstein equation names, as in `numpy.einsum`.

    Operands are contracted from left to right, each pair by one matmul (or one multiplication where
    no axis of the two is summed), so intermediate results are rounded to the dtype.

    Args:
        equation: letters per axis, ``...`` for broadcast axes, ``->`` and the result's letters
            (without it: the letters that occur once, sorted, after the broadcast axes). A letter
            may repeat in one operand (diagonal) where its extent is static.
        values: the operands, of one dtype.

    Raises:
        TypeRuleError: the equation does not fit the operands.
    """
    inputs, output = _parse_equation(equation, [v.type.rank for v in values])
    terms = [_diagonals(v, labels) for v, labels in zip(values, inputs, strict=True)]
    current = terms[0]
    for position, term in enumerate(terms[1:], 2):
        needed = set(output).union(*(t.labels for t in terms[position:]))
        current = _contract(current, term, needed)
    current = _sum_out(current, set(output))
    return _arrange(current, output).value


def _parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the labels of the operands and the result; broadcast axes get control characters."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    inputs = left.split(",")
    for part in (*inputs, right):
        if not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", part):
            raise TypeRuleError(f"{part!r} in the equation {equation!r} is no list of axis letters")
    if len(inputs) != len(ranks) or not ranks:
        raise TypeRuleError(
            f"the equation {equation!r} names {len(inputs)} operands, found {len(ranks)}"
        )
    free = [rank - len(part.replace("...", "")) for part, rank in zip(inputs, ranks, strict=True)]
    for part, rank, count in zip(inputs, ranks, free, strict=True):
        if count < 0 or (count and "..." not in part):
            raise TypeRuleError(
                f"{part!r} in the equation {equation!r} does not fit an operand of rank {rank}"
            )
    dots = "".join(chr(1 + i) for i in range(max(free)))
    expanded = [p.replace("...", dots[len(dots) - n :]) for p, n in zip(inputs, free, strict=True)]
    if arrow:
        output = right.replace("...", dots)
    else:
        letters = left.replace(",", "").replace("...", "")
        output = dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if len(set(output)) != len(output) or not set(output) <= set("".join(expanded)):
        raise TypeRuleError(
            f"the result {right!r} of the equation {equation!r} repeats or invents a letter"
        )
    return expanded, output


def _diagonals(value: Value, labels: str) -> _Term:
    """Return the operand with repeated labels reduced to their diagonal."""
    from rlx.ops.movement import reshape, slice_axis, transpose

    while len(set(labels)) != len(labels):
        label = next(c for c in labels if labels.count(c) > 1)
        first, second = [i for i, c in enumerate(labels) if c == label][:2]
        extent = value.type.shape[first]
        if (
            not isinstance(extent, int)
            or current_facts().equal(extent, value.type.shape[second]) is not True
        ):
            raise TypeRuleError(
                f"the diagonal over {label!r} of {value.type} needs two equal static extents"
            )
        rest = [i for i in range(len(labels)) if i not in (first, second)]
        lead = tuple(value.type.shape[i] for i in rest)
        flat = reshape(transpose(value, (*rest, first, second)), (*lead, extent * extent))
        # Element i of the diagonal is element i * (extent + 1) of the flattened square.
        value = slice_axis(flat, len(rest), 0, extent, extent + 1)
        labels = "".join(labels[i] for i in rest) + label
    return _Term(value, labels)


def _sum_out(term: _Term, needed: set[str]) -> _Term:
    from rlx.ops.reduce import reduce_sum

    axes = tuple(i for i, c in enumerate(term.labels) if c not in needed)
    if not axes:
        return term
    kept = "".join(c for c in term.labels if c in needed)
    return _Term(reduce_sum(term.value, axes, False), kept)


def _arrange(term: _Term, labels: str) -> _Term:
    """Return the term with its axes in the order of `labels`; missing ones get extent 1."""
    from rlx.ops.movement import reshape, transpose

    order = [term.labels.index(c) for c in labels if c in term.labels]
    value = term.value
    if order != sorted(order):
        value = transpose(value, tuple(order))
    if len(order) != len(labels):
        present = iter(value.type.shape)
        value = reshape(value, tuple(next(present) if c in term.labels else 1 for c in labels))
    return _Term(value, labels)


def _contract(a: _Term, b: _Term, needed: set[str]) -> _Term:
    """Return the product of two terms, summed over the labels that nothing else needs."""
    from rlx.ops.elementwise import mul
    from rlx.ops.movement import reshape

    a = _sum_out(a, needed | set(b.labels))
    b = _sum_out(b, needed | set(a.labels))
    shared = [c for c in a.labels if c in b.labels]
    batch = "".join(c for c in shared if c in needed)
    summed = "".join(c for c in shared if c not in needed)
    left = "".join(c for c in a.labels if c not in shared)
    right = "".join(c for c in b.labels if c not in shared)
    if not summed:
        labels = batch + left + right
        return _Term(mul(_arrange(a, labels).value, _arrange(b, labels).value), labels)
    a, b = _broadcast_labels(a, b, summed), _broadcast_labels(b, a, summed)
    a, b = _arrange(a, batch + left + summed), _arrange(b, batch + summed + right)
    nb, nl, ns = len(batch), len(left), len(summed)
    lefts, rights = a.value.type.shape[nb : nb + nl], b.value.type.shape[nb + ns :]
    inner = product(a.value.type.shape[nb + nl :])
    x = reshape(a.value, (*a.value.type.shape[:nb], product(lefts), inner))
    y = reshape(b.value, (*b.value.type.shape[:nb], inner, product(rights)))
    out = matmul(x, y)
    shape: Shape = (*out.type.shape[:nb], *lefts, *rights)
    return _Term(reshape(out, shape), batch + left + right)


def _broadcast_labels(term: _Term, other: _Term, labels: str) -> _Term:
    """Return the term with extents of 1 along the labels expanded to the other term's."""
    from rlx.ops.movement import expand

    shape = tuple(
        other.extent(c) if c in labels and d == 1 else d
        for c, d in zip(term.labels, term.value.type.shape, strict=True)
    )
    return term if shape == term.value.type.shape else _Term(expand(term.value, shape), term.labels)
