# SPDX-License-Identifier: Apache-2.0
"""A writer of the wire format, small enough to write what no library would."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Wire:
    """Fields of a message as bytes."""

    varint = staticmethod(varint)

    @staticmethod
    def text(number: int, payload: bytes | str) -> bytes:
        data = payload.encode() if isinstance(payload, str) else payload
        return varint(number << 3 | 2) + varint(len(data)) + data

    @staticmethod
    def number(number: int, value: int) -> bytes:
        return varint(number << 3) + varint(value & (1 << 64) - 1)

    def model(self, *graph: bytes, ir: int = 10, extra: bytes = b"") -> bytes:
        opset = self.text(8, self.number(2, 17))
        return self.number(1, ir) + opset + self.text(7, b"".join(graph)) + extra

    def node(self, op: str, inputs: list[str], outputs: list[str], extra: bytes = b"") -> bytes:
        body = b"".join(self.text(1, name) for name in inputs)
        body += b"".join(self.text(2, name) for name in outputs)
        return self.text(1, body + self.text(3, f"n_{outputs[0]}") + self.text(4, op) + extra)

    def tensor(self, name: str, dtype: int, dims: list[int], data: bytes) -> bytes:
        """An initialiser of the graph."""
        body = b"".join(self.number(1, dim) for dim in dims)
        return self.text(5, body + self.number(2, dtype) + self.text(8, name) + data)

    def input(self, name: str) -> bytes:
        return self.text(11, self.text(1, name))

    def output(self, name: str) -> bytes:
        return self.text(12, self.text(1, name))


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def external(wire: Wire) -> Callable[..., bytes]:
    """A model with one FLOAT[4] initialiser in another file; keywords are entries of it."""

    def build(**entries: str) -> bytes:
        data = wire.number(14, 1)
        for key, value in entries.items():
            data += wire.text(13, wire.text(1, key) + wire.text(2, value))
        return wire.model(wire.tensor("w", 1, [4], data), wire.output("w"))

    return build
