# SPDX-License-Identifier: Apache-2.0
"""The public names, what an import costs, and that every operator's declaration is complete."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import rlx
from rlx.base.config import KNOBS
from rlx.base.dtypes import DType
from rlx.ir.op import Op, registered_ops
from rlx.ops.spec import ElementwiseOp
from rlx.testing import Case, conformance
from rlx.testing.samples import samples_of
from rlx.testing.tolerances import family_of

_ROOT = Path(__file__).resolve().parents[2]
_STRUCTURAL = frozenset("constant dim_tensor if loop scan region with_epilogue".split())
"""Operators made by other code, never from samples: their meaning is in their attributes or regions."""
_OPS = sorted((n, c) for n, c in registered_ops().items() if "." not in n)


def test_exported_names() -> None:
    assert set(rlx.__all__) == {
        "Calibration",
        "CompileError",
        "DType",
        "Device",
        "DeviceError",
        "Executable",
        "ExecutionError",
        "Graph",
        "ModelError",
        "OutOfMemoryError",
        "ParseError",
        "PrecisionPolicy",
        "RlxError",
        "RngPolicy",
        "RowFeed",
        "TensorType",
        "TypeRuleError",
        "UnsupportedOpError",
        "UsageError",
        "__version__",
        "calibrate",
        "compile",
        "devices",
        "dlpack",
        "load",
        "open",
        "quantize",
        "op",
    }
    for name in rlx.__all__:
        assert getattr(rlx, name) is not None
    assert set(rlx.__all__) <= set(dir(rlx))
    with pytest.raises(AttributeError, match="nothing"):
        _ = rlx.nothing


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import rlx",
            "llvmlite ml_dtypes typer rich onnx google rlx.ops rlx.backends.cpu rlx.frontends",
        ),
        ("import rlx; rlx.Graph", "llvmlite ml_dtypes typer rich onnx google rlx.backends.cpu"),
        ("import rlx; rlx.devices", "llvmlite typer rich onnx google"),
    ],
)
def test_imports_pull_in_nothing_heavy(code: str, heavy: str) -> None:
    program = f"import sys; {code}; print([m for m in {heavy.split()!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "cls"), _OPS, ids=[n for n, _ in _OPS])
def test_every_operator_is_declared_completely(name: str, cls: type[Op]) -> None:
    assert cls.__doc__
    assert cls.infer is not Op.infer
    regions = hasattr(cls, "reference_regions")
    assert regions or cls.reference is not Op.reference
    if name not in _STRUCTURAL:
        assert any(not s.error for s in samples_of(cls))
        assert {c.variant for c in _cases(name)} & {"static", "fused"}


@cache
def _all() -> list[Case]:
    return conformance("reference")


def _cases(name: str) -> list[Case]:
    return [c for c in _all() if c.op == name]


@pytest.mark.parametrize(("name", "cls"), _OPS, ids=[n for n, _ in _OPS])
def test_every_operator_has_a_tolerance(name: str, cls: type[Op]) -> None:
    if issubclass(cls, ElementwiseOp):
        dtype = min(cls.decl.domain, key=lambda d: d.value)
        dtypes = [DType.BOOL if i in cls.decl.mixed else dtype for i in range(cls.decl.arity)]
        assert family_of(cls(), dtypes)
    else:
        op = object.__new__(cls)
        assert family_of(op, []) in ("exact", "declared", name)


def test_the_documentation_names_every_knob() -> None:
    text = "\n".join(p.read_text(encoding="utf-8") for p in _ROOT.glob("docs/**/*.md"))
    assert not [name for name in KNOBS if name not in text]
