# SPDX-License-Identifier: Apache-2.0
"""Packages: a compiled model as one file that is mapped and run in place.

::

    bytes 0 to 8     "rlxpack" and the version of this form
    bytes 8 to 16    length of the head
    bytes 16 to 48   sha256 of the head
    from byte 64     the head: JSON
    then             sections: machine code, constants, weights

The head says where every section lies and what its checksum is, so the hash of the head stands for the whole file: it
is the package's digest. Opening reads the head alone. A section is checked when it is used for the first time: sha256
for machine code and constants, for weights the sums of `rlx.base.store`, which run at the speed of memory.

Whatever the head says is checked before it is believed. What cannot be checked is what the machine code does: a package
is a program, to be opened only if it comes from somebody one would run a program of.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlx._version import __version__
from rlx.backends.protocol import Backend, CompiledGraph, CompileOptions, SavedGraph, SavingBackend
from rlx.base.bounded_json import read_json
from rlx.base.dims import Dim, parse_dim, symbol, symbol_atoms
from rlx.base.dtypes import DType
from rlx.base.errors import ParseError, UsageError
from rlx.base.numeric import Array
from rlx.base.pages import write_parts
from rlx.base.store import digest
from rlx.base.target import Target
from rlx.runtime.entry import (
    BROKEN,
    PACKAGE_MAGIC,
    Restored,
    Signature,
    array_from_bytes,
    described,
    plan_from_data,
    plan_to_data,
    signature_from_data,
    signature_to_data,
)
from rlx.runtime.params import BoundWeights, Params
from rlx.runtime.state import DeclaredState
from rlx.runtime.weight_plan import Default, WeightPlan

__all__ = ["Contents", "Package", "write_package"]

_FORMAT = 1
_MAGIC = PACKAGE_MAGIC + bytes([_FORMAT])
_HEAD = 64
_ALIGNMENT = 64
_PAGE = 4096


@dataclass(frozen=True)
class Contents:
    """What goes into a package.

    Attributes:
        name: of the model.
        inputs: name, dtype and shape of every input.
        uppers: bounds of its symbols.
        programs: the variants: the backend's part, what runs look like, remarks of the passes, weights.
        params: the weights of the model.
        states: what persists between runs; their initial values are saved.
    """

    name: str
    inputs: Sequence[tuple[str, DType, tuple[Dim, ...]]]
    uppers: Mapping[str, int]
    programs: Sequence[tuple[CompiledGraph, Signature, Sequence[str], BoundWeights]]
    params: Params
    states: Sequence[DeclaredState] = ()


# -- writing


@dataclass
class _Sections:
    """The parts of the file behind the head."""

    places: list[list[Any]] = field(default_factory=list[list[Any]])
    _data: list[memoryview] = field(default_factory=list[memoryview])
    _known: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _end: int = 0

    def add(self, array: Array, *, quick: bool) -> int:
        """Return the number of the section that holds an array; one that several programs share is written once."""
        view = _bytes(np.ascontiguousarray(array))
        key = (int(array.__array_interface__["data"][0]), len(view))
        if len(view) and key in self._known:
            return self._known[key]
        step = _PAGE if len(view) >= _PAGE else _ALIGNMENT
        at = -(-self._end // step) * step
        self.places.append([at, len(view), "s" if quick else "h", digest(view, quick=quick).hex()])
        self._data.append(view)
        self._end = at + len(view)
        self._known[key] = len(self.places) - 1
        return len(self.places) - 1

    def parts(self) -> Iterator[bytes | memoryview]:
        """Iterate over what lies in the file, gaps included."""
        end = 0
        for (at, size, *_), view in zip(self.places, self._data, strict=True):
            yield bytes(at - end)
            yield view
            end = at + size


def _as_array(blob: Any) -> Array:
    if isinstance(blob, np.ndarray):
        return cast("Array", blob)
    return np.frombuffer(blob, np.uint8)


def _bytes(array: Array) -> memoryview:
    return (
        memoryview(cast("Any", array.reshape(-1).view(np.uint8))) if array.size else memoryview(b"")
    )


def write_package(
    path: Path, contents: Contents, backend: Backend, target: Target, options: CompileOptions
) -> str:
    """Write a package and return its digest.

    Args:
        path: of the file, which appears there as a whole or not at all.
        contents: what goes into it. Weights are up to date.
        backend: whose programs they are.
        target: what they were compiled for.
        options: and how.

    Raises:
        UsageError: the programs have parts that only this process can hold, or there is no such folder.
        OSError: the file cannot be written.
    """
    if not isinstance(backend, SavingBackend):
        raise UsageError(f"programs of the device {backend.name!r} cannot be saved")
    sections = _Sections()
    programs = [_program_to_data(p, backend, sections, contents.name) for p in contents.programs]
    plans = [weights.plan for _, _, _, weights in contents.programs]
    shapes = [s for _, _, s in contents.inputs] + [s.shape for s in contents.states]
    atoms = [a for shape in shapes for e in shape for a in symbol_atoms(e)]
    states = [
        [
            s.name,
            s.dtype.value,
            _shape_to_data(s.shape),
            list(s.init.shape),
            sections.add(s.init, quick=False),
            sorted(s.free),
        ]
        for s in contents.states
    ]
    head = {
        "rlx": __version__,
        "backend": backend.name,
        "fingerprint": backend.fingerprint(target),
        "host_ops": options.host_ops,
        "name": contents.name,
        "inputs": [[n, d.value, _shape_to_data(shape)] for n, d, shape in contents.inputs],
        "states": states,
        "symbols": {a.name: a.lower for a in atoms},
        "uppers": dict(contents.uppers),
        "params": _params_to_data(contents.params, plans, sections),
        "programs": programs,
        "sections": sections.places,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    checksum = hashlib.sha256(text).digest()
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"a package cannot be written to {path}: {why}")
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with part.open("xb", buffering=0) as file:
            head_bytes = (_MAGIC + len(text).to_bytes(8, "little") + checksum).ljust(_HEAD, b"\0")
            gap = bytes(-(_HEAD + len(text)) % _PAGE)
            write_parts(file, [head_bytes, text, gap, *sections.parts()])
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return checksum.hex()


def _shape_to_data(shape: Sequence[Dim]) -> list[int | str]:
    return [e if isinstance(e, int) else str(e) for e in shape]


def _program_to_data(
    program: tuple[CompiledGraph, Signature, Sequence[str], BoundWeights],
    backend: SavingBackend,
    sections: _Sections,
    name: str,
) -> dict[str, Any]:
    compiled, signature, report, weights = program
    saved = backend.save(compiled)
    if saved is None:
        raise UsageError(
            f"{name} cannot be saved: it has parts that only this process can hold, such as operators of your own "
            "without a version"
        )
    derived = {
        n: [*described(d.array), sections.add(d.array, quick=True)]
        for n, d in weights.derived.items()
    }
    return {
        **signature_to_data(signature),
        "report": list(report),
        "compiled": saved.data,
        "blobs": [sections.add(_as_array(b), quick=False) for b in saved.blobs],
        "plan": plan_to_data(weights.plan),
        "derived": derived,
    }


def _params_to_data(
    params: Params, plans: Sequence[WeightPlan], sections: _Sections
) -> dict[str, list[Any]]:
    """Return dtype, shape and section of every param, or which derived weight it can be read back from."""
    own = {n for plan in plans for n in plan.own}
    kept: dict[str, list[Any]] = {}
    for number, plan in enumerate(plans):
        for derived, recipe in plan.recipes.items():
            for source in recipe.kept:
                kept.setdefault(source, [number, derived])
    out: dict[str, list[Any]] = {}
    for name, param in params.known().items():
        place: Any = kept.get(name)
        if name in own or place is None:
            (array,) = params.values([name]).values()
            place = sections.add(array, quick=True)
        out[name] = [param.dtype.value, list(param.shape), place]
    return out


# -- reading


class Package:
    """An open package: a source of programs, like a cache that never writes.

    Args:
        data: the mapped file.
        name: of the file, for messages.
        backend: that runs its programs.
        target: where they run.
        options: how.

    Attributes:
        head: what it says about itself.
        digest: sha256 of the head, hexadecimal; stands for the whole file.

    Raises:
        ParseError: it is no package, or damaged.
        UsageError: it was saved by another version, or for another device or processor.
    """

    def __init__(
        self,
        data: memoryview,
        name: str,
        backend: Backend,
        target: Target,
        options: CompileOptions,
    ) -> None:
        self._name = name
        self._target, self._options = target, options
        self._prepare = partial(backend.passes, target)  # also imports the backend's operators
        self._data = data
        if len(data) < _HEAD or bytes(data[: len(PACKAGE_MAGIC)]) != PACKAGE_MAGIC:
            raise ParseError(f"{name} is not a package of rlx; make one with Executable.save")
        if data[7] != _FORMAT:
            raise ParseError(
                f"{name} has version {data[7]} of the form of packages, this rlx reads {_FORMAT}; save it again"
            )
        length = int.from_bytes(data[8:16], "little")
        if length > len(data) - _HEAD:
            raise ParseError(
                f"{name} is cut off: its head has {length} bytes, the file {len(data)}"
            )
        text = data[_HEAD : _HEAD + length]
        checksum = hashlib.sha256(text).digest()
        if checksum != bytes(data[16:48]):
            raise ParseError(f"{name} is damaged: the checksum of its head is wrong")
        self.digest = checksum.hex()
        self.head = read_json(text, f"the head of {name}")
        self._body = -(-(_HEAD + length) // _PAGE) * _PAGE
        self._checked: dict[int, memoryview] = {}
        self._plans: dict[int, WeightPlan] = {}
        self._backend = self._fitting(backend)

    def _fitting(self, backend: Backend) -> SavingBackend:
        """Return the backend if it is the one that programs were saved for, in all respects."""
        made = self.head.get("rlx")
        if made != __version__:
            raise UsageError(
                f"{self._name} was saved by rlx {made!s:.40}, this is {__version__}; save it again with this version"
            )
        if not isinstance(backend, SavingBackend) or self.head.get("backend") != backend.name:
            raise UsageError(
                f"{self._name} was saved for the device {self.head.get('backend')!s:.40}, not {backend.name}"
            )
        theirs, ours = str(self.head.get("fingerprint")), backend.fingerprint(self._target)
        if theirs != ours:
            raise UsageError(
                f"{self._name} was compiled for another processor, or by another compiler or other code of rlx; "
                "save it again here.\n"
                f"  compiled for: {theirs:.1000}\n  this machine: {ours}"
            )
        return backend

    def interface(self) -> tuple[list[tuple[str, DType, tuple[Dim, ...]]], dict[str, int]]:
        """Return the inputs and the bounds of symbols.

        Raises:
            ParseError: the head is malformed.
        """
        return self._read(self._interface)

    def states(self) -> list[DeclaredState]:
        """Return what persists between runs, with its initial value."""
        return self._read(self._states)

    def signature(self) -> Signature:
        """Return what runs of the first program look like."""
        return self._read(lambda: signature_from_data(self.head["programs"][0]))

    def special(self) -> list[Signature]:
        """Return those of programs for single values of extents."""
        return self._read(
            lambda: [s for d in self.head["programs"] if (s := signature_from_data(d)).is_special]
        )

    def params(self) -> dict[str, Default]:
        """Return the model's params; their data is read when it is asked for."""
        return self._read(self._params)

    def restore(self, env: Mapping[str, int]) -> Restored | None:
        """Return a program that may run with these extents, if there is one.

        Raises:
            ParseError: the package is malformed, or damaged where the program needs it.
        """
        return self._read(lambda: self._restore(env))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ParseError:
            raise
        except (*BROKEN, RecursionError) as error:
            kind = type(error).__name__
            raise ParseError(f"{self._name} does not read: {kind}: {error!s:.200}") from error

    def _restore(self, env: Mapping[str, int]) -> Restored | None:
        programs = self.head["programs"]
        signatures = [signature_from_data(data) for data in programs]
        fitting = [n for n, signature in enumerate(signatures) if signature.fits(env)]
        if not fitting:
            return None
        number = min(fitting, key=lambda n: signatures[n].rank)
        data, plan = programs[number], self._plan(number)
        derived = {n: self._derived(number, n) for n in plan.recipes}
        blobs = [self._section(int(b)) for b in data["blobs"]]
        saved = SavedGraph(data["compiled"], blobs)
        compiled = self._backend.restore(saved, self._target, self._options)
        report = [str(line) for line in data["report"]]
        return Restored(compiled, signatures[number], report, plan, self._params(), derived)

    def _interface(self) -> tuple[list[tuple[str, DType, tuple[Dim, ...]]], dict[str, int]]:
        inputs = [
            (str(n), DType.of(str(d)), self._shape(shape)) for n, d, shape in self.head["inputs"]
        ]
        return inputs, {str(n): _extent(v) for n, v in self.head["uppers"].items()}

    def _states(self) -> list[DeclaredState]:
        return [
            DeclaredState(
                str(name),
                DType.of(str(dtype)),
                self._shape(shape),
                self._array(dtype, init, section),
                frozenset(map(str, free)),
            )
            for name, dtype, shape, init, section, free in self.head["states"]
        ]

    def _shape(self, data: Sequence[Any]) -> tuple[Dim, ...]:
        lowers = self.head["symbols"]

        def extent(e: Any) -> Dim:
            return (
                _extent(e) if isinstance(e, int) else parse_dim(e, lambda n: symbol(n, lowers[n]))
            )

        return tuple([extent(e) for e in data])

    def _params(self) -> dict[str, Default]:
        found: dict[str, Default] = {}
        for name, (dtype, shape, place) in self.head["params"].items():
            extents = tuple([_extent(d) for d in shape])
            if isinstance(place, int):
                load = partial(self._array, dtype, extents, place)
            else:
                number, derived = place
                load = partial(self._recover, int(number), str(derived), str(name))
            found[str(name)] = Default(DType.of(str(dtype)), extents, load)
        return found

    def _plan(self, number: int) -> WeightPlan:
        if number not in self._plans:
            data = self.head["programs"][number]["plan"]
            self._plans[number] = plan_from_data(data, self._prepare)
        return self._plans[number]

    def _derived(self, number: int, name: str) -> Array:
        dtype, shape, section = self.head["programs"][number]["derived"][name]
        return self._array(dtype, shape, section)

    def _array(self, dtype: str, shape: Sequence[int], section: int) -> Array:
        return self._read(lambda: array_from_bytes(self._section(int(section)), dtype, shape, 0))

    def _recover(self, number: int, derived: str, name: str) -> Array:
        from rlx.runtime.recipes import part, recover

        def read() -> Array:
            piece = part(self._plan(number).graph(), [derived])
            return recover(piece, self._derived(number, derived), name)

        return self._read(read)

    def _section(self, number: int) -> memoryview:
        """Return a section, whose checksum is compared the first time."""
        known = self._checked.get(number)
        if known is not None:
            return known
        if number < 0:
            raise ValueError(f"there is no section {number}")
        at, nbytes, kind, checksum = self.head["sections"][number]
        begin = self._body + _extent(at)
        end = begin + _extent(nbytes)
        if end > len(self._data) or kind not in ("h", "s"):
            raise ParseError(
                f"{self._name} is cut off: section {number} ends past the end of the file"
            )
        view = self._data[begin:end]
        if digest(view, quick=kind == "s").hex() != checksum:
            raise ParseError(f"{self._name} is damaged: the checksum of section {number} is wrong")
        self._checked[number] = view
        return view


def _extent(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is no extent")
    return value
