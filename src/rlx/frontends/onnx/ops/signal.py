# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms, window functions, the mel matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.base.dtypes import DType
from rlx.base.numeric import Array, cast
from rlx.base.types import normalize_axis
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ops import signal
from rlx.ops.leaf import constant
from rlx.ops.spec import emit_one


@onnx_op("DFT", "axis inverse onesided", since=17)
@onnx_op("DFT", "inverse onesided", since=20)
def _dft(call: Call) -> Mapped:
    x = call.value(0)
    if call.opset < 20:
        axis = call.get_int("axis", 1)
    else:
        axis = call.integer(2, "the axis") if call.maybe(2) is not None else -2
    axis = normalize_axis(axis, x.type.rank)
    length = x.type.shape[axis]
    inverse, onesided = call.get_flag("inverse"), call.get_flag("onesided")
    if inverse and onesided:
        length = 2 * (length - 1)
    if call.maybe(1) is not None:
        length = call.dims(1, "the length")[0]
    return emit_one(signal.DFT(axis, inverse, onesided, length), x)


@onnx_op("STFT", "onesided")
def _stft(call: Call) -> Mapped:
    x, window = call.value(0), call.maybe(2)
    step = call.integer(1, "the frame step")
    if call.maybe(3) is not None:
        length = call.integer(3, "the frame length")
    elif window is not None:
        extent = window.type.shape[0]
        if not isinstance(extent, int):
            raise call.refuse(f"the window has the symbolic extent {extent}")
        length = extent
    else:
        raise call.wrong("neither a window nor a frame length is given")
    return emit_one(signal.STFT(step, length, call.get_flag("onesided", default=True)), x, window)


def _declare_window(name: str, function: Callable[..., Any]) -> None:
    @onnx_op(name, "output_datatype periodic")
    def window(call: Call) -> Mapped:
        size = call.dims(0, "the size")[0]
        dtype = call.get_dtype("output_datatype", DType.F32)
        return function(size, periodic=call.get_flag("periodic", default=True), dtype=dtype)


_declare_window("HannWindow", signal.hann_window)
_declare_window("HammingWindow", signal.hamming_window)
_declare_window("BlackmanWindow", signal.blackman_window)


@onnx_op("MelWeightMatrix", "output_datatype")
def _mel_weights(call: Call) -> Mapped:
    bins, length, rate = (
        call.integer(i, what) for i, what in enumerate(("num_mel_bins", "dft_length", "rate"))
    )
    low, high = (
        call.floats(i, what)[0] for i, what in ((3, "lower_edge_hertz"), (4, "upper_edge_hertz"))
    )
    dtype = call.get_dtype("output_datatype", DType.F32)
    return constant(cast(_mel_matrix(bins, length, rate, low, high), dtype))


def _mel_matrix(bins: int, length: int, rate: int, low: float, high: float) -> Array:
    """Return [length // 2 + 1, bins] triangles, even on the mel scale 2595 log10(1 + f / 700)."""
    # ONNX divides the range by the number of edges, so that the last edge stays below `high`.
    mels = np.linspace(_mel(low), _mel(high), bins + 2, endpoint=False)
    edges = (700.0 * (10.0 ** (mels / 2595.0) - 1.0) * (length + 1)) // rate
    points = np.asarray(edges, np.int64)
    out = np.zeros((length // 2 + 1, bins), np.float64)
    for index in range(bins):
        first, centre, last = points[index : index + 3]
        if centre == first:
            out[centre, index] = 1.0
        else:
            rising = np.arange(int(first), int(centre) + 1)
            out[rising, index] = (rising - first) / (centre - first)
        falling = np.arange(int(centre), int(last))
        out[falling, index] = (last - falling) / max(last - centre, 1)
    return out


def _mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))
