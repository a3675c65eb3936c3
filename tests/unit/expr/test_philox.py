# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10: the published vectors, in NumPy and in the C text that CUDA and Metal share."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlx.base.dtypes import DType
from rlx.expr.body import Body, BodyBuilder
from rlx.expr.evaluate import evaluate_body
from rlx.expr.philox import normal, philox, raw_bits, uniform
from rlx.kernel.cstyle import CUDA, MSL, body_text

# Source: kat_vectors of Random123 1.14, the authors' own library: (counter, key, words).
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _body() -> Body:
    """Two key words and four counter words to four words."""
    builder = BodyBuilder([DType.U64] * 6)
    k0, k1, c0, c1, c2, c3 = (builder.input(i) for i in range(6))
    return builder.finish(*philox((k0, k1), (c0, c1, c2, c3)))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    given = [np.array(w, np.uint64) for w in (*key, *counter)]
    assert tuple(int(w) for w in evaluate_body(_body(), given)) == words


def test_the_same_words_as_numpys_philox_rounds() -> None:
    """An independent statement in Python integers, on random keys and counters."""
    rng = np.random.default_rng(3)
    given = rng.integers(0, 1 << 32, (6, 200), np.uint64)
    found = np.stack(evaluate_body(_body(), list(given)))
    for column in range(given.shape[1]):
        k0, k1, *c = (int(w) for w in given[:, column])
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k0, b % 2**32, (a >> 32) ^ c[3] ^ k1, a % 2**32]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        assert found[:, column].tolist() == c


_CC = shutil.which("gcc") or shutil.which("clang")


@pytest.mark.skipif(_CC is None, reason="needs a C compiler on PATH")
def test_c_text_gives_the_published_vectors(tmp_path: Path) -> None:
    assert _CC is not None
    statements, results = body_text(_body(), CUDA, [f"in[{i}]" for i in range(6)])
    stores = [f"  out[{i}] = {value};" for i, value in enumerate(results)]
    head = "void words(const unsigned long* in, unsigned long* out) {"
    source = tmp_path / "philox.c"
    source.write_text("\n".join([head, *statements, *stores, "}\n"]))
    library = tmp_path / "philox.so"
    command = [_CC, "-O1", "-shared", "-fPIC", "-Werror", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    function = ctypes.CDLL(str(library)).words
    for counter, key, words in KNOWN:
        out = (ctypes.c_uint64 * 4)()
        function((ctypes.c_uint64 * 6)(*key, *counter), out)
        assert tuple(out) == words


def test_metal_has_text_for_every_step() -> None:
    builder = BodyBuilder([DType.U64] * 4)
    words = (builder.input(0), builder.input(1), builder.input(2), builder.input(3))
    body = builder.finish(
        raw_bits(words, DType.U32),
        uniform(words, DType.F32),
        normal(words, DType.F32, DType.F32),
    )
    statements, _ = body_text(body, MSL, [f"w{i}" for i in range(4)])
    assert len(statements) == len(body.instrs)


def _words(rows: Sequence[tuple[int, ...]]) -> list[np.ndarray[tuple[int], np.dtype[np.uint64]]]:
    return [np.array(column, np.uint64) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        (DType.F16, 1 - 2**-11),
        (DType.BF16, 1 - 2**-8),
        (DType.F32, 1 - 2**-24),
        (DType.F64, 1 - 2**-53),
    ],
)
def test_uniform_ends(dtype: DType, top: float) -> None:
    builder = BodyBuilder([DType.U64] * 4)
    w0, w1, w2, w3 = (builder.input(i) for i in range(4))
    body = builder.finish(uniform((w0, w1, w2, w3), dtype).cast(dtype))
    (found,) = evaluate_body(body, _words([(0, 0, 0, 0), (0xFFFFFFFF,) * 4]))
    assert found.tolist() == [0.0, top]


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_normal_is_finite_at_its_ends(dtype: DType) -> None:
    builder = BodyBuilder([DType.U64] * 4)
    w0, w1, w2, w3 = (builder.input(i) for i in range(4))
    body = builder.finish(normal((w0, w1, w2, w3), dtype, DType.F64))
    ones = 0xFFFFFFFF
    rows = [
        (a, b, c, d) for a in (0, ones) for b in (0, ones) for c in (0, ones) for d in (0, ones)
    ]
    (found,) = evaluate_body(body, _words(rows))
    assert np.isfinite(found).all()
    assert 6 < np.abs(found).max() < 9
