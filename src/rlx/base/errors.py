# SPDX-License-Identifier: Apache-2.0
"""Every exception rlx raises.

::

    RlxError
    +-- ModelError            the model (file or graph) is wrong or not supported
    |   +-- ParseError        the bytes are not a well-formed file of their format
    |   +-- UnsupportedOpError  operators, attributes or opsets rlx does not run
    |   +-- TypeRuleError     operands of an operator have types it does not accept
    +-- CompileError          a correct graph could not be compiled
    |   +-- PassError         a pass broke an invariant or did not converge
    |   +-- BuildError        a kernel could not be emitted, built or linked
    +-- DeviceError           a device is missing or failed
    |   +-- OutOfMemoryError  an allocation failed, or could not succeed
    +-- ExecutionError        the data of one call broke a rule (integer division by zero, index out of range)
    +-- UsageError            the caller passed something the API does not accept
        +-- UndecidedError    a question about symbolic extents has no single answer

A message says what, where (node, file, source line), found versus expected, and what to do.
"""

from __future__ import annotations

__all__ = [
    "BuildError",
    "CompileError",
    "DeviceError",
    "ExecutionError",
    "ModelError",
    "OutOfMemoryError",
    "ParseError",
    "PassError",
    "RlxError",
    "TypeRuleError",
    "UndecidedError",
    "UnsupportedOpError",
    "UsageError",
]


class RlxError(Exception):
    """Base of all errors raised by rlx."""


class ModelError(RlxError):
    """The model is wrong or not supported; the file or the graph has to change."""


class ParseError(ModelError):
    """The bytes are not a well-formed file.

    Cause: a truncated download, a damaged or hostile file, or another format.
    Fix: fetch the file again; the message names the offset and the field.
    """


class UnsupportedOpError(ModelError):
    """The model uses operators, attributes, dtypes or opsets that rlx does not run.

    The message lists all of them with the names of their nodes, before anything is compiled.
    """


class TypeRuleError(ModelError):
    """The operands of an operator have dtypes, ranks or shapes that it does not accept."""


class CompileError(RlxError):
    """A well-formed graph could not be compiled. Please report it with the output of `rlx devices --verbose`."""


class PassError(CompileError):
    """A pass broke an invariant of the graph or did not reach a fixed point."""


class BuildError(CompileError):
    """A kernel could not be emitted, compiled or linked for the target."""


class DeviceError(RlxError):
    """A device is missing, was lost, or failed."""


class OutOfMemoryError(DeviceError):
    """An allocation failed, or could not succeed; the message says how many bytes were asked for and for what."""


class ExecutionError(RlxError):
    """The data of one call broke a rule of an operator.

    Examples: integer division by zero, a gather index out of range. The message names the node and the element.
    """


class UsageError(RlxError):
    """The caller passed something the API does not accept (name, shape, dtype, option, closed object)."""


class UndecidedError(UsageError):
    """A question about symbolic extents has no answer that holds for all values of the symbols."""
