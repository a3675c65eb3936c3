# SPDX-License-Identifier: Apache-2.0
"""The bytes of an ONNX model, wherever they come from; nothing is decoded yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from rlx.base.errors import UsageError
from rlx.frontends.checked import Home, map_source

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
        home: where its external data may lie, if anywhere.
    """

    data: memoryview
    name: str
    path: Path | None = None
    home: Home | None = None


def open_model(
    source: ModelSource | OpenModel, folder: str | os.PathLike[str] | None = None
) -> OpenModel:
    """Return the bytes of a model: a mapped file, or given bytes.

    Args:
        source: a path, the bytes of a file, a binary stream, or a message object.
        folder: where external data is looked up; by default the folder of the path.

    Raises:
        UsageError: the path or the folder cannot be opened, or the source is of another type.
    """
    if isinstance(source, OpenModel):
        return source
    home = None if folder is None else Home.given(folder)
    if isinstance(source, (str, os.PathLike)):
        if not os.fspath(source):
            raise UsageError("the path of the ONNX model is empty")
        path = Path(source)
        data = map_source(path, "an ONNX model")
        return OpenModel(data, str(path), path, home or Home.of_model(path))
    if isinstance(source, (bytes, bytearray, memoryview)):
        return OpenModel(_view(source), "the given bytes", home=home)
    if isinstance(source, _Serializable):
        name = f"the given {type(source).__name__}"
        return OpenModel(_view(source.SerializeToString()), name, home=home)
    if callable(getattr(source, "read", None)):
        data = source.read()
        if not isinstance(data, bytes):  # pyright: ignore[reportUnnecessaryIsInstance] (text streams)
            raise UsageError(
                f"a stream must be opened in binary mode; read() returned {type(data).__name__}"
            )
        return OpenModel(_view(data), "the given stream", home=home)
    raise UsageError(
        f"an ONNX model is loaded from a path, bytes, a binary stream or an object with "
        f"SerializeToString(), not from {type(source).__name__}"
    )


def _view(data: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(data)
    if view.readonly and view.c_contiguous and view.nbytes:
        return view.cast("B")
    return memoryview(view.tobytes())  # else the caller could change the weights
