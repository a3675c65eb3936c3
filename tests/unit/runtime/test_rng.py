# SPDX-License-Identifier: Apache-2.0
"""The random numbers of an executable: reproducible by seed and number of the run, different otherwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.base import config
from rlx.base.numeric import Array
from rlx.ops.leaf import constant
from rlx.ops.random import random_normal, random_uniform


def noise(shape: tuple[int, ...] = (1000,)) -> rlx.Graph:
    with rlx.Graph("noise") as g:
        g.output("y", random_normal(g.rng("noise"), shape))
    return g


@pytest.fixture(params=["reference", "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_executables_agree_and_runs_differ(device: str) -> None:
    with rlx.compile(noise(), device) as a, rlx.compile(noise(), device) as b:
        first = [a() for _ in range(3)]
        second = [b() for _ in range(3)]
    np.testing.assert_array_equal(first, second)
    assert len({y.tobytes() for y in first}) == 3


def test_seeds_differ(device: str) -> None:
    found: set[bytes] = set()
    for seed in (0, 1, 1 << 32, (1 << 64) - 1):
        with rlx.compile(noise(), device, rng=rlx.RngPolicy(seed)) as m:
            found.add(m().tobytes())
    assert len(found) == 4


def test_fresh_policies_differ() -> None:
    assert len({rlx.RngPolicy.fresh().seed for _ in range(8)}) == 8


def test_reading_and_setting_the_policy_repeats_runs(device: str) -> None:
    with rlx.compile(noise(), device, rng=rlx.RngPolicy(7)) as m:
        assert m.rng == rlx.RngPolicy(7, run=0)
        m()
        saved = m.rng
        assert saved == rlx.RngPolicy(7, run=1)
        again = [m() for _ in range(2)]
        m.rng = saved
        np.testing.assert_array_equal([m() for _ in range(2)], again)
        m.rng = rlx.RngPolicy(8, run=1)
        assert (m() != again[0]).any()


def test_the_number_of_the_run_has_64_bits(device: str) -> None:
    last = (1 << 64) - 1
    with rlx.compile(noise(), device, rng=rlx.RngPolicy(3, run=last)) as m:
        final = m()
        assert m.rng == rlx.RngPolicy(3, run=0)
        m.rng = rlx.RngPolicy(3, run=1 << 32)
        carried = m()
        m.rng = rlx.RngPolicy(3, run=0)
        assert len({y.tobytes() for y in (final, carried, m())}) == 3


@pytest.mark.parametrize("bad", [-1, 1 << 64, 1.5, True, None])
def test_a_policy_takes_64_bit_numbers(bad: object) -> None:
    with pytest.raises(rlx.UsageError, match="seed of an RngPolicy is an int"):
        rlx.RngPolicy(bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(rlx.UsageError, match="run of an RngPolicy is an int"):
        rlx.RngPolicy(0, bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bad", [5, 0, "fresh", (1, 2)])
def test_only_policies_are_taken(bad: Any) -> None:
    with pytest.raises(rlx.UsageError, match=r"rng is an rlx\.RngPolicy"):
        rlx.compile(noise(), rng=bad)
    run = rlx.compile(noise())
    with pytest.raises(rlx.UsageError, match=r"rng is an rlx\.RngPolicy"):
        run.rng = bad
    assert run.rng == rlx.RngPolicy()


def test_a_warm_up_does_not_count() -> None:
    with rlx.Graph() as g:
        x = g.input("x", ["N"])
        g.output("y", random_normal(g.rng("noise"), x.type.shape))
    x = np.zeros(5, np.float32)
    with rlx.compile(g) as a, rlx.compile(g) as b:
        a.warmup({"x": (5,)})
        np.testing.assert_array_equal(a(x), b(x))
        assert a.rng == b.rng


def test_threads_do_not_change_the_numbers() -> None:
    graph = noise((100_003,))
    with rlx.compile(graph, threads=1) as one, rlx.compile(graph, threads=2) as two:
        np.testing.assert_array_equal(one(), two())


def test_calls_from_threads_get_different_numbers() -> None:
    with rlx.compile(noise((16,))) as m:
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(m) for _ in range(64)]
            found = [w.result().tobytes() for w in waiting]
        assert m.rng.run == 64
        m.rng = rlx.RngPolicy()
        assert set(found) == {m().tobytes() for _ in range(64)}


def test_enqueued_runs_take_their_turn() -> None:
    graph = noise((16,))
    with rlx.compile(graph) as m:
        want = [m() for _ in range(5)]
        m.rng = rlx.RngPolicy()
        futures = [m.run_async({}) for _ in range(5)]
        assert m.rng.run == 5
        np.testing.assert_array_equal([f.result()["y"] for f in futures], want)
        futures = [m.run_async({}) for _ in range(3)]
        m.rng = rlx.RngPolicy()  # comes after them
        assert futures[0].result()["y"].tobytes() not in {y.tobytes() for y in want}
        np.testing.assert_array_equal(m(), want[0])
        m.rng = rlx.RngPolicy()
        np.testing.assert_array_equal([r["y"] for r in m.run_pipelined([()] * 5)], want)


def test_the_key_is_no_input_of_the_caller() -> None:
    with rlx.Graph() as g:
        key = g.rng("noise")  # before the input: the key is the program's first
        x = g.input("x", [3])
        g.output("y", x + random_uniform(key, (3,)))
        g.output("z", x + 1)
    with rlx.compile(g) as m:
        assert [s.name for s in m.inputs] == ["x"]
        x = np.arange(3, dtype=np.float32)
        y, z = m(x)
        np.testing.assert_array_equal(z, x + 1)
        assert ((y >= x) & (y < x + 1)).all()
    with pytest.raises(rlx.UsageError, match="already"):
        g.input("<rng>", [4], "u32")


def test_variants_share_the_count() -> None:
    """A second program of the model goes on where the first one was."""
    with rlx.Graph() as g:
        x = g.input("x", ["N"])
        g.output("y", random_uniform(g.rng("noise"), (4,)) + 0 * x[0:1])
    with rlx.compile(g) as m:
        m(np.zeros(2, np.float32))
        m(np.zeros(3, np.float32))
        assert m.rng.run == 2


def test_a_program_without_random_numbers_counts_no_runs() -> None:
    with rlx.Graph() as g:
        g.output("y", constant([1.0]) + 1)
    with rlx.compile(g, rng=rlx.RngPolicy(5)) as m:
        m()
        assert m.rng == rlx.RngPolicy(5, run=0)


def test_the_seed_is_in_no_code() -> None:
    """Programs of different seeds consist of the same kernels."""

    def kernels(seed: int) -> list[str]:
        with rlx.compile(noise(), rng=rlx.RngPolicy(seed)) as m:
            compiled: Any = m.program.compiled
            return [str(t.kernel) for t in compiled.program.thunks]

    assert kernels(1) == kernels(2)


def test_check_mode_accepts_random_programs() -> None:
    with config.override(RLX_CHECK=True, RLX_VERIFY=True), rlx.compile(noise()) as m:
        found: Array = m()
    assert np.isfinite(found).all()
