# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rlx.backends.cpu.buffers import HUGE_PAGE, WeightBuffer, address_of, aligned_bytes, huge_bytes
from rlx.base.numeric import Array


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE, 2 * HUGE_PAGE + 5])
def test_blocks_are_zero_aligned_and_writable(nbytes: int) -> None:
    block = huge_bytes(nbytes)
    assert block.shape == (nbytes,)
    assert not block.any()
    assert not nbytes or block.ctypes.data % (HUGE_PAGE if nbytes >= HUGE_PAGE else 128) == 0
    block[:] = 1


def test_weights_share_a_block_and_keep_dtype_and_shape() -> None:
    arrays: dict[int, Array] = {
        7: np.arange(6, dtype=np.float32).reshape(2, 3),
        1: np.zeros((0, 4), np.int64),
        2: np.full((3,), 2, ml_dtypes.bfloat16),
        9: np.asfortranarray(np.arange(4.0).reshape(2, 2)),
        4: np.array(5, np.int8),
    }
    buffer = WeightBuffer({k: a.nbytes for k, a in arrays.items()})
    placed = {k: buffer.place(k, a) for k, a in arrays.items()}
    for key, array in arrays.items():
        assert placed[key].dtype == array.dtype
        assert placed[key].shape == array.shape
        assert placed[key].flags.c_contiguous
        assert not np.shares_memory(placed[key], array)
        np.testing.assert_array_equal(placed[key], array)
        assert not array.nbytes or placed[key].ctypes.data % 64 == 0


@pytest.mark.parametrize(
    "array",
    [
        np.ones(3),
        np.ones((2, 0)),
        np.array(1.0),
        np.ones(2, ml_dtypes.bfloat16),
        np.frombuffer(b"abcd", np.uint8),
        np.ones((4, 4), bool)[2:],
        np.ones(2, np.complex64),
    ],
)
def test_addresses_are_those_of_numpy(array: Array) -> None:
    assert address_of(array) == array.ctypes.data


def test_aligned_bytes() -> None:
    assert aligned_bytes(10, 4096).ctypes.data % 4096 == 0
