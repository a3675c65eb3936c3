# SPDX-License-Identifier: Apache-2.0
"""Compiled programs on disk, so that a second process neither reads a model again nor runs a pass.

One model, target and set of options has a key; under it lie its variants, numbered from 0. A variant is an entry
`program` (what the file declares, guards, schedule, machine code, constants) and, where weights were computed, an entry
`weights` that is mapped in place. Params that are plain views of the model's files stay views of those files.

What is found is used only if it fits: files have the recorded stamps, guards hold, checksums are right. Whatever does
not read back counts as not found.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import rlx
from rlx._version import __version__
from rlx.backends.protocol import Backend, CompiledGraph, CompileOptions, SavedGraph, SavingBackend
from rlx.base import config
from rlx.base.dtypes import DType
from rlx.base.errors import ModelError
from rlx.base.numeric import Array
from rlx.base.store import ALIGNMENT, Store, default_store
from rlx.base.target import Target
from rlx.runtime.entry import (
    BROKEN,
    Restored,
    Signature,
    array_from_bytes,
    described,
    parts,
    plan_from_data,
    plan_to_data,
    signature_from_data,
    signature_to_data,
)
from rlx.runtime.params import BoundWeights, Params
from rlx.runtime.weight_plan import Default

if TYPE_CHECKING:
    from rlx.frontends.checked import Home
    from rlx.ir.graph import Graph

__all__ = [
    "MAX_VARIANTS",
    "ProgramCache",
    "code_stamp",
    "graph_cache",
    "identify",
    "open_cache",
]

_LOG = getLogger("rlx")
_FORMAT = 2
MAX_VARIANTS = 8
"""Programs of one model for different assumptions about its extents."""
_SETTLED = 0.1
"""A file younger than so many seconds could change again within one tick of its time stamp."""
_HEAD = 16


def identify(path: Path | None, data: memoryview) -> list[Any]:
    """Return what identifies the bytes of a file across processes.

    That is its stamp (resolved path, size, times, inode), or a hash of the bytes: under `RLX_CACHE=content`, where
    there is no file, and for files so young that they may change again without a new stamp.
    """
    if path is not None and config.CACHE.get() != "content":
        status = path.stat()
        if abs(time.time() - status.st_mtime) > _SETTLED and status.st_size == len(data):
            times = (status.st_mtime_ns, status.st_ctime_ns)
            return [os.path.realpath(path), status.st_size, *times, status.st_dev, status.st_ino]
    return [hashlib.sha256(data).hexdigest(), len(data)]


@cache
def code_stamp() -> str:
    """Return a hash of the names, sizes and times of rlx's own source files: programs of other code never load."""
    files: list[tuple[str, int, int]] = []
    folders = [str(Path(rlx.__file__).parent)]
    while folders:
        for entry in os.scandir(folders.pop()):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                files.append((entry.path, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


def graph_cache(
    graph: Graph, backend: Backend, target: Target, options: CompileOptions
) -> ProgramCache | None:
    """Return the cache of a graph built by hand, or None where programs are not cached.

    The graph is known by its text: constants by value, params by name and type, and all names and places that errors
    and reports show. The data of its params is not in it: the graph brings them, and what is computed from them is
    computed again. Graphs with operators that are neither rlx's own nor registered with a version are not cached:
    nothing says when their code changes.
    """
    from rlx.ir.clone import clone_graph
    from rlx.ir.text import print_graph
    from rlx.ops import custom

    versions: dict[str, str] = {}
    for op in [node.op for node in graph.block.walk()]:
        if isinstance(op, custom.Custom):
            versions[op.name] = op.operator.stamp
        elif not type(op).__module__.startswith(f"{rlx.__name__}."):
            versions[op.name] = ""
    if config.CACHE.get() == "off" or not all(versions.values()):
        return None
    plain = clone_graph(graph)
    for param in plain.params.values():
        param.data = None
    text = hashlib.sha256(print_graph(plain, locations=True).encode()).hexdigest()
    identity = ["graph", text, sorted(versions.items())]
    return open_cache(identity, None, memoryview(b""), backend, target, options, weights=False)


def open_cache(
    identity: Sequence[Any],
    home: Home | None,
    data: memoryview,
    backend: Backend,
    target: Target,
    options: CompileOptions,
    *,
    weights: bool = True,
) -> ProgramCache | None:
    """Return the cache of one model on one target, or None where programs are not cached.

    Args:
        identity: of the model, from `identify`.
        home: where files beside the model may lie.
        data: the model's bytes, for params that are views of them.
        backend: which must know how to save programs.
        target: what programs are compiled for.
        options: likewise.
        weights: whether weights are kept; else whoever opens the cache has them.
    """
    store = default_store()
    if store is None or not isinstance(backend, SavingBackend) or config.DUMP.get():
        return None
    parts = [
        _FORMAT,
        __version__,
        code_stamp(),
        backend.name,
        backend.fingerprint(target),
        options.host_ops,
        repr(options.precision),
        sorted(options.skip),
    ]
    model: list[Any] = [identity]
    if home is not None and config.CACHE.get() != "content":
        # Links to one model from several folders may have other files beside them.
        model.append(os.path.realpath(home.folder))
    key, source = _hash([*parts, model]), _hash(model)
    prepare = partial(backend.passes, target)  # also imports the backend's operators
    return ProgramCache(
        store, key, source, home, data, backend, target, options, prepare, weights=weights
    )


def _hash(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


class ProgramCache:
    """The programs of one model for one target; see `open_cache`."""

    def __init__(  # noqa: PLR0913, PLR0917  (what `open_cache` found out)
        self,
        store: Store,
        key: str,
        source: str,
        home: Home | None,
        data: memoryview,
        backend: SavingBackend,
        target: Target,
        options: CompileOptions,
        prepare: Callable[[], object],
        *,
        weights: bool = True,
    ) -> None:
        self._store = store
        self._key = self._model_key = key
        self._source = source
        self._home = home
        self._data = data
        self._backend = backend
        self._target = target
        self._options = options
        self._prepare = prepare
        self._keeps_weights = weights
        self._found: dict[int, _Entry | None] = {}

    def variant(self, what: str) -> ProgramCache:
        """Return the cache of the same model changed in a way that the text says."""
        changed = copy(self)
        changed._key = hashlib.sha256(f"{self._key}:{what}".encode()).hexdigest()
        changed._found = {}
        return changed

    def interface(self) -> dict[str, Any] | None:
        """Return what the front end wrote about the model with its first program."""
        first = self._entry(0)
        if first is not None:
            return first.head.get("interface")
        found = self._store.get("interface", self._model_key)
        try:
            return None if found is None else json.loads(bytes(found))
        except ValueError:
            return None

    def restore(self, env: Mapping[str, int], read: Callable[[str], Array]) -> Restored | None:
        """Return a program that may run with these extents.

        Args:
            env: the extents.
            read: returns a param's data from the model, for those that lie nowhere else as plain bytes.
        """
        for index in range(MAX_VARIANTS):
            entry = self._entry(index)
            if entry is None:
                return None
            try:
                signature = signature_from_data(entry.head)
                if signature.fits(env):
                    return self._restored(entry, signature, read)
            except BROKEN as error:
                _LOG.warning(
                    "a cached program does not load (%s: %s); compiling",
                    type(error).__name__,
                    error,
                )
                self._drop(index)
                return None
        return None

    def save(
        self,
        compiled: CompiledGraph,
        signature: Signature,
        interface: Mapping[str, Any],
        params: Params,
        bound: BoundWeights,
        files: Mapping[str | None, memoryview],
        report: Sequence[str] = (),
    ) -> bool:
        """Write a program as the next variant; return whether it is there now.

        Args:
            compiled: of the backend this cache is for.
            signature: what its runs look like.
            interface: what the front end wants to know without reading the model.
            params: of the model, with the values it has in the file.
            bound: the program's weights.
            files: the mapped files of the model by location, in whose bytes params may lie. None is the model itself.
            report: remarks of the passes.
        """
        index = next((i for i in range(MAX_VARIANTS) if self._entry(i) is None), -1)
        saved = self._backend.save(compiled) if index >= 0 else None
        if saved is None:
            return False
        regions = _Regions(files, self._home)
        own = params.values(bound.plan.own)
        placed = {n: None if a is None else regions.place(a) for n, a in params.at_hand().items()}
        stored: dict[str, tuple[str, Array]] = {}
        if self._keeps_weights:
            stored = {n: (f"own {n}", a) for n, a in own.items() if placed[n] is None}
            stored |= {n: (bound.plan.recipes[n].key, d.array) for n, d in bound.derived.items()}
        try:
            used = regions.used()
        except (OSError, ModelError):
            return False
        weights = self._keep(stored, used)
        if weights is None:
            return False
        head = {
            **signature_to_data(signature),
            "interface": dict(interface),
            "files": used,
            "params": {
                n: [d.dtype.value, list(d.shape), *(placed[n] or (-1, 0))]
                for n, d in params.known().items()
            },
            "plan": plan_to_data(bound.plan),
            "weights": weights,
            "report": list(report),
            "compiled": saved.data,
            "blobs": [
                len(memoryview(b).cast("B")) if isinstance(b, bytes) else b.nbytes
                for b in saved.blobs
            ],
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        prefix = len(text).to_bytes(_HEAD, "little") + text
        self._found.clear()
        if self._key != self._model_key:  # whoever opens the model does not know of the change yet
            self._store.put("interface", self._model_key, json.dumps(head["interface"]).encode())
        return self._store.put("program", self._variant_key(index), [prefix, *saved.blobs])

    def identified(
        self, params: Mapping[str, Default], files: Mapping[str | None, memoryview]
    ) -> dict[str, Default]:
        """Return params of the model with what identifies their data in this process."""
        try:
            used = _Regions(files, self._home).used()
        except (OSError, ModelError):
            return dict(params)
        return {n: replace(p, identity=self._identity(n, used)) for n, p in params.items()}

    def _identity(self, name: str, used: Sequence[Any]) -> Hashable:
        return (self._source, json.dumps(used), name) if self._keeps_weights else None

    # -- weights -----------------------------------------------------------------------------------------------------

    def _keep(
        self, stored: Mapping[str, tuple[str, Array]], used: Sequence[Any]
    ) -> dict[str, list[Any]] | None:
        """Write weights that no variant has written before; return where all of them lie, None if that failed.

        Args:
            stored: by name: how each follows from the model (equal texts mean equal arrays), and its value.
            used: the files beside the model, as in a program entry.
        """
        known = self._known_weights(used)
        fresh = {o: a for o, a in stored.values() if o not in known}
        key = _hash([__version__, code_stamp(), self._source, used, list(fresh)])
        if (
            fresh
            and self._store.get("weights", key) is None
            and not self._store.put("weights", key, list(fresh.values()), quick=True)
        ):
            return None
        offset = 0
        for origin, array in fresh.items():
            known[origin] = [*described(array), key, offset]
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return {name: [origin, *known[origin]] for name, (origin, _) in stored.items()}

    def _known_weights(self, used: Sequence[Any]) -> dict[str, list[Any]]:
        """Return where the weights of other variants of the same model lie, by how they follow from it."""
        known: dict[str, list[Any]] = {}
        there: dict[str, bool] = {}
        for entry in map(self._entry, range(MAX_VARIANTS)):
            if entry is None:
                break
            if entry.head["files"] != used:
                continue
            try:
                places: dict[str, list[Any]] = {
                    str(o): [str(t), list(s), str(k), int(at)]
                    for o, t, s, k, at in entry.head["weights"].values()
                }
            except BROKEN:  # a program of another form; `restore` drops it when it comes to it
                continue
            for origin, place in places.items():
                key = place[2]
                if key not in there:
                    there[key] = self._store.get("weights", key) is not None
                if there[key]:
                    known[origin] = place
        return known

    # -- entries -----------------------------------------------------------------------------------------------------

    def _variant_key(self, index: int) -> str:
        return hashlib.sha256(f"{self._key}:{index}".encode()).hexdigest()

    def _entry(self, index: int) -> _Entry | None:
        try:
            return self._found[
                index
            ]  # clones share the cache: what is there now may be gone at once
        except KeyError:
            entry = self._found[index] = self._read(index)
            return entry

    def _read(self, index: int) -> _Entry | None:
        payload = self._store.get("program", self._variant_key(index))
        if payload is None:
            return None
        try:
            length = int.from_bytes(payload[:_HEAD], "little")
            head = json.loads(bytes(payload[_HEAD : _HEAD + length]))
            blobs = list(parts(payload, _HEAD + length, head["blobs"]))
            files = [self._data, *(self._side_file(*f) for f in head["files"])]
        except (*BROKEN, OSError):
            self._drop(index)  # external data changed, or the entry is damaged beyond its checksum
            return None
        return _Entry(head, blobs, files)

    def _drop(self, index: int) -> None:
        """Remove a variant and those after it, which could not be found without it."""
        for later in range(index, MAX_VARIANTS):
            self._store.remove("program", self._variant_key(later))
        self._found.clear()

    def _side_file(self, location: str, identity: list[Any]) -> memoryview:
        from rlx.frontends.checked import map_file

        if self._home is None:
            raise ValueError("a model without a folder has no external data")
        path = self._home.find(location, "a cached program")
        data = map_file(path)
        if identify(path, data) != identity:
            raise ValueError(f"{path} changed")
        return data

    def _restored(
        self, entry: _Entry, signature: Signature, read: Callable[[str], Array]
    ) -> Restored:
        head = entry.head
        plan = plan_from_data(head["plan"], self._prepare)
        weights = self._weights(head)
        params: dict[str, Default] = {}
        for name, (dtype, shape, number, offset) in head["params"].items():
            load = partial(read, name)
            if name in weights and name not in plan.recipes:
                load = partial(_same, weights[name])
            elif number >= 0:
                array = array_from_bytes(entry.files[int(number)], dtype, shape, offset)
                load = partial(_same, array)
            identity = self._identity(name, head["files"])
            params[name] = Default(DType.of(dtype), tuple(shape), load, identity)
        derived = {n: weights[n] for n in plan.recipes} if self._keeps_weights else {}
        saved = SavedGraph(head["compiled"], entry.blobs)
        compiled = self._backend.restore(saved, self._target, self._options)
        return Restored(compiled, signature, head["report"], plan, params, derived)

    def _weights(self, head: Mapping[str, Any]) -> dict[str, Array]:
        payloads: dict[str, memoryview] = {}
        weights: dict[str, Array] = {}
        for name, (_, dtype, shape, key, offset) in head["weights"].items():
            if key not in payloads:
                payload = self._store.get("weights", key)
                if payload is None:
                    raise ValueError("its weights are gone")
                payloads[key] = payload
            weights[name] = array_from_bytes(payloads[key], dtype, shape, offset)
        return weights


def _same(array: Array) -> Array:
    return array


@dataclass(frozen=True)
class _Entry:
    head: dict[str, Any]
    blobs: list[memoryview]
    files: list[memoryview]
    """The model, then the files beside it."""


class _Regions:
    """Finds out which arrays are views of a model's mapped files."""

    def __init__(self, files: Mapping[str | None, memoryview], home: Home | None) -> None:
        self._home = home
        self._files = [(None, files[None])] if None in files else []
        self._files += [(p, v) for p, v in files.items() if p is not None]
        self._starts = [_address(view) for _, view in self._files]
        self._used: dict[int, int] = {}

    def place(self, array: Array) -> tuple[int, int] | None:
        """Return (number of the file, offset) of an array that is a view, else None."""
        start = int(array.__array_interface__["data"][0])
        if not array.flags.c_contiguous or array.nbytes == 0:
            return None
        for index, ((path, view), first) in enumerate(zip(self._files, self._starts, strict=True)):
            if first <= start and start + array.nbytes <= first + len(view):
                if path is None:
                    return 0, start - first
                return self._used.setdefault(index, len(self._used) + 1), start - first
        return None

    def used(self) -> list[list[Any]]:
        """Return (location, identity) of every file beside the model, as numbered from 1.

        Files that no param lies in count as well: constants may come from them.
        """
        for index, (path, _) in enumerate(self._files):
            if path is not None:
                self._used.setdefault(index, len(self._used) + 1)
        out: list[list[Any]] = []
        for index in self._used:
            location, view = self._files[index]
            assert location is not None
            assert self._home is not None
            out.append([location, identify(self._home.find(location, "external data"), view)])
        return out


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0
