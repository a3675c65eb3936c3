# SPDX-License-Identifier: Apache-2.0
"""ONNX models as a source of programs for an executable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UsageError
from rlx.frontends.onnx.importer import Importer, check_supported, import_model
from rlx.frontends.onnx.model import load_model
from rlx.ir.graph import Graph, Value
from rlx.runtime.executable import Source

__all__ = ["onnx_source"]


def onnx_source(model: Any, dims: Mapping[str, int]) -> Source:
    """Read and check a model and return where its programs come from.

    Args:
        model: a path, bytes, a file object or a ModelProto.
        dims: upper bounds of symbolic extents, by rlx's or the file's name for them.

    Raises:
        ModelError: the file is malformed or uses something rlx does not run.
        UsageError: `dims` names no extent of the model.
    """
    parsed = load_model(model)
    check_supported(parsed)
    interface = Importer(parsed)
    interface.add_inputs({})
    texts = dict(interface.symbols)
    uppers = {_symbol(name, texts, parsed.source): value for name, value in dims.items()}
    inputs = [(v.name, v.type.dtype, v.type.shape) for v in interface.graph.inputs]

    def build(hints: Mapping[str, int], fixed: Mapping[str, int]) -> Graph:
        shapes = (
            {v.name: _extents(v, texts, fixed) for v in interface.graph.inputs} if fixed else None
        )
        known = {n: v for n, v in hints.items() if n not in fixed}
        return import_model(parsed, hints=known, shapes=shapes).graph

    return Source(parsed.source, inputs, build, uppers)


def _symbol(name: str, texts: Mapping[str, str], source: str) -> str:
    if name in texts:
        return name
    for symbol, text in texts.items():
        if text == name:
            return symbol
    known = ", ".join(f"{s} ({t})" if s != t else s for s, t in texts.items()) or "none"
    hint = did_you_mean(name, [*texts, *texts.values()])
    raise UsageError(f"{source} has no symbolic extent {name!r}; it has {known}.{hint}")


def _extents(
    value: Value, texts: Mapping[str, str], fixed: Mapping[str, int]
) -> list[int | str | None]:
    """Return an input's shape with the fixed extents static and the others as the file names them."""
    out: list[int | str | None] = []
    for axis, dim in enumerate(value.type.shape):
        if isinstance(dim, int):
            out.append(dim)
        elif str(dim) in fixed:
            out.append(fixed[str(dim)])
        else:
            text = texts[str(dim)]
            out.append(None if text == f"{value.name}[{axis}]" else text)
    return out
