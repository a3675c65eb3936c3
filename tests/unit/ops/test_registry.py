# SPDX-License-Identifier: Apache-2.0
"""What must hold for every declared operator: samples run, and every lowering says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx.ops
from rlx.base.dtypes import DType
from rlx.base.errors import RlxError
from rlx.base.numeric import Array, widen
from rlx.base.types import TensorType
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph, Value
from rlx.ir.op import Op, registered_ops
from rlx.ir.parse import parse_graph
from rlx.ir.text import print_graph
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.spec import ElementwiseOp, Operand, Sample, building, emit
from rlx.testing.samples import make_array, samples_of, seed_of

MINE = ("elementwise", "movement", "reduce", "norm", "indexing")
OPS = {
    name: cls
    for name, cls in registered_ops().items()
    if cls.__module__.removeprefix("rlx.ops.") in MINE
}


CASES = [(name, sample) for name, cls in OPS.items() for sample in samples_of(cls)]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]


def build(
    op: Any,
    types: list[TensorType | None],
    function: Callable[[Any, list[Value | None]], Value | tuple[Value, ...] | None],
) -> Graph | None:
    graph = Graph()
    values = [None if t is None else graph.add_input(f"x{i}", t) for i, t in enumerate(types)]
    with building(Builder(graph.block, graph.facts)):
        found = function(op, values)
    if found is None:
        return None
    results = found if isinstance(found, tuple) else (found,)
    graph.set_outputs({f"y{i}": v for i, v in enumerate(results)})
    return graph


def _array(cls: type[Op], operand: Operand | None, seed: int) -> Array | None:
    """Return data in the operand's dtype, or in the plainest that the operator takes."""
    if operand is None:
        return None
    domain = cls.decl.domain if issubclass(cls, ElementwiseOp) else frozenset({DType.F32})
    dtype = operand.dtype or next(d for d in (DType.F32, DType.I32, DType.BOOL) if d in domain)
    return make_array(operand, dtype, operand.shape, seed)


@pytest.mark.parametrize(("name", "sample"), CASES, ids=IDS)
def test_sample(name: str, sample: Sample) -> None:
    op: Any = OPS[name](**sample.attributes)
    arrays = [_array(OPS[name], o, seed_of(name, i)) for i, o in enumerate(sample.operands)]
    if sample.error:
        with pytest.raises(RlxError, match=sample.error):
            run_op(op, arrays)
        return
    want = run_op(op, arrays)
    types = [None if a is None else TensorType(DType.of(a.dtype), a.shape) for a in arrays]
    feed = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}

    region = op.region(*types) if hasattr(op, "region") else None
    if region is not None:  # bit for bit
        (found,) = run_op(region, [a for a in arrays if a is not None])
        assert (found.dtype, found.shape) == (want[0].dtype, want[0].shape)
        np.testing.assert_array_equal(widen(found), widen(want[0]))

    graph = build(op, types, lambda o, v: o.decompose(*v)) if hasattr(op, "decompose") else None
    if graph is not None:
        for found, expected in zip(evaluate(graph, feed).values(), want, strict=True):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(widen(found), widen(expected), rtol=2e-6, atol=2e-6)

    whole = build(op, types, _emit)
    assert whole is not None
    again = parse_graph(print_graph(whole))
    assert print_graph(again) == print_graph(whole)
    for found, expected in zip(evaluate(again, feed).values(), want, strict=True):
        np.testing.assert_array_equal(widen(found), widen(expected))


def _emit(op: Any, values: list[Value | None]) -> tuple[Value, ...]:
    return emit(op, *values)


@pytest.mark.parametrize("name", OPS)
def test_declaration_is_complete(name: str) -> None:
    cls = OPS[name]
    assert cls.__doc__
    assert cls.operands
    assert samples_of(cls)


def test_every_group_of_the_folder_is_named() -> None:
    folder = Path(rlx.ops.__file__).parent
    declaring = {
        path.stem
        for path in folder.glob("*.py")
        if any(cls.__module__ == f"rlx.ops.{path.stem}" for cls in registered_ops().values())
    }
    assert declaring <= set(rlx.ops.GROUPS)
