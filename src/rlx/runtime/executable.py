# SPDX-License-Identifier: Apache-2.0
"""The object a user runs: binds arrays to a compiled program, chooses the variant, owns weights and memory."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlx.backends.lanes import Job, LaneBackend, LaneGraph
from rlx.backends.protocol import (
    Backend,
    CompileOptions,
    MemoryReport,
)
from rlx.base.dims import Dim, DimExpr, evaluate
from rlx.base.errors import OutOfMemoryError, UsageError
from rlx.base.numeric import Array
from rlx.base.pages import release_free_memory
from rlx.base.rng import RngPolicy
from rlx.base.target import Target
from rlx.runtime.enqueue import Enqueuing
from rlx.runtime.entry import Signature
from rlx.runtime.forks import watch_forks
from rlx.runtime.futures import Turn
from rlx.runtime.inputs import Inputs, Matched, TensorSpec
from rlx.runtime.observe import Call, Observable
from rlx.runtime.outputs import Discarded, Request
from rlx.runtime.params import Params
from rlx.runtime.program import Binding, Program, Variant
from rlx.runtime.queue import RunQueue
from rlx.runtime.rng import RunKeys
from rlx.runtime.source import Source, closed_build
from rlx.runtime.state import States
from rlx.runtime.variants import Maker, Variants
from rlx.runtime.weighted import Weighted

if TYPE_CHECKING:
    from rlx.runtime.bind import Feeds
    from rlx.runtime.derive import Choose
    from rlx.runtime.profile import Profile
    from rlx.runtime.report import ModelReport
    from rlx.runtime.slots import SlotRecord
    from rlx.runtime.specialize import Specialization

__all__ = ["Executable", "Program", "TensorSpec"]

_MAX_BINDINGS = 256


class Executable(Enqueuing, Weighted, Observable):
    """A compiled model. Safe to call from several threads (calls are serialised); use clones to run in parallel.

    Attributes:
        inputs: what `run` takes.
        outputs: what `run` gives, in order.
        state: what persists between runs, by name.
    """

    def __init__(
        self,
        source: Source,
        backend: Backend,
        target: Target,
        options: CompileOptions,
        rng: RngPolicy | None = None,
        *,
        like: Executable | None = None,
    ) -> None:
        self._rng = RunKeys(RngPolicy() if rng is None else rng)
        self._maker = Maker(backend, target, options)
        self._lock = threading.RLock()
        self._turn = Turn()
        make_lane = partial(backend.lane, target) if isinstance(backend, LaneBackend) else None
        self._queue = RunQueue(source.name, self._turn, self._lock, make_lane)
        self._bindings: OrderedDict[tuple[tuple[int, ...], ...], Binding] = OrderedDict()
        self._weights = Params(source.name, source.read_params)
        if source.params:
            self._weights.declare(source.params)
            source.params.clear()
        self._discarded = Discarded()
        self._last: Binding | None = None
        self._closed = self._forked = self._viewed = False
        self._declare(source)
        watch_forks(self)
        if like is not None:
            self._become(like)
        elif source.saved is not None:
            self._set_outputs(source.saved.signature)  # linking waits for the first run
        elif not self._unbounded():
            self._variants.compile(source.uppers, {})

    def _declare(self, source: Source) -> None:
        """Take inputs, states and, once something is compiled, outputs from a source."""
        self._source = source
        self._inputs = Inputs(source.name, source.inputs)
        self.inputs = self._inputs.specs
        self.state = States(
            source.name,
            source.states,
            self._maker.backend,
            self._maker.target,
            self._exclusive,
            self._bindings.clear,
        )
        self._outputs: list[TensorSpec] | None = None
        self._output_names: list[str] = []
        self._result_type: Any = None
        self._variants = self._new_variants()

    def _new_variants(self) -> Variants:
        return Variants(self._source, self._maker, self._weights, self._programs_changed)

    def _programs_changed(self) -> None:
        self._bindings.clear()
        self._last = None
        if self._outputs is None and self._variants:
            self._set_outputs(self._variants.latest.program.signature)

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> list[TensorSpec]:
        """The outputs in order.

        Raises:
            UsageError: extents are unbounded and nothing ran yet, so their types are not known.
        """
        if self._outputs is None:
            raise UsageError(
                f"the outputs of {self._source.name} are known after the first call, `warmup`, or with "
                f"dims={{{', '.join(f'{s!r}: ...' for s in self._unbounded())}}}"
            )
        return self._outputs

    @property
    def variants(self) -> int:
        """How many times the model was compiled (1 unless a call broke an assumption)."""
        return len(self._variants)

    @property
    def program(self) -> Program:
        """The most recently used variant.

        Raises:
            UsageError: nothing is compiled yet.
        """
        latest = next(iter(self._variants), None)  # the lock may be held for as long as a run takes
        if latest is None:
            with self._lock:
                self._check_usable()
            raise UsageError(
                f"{self._source.name} is compiled on the first call; use `warmup` to force it"
            )
        return latest.program

    @property
    def rng(self) -> RngPolicy:
        """Seed of the random numbers, and number of the next run; assigning it repeats the runs from there on.

        Runs that were enqueued before come before.
        """
        self._settle()
        return self._rng.policy

    @rng.setter
    def rng(self, policy: RngPolicy) -> None:
        self._settle()
        with self._lock:
            self._rng.restart(policy)

    def memory(self) -> MemoryReport:
        """Return the bytes weights, arena, scratch and state take at the current bounds."""
        report = self.program.compiled.memory()
        held = self.state.nbytes
        return report if held is None else replace(report, state=held)

    def _unbounded(self) -> list[str]:
        known = self._source.uppers
        return sorted(n for n in self._inputs.symbols() | self.state.symbols() if n not in known)

    def bind_state(self, feeds: Feeds) -> Self:
        """Make outputs feed inputs: what an output is in one run, the input is in the next.

        The inputs become states and the outputs are not returned any more: `state` reads them, sets them and resets
        them to zeros. What was compiled before is compiled again.

        Args:
            feeds: output -> input, or `RowFeed` where rows of the output are written into a cache.

        Returns:
            This object.

        Raises:
            UsageError: there is no such output or input, or their types differ. What depends on extents may be found
                out by the first call only.
        """
        from rlx.runtime.bind import bind_source

        with self._exclusive():
            before = self._source
            source = bind_source(
                before, feeds, None if self._outputs is None else self._output_names
            )
            self.state.close()
            self._variants.clear()
            self._declare(source)
            try:
                if not self._unbounded():
                    self._variants.compile(source.uppers, {})
            except BaseException:
                self._declare(before)
                raise
        return self

    def clone(self, *, with_state: bool = True) -> Executable:
        """Return an executable of the same code and options that runs independently of this one.

        It has a lock and intermediate memory of its own, so the two run in parallel. Weights are shared until one of
        the two sets a param (see `share_weights_from`). Its next run has the random numbers of this one's next run.

        Args:
            with_state: whether its states begin with a copy of the values that they have here, or with the initial
                ones.

        Raises:
            UsageError: a run failed, so that there are no values to copy.
        """
        with self._exclusive():
            values = self.state.values_now() if with_state else None
            twin = Executable(
                self._source,
                self._maker.backend,
                self._maker.target,
                self._maker.options,
                self._rng.policy,
                like=self,
            )
        if values is not None:
            twin.state.restore(values)
        return twin

    def _become(self, other: Executable) -> None:
        """Take over the programs of another executable whose lock is held."""
        self._weights = other._weights.clone()
        self._variants = self._new_variants()
        self._variants.adopt(other._variants)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the compiled model to a file that `rlx.open` runs in place, on a processor like this one.

        The file holds machine code, the schedule and the weights as they are now, packed, for all variants compiled
        so far. States begin with their initial values there.

        Returns:
            The digest of the package, hexadecimal: `rlx.open(path, digest=...)` accepts no other file.

        Raises:
            UsageError: nothing is compiled yet, a param has no value, or a program has parts that only this process can
                hold (operators of your own without a version).
            OSError: the file cannot be written.
        """
        from rlx.runtime.package import Contents, write_package

        self._settle()
        with self._lock:
            self._check_usable()
            programs = [v.program for v in self._variants]
            if not programs:
                raise UsageError(
                    f"{self._source.name} is not compiled yet: run it, or call `warmup`, before saving it"
                )
            for program in programs:
                self._weights.refresh(program.weights)
            contents = Contents(
                self._source.name,
                self._source.inputs,
                self._source.uppers,
                [(p.compiled, p.signature, p.report, p.weights) for p in programs],
                self._weights,
                self._source.states,
            )
            maker = self._maker
            return write_package(Path(path), contents, maker.backend, maker.target, maker.options)

    def trim(self) -> None:
        """Give back memory that the next run can allocate again: intermediate values and what is kept per shape.

        Bounds that grew begin anew at those of `dims=`. Code and weights stay. Runs that were enqueued end first.
        """
        with self._exclusive():
            self._bindings.clear()
            self._discarded.clear()
            self._last = None
            self._variants.trim()
        release_free_memory()

    # -- running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        outputs: Sequence[str] | None = None,
        out: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Run once and return outputs by name, in order.

        Inputs are NumPy arrays or anything with `__dlpack__` or `__array__`, of the declared dtypes and shapes. They
        are not kept; outputs are new arrays owned by the caller, or the caller's buffers.

        Args:
            inputs: by name, or a list of all of them in order.
            outputs: the names to return, in this order; by default all. The others are computed nevertheless.
            out: buffers that results are written into without a copy: by name, or a list with one (or None) for each
                returned output. They are C-contiguous, writable, of exactly the output's dtype and shape, and share no
                memory with one another or with an input. If the run fails, their content is undefined.

        Raises:
            UsageError: an input, output or buffer is unknown, missing, or of another dtype or shape.
            ExecutionError: the data broke a rule of an operator.
            OutOfMemoryError: there is no room for outputs or intermediate values of this size.
        """
        arrays = self._inputs.match(inputs)
        self._settle()
        return self._named(arrays, outputs, out)

    def _named(
        self,
        arrays: Matched,
        outputs: Sequence[str] | None,
        out: Mapping[str, Any] | Sequence[Any] | None,
    ) -> dict[str, Any]:
        if outputs is None and out is None:
            binding, results = self._run(arrays)
            return dict(zip(binding.names, results))  # noqa: B905  (as many by construction; every 0.1 us counts)
        return self._run_into(arrays, Request(outputs, out))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run with inputs by position or keyword; return the array, or a named tuple if there are several.

        Raises:
            UsageError: as `run`, or an input is given twice.
        """
        declared = self._inputs  # others when another thread binds states
        arrays = declared.arrays(declared.mixed(args, kwargs))
        self._settle()
        binding, results = self._run(arrays)
        return results[0] if len(results) == 1 else binding.result_type(*results)

    def warmup(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Executable:
        """Compile (and run once on zeros) for these input shapes; with none, for the upper bounds.

        The run does not count: random numbers and states are those of the same program without a warm-up.
        """
        self._settle()
        policy = self.rng
        with self.state.untouched():
            self._run(self._inputs.zeros(shapes or {}, self._source.uppers))
        self.rng = policy
        return self

    def specialize(self, extents: Mapping[str, int], at_least: float = 1.05) -> Specialization:
        """Compile a program for single values of extents, and keep it if it is faster than the one for all values.

        Both are measured on zeros, in turn, for about a second, in which other runs wait. Runs with other extents go on
        with the program for all values; of several programs that may run, the one for most single values does. They
        are part of this object and of its packages, not of the cache on disk. The runs do not count: random numbers and
        states are as before.

        Args:
            extents: values of symbols of the inputs. Symbols that are left out stay open, and are measured at their
                bounds.
            at_least: how many times as fast it must be to be kept; 0 keeps it in any case.

        Returns:
            What was measured, and whether it was kept.

        Raises:
            UsageError: a name or value is wrong, a symbol that is left out has no bound, there is such a program
                already, or the model was opened from a package.
        """
        from rlx.runtime.specialize import (
            Specialization,
            check_extents,
            check_threshold,
            measure,
        )

        with self._exclusive(), self.state.kept():
            source, policy = self._source, self._rng.policy
            least = check_threshold(at_least)
            fixed = check_extents(source.name, extents, self._inputs.symbols(), source.uppers)
            self._variants.check_room(fixed)
            arrays = self._inputs.zeros({}, {**source.uppers, **fixed})
            env = self._extents(tuple([a.shape for a in arrays]))
            general = self._binding(self._variants.choose(env, special=False), env)
            made = self._variants.compile(env, fixed, exact=True)
            kept = False
            try:
                self._weights.refresh(made.program.weights)
                ours = self._binding(made, env)
                outputs = [np.empty(shape, dtype) for shape, dtype in ours.outputs]
                times = measure(
                    lambda: self._execute(general, arrays, outputs),
                    lambda: self._execute(ours, arrays, outputs),
                )
                kept = times[0] >= least * times[1]
            finally:
                self._rng.restart(policy)
                if not kept:
                    self._variants.drop(made)
        return Specialization(fixed, *times, kept)

    def _run(self, arrays: Matched) -> tuple[Binding, list[Array]]:
        with self._lock:
            binding = self._bound(arrays)
            outputs = binding.new_outputs()
            self._execute(binding, arrays, outputs)
        return binding, outputs

    def _job(self, arrays: Matched) -> tuple[Job, dict[str, Any]] | None:
        binding = self._bindings.get(tuple([a.shape for a in arrays]))
        usable = not (self._closed or self._forked or self._viewed)
        if binding is None or not usable or arrays.inputs is not self._inputs:
            return None  # `_run` knows what to do, or to say
        self._last = binding
        try:
            return binding.job(arrays)
        except OutOfMemoryError:  # when it is its turn there may be room; else the run says so
            return None

    def _run_into(self, arrays: Matched, request: Request) -> dict[str, Any]:
        with self._lock:
            binding = self._bound(arrays)
            named = dict(zip(self._inputs.names, arrays, strict=True))
            targets, handed = request.targets(self.outputs, binding.outputs, named, self._discarded)
            self._execute(binding, arrays, targets)
        return handed

    def _execute(self, binding: Binding, arrays: list[Array], targets: list[Array]) -> None:
        """Run with the lock held, which lets the thread that holds it in again: that is what the turn is for."""
        if self._viewed:
            from rlx.runtime.slots import refuse_views

            refuse_views(binding.compiled, (*arrays, *targets))
        try:
            self._turn.thread, self._last = get_ident(), binding
            binding.run(arrays, targets, binding.env)
        finally:
            self._turn.thread = None

    def slots(self) -> list[SlotRecord]:
        """Return every value that the program stores, with its bytes as an array.

        The arrays are views of the memory of the executable, as the last run left it (of the variant that ran last).
        They are good until the next run, `trim` or `close`: then their content is undefined, but the memory stays
        alive as long as they do. No run takes them as inputs or buffers. Values that fusion has done away with have no
        slot.

        Raises:
            UsageError: nothing is compiled yet, or the device has no memory that the host sees.
        """
        from rlx.runtime.slots import slot_records

        with self._exclusive():
            self._viewed = True
            compiled, last = self.program.compiled, self._last
            variant = self._variants.latest
            if last is None or last.compiled is not compiled or not variant.is_planned:
                self._variants.grow(variant, variant.uppers)
                return slot_records(compiled, variant.uppers, self._source.name)
            return slot_records(compiled, last.env, self._source.name)

    # -- looking inside ----------------------------------------------------------------------------------------------

    @property
    def _title(self) -> tuple[str, str]:
        return self._source.name, self._maker.target.name

    @contextmanager
    def _prepared(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Generator[Call]:
        arrays = self._inputs.match(inputs)
        self._settle()
        with self._lock:
            bound = self._bound(arrays)
            compiled, env = bound.compiled, bound.env
            plain = replace(bound, run=bound.plain)
            outputs = [np.empty(shape, dtype) for shape, dtype in bound.outputs]
            yield Call(
                compiled,
                lambda: self._execute(plain, arrays, outputs),
                dict(zip(self._output_names, outputs, strict=True)),
                env,
                None if self._source.saved else lambda: self._source.build(env, {}),
            )

    def profile(  # noqa: D102
        self, inputs: Mapping[str, Any] | Sequence[Any], runs: int = 20, warmup: int = 3
    ) -> Profile:
        with self.state.untouched():  # measuring is no use
            return super().profile(inputs, runs, warmup)

    def report(self) -> ModelReport:  # noqa: D102
        from rlx.runtime.report import ModelReport

        program = self.program
        return ModelReport.of(
            self._title,
            (self.inputs, self._source.states, self.outputs, program.signature.guards),
            program.compiled,
            program.report,
            program.seconds,
        )

    def expose(self, *names: str) -> Executable:
        """Compile the model once more so that intermediate values are outputs too, whatever would have fused them away.

        Args:
            names: of values, or of nodes (their first results); the outputs are called so.

        Raises:
            UsageError: the model has no such value, or it was opened from a package.
        """
        from rlx.runtime.derive import exposing

        return self.derive(exposing(names))

    def derive(
        self,
        outputs: Choose | None = None,
        *,
        backend: Backend | None = None,
        target: Target | None = None,
        options: CompileOptions | None = None,
    ) -> Executable:
        """Compile the same model with the same weights in another way; nothing of it is cached on disk.

        Args:
            outputs: from the model's graph before all passes to the outputs, by name.
            backend: what compiles it.
            target: what for; goes with the backend.
            options: and how.

        Raises:
            UsageError: it was opened from a package.
        """
        from rlx.runtime.derive import derived

        if self._source.saved is not None:
            raise UsageError(
                f"{self._source.name} comes from a package, which holds programs but not the model; load the model "
                "itself to compile it in another way"
            )
        source = replace(
            self._source, build=derived(self._source.build, outputs), cache=None, recipe=None
        )
        with self._lock:
            shared = self._weights.is_declared  # else nobody has seen, let alone set, a weight yet
            if shared:
                known = dict(
                    self._weights.known()
                )  # as it is now: another thread may close this one
                source.read_params = lambda: known
        made = Executable(
            source,
            backend or self._maker.backend,
            target or self._maker.target,
            options or self._maker.options,
            rng=self.rng,
        )
        if shared:
            made.share_weights_from(self)
        return made

    # -- binding shapes ----------------------------------------------------------------------------------------------

    def _bound(self, arrays: Matched) -> Binding:
        """Return what to run for these inputs. The lock is held."""
        if self._forked or self._closed or self._turn.thread is not None or self._queue.laned:
            self._check_usable()
        if arrays.inputs is not self._inputs:
            raise UsageError(
                f"states of {self._source.name} were bound before it was this run's turn: it has other inputs now, "
                f"{', '.join(self._inputs.names) or 'none'}"
            )
        key = tuple([a.shape for a in arrays])
        return self._bindings.get(key) or self._bind(key)

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        """Keep runs out; those that were enqueued before have ended."""
        self._settle()
        with self._lock:
            self._check_usable()
            yield

    def _check_usable(self) -> None:
        """Raise unless it may run now; wait for jobs that are under way. The lock is held."""
        name = self._source.name
        self._turn.check(name)
        self._queue.leave_lane()
        if self._forked:
            raise UsageError(
                f"{name} was in use by another thread when this process was forked; load or compile it again here"
            )
        if self._closed:
            raise UsageError(f"{name} is closed")

    def _bind(self, key: tuple[tuple[int, ...], ...]) -> Binding:
        env = self._extents(key)
        binding = self._binding(self._variants.choose(env), env)
        self._bindings[key] = binding
        if len(self._bindings) > _MAX_BINDINGS:
            self._bindings.popitem(last=False)
        return binding

    def _extents(self, key: tuple[tuple[int, ...], ...]) -> dict[str, int]:
        return self.state.extents(self._inputs.environment(key), self._source.uppers)

    def _binding(self, variant: Variant, env: dict[str, int]) -> Binding:
        self._variants.grow(variant, env)
        declared = variant.program.signature.outputs
        outputs = [
            (tuple(_extent(d, env) for d in shape), dtype.numpy) for _, dtype, shape in declared
        ]
        from rlx.runtime.finite import checked_run  # opening a package does not need it

        compiled = variant.program.compiled
        bare = compiled.run
        plain = self.state.running(compiled, self._rng.feeding(bare, variant.program.signature.rng))
        run = checked_run(compiled, plain)
        return Binding(
            run,
            env,
            outputs,
            compiled,
            plain,
            self._output_names,
            self._result_type,
            compiled if run is bare and isinstance(compiled, LaneGraph) else None,
        )

    def _set_outputs(self, signature: Signature) -> None:
        names = self._output_names = [n for n, _, _ in signature.outputs]
        self._outputs = TensorSpec.of(signature.outputs)
        fields = [
            n if n.isidentifier() and not n.startswith("_") else f"output{i}"
            for i, n in enumerate(names)
        ]
        make: Any = namedtuple  # noqa: PYI024  (the fields are data)
        self._result_type = make("Outputs", fields, rename=True)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release code, weights and memory. Calling it again does nothing.

        Runs that were enqueued and did not begin are cancelled; those in flight end first.

        Raises:
            UsageError: it is called from the middle of a run.
        """
        if self._turn.is_mine:
            raise UsageError(f"{self._source.name} is running: it cannot be closed from there")
        self._queue.close()
        with self._lock:
            self._queue.leave_lane()
            if not self._closed:
                self._closed = True
                self._bindings.clear()
                self._discarded.clear()
                self._variants.clear()
                self._weights.close()
                self.state.close()
                # The model, its mapped files and its graph are not needed any more; its name is, for messages.
                self._source = Source(self._source.name, self._source.inputs, closed_build, {})
                self._variants = self._new_variants()

    def _weights_changed(self) -> None:
        self._bindings.clear()

    def after_fork_in_child(self) -> None:
        """Replace the lock if a thread of the parent holds it. What that was doing is half done here, for ever."""
        self._queue.after_fork_in_child()
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._forked |= self._queue.was_torn
        else:
            self._lock = self._queue.lock = threading.RLock()
            self._turn.thread, self._forked = None, True

    def __reduce__(self) -> tuple[Callable[..., Executable], tuple[Any, ...]]:
        """Return how to open it again: by path or content, with the same options, weights and states."""
        if self._source.recipe is None:
            raise UsageError(
                f"{self._source.name} was made neither by rlx.load nor by rlx.compile: it cannot be pickled"
            )
        recipe = self._source.recipe(self)
        if not self.state:
            return recipe
        from rlx.runtime.bind import remembered

        return remembered, (recipe, self._source.feeds, self.state.snapshot())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"<Executable {self._source.name} on {self._maker.target.name}: {inputs}>"


def _extent(dim: Dim, env: Mapping[str, int]) -> int:
    value = evaluate(dim, env) if isinstance(dim, DimExpr) else dim
    if value < 0:
        raise UsageError(
            f"an output extent {dim} would be {value} for {dict(env)}: the inputs are too small"
        )
    return value
