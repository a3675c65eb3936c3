# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: what every backend has to compute, generated from the operators' own declarations.

A case is one sample of one operator in one dtype, compiled and run in one way:

* `static`: extents are numbers; 1 and 2 threads give equal bits.
* `fused`: the same with an elementwise producer before and a consumer behind the operator, both exact.
* `guarded`: operands and results lie against a page that must not be touched, at either end.
* `symbolic`: extents are symbols; one program runs extents of 1, of the sample, and large ones, with 1 and 2 threads.
* `empty`: each extent in turn is zero, where the operator's rule allows it.

Everything runs with the independent check of the memory plan and a poisoned arena. The expected value is the reference
meaning in f64 (`rlx.ops.evaluate.evaluate`), the bound is `rlx.testing.tolerances`'s. A sample with an error has to
raise it.

Example:
    >>> from rlx.testing import conformance
    >>> cases = [c for c in conformance("reference") if c.op == "softmax"]
    >>> [c.run().problems for c in cases[:2]]
    [[], []]
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

import numpy as np

import rlx.ops as _registers_the_operators
from rlx.backends.protocol import CompileOptions
from rlx.backends.registry import get_backend
from rlx.base.config import override
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import NUMERIC, DType
from rlx.base.errors import DeviceError, RlxError
from rlx.base.facts import Facts
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import Builder, infer_types
from rlx.ir.clone import bind_dims
from rlx.ir.graph import Graph, Value
from rlx.ir.op import Op, registered_ops
from rlx.ops.evaluate import evaluate, run_op
from rlx.ops.spec import Operand, Sample
from rlx.runtime.executable import Executable
from rlx.runtime.source import graph_source
from rlx.testing.samples import make_array, samples_of, seed_of
from rlx.testing.tolerances import allowed_error, mismatch

__all__ = ["Case", "Outcome", "conformance"]

del _registers_the_operators

Selection = Literal["pairwise", "full"]
_NUMBERS = sorted(NUMERIC, key=lambda d: (not d.is_float, -d.itemsize, d.value))
_DTYPES = (*_NUMBERS, *(d for d in DType if d not in NUMERIC))
_VARIANTS = ("static", "symbolic", "fused", "guarded", "empty")
_LARGE = 1 << 14
"""No more elements has a tensor at the large extents of a symbolic case."""


@dataclass
class Outcome:
    """What one case found.

    Attributes:
        problems: a sentence per mistake; empty if the backend conforms.
        hosted: operators that ran on the host for want of a kernel.
    """

    problems: list[str] = field(default_factory=list[str])
    hosted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One operator, sample, dtype and way of running it on one backend.

    Attributes:
        backend: name of the backend.
        knobs: RLX_* settings in effect, as (name, value) pairs.
        op: name of the operator.
        sample: index into the operator's samples.
        dtype: dtype of the operands that do not fix their own.
        variant: the way of running, see the module.
    """

    backend: str
    knobs: tuple[tuple[str, Any], ...]
    op: str
    sample: int
    dtype: DType
    variant: str

    def __str__(self) -> str:
        return f"{self.op}-{self.sample}-{self.dtype}-{self.variant}"

    def run(self) -> Outcome:
        """Compile and run the case and compare."""
        with override(RLX_CHECK=True, **dict(self.knobs)):
            return _Runner(self).run()


def conformance(
    backend: str, *, knobs: Mapping[str, object] | None = None, selection: Selection = "pairwise"
) -> list[Case]:
    """Return the cases of a backend.

    Args:
        backend: its name.
        knobs: RLX_* settings to run under, for example ``{"RLX_CPU_ISA": "v3"}``.
        selection: `full` is every sample in every dtype and variant; `pairwise` a subset of it in which every two of
            (sample, dtype, variant) of an operator meet.
    """
    settings = tuple(sorted((knobs or {}).items()))
    cases: list[Case] = []
    for name, cls in sorted(registered_ops().items()):
        if "." in name:  # private to a backend, whose own tests check it
            continue
        cases += [Case(backend, settings, name, *row) for row in _chosen(cls, selection)]
    return cases


# -- which cases there are -----------------------------------------------------------------------------------------

_Row = tuple[int, DType, str]


@cache
def _chosen(cls: type[Op], selection: Selection) -> tuple[_Row, ...]:
    samples = samples_of(cls)
    rows = [row for index, sample in enumerate(samples) for row in _rows(cls, index, sample)]
    return tuple(_pairwise(rows) if selection == "pairwise" else rows)


def _rows(cls: type[Op], index: int, sample: Sample) -> Iterator[_Row]:
    if sample.error:
        yield index, DType.F32, "error"
        return
    op = cls(**sample.attributes)
    for dtype in _domain(op, sample):
        types = _types(sample, dtype)
        for variant in _VARIANTS:
            if variant == "symbolic" and not _symbolic(op, types):
                continue
            if variant == "empty" and not _emptied(op, types):
                continue
            yield index, dtype, variant


def _domain(op: Op, sample: Sample) -> list[DType]:
    """Return the dtypes that the operator's type rule accepts for this sample."""
    free = any(o is not None and o.dtype is None for o in sample.operands)
    return [
        d
        for d in (_DTYPES if free else (DType.F32,))
        if _inferred(op, _types(sample, d)) is not None
    ]


def _types(sample: Sample, dtype: DType) -> list[TensorType | None]:
    return [
        None if o is None else TensorType(_dtype_of(o, dtype), o.shape) for o in sample.operands
    ]


def _dtype_of(operand: Operand, dtype: DType) -> DType:
    if operand.dtype is not None:
        return operand.dtype
    return {"index": DType.I64, "bool": DType.BOOL}.get(operand.fill, dtype)


def _inferred(op: Op, types: Sequence[TensorType | None]) -> tuple[TensorType, ...] | None:
    try:
        with Facts().active():
            found = infer_types(op, types)
    except RlxError:
        return None
    return found if all(_nonnegative(t) for t in found) else None


def _nonnegative(type_: TensorType) -> bool:
    return all(not isinstance(d, int) or d >= 0 for d in type_.shape)


def _pairwise(rows: Sequence[_Row]) -> list[_Row]:
    """Return rows, greedily chosen, in which every pair of values that meets in `rows` meets."""
    open_pairs = {pair for row in rows for pair in _pairs(row)}
    chosen: list[_Row] = []
    for gain in (3, 2, 1):
        for row in rows:
            if sum(pair in open_pairs for pair in _pairs(row)) >= gain:
                open_pairs.difference_update(_pairs(row))
                chosen.append(row)
    return sorted(chosen, key=lambda row: (row[0], row[1].value, row[2]))


def _pairs(row: _Row) -> Iterator[tuple[object, object]]:
    return itertools.combinations(enumerate(row), 2)


# -- extents ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Symbolic:
    """An operator with symbolic extents, and the extents to run it with."""

    op: Op
    types: tuple[TensorType | None, ...]
    envs: tuple[dict[str, int], ...]


def _symbolic(op: Op, types: Sequence[TensorType | None]) -> list[_Symbolic]:
    """Return the ways in which extents of the operands may be symbols: each one alone, and all that may together."""
    extents = sorted(
        {d for t in types if t is not None for d in t.shape if isinstance(d, int) and d > 1}
    )
    found: list[_Symbolic] = []
    allowed: list[int] = []
    for extent in extents:
        one = _with_symbols(op, types, (extent,))
        if one is not None:
            found.append(one)
            allowed.append(extent)
    if len(allowed) > 1:
        together = _with_symbols(op, types, tuple(allowed))
        if together is not None:
            found = [together, *found]
    return found


def _with_symbols(
    op: Op, types: Sequence[TensorType | None], extents: tuple[int, ...]
) -> _Symbolic | None:
    names: dict[int, Dim] = {e: symbol(f"N{e}") for e in extents}
    symbolic = [
        None if t is None else t.with_shape([_replaced(d, names) for d in t.shape]) for t in types
    ]
    for candidate in (_with_dims(op, names), op):
        if _inferred(candidate, symbolic) is None:
            continue
        envs = [dict.fromkeys((f"N{e}" for e in extents), 1), {f"N{e}": e for e in extents}]
        envs += [_large_extents(candidate, symbolic, extents)]
        envs = [env for env in envs if _elements(candidate, symbolic, env) > 0]
        if len(envs) > 1:
            return _Symbolic(candidate, tuple(symbolic), tuple(envs))
    return None


def _replaced(dim: Dim, names: Mapping[int, Dim]) -> Dim:
    return names.get(dim, dim) if isinstance(dim, int) else dim


def _with_dims(op: Op, names: Mapping[int, Dim]) -> Op:
    """Return the operator with the extents among its attributes replaced, products of them included."""

    def replace(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(replace(i) for i in item)  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(item, int) or isinstance(item, bool):
            return item
        for extent, name in sorted(names.items(), reverse=True):
            if item and item % extent == 0:
                return name * (item // extent)
        return item

    changed = {
        f.name: replace(getattr(op, f.name))
        for f in dataclasses.fields(op)
        if any(word in str(f.type) for word in ("Dim", "Shape"))
    }
    return dataclasses.replace(op, **changed) if changed else op


def _large_extents(
    op: Op, types: Sequence[TensorType | None], extents: tuple[int, ...]
) -> dict[str, int]:
    """Return extents that are multiples of the sample's plus 1, as large as `_LARGE` allows."""
    for factor in (256, 64, 32, 16, 8, 4):
        env = {f"N{e}": e * factor + 1 for e in extents}
        if 0 < _elements(op, types, env) <= _LARGE:
            return env
    return {f"N{e}": 2 * e + 1 for e in extents}


def _elements(op: Op, types: Sequence[TensorType | None], env: Mapping[str, int]) -> int:
    """Return the size of the largest operand or result for these extents; 0 where the type rule refuses them."""
    bound = [None if t is None else t.with_shape([_value(d, env) for d in t.shape]) for t in types]
    results = _inferred(bind_dims(op, dict(env)), bound)
    if results is None:
        return 0
    return max(int(np.prod([int(d) for d in t.shape])) for t in (*bound, *results) if t is not None)


def _value(dim: Dim, env: Mapping[str, int]) -> Dim:
    return bind_dims((dim,), dict(env))[0]


def _emptied(op: Op, types: Sequence[TensorType | None]) -> list[_Symbolic]:
    """Return the ways in which one extent may be zero by the operator's type rule."""
    found: list[_Symbolic] = []
    extents = sorted(
        {d for t in types if t is not None for d in t.shape if isinstance(d, int) and d > 1}
    )
    for extent in extents:
        names: dict[int, Dim] = {extent: symbol("Z", lower=0)}
        shapes = [
            None if t is None else t.with_shape([_replaced(d, names) for d in t.shape])
            for t in types
        ]
        bound = [
            None if t is None else t.with_shape([_value(d, {"Z": 0}) for d in t.shape])
            for t in shapes
        ]
        changed = bind_dims(_with_dims(op, names), {"Z": 0})
        if _inferred(changed, bound) is not None:
            found.append(_Symbolic(changed, tuple(bound), ({},)))
    return found


# -- running one -----------------------------------------------------------------------------------------------------


class _Runner:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.cls = registered_ops()[case.op]
        self.sample = samples_of(self.cls)[case.sample]
        self.types = _types(self.sample, case.dtype)
        self.outcome = Outcome()

    def run(self) -> Outcome:
        if self.case.variant == "error":
            self._error()
            return self.outcome
        op = self.cls(**self.sample.attributes)
        match self.case.variant:
            case "symbolic":
                for one in _symbolic(op, self.types):
                    self._compare(one)
            case "empty":
                for one in _emptied(op, self.types):
                    self._compare(one)
            case _:
                self._compare(_Symbolic(op, tuple(self.types), ({},)))
        return self.outcome

    def _error(self) -> None:
        try:
            op = self.cls(**self.sample.attributes)
            graph = _graph(op, self.types, fused=False)
            self._executable(graph, 1).run(self._named(self._arrays(self.types, {})))
        except RlxError as error:
            if self.sample.error not in str(error):
                self.outcome.problems.append(
                    f"raised {error!r}, which does not say {self.sample.error!r}"
                )
        else:
            self.outcome.problems.append(f"did not raise an error that says {self.sample.error!r}")

    def _compare(self, chosen: _Symbolic) -> None:
        graph = _graph(chosen.op, chosen.types, fused=self.case.variant == "fused")
        threads = (1, 2) if self.case.variant in ("static", "symbolic") else (1,)
        runs = [self._executable(graph, count) for count in threads]
        for env in chosen.envs:
            arrays = self._arrays(chosen.types, env)
            inputs = self._named(arrays) | _bounds(graph)
            try:
                want = evaluate(graph, inputs, exact=not self._is_quantised())
            except RlxError as error:
                self._expect_error(runs, inputs, error, env)
                continue
            allowed = self._allowed(bind_dims(chosen.op, dict(env)), arrays, want)
            got = [self._results(run, inputs, want, env) for run in runs]
            for name, array in want.items():
                self._judge(
                    f"{name} at {env}" if env else name,
                    [g[name] for g in got],
                    array,
                    allowed[name],
                )
        for run in runs:
            if run.variants > 1:
                self.outcome.problems.append(
                    f"compiled {run.variants} times for extents {chosen.envs}"
                )
            hosted = [name for name, how, _ in run.program.compiled.dispatch if how == "host"]
            self.outcome.hosted = tuple(sorted({*self.outcome.hosted, *hosted}))
            run.close()

    def _is_quantised(self) -> bool:
        # The contract fixes the f32 arithmetic of these, so a tie is decided there and not in f64.
        return self.case.op in ("quantize_linear", "dequantize_linear")

    def _expect_error(
        self, runs: list[Executable], inputs: dict[str, Array], error: RlxError, env: dict[str, int]
    ) -> None:
        """The meaning of the operator is an error for this data; so it has to be on the backend."""
        for run in runs:
            try:
                run.run(inputs)
            except RlxError:
                continue
            self.outcome.problems.append(f"at {env} gave a result where the meaning is {error!r}")

    def _judge(self, what: str, got: list[Array], want: Array, allowed: Any) -> None:
        wrong = mismatch(got[0], want, allowed)
        if wrong:
            self.outcome.problems.append(f"{what}: {wrong}")
        if any(g.tobytes() != got[0].tobytes() for g in got[1:]):
            self.outcome.problems.append(f"{what}: 1 and 2 threads differ")

    def _allowed(
        self, op: Op, arrays: Sequence[Array | None], want: Mapping[str, Array]
    ) -> dict[str, Any]:
        results = run_op(op, arrays, exact=True)
        errors = allowed_error(op, arrays, results)
        return dict(zip(want, errors, strict=True))

    def _executable(self, graph: Graph, threads: int) -> Executable:
        backend = get_backend(self.case.backend)
        targets = backend.targets()
        if not targets:
            raise DeviceError(f"backend {self.case.backend!r} finds no device on this machine")
        return Executable(graph_source(graph), backend, targets[0], CompileOptions(threads=threads))

    def _arrays(
        self, types: Sequence[TensorType | None], env: Mapping[str, int]
    ) -> list[Array | None]:
        arrays: list[Array | None] = []
        for position, (operand, type_) in enumerate(zip(self.sample.operands, types, strict=True)):
            if operand is None or type_ is None:
                arrays.append(None)
                continue
            shape = tuple(int(_value(d, env)) for d in type_.shape)
            seed = seed_of(self.case.op, self.case.sample, position, shape)
            arrays.append(
                make_array(operand, type_.dtype, shape, seed, self._limit(operand, types, env))
            )
        return arrays

    def _limit(
        self, operand: Operand, types: Sequence[TensorType | None], env: Mapping[str, int]
    ) -> int:
        """Return the bound of indices that fits the extents they may index."""
        if operand.fill != "index":
            return 0
        values = [env[f"N{operand.limit}"]] if f"N{operand.limit}" in env else []
        if self.case.variant == "empty":
            sizes = [
                d for t in types if t is not None for d in t.shape if isinstance(d, int) and d > 0
            ]
            values.append(min([operand.limit, *sizes]))
        return max(1, min([operand.limit, *values]))

    @staticmethod
    def _named(arrays: Sequence[Array | None]) -> dict[str, Array]:
        return {f"x{i}": a for i, a in enumerate(arrays) if a is not None}

    def _results(
        self,
        run: Executable,
        inputs: dict[str, Array],
        want: Mapping[str, Array],
        env: Mapping[str, int],
    ) -> dict[str, Array]:
        results = run.run(inputs)
        if self.case.variant != "guarded":
            return results
        assert not env
        for at_end in (True, False):
            self._run_guarded(run, inputs, want, results, at_end)
        return results

    def _run_guarded(
        self,
        run: Executable,
        inputs: dict[str, Array],
        want: Mapping[str, Array],
        results: Mapping[str, Array],
        at_end: bool,
    ) -> None:
        given = [_Guarded(inputs[spec.name], at_end) for spec in run.inputs]
        outputs = [_Guarded(np.zeros_like(array), at_end) for array in want.values()]
        run.program.compiled.run([g.array for g in given], [o.array for o in outputs], {})
        for name, output in zip(want, outputs, strict=True):
            if output.array.tobytes() != results[name].tobytes():
                self.outcome.problems.append(f"{name} depends on where its operands lie")
        for one in (*given, *outputs):
            one.close()


def _graph(op: Op, types: Sequence[TensorType | None], *, fused: bool) -> Graph:
    """Return a graph of one node; `fused` puts max(x, lowest) before it and the negation behind it, both exact."""
    graph = Graph(op.name)
    build = Builder(graph.block, graph.facts)
    operands: list[Value | None] = []
    for position, type_ in enumerate(types):
        operands.append(None if type_ is None else graph.add_input(f"x{position}", type_))
    if fused:
        operands = [None if v is None else _produced(graph, build, v) for v in operands]
    results = build.emit(op, *operands)
    if fused:
        results = [_consumed(build, r) for r in results]
    graph.set_outputs({f"y{i}": r for i, r in enumerate(results)})
    return graph


def _produced(graph: Graph, build: Builder, value: Value) -> Value:
    dtype = value.type.dtype
    if dtype not in NUMERIC:
        return value
    name = f"lowest_{dtype}"
    low = next((v for v in graph.inputs if v.name == name), None) or graph.add_input(
        name, TensorType(dtype, ())
    )
    return build.emit_one(registered_ops()["maximum"](), value, low)


def _consumed(build: Builder, value: Value) -> Value:
    dtype = value.type.dtype
    if dtype is DType.BOOL:
        return build.emit_one(registered_ops()["logical_not"](), value)
    return build.emit_one(registered_ops()["neg"](), value) if dtype in NUMERIC else value


def _bounds(graph: Graph) -> dict[str, Array]:
    """Return the data of the inputs that `_produced` added."""
    found: dict[str, Array] = {}
    for value in graph.inputs:
        if value.name.startswith("lowest_"):
            dtype = value.type.dtype
            lowest = float("-inf") if dtype.is_float else int(np.iinfo(dtype.numpy).min)
            found[value.name] = np.array(lowest).astype(dtype.numpy)
    return found


# -- memory that must not be touched -----------------------------------------------------------------------------------


class _Guarded:
    """A copy of an array that ends at, or begins after, a page without access rights."""

    def __init__(self, array: Array, at_end: bool) -> None:
        page = mmap.PAGESIZE
        size = -(-array.nbytes // page) * page
        self._map = mmap.mmap(-1, size + 2 * page)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pages = (self._address, self._address + page + size)
        for address in self._pages:
            _protect(address, page, 0)
        offset = page + (size - array.nbytes if at_end else 0)
        buffer: Any = (ctypes.c_char * array.nbytes).from_address(self._address + offset)
        flat = np.frombuffer(buffer, array.dtype) if array.nbytes else np.empty(0, array.dtype)
        self.array = cast("Array", flat.reshape(array.shape))
        self.array[...] = array

    def close(self) -> None:
        for address in self._pages:
            _protect(address, mmap.PAGESIZE, 3)
        del self.array


def _protect(address: int, size: int, rights: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(rights)):
        raise OSError(ctypes.get_errno(), "mprotect failed")
