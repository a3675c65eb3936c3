# SPDX-License-Identifier: Apache-2.0
"""Region kernels: broadcasting, strides, symbolic extents, rows, sharing of bytes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.isa import Isa, host_isa
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.expr.body import Body, BodyBuilder, Scalar, trace
from rlx.expr.index import AxisMap, IndexMap
from rlx.ir.builder import Builder
from rlx.ir.graph import Graph
from rlx.kernel.program import SlotArg, Thunk
from rlx.ops.evaluate import evaluate
from rlx.ops.norm import LayerNorm, LogSoftmax, RmsNorm, Softmax
from rlx.ops.reduce import Reduce
from rlx.ops.region import Region

import_module("rlx.backends.cpu.kernels")  # registers the lowerings
_HOST = host_isa()
_ISAS = [_HOST, *([_HOST.restricted("v3")] if _HOST.name == "v4" else [])]
_isas = pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
_TOLERANCE = {DType.F32: 3e-6, DType.F64: 1e-13, DType.F16: 2e-3, DType.BF16: 2e-2}
Lower = Callable[[Graph, Isa], Any]


def _graph(region: Region, types: Sequence[TensorType]) -> Graph:
    graph = Graph()
    values = [graph.add_input(f"x{i}", t) for i, t in enumerate(types)]
    with graph.facts.active():
        results = Builder(graph.block, graph.facts).emit(region, *values)
    graph.set_outputs({f"y{i}": r for i, r in enumerate(results)})
    return graph


def _numbers(dtype: DType, shape: Sequence[Dim], seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal([int(d) for d in shape]) * 3).astype(
        dtype.numpy
    )


def _close(got: Array, want: Array, tolerance: float) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance
    )


def _check(lowered: Any, arrays: Sequence[Array], tolerance: float) -> dict[str, Array]:
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    found = lowered.run(inputs)
    for name, want in evaluate(lowered.graph, inputs).items():
        _close(found[name], want, tolerance)
    return found


def _static(
    lower: Lower, isa: Isa, region: Region | None, arrays: Sequence[Array], tolerance: float = 0
) -> Any:
    assert region is not None
    types = [TensorType(DType.of(a.dtype), a.shape) for a in arrays]
    lowered = lower(_graph(region, types), isa)
    _check(lowered, arrays, tolerance)
    return lowered


def _affine(a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    return a * b + c


def _sum(a: Scalar, b: Scalar) -> Scalar:
    return a + b


def _difference(a: Scalar, b: Scalar) -> Scalar:
    return a - b


def _next(a: Scalar) -> Scalar:
    return a + 1.0


_AFFINE = trace(_affine, [DType.F32] * 3)
_SHAPES = [(5,), (1000,), (3, 7, 5), (0,), (4, 0, 3), (1, 1), (), (2, 1, 300), (4099, 3)]


@_isas
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_broadcasting_of_every_kind(shape: tuple[int, ...], isa: Isa, lower_graph: Lower) -> None:
    last = shape[-1:]
    first = (*shape[:1], *([1] * (len(shape) - 1))) if shape else ()
    arrays = [_numbers(DType.F32, s, i) for i, s in enumerate((shape, last, first))]
    _static(lower_graph, isa, Region(_AFFINE, shape), arrays)
    _static(
        lower_graph, isa, Region(_AFFINE, shape), [arrays[0], _numbers(DType.F32, ()), arrays[1]]
    )


@_isas
def test_mixed_widths_and_several_results(isa: Isa, lower_graph: Lower) -> None:
    builder = BodyBuilder((DType.F16, DType.I64, DType.BOOL, DType.U8))
    half, long, flag, byte = (builder.input(i) for i in range(4))
    total = half.cast(DType.F32) + byte.cast(DType.F32)
    body = builder.finish(
        total.cast(DType.F16),
        long + byte.cast(DType.I64),
        builder.emit("select", flag, total, -total),
        builder.emit("not", flag),
        half,
    )
    shape = (3, 37)
    arrays = [_numbers(d, shape, i) for i, d in enumerate((DType.F16, DType.I64))]
    arrays += [_numbers(DType.F32, (37,), 2) > 0, np.arange(37, dtype=np.uint8)]
    _static(lower_graph, isa, Region(body, shape), arrays)


@_isas
def test_index_maps_with_any_stride(isa: Isa, lower_graph: Lower) -> None:
    body = trace(_difference, [DType.F32] * 2)
    flipped = IndexMap(2, (AxisMap(1, 19, -2), AxisMap(0, 3, 1)))  # x[19 - 2 j, 3 + i]
    arrays = [_numbers(DType.F32, (20, 30)), _numbers(DType.F32, (25, 10), 1)]
    plain = IndexMap(2, (AxisMap(0), AxisMap(1)))
    _static(lower_graph, isa, Region(body, (25, 10), (flipped, plain)), arrays)


@_isas
def test_symbolic_extents_on_one_compile(isa: Isa, lower_graph: Lower) -> None:
    s = symbol("s", lower=0)
    types = [TensorType(DType.F32, t) for t in ((3, s, 5), (s, 1), (5,))]
    lowered = lower_graph(_graph(Region(_AFFINE, (3, s, 5)), types), isa)
    for n in (0, 1, 7, 2000):
        _check(lowered, [_numbers(DType.F32, t) for t in ((3, n, 5), (n, 1), (5,))], 0)


def test_equal_forms_share_a_kernel(lower_graph: Lower) -> None:
    symbols = set[str]()
    for shape in ((4, 100), (7, 33), (2, 3, 50)):
        arrays = [_numbers(DType.F32, s) for s in (shape, shape, shape[-1:])]
        lowered = _static(lower_graph, _HOST, Region(_AFFINE, shape), arrays)
        symbols |= {t.kernel.symbol for t in lowered.program.thunks}
    assert len(symbols) == 1


def test_large_work_is_split_into_chunks(lower_graph: Lower) -> None:
    body = trace(_next, [DType.F32])
    for shape, least in (((1 << 18,), 4), ((1 << 14, 16), 4), ((64,), 1)):
        lowered = _static(lower_graph, _HOST, Region(body, shape), [_numbers(DType.F32, shape)])
        assert lowered.program.thunks[0].chunks >= least
    assert lowered.program.thunks[0].chunks == 1


# -- rows


def _norms(dtype: DType, n: int) -> list[tuple[Any, list[TensorType]]]:
    factor = TensorType(dtype, (n,))
    norms: list[tuple[Any, list[TensorType]]] = [
        (Softmax(-1), []),
        (LogSoftmax(-1), []),
        (LayerNorm(-1, 1e-5), [factor, factor]),
        (RmsNorm(-1, 1e-5), [factor]),
    ]
    kinds = ("sum", "mean", "max", "min", "sumsq", "l1", "l2", "logsumexp")
    return norms + [(Reduce(k, (-1,)), list[TensorType]()) for k in kinds]


_ROWS = [(3, 5), (70, 16), (2, 3, 100), (5, 1), (0, 5), (2, 1000), (300, 3)]
_NORM_CASES = [
    *((isa, DType.F32, shape) for isa in _ISAS for shape in _ROWS),
    *(
        (_HOST, dtype, shape)
        for dtype in _TOLERANCE
        if dtype is not DType.F32
        for shape in _ROWS[1:3]
    ),
]


@pytest.mark.parametrize(
    ("isa", "dtype", "shape"), _NORM_CASES, ids=lambda v: getattr(v, "name", str(v))
)
def test_norms_and_reductions(
    isa: Isa, dtype: DType, shape: tuple[int, ...], lower_graph: Lower
) -> None:
    for op, factors in _norms(dtype, shape[-1]):
        x = TensorType(dtype, shape)
        arrays = [_numbers(dtype, shape), *(_numbers(dtype, f.shape, 1) for f in factors)]
        _static(lower_graph, isa, op.region(x, *factors), arrays, 3 * _TOLERANCE[dtype])


@_isas
def test_empty_rows_give_identities(isa: Isa, lower_graph: Lower) -> None:
    ops = ["rsum", "rprod", "rmax", "rmin"]
    for dtype in (DType.F32, DType.I16, DType.U8, DType.BOOL):
        builder = BodyBuilder((dtype,))
        body = builder.finish(
            *(builder.emit(op, builder.input(0)) for op in ops[2 * (dtype is DType.BOOL) :])
        )
        for shape in ((3, 0), (100, 0)):
            _static(lower_graph, isa, Region(body, shape, (), 1), [np.zeros(shape, dtype.numpy)])


@_isas
def test_nan_and_infinity_in_rows(isa: Isa, lower_graph: Lower) -> None:
    x = _numbers(DType.F32, (5, 40))
    x[0, 37], x[1, 3], x[2] = np.nan, np.inf, -np.inf
    t = TensorType(DType.F32, x.shape)
    for op in (Softmax(-1), Reduce("max", (-1,)), Reduce("min", (-1,)), Reduce("logsumexp", (-1,))):
        with np.errstate(all="ignore"):
            _static(lower_graph, isa, op.region(t), [x], 1e-5)


def _chain() -> Body:
    """Softmax of an affine map that exposes what it passes through: full and uniform results."""
    builder = BodyBuilder((DType.F32,) * 3)
    x, c, d = (builder.input(i) for i in range(3))
    y = x * c + d
    total, top = builder.emit("rsum", y), builder.emit("rmax", y)
    e = builder.emit("exp", y - top)
    return builder.finish(e / builder.emit("rsum", e), total, y, builder.emit("tanh", total))


def _scratch() -> Body:
    """A costly value that two passes need while no result can hold it."""
    builder = BodyBuilder((DType.F32, DType.F32))
    x, c = (builder.input(i) for i in range(2))
    y = builder.emit("erf", x) * c
    z = y - builder.emit("rsum", y) * 0.01
    return builder.finish(builder.emit("rsum", z * z), builder.emit("rmin", x))


@_isas
def test_rows_of_two_axes_and_symbols(isa: Isa, lower_graph: Lower) -> None:
    s = symbol("s")
    space: tuple[Dim, ...] = (3, 4, s, 6)
    shapes: list[tuple[Dim, ...]] = [space, (s, 1), (3, 1, 1, 1)]
    chain = lower_graph(
        _graph(Region(_chain(), space, (), 2), [TensorType(DType.F32, t) for t in shapes]), isa
    )
    scratch = lower_graph(
        _graph(Region(_scratch(), space, (), 2), [TensorType(DType.F32, t) for t in shapes[:2]]),
        isa,
    )
    assert any(thunk.scratch != 0 for thunk in scratch.program.thunks)
    for n in (1, 2, 7, 60):
        arrays = [
            _numbers(DType.F32, t, i) for i, t in enumerate(((3, 4, n, 6), (n, 1), (3, 1, 1, 1)))
        ]
        _check(chain, arrays, 1e-5)
        _check(scratch, arrays[:2], 2e-5)


@_isas
@pytest.mark.parametrize(
    ("shape", "perm", "row_axes"),
    [
        ((50, 33), (1, 0), 1),
        ((7, 20, 45), (0, 2, 1), 1),
        ((2, 9, 8, 65), (0, 2, 3, 1), 2),
        ((2, 9, 8, 65), (2, 3, 0, 1), 2),
        ((300, 2), (1, 0), 1),
        ((1000, 1), (1, 0), 1),
    ],
    ids=str,
)
def test_rows_across_memory(
    shape: tuple[int, ...], perm: tuple[int, ...], row_axes: int, isa: Isa, lower_graph: Lower
) -> None:
    space = [0] * len(shape)
    for extent, axis in zip(shape, perm, strict=True):
        space[axis] = extent
    index_map = IndexMap(len(shape), tuple(AxisMap(p) for p in perm))
    for dtype in (DType.F32, DType.F16, DType.I32, DType.I8, DType.F64):
        for kind in ("sum", "max", *(("logsumexp", "mean") if dtype.is_float else ())):
            axes = tuple(range(len(shape) - row_axes, len(shape)))
            whole = Reduce(kind, axes).region(TensorType(dtype, tuple(space)))
            assert whole is not None
            region = Region(whole.body, tuple(space), (index_map,), row_axes)
            tolerance = 10 * _TOLERANCE[dtype] if dtype.is_float else 0
            _static(lower_graph, isa, region, [_numbers(dtype, shape)], tolerance)


def test_sums_of_many_terms_stay_accurate(lower_graph: Lower) -> None:
    x = np.random.default_rng(0).random((40000, 20), np.float32)
    for array, perm in ((x, (1, 0)), (np.ascontiguousarray(x.T), (0, 1))):
        index_map = IndexMap(2, tuple(AxisMap(p) for p in perm))
        body = BodyBuilder((DType.F32,))
        region = Region(body.finish(body.emit("rsum", body.input(0))), (20, 40000), (index_map,), 1)
        _static(lower_graph, _HOST, region, [array], 5e-6)


# -- memory


def _guarded(size: int) -> Array:
    """Return bytes that end where a page begins that nobody may touch."""
    page = mmap.PAGESIZE
    pages = -(-max(size, 1) // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address + pages * page, page, 0) == 0
    return np.frombuffer(memory, np.uint8, pages * page)[pages * page - size :]


def _guard_all(lowered: Any) -> Any:
    """Make every launch of a lowered graph run on operands that end at a guard page."""
    plain = lowered._launch

    def launch(thunk: Thunk, env: dict[str, int], buffers: list[Array], *, split: bool) -> None:
        moved = [_guarded(b.size) for b in buffers]
        for target, source in zip(moved, buffers, strict=True):
            target[:] = source
        plain(thunk, env, moved, split=split)
        for target, source in zip(buffers, moved, strict=True):
            target[:] = source

    lowered._launch = launch
    return lowered


@_isas
def test_nothing_outside_an_operand_is_touched(isa: Isa, lower_graph: Lower) -> None:
    for dtype in (DType.F32, DType.F16, DType.I8, DType.F64):
        for shape in ((1,), (17,), (3, 33), (100, 3)):
            t = TensorType(dtype, shape)
            body = trace(_sum, [dtype] * 2)
            rows = Reduce("max", (-1,)).region(t)
            assert rows is not None
            for region, count in ((Region(body, shape), 2), (rows, 1)):
                lowered = _guard_all(lower_graph(_graph(region, [t] * count), isa))
                _check(lowered, [_numbers(dtype, shape, i) for i in range(count)], 0)


def _share(lowered: Any) -> list[tuple[int, int]]:
    """Make every launch write its results over the operands it allows; return the pairs."""
    plain = lowered._launch
    seen: list[tuple[int, int]] = []

    def launch(thunk: Thunk, env: dict[str, int], buffers: list[Array], *, split: bool) -> None:
        shared = list(buffers)
        taken = dict[int, int]()
        for read, write in thunk.inplace:
            if read not in taken and write not in taken.values():
                shared[write] = buffers[read].copy()
                shared[read] = shared[write]
                taken[read] = write
        seen.extend(taken.items())
        plain(thunk, env, shared, split=split)
        for arg in thunk.args:
            if isinstance(arg, SlotArg) and arg.writes:
                buffers[arg.slot][:] = shared[arg.slot]

    lowered._launch = launch
    return seen


@_isas
def test_results_may_lie_in_operands(isa: Isa, lower_graph: Lower) -> None:
    x = TensorType(DType.F32, (30, 50))
    gain = TensorType(DType.F32, (50,))
    regions: list[tuple[Region | None, list[TensorType]]] = [
        (Region(_AFFINE, (30, 50)), [x, gain, x]),
        (Softmax(-1).region(x), [x]),
        (LayerNorm(-1, 1e-5).region(x, gain, gain), [x, gain, gain]),
    ]
    for region, types in regions:
        assert region is not None
        lowered = lower_graph(_graph(region, types), isa)
        arrays = [_numbers(DType.F32, [int(d) for d in t.shape], i) for i, t in enumerate(types)]
        apart = _check(lowered, arrays, 1e-5)
        seen = _share(lowered)
        together = _check(lowered, arrays, 1e-5)
        assert seen
        assert together["y0"].tobytes() == apart["y0"].tobytes()


def test_no_sharing_where_an_element_is_read_after_it_was_overwritten(lower_graph: Lower) -> None:
    x = TensorType(DType.F32, (20, 20))
    graph = Graph()
    value = graph.add_input("x0", x)
    maps = (IndexMap(2, (AxisMap(0), AxisMap(1))), IndexMap(2, (AxisMap(1), AxisMap(0))))
    body = trace(_sum, [DType.F32] * 2)
    with graph.facts.active():
        (result,) = Builder(graph.block, graph.facts).emit(
            Region(body, (20, 20), maps), value, value
        )
    graph.set_outputs({"y0": result})
    assert lower_graph(graph, _HOST).program.thunks[0].inplace == ()
    # The first result is written in the first pass, but the second pass reads the operand again.
    builder = BodyBuilder((DType.F32,))
    a = builder.input(0)
    doubled = a + a
    body = builder.finish(doubled, a - builder.emit("rsum", doubled))
    lowered = lower_graph(_graph(Region(body, (20, 20), (), 1), [x]), _HOST)
    (launch,) = lowered.program.thunks
    assert launch.inplace == ((lowered.program.inputs[0], lowered.program.outputs[1]),)
    _check(lowered, [_numbers(DType.F32, (20, 20))], 1e-5)
