# SPDX-License-Identifier: Apache-2.0
"""The bytes of an ONNX model, wherever they come from; nothing is decoded yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from rlx.base.errors import UsageError
from rlx.frontends.checked import map_source

__all__ = ["ModelSource", "OpenModel", "open_model"]


@runtime_checkable
class _Serializable(Protocol):
    """A protobuf message, of whatever library."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802


ModelSource = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | _Serializable


@dataclass(frozen=True)
class OpenModel:
    """The bytes of a model.

    Attributes:
        data: all of them, never changing.
        name: for messages.
        path: of the file, if there is one.
    """

    data: memoryview
    name: str
    path: Path | None = None


def open_model(source: ModelSource | OpenModel) -> OpenModel:
    """Return the bytes of a model: a mapped file, or given bytes.

    Raises:
        UsageError: the path cannot be opened, or the source is of another type.
    """
    if isinstance(source, OpenModel):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return OpenModel(map_source(path, "an ONNX model"), str(path), path)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return OpenModel(_view(source), "the given bytes")
    if isinstance(source, _Serializable):
        return OpenModel(_view(source.SerializeToString()), f"the given {type(source).__name__}")
    if callable(getattr(source, "read", None)):
        data = source.read()
        if not isinstance(data, bytes):  # pyright: ignore[reportUnnecessaryIsInstance] (text streams)
            raise UsageError(
                f"a stream must be opened in binary mode; read() returned {type(data).__name__}"
            )
        return OpenModel(_view(data), "the given stream")
    raise UsageError(
        f"an ONNX model is loaded from a path, bytes, a binary stream or an object with "
        f"SerializeToString(), not from {type(source).__name__}"
    )


def _view(data: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(data)
    if view.readonly and view.c_contiguous and view.nbytes:
        return view.cast("B")
    return memoryview(view.tobytes())  # else the caller could change the weights
