# SPDX-License-Identifier: Apache-2.0
"""What travels to another process instead of an executable: how to load or compile it there again.

Code, memory and threads belong to a process. A model given by path is opened by path, if the file is still the one it
was; other models and graphs travel by content. The cache on disk makes the second compilation cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx.base.errors import UsageError
from rlx.base.numeric import Array

if TYPE_CHECKING:
    from rlx.frontends.onnx.source import OpenModel
    from rlx.runtime.executable import Executable
    from rlx.runtime.source import Recipe, Source

__all__ = ["graph_recipe", "model_recipe"]

_Maker: TypeAlias = "Callable[..., Executable]"


def model_recipe(
    load: _Maker, opened: OpenModel, device: str, options: Mapping[str, Any]
) -> Recipe:
    """Return what gives the recipe of a loaded model: how to load it, and the weights that were changed since.

    Args:
        load: `rlx.load`.
        opened: the model.
        device: as given to `load`.
        options: the keyword arguments of `load` but for `rng`.
    """
    path = None if opened.path is None else opened.path.absolute()
    stamp = None if path is None else _stamp(path)

    def recipe(m: Executable) -> tuple[_Maker, tuple[Any, ...]]:
        changed = {n: m.get_param(n) for n, spec in m.params.items() if spec.version > 0}
        model = bytes(opened.data) if path is None else str(path)
        return _load_again, (load, model, stamp, device, {**options, "rng": m.rng}, changed)

    return recipe


def graph_recipe(
    compile_graph: _Maker,
    source: Source,
    hints: Mapping[str, int],
    device: str,
    options: Mapping[str, Any],
) -> Recipe:
    """Return what gives the recipe of a compiled graph.

    Args:
        compile_graph: `rlx.compile`.
        source: of the graph.
        hints: that the graph has.
        device: as given to `compile`.
        options: the keyword arguments of `compile` but for `rng`.
    """

    def recipe(m: Executable) -> tuple[_Maker, tuple[Any, ...]]:
        from rlx.ir.text import print_graph

        text = print_graph(source.build(hints, {}))  # its params have no data
        values = {n: m.get_param(n) for n, spec in m.params.items() if spec.has_value}
        return _compile_again, (compile_graph, text, values, device, {**options, "rng": m.rng})

    return recipe


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _load_again(
    load: _Maker,
    model: str | bytes,
    stamp: tuple[int, int] | None,
    device: str,
    options: Mapping[str, Any],
    changed: Mapping[str, Array],
) -> Executable:
    if isinstance(model, str) and Path(model).is_file() and _stamp(Path(model)) != stamp:
        raise UsageError(
            f"{model} has changed since the executable that was pickled loaded it; load it anew"
        )
    m = load(model, device, **options)
    if changed:
        m.load_params(changed, partial=True)
    return m


def _compile_again(
    compile_graph: _Maker,
    text: str,
    values: Mapping[str, Array],
    device: str,
    options: Mapping[str, Any],
) -> Executable:
    from rlx.api.graph import Graph
    from rlx.ir.parse import parse_graph

    graph = Graph()
    graph.ir = parse_graph(text)
    for name, data in values.items():
        graph.ir.params[name].data = data
    return compile_graph(graph, device, **options)
