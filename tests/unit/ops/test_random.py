# SPDX-License-Identifier: Apache-2.0
"""Random operators: pure functions of a key, with the distributions they claim."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.base import config
from rlx.base.dtypes import DType
from rlx.base.numeric import Array
from rlx.base.rng import RNG_INPUT
from rlx.ir.graph import Graph, Value
from rlx.ops.evaluate import evaluate
from rlx.ops.random import (
    bernoulli,
    dropout,
    multinomial,
    random_bits,
    random_normal,
    random_uniform,
    rng_fold,
)

N = 1 << 18
# Statistics of fixed seeds: 5 standard errors, so a right generator fails for one seed in two million.
SIGMAS = 5.0
FLOATS = [DType.F32, DType.F64, DType.F16, DType.BF16]


def draw(
    make: Callable[[Value], Value], device: str = "reference", policy: rlx.RngPolicy | None = None
) -> Array:
    with rlx.Graph() as g:
        g.output("y", make(g.rng("stream")))
    with rlx.compile(g, device, rng=policy) as m:
        return m()


def folded(counter: tuple[int, ...], key: tuple[int, ...], isa: str) -> list[int]:
    """Return Philox's words by way of the operator: its key holds half of the counter."""
    with rlx.Graph() as g:
        given = g.input("key", [4], "u32")
        number = g.input("number", [], "u64")
        g.output("y", rng_fold(given, number))
    words = np.array([*key, *counter[2:]], np.uint32)
    with config.override(RLX_CPU_ISA=isa), rlx.compile(g) as m:
        assert m.program.compiled.dispatch == [("rng_fold", "kernel", 1)]
        return m(words, np.array(counter[0] | counter[1] << 32, np.uint64)).tolist()


@pytest.mark.parametrize("isa", ["v3", "v4"])
def test_published_vectors_on_the_cpu(isa: str) -> None:
    ones = 0xFFFFFFFF
    assert folded((0,) * 4, (0, 0), isa) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert folded((ones,) * 4, (ones,) * 2, isa) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert folded(pi, (0xA4093822, 0x299F31D0), isa) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


@pytest.mark.parametrize("isa", ["v3", "v4"])
@pytest.mark.parametrize("dtype", [DType.U32, DType.U64, *FLOATS])
def test_bits_and_uniforms_are_the_same_everywhere(isa: str, dtype: DType) -> None:
    make = random_bits if dtype.is_integer else random_uniform

    def values(key: Value) -> Value:
        return make(key, (10007,), dtype=dtype)

    want = draw(values)
    with config.override(RLX_CPU_ISA=isa):
        got = draw(values, "cpu")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("isa", ["v3", "v4"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_normals_are_within_4_ulp(isa: str, dtype: DType) -> None:
    def values(key: Value) -> Value:
        return random_normal(key, (1 << 16,), dtype=dtype)

    want = draw(values)
    with config.override(RLX_CPU_ISA=isa):
        got = draw(values, "cpu")
    assert (np.abs(got - want) <= 4 * np.spacing(np.abs(want))).all()


def test_element_i_depends_on_the_key_and_i_alone() -> None:
    """A batch begins like a smaller one, whatever the shape, the threads and the chunks."""
    with rlx.Graph() as g:
        x = g.input("x", ["N", 3])
        g.output("y", random_normal(g.rng("s"), x.type.shape))
    found: list[Array] = []
    for threads in (1, 2):
        for rows in (1, 7, 20000):
            with rlx.compile(g, threads=threads) as m:
                found.append(m(np.zeros((rows, 3), np.float32)).reshape(-1))
    longest = found[-1]
    for some in found:
        np.testing.assert_array_equal(some, longest[: some.size])


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_distribution(device: str, dtype: DType) -> None:
    y = draw(lambda key: random_uniform(key, (N,), dtype=dtype), device).astype(np.float64)
    assert y.min() >= 0
    assert y.max() < 1
    step = 2.0 ** -{DType.F16: 11, DType.BF16: 8, DType.F32: 24, DType.F64: 53}[dtype]
    # Multiples of `step`, so half a step below the continuous distribution.
    y += step / 2
    for power in (1, 2, 3, 4):
        mean, second = 1 / (power + 1), 1 / (2 * power + 1)
        error = math.sqrt((second - mean**2) / N)
        assert abs((y**power).mean() - mean) < SIGMAS * error + step
    assert (
        _distance(np.sort(y)) < 2.2 / math.sqrt(N) + step
    )  # Kolmogorov: exceeded once in 8,000 seeds


def _distance(cumulative: Array) -> float:
    """Return the Kolmogorov-Smirnov distance of sorted values of a distribution function from uniform."""
    ranks = np.arange(cumulative.size)
    return float(
        max((cumulative - ranks / ranks.size).max(), ((ranks + 1) / ranks.size - cumulative).max())
    )


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_distribution(device: str, dtype: DType) -> None:
    y = draw(lambda key: random_normal(key, (N,), dtype=dtype), device).astype(np.float64)
    moments = {1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0, 6: 15.0}
    double = {1: 1.0, 2: 3.0, 3: 15.0, 4: 105.0, 6: 10395.0}
    rounding = {DType.F16: 2**-11, DType.BF16: 2**-8}.get(dtype, 0.0)
    for power, mean in moments.items():
        error = math.sqrt((double[power] - mean**2) / N)
        assert abs((y**power).mean() - mean) < SIGMAS * error + power * mean * rounding, power
    probability = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in np.sort(y)])
    assert _distance(probability) < 2.2 / math.sqrt(N) + rounding
    assert np.abs(y).max() > 4  # tails: of 2^18 draws about 16 are beyond


def test_mean_and_scale() -> None:
    y = draw(lambda key: random_normal(key, (N,), 3.0, 0.5)).astype(np.float64)
    assert abs(y.mean() - 3) < SIGMAS * 0.5 / math.sqrt(N)
    assert abs(y.std() - 0.5) < SIGMAS * 0.5 / math.sqrt(2 * N)


def test_streams_seeds_and_runs_are_independent() -> None:
    with rlx.Graph() as g:
        for name in ("a", "b"):
            g.output(name, random_normal(g.rng(name), (N,)))
    found: list[Array] = []
    for seed in (1, 2, 1 << 40):
        with rlx.compile(g, rng=rlx.RngPolicy(seed)) as m:
            for _ in range(2):
                found.extend(m.run({}).values())
    assert len(found) == 12
    stacked = np.stack(found).astype(np.float64)
    correlation = stacked @ stacked.T / N - np.eye(12)
    assert np.abs(correlation).max() < SIGMAS * math.sqrt(2 / N)
    # Nor are neighbouring elements.
    for y in found:
        z = y.astype(np.float64)
        assert abs((z[1:] * z[:-1]).mean()) < SIGMAS / math.sqrt(N)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(-3.0, 5.0), (1.0, 1.0), (100.0, 101.0), (-1e-3, 1e3)])
def test_uniform_interval_is_half_open(dtype: DType, low: float, high: float) -> None:
    y = draw(lambda key: random_uniform(key, (N,), low, high, dtype), "cpu")
    ends = np.array([low, high]).astype(dtype.numpy).astype(np.float64)
    values = y.astype(np.float64)
    assert values.min() >= ends[0]
    if low == high:
        assert values.max() == ends[1]
    else:
        assert values.max() < ends[1]


def test_uniform_refuses_no_interval() -> None:
    for low, high in ((1.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0), (-3e38, 3e38)):
        with pytest.raises(rlx.TypeRuleError, match="bound no interval of f32"):
            draw(lambda key, ends=(low, high): random_uniform(key, (3,), *ends))


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bernoulli(device: str, dtype: DType) -> None:
    chances = [0.0, 0.25, 1.0, float("nan"), -0.5, 1.5]
    p = np.repeat(np.array(chances).astype(dtype.numpy), 1 << 14)
    with rlx.Graph() as g:
        x = g.input("p", [p.size], dtype)
        g.output("y", bernoulli(g.rng("s"), x))
        g.output("mask", bernoulli(g.rng("t"), x, DType.BOOL))
    with rlx.compile(g, device) as m:
        y, mask = m(p)
    assert y.dtype == dtype.numpy
    assert mask.dtype == np.bool_
    for found in (y, mask):
        share = found.astype(np.float64).reshape(len(chances), -1).mean(axis=1)
        assert share[[0, 3, 4]].tolist() == [0, 0, 0]
        assert share[[2, 5]].tolist() == [1, 1]
        assert abs(share[1] - 0.25) < SIGMAS * math.sqrt(0.25 * 0.75 / (1 << 14))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_multinomial(device: str) -> None:
    chances = np.array([[0.0, 0.5, 0.2, 0.3, 0.0], [0.1, 0.0, 0.0, 0.0, 0.9]])
    with np.errstate(divide="ignore"):
        logits = (np.log(chances) + np.array([[50.0], [-700.0]])).astype(np.float32)
    count = 1 << 15
    with rlx.Graph() as g:
        x = g.input("x", ["B", 5])
        g.output("y", multinomial(g.rng("s"), x, count, DType.I64))
    with rlx.compile(g, device) as m:
        y = m(logits)
    assert y.dtype == np.int64
    for row, chance in zip(y, chances, strict=True):
        share = np.bincount(row, minlength=5) / count
        assert (share[chance == 0] == 0).all()
        assert (
            np.abs(share - chance) < SIGMAS * np.sqrt(chance * (1 - chance) / count) + 1e-12
        ).all()


@pytest.mark.parametrize("ratio", [-0.5, 1.5, float("nan")])
def test_a_dropout_ratio_out_of_range_is_refused(ratio: float) -> None:
    with rlx.Graph() as g:
        given = g.input("x", [3])
        with pytest.raises(rlx.TypeRuleError, match=r"lies in \[0, 1\]"):
            dropout(g.rng("s"), given, ratio)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_dropout(device: str, ratio: float) -> None:
    x = np.linspace(1, 2, N, dtype=np.float32)
    x[0] = np.inf
    with rlx.Graph() as g:
        given = g.input("x", [N])
        y, mask = dropout(g.rng("s"), given, ratio)
        g.output("y", y)
        g.output("mask", mask)
    with rlx.compile(g, device) as m:
        found, kept = m(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.float32(1) / (np.float32(1) - np.float32(ratio))
        np.testing.assert_array_equal(found, np.where(kept, x * scale, np.float32(0)))
    assert abs(kept.mean() - (1 - ratio)) <= SIGMAS * math.sqrt(ratio * (1 - ratio) / N)


def test_draws_stay_apart_in_every_pass() -> None:
    """Alike but for their streams, next to each other, their results used twice: none is merged, folded or repeated."""
    with rlx.Graph() as g:
        a, b = (random_uniform(g.rng(name), (64,)) for name in ("a", "b"))
        g.output("sum", a + b)
        g.output("product", a * b)
        g.output("same", a - a * 1.0)
    with rlx.compile(g) as m:
        dispatch = {op: count for op, _, count in m.program.compiled.dispatch}
        found = m.run({})
    assert dispatch["random_uniform"] == 2
    assert (found["same"] == 0).all()
    first, second = (draw_of(name) for name in ("a", "b"))
    np.testing.assert_array_equal(found["sum"], first + second)
    np.testing.assert_array_equal(found["product"], first * second)


def draw_of(stream: str) -> Array:
    with rlx.Graph() as g:
        g.output("y", random_uniform(g.rng(stream), (64,)))
    with rlx.compile(g, "reference") as m:
        return m()


def test_a_draw_of_a_constant_key_is_not_folded() -> None:
    from rlx.ops.leaf import constant

    with rlx.Graph() as g:
        g.output("y", random_bits(constant(np.zeros(4, np.uint32)), (1000,)))
    with rlx.compile(g) as m:
        assert ("random_bits", "kernel", 1) in list(m.program.compiled.dispatch)


def test_a_stream_is_used_once() -> None:
    with rlx.Graph() as g:
        g.rng("noise")
        with pytest.raises(rlx.UsageError, match="stream 'noise' already"):
            g.rng("noise")


def test_adding_a_draw_elsewhere_changes_nothing() -> None:
    def model(extra: bool) -> Array:
        with rlx.Graph() as g:
            if extra:
                g.output("before", random_normal(g.rng("before"), (5,)))
            g.output("y", random_normal(g.rng("noise"), (100,)))
            if extra:
                g.output("after", random_normal(g.rng("after"), (5,)))
        with rlx.compile(g) as m:
            return m.run({})["y"]

    np.testing.assert_array_equal(model(False), model(True))


def test_what_is_no_key_is_refused() -> None:
    with rlx.Graph() as g:
        x = g.input("x", [5], "u32")
        with pytest.raises(rlx.TypeRuleError, match=r"a key is u32\[4\], not u32\[5\]"):
            random_normal(x, (3,))
        with pytest.raises(rlx.TypeRuleError, match=r"a key is u32\[4\], not u32\[5\]"):
            rng_fold(x, 1)
        with pytest.raises(rlx.TypeRuleError, match=r"the logits are \[batch, classes\]"):
            multinomial(g.rng("s"), x, 1)


def test_evaluating_a_graph_needs_the_key() -> None:
    with rlx.Graph() as g:
        g.output("y", random_bits(g.rng("s"), (4,)))
    ir: Graph = g.ir
    with pytest.raises(rlx.UsageError, match=RNG_INPUT):
        evaluate(ir, {})
    found = evaluate(ir, {RNG_INPUT: np.zeros(4, np.uint32)})["y"]
    with rlx.compile(g) as m:
        np.testing.assert_array_equal(m(), found)


def test_narrow_uniforms_reach_every_value() -> None:
    y = draw(lambda key: random_uniform(key, (N,), dtype=DType.BF16))
    assert y.dtype == ml_dtypes.bfloat16
    values, counts = np.unique((y.astype(np.float64) * 256).astype(int), return_counts=True)
    assert values.tolist() == list(range(256))
    expected = N / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 255) < SIGMAS * math.sqrt(2 * 255)
