# SPDX-License-Identifier: Apache-2.0
"""ONNX models as a source of programs for an executable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlx.backends.protocol import Backend, CompileOptions
from rlx.base import config
from rlx.base.diagnostics import did_you_mean
from rlx.base.dims import Dim, symbol
from rlx.base.dtypes import DType
from rlx.base.errors import UndecidedError, UsageError
from rlx.base.target import Target
from rlx.frontends.onnx.source import OpenModel
from rlx.runtime.cache import ProgramCache, identify, open_cache
from rlx.runtime.source import Source, defaults_of
from rlx.runtime.weight_plan import Default

if TYPE_CHECKING:
    from rlx.frontends.onnx.model import Model
    from rlx.ir.graph import Graph

__all__ = ["onnx_source"]


def onnx_source(
    opened: OpenModel,
    dims: Mapping[str, int],
    backend: Backend,
    target: Target,
    options: CompileOptions,
) -> Source:
    """Return where the programs of a model come from: the cache, or the model itself, read and checked.

    Args:
        opened: the model.
        dims: upper bounds of symbolic extents, by rlx's or the file's name for them.
        backend: what programs are compiled by.
        target: what for.
        options: and how.

    Raises:
        ModelError: the file is malformed or uses something rlx does not run.
        UsageError: `dims` names no extent of the model.
    """
    reader = _Reader(opened)
    cache = _cache(opened, backend, target, options)
    known = None if cache is None else cache.interface()
    interface = reader.interface if known is None else _Interface.from_data(known)
    uppers = {_symbol(name, interface.texts, opened.name): value for name, value in dims.items()}

    def build(hints: Mapping[str, int], fixed: Mapping[str, int]) -> Graph:
        return reader.build(hints, fixed, interface)

    return Source(
        opened.name,
        interface.inputs,
        build,
        uppers,
        cache,
        interface.to_data(),
        lambda: reader.files,
        reader.changed,
        read_params=lambda: reader.params(interface),
    )


def _cache(
    opened: OpenModel, backend: Backend, target: Target, options: CompileOptions
) -> ProgramCache | None:
    if config.CACHE.get() == "off":  # before the bytes are hashed
        return None
    identity = identify(opened.path, opened.data)
    return open_cache(identity, opened.home, opened.data, backend, target, options)


@dataclass(frozen=True)
class _Interface:
    """What callers need to know of a model before it is compiled.

    Attributes:
        inputs: name, dtype and shape of each.
        texts: symbol -> the file's text for the extent.
    """

    inputs: list[tuple[str, DType, tuple[Dim, ...]]] = field(
        default_factory=list[tuple[str, DType, tuple[Dim, ...]]]
    )
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data; the extents of inputs are numbers or single symbols."""
        inputs = [
            [name, dtype.value, [d if isinstance(d, int) else str(d) for d in shape]]
            for name, dtype, shape in self.inputs
        ]
        return {"inputs": inputs, "texts": dict(self.texts)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> _Interface:
        """Return what `to_data` wrote."""
        inputs = [
            (name, DType.of(dtype), tuple([d if isinstance(d, int) else symbol(d) for d in shape]))
            for name, dtype, shape in data["inputs"]
        ]
        return cls(inputs, data["texts"])


class _Reader:
    """Reads the model when somebody asks for more than the cache has."""

    def __init__(self, opened: OpenModel) -> None:
        self._opened = opened

    @cached_property
    def model(self) -> Model:
        """The checked model."""
        from rlx.frontends.onnx.importer import check_supported
        from rlx.frontends.onnx.model import load_model

        model = load_model(self._opened)
        check_supported(model)
        # Clones share the reader: if another thread has read the model meanwhile, the files in use are its.
        return self.__dict__.setdefault("model", model)

    def changed(self) -> bool:
        """Return whether a file beside the model was replaced since it was read."""
        return self.model.changed()

    @property
    def files(self) -> Mapping[str | None, memoryview]:
        """Every mapped file."""
        return self.model.files

    @cached_property
    def interface(self) -> _Interface:
        """Inputs and extents of the model."""
        from rlx.frontends.onnx.importer import Importer

        importer = Importer(self.model)
        importer.add_inputs({})
        inputs = [(v.name, v.type.dtype, v.type.shape) for v in importer.graph.inputs]
        return _Interface(inputs, dict(importer.symbols))

    def params(self, interface: _Interface) -> Mapping[str, Default]:
        """Return the weights of the model.

        Raises:
            UsageError: which ones it has depends on extents that are not known yet.
        """
        try:
            return defaults_of(self.build({}, {}, interface))
        except UndecidedError as error:
            raise UsageError(
                f"the params of {self._opened.name} are known after the first call, `warmup`, or with dims= ({error})"
            ) from error

    def build(
        self, hints: Mapping[str, int], fixed: Mapping[str, int], interface: _Interface
    ) -> Graph:
        """Return a new graph of the model; see `Source.build`."""
        from rlx.frontends.onnx.importer import import_model

        shapes = None
        if fixed:
            shapes = {n: _extents(n, s, interface.texts, fixed) for n, _, s in interface.inputs}
        known = {n: v for n, v in hints.items() if n not in fixed}
        return import_model(self.model, hints=known, shapes=shapes).graph


def _symbol(name: str, texts: Mapping[str, str], source: str) -> str:
    if name in texts:
        return name
    for known_symbol, text in texts.items():
        if text == name:
            return known_symbol
    known = ", ".join(f"{s} ({t})" if s != t else s for s, t in texts.items()) or "none"
    hint = did_you_mean(name, [*texts, *texts.values()])
    raise UsageError(f"{source} has no symbolic extent {name!r}; it has {known}.{hint}")


def _extents(
    name: str, shape: Sequence[Dim], texts: Mapping[str, str], fixed: Mapping[str, int]
) -> list[int | str | None]:
    """Return an input's shape with the fixed extents static and the others as the file names them."""
    out: list[int | str | None] = []
    for axis, dim in enumerate(shape):
        if isinstance(dim, int):
            out.append(dim)
        elif str(dim) in fixed:
            out.append(fixed[str(dim)])
        else:
            text = texts[str(dim)]
            out.append(None if text == f"{name}[{axis}]" else text)
    return out
