# SPDX-License-Identifier: Apache-2.0
"""Writes the generated part of the documentation: the tables in `docs/reference` and of the passes.

python scripts/generate_docs.py            # write
python scripts/generate_docs.py --check    # fail if a file is not what would be written
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo

import rlx.backends.cpu.kernels  # pyright: ignore[reportUnusedImport]
import rlx.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]
from rlx.backends.cpu.claims import cpu_claims
from rlx.backends.cpu.isa import generic_isa
from rlx.backends.cpu.lowering import lowerings_of
from rlx.base.config import KNOBS
from rlx.base.dtypes import FLOATS, INTEGERS, NUMERIC, DType
from rlx.cli.main import app
from rlx.frontends.onnx.ops import __all__ as onnx_groups
from rlx.frontends.onnx.registry import MAX_OPSET, MIN_OPSET, mapped_ops
from rlx.ir.op import Op, registered_ops
from rlx.ops.spec import ElementwiseOp
from rlx.passes.manager import Entry
from rlx.passes.pipelines import PASSES, default_pipeline

__all__ = ["main", "pages"]

_ROOT = Path(__file__).resolve().parent.parent
_NOTE = "<!-- Written by scripts/generate_docs.py; edit the declarations, not this file. -->"
_SCHEDULED = frozenset({"if", "scan", "constant", "reshape", "slice"})
"""Operators that the scheduler itself handles on every backend."""
_REPLACED = frozenset({"conv", "conv_transpose", "gru", "lstm", "rnn"})
"""Operators that the CPU backend's own passes replace by private ones with kernels."""


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path under `docs`."""
    return {
        "reference/operators.md": _operators(),
        "reference/onnx.md": _onnx(),
        "reference/knobs.md": _knobs(),
        "reference/cli.md": _cli(),
        "reference/passes.md": _passes(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with `--check` compare them; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the generated part of the documentation.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args(arguments).check
    stale: list[str] = []
    for name, text in pages().items():
        path = _ROOT / "docs" / name
        if check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run python scripts/generate_docs.py\n")
    return 1 if stale else 0


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", _NOTE, *parts]) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# -- operators


def _operators() -> str:
    shared = [(n, c) for n, c in sorted(registered_ops().items()) if "." not in n]
    private = [(n, c) for n, c in sorted(registered_ops().items()) if n.startswith("cpu.")]
    columns = ("operator", "operands", "attributes", "dtypes", "on cpu", "what it computes")
    return _page(
        "Operators",
        "Every operator is declared once, in `src/rlx/ops`. `?` marks an operand that may be absent, `*` one that "
        "repeats. The dtypes of elementwise operators stand in their declaration; where the column is empty the type "
        "rule decides.",
        "On `reference` every operator runs by its NumPy meaning. The column *on cpu* says: `kernel`, it has one (or a "
        "private operator has that replaces it); "
        "`region`, it becomes part of a generated, fused kernel; `decomposed`, it is replaced by other operators "
        "first; `schedule`, it is control flow, data or a view that the scheduler turns into table entries; `host`, "
        "Python runs its NumPy meaning in the middle of the run. Several words: the first that fits the operands. "
        "An operator listed under `kernel` or `region` still runs on the host for operands its lowering does not "
        "take; `rlx inspect` shows what happened in a model.",
        _table(columns, [_operator_row(n, c) for n, c in shared]),
        "## Private to the CPU backend",
        "They come from its own passes and hold weights in the layouts its kernels read. No frontend makes them.",
        _table(
            ("operator", "operands", "attributes", "what it computes"),
            [_private_row(n, c) for n, c in private],
        ),
    )


def _operator_row(name: str, cls: type[Op]) -> tuple[str, ...]:
    return (
        _code(name),
        _operands(cls),
        _attributes(cls),
        _dtypes(cls),
        _on_cpu(name, cls),
        _summary(cls),
    )


def _private_row(name: str, cls: type[Op]) -> tuple[str, ...]:
    return (_code(name), _operands(cls), _attributes(cls), _summary(cls))


def _operands(cls: type[Op]) -> str:
    return _code(", ".join(cls.operands))


def _attributes(cls: type[Op]) -> str:
    shown: list[str] = []
    for field in dataclasses.fields(cls):
        plain = isinstance(field.default, bool | int | float | str | tuple | DType)
        shown.append(f"{field.name}={field.default}" if plain else field.name)
    return _code(", ".join(shown))


def _dtypes(cls: type[Op]) -> str:
    if not issubclass(cls, ElementwiseOp):
        return ""
    domain = cls.decl.domain
    for text, known in (("numeric", NUMERIC), ("float", FLOATS), ("integer", INTEGERS)):
        if domain == known:
            return text
        if domain == known | {DType.BOOL}:
            return f"{text}, bool"
    return ", ".join(sorted(d.value for d in domain))


def _on_cpu(name: str, cls: type[Op]) -> str:
    claims = cpu_claims(generic_isa("v4"))
    ways = [
        ("schedule", name in _SCHEDULED),
        ("kernel", claims.supports(name) and (bool(lowerings_of(cls)) or name in _REPLACED)),
        ("region", hasattr(cls, "region") or name in {"region", "with_epilogue"}),
        (
            "decomposed",
            hasattr(cls, "decompose") and not claims.supports(name) and not hasattr(cls, "region"),
        ),
    ]
    return ", ".join(way for way, fits in ways if fits) or "host"


def _summary(cls: type[Op]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0].strip()


# -- what ONNX models may use


def _onnx() -> str:
    assert onnx_groups  # importing the groups fills the table
    rows: list[tuple[str, ...]] = []
    for (domain, name), mappings in sorted(mapped_ops().items()):
        attributes = sorted(set[str]().union(*(m.attributes for m in mappings)))
        limits = {k: v for m in mappings for k, v in m.only.items()}
        only = "; ".join(f"{k} only {' or '.join(map(repr, v))}" for k, v in sorted(limits.items()))
        since = ", ".join(str(m.since) for m in mappings)
        full = f"{domain}.{name}" if domain else name
        rows.append((_code(full), since, _code(" ".join(attributes)), only))
    return _page(
        "ONNX operators",
        f"Versions {MIN_OPSET} to {MAX_OPSET} of the default operator set are read. *Since* lists the versions from "
        "which a mapping holds (1: one mapping serves all versions). An attribute that is not listed makes `rlx.load` "
        "refuse the model, with the name of the node.",
        _table(("operator", "since", "attributes", "limits"), rows),
    )


# -- knobs


def _knobs() -> str:
    rows = [
        (_code(k.name), type(k.default).__name__, _code(str(k.default)) or "empty", k.doc)
        for k in KNOBS.values()
    ]
    return _page(
        "Knobs",
        "Environment variables, read by `rlx.base.config` and by nothing else. A value that is not of the type is a "
        "`UsageError`. `rlx.base.config.override(RLX_VERIFY=True)` sets one for a block of code.",
        _table(("name", "type", "default", "meaning"), rows),
    )


# -- command line


def _cli() -> str:
    commands = cast("Any", app)  # typer does not type the functions it wraps
    parts = [
        "Every command takes `-h` and `--help`.",
        _parameters(commands.registered_callback.callback),
    ]
    for command in commands.registered_commands:
        function: Any = command.callback
        parameters = inspect.signature(function).parameters.values()
        arguments = [
            _argument(p) for p in parameters if isinstance(_info(function, p), ArgumentInfo)
        ]
        usage = " ".join([f"rlx {command.name}", *arguments, "[OPTIONS]"])
        parts += [f"## rlx {command.name}", inspect.getdoc(function) or "", f"```\n{usage}\n```"]
        if parameters:
            parts.append(_parameters(function))
    return _page("Command line", *parts)


def _info(function: Any, parameter: inspect.Parameter) -> Any:
    """Return what typer was told about a parameter: an OptionInfo or an ArgumentInfo."""
    return get_type_hints(function, include_extras=True)[parameter.name].__metadata__[0]


def _argument(parameter: inspect.Parameter) -> str:
    name = parameter.name.upper()
    return name if parameter.default is parameter.empty else f"[{name}]"


def _parameters(function: Any) -> str:
    rows: list[tuple[str, ...]] = []
    for parameter in inspect.signature(function).parameters.values():
        info, kind = _info(function, parameter), get_type_hints(function)[parameter.name]
        if isinstance(info, ArgumentInfo):
            names: list[str] = [_argument(parameter)]
        else:
            # In an annotation typer keeps the first name where a default would stand.
            names = [n for n in (info.default, *(info.param_decls or ())) if isinstance(n, str)]
            names = names or [f"--{parameter.name.replace('_', '-')}"]
        default = parameter.default
        shown = "" if default in (parameter.empty, None, False, "") else str(default)
        rows.append((", ".join(map(_code, names)), _kind(kind), _code(shown), info.help or ""))
    return _table(("name", "type", "default", "meaning"), rows)


def _kind(hint: Any) -> str:
    kinds = [k for k in get_args(hint) or (hint,) if k is not type(None)]
    if get_origin(kinds[0]) is list:
        return f"{_kind(get_args(kinds[0])[0])}, repeatable"
    return {bool: "flag", Path: "path", str: "text", int: "whole number", float: "number"}[kinds[0]]


# -- passes


def _passes() -> str:
    whole = default_pipeline(cpu_claims(generic_isa("v4")))
    bare = default_pipeline(dataclasses.replace(cpu_claims(generic_isa("v4")), ops=frozenset()))
    known = [(_code(n), _options(c), _summary_of(c)) for n, c in sorted(PASSES.items())]
    return _page(
        "Passes",
        "## The pipeline of a backend that claims operators",
        "In this order; the reasons are those of `src/rlx/passes/pipelines.py`.",
        _entries(whole.entries),
        "## The pipeline of a backend that takes every operator as it is",
        _entries(bare.entries),
        "## What each pass does",
        "Options are what `rlx opt -p name{option=value}` takes.",
        _table(("pass", "options", "what it does"), known),
    )


def _entries(entries: Sequence[Entry]) -> str:
    rows: list[tuple[str, ...]] = []
    for number, entry in enumerate(entries, 1):
        step: Any = entry.step
        given = [
            f"{f.name}={str(getattr(step, f.name)).lower()}"
            for f in dataclasses.fields(step)
            if f.init and getattr(step, f.name) != f.default
        ]
        text = f"{step.name}{{{','.join(given)}}}" if given else step.name
        rows.append((str(number), _code(text), entry.reason))
    return _table(("", "pass", "why it stands here"), rows)


def _options(cls: type[Any]) -> str:
    return _code(
        ", ".join(f"{f.name}={str(f.default).lower()}" for f in dataclasses.fields(cls) if f.init)
    )


def _summary_of(cls: type[Any]) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main())
