# SPDX-License-Identifier: Apache-2.0
"""The geometry that convolutions and pooling share: extents, checks, and NumPy views of windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from rlx.base.dims import Dim, floordiv, less_equal
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.types import TensorType

__all__ = [
    "Layout",
    "Pads",
    "channels_first",
    "channels_last",
    "check_attributes",
    "check_extent",
    "padded",
    "spatial_type",
    "split_shape",
    "tap_slices",
    "taps",
    "window_count",
    "window_span",
]

Layout: TypeAlias = Literal["nchw", "nhwc"]
Pads: TypeAlias = tuple[tuple[Dim, Dim], ...]


def window_span(kernel: int, dilation: int) -> int:
    """Return how many elements a window spans from its first to its last tap."""
    return dilation * (kernel - 1) + 1


def window_count(
    extent: Dim, pads: tuple[Dim, Dim], kernel: int, stride: int, dilation: int
) -> Dim:
    """Return how many windows fit: floor((extent + pads - span) / stride) + 1."""
    return floordiv(extent + pads[0] + pads[1] - window_span(kernel, dilation), stride) + 1


def check_extent(extent: Dim, axis: int, why: str) -> Dim:
    """Return the extent of a result.

    Raises:
        TypeRuleError: it is negative whatever the symbols are.
    """
    if less_equal(0, extent) is False:
        raise TypeRuleError(
            f"spatial axis {axis} of the result would have the extent {extent}: {why}"
        )
    return extent


def check_attributes(
    rank: int, layout: str, positive: Mapping[str, Sequence[int]], pads: Sequence[tuple[Dim, Dim]]
) -> None:
    """Raise TypeRuleError unless there is one sensible entry for each of `rank` spatial axes."""
    if not 1 <= rank <= 3:
        raise TypeRuleError(f"takes one to three spatial axes, found {rank}")
    if layout not in ("nchw", "nhwc"):
        raise TypeRuleError(f"layout {layout!r} is neither nchw nor nhwc")
    for name, values in positive.items():
        if len(values) != rank or any(v < 1 for v in values):
            raise TypeRuleError(f"{name} {tuple(values)} must have {rank} entries of at least 1")
    if len(pads) != rank:
        raise TypeRuleError(f"pads has {len(pads)} pairs for {rank} spatial axes")


def split_shape(x: TensorType, layout: str) -> tuple[Dim, Dim, tuple[Dim, ...]]:
    """Return (batch, channels, spatial extents) of a tensor in a layout.

    Raises:
        TypeRuleError: the rank is below 3.
    """
    if x.rank < 3:
        raise TypeRuleError(f"needs a batch axis, a channel axis and space, found {x}")
    if layout == "nhwc":
        return x.shape[0], x.shape[-1], x.shape[1:-1]
    return x.shape[0], x.shape[1], x.shape[2:]


def spatial_type(x: TensorType, layout: str, channels: Dim, space: Sequence[Dim]) -> TensorType:
    """Return x's type with other channels and spatial extents."""
    batch = x.shape[0]
    return x.with_shape(
        (batch, *space, channels) if layout == "nhwc" else (batch, channels, *space)
    )


def channels_first(x: Array, layout: str) -> Array:
    """Return a view with the channels at axis 1."""
    return np.moveaxis(x, -1, 1) if layout == "nhwc" else x


def channels_last(x: Array, layout: str) -> Array:
    """Return the inverse of `channels_first`."""
    return np.moveaxis(x, 1, -1) if layout == "nhwc" else x


def padded(x: Array, width: Sequence[tuple[int, int]], fill: object) -> Array:
    """Return x [N, C, *space] with `fill` around the spatial axes; x itself for no padding."""
    if not any(a or b for a, b in width):
        return x
    space = [a + d + b for d, (a, b) in zip(x.shape[2:], width, strict=True)]
    out = np.full((*x.shape[:2], *space), fill, x.dtype)
    inner = tuple(slice(a, a + d) for d, (a, _) in zip(x.shape[2:], width, strict=True))
    out[(slice(None), slice(None), *inner)] = x
    return out


def taps(kernel: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the positions inside a window, row by row."""
    return iter(np.ndindex(*kernel))


def tap_slices(
    tap: Sequence[int], out: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[slice, ...]:
    """Return, for a padded [N, C, *space], the elements that all windows have at one tap."""
    space = (
        slice(t * d, t * d + s * (n - 1) + 1 if n > 0 else t * d, s)
        for t, n, s, d in zip(tap, out, strides, dilations, strict=True)
    )
    return (slice(None), slice(None), *space)
