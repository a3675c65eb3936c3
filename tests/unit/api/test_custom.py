# SPDX-License-Identifier: Apache-2.0
"""Registered operators: what they may do, and that their faults stay theirs."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.cpu.emit import load_value, store_value
from rlx.backends.cpu.kernels.custom import Kernel, Tensor
from rlx.base import config
from rlx.base.numeric import Array
from rlx.ir.op import lookup_op, registered_ops
from rlx.ir.parse import parse_graph
from rlx.ir.text import print_graph
from rlx.ops.custom import Custom, CustomOperator
from rlx.ops.leaf import constant
from rlx.ops.norm import softmax

DEVICES = ["reference", "cpu"]
DTYPES = ["f32", "f64", "f16", "bf16", "i32", "u8", "bool"]


@pytest.fixture(autouse=True)
def _clean() -> Generator[None]:
    """Leave no operator behind."""
    yield
    for name, cls in list(registered_ops().items()):
        if issubclass(cls, Custom):
            cls.operator.unregister()
            assert lookup_op(name) is None


def same(x: rlx.TensorType, **_: Any) -> rlx.TensorType:
    return x


def identity(x: Array) -> Array:
    return x


def multiplied(x: Array, *, out: Array, factor: float) -> None:
    np.multiply(x, factor, out=out)


def registered(name: str) -> CustomOperator:
    found = lookup_op(name)
    assert found is not None
    assert issubclass(found, Custom)
    return found.operator


def make_scale(**options: Any) -> CustomOperator:
    @rlx.op("example.scale", infer=same, **options)
    def scale(x: Array, *, factor: float = 2.0) -> Array:
        """X times a factor."""
        return x * factor

    return scale


def graph_of(
    operator: Callable[..., Any], shape: list[int | str], dtype: str = "f32", **attributes: Any
) -> rlx.Graph:
    with rlx.Graph("g") as g:
        g.output("y", operator(g.input("x", shape, dtype), **attributes))
    return g


# -- what runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_reference_runs_everywhere(device: str) -> None:
    with rlx.compile(graph_of(make_scale(), ["N", 3], factor=3), device) as m:
        for rows in (1, 5):
            x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
            np.testing.assert_array_equal(m(x), x * 3)
        how = {name: how for name, how, _ in m.program.compiled.dispatch}
    assert how["example.scale"] == ("host" if device == "cpu" else "reference")


def test_a_host_kernel_sees_the_memory_of_the_program() -> None:
    """Operand and result are views: of the caller's arrays where these are the graph's own."""
    scale = make_scale()
    seen: list[tuple[int, int, bool, bool, Any]] = []

    @scale.kernel("cpu")
    def _(x: Array, *, out: Array, factor: float) -> None:
        seen.append((address(x), address(out), x.flags.writeable, out.flags.writeable, x.shape))
        np.multiply(x, factor, out=out)

    x, y = np.ones((2, 3), np.float32), np.empty((2, 3), np.float32)
    with rlx.compile(graph_of(scale, ["N", 3])) as m:
        m.run({"x": x}, out={"y": y})
        assert ("example.scale", "python", 1) in list(m.program.compiled.dispatch)
    np.testing.assert_array_equal(y, x * 2)
    assert seen == [(address(x), address(y), False, True, (2, 3))]


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_have_the_graphs_dtype(dtype: str) -> None:
    scale = make_scale()
    seen: list[np.dtype[Any]] = []

    @scale.kernel("cpu")
    def _(x: Array, *, out: Array, factor: float) -> None:
        seen.extend([x.dtype, out.dtype])
        out[...] = x

    numpy = rlx.DType.of(dtype).numpy
    x = np.array([0, 1, 2]).astype(numpy)
    with rlx.compile(graph_of(scale, [3], dtype)) as m:
        np.testing.assert_array_equal(m(x), x)
    assert seen == [numpy, numpy]


def test_the_reference_gets_narrow_floats_widened() -> None:
    seen: list[np.dtype[Any]] = []

    @rlx.op("example.third", infer=same)
    def third(x: Array) -> Array:
        seen.append(x.dtype)
        return x / 3

    x = np.array([1, 2], ml_dtypes.bfloat16)
    for device in DEVICES:
        with rlx.compile(graph_of(third, [2], "bf16"), device) as m:
            y = m(x)
        np.testing.assert_array_equal(y, (x.astype(np.float32) / 3).astype(ml_dtypes.bfloat16))
    assert set(seen) == {np.dtype(np.float32)}


def test_a_view_that_is_kept_stays_readable() -> None:
    scale = make_scale()
    kept: list[Array] = []

    @scale.kernel("cpu")
    def _(x: Array, *, out: Array, factor: float) -> None:
        kept.extend([x, out])
        out[...] = x

    with rlx.Graph() as g:
        x = g.input("x", [1 << 16])
        g.output("y", scale(x + 1) + 1)
    with rlx.compile(g) as m:
        m(np.zeros(1 << 16, np.float32))
    assert [float(view.sum()) >= 0 for view in kept] == [True, True]


def rows(x: rlx.TensorType, **_: Any) -> Any:
    return x.shape[0]


def _native(scale: CustomOperator) -> None:
    @scale.native_kernel("cpu", chunks=rows)
    def _(k: Kernel, x: Tensor, *, out: Tensor, factor: float) -> None:
        assert len(x.shape) == 2
        count = x.shape[1]
        with k.loop(k.begin * count, k.end * count) as loop:
            value = load_value(k, x.dtype, x.pointer, loop.index, 0)
            store_value(k, out.dtype, value * factor, out.pointer, loop.index)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_a_native_kernel(threads: int, dtype: str) -> None:
    scale = make_scale()
    _native(scale)
    graph = graph_of(scale, ["N", "M"], dtype, factor=3.0)
    with config.override(RLX_CHECK=True), rlx.compile(graph, threads=threads) as m:
        for shape in ((1, 1), (7, 33), (300, 5)):
            x = np.arange(np.prod(shape)).reshape(shape).astype(rlx.DType.of(dtype).numpy)
            want = (x.astype(np.float64) * 3).astype(x.dtype)
            np.testing.assert_array_equal(m(x), want)
        assert ("example.scale", "kernel", 1) in list(m.program.compiled.dispatch)


def test_a_native_kernel_that_cannot_be_emitted() -> None:
    scale = make_scale()

    @scale.native_kernel("cpu")
    def _(k: Kernel, x: Tensor, *, out: Tensor, factor: float) -> None:
        raise KeyError("no such thing")

    with pytest.raises(rlx.CompileError, match=r"example\.scale at node .*: 'no such thing'"):
        rlx.compile(graph_of(scale, [3]))


def test_optional_and_variadic_operands_and_several_results() -> None:
    def three(*types: rlx.TensorType | None) -> Any:
        return (types[0],) * 3

    @rlx.op("example.ends", infer=three)
    def ends(x: Array, low: Array | None = None, *rest: Array) -> tuple[Array, ...]:
        least = x if low is None else np.maximum(x, low)
        return least, np.stack([x, *rest]).max(axis=0), x

    given: list[tuple[bool, int]] = []

    @ends.kernel("cpu")
    def _(x: Array, low: Array | None = None, *rest: Array, out: tuple[Array, ...]) -> None:
        given.append((low is None, len(rest)))
        for target, value in zip(out, ends.function(x, low, *rest), strict=True):
            target[...] = value

    with rlx.Graph() as g:
        x, a, b = (g.input(n, [4]) for n in "xab")
        for prefix, results in (("p", ends(x)), ("q", ends(x, None, a, b)), ("r", ends(x, a))):
            for index, value in enumerate(results):
                g.output(f"{prefix}{index}", value)
    data = {n: np.random.default_rng(i).random(4, np.float32) for i, n in enumerate("xab")}
    with rlx.compile(g) as m, rlx.compile(g, "reference") as reference:
        got, want = m.run(data), reference.run(data)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, name)
    assert given == [(True, 0), (True, 2), (False, 0)]
    with rlx.Graph(), pytest.raises(rlx.TypeRuleError, match=r"takes \(x, low\?, rest\*\), not 0"):
        ends()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_folded_merged_or_hoisted(device: str) -> None:
    """A function may have effects: it runs once per node and run, on constants and weights as well."""
    calls: list[int] = []

    @rlx.op("example.count", infer=same)
    def count(x: Array) -> Array:
        calls.append(1)
        return x + len(calls)

    with rlx.Graph() as g:
        weight = g.param("w", np.zeros(2, np.float32))
        g.output("a", count(constant(np.zeros(2, np.float32))))
        g.output("b", count(constant(np.zeros(2, np.float32))))
        g.output("c", count(weight))
    with rlx.compile(g, device) as m:
        assert not calls
        for run in range(2):
            found = [float(v[0]) for v in m.run({}).values()]
            assert sorted(found) == [run * 3 + 1, run * 3 + 2, run * 3 + 3]


# -- what goes wrong -----------------------------------------------------------------------------------------------


class OwnError(Exception):
    """Not of rlx."""


class OwnExecutionError(rlx.ExecutionError):
    """A subclass of one of rlx."""


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [ValueError, MemoryError, OwnError, OwnExecutionError])
def test_an_exception_passes_through_with_a_note(
    kind: type[Exception], device: str, kernel: bool
) -> None:
    fail = True

    @rlx.op("example.picky", infer=same)
    def picky(x: Array) -> Array:
        if fail:
            raise kind("not today")
        return x + 1

    if kernel:

        @picky.kernel("cpu")
        def _(x: Array, *, out: Array) -> None:
            out[...] = picky.function(x)

    with rlx.Graph() as g:
        x = g.input("x", [3])
        g.output("y", picky(x * 2) * 2)
    x = np.ones(3, np.float32)
    with rlx.compile(g, device) as m:
        for attempt in (lambda: m(x), lambda: m.run_async({"x": x}).result()):
            with pytest.raises(kind, match="not today") as caught:
                attempt()
            assert type(caught.value) is kind
            (note,) = [n for n in caught.value.__notes__ if "example.picky" in n]
            assert "test_custom.py" in note
        fail = False
        np.testing.assert_array_equal(m(x), [6, 6, 6])


def test_an_interrupt_leaves_the_executable_usable() -> None:
    interrupt = True

    @rlx.op("example.long", infer=same)
    def long(x: Array) -> Array:
        if interrupt:
            raise KeyboardInterrupt
        return x

    with rlx.compile(graph_of(long, [3])) as m:
        x = np.ones(3, np.float32)
        with pytest.raises(KeyboardInterrupt):
            m(x)
        interrupt = False
        np.testing.assert_array_equal(m(x), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.zeros(4, np.float32), r"gave f32\[4\], its type rule says f32\[3\]"),
        (np.zeros(3, np.int32), r"gave i32\[3\], its type rule says f32\[3\]"),
        ((np.zeros(3, np.float32),) * 2, "gave 2 results, its type rule says 1"),
    ],
    ids=["shape", "dtype", "count"],
)
def test_lies_about_the_result_are_caught(device: str, result: Any, message: str) -> None:
    @rlx.op("example.liar", infer=same)
    def liar(x: Array) -> Any:
        return result

    with rlx.compile(graph_of(liar, [3]), device) as m:
        for _ in range(2):
            with pytest.raises(rlx.ExecutionError, match=rf"example\.liar at node .*{message}"):
                m(np.zeros(3, np.float32))


def test_a_kernel_has_to_write_not_to_return() -> None:
    scale = make_scale()

    @scale.kernel("cpu")
    def _(x: Array, *, out: Array, factor: float) -> Array:
        return x * factor

    with (
        rlx.compile(graph_of(scale, [3])) as m,
        pytest.raises(rlx.ExecutionError, match="returned a ndarray; it has to write into `out`"),
    ):
        m(np.zeros(3, np.float32))


def test_a_kernel_may_not_write_its_operand() -> None:
    scale = make_scale()

    @scale.kernel("cpu")
    def _(x: Array, *, out: Array, factor: float) -> None:
        x[0] = 1

    with rlx.compile(graph_of(scale, [3])) as m, pytest.raises(ValueError, match="read-only"):
        m(np.zeros(3, np.float32))


def test_running_the_executable_inside_of_itself_is_refused() -> None:
    @rlx.op("example.recursive", infer=same)
    def recursive(x: Array) -> Array:
        return executables[0](x)

    executables: list[rlx.Executable] = []
    with rlx.compile(graph_of(recursive, [3])) as m:
        executables.append(m)
        with pytest.raises(rlx.UsageError):
            m(np.zeros(3, np.float32))


def divides(x: rlx.TensorType) -> Any:
    return x.rank / 0


def pairs(x: rlx.TensorType) -> Any:
    return x.dtype, x.shape


def of_two(x: rlx.TensorType, y: rlx.TensorType) -> Any:
    return x, y


def nothing(x: rlx.TensorType) -> Any:
    del x


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (divides, "its type rule raised ZeroDivisionError"),
        (pairs, "its type rule returned .* not an rlx.TensorType"),
        (of_two, "its type rule raised TypeError"),
        (nothing, "its type rule returned None"),
    ],
    ids=["raises", "returns", "arity", "nothing"],
)
def test_faults_of_the_type_rule_are_type_errors(rule: Any, message: str) -> None:
    @rlx.op("example.typeless", infer=rule)
    def typeless(x: Array) -> Array:
        return x

    with pytest.raises(rlx.TypeRuleError, match=message):
        graph_of(typeless, [3])


def test_a_type_rule_refuses_with_its_own_words() -> None:
    def floats_only(x: rlx.TensorType) -> rlx.TensorType:
        if not x.dtype.is_float:
            raise rlx.TypeRuleError(f"needs floats, not {x}")
        return x

    @rlx.op("example.floats", infer=floats_only)
    def floats(x: Array) -> Array:
        return x

    with pytest.raises(rlx.TypeRuleError, match=r"example\.floats\(i32\[3\]\).*: needs floats"):
        graph_of(floats, [3], "i32")


def test_host_ops_error_refuses_only_what_has_no_kernel() -> None:
    scale = make_scale()
    graph = graph_of(scale, [3])
    with pytest.raises(rlx.UnsupportedOpError, match=r"example\.scale"):
        rlx.compile(graph, host_ops="error")
    scale.kernel("cpu")(multiplied)
    with rlx.compile(graph, host_ops="error") as m:
        np.testing.assert_array_equal(m(np.ones(3, np.float32)), [2, 2, 2])


# -- attributes ----------------------------------------------------------------------------------------------------


def test_attributes_are_typed() -> None:
    seen: list[dict[str, Any]] = []

    @rlx.op("example.typed", infer=same)
    def typed(
        x: Array,
        *,
        count: int,
        scale: float = 1.0,
        flag: bool = False,
        mode: str = "fast",
        to: rlx.DType = rlx.DType.F32,
        axes: tuple[int, ...] = (),
        weights: tuple[float, ...] = (),
    ) -> Array:
        given = {"count": count, "scale": scale, "flag": flag, "mode": mode, "to": to}
        seen.append({**given, "axes": axes, "weights": weights})
        return x

    graph = graph_of(typed, [1], count=3, scale=2, to="i8", axes=[1, 2], weights=(1, 2.5))
    text = print_graph(graph.ir)
    assert print_graph(parse_graph(text)) == text
    with rlx.compile(graph) as m:
        m(np.zeros(1, np.float32))
    want = {"count": 3, "scale": 2.0, "flag": False, "mode": "fast", "to": rlx.DType.I8}
    assert seen == [{**want, "axes": (1, 2), "weights": (1.0, 2.5)}]
    assert type(seen[0]["scale"]) is float

    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "needs 'count'; its attributes are count, scale, flag"),
        ({"count": 1, "factor": 2}, "has no attribute 'factor'"),
        ({"count": 1.5}, "attribute 'count' is a int, not 1.5"),
        ({"count": True}, "attribute 'count' is a int, not True"),
        ({"count": 1, "mode": 3}, "attribute 'mode' is a str, not 3"),
        ({"count": 1, "axes": 3}, "attribute 'axes' is a tuple of int, not 3"),
        ({"count": 1, "axes": (1, "a")}, "attribute 'axes' is a tuple of int, not 'a'"),
    )
    for wrong, message in mistakes:
        with pytest.raises(rlx.UsageError, match=message):
            graph_of(typed, [1], "f32", **wrong)


def test_parameters_that_say_nothing_are_refused() -> None:
    untyped: Any = eval("lambda x, *, factor: x")  # a lambda has no annotations

    def listed(x: Array, *, factor: list[int]) -> Array:
        return x

    def anything(x: Array, **factor: float) -> Array:
        return x

    def positional(x: Array, factor: float = 1.0) -> Array:
        return x

    for function, message in (
        (untyped, "attribute 'factor' needs an annotation"),
        (listed, "attribute 'factor' needs an annotation"),
        (anything, r"\*\*factor has none"),
        (positional, "operand 'factor' has the default 1.0"),
    ):
        with pytest.raises(rlx.UsageError, match=message):
            rlx.op("example.bad", infer=same)(function)
        assert lookup_op("example.bad") is None


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale", "example.", ".scale", "example scale.x", "1x.y", ""])
def test_names_have_a_namespace(name: str) -> None:
    with pytest.raises(rlx.UsageError, match="give it a namespace"):
        rlx.op(name, infer=same)(identity)


@pytest.mark.parametrize("name", ["cpu.pack", "rlx.mine", "cuda.x", "add.more"])
def test_namespaces_of_rlx_are_taken(name: str) -> None:
    with pytest.raises(rlx.UsageError, match="is rlx's own"):
        rlx.op(name, infer=same)(identity)


def test_a_name_is_taken_until_it_is_given_up() -> None:
    first = make_scale()
    graph = graph_of(first, [3])
    with pytest.raises(
        rlx.UsageError, match=r"'example\.scale' is registered already, by .*test_custom"
    ):
        make_scale()
    second = make_scale(replace=True)
    with pytest.raises(rlx.UsageError, match="not registered, or replaced"):
        first.unregister()
    second.unregister()
    with pytest.raises(rlx.UsageError, match="not registered"):
        second.unregister()
    with rlx.compile(graph) as m:  # what has it keeps it
        np.testing.assert_array_equal(m(np.ones(3, np.float32)), [2, 2, 2])


def test_one_kernel_per_backend() -> None:
    scale = make_scale()
    _native(scale)
    with pytest.raises(rlx.UsageError, match="has a kernel for 'cpu' already"):
        scale.kernel("cpu")(multiplied)


def test_a_gradient_is_kept() -> None:
    scale = make_scale()

    @scale.vjp
    def gradient(x: Any, *, results: Any, gradients: Any, factor: float) -> Any:
        return (gradients[0] * factor,)

    assert scale.gradient is gradient


def test_pickling_goes_by_name() -> None:
    scale = make_scale()
    operator = scale.make({"factor": 3})
    data = pickle.dumps((scale, operator))
    found, same_operator = pickle.loads(data)
    assert found is scale
    assert same_operator == operator
    scale.unregister()
    with pytest.raises(rlx.UsageError, match=r"'example\.scale' is not registered here"):
        pickle.loads(data)


# -- threads -------------------------------------------------------------------------------------------------------


def test_executables_run_their_functions_in_parallel_threads() -> None:
    """Two functions wait for each other: neither executable holds what the other one needs."""
    barrier = threading.Barrier(2, timeout=20)

    @rlx.op("example.meet", infer=same)
    def meet(x: Array) -> Array:
        barrier.wait()
        return x + 1

    graph = graph_of(meet, [3])
    x = np.zeros(3, np.float32)
    with rlx.compile(graph) as a, rlx.compile(graph) as b, ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(a, x), pool.submit(b, x)]:
            np.testing.assert_array_equal(future.result(), [1, 1, 1])


def test_one_executable_from_several_threads_and_asynchronously() -> None:
    scale = make_scale()
    inside: list[int] = []

    @scale.kernel("cpu")
    def _(x: Array, *, out: Array, factor: float) -> None:
        inside.append(1)
        assert len(inside) == 1, "runs of one executable take turns"
        np.multiply(x, factor, out=out)
        inside.pop()

    with rlx.Graph() as g:
        x = g.input("x", ["N"])
        g.output("y", scale(x + 1) - 1)
    with rlx.compile(g) as m:
        inputs = [np.full(n % 5 + 1, n, np.float32) for n in range(40)]
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(m, x) for x in inputs]
            found = [w.result() for w in waiting]
        found += [r["y"] for r in m.run_pipelined([{"x": x} for x in inputs])]
        for x, y in zip([*inputs, *inputs], found, strict=True):
            np.testing.assert_array_equal(y, x * 2 + 1)


# -- ONNX ----------------------------------------------------------------------------------------------------------

onnx: Any = pytest.importorskip("onnx")
T: Any = onnx.TensorProto
helper: Any = onnx.helper


def info(name: str, kind: int = T.FLOAT, shape: Any = ()) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], inputs: list[Any], outputs: list[str]) -> Any:
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_empty_tensor_value_info(n) for n in outputs]
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def scaled_model() -> Any:
    node = helper.make_node("Scale", ["x"], ["y"], "my_node", domain="com.example", factor=3.0)
    return model([node], [info("x", shape=["N"])], ["y"])


@pytest.mark.parametrize("device", DEVICES)
def test_an_onnx_node(device: str) -> None:
    make_scale(onnx=("com.example", "Scale"))
    x = np.ones(3, np.float32)
    with rlx.load(scaled_model(), device) as m:
        np.testing.assert_array_equal(m(x), x * 3)


def test_onnx_attributes_and_operands() -> None:
    seen: list[Any] = []

    def two(x: rlx.TensorType, y: rlx.TensorType | None = None, **_: Any) -> Any:
        del y
        return x, x

    @rlx.op("example.typed", infer=two, onnx=("com.example", "Typed"))
    def typed(
        x: Array,
        y: Array | None = None,
        *,
        count: int,
        flag: bool = False,
        mode: str = "fast",
        dtype: rlx.DType = rlx.DType.F32,
        axes: tuple[int, ...] = (),
        weights: tuple[float, ...] = (),
        names: tuple[str, ...] = (),
        flags: tuple[bool, ...] = (),
    ) -> tuple[Array, Array]:
        seen.append((y is None, count, flag, mode, dtype, axes, weights, names, flags))
        return x, x

    given: dict[str, Any] = {"count": 3, "flag": 1, "mode": "slow", "dtype": T.DOUBLE}
    given |= {"axes": [1, -1], "weights": [0.5], "names": ["a", "b"], "flags": [1, 0]}
    nodes = [
        helper.make_node("Typed", ["x", ""], ["y", "z"], domain="com.example", **given),
        helper.make_node("Typed", ["y", "x"], ["w"], domain="com.example", count=1),
    ]
    with rlx.load(model(nodes, [info("x", shape=[2])], ["w", "z"])) as m:
        m(np.zeros(2, np.float32))
    first = (True, 3, True, "slow", rlx.DType.F64, (1, -1), (0.5,), ("a", "b"), (True, False))
    assert seen == [first, (False, 1, False, "fast", rlx.DType.F32, (), (), (), ())]


def test_faults_of_an_onnx_node_name_it() -> None:
    make_scale(onnx=("com.example", "Scale"))

    def load(**attributes: Any) -> None:
        node = helper.make_node(
            "Scale", ["x"], ["y"], "my_node", domain="com.example", **attributes
        )
        rlx.load(model([node], [info("x", shape=[3])], ["y"]))

    with pytest.raises(rlx.ModelError, match=r"my_node.*attribute 'factor' is 'three'"):
        load(factor="three")
    with pytest.raises(rlx.UnsupportedOpError, match="bias"):
        load(bias=1.0)


def test_onnx_names_are_given_up_with_the_operator() -> None:
    scale = make_scale(onnx=("com.example", "Scale"))

    @rlx.op("example.other", infer=same)
    def other(x: Array) -> Array:
        return x

    with pytest.raises(rlx.UsageError, match=r"com\.example::Scale is mapped already"):
        rlx.op("example.third", infer=same, onnx=("com.example", "Scale"))(identity)
    assert lookup_op("example.third") is None
    make_scale(onnx=("com.example", "Scale"), replace=True)
    with pytest.raises(rlx.UsageError):
        scale.unregister()
    registered("example.scale").unregister()
    with pytest.raises(rlx.UnsupportedOpError, match="Scale"):
        rlx.load(scaled_model())
    for bad in (("", "Scale"), ("ai.onnx", "Scale"), ("com.example", "")):
        with pytest.raises(rlx.UsageError, match="domain of your own"):
            make_scale(onnx=bad)
        assert lookup_op("example.scale") is None


@pytest.mark.parametrize("device", DEVICES)
def test_in_branches_and_loops(device: str) -> None:
    make_scale(onnx=("com.example", "Scale"))
    scale = helper.make_node("Scale", ["v"], ["w"], domain="com.example", factor=2.0)
    keep = helper.make_node("Identity", ["c"], ["c_out"])
    body = helper.make_graph(
        [scale, keep],
        "body",
        [info("i", T.INT64), info("c", T.BOOL), info("v", shape=[2])],
        [info("c_out", T.BOOL), info("w", shape=[2])],
    )
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    proto = model(nodes, [info("n", T.INT64), info("x", shape=[2])], ["y"])
    with rlx.load(proto, device) as m:
        for count in (0, 1, 5):
            y = m(np.array(count), np.ones(2, np.float32))
            np.testing.assert_array_equal(y, np.full(2, 2.0**count))


@pytest.mark.parametrize("threads", [1, 2])
def test_native_kernels_and_the_host_wait_for_each_other(threads: int) -> None:
    """Either side reads what the other has just written, in memory that is used again and again."""
    scale = make_scale()
    with rlx.Graph() as g:
        x = g.input("x", ["N", 64])
        weight = g.param("w", np.eye(64, dtype=np.float32))
        early = y = x + 1.0
        for _ in range(4):
            y = scale(y @ weight)
            y = softmax(y) * y + scale(y)
        g.output("y", y + early)
    data = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    want = data + 1
    for _ in range(4):
        y = want * 2
        e = np.exp(y - y.max(1, keepdims=True))
        want = e / e.sum(1, keepdims=True) * y + y * 2
    with config.override(RLX_CHECK=True), rlx.compile(g, threads=threads) as m:
        for rows in (300, 7, 300):
            expected = want[:rows] + data[:rows] + 1
            np.testing.assert_allclose(m(data[:rows]), expected, rtol=1e-4, atol=1e-4)
        assert m.memory().arena < 6 * data.nbytes


# -- caches --------------------------------------------------------------------------------------------------------


def _load_twice(path: Path) -> tuple[list[Array], bool]:
    """Return the results of two loads, and whether the second one came from the disk."""
    found: list[Array] = []
    warm = False
    for _ in range(2):
        with rlx.load(path, dims={"N": 8}) as m:
            found.append(m(np.ones(3, np.float32)))
            warm = "cache" in m.program.seconds
    return found, warm


@pytest.mark.parametrize("kernel", ["none", "python"])
def test_programs_are_kept_on_disk_only_with_a_version(tmp_path: Path, kernel: str) -> None:
    path = tmp_path / "scale.onnx"
    onnx.save(scaled_model(), path)
    os.utime(path, (1e9, 1e9))  # old enough to be known by its stamp

    def register(version: str, factor: float) -> None:
        @rlx.op(
            "example.scale",
            infer=same,
            onnx=("com.example", "Scale"),
            version=version,
            replace=True,
        )
        def scale(x: Array, *, factor: float) -> Array:
            return x * (factor + extra)

        extra = factor
        if kernel == "python":

            @scale.kernel("cpu")
            def _(x: Array, *, out: Array, factor: float) -> None:
                np.multiply(x, factor + extra, out=out)

    with config.override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        register("", 0.0)
        assert not _load_twice(path)[1]
        register("1", 0.0)
        found, warm = _load_twice(path)
        assert warm
        np.testing.assert_array_equal(found, np.full((2, 3), 3))
        register("2", 10.0)
        found, warm = _load_twice(path)
        assert warm
        np.testing.assert_array_equal(found, np.full((2, 3), 13))
        registered("example.scale").unregister()
        with pytest.raises(rlx.UnsupportedOpError, match="Scale"):
            rlx.load(path, dims={"N": 8})


def test_a_native_kernel_is_made_again_for_another_version(tmp_path: Path) -> None:
    path = tmp_path / "scale.onnx"
    node = helper.make_node("Scale", ["x"], ["y"], domain="com.example", factor=3.0)
    onnx.save(model([node], [info("x", shape=["N"])], ["y"]), path)
    os.utime(path, (1e9, 1e9))

    def register(version: str, extra: float) -> None:
        scale = make_scale(onnx=("com.example", "Scale"), version=version, replace=True)

        @scale.native_kernel("cpu")
        def _(k: Kernel, x: Tensor, *, out: Tensor, factor: float) -> None:
            with k.loop(0, x.shape[0]) as loop:
                value = load_value(k, x.dtype, x.pointer, loop.index, 0)
                store_value(k, out.dtype, value * (factor + extra), out.pointer, loop.index)

    with config.override(RLX_CACHE_DIR=str(tmp_path / "cache")):
        for version, extra, want in (("1", 0.0, 3), ("2", 1.0, 4)):
            register(version, extra)
            found, warm = _load_twice(path)
            assert warm
            np.testing.assert_array_equal(found, np.full((2, 3), want))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["run", "run_async"])
def test_an_operator_does_not_wait_for_the_executable_it_is_part_of(device: str, way: str) -> None:
    found: list[str] = []
    earlier: list[Any] = []
    entered = threading.Event()

    def use_it_again(x: Array) -> Array:
        if np.any(x):
            assert entered.wait(30)
            ways: list[Callable[[], Any]] = [
                lambda: m.run([x]),
                lambda: m.run_async([x]).result(),
                lambda: list(m.run_pipelined([[x]])),
                earlier[-1].result,
                m.warmup,
                m.close,
            ]
            for again in ways:
                try:
                    again()
                except rlx.UsageError as error:
                    found.append(str(error))
        return x

    again = rlx.op("test.again", infer=same)(use_it_again)
    with rlx.Graph("g") as g:
        g.output("y", again(g.input("x", [2])))
    m = rlx.compile(g, device)
    zero, one = np.zeros(2, np.float32), np.ones(2, np.float32)
    if way == "run":
        earlier.append(m.run_async([zero]))
        earlier[-1].result(30)
        entered.set()
        m.run([one])
        expected = 5  # what waits for a run that has ended does not wait
    else:
        first = m.run_async([one])
        earlier.append(first)
        entered.set()
        first.result(30)
        expected = 6
    assert found == [
        *["g is running: a run cannot use it again from its middle"] * (expected - 1),
        "g is running: it cannot be closed from there",
    ]
    np.testing.assert_array_equal(m.run_async([zero]).result(30)["y"], zero)
    m.close()
