# SPDX-License-Identifier: Apache-2.0
"""Resize and its predecessor Upsample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlx.base.dims import Dim, DimExpr, floordiv
from rlx.base.facts import current_facts
from rlx.base.types import normalize_axis
from rlx.frontends.onnx.registry import Call, Mapped, onnx_op
from rlx.ir.graph import Value
from rlx.ops.dims import Ratio
from rlx.ops.resize import Coordinate, Nearest, Resize, scale_ratio
from rlx.ops.spec import emit_one

_COORDINATES: tuple[Coordinate, ...] = (
    "half_pixel",
    "asymmetric",
    "align_corners",
    "pytorch_half_pixel",
    "half_pixel_symmetric",
)
Mode = Literal["nearest", "linear", "cubic"]
_MODES: tuple[Mode, ...] = ("nearest", "linear", "cubic")
_NEAREST: tuple[Nearest, ...] = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_MAX_DENOMINATOR = 4096
_COMMON = (
    "mode coordinate_transformation_mode nearest_mode cubic_coeff_a exclude_outside "
    "extrapolation_value"
)


@onnx_op("Upsample", "mode scales", since=7)
@onnx_op("Upsample", "mode", since=9)
@onnx_op("Resize", "mode", since=10)
def _upsample(call: Call) -> Mapped:
    """The old forms: source index = floor(i / scale), or linear between neighbours at i / scale."""
    x = call.value(0)
    scales = call.get_floats("scales") if call.has("scales") else call.floats(1, "scales")
    nearest = call.get_choice("mode", ("nearest", "linear", "bilinear"), "nearest") == "nearest"
    mode = "nearest" if nearest else "linear"
    sizes = tuple(_scaled(call, d, s) for d, s in zip(x.type.shape, scales, strict=True))
    return emit_one(Resize(sizes, tuple(scales), mode, "asymmetric", "floor"), x)


@onnx_op("Resize", _COMMON, since=11)
@onnx_op("Resize", _COMMON + " axes keep_aspect_ratio_policy", only={"antialias": (0,)}, since=18)
def _resize(call: Call) -> Mapped:
    x = call.value(0)
    coordinate: Coordinate = call.get_choice(
        "coordinate_transformation_mode", _COORDINATES, "half_pixel"
    )
    mode: Mode = call.get_choice("mode", _MODES, "nearest")
    rank = x.type.rank
    axes = tuple(normalize_axis(a, rank) for a in call.get_ints("axes", tuple(range(rank))))
    sizes: list[Dim] = list(x.type.shape)
    scales: list[float | None] = [1.0] * rank
    if _given(call, 3):
        _apply_sizes(call, x, axes, sizes, scales)
    elif _given(call, 2):
        _apply_scales(call, x, axes, sizes, scales)
    else:
        raise call.wrong("neither scales nor sizes are given")
    op = Resize(
        tuple(sizes),
        tuple(scales),
        mode,
        coordinate,
        call.get_choice("nearest_mode", _NEAREST, "round_prefer_floor"),
        call.get_float("cubic_coeff_a", -0.75),
        call.get_flag("exclude_outside"),
    )
    return emit_one(op, x)


def _given(call: Call, index: int) -> bool:
    value = call.maybe(index)
    return value is not None and value.type.elements != 0  # an empty tensor means left out


def _apply_scales(
    call: Call, x: Value, axes: Sequence[int], sizes: list[Dim], scales: list[float | None]
) -> None:
    known = call.known_array(2)
    given = call.floats(2, "scales") if known is None else known.reshape(-1).tolist()
    for axis, scale in zip(axes, given, strict=True):
        have = x.type.shape[axis]
        if not isinstance(scale, DimExpr | Ratio):
            sizes[axis], scales[axis] = _scaled(call, have, scale), float(scale)
            continue
        top, bottom = (scale.top, scale.bottom) if isinstance(scale, Ratio) else (scale, 1)
        size = floordiv(have * top, bottom)
        if not current_facts().equal(size * bottom, have * top):
            raise call.refuse(
                f"the extent {have} times the scale {scale} is not whole for all extents"
            )
        sizes[axis], scales[axis] = size, None  # the ratio of the extents is the scale


def _apply_sizes(
    call: Call, x: Value, axes: Sequence[int], sizes: list[Dim], scales: list[float | None]
) -> None:
    wanted = call.dims(3, "sizes")
    policy = call.get_choice(
        "keep_aspect_ratio_policy", ("stretch", "not_larger", "not_smaller"), "stretch"
    )
    if len(wanted) != len(axes):
        raise call.wrong(f"sizes has {len(wanted)} elements for {len(axes)} axes")
    for axis, size in zip(axes, wanted, strict=True):
        sizes[axis], scales[axis] = size, None
        if isinstance(size, int) and size == x.type.shape[axis]:
            scales[axis] = 1.0
    if policy == "stretch":
        return
    ratios: list[float] = []
    for axis, size in zip(axes, wanted, strict=True):
        have = x.type.shape[axis]
        if not (isinstance(size, int) and isinstance(have, int)):
            raise call.refuse(f"keep_aspect_ratio_policy {policy!r} with symbolic extents")
        ratios.append(size / have)
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    for axis in axes:
        sizes[axis] = math.floor(ratio * int(x.type.shape[axis]) + 0.5)
        scales[axis] = ratio


def _scaled(call: Call, extent: Dim, scale: float) -> Dim:
    """Return floor(extent * scale)."""
    if isinstance(extent, int):
        return math.floor(extent * float(np.float32(scale)))
    ratio = scale_ratio(scale)
    if ratio.denominator > _MAX_DENOMINATOR:
        raise call.refuse(
            f"the scale {scale} of the symbolic extent {extent} is no ratio of small numbers"
        )
    return floordiv(extent * ratio.numerator, ratio.denominator)
