# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.ops.attention import Attention
from rlx.ops.spec import emit_one


def _attend(
    run_graph: Callable[..., Any], q: Any, k: Any, v: Any, mask: Any = None, **attributes: Any
) -> Any:
    given: dict[str, Any] = {"scale": 1.0, **attributes}
    arrays = [np.asarray(a)[None, None] for a in (q, k, v)]

    def attend(*values: Any) -> Any:
        return emit_one(Attention(**given), *values, *([None] if mask is None else []))

    return run_graph(attend, *arrays, *([] if mask is None else [np.asarray(mask)]))[0, 0]


def test_without_a_past_the_first_query_sees_the_first_key(run_graph: Callable[..., Any]) -> None:
    # https://github.com/microsoft/onnxruntime/issues/29020
    q = np.ones((1, 4), np.float32)
    k = v = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    np.testing.assert_array_equal(_attend(run_graph, q, k, v, causal="upper_left"), v[:1])
    everything = _attend(run_graph, q, k, v, causal="bottom_right")
    np.testing.assert_array_equal(everything, _attend(run_graph, q, k, v))


@pytest.mark.parametrize("keys", [1, 5, 17, 70])
def test_a_row_that_may_see_nothing(keys: int, run_graph: Callable[..., Any]) -> None:
    q, k = np.ones((2, 8), np.float32), np.ones((keys, 8), np.float32)
    mask = np.zeros((2, keys), bool)
    mask[1, 0] = True
    y = _attend(run_graph, q, k, k * 3, mask, masked_row="zeros")
    np.testing.assert_array_equal(y, np.stack([np.zeros(8), np.full(8, 3)]))
    y = _attend(run_graph, q, k, k * 3, mask, masked_row="nan")
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], np.full(8, 3))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_least_finite_number_as_a_mask_gives_no_nan(
    dtype: Any, run_graph: Callable[..., Any]
) -> None:
    # https://github.com/huggingface/transformers/pull/17306: a score of -16 beside it must not become -inf
    q, k = np.full((2, 4), -2, dtype), np.full((6, 4), 2, dtype)
    v = np.arange(24).reshape(6, 4).astype(dtype)
    mask = np.full((2, 6), np.finfo(dtype).min, dtype)
    mask[1, 3:] = 0
    y = _attend(run_graph, q, k, v, mask)
    want = np.stack([v.mean(0), v[3:].mean(0)])
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=2 * np.finfo(dtype).eps)
