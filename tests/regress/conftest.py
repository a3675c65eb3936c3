# SPDX-License-Identifier: Apache-2.0
"""Bugs reported against other engines, rebuilt small: each test runs on the reference and the CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

import rlx
from rlx.base.numeric import Array

RunOnnx: TypeAlias = Callable[..., list[Array]]


@pytest.fixture(params=["reference", "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run_onnx(device: str) -> RunOnnx:
    """Run one ONNX node: op type, inputs (None = absent), attributes; arrays in `fixed` become initialisers."""
    onnx = pytest.importorskip("onnx")

    def run(
        op: str,
        *inputs: Array | None,
        fixed: tuple[int, ...] = (),
        outputs: int = 1,
        opset: int = 17,
        **attributes: Any,
    ) -> list[Array]:
        names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
        results = [f"y{i}" for i in range(outputs)]
        node = onnx.helper.make_node(op, names, results, **attributes)
        infos: list[Any] = []
        initialisers: list[Any] = []
        for position, (name, array) in enumerate(zip(names, inputs, strict=True)):
            if array is None:
                continue
            if position in fixed:
                initialisers.append(onnx.numpy_helper.from_array(array, name))
            else:
                kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                infos.append(onnx.helper.make_tensor_value_info(name, kind, array.shape))
        kinds = [onnx.helper.make_tensor_value_info(name, 1, None) for name in results]
        graph = onnx.helper.make_graph([node], "g", infos, kinds, initialisers)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        given = {
            n: x
            for i, (n, x) in enumerate(zip(names, inputs, strict=True))
            if x is not None and i not in fixed
        }
        with rlx.load(model.SerializeToString(), device) as executable:
            return list(executable.run(given).values())

    return run


@pytest.fixture
def run_graph(device: str) -> Callable[..., Any]:
    """Run a function of values on arrays; each array is an input of its dtype and shape."""

    def run(function: Callable[..., Any], *arrays: Array) -> Any:
        with rlx.Graph() as g:
            values = [
                g.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(map(np.asarray, arrays))
            ]
            found = function(*values)
            several: list[Any] = [*found] if isinstance(found, tuple) else [found]
            for i, value in enumerate(several):
                g.output(f"y{i}", value)
        with rlx.compile(g, device) as executable:
            results = list(
                executable.run({f"x{i}": np.asarray(a) for i, a in enumerate(arrays)}).values()
            )
        return results[0] if len(results) == 1 else results

    return run
