# SPDX-License-Identifier: Apache-2.0
"""What a user can do with the weights of an executable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlx.base.diagnostics import did_you_mean
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.runtime.params import Params
from rlx.runtime.weight_plan import ParamSpec

__all__ = ["Weighted"]


class Weighted:
    """The part of an executable that is about its params.

    A change waits for runs that were enqueued before it, and holds for every run that starts afterwards. It never
    compiles: weights that were packed, folded or otherwise computed from the param are computed anew by the next run.
    """

    _lock: threading.RLock
    _weights: Params

    def _check_usable(self) -> None:
        """Raise a UsageError if the executable is closed, or in use by this thread. The lock is held."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait for the runs that were enqueued before."""
        raise NotImplementedError

    def _weights_changed(self) -> None:
        """Make the next run look at the weights again."""
        raise NotImplementedError

    @property
    def params(self) -> Mapping[str, ParamSpec]:
        """The weights by name: dtype, shape, version, and whether they have a value.

        Constants of the model with few elements (64, of integers 8,192 but for 8-bit matrices) are part of its code
        and not listed.
        """
        with self._lock:
            self._check_usable()
            return self._weights.specs()

    def get_param(self, name: str) -> Array:
        """Return a copy of a weight, with the bits it was given, whatever layout kernels read it in.

        Raises:
            UsageError: there is no such param, or it has no value.
        """
        with self._lock:
            self._check_usable()
            return self._weights.get(name)

    def set_param(self, name: str, value: Any) -> None:
        """Replace a weight; the value is copied.

        Args:
            name: one of `params`.
            value: an array of its shape, of any dtype. Floats round to the param's dtype; a value that it cannot
                hold otherwise (out of range, not whole, an integer that a float would round) is an error.

        Raises:
            UsageError: there is no such param, or the shape or a value does not fit. Nothing is changed then.
        """
        self._change(lambda weights: weights.replace({name: weights.checked(name, value)}))

    def set_param_bytes(self, name: str, data: Any, dtype: Any) -> None:
        """Replace a weight by the bytes of its elements in row-major order, which are of some dtype.

        Bytes of the param's own dtype arrive bit for bit; others are converted as by `set_param`.

        Raises:
            UsageError: as `set_param`, or there are too many or too few bytes.
        """
        self._change(
            lambda weights: weights.replace(
                {name: weights.checked(name, weights.from_bytes(name, data, dtype))}
            )
        )

    def set_param_range(self, name: str, start: int, value: Any) -> None:
        """Replace rows `start` to `start + len(value)` of a weight, along its first axis.

        Args:
            name: one of `params`, of rank 1 at least.
            start: index of the first row.
            value: [rows, *the other extents], converted as by `set_param`.

        Raises:
            UsageError: as `set_param`, or there are no such rows.
        """
        self._change(lambda weights: weights.set_range(name, start, value))

    def load_params(
        self,
        source: str | Path | Mapping[str, Any],
        *,
        names: Mapping[str, str] | None = None,
        partial: bool = False,
    ) -> None:
        """Replace many weights by the arrays of a `.safetensors` or `.npz` file, or of a mapping.

        Files are mapped, and arrays that lie in them as they are needed (of the param's dtype, aligned, not
        compressed) are used from there; others are converted one at a time. Everything is checked before anything
        changes.

        Args:
            source: a path, or arrays by name.
            names: name in the source -> name of the param, where they differ.
            partial: accept a source that lacks some params; those keep their values.

        Raises:
            ParseError: the file is not well formed.
            UsageError: a name is unknown or missing, or a shape or value does not fit.
        """
        from rlx.frontends.arrays import StoredArray, open_arrays

        arrays = source if isinstance(source, Mapping) else open_arrays(Path(source))
        renamed = _renamed(arrays, names or {})

        def load(weights: Params) -> None:
            _check_names(weights.specs(), renamed, partial=partial)
            stored = {
                n: a for n, key in renamed.items() if isinstance(a := arrays[key], StoredArray)
            }
            for name, array in stored.items():  # before anything is read
                weights.check_shape(name, array.shape)
            cells = {n: weights.checked(n, a.load(), adopt=True) for n, a in stored.items()}
            for name, key in renamed.items():
                if name not in stored:
                    cells[name] = weights.checked(name, arrays[key])
            weights.replace(cells)

        self._change(load)

    def share_weights_from(self, other: Weighted) -> None:
        """Use the weights of another executable of the same params, without a copy.

        Weights are shared until one of the two changes: `set_param` gives the executable it is called on a value of
        its own for that param, and the other never sees it. Packed weights are shared as well where both programs read
        the same layout.

        Raises:
            UsageError: names, dtypes or shapes differ, or `other` lacks a value. Nothing is changed then.
        """
        self._take(other, copy=False)

    def copy_params_from(self, other: Weighted) -> None:
        """Copy all weights of another executable of the same params.

        Raises:
            UsageError: names, dtypes or shapes differ, or `other` lacks a value. Nothing is changed then.
        """
        self._take(other, copy=True)

    def _take(self, other: Weighted, *, copy: bool) -> None:
        if not isinstance(other, Weighted):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"weights are taken from an executable, not from a {type(other).__name__}"
            )
        if other is self:
            return
        other._settle()
        self._settle()
        with ExitStack() as locks:
            for one in sorted(
                (self, other), key=id
            ):  # one order for all, or two threads could wait for each other
                locks.enter_context(one._lock)
            other._check_usable()
            self._check_usable()
            self._weights.adopt(other._weights, copy=copy)
            self._weights_changed()

    def _change(self, change: Callable[[Params], None]) -> None:
        self._settle()
        with self._lock:
            self._check_usable()
            change(self._weights)
            self._weights_changed()


def _renamed(arrays: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Return name of the param -> name in the source.

    Raises:
        UsageError: two arrays are for one param, or a name to be changed is not there.
    """
    for old in names:
        if old not in arrays:
            raise UsageError(f"names: the source has no array {old!r}.{did_you_mean(old, arrays)}")
    out: dict[str, str] = {}
    for key in arrays:
        name = names.get(key, key)
        if name in out:
            raise UsageError(f"arrays {out[name]!r} and {key!r} are both for param {name!r}")
        out[name] = key
    return out


def _check_names(
    specs: Mapping[str, ParamSpec], given: Mapping[str, str], *, partial: bool
) -> None:
    unknown = [f"{n!r}{did_you_mean(n, specs)}" for n in given if n not in specs]
    missing = [repr(n) for n in specs if n not in given and not partial]
    wrong = [f"unknown: {', '.join(unknown[:8])}"] if unknown else []
    wrong += [f"missing: {', '.join(missing[:8])} (partial=True keeps those)"] if missing else []
    if wrong:
        raise UsageError(
            f"the arrays do not fit the params, nothing was changed; {'; '.join(wrong)}"
        )
