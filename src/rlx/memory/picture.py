# SPDX-License-Identifier: Apache-2.0
"""The arena as a picture: time goes to the right, addresses go up, a rectangle is a tensor while it lives."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from html import escape

from rlx.memory.report import Placement

__all__ = ["arena_svg"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1200, 600, 90, 40, 60
_CHARACTER = 6.0  # width of a letter of the labels


def arena_svg(tensors: Sequence[Placement], arena: int, title: str = "") -> str:
    """Return an SVG picture of the arena. Hovering over a rectangle says what it is.

    Args:
        tensors: the buffers; weights are left out.
        arena: bytes of the arena.
        title: stands above the picture.
    """
    shown = [t for t in tensors if t.kind == "arena"]
    steps = max((t.last for t in shown), default=0) + 1
    across, up = _WIDTH / steps, _HEIGHT / max(arena, 1)
    body = [_tensor(t, across, up) for t in shown]
    right, low = _LEFT + _WIDTH, _TOP + _HEIGHT
    frame = f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#444"/>'
    marks = [
        f'<text x="{_LEFT - 8}" y="{low - _HEIGHT * part / 4 + 4:.1f}" text-anchor="end">'
        f"{_bytes(arena * part // 4)}</text>"
        for part in range(5)
    ]
    marks += [
        f'<text x="{_LEFT + _WIDTH * part / 4:.1f}" y="{low + 18}" text-anchor="middle">'
        f"{steps * part // 4}</text>"
        for part in range(5)
    ]
    heading = escape(title) or "arena"
    width, height = right + 20, low + _BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
            "<style>text { font: 11px sans-serif } g rect { stroke: #fff; stroke-width: 0.5 }</style>",
            f"<title>{heading}</title>",
            f'<text x="{_LEFT}" y="24">{heading}</text>',
            *body,
            frame,
            *marks,
            f'<text x="{_LEFT + _WIDTH / 2}" y="{low + 40}" text-anchor="middle">thunk</text>',
            "</svg>",
            "",
        ]
    )


def _tensor(tensor: Placement, across: float, up: float) -> str:
    x, width = _LEFT + tensor.first * across, (tensor.last - tensor.first + 1) * across
    height = tensor.nbytes * up
    y = _TOP + _HEIGHT - tensor.offset * up - height
    label = tensor.name or (tensor.node[0] if tensor.node else "") or tensor.op
    detail = (
        f"{label}\n{tensor.type} of {tensor.op or 'the program'}\n{tensor.nbytes:,} bytes at {tensor.offset:,}"
        f"\nthunks {tensor.first} to {tensor.last}"
    )
    hue = zlib.crc32(tensor.op.encode()) % 360
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    parts = [
        f'<rect {place} fill="hsl({hue},55%,70%)"/>',
        f"<title>{escape(detail)}</title>",
    ]
    room = int(width / _CHARACTER) - 1
    if height >= 12 and room >= 3:
        text = label if len(label) <= room else f"{label[: room - 1]}\u2026"
        parts.append(
            f'<text x="{x + 3:.2f}" y="{y + height / 2 + 4:.2f}" pointer-events="none">{escape(text)}</text>'
        )
    return f"<g>{''.join(parts)}</g>"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
