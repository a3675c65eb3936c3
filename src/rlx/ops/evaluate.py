# SPDX-License-Identifier: Apache-2.0
"""Running operators and graphs by their NumPy meaning.

This is the oracle, the constant folder and the reference backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from rlx.base import numeric
from rlx.base.allocation import out_of_memory
from rlx.base.dims import evaluate as evaluate_dim
from rlx.base.dims import lone_symbol
from rlx.base.dtypes import DType
from rlx.base.errors import ExecutionError, OutOfMemoryError, PassError, RlxError, UsageError
from rlx.base.numeric import Array
from rlx.base.types import TensorType
from rlx.ir.builder import infer_types
from rlx.ir.clone import bind_dims
from rlx.ir.graph import Block, Graph, Node, State, Value
from rlx.ir.op import Op
from rlx.ops.custom import Custom

__all__ = ["Observer", "evaluate", "run_op"]

Observer: TypeAlias = Callable[[Node, tuple[Array, ...]], None]
"""Called after every node with its results."""


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array] | None = None,
    *,
    exact: bool = False,
    observe: Observer | None = None,
    states: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """Return the outputs of a graph by name.

    Narrow floats are widened to f32 before an operator sees them; each result is rounded once to
    its declared dtype.

    Args:
        graph: what to run.
        inputs: an array per input, of its dtype; a param may be given here as well.
        params: data of params; the default is what the graph holds.
        exact: widen all floats to f64 inside each operator.
        observe: called after every node.
        states: value of states by name, those they had after the last run; others begin with their initial value.
            Holds the next values once this run has ended well.

    Raises:
        UsageError: an input is missing or does not fit its type, or a guard of the graph does not
            hold.
        ExecutionError: the data broke a rule of an operator; names the node.
        OutOfMemoryError: NumPy could not allocate what an operator needs; names the node.
        PassError: an operator's result is not of the type its rule gave.
    """
    given = {**(params or {}), **inputs}
    kept = {} if states is None else states
    env = _bind_symbols(graph, given, kept)
    values: dict[Value, Array] = {}
    for value in graph.inputs:
        values[value] = _argument(given, value, "input", env)
    for name, param in graph.params.items():
        data = given.get(name, param.data)
        if data is None:
            raise UsageError(f"param {name!r} has no data")
        values[param.value] = _checked(np.asarray(data), param.value, f"param {name!r}", env)
    for state in graph.states:
        values[state.value] = _state(state, kept, env)
    for guard in graph.facts.guards:
        _check_guard(guard, env)
    runner = _Runner(env, exact, observe)
    results = runner.block(graph.block, values)
    count = len(graph.output_names)
    kept.update(zip((s.name for s in graph.states), results[count:], strict=True))
    return dict(zip(graph.output_names, results[:count], strict=True))


def run_op(
    op: Op,
    arrays: Sequence[Array | None],
    regions: Sequence[Block] = (),
    *,
    exact: bool = False,
    where: str = "",
) -> tuple[Array, ...]:
    """Return the results of one operator on arrays; errors begin with `where`, by default its name.

    Raises:
        TypeRuleError: the operator does not accept the operands.
        ExecutionError: the data broke a rule of the operator.
    """
    types = [None if a is None else TensorType(DType.of(a.dtype), a.shape) for a in arrays]
    results = infer_types(op, types, regions=tuple(regions))
    return _Runner({}, exact, None).apply(op, arrays, tuple(regions), results, where or op.name)


# -- arguments
# ---------------------------------------------------------------------------------------


def _bind_symbols(
    graph: Graph, given: Mapping[str, Array], states: Mapping[str, Array]
) -> dict[str, int]:
    """Return the value of every symbol that stands alone as an extent of an input or of a state that has a value."""
    env: dict[str, int] = {}
    leaves = [(v, given.get(v.name)) for v in graph.inputs]
    leaves += [(s.value, states.get(s.name)) for s in graph.states]
    for value, array in leaves:
        if array is None:
            continue
        for axis, (dim, extent) in enumerate(zip(value.type.shape, np.shape(array), strict=False)):
            name = lone_symbol(dim)
            if name is not None and env.setdefault(name, extent) != extent:
                raise UsageError(
                    f"axis {axis} of {value.name!r} is {extent}, "
                    f"but {name} is {env[name]} in another input or state"
                )
    return env


def _state(state: State, states: Mapping[str, Array], env: Mapping[str, int]) -> Array:
    what = f"state {state.name!r}"
    if state.name in states:
        return _checked(np.asarray(states[state.name]), state.value, what, env)
    return np.broadcast_to(state.init, _extents(state.value.type, env, what))


def _argument(given: Mapping[str, Array], value: Value, kind: str, env: Mapping[str, int]) -> Array:
    if value.name not in given:
        raise UsageError(f"{kind} {value.name!r} is missing")
    return _checked(np.asarray(given[value.name]), value, f"{kind} {value.name!r}", env)


def _checked(array: Array, value: Value, what: str, env: Mapping[str, int]) -> Array:
    wanted = _extents(value.type, env, what)
    if DType.of(array.dtype) is not value.type.dtype or array.shape != wanted:
        shown = f"{DType.of(array.dtype)}{list(array.shape)}"
        raise UsageError(
            f"{what} is {shown}, expected {value.type} = {value.type.dtype}{list(wanted)}"
        )
    return array


def _extents(type_: TensorType, env: Mapping[str, int], what: str) -> tuple[int, ...]:
    try:
        return tuple(evaluate_dim(d, env) for d in type_.shape)
    except KeyError as error:
        raise UsageError(
            f"{what} has type {type_}, but no input gives the value of {error.args[0]}"
        ) from error


def _check_guard(guard: Any, env: dict[str, int]) -> None:
    try:
        holds = guard.holds(env)
    except KeyError:  # about a symbol that this graph does not have any more
        return
    if not holds:
        raise UsageError(
            f"the graph was built under the assumption {guard}, which these inputs do not meet"
        )


# -- running
# -----------------------------------------------------------------------------------------


class _Runner:
    def __init__(self, env: Mapping[str, int], exact: bool, observe: Observer | None) -> None:
        self.env = env
        self.exact = exact
        self.observe = observe

    def block(self, block: Block, values: dict[Value, Array]) -> list[Array]:
        """Run the nodes of a block whose leaves have values.

        Each value is dropped after its last reader.
        """
        kept = set(block.results)
        left: dict[Value, int] = {}
        for node in block:
            arrays = [None if o is None else values[o] for o in node.operands]
            results = self._node(node, arrays)
            if self.observe is not None:
                self.observe(node, results)
            values.update(
                (value, array)
                for value, array in zip(node.results, results, strict=True)
                if value.uses or value in kept
            )
            for operand in node.operands:
                if operand is not None:
                    left[operand] = left.get(operand, len(operand.uses)) - 1
                    if left[operand] == 0 and operand not in kept:
                        values.pop(operand, None)
        return [values[r] for r in block.results]

    def _node(self, node: Node, arrays: Sequence[Array | None]) -> tuple[Array, ...]:
        op = bind_dims(node.op, self.env) if self.env else node.op
        where = f"{op.name} at node {node.location}"
        types = [r.type for r in node.results]
        if self.env:
            types = [TensorType(t.dtype, _extents(t, self.env, where)) for t in types]
            for type_ in types:
                if any(isinstance(d, int) and d < 0 for d in type_.shape):
                    raise ExecutionError(
                        f"{where}: its result would be {type_}; the inputs are too small"
                    )
        return self.apply(op, arrays, node.regions, types, where)

    def apply(
        self,
        op: Op,
        arrays: Sequence[Array | None],
        regions: tuple[Block, ...],
        types: Sequence[TensorType],
        where: str,
    ) -> tuple[Array, ...]:
        """Run one operator whose result types are known."""
        for type_ in types:
            nbytes = type_.nbytes
            if isinstance(nbytes, int) and nbytes >> 63:
                raise out_of_memory(f"{where}: {type_}", nbytes)
        try:
            if regions:
                runner: Any = getattr(op, "reference_regions")  # noqa: B009  (only operators with regions have it)
                found: Any = runner(_Regions(self, regions), *arrays)
            else:
                found = op.reference(*(None if a is None else self._widen(a) for a in arrays))
        except Exception as error:
            if isinstance(op, Custom) or not isinstance(error, ExecutionError | MemoryError):
                error.add_note(f"in {where}")
                raise
            kind = OutOfMemoryError if isinstance(error, MemoryError) else ExecutionError
            raise kind(f"{where}: {error}") from error
        results = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
        # A registered function is the caller's; a wrong result of another is a fault of rlx.
        fault = ExecutionError if isinstance(op, Custom) else PassError
        if len(results) != len(types):
            raise fault(f"{where} gave {len(results)} results, its type rule says {len(types)}")
        return tuple(_rounded(r, t, where, fault) for r, t in zip(results, types, strict=True))

    def _widen(self, array: Array) -> Array:
        if self.exact and DType.of(array.dtype).is_float:
            return numeric.cast(array, DType.F64)
        return numeric.widen(array)


class _Regions:
    """Runs the regions of one node; what `ops.control` calls `RunRegion`."""

    def __init__(self, runner: _Runner, blocks: tuple[Block, ...]) -> None:
        self._runner = runner
        self._blocks = blocks

    def __call__(self, index: int, *arguments: Array) -> tuple[Array, ...]:
        block = self._blocks[index]
        return tuple(self._runner.block(block, dict(zip(block.parameters, arguments, strict=True))))

    def results(self, index: int) -> int:
        return len(self._blocks[index].results)


def _static(type_: TensorType) -> tuple[int, ...]:
    return tuple(int(d) for d in type_.shape)


def _rounded(
    result: Array | list[Array], type_: TensorType, where: str, fault: type[RlxError]
) -> Array:
    """Return a result in its declared dtype; a list is stacked along a new first axis."""
    if isinstance(result, list):
        result = np.stack(result) if result else np.zeros(_static(type_), type_.dtype.numpy)
    array = np.asarray(result)
    have = DType.of(array.dtype)
    both_float = have.is_float and type_.dtype.is_float
    both_complex = have.is_complex and type_.dtype.is_complex
    if array.shape != type_.shape or not (have is type_.dtype or both_float or both_complex):
        raise fault(f"{where} gave {have}{list(array.shape)}, its type rule says {type_}")
    return numeric.cast(array, type_.dtype)
