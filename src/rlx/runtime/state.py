# SPDX-License-Identifier: Apache-2.0
"""What an executable remembers between runs: named values on its device, read, set, saved and put back by name.

The values belong to the executable, not to a compiled program: all variants work on the same memory. A value has
extents once it holds something; they stay until it is reset or set, so a call with another batch is refused instead of
mixing sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.protocol import (
    Backend,
    CompiledGraph,
    Run,
    StatefulBackend,
    StatefulGraph,
    StateMemory,
)
from rlx.base.allocation import out_of_memory
from rlx.base.diagnostics import did_you_mean
from rlx.base.dims import Dim, evaluate, lone_symbol, symbols_of
from rlx.base.dtypes import DType
from rlx.base.errors import UnsupportedOpError, UsageError
from rlx.base.numeric import Array
from rlx.base.target import Target
from rlx.base.types import Shape, TensorType

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

__all__ = ["DeclaredState", "Snapshot", "StateHandle", "States", "states_of"]


@dataclass(frozen=True)
class DeclaredState:
    """A state as its source declares it.

    Attributes:
        name: what callers know it by.
        dtype: of its elements.
        shape: static or symbolic extents.
        init: what it is at first; broadcast to the shape.
        free: symbols of the shape that programs express by others.
    """

    name: str
    dtype: DType
    shape: Shape
    init: Array
    free: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.name}: {TensorType(self.dtype, self.shape)}"


def states_of(graph: Graph) -> list[DeclaredState]:
    """Return the states that a graph declares."""
    return [
        DeclaredState(s.name, s.value.type.dtype, s.value.type.shape, s.init) for s in graph.states
    ]


@dataclass(frozen=True)
class Snapshot:
    """The values of all states at one moment, as copies on the host.

    Attributes:
        values: by name; a state that held nothing yet is not there.
    """

    values: Mapping[str, Array] = field(default_factory=dict[str, Array])

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(a.nbytes for a in self.values.values())


@dataclass
class _Held:
    """The memory of one state, once it has extents."""

    memory: StateMemory
    shape: tuple[int, ...]


class StateHandle:
    """One state of an executable.

    Attributes:
        name: its name.
        dtype: of its elements.
    """

    def __init__(self, owner: States, declared: DeclaredState) -> None:
        self.name = declared.name
        self.dtype = declared.dtype
        self._owner = owner
        self._declared = declared

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The extents it has; before it holds anything, symbolic ones as text."""
        held = self._owner.held.get(self.name)
        if held is not None:
            return held.shape
        return tuple(d if isinstance(d, int) else str(d) for d in self._declared.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory it has; 0 before it holds anything."""
        held = self._owner.held.get(self.name)
        return 0 if held is None else _nbytes(self.dtype, held.shape)

    def get(self) -> Array:
        """Return a copy of its value.

        Raises:
            UsageError: a run failed and left it undefined, or it has symbolic extents and holds nothing yet.
        """
        return self._owner.read(self._declared)

    def set(self, value: Any) -> None:
        """Replace its value; the array is copied.

        Raises:
            UsageError: the array has another dtype, or a shape that the declared one does not allow.
        """
        self._owner.write(self._declared, value)

    def reset(self) -> None:
        """Make it its initial value again, of any extents."""
        self._owner.forget([self.name])

    def __repr__(self) -> str:
        return f"<State {self.name}: {self.dtype}[{','.join(map(str, self.shape))}]>"


class States(Mapping[str, StateHandle]):
    """The states of an executable by name.

    Args:
        model: its name, for messages.
        declared: what there is.
        backend: makes their memory.
        target: where.
        exclusive: keeps runs out while a state is read or written; raises where the executable cannot be used.
        resized: called when a state got other extents than before.

    Attributes:
        held: the memory of the states that hold something.
    """

    def __init__(
        self,
        model: str,
        declared: Sequence[DeclaredState],
        backend: Backend,
        target: Target,
        exclusive: Callable[[], AbstractContextManager[None]],
        resized: Callable[[], None],
    ) -> None:
        if declared and not isinstance(backend, StatefulBackend):
            raise UnsupportedOpError(
                f"{model} has states ({', '.join(map(str, declared))}), which the {backend.name} "
                "backend does not run; use device='cpu'"
            )
        self.held: dict[str, _Held] = {}
        self._model = model
        self._declared = {d.name: d for d in declared}
        self._handles = {d.name: StateHandle(self, d) for d in declared}
        self._backend = backend
        self._target = target
        self._exclusive = exclusive
        self._resized = resized
        self._undefined: frozenset[str] = frozenset()
        self._ready: tuple[object, object] = (None, None)

    # -- for users ---------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> StateHandle:
        """Return the handle of a state.

        Raises:
            UsageError: there is none of this name.
        """
        if name not in self._handles:
            known = ", ".join(self._handles) or "none"
            hint = did_you_mean(name, self._handles)
            raise UsageError(f"{self._model} has no state {name!r}; it has {known}.{hint}")
        return self._handles[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the handle of a state, or the default if there is none of this name."""
        return self._handles.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._handles

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def reset(self) -> None:
        """Make all states their initial values again, of any extents. Also after a run that failed."""
        self.forget(list(self._declared))

    def snapshot(self) -> Snapshot:
        """Return copies of the values of all states.

        Raises:
            UsageError: a run failed and left them undefined.
        """
        with self._exclusive():
            return self.values_now()

    def restore(self, snapshot: Snapshot) -> None:
        """Put all states back to a snapshot, of this executable or of one with the same states.

        Raises:
            UsageError: the snapshot has other states, dtypes or shapes, or is none; then nothing has changed.
        """
        if not isinstance(snapshot, Snapshot):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"states are restored from what `snapshot` returned, not from a {type(snapshot).__name__}"
            )
        values = snapshot.values
        unknown = [n for n in values if n not in self._declared]
        if unknown:
            raise UsageError(f"the snapshot has states {unknown}, {self._model} has {list(self)}")
        checked = {n: self._checked(self._declared[n], a) for n, a in values.items()}
        with self._exclusive():
            self._put_back(checked)

    def __repr__(self) -> str:
        return f"<States {', '.join(map(str, self._declared.values())) or 'none'}>"

    # -- for handles -------------------------------------------------------------------------------------------------

    def read(self, declared: DeclaredState) -> Array:
        """Return a copy of a state's value."""
        with self._exclusive():
            if declared.name in self._undefined:
                raise self._undefined_error(declared.name)
            if declared.name in self.held:
                return self._copy(declared)
        try:
            shape = tuple(evaluate(d, {}) for d in declared.shape)
        except KeyError as error:
            raise UsageError(
                f"state {declared} of {self._model} holds nothing before the first run, which gives "
                f"{error.args[0]}"
            ) from error
        return _initial(declared, shape)

    def write(self, declared: DeclaredState, value: Any) -> None:
        """Replace a state's value by a copy of an array."""
        array = self._checked(declared, value)
        with self._exclusive():
            self._store(declared.name, array)

    def forget(self, names: Sequence[str]) -> None:
        """Drop the memory of states; their next run begins with the initial value."""
        with self._exclusive():
            self._drop(names)

    # -- for the executable, which holds the lock --------------------------------------------------------------------

    def extents(self, env: dict[str, int], uppers: Mapping[str, int]) -> dict[str, int]:
        """Return the extents of a call with those that only states have: what they hold, else their bound.

        Raises:
            UsageError: nothing tells one of them.
        """
        for declared in self._declared.values():
            held = self.held.get(declared.name)
            for axis, dim in enumerate(declared.shape):
                for name in symbols_of(dim) - declared.free:
                    if name in env:
                        continue
                    if held is not None and lone_symbol(dim) == name:
                        env[name] = held.shape[axis]
                    elif name in uppers:
                        env[name] = uppers[name]
        for name in sorted(self.symbols() - set(env)):
            raise UsageError(
                f"no input of {self._model} gives the extent {name} of its states; bound it with "
                f"dims={{{name!r}: ...}} or set a state that has it"
            )
        return env

    def running(self, compiled: CompiledGraph, run: Run) -> Run:
        """Return how to run a program of this executable: as it is, or on the states it has.

        Before a run the program is pointed at them; until the run has ended well they count as undefined.
        """
        if not self._declared:
            return run
        if not isinstance(compiled, StatefulGraph):
            raise UnsupportedOpError(f"the {self._backend.name} backend runs no graphs with states")
        every, nothing = frozenset(self._declared), frozenset[str]()

        def run_on_states(
            inputs: Sequence[Array], outputs: Sequence[Array], env: Mapping[str, int]
        ) -> None:
            if self._undefined:
                raise self._undefined_error(min(self._undefined))
            if self._ready[0] is not compiled or self._ready[1] is not env:
                self._prepare(compiled, env)
                self._ready = (compiled, env)
            self._undefined = every
            run(inputs, outputs, env)
            self._undefined = nothing

        return run_on_states

    def values_now(self) -> Snapshot:
        """Return copies of all values; what `snapshot` does."""
        if self._undefined:
            raise self._undefined_error(min(self._undefined))
        return Snapshot({n: self._copy(self._declared[n]) for n in self.held})

    def symbols(self) -> set[str]:
        """Return the symbols in the shapes that runs have to have a value for."""
        return {s for d in self._declared.values() for e in d.shape for s in symbols_of(e) - d.free}

    @property
    def nbytes(self) -> int | None:
        """Bytes of all states; None before the first run, when only bounds are known."""
        if self.held.keys() != self._declared.keys():
            return None
        return sum(handle.nbytes for handle in self._handles.values())

    @contextmanager
    def untouched(self) -> Generator[None]:
        """Undo what runs inside the block do to the states. The caller does not hold the lock."""
        kept = self.snapshot()
        try:
            yield
        finally:
            self.restore(kept)

    @contextmanager
    def kept(self) -> Generator[None]:
        """Do the same while the caller holds the lock."""
        before = self.values_now()
        try:
            yield
        finally:
            self._put_back(before.values)

    def _put_back(self, values: Mapping[str, Array]) -> None:
        self._drop([n for n in self._declared if n not in values])
        for name, array in values.items():
            self._store(name, array)

    def close(self) -> None:
        """Give the memory back."""
        self.held.clear()

    # -- inside, the lock is held ------------------------------------------------------------------------------------

    def _undefined_error(self, name: str) -> UsageError:
        return UsageError(
            f"a run of {self._model} failed and left state {name!r} undefined; call state.reset(), or "
            "state.restore(snapshot) with a snapshot from before"
        )

    def _prepare(self, compiled: StatefulGraph, env: Mapping[str, int]) -> None:
        wanted = {
            name: tuple(evaluate(d, env) for d in shape) for name, shape in compiled.states.items()
        }
        for name, shape in wanted.items():
            held = self.held.get(name)
            if held is not None and held.shape != shape:
                dtype = self._declared[name].dtype
                raise UsageError(
                    f"state {name!r} of {self._model} holds {dtype}{list(held.shape)} from earlier runs, "
                    f"with these inputs it is {dtype}{list(shape)}; to begin anew call state.reset(), or "
                    f"give it a value of the new shape with state[{name!r}].set(array)"
                )
        for name, shape in wanted.items():
            if name not in self.held:
                memory, declared = self._allocate(name, shape), self._declared[name]
                if declared.init.tobytes().strip(
                    b"\0"
                ):  # new memory is zero: a large cache costs what is used of it
                    memory.write(_initial(declared, shape))
            compiled.set_state(name, self.held[name].memory)

    def _allocate(self, name: str, shape: tuple[int, ...]) -> StateMemory:
        assert isinstance(self._backend, StatefulBackend)
        nbytes = _nbytes(self._declared[name].dtype, shape)
        try:
            memory = self._backend.state_memory(nbytes, self._target)
        except (MemoryError, ValueError, OSError) as error:  # as NumPy and mmap say it
            raise out_of_memory(f"state {name!r} of {self._model}", nbytes) from error
        self.held[name] = _Held(memory, shape)
        self._ready = (None, None)
        return memory

    def _store(self, name: str, array: Array) -> None:
        held = self.held.get(name)
        if held is None or held.shape != array.shape:
            self._allocate(name, array.shape).write(array)
            self._resized()
        else:
            held.memory.write(array)
        self._undefined -= {name}

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            if self.held.pop(name, None) is not None:
                self._resized()
        self._undefined -= set(names)
        self._ready = (None, None)

    def _copy(self, declared: DeclaredState) -> Array:
        held = self.held[declared.name]
        out = np.empty(held.shape, declared.dtype.numpy)
        held.memory.read(out)
        return out

    def _checked(self, declared: DeclaredState, value: Any) -> Array:
        """Return an array that a state may become.

        Raises:
            UsageError: it may not.
        """
        array = np.asarray(value)
        if array.dtype != declared.dtype.numpy:
            raise UsageError(
                f"state {declared} of {self._model} got dtype {array.dtype}; convert it with "
                f".astype({declared.dtype.numpy.name!r})"
            )
        fits = len(array.shape) == len(declared.shape) and all(
            not isinstance(want, int) or have == want
            for have, want in zip(array.shape, declared.shape, strict=True)
        )
        env: dict[str, int] = {}
        for dim, extent in zip(declared.shape, array.shape, strict=False):
            name = lone_symbol(dim)
            fits = fits and (name is None or env.setdefault(name, extent) == extent)
        if not fits:
            raise UsageError(
                f"state {declared} of {self._model} got an array of shape {list(array.shape)}"
            )
        return np.ascontiguousarray(array).reshape(array.shape)


def _initial(declared: DeclaredState, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(declared.init, shape).copy(order="C")


def _nbytes(dtype: DType, shape: Sequence[Dim]) -> int:
    nbytes = TensorType(dtype, tuple(shape)).nbytes
    assert isinstance(nbytes, int)
    return nbytes
